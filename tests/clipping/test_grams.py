"""The quick ways to norms and gradients of convolutions, against the plain one by columns."""

import math

import pytest
import torch
import torch.nn.functional as F
from oracle import compare, norm_of, norms_of
from torch import nn

from sfumato.clipping import gpu_kernels, grams, layer_algebra
from sfumato.clipping.admit import one_at_a_time
from sfumato.clipping.clip import GradientClipper
from sfumato.clipping.factors import Clipping
from sfumato.clipping.geometry import WeightGeometry
from sfumato.models.wrn import StandardisedConv2d, WideResNet

# channels, outputs, size, kernel, stride, padding, dilation, groups
CONVOLUTIONS = {
    "3x3": (4, 6, (7, 6), (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "1x1": (4, 6, (7, 6), (1, 1), (1, 1), (0, 0), (1, 1), 1),
    "1x1 padded": (4, 6, (3, 4), (1, 1), (1, 1), (2, 1), (1, 1), 1),
    "5x2, strides": (4, 6, (9, 8), (5, 2), (2, 3), (2, 0), (1, 1), 1),
    "dilated, grouped": (4, 6, (9, 8), (3, 2), (1, 2), (2, 1), (2, 3), 2),
    "wider than the image": (4, 6, (1, 2), (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "padded far": (4, 6, (2, 2), (3, 3), (2, 2), (4, 4), (1, 1), 1),
    "1-D": (3, 5, (9,), (4,), (2,), (3,), (1,), 1),
    "3-D": (2, 3, (4, 3, 5), (2, 3, 1), (1, 2, 1), (1, 1, 0), (1, 1, 1), 1),
}


def layer(case, n=3):
    torch.manual_seed(0)
    channels, outputs, size, kernel, stride, padding, dilation, groups = CONVOLUTIONS[case]
    geometry = WeightGeometry(stride, padding, dilation, False, (0,) * len(size), groups)
    x = torch.randn(n, channels, *size, dtype=torch.float64)
    weight = torch.randn(outputs, channels // groups, *kernel, dtype=torch.float64)
    g = torch.randn(layer_algebra.output_shape(x, weight, geometry), dtype=torch.float64)
    return x, g, weight, geometry, n


def by_columns(x, g, weight, geometry, n):
    return layer_algebra.per_example_gradient(*layer_algebra.columns(x, g, weight, geometry, n))


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_sliding_the_gram_of_pixels_gives_the_norm(case, monkeypatch):
    monkeypatch.setattr(grams, "gram_of_rows_is_cheaper", lambda *_: True)
    expected = by_columns(*layer(case)).flatten(1).square().sum(dim=1)
    torch.testing.assert_close(grams.ghost_norm(*layer(case))[0], expected)


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_a_grouped_convolution_forms_the_same_gradients(case, monkeypatch):
    monkeypatch.setattr(layer_algebra, "COLUMNS", 0)
    x, g, weight, geometry, n = layer(case)
    expected = by_columns(x, g, weight, geometry, n).reshape(n, *weight.shape)
    torch.testing.assert_close(
        layer_algebra.per_example_gradients(x, g, weight, geometry, n), expected
    )


def loss_of(model, x):
    out = model(x).flatten(1)
    return (out.sin() * torch.linspace(-1, 2, out.shape[1], dtype=out.dtype)).sum(dim=1)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("mode", ["ghost_mixed", "ghost", "non-ghost"])
def test_standardised_weights_are_exact_whoever_overwrites_their_output(mode, inplace):
    torch.manual_seed(0)
    layers = [StandardisedConv2d(4, 6, 3, padding=1), nn.ReLU(inplace), nn.Conv2d(6, 3, 3)]
    model, x = nn.Sequential(*layers).double(), torch.randn(5, 4, 7, 6, dtype=torch.float64)
    clipper, _ = compare(model, x, 5, loss_of, mode=mode)
    ((first, *_),) = clipper.layouts.values()
    assert first.output_lost == inplace
    assert mode != "ghost" or first.method == ("store" if inplace else "ghost")


def test_standardised_weights_in_bf16_stay_within_the_bound():
    # The output is rounded to 8 bits there; a norm less what it says would be too small.
    torch.manual_seed(0)
    model, x = StandardisedConv2d(4, 6, 3, padding=1), torch.randn(5, 4, 7, 6)

    def loss(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        return (out.float() * out.detach().float()).sum(dim=(1, 2, 3))

    for i in range(5):
        clipper = GradientClipper(model, "ghost", clipping=Clipping(max_norm=0.1))
        total = clipper.clip(loss, (x[i : i + 1],), 1).total
        assert norm_of(total) <= 0.1


def test_standardised_weights_leave_room_for_the_rounding_of_a_later_precision(monkeypatch):
    # The way of a layer is chosen at the first batch; the next one may be in bf16, on a GPU.
    torch.manual_seed(0)
    model, x = StandardisedConv2d(4, 6, 3, padding=1, bias=False), torch.randn(5, 4, 7, 6)
    clipper = GradientClipper(model, "ghost", clipping=Clipping(max_norm=0.1))
    clipper.clip(loss_of, (x,), 5)
    monkeypatch.setattr(gpu_kernels, "rounding", lambda _: 2.0**-8)
    found = clipper.clip(loss_of, (x,), 5)
    assert [part.method for (part, *_) in clipper.layouts.values()] == ["ghost"]
    assert (found.factors[0] * found.norms <= 0.1 / (1 + 2.0**-8)).all()


def test_standardised_layers_are_clipped_each_on_its_own():
    torch.manual_seed(0)
    model = nn.Sequential(StandardisedConv2d(4, 6, 3, bias=False), StandardisedConv2d(6, 5, 3))
    clipping = Clipping(max_norm=1e-3, per_layer=True)
    x = torch.randn(1, 4, 7, 6)
    total = GradientClipper(model, "ghost", clipping=clipping).clip(loss_of, (x,), 1).total
    norm = float(total["0.weight"].norm())
    assert norm == pytest.approx(1e-3 / math.sqrt(2), rel=1e-4)


def test_a_wide_residual_network_in_float32_is_exact():
    torch.manual_seed(0)
    model = WideResNet(10, depth=10, width=2)
    x, y = torch.randn(4, 3, 16, 16), torch.arange(4)

    def loss(model, x, y):
        return F.cross_entropy(model(x), y, reduction="none")

    rows = one_at_a_time(model, loss, (x, y))
    norms = norms_of(rows)
    clipper = GradientClipper(model)
    clipped = clipper.clip(loss, (x, y), 4)
    torch.testing.assert_close(clipped.norms, norms, rtol=1e-5, atol=1e-6)
    (parts,) = clipper.layouts.values()
    ghostly = {part.method for part in parts if part.standardised is not None}
    assert ghostly == {"store", "ghost"}
    for name in rows[0]:
        wanted = sum(f * row[name] for f, row in zip(clipped.factors[0], rows, strict=True))
        torch.testing.assert_close(clipped.total[name], wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", ["ghost_mixed", "ghost", "non-ghost"])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_standardised_rows_far_from_zero_stay_within_the_bound(mode, offset):
    model = nn.Sequential(StandardisedConv2d(16, 24, 3, padding=1))
    model[0].weight.data.mul_(1e-4 / model[0].weight.data.std()).add_(5.0)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 16, 4, 4, generator=generator) + offset
    towards = torch.randn(3, 24, 4, 4, generator=generator)
    clipper = GradientClipper(model, mode, clipping=Clipping(max_norm=1e-3))

    def loss(model, x, towards):
        return (model(x) * towards).flatten(1).sum(dim=1)

    for i in range(3):
        total = clipper.clip(loss, (x, towards), 3, torch.arange(3) == i).total
        assert norm_of(total) <= 1e-3 * (1 + 1e-6)
