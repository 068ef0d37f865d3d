"""GroupNorm of ordinary training by our kernels, against torch's in float64."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from extensions import batch_of
from teachers import PUBLIC
from torch import nn

pytest.importorskip("triton", reason="Triton is for Linux")

from sfumato.clipping import normalisation_functions
from sfumato.clipping.kernels import group_norm_forward
from sfumato.clipping.plain_group_norm import QuickGroupNorm
from sfumato.training.plain_step import plain_step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def used(monkeypatch):
    """Kernels in the interpreter too, and exact convolutions; the types of what they read."""
    found, real = [], group_norm_forward.group_norm_forward

    def spy(x, *others):
        found.append(x.dtype)
        return real(x, *others)

    monkeypatch.setattr(group_norm_forward, "group_norm_forward", spy)
    monkeypatch.setattr(
        normalisation_functions, "has_kernel", lambda x: x.dtype in normalisation_functions.NARROW
    )
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    return found


def network():
    """A norm without scale and shift, one whose result is changed in place, and a frozen one."""
    layers = [
        nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8, eps=0.3), nn.ReLU(inplace=True), nn.Conv2d(8, 6, 3),
        nn.GroupNorm(2, 6, affine=False), nn.Tanh(), nn.GroupNorm(3, 6).requires_grad_(False),
        nn.Flatten(), nn.Linear(54, 4),
    ]  # fmt: skip
    return nn.Sequential(*layers).to(DEVICE, memory_format=torch.channels_last)


def images():
    x = torch.randn(5, 3, 7, 7, device=DEVICE)
    return x.contiguous(memory_format=torch.channels_last).requires_grad_()


def gradients(model, x, dtype=None):
    with torch.autocast(DEVICE, dtype or torch.bfloat16, enabled=dtype is not None):
        loss = model(x).square().sum()
    return torch.autograd.grad(loss, [x, *(p for p in model.parameters() if p.requires_grad)])


def test_ordinary_gradients_are_those_of_torch(used):
    model, x = network(), images()
    exact = network().double()
    exact.load_state_dict(model.state_dict())
    with QuickGroupNorm():
        found = gradients(model, x)
    assert len(used) == 3
    wanted = gradients(exact, x.detach().double().requires_grad_())
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert (one - other).norm() <= 1e-5 * other.norm() + 1e-6


def test_under_autocast_the_rounded_maps_are_read_as_they_are(used):
    model, x = network(), images()
    wanted = gradients(model, x, torch.bfloat16)
    assert not used, "outside of it nothing changes"
    with QuickGroupNorm():
        found = gradients(model, x, torch.bfloat16)
    # The third comes after a float32 norm, which no layer rounds.
    assert used == [torch.bfloat16, torch.bfloat16, torch.float32]
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() <= 2e-2 * other.norm()


@pytest.mark.gpu
def test_a_plain_step_of_training_has_them(used):
    images = replace(PUBLIC.images, pixels=PUBLIC.images.pixels.cuda())
    inputs = replace(PUBLIC, images=images, device=torch.device("cuda"))
    layers = [nn.Conv2d(1, 8, 3), nn.GroupNorm(4, 8), nn.Flatten(), nn.Linear(800, 3)]
    model = nn.Sequential(*layers).to("cuda", memory_format=torch.channels_last)
    plain_step(model, inputs)(batch_of([0, 1, 2]))
    assert used == [torch.float32]


def test_maps_with_another_layout_are_left_to_torch(used):
    x = torch.randn(2, 6, 5, 4, device=DEVICE)
    weight = torch.randn(6, device=DEVICE)
    with QuickGroupNorm():
        found = F.group_norm(x, 3, weight=weight, eps=0.1)
    assert not used
    assert torch.equal(found, F.group_norm(x, 3, weight, None, 0.1))
