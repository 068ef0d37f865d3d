"""What one unit more can change: the number that every guarantee rests on."""

from dataclasses import replace

import pytest
import torch
from oracle import norm_of
from people import portraits
from torch import nn

from sfumato.clipping.admit import admit
from sfumato.clipping.clip import GradientClipper
from sfumato.clipping.factors import Clipping
from sfumato.data.augment import Augmentation
from sfumato.data.people import People
from sfumato.errors import PrivacyError
from sfumato.privacy.budget import Plan
from sfumato.privacy.ledger import Ledger, LedgerHeader
from sfumato.privacy.sampling import Batch, Chunk
from sfumato.privacy.session_key import SessionKey
from sfumato.training import private_step as steps
from sfumato.training.inputs import Inputs
from sfumato.training.private_step import PrivacyContext, private_step

MOVING = Augmentation(crop=3, flip=True, cutout=4, colour=0.3, affine=0.2)


def inputs(**changes):
    plain = Inputs(portraits(), torch.device("cpu"), (0.5,), (0.5,), seed=3)
    return replace(plain, **changes)


CASES = {
    "views": lambda: inputs(augmentation=MOVING, views=3),
    "people": lambda: inputs(people=People(portraits().people, 2)),
    "people and views": lambda: inputs(
        people=People(portraits().people, 3), augmentation=MOVING, views=2
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_who_joins_a_batch_moves_the_sum_by_no_more_than_the_bound(case):
    read = CASES[case]()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(400, 3))
    clipper = GradientClipper(model, clipping=Clipping(max_norm=1e-2))

    def total(units):
        chunk = Chunk(torch.tensor(units), torch.ones(len(units), dtype=torch.bool))
        return clipper.clip(read.losses, read.tensors(chunk, step=5), len(units)).total

    everybody = list(range(12))
    with_them = total(everybody)
    for one in (0, 6, 11):
        without = total([unit for unit in everybody if unit != one])
        moved = norm_of({name: with_them[name] - without[name] for name in without})
        assert 0.005 < moved <= 0.01 * (1 + 1e-4)


@pytest.mark.parametrize("case", CASES)
def test_a_unit_looks_the_same_wherever_it_stands(case):
    read = CASES[case]()
    every = torch.ones(12, dtype=torch.bool)
    together, _ = read.tensors(Chunk(torch.arange(12), every), step=2)
    alone, _ = read.tensors(Chunk(torch.tensor([7]), every[:1]), step=2)
    torch.testing.assert_close(alone, together.unflatten(0, (12, -1))[7])
    later, _ = read.tensors(Chunk(torch.tensor([7]), every[:1]), step=3)
    assert not torch.equal(alone, later)


def test_a_step_releases_its_own_batch_and_nothing_of_the_ones_before():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(400, 3))
    model = model.to(memory_format=torch.channels_last)
    clipper = GradientClipper(model, clipping=Clipping(max_norm=0.1))
    plan = Plan(noise_multiplier=0.0, expected_batch=12.0, steps=4, max_norm=0.1)
    secret = SessionKey.from_seed(0)
    header = LedgerHeader(data="d", delta=1e-5, fixed_seed=True, secret=secret.commitment)
    step = private_step(clipper, inputs(), PrivacyContext(plan, Ledger(header), secret))
    for number, parts in enumerate([[[0, 1, 2], [5, 6]], [], [[7]], [[0, 1, 2], [5, 6]]]):
        chunks = tuple(
            Chunk(torch.tensor(part), torch.ones(len(part), dtype=torch.bool)) for part in parts
        )
        step(Batch(number, chunks))
        tensors = [inputs().tensors(chunk, step=number) for chunk in chunks]
        for name, parameter in model.named_parameters():
            sums = (clipper.clip(inputs().losses, x, len(x[0])).total[name] for x in tensors)
            wanted = sum(sums, torch.zeros_like(parameter)) / 12
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-5, atol=1e-7)
            assert parameter.grad.stride() == parameter.stride(), "optimizers ask for that"


