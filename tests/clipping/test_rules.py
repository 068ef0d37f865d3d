"""Every rule against autograd asked for one example at a time: norms and clipped sums.

`CASES` is the test matrix. To test a new rule, add a small model that uses it.
"""

from pkgutil import iter_modules

import pytest
import torch
import torch.nn.functional as F
from oracle import compare, loss_of
from samples import sampled
from torch import nn

from sfumato.clipping import rules
from sfumato.clipping.clip import GradientClipper
from sfumato.clipping.method_choice import MODES
from sfumato.clipping.rules.registry import RULES
from sfumato.errors import UnsupportedLayer
from sfumato.models.wrn import StandardisedConv2d


class Apply(nn.Module):
    """A model made of parameters and a function, for uses that no module has."""

    def __init__(self, function, **shapes):
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) * 0.5))

    def forward(self, x):
        return self.function(self, x)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.outer = nn.Linear(6, 6)
        self.outer.weight = self.inner.weight

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x)))


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return self.layer(torch.relu(self.layer(x)))


class Attention(nn.Module):
    def __init__(self, *, batch_first=True, cross=False, masked=False, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first, **options)
        self.cross, self.batch_first, self.masked = cross, batch_first, masked

    def forward(self, x):
        if not self.batch_first:
            x = x.transpose(0, 1)
        other = torch.sin(x) if self.cross else x
        mask = None
        if self.masked:  # one for each example and head
            length, count = (x.shape[1], len(x)) if self.batch_first else (len(x), x.shape[1])
            mask = torch.linspace(-1, 1, 2 * length**2, dtype=x.dtype)
            mask = mask.view(2, length, length).repeat(count, 1, 1)
        out, weights = self.attention(x, other, other, attn_mask=mask)
        out = out if self.batch_first else out.transpose(0, 1)
        return out + weights.mean(dim=(1, 2))[:, None, None]


class Words(nn.Module):
    def __init__(self, table, tie=False):
        super().__init__()
        self.table = table
        self.tie = tie

    def forward(self, ids):
        found = self.table(ids)
        return F.linear(found, self.table.weight) if self.tie else found


class Windows(nn.Module):
    """Rows of one example stand side by side, as in Swin."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 6), nn.Parameter(torch.rand(6))
        self.bias = nn.Parameter(torch.randn(3, 2))
        self.register_buffer("index", torch.tensor([0, 2, 1, 0]))

    def forward(self, x):
        n = len(x)
        windows = x.reshape(n * 2, -1, 6)
        moved = torch.tanh(self.layer(windows) * self.scale)
        table = self.bias[self.index].reshape(1, 4, 2)
        scores = (moved @ moved.mT)[:, :4, :2] + table
        return moved.reshape(n, -1) + scores.softmax(-1).reshape(n, -1).sum(1, keepdim=True)


class Standardised(nn.Conv2d):
    def forward(self, x):
        weight = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
        weight = weight / (weight.std(dim=(1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, weight, self.bias, padding=1)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(4, 6, 3), nn.GroupNorm(2, 6), nn.GELU())

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False)


class CheckpointedLinear(nn.Module):
    """The block ends in a layer with a rule, which asks for what is computed again."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 5)

    def forward(self, x):
        block = nn.Sequential(self.first, nn.Tanh(), self.last)
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)


def frozen(module, *names):
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in names)
    return module


def own(x, m):
    """Attention of a sequence with itself, biased by a parameter."""
    return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], attn_mask=m.b)


def split_bias(m, x):
    return F.linear(x, m.w, torch.cat([m.q, m.q.new_zeros(2), m.v]))


def from_coordinates(m, x):
    places = torch.linspace(0, 1, 5, dtype=x.dtype)[:, None]
    return x + F.linear(places, m.w, m.b).tanh()


def tracked(kind, channels):
    """A normalisation by statistics of earlier batches, which are not those of any batch here."""
    layer = kind(channels, affine=True, track_running_stats=True).eval()
    layer.running_mean += torch.linspace(-0.5, 1.0, channels)
    layer.running_var *= torch.linspace(0.5, 3.0, channels)
    return layer


