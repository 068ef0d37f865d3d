"""Where the gradients of an example's positions cancel, rounding must not pass for a small norm.

Inputs that hardly vary (blank scans) and output gradients of opposite sign leave a small difference
of large numbers. All that an example adds must stay within the bound, as added up in float32.
"""

import pytest
import torch
import torch.nn.functional as F
from oracle import norm_of
from samples import sampled
from torch import nn

from sfumato.clipping import arithmetic, grams, lookups
from sfumato.clipping.clip import GradientClipper
from sfumato.clipping.factors import Clipping
from sfumato.clipping.geometry import LINEAR
from sfumato.clipping.method_choice import MODES
from sfumato.models.wrn import StandardisedConv2d


def greys(*levels, shape=(3, 32, 32)):
    return torch.stack([torch.full(shape, (level / 255 - 0.5) / 0.25) for level in levels])


def added(model, loss_fn, inputs, examples, bound, mode="ghost"):
    """What one example adds, in bounds."""
    clipped = GradientClipper(model, mode, clipping=Clipping(max_norm=bound)).clip(
        loss_fn, inputs, examples
    )
    return norm_of(clipped.total) / bound


@sampled(side=[16, 32, 96, 224], bound=[0.1, 1.0], mode=["ghost_mixed", "ghost"])
def test_a_person_with_two_blank_scans_of_two_labels(side, bound, mode):
    model = nn.Sequential(nn.Flatten(), nn.Linear(side * side * 3, 2))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)

    def loss(model, x, y):
        return F.cross_entropy(model(x), y, reduction="none").reshape(-1, 2).mean(dim=1)

    found = []
    for level in range(150, 210, 4):
        x = greys(level, level + 3, shape=(3, side, side))
        found.append(added(model, loss, (x, torch.tensor([0, 1])), 1, bound, mode))
    assert max(found) <= 1
    assert min(found) > 0.4, "and little is lost for it"


LAYERS = {
    "linear, 192": lambda: nn.Linear(192, 4),
    "linear, 768": lambda: nn.Linear(768, 4),
    "linear, 25,088": lambda: nn.Linear(25_088, 4),
    "convolution": lambda: nn.Conv2d(3072, 4, 1),
    "standardised convolution": lambda: StandardisedConv2d(768, 16, 1),
}


@sampled(kind=LAYERS, left=[1e-3, 1e-2], positions=[2, 4])
def test_positions_that_nearly_cancel_stay_within_the_bound(kind, left, positions):
    """Each position has its own grey; together their gradients leave little of one of them."""
    layer = LAYERS[kind]()
    depth = layer.weight[0].numel()
    worst = 0.0
    for seed in range(12):
        rng = torch.Generator().manual_seed(seed)
        grey = 0.2 + 2 * torch.rand(positions, generator=rng)
        share = torch.randn(positions, generator=rng)
        share[-1] = -(share[:-1] * grey[:-1]).sum() / grey[-1] * (1 - left)
        x = grey[:, None].expand(positions, depth)[None]
        if isinstance(layer, nn.Conv2d):
            x, weights = x.mT[..., None], share[:, None]
        else:
            weights = share[:, None].expand(positions, 4)

        def loss(layer, x, weights=weights):
            return (layer(x) * weights).flatten(1).sum(dim=1)

        worst = max(worst, added(layer, loss, (x.contiguous(),), 1, bound=1e-6 * depth**0.5))
    assert worst <= 1


@pytest.mark.parametrize("mode", ["ghost_mixed", "ghost"])
def test_a_bias_far_above_the_inputs_of_standardised_weights(mode):
    """An output is rounded by a part of its bias, and what the inputs add is hardly more."""
    torch.manual_seed(5)
    layer = StandardisedConv2d(64, 64, 3, padding=1)
    assert layer.bias is not None
    nn.init.ones_(layer.bias)
    x, rows, size = 1e-6 * torch.randn(1, 64, 2, 2), torch.zeros(1, 64, 2, 2), torch.randn(64)
    rows[0, :, 0, 1], rows[0, :, 1, 0] = 1e12 * size, -1e12 * size

    def loss(layer, x):
        return (layer(x) * rows).flatten(1).sum(dim=1)

    assert added(layer, loss, (x,), 1, bound=1.0, mode=mode) <= 1


