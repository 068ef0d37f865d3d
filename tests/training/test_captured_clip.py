"""Clipping as a training loop does it: captured on a GPU, and careful where it must be."""

import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from people import portraits
from torch import nn

from sfumato.clipping.clip import GradientClipper
from sfumato.clipping.factors import Clipping
from sfumato.training import captured_clip
from sfumato.training.captured_clip import captured, ignore_message
from sfumato.training.cuda_graph import WARM, Captured
from sfumato.training.inputs import Inputs

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """Products in float32: TF32 would be a difference of its own wherever another program runs."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def context(device, dropout=0.0):
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Dropout(dropout), nn.Flatten(),
        nn.Linear(400, 3),
    ]  # fmt: skip
    model = nn.Sequential(*layers).to(device)
    inputs = Inputs(portraits(), torch.device(device), (0.5,), (0.5,), seed=3)
    return model, GradientClipper(model, clipping=Clipping(max_norm=1e-2)), inputs


def same(found, wanted):
    torch.testing.assert_close(found.norms, wanted.norms, rtol=1e-5, atol=0)
    torch.testing.assert_close(found.factors, wanted.factors, rtol=1e-5, atol=0)
    for name, total in wanted.total.items():
        torch.testing.assert_close(found.total[name], total, rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize("device", DEVICES)
def test_each_call_clips_what_it_is_given_with_the_parameters_there_are(device):
    model, clipper, inputs = context(device)
    clip = captured(clipper, clipper.clip, inputs)
    mask = torch.tensor([True, True, False, True], device=device)
    for turn in range(WARM + 3):
        x, y = inputs.trial(4)
        tensors = (x * (1 + turn), y)
        found = clip(inputs.losses, tensors, 4, mask)
        same(found, clipper.clip(inputs.losses, tensors, 4, mask))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 1.1


@pytest.mark.parametrize("device", DEVICES)
def test_another_bound_is_not_that_of_a_capture(device):
    _, clipper, inputs = context(device)
    clip, mask = (
        captured(clipper, clipper.clip, inputs),
        torch.ones(4, dtype=torch.bool).to(device),
    )
    for turn in range(3 * (WARM + 2)):
        clipper.clipping = Clipping(max_norm=1e-2 * (1 + turn % 3))
        found = clip(inputs.losses, inputs.trial(4), 4, mask)
        same(found, clipper.clip(inputs.losses, inputs.trial(4), 4, mask))


def test_captures_are_kept_apart_by_norm_bound_and_mode_where_there_is_no_gpu_too(monkeypatch):
    keys = []

    class Remembered(Captured):
        def __call__(self, key, *given):
            keys.append(key)
            return super().__call__(key, *given)

    monkeypatch.setattr(captured_clip, "Captured", Remembered)
    model, clipper, inputs = context("cpu")
    clip, mask = captured(clipper, clipper.clip, inputs), torch.ones(4, dtype=torch.bool)
    for bound, mode in ((1e-2, True), (2e-2, True), (2e-2, False), (1e-2, True)):
        clipper.clipping = Clipping(max_norm=bound)
        model.train(mode)
        clip(inputs.losses, inputs.trial(4), 4, mask)
    assert len(set(keys)) == 3
    assert keys[0] == keys[3]


@pytest.mark.parametrize("device", DEVICES)
def test_an_example_that_is_not_finite_adds_nothing_and_spoils_nothing(device):
    _, clipper, inputs = context(device)
    clip, mask = (
        captured(clipper, clipper.clip, inputs),
        torch.ones(4, dtype=torch.bool).to(device),
    )
    for turn in range(WARM + 3):
        x, y = inputs.trial(4)
        if turn % 2:
            x[2] = torch.inf
        spoilt = clip(inputs.losses, (x, y), 4, mask, tell=ignore_message)
        assert bool(spoilt.norms.isfinite().all()) == (turn % 2 == 0), "callers look at the norms"
        found = clip(inputs.losses, (x, y), 4, mask)
        assert all(total.isfinite().all() for total in found.total.values())
        kept = mask if turn % 2 == 0 else torch.tensor([True, True, False, True]).to(device)
        calm = torch.where(x.isfinite(), x, 0.0)
        wanted = clipper.clip(inputs.losses, (calm, y), 4, kept)
        for name, total in wanted.total.items():
            torch.testing.assert_close(found.total[name], total, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_in_a_capture_follows_the_seed_of_torch(device):
    _, clipper, inputs = context(device, dropout=0.5)
    clip, mask = (
        captured(clipper, clipper.clip, inputs),
        torch.ones(4, dtype=torch.bool).to(device),
    )

    def clipped(seed):
        torch.manual_seed(seed)
        return deepcopy(clip(inputs.losses, inputs.trial(4), 4, mask))

    for turn in range(WARM + 1):
        clipped(turn)
    first, other, again = clipped(7), clipped(8), clipped(7)
    same(again, first)
    assert all((other.norms / first.norms - 1).abs() > 1e-3)
    for name, total in first.total.items():
        assert (other.total[name] - total).norm() > 0.01 * total.norm(), name


@pytest.mark.gpu
def test_what_is_compiled_is_captured_too():
    # In a process of its own: the run-time type checks of the tests would be traced along.
    script = Path(__file__).with_name("captured_compiled.py")
    done = subprocess.run([sys.executable, str(script), "cuda"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_without_care_such_an_example_shows():
    _, clipper, inputs = context("cpu")
    x, y = inputs.trial(4)
    x[1] = torch.nan
    found = clipper.clip(inputs.losses, (x, y), 4, tell=ignore_message)
    assert found.norms.isfinite().tolist() == [True, False, True, True]
    assert not all(total.isfinite().all() for total in found.total.values())