def inplace_net():
    return nn.Sequential(nn.Conv2d(4, 5, 3), nn.ReLU(inplace=True), nn.Conv2d(5, 3, 3))


def channels_last():
    return nn.Conv2d(4, 6, 3, padding=1).to(memory_format=torch.channels_last)


VECTOR, SEQUENCE, IMAGE, VOLUME = (6,), (5, 8), (4, 7, 6), (2, 5, 4, 4)

CASES = {
    "linear 2-D": (lambda: nn.Linear(6, 5), VECTOR),
    "linear 3-D": (lambda: nn.Linear(8, 5), SEQUENCE),
    "linear 4-D": (lambda: nn.Linear(6, 5), IMAGE),
    "linear 4-D, many positions": (lambda: nn.Linear(8, 9), (64, 33, 8)),
    "linear 6-D": (lambda: nn.Linear(3, 2), (2, 2, 2, 2, 3)),
    "linear without bias": (lambda: nn.Linear(8, 5, bias=False), SEQUENCE),
    "linear, bias alone": (lambda: frozen(nn.Linear(8, 5), "weight"), SEQUENCE),
    "linear, weight alone": (lambda: frozen(nn.Linear(8, 5), "bias"), SEQUENCE),
    "conv1d": (lambda: nn.Conv1d(5, 4, 3, stride=2, padding=1), SEQUENCE),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1), IMAGE),
    "conv2d 1x1": (lambda: nn.Conv2d(4, 6, 1), IMAGE),
    "conv2d stride, dilation": (lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), dilation=2), IMAGE),
    "conv2d groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=(2, 1)), IMAGE),
    "conv2d groups behind another layer": (
        lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3, 2, groups=2)),
        IMAGE,
    ),
    "conv2d depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, padding=1), IMAGE),
    "conv2d depthwise, wide": (lambda: nn.Conv2d(4, 8, 3, groups=4), IMAGE),
    "conv2d same": (lambda: nn.Conv2d(4, 6, (3, 4), padding="same", dilation=2), IMAGE),
    "conv2d valid": (lambda: nn.Conv2d(4, 6, 3, padding="valid"), IMAGE),
    "conv2d reflect": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), IMAGE),
    "conv2d replicate": (
        lambda: nn.Conv2d(4, 6, 3, padding=(1, 2), padding_mode="replicate"),
        IMAGE,
    ),
    "conv2d circular": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), IMAGE),
    "conv2d, bias alone": (lambda: frozen(nn.Conv2d(4, 6, 3), "weight"), IMAGE),
    "conv3d": (lambda: nn.Conv3d(2, 4, (3, 2, 2), stride=(1, 2, 1), groups=2), VOLUME),
    "conv3d dilated": (lambda: nn.Conv3d(2, 3, 2, dilation=(1, 2, 2), padding=1), VOLUME),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(5, 4, 3, stride=2, padding=1), SEQUENCE),
    "conv_transpose2d": (
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        IMAGE,
    ),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(2, 3, 2, stride=2, dilation=2), VOLUME),
    "layer_norm": (lambda: nn.LayerNorm(8), SEQUENCE),
    "layer_norm 2 axes": (lambda: nn.LayerNorm([5, 8]), SEQUENCE),
    "layer_norm without bias": (lambda: nn.LayerNorm(8, bias=False), SEQUENCE),
    "layer_norm, bias alone": (lambda: frozen(nn.LayerNorm(8), "weight"), SEQUENCE),
    "group_norm": (lambda: nn.GroupNorm(2, 4), IMAGE),
    "group_norm on vectors": (lambda: nn.GroupNorm(2, 6), VECTOR),
    "instance_norm": (lambda: nn.InstanceNorm2d(4, affine=True), IMAGE),
    "instance_norm 1-D": (lambda: nn.InstanceNorm1d(5, affine=True), SEQUENCE),
    "instance_norm 3-D": (lambda: nn.InstanceNorm3d(2, affine=True), VOLUME),
    "instance_norm, bias alone": (
        lambda: frozen(nn.InstanceNorm2d(4, affine=True), "weight"),
        IMAGE,
    ),
    "instance_norm behind another layer": (
        lambda: nn.Sequential(nn.Conv2d(4, 3, 3), nn.InstanceNorm2d(3), nn.Conv2d(3, 2, 3)),
        IMAGE,
    ),
    "instance_norm with frozen statistics": (lambda: tracked(nn.InstanceNorm2d, 4), IMAGE),
    "instance_norm 1-D with frozen statistics": (lambda: tracked(nn.InstanceNorm1d, 5), SEQUENCE),
    "rms_norm": (lambda: nn.RMSNorm(8), SEQUENCE),
    "batch_norm with frozen statistics": (lambda: nn.BatchNorm2d(4).eval(), IMAGE),
    "embedding": (lambda: Words(nn.Embedding(7, 6)), "ids"),
    "embedding with padding": (lambda: Words(nn.Embedding(7, 6, padding_idx=2)), "ids"),
    "embedding with padding from the end": (
        lambda: Words(nn.Embedding(7, 6, padding_idx=-5)),
        "ids",
    ),
    "embedding tied to a head": (lambda: Words(nn.Embedding(7, 6), tie=True), "ids"),
    "embedding_bag mean": (lambda: Words(nn.EmbeddingBag(7, 6)), "ids"),
    "embedding_bag sum": (lambda: Words(nn.EmbeddingBag(7, 6, mode="sum", padding_idx=1)), "ids"),
    "rows by labels": (lambda: Apply(lambda m, ids: m.w[ids], w=(7, 6)), "ids"),
    "index_select": (
        lambda: Apply(lambda m, ids: torch.index_select(m.w, 0, ids[:, 0]), w=(7, 6)),
        "ids",
    ),
    "attention": (lambda: Attention(), SEQUENCE),
    "attention, batch second": (lambda: Attention(batch_first=False), SEQUENCE),
    "attention across": (lambda: Attention(cross=True), SEQUENCE),
    "attention, own widths": (lambda: Attention(cross=True, kdim=8, vdim=8), SEQUENCE),
    "attention, masks": (lambda: Attention(masked=True), SEQUENCE),
    "attention without bias": (lambda: Attention(bias=False), SEQUENCE),
    "attention, input bias alone": (
        lambda: frozen(
            Attention(cross=True),
            *(f"attention.{n}" for n in ("in_proj_weight", "out_proj.weight", "out_proj.bias")),
        ),
        SEQUENCE,
    ),
    "token": (
        lambda: Apply(
            lambda m, x: torch.cat([m.token.expand(len(x), -1, -1), x], 1), token=(1, 1, 8)
        ),
        SEQUENCE,
    ),
    "positions": (lambda: Apply(lambda m, x: x + m.pos, pos=(1, 5, 8)), SEQUENCE),
    "positions in place": (lambda: Apply(lambda m, x: x.sin().add_(m.pos), pos=(5, 8)), SEQUENCE),
    "layer scale": (lambda: Apply(lambda m, x: x.sin() * m.gamma, gamma=(8,)), SEQUENCE),
    "channel scale": (lambda: Apply(lambda m, x: m.g.view(1, -1, 1, 1) * x.sin(), g=(4,)), IMAGE),
    "division and difference": (
        lambda: Apply(lambda m, x: (x - m.a) / m.b.exp(), a=(8,), b=(5, 1)),
        SEQUENCE,
    ),
    "temperature": (
        lambda: Apply(lambda m, x: (x @ x.mT * m.t.exp()).softmax(-1), t=(1,)),
        SEQUENCE,
    ),
    "scalar": (lambda: Apply(lambda m, x: x.sin() * m.s, s=()), SEQUENCE),
    "matmul": (lambda: Apply(lambda m, x: x @ m.w, w=(8, 3)), SEQUENCE),
    "matmul from the right": (
        lambda: Apply(lambda m, x: m.w.__rmatmul__(x), w=(8, 3)),
        SEQUENCE,
    ),
    "einsum": (lambda: Apply(lambda m, x: torch.einsum("btd,de->bte", x, m.w), w=(8, 3)), SEQUENCE),
    "prelu": (lambda: nn.PReLU(4), IMAGE),
    "functional weight": (lambda: Apply(split_bias, w=(6, 8), q=(2,), v=(2,)), SEQUENCE),
    "transposed weight": (lambda: Apply(lambda m, x: F.linear(x, m.w.t()), w=(8, 3)), SEQUENCE),
    "attention mask": (lambda: Apply(lambda m, x: own(x, m), b=(1, 1, 5, 5)), SEQUENCE),
    "bilinear": (lambda: Apply(lambda m, x: F.bilinear(x, x.cos(), m.w), w=(3, 8, 8)), SEQUENCE),
    "batch-free subgraph": (lambda: Apply(from_coordinates, w=(8, 1), b=(8,)), SEQUENCE),
    "weight standardisation": (lambda: Standardised(4, 6, 3), IMAGE),
    "our weight standardisation": (lambda: StandardisedConv2d(4, 6, 3, padding=1), IMAGE),
    "our standardisation, twice": (
        lambda: nn.Sequential(*[StandardisedConv2d(4, 4, 1)] * 2),
        IMAGE,
    ),
    "tied weights": (Tied, VECTOR),
    "module called twice": (Twice, IMAGE),
    "windows": (Windows, (48,)),
    "activation checkpointing": (Checkpointed, IMAGE),
    "checkpointing of linear layers": (CheckpointedLinear, SEQUENCE),
    "in-place activation": (inplace_net, IMAGE),
    "channels last": (channels_last, IMAGE),
}  # fmt: skip


