"""Gradients through a frozen BatchNorm are right for one row, whatever comes after it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from oracle import norm_of
from people import portraits
from torch import nn

from sfumato.clipping.clip import GradientClipper
from sfumato.clipping.factors import Clipping
from sfumato.clipping.method_choice import MODES
from sfumato.engine import PrivacyEngine
from sfumato.models.normalise import freeze_batch_norm
from sfumato.models.zoo import build_model
from sfumato.privacy.sampling import Batch, Chunk
from sfumato.training.inputs import Inputs
from sfumato.training.plain_step import plain_step


class Tokens(nn.Module):
    """A convolution, a BatchNorm, and tokens: torch's own gradients are wrong for one row."""

    def __init__(self, classes=3):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm = nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4)
        self.mix, self.head = nn.Linear(4, 8), nn.Linear(8, classes)
        nn.init.normal_(self.norm.weight, 1.0, 0.3)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2.0)

    def maps(self, x):
        return self.stem(torch.cat([x, x.square(), x.cos()], dim=1))

    def forward(self, x):
        tokens = self.norm(self.maps(x)).flatten(2).transpose(1, 2)
        return self.head(self.mix(tokens.sin().mean(dim=1)))


def untrained(model):
    """The same with scale and shift that do not train."""
    model.norm.requires_grad_(False)
    return model


KINDS = {"trained": lambda: Tokens(), "untrained": lambda: untrained(Tokens())}


def loss_of(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


def wanted(model, x, y):
    """The gradient by arithmetic: BatchNorm is written out."""
    model = copy.deepcopy(model)
    norm, shape = model.norm, (1, -1, 1, 1)
    fixed = (norm.running_var + norm.eps).rsqrt() * norm.weight
    shift = norm.bias - norm.running_mean * fixed
    x = x.clone().requires_grad_()
    maps = model.maps(x) * fixed.reshape(shape) + shift.reshape(shape)
    tokens = maps.flatten(2).transpose(1, 2)
    out = model.head(model.mix(tokens.sin().mean(dim=1)))
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    loss = F.cross_entropy(out, y)
    found = torch.autograd.grad(loss, [x, *named.values()])
    return found[0], dict(zip(named, found[1:], strict=True))


def one_image():
    read = Inputs(portraits(), torch.device("cpu"), (0.5,), (0.5,), seed=3)
    batch = Batch(0, (Chunk(torch.tensor([5]), torch.ones(1, dtype=torch.bool)),))
    return read, batch, read.tensors(batch.chunks[0], 0)


def same(found, right):
    assert found.keys() == right.keys()
    for name, gradient in right.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_training_on_one_image_takes_the_right_gradient(kind):
    model = freeze_batch_norm(KINDS[kind]())
    read, batch, (x, y) = one_image()
    plain_step(model, read)(batch)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    same(found, wanted(model, x, y)[1])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_private_sum_of_one_example_is_its_clipped_gradient(kind, mode):
    model = KINDS[kind]()
    model.norm.eval()  # and not by freeze_batch_norm: a model from elsewhere
    _, _, (x, y) = one_image()
    right = wanted(model, x, y)[1]
    length = norm_of(right)
    found = GradientClipper(model, mode, clipping=Clipping(max_norm=length / 2)).clip(
        loss_of, (x, y), 1
    )
    assert float(found.norms[0]) == pytest.approx(length, rel=1e-4)
    assert norm_of(found.total) <= length / 2
    same({name: 2 * t for name, t in found.total.items()}, right)
    assert not model.norm._forward_hooks, "the model is as it was"


def test_the_engine_takes_the_right_gradient_of_one_example():
    model = untrained(Tokens())
    model.norm.eval()
    _, _, (x, y) = one_image()
    right = wanted(model, x, y)[1]
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in trained.items()}
    optimizer = torch.optim.SGD(trained.values(), lr=1.0)
    engine = PrivacyEngine(
        model, batch_size=1, sample_size=20, steps=1, max_grad_norm=1e6, noise_multiplier=0.0,
        target_delta=1e-2,
    )  # fmt: skip
    engine.attach(optimizer)
    with pytest.warns(UserWarning, match="Poisson"):
        optimizer.step(loss=loss_of(model, x, y))
    same({name: before[name] - p.detach() for name, p in trained.items()}, right)


@pytest.mark.parametrize("how", ["arithmetic", "differences"])
def test_an_attack_on_one_image_gets_the_gradient_of_its_pixels(how):
    model = build_model(f"{__name__}:Tokens", classes=3, shape=(1, 12, 12)).eval()
    _, _, (x, y) = one_image()
    x = x[:, :, :12, :12].clone().requires_grad_()
    (found,) = torch.autograd.grad(loss_of(model, x, y).sum(), x)
    if how == "arithmetic":
        torch.testing.assert_close(found, wanted(model, x.detach(), y)[0], rtol=1e-4, atol=1e-6)
        return
    exact, way = copy.deepcopy(model).double(), torch.randn(x.shape, dtype=torch.float64)
    with torch.no_grad():
        ahead, behind = (loss_of(exact, x.double() + s * 1e-5 * way, y) for s in (1, -1))
    assert float((found * way).sum()) == pytest.approx(float(ahead - behind) / 2e-5, rel=1e-3)


def test_a_guard_changes_no_output_and_is_compiled_and_copied_like_any_model():
    plain = Tokens().eval()
    model = freeze_batch_norm(freeze_batch_norm(Tokens())).eval()
    assert len(model.norm._forward_hooks) == 1
    x = torch.randn(1, 1, 12, 12)
    assert torch.equal(model(x), plain(x))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), plain(x))
    assert torch.equal(copy.deepcopy(model)(x), plain(x))
    each = torch.vmap(torch.func.grad(lambda x: model(x[None]).sum()))(torch.randn(3, 1, 12, 12))
    assert each.shape == (3, 1, 12, 12)
