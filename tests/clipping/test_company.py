"""A gradient that depends on the other examples is refused, also where the loss does not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.ops import DropBlock2d

from sfumato.clipping.admit import admit
from sfumato.clipping.clip import GradientClipper
from sfumato.errors import UnsupportedLayer


class StraightThrough(nn.Module):
    """Values of a linear layer, and gradients as if they were multiplied by `scale(x)`."""

    def __init__(self, scale):
        super().__init__()
        self.layer, self.scale = nn.Linear(10, 2), scale

    def forward(self, x):
        out = self.layer(x)
        other = out * self.scale(x)
        return (out - other).detach() + other


class LearnedStep(nn.Module):
    """A quantizer whose step has a gradient scaled by the number of values, as in LSQ."""

    def __init__(self):
        super().__init__()
        self.layer, self.step = nn.Linear(10, 2), nn.Parameter(torch.tensor(0.1))

    def forward(self, x):
        scale = x.numel() ** -0.5
        step = (self.step - self.step * scale).detach() + self.step * scale
        x = x / step
        return self.layer(((x.round() - x).detach() + x) * step)


class Hooked(nn.Module):
    """A hook that divides gradients by the number of examples."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(10, 4), nn.Linear(4, 2)

    def forward(self, x):
        hidden = self.layer(x).tanh()
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient / len(gradient))
        return self.head(hidden)


def losses(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


def try_on(model, *shape):
    torch.manual_seed(0)
    x = torch.randn(3, *(shape or (10,)))
    admit(GradientClipper(model), losses, (x, torch.tensor([0, 1, 0])), 3)


def signs(x):
    return (1.0 - 2.0 * (torch.arange(len(x)) % 2))[:, None].to(x.dtype)


@pytest.mark.parametrize(
    "model",
    [
        StraightThrough(lambda x: x.detach().mean().sign()),
        StraightThrough(signs),
        StraightThrough(lambda x: 1 / len(x)),
        LearnedStep(),
        Hooked(),
    ],
    ids=["sign of the mean", "sign by place", "by the number", "learned step", "hook"],
)
@pytest.mark.parametrize("seed", range(3))
def test_gradients_that_look_at_the_others_are_refused(model, seed):
    torch.manual_seed(seed)
    with pytest.raises(UnsupportedLayer, match="other examples, on how many"):
        try_on(model)


def test_a_straight_through_estimator_of_one_example_is_admitted():
    try_on(StraightThrough(lambda x: x.detach().mean(dim=1, keepdim=True).sign() + 0.5))


class FunctionalDropout(nn.Module):
    """Divides by the number of examples while it trains, and has dropout without a module."""

    def __init__(self, divide=True):
        super().__init__()
        self.layer, self.head, self.divide = nn.Linear(10, 8), nn.Linear(8, 2), divide

    def forward(self, x):
        out = self.head(F.dropout(self.layer(x).tanh(), 0.1, self.training))
        return out / len(x) if self.training and self.divide else out


class Noisy(StraightThrough):
    """The same with noise of its own while it trains."""

    def forward(self, x):
        return super().forward(x + 0.01 * torch.randn_like(x) if self.training else x)


def test_a_model_with_noise_of_its_own_is_asked_in_evaluation_mode():
    with pytest.raises(UnsupportedLayer, match="other examples, on how many"):
        try_on(Noisy(lambda x: 1 / len(x)))
    try_on(Noisy(lambda x: 1.0))


class DropHead(nn.Linear):
    """A name with "drop", and a division while it trains."""

    def forward(self, x):
        return super().forward(x) / (len(x) if self.training else 1)


@pytest.mark.parametrize("model", [FunctionalDropout(), DropHead(10, 2)], ids=lambda m: type(m))
def test_what_is_done_only_in_training_mode_is_seen(model):
    with pytest.raises(UnsupportedLayer, match="how many"):
        try_on(model)


def test_functional_dropout_alone_is_admitted():
    try_on(FunctionalDropout(divide=False))


@pytest.mark.parametrize("kind", ["torchvision", "timm"])
def test_drop_block_is_refused(kind):
    from timm.layers import DropBlock2d as TimmDropBlock

    block = DropBlock2d(0.4, 3) if kind == "torchvision" else TimmDropBlock(0.4, 3)
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), block, nn.Flatten(), nn.Linear(256, 2)]
    with pytest.raises(UnsupportedLayer, match="DropBlock"):
        try_on(nn.Sequential(*layers), 3, 8, 8)