def batch_for(shape, n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if shape == "ids":
        return torch.randint(0, 7, (n, 5), generator=generator)
    x = torch.randn(n, *shape, generator=generator, dtype=torch.float64)
    return x.to(memory_format=torch.channels_last) if len(shape) == 3 else x


pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


@sampled(case=CASES, mode=MODES)
def test_norms_and_sums_match_autograd_one_example_at_a_time(case, mode):
    torch.manual_seed(0)
    build, shape = CASES[case]
    compare(build().double(), batch_for(shape, 4), 4, mode=mode)


@sampled(case=CASES, n=[1, 2, 7])
def test_a_layout_serves_batches_of_any_size(case, n):
    torch.manual_seed(0)
    build, shape = CASES[case]
    model = build().double()
    clipper, _ = compare(model, batch_for(shape, 3), 3)
    compare(model, batch_for(shape, n, seed=1), n, clipper=clipper)


def test_every_file_of_rules_is_imported():
    files = {module.name for module in iter_modules(rules.__path__)}
    assert files - {"registry"} <= set(rules.__all__)


def test_the_matrix_follows_every_rule(monkeypatch):
    followed = set()

    def watched(rule):
        def follow(*args, **kwargs):
            followed.add(rule.follow)
            return rule.follow(*args, **kwargs)

        return rule._replace(follow=follow)

    rules = {rule.follow for rule in RULES.values()}
    for operation, rule in list(RULES.items()):
        monkeypatch.setitem(RULES, operation, watched(rule))
    for build, shape in CASES.values():
        GradientClipper(build().double()).clip(loss_of, (batch_for(shape, 2),), 2)
    assert {rule.__name__ for rule in rules - followed} == set()


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm2d(4),
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)),
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    ],
)
def test_norms_of_the_whole_batch_in_training_mode_are_refused_by_name(layer):
    with pytest.raises(UnsupportedLayer, match=r"mixes the examples.*norm=group"):
        GradientClipper(layer.double()).clip(loss_of, (batch_for(IMAGE, 3),), 3)