def test_long_kernels_along_one_axis():
    """The Gram matrix is slid along thousands of shifts: each adds what one float32 loses."""
    layer = nn.Conv1d(1, 1, 2001, padding=1000, bias=False)
    x, rows = torch.full((1, 1, 1000), (0.98 * 2.0**-24) ** 0.5), torch.zeros(1, 1, 1000)
    x[..., 0], rows[..., 0] = 1.0, 1e3

    def loss(layer, x):
        return (layer(x) * rows).flatten(1).sum(dim=1)

    assert added(layer, loss, (x,), 1, bound=1.0) <= 1


def test_rows_of_a_table_that_cancel():
    torch.manual_seed(0)
    g = 1.3 + 1e-4 * torch.randn(1, 2, 50_000)
    g[:, 1] *= -1
    ids = torch.zeros(1, 2, dtype=torch.long)
    truth = g.double().sum(dim=1).square().sum()
    assert lookups.table_square_norm(ids, g, 1) >= truth


@pytest.mark.parametrize("depth", [7, 256, 257, 5000, 150_528])
def test_sums_in_pieces_are_as_near_the_truth_as_is_said(depth):
    torch.manual_seed(0)
    worst = 0.0
    for level in torch.rand(30) * 3:
        columns = level + 1e-3 * torch.rand(1, depth, 3)
        found, truth = (arithmetic.column_products(c) for c in (columns, columns.double()))
        lengths = columns.double().square().sum(dim=1).sqrt()
        error = (found - truth).abs() / (lengths[:, :, None] * lengths[:, None, :])
        worst = max(worst, float(error.max()))
    assert worst <= arithmetic.rounding_of_sums(depth, columns) < 1e-4


def test_what_is_added_for_rounding_is_little_on_ordinary_examples():
    """One part in a thousand at the most: a ghost norm is not to cost signal."""
    torch.manual_seed(0)
    layer = nn.Linear(768, 3072)
    x, g = torch.randn(2, 197, 768), torch.randn(2, 197, 3072)
    norm, above = grams.ghost_norm(x, g, layer.weight, LINEAR, 2).sqrt()
    assert torch.all(above >= norm)
    assert torch.all(above < norm * 1.01)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("side", [16, 96, 224])
def test_blank_scans_on_a_gpu(side, precision):
    """The kernels add up without pieces; what they may lose is in `Measured.doubt`."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(side * side * 3, 2)).cuda()

    def loss(model, x, y):
        with torch.autocast("cuda", dtype=precision, enabled=precision != torch.float32):
            logits = model(x)
        return F.cross_entropy(logits.float(), y, reduction="none").reshape(-1, 2).mean(dim=1)

    for level in range(150, 210, 4):
        x = greys(level, level + 3, shape=(3, side, side)).cuda()
        assert added(model, loss, (x, torch.tensor([0, 1]).cuda()), 1, bound=0.1) <= 1


class Encoder(nn.Module):
    """A transformer's layer with dropout, whose masks depend on how its inputs lie in memory."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.5)
        self.last = nn.Linear(16, 5)

    def forward(self, x):
        return self.last(self.layer(self.first(x)).mean(dim=1))


@pytest.mark.parametrize("mode", MODES)
def test_no_example_adds_more_than_the_bound_while_dropout_is_on(mode):
    torch.manual_seed(0)
    model, x = Encoder(), torch.randn(8, 7, 6)
    clipper = GradientClipper(model, mode, clipping=Clipping(max_norm=1e-3))
    for turn in range(24):
        alone = torch.arange(8) == turn % 8
        found = clipper.clip(lambda m, x: m(x).square().sum(dim=1), (x,), 8, alone)
        assert 0.99e-3 < norm_of(found.total) <= 1e-3
