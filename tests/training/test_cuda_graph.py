"""Work that is captured: the same as when it is done, on a GPU; the work itself elsewhere."""

import pytest
import torch

from sfumato.data.example_rng import seed_of
from sfumato.training.cuda_graph import CAPTURES, WARM, Captured, Replay

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def walk(device, seeds, through):
    """A few steps of Adam towards random points."""
    x = torch.zeros(5, device=device, requires_grad=True)
    adam = torch.optim.Adam([x], lr=0.1, capturable=device == "cuda")

    def step(generator):
        adam.zero_grad()
        goal = torch.randn(5, generator=generator, device=device)
        (x - goal).square().sum().backward()
        adam.step()

    work = through(step)
    for seed in seeds:
        work(seed, 7)
    return x.detach().cpu()


def by_hand(device):
    def through(step):
        return lambda *seed: step(torch.Generator(device).manual_seed(seed_of(*seed)))

    return through


@pytest.mark.parametrize("device", DEVICES)
def test_a_replay_does_what_the_work_does_with_the_chance_of_each_seed(device):
    seeds = [*range(WARM + 4), 3, 3]
    found = walk(device, seeds, lambda step: Replay(step, torch.device(device)))
    torch.testing.assert_close(found, walk(device, seeds, by_hand(device)))
    other = walk(device, [*seeds[:-1], 4], by_hand(device))
    assert not torch.allclose(found, other)


@pytest.mark.parametrize("device", DEVICES)
def test_a_captured_function_is_the_function_for_each_shape_and_name(device):
    factor = torch.ones((), device=device)
    double = Captured(lambda x, y: (factor * x + y, x.sum()), torch.device(device))
    for turn in range(2 * WARM + 4):
        factor += 1
        x = torch.arange(4.0 + turn % 2, device=device) + turn
        total, whole = double("name", x, x + 1)
        torch.testing.assert_close(total, factor * x + x + 1)
        torch.testing.assert_close(whole, x.sum())


@pytest.mark.gpu
def test_of_many_captures_those_go_that_were_not_used_for_longest():
    device = torch.device("cuda")
    double = Captured(lambda x: 2 * x, device)
    for name in range(CAPTURES + 2):
        for turn in range(WARM + 3):
            x = torch.arange(4.0, device=device) + name + turn
            torch.testing.assert_close(double(name, x), 2 * x)
        torch.testing.assert_close(double(0, x), 2 * x)
    assert [key[0] for key in double.captures] == [*range(3, CAPTURES + 2), 0]


@pytest.mark.gpu
def test_what_waits_for_the_gpu_is_not_captured_but_done():
    waits = Captured(lambda x: x * float(x.sum()), torch.device("cuda"))
    x = torch.ones(3, device="cuda")
    for turn in range(WARM + 3):
        if turn == WARM:
            with pytest.warns(UserWarning, match="cannot be captured"):
                found = waits("name", x)
        else:
            found = waits("name", x)
        torch.testing.assert_close(found, 3 * x)
    # Nothing is left of the attempt: neither its stream, nor chance that waits for its end.
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.manual_seed(0)
    first = torch.randn(3, device="cuda")
    torch.manual_seed(0)
    assert torch.equal(first, torch.randn(3, device="cuda"))