def test_an_example_that_is_not_finite_is_left_out_of_a_step_and_spoils_nothing(monkeypatch):
    class Odd(nn.Module):
        """Image 1 is divided by zero."""

        def __init__(self):
            super().__init__()
            self.last = nn.Linear(144, 3)

        def forward(self, x):
            one = read.tensors(Chunk(torch.tensor([1]), torch.ones(1, dtype=torch.bool)), 0)[0]
            return self.last(x.flatten(1) / (x.flatten(1) != one.flatten(1)).any(dim=1)[:, None])

    monkeypatch.setattr(steps, "contributions_due", lambda _: False)
    torch.manual_seed(0)
    read, model, told, careful = inputs(), Odd(), [], []
    clipper = GradientClipper(model, clipping=Clipping(max_norm=0.1))
    plan = Plan(noise_multiplier=0.0, expected_batch=5.0, steps=4, max_norm=0.1)
    secret = SessionKey.from_seed(0)
    header = LedgerHeader(data="d", delta=1e-5, fixed_seed=True, secret=secret.commitment)

    def clip(*given, tell):
        told.append(len(given[-1]))
        return whole(*given, tell=tell)

    def with_care(*given):
        careful.append(len(given[-1]))
        return whole(*given)

    step = private_step(clipper, read, PrivacyContext(plan, Ledger(header), secret), clip=clip)
    whole, clipper.clip = clipper.clip, with_care
    found = []
    for number, there in enumerate((True, False)):
        masks = (torch.tensor([True, there, True]), torch.tensor([True, True]))
        chunks = map(Chunk, (torch.tensor([0, 1 if there else 0, 2]), torch.tensor([5, 6])), masks)
        numbers = step(Batch(number, tuple(chunks)))
        assert numbers["batch"] == 4 + there
        found.append([parameter.grad for parameter in model.parameters()])
    assert told == [3, 2, 3, 2]
    assert careful == [3, 2]
    for one, other in zip(*found, strict=True):
        assert other.any()
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("views", [1, 2])
def test_a_model_that_mixes_the_examples_of_larger_batches_is_refused_at_the_first_step(views):
    class Turning(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(144, 3)

        def forward(self, x):
            x = x.flatten(1)
            return self.last(x + x.roll(views, 0) if len(x) > 8 * views else x)

    read = inputs(views=views)
    clipper = GradientClipper(Turning(), clipping=Clipping(max_norm=0.1))
    secret = SessionKey.draw()
    book = Ledger(LedgerHeader(data="d", delta=1e-5, secret=secret.commitment))
    plan = Plan(noise_multiplier=1.0, expected_batch=12.0, steps=4)
    step = private_step(clipper, read, PrivacyContext(plan, book, secret))
    admit(clipper, read.losses, read.trial(), 3)
    with pytest.raises(PrivacyError, match="depends on"):
        step(Batch(0, (Chunk(torch.arange(12), torch.ones(12, dtype=torch.bool)),)))
    assert not book.releases


def test_a_gradient_that_is_kept_never_shows_the_exact_sums_of_a_later_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 3))
    clipper = GradientClipper(model, clipping=Clipping(max_norm=1.0))
    plan = Plan(noise_multiplier=1.0, expected_batch=12.0, steps=4)
    secret = SessionKey.draw()
    book = Ledger(LedgerHeader(data="d", delta=1e-5, secret=secret.commitment))
    left = iter(range(2))

    def clip(*given, **how):
        if next(left, None) is None:
            raise MemoryError("the second part of the second batch")
        return clipper.clip(*given, **how)

    step = private_step(clipper, inputs(), PrivacyContext(plan, book, secret), clip=clip)
    parts = tuple(Chunk(torch.tensor([n]), torch.ones(1, dtype=torch.bool)) for n in range(3))
    step(Batch(0, parts[:1]))
    kept = {name: parameter.grad for name, parameter in model.named_parameters()}
    released = {name: gradient.clone() for name, gradient in kept.items()}
    with pytest.raises(MemoryError):
        step(Batch(1, parts[1:]))
    for name, parameter in model.named_parameters():
        assert torch.equal(kept[name], released[name])
        assert torch.equal(parameter.grad, released[name])


def test_views_come_from_the_secret_and_not_from_a_seed_that_is_public():
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 3))
    clipper = GradientClipper(model, clipping=Clipping(max_norm=1.0))
    plan = Plan(noise_multiplier=0.0, expected_batch=12.0)
    batch = Batch(0, (Chunk(torch.arange(12), torch.ones(12, dtype=torch.bool)),))

    def gradient(public, private):
        secret = SessionKey.from_seed(private)
        header = LedgerHeader(data="d", delta=1e-5, fixed_seed=True, secret=secret.commitment)
        read = inputs(augmentation=MOVING, seed=public)
        private_step(clipper, read, PrivacyContext(plan, Ledger(header), secret))(batch)
        return model[1].weight.grad.clone()

    assert torch.equal(gradient(1, 1), gradient(2, 1))
    assert not torch.allclose(gradient(1, 1), gradient(1, 2))
