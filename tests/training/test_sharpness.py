"""Steps taken uphill: against the formula by hand, and weights that come back to the bit."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from extensions import PRIVATE, batch_of, book, gradients, net
from oracle import norm_of
from teachers import PUBLIC
from torch import nn

from sfumato.clipping.clip import GradientClipper
from sfumato.data.augment import Augmentation
from sfumato.data.example_rng import seed_of
from sfumato.privacy.sampling import Batch
from sfumato.runs import Run
from sfumato.training.cuda_graph import WARM
from sfumato.training.hooks import with_hooks
from sfumato.training.plain import train_plainly
from sfumato.training.plain_step import plain_step
from sfumato.training.private_step import PrivacyContext, private_step
from sfumato.training.sharpness import (
    LastGradient,
    SharpnessStep,
    moved_parameters,
    of_length,
    sharp_step,
    trainable_parameters,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(some, others):
    return all(torch.equal(some[name], others[name]) for name in some)


def gradient_at(model, state, places):
    """The mean gradient with other weights, on a copy."""
    other = net()
    other.load_state_dict(state)
    plain_step(other, PUBLIC)(batch_of(places))
    return gradients(other)


def test_a_sharp_step_leaves_the_gradient_of_a_place_uphill():
    model, places = net(), [3, 9, 11, 40]
    before = weights(model)
    numbers = sharp_step(model, PUBLIC, 0.2)(batch_of(places))
    assert same(before, weights(model)), "to the bit"
    here = gradient_at(model, before, places)
    length = norm_of(here)
    uphill = {name: value + 0.2 * here[name] / length for name, value in before.items()}
    there = gradient_at(model, uphill, places)
    for name, part in gradients(model).items():
        torch.testing.assert_close(part, there[name])
        assert not torch.allclose(part, here[name], rtol=1e-3)
    assert numbers == plain_step(model, PUBLIC)(batch_of(places)), "the loss is that at w"


@pytest.mark.parametrize("device", DEVICES)
def test_an_open_step_stays_that_of_autograd_when_it_is_captured(device):
    """Several chunks, weights that move, a layer that no example reaches, chance that repeats."""
    device = torch.device(device)
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 20), nn.Dropout(0.3), nn.Linear(20, 3))
    model.register_parameter("spare", nn.Parameter(torch.ones(2)))
    model.to(device)
    inputs = replace(PUBLIC, images=PUBLIC.images.to(device), device=device)
    step = plain_step(model, inputs)
    for turn in range(WARM + 3):
        chunks = [batch_of(places, padding=1).chunks[0] for places in ([turn, 9], [11, 40, 41])]
        batch = Batch(turn, tuple(chunks))
        numbers = step(batch)
        found, loss = gradients(model), 0.0
        model.zero_grad()
        for place, chunk in enumerate(batch.chunks):
            tensors = inputs.tensors(chunk, turn)
            torch.manual_seed(seed_of(inputs.seed, turn, place))
            part = torch.where(chunk.mask.to(device), inputs.losses(model, *tensors), 0).sum() / 5
            part.backward()
            loss += float(part.detach())
            del part  # a graph that is still there ties parameters to the stream it was made on
        assert numbers["loss"] == pytest.approx(loss, rel=1e-4)
        for name, parameter in model.named_parameters():
            wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(found[name], wanted, rtol=1e-3, atol=1e-5)
            with torch.no_grad():
                parameter -= 0.1 * found[name]


@pytest.mark.parametrize("kind", [plain_step, partial(sharp_step, rho=0.1)])
def test_an_open_step_is_compiled_if_asked(kind, monkeypatch):
    asked, passes = [], []

    def compiler(model, **settings):
        asked.append(settings)
        made = nn.Sequential(model)
        made.register_forward_hook(lambda _, x, y: passes.append(len(y)))
        return made

    monkeypatch.setattr(torch, "compile", compiler)
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 3))
    kind(model, PUBLIC)(batch_of([0, 1]))
    assert not asked
    kind(model, PUBLIC, compiled=True)(batch_of([0, 1]))
    assert asked == [{"dynamic": False}], "each size has its own program"
    assert passes, "what was compiled is what is run"


def test_statistics_that_layers_keep_are_counted_once():
    nets = []
    for kind in (plain_step, lambda model, inputs: sharp_step(model, inputs, 0.1)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
        model.append(nn.Linear(400, 3))
        kind(model, PUBLIC)(batch_of([1, 2, 3]))
        nets.append(model)
    assert int(nets[1][1].num_batches_tracked) == 1
    assert same(dict(nets[0].named_buffers()), dict(nets[1].named_buffers()))


def test_weights_come_back_whatever_happens():
    model = net()
    before, named = weights(model), trainable_parameters(model)
    far = {name: 1e20 * torch.randn_like(p) for name, p in named.items()}

    def fail():
        with moved_parameters(named, far):
            assert not same(before, weights(model))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert same(before, weights(model))


@pytest.mark.parametrize("size", [0.0, 1e-30, 1.0])
def test_a_direction_has_the_length_asked_for_or_none(size):
    parts = {"a": size * torch.randn(4, 3), "b": size * torch.randn(7)}
    assert norm_of(of_length(0.3, parts)) == pytest.approx(0.3 if size == 1 else 0.0)


def test_a_private_step_goes_uphill_along_the_gradient_before():
    model, rho = net(), 0.5
    plain, other = (
        private_step(GradientClipper(model), PRIVATE, PrivacyContext(*book(noise=0.1)))
        for _ in range(2)
    )
    last = LastGradient(model)
    step = with_hooks(other, [SharpnessStep(model, last, rho)])
    before = weights(model)
    step(batch_of([1, 2, 3], step=0))
    last.keep(model)
    first = gradients(model)
    plain(batch_of([1, 2, 3], step=0))
    assert same(first, gradients(model)), "there is nothing before the first"
    step(batch_of([4, 5], step=1))
    second = gradients(model)
    assert same(before, weights(model))
    assert same(first, last.gradient), "only a step that is taken is remembered"
    with torch.no_grad():
        for name, p in model.named_parameters():
            p += rho * first[name] / norm_of(first)
    plain(batch_of([4, 5], step=1))
    for name, part in gradients(model).items():
        torch.testing.assert_close(second[name], part)


def test_a_lost_step_leaves_the_memory_as_it_was():
    model = net()
    last = LastGradient(model)
    for part in last.gradient.values():
        part.fill_(2.0)
    last.keep(model)
    assert all(bool((part == 2).all()) for part in last.gradient.values())


class Cut(Exception):
    pass


def test_sharp_training_that_was_cut_ends_with_the_same_weights(tmp_path):
    inputs = replace(PUBLIC, augmentation=Augmentation(crop=2, cutout=4), seed=3)

    def train(path, cut_at=None):
        torch.manual_seed(0)
        layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten()
        model = nn.Sequential(*layers, nn.Linear(400, 3))
        sharp = sharp_step(model, inputs, 0.05)

        def step(batch):
            if batch.step == cut_at:
                raise Cut
            return sharp(batch)

        path.mkdir(exist_ok=True)
        train_plainly(model, 50, step, Run(path), epochs=2, lr=0.01, batch_size=10)
        return weights(model)

    whole = train(tmp_path / "whole")
    with pytest.raises(Cut):
        train(tmp_path / "cut", cut_at=6)
    assert same(whole, train(tmp_path / "cut"))
