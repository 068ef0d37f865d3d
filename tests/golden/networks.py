"""Small networks whose per-example norms, factors and clipped sums are frozen.

Weights and inputs come from numpy, by name, so they depend neither on torch's generator nor on the
order in which anything is built.
"""

import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from golden.adapter import StandardisedConv2d


@dataclass(frozen=True)
class Network:
    """A model, the shape of an example, and how the examples come."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...] = ()
    """Of one row; empty for rows of five numbers of words."""
    rows: int = 1
    """Rows of the inputs that are one example: views, or the images of a person."""
    padding: int = 0
    """How many examples at the end are padding."""
    broken: int | None = None
    """The example that holds a NaN."""
    autocast: bool = False
    channels_last: bool = False
    frozen: tuple[str, ...] = field(default=())

    def model(self) -> nn.Module:
        model = self.build()
        for name, parameter in model.named_parameters():
            parameter.data = weights(name, parameter)
            parameter.requires_grad_(name not in self.frozen)
        if self.channels_last:
            model = model.to(memory_format=torch.channels_last)
        return model

    def inputs(self, name: str) -> Tensor:
        rng = generator("inputs", name)
        if not self.shape:
            return torch.from_numpy(rng.integers(0, 7, (EXAMPLES * self.rows, 5)))
        x = rng.standard_normal((EXAMPLES * self.rows, *self.shape))
        # Longer and shorter gradients, so that every clip style cuts some and leaves some.
        x = torch.from_numpy(x * np.linspace(0.3, 2, len(x)).reshape(-1, *[1] * len(self.shape)))
        if self.broken is not None:
            x[self.broken] = torch.nan
        if self.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        return x.float()

    def mask(self) -> Tensor | None:
        return torch.arange(EXAMPLES) < EXAMPLES - self.padding if self.padding else None

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        """One loss an example: every output counts, each in its own way."""
        lower = torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext()
        with lower:
            out = model(x)
        out = out.float().flatten(1)
        weight = torch.linspace(-1, 2, out.shape[1])
        each = (out.sin() * weight).sum(dim=1) + 0.1 * out.square().sum(dim=1)
        return each.reshape(-1, self.rows).mean(dim=1)


EXAMPLES = 6


def generator(*names: str) -> np.random.Generator:
    return np.random.default_rng(list(hashlib.sha256("/".join(names).encode()).digest()))


def weights(name: str, like: Tensor) -> Tensor:
    """Numbers for the parameter of that name; a scale is near 1."""
    drawn = generator("weights", name).standard_normal(tuple(like.shape))
    if like.ndim > 1:
        drawn = drawn / np.sqrt(max(1, like[0].numel()))
    else:
        drawn = 0.3 * drawn + name.endswith("weight")
    return torch.as_tensor(drawn, dtype=like.dtype)


class Apply(nn.Module):
    """Parameters and a function, for uses that no module has."""

    def __init__(self, function, **shapes):
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, x):
        return self.function(self, x)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 6)
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
    def __init__(self, *, batch_first=True, cross=False, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first, **options)
        self.cross, self.batch_first = cross, batch_first

    def forward(self, x):
        x = x if self.batch_first else x.transpose(0, 1)
        other = torch.sin(x) if self.cross else x
        out, weights = self.attention(x, other, other)
        out = out if self.batch_first else out.transpose(0, 1)
        return out + weights.mean(dim=(1, 2))[:, None, None]


class TinyViT(nn.Module):
    """Patches, a class token, positions, an encoder layer, LayerScale."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
        self.token, self.positions = (nn.Parameter(torch.zeros(1, n, 8)) for n in (1, 5))
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.gamma = nn.Parameter(torch.zeros(8))
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.patches(x).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        parts = self.qkv(self.first(x)).reshape(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(x.shape)
        x = x + self.gamma * self.out(attended)
        x = x + self.mlp(self.second(x))
        return self.head(x[:, 0])


class Windows(nn.Module):
    """Rows of one example stand side by side, as in Swin, with a table of relative positions."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 6), nn.Parameter(torch.zeros(6))
        self.bias = nn.Parameter(torch.zeros(3, 2))
        self.register_buffer("index", torch.tensor([0, 2, 1, 0]))

    def forward(self, x):
        windows = x.reshape(len(x) * 2, -1, 6)
        moved = torch.tanh(self.layer(windows) * self.scale)
        table = self.bias[self.index].reshape(1, 4, 2)
        scores = (moved @ moved.mT)[:, :4, :2] + table
        return moved.reshape(len(x), -1) + scores.softmax(-1).reshape(len(x), -1).sum(1, True)


class Words(nn.Module):
    def __init__(self, table, tied=False):
        super().__init__()
        self.table, self.tied = table, tied

    def forward(self, ids):
        found = self.table(ids)
        return F.linear(found, self.table.weight) if self.tied else found


class Contrastive(nn.Module):
    """A logit_scale: one scalar for all of the outputs."""

    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(6, 8), nn.Parameter(torch.zeros(5, 8))
        self.logit_scale = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.logit_scale.exp() * F.normalize(self.image(x), dim=-1) @ self.text.t()


class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Bilinear(8, 8, 3)

    def forward(self, x):
        return self.layer(x, x.cos())


class UserStandardised(nn.Conv2d):
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


def functional(m, x):
    """A bias put together, a transposed weight, a product of two, an einsum."""
    x = F.linear(x, m.w, torch.cat([m.q, m.q.new_zeros(4), m.v]))
    x = F.linear(x.tanh(), m.u.t() @ m.r)
    return torch.einsum("btd,de->bte", x, m.e)


def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, groups=2, bias=False), nn.GroupNorm(4, 8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5),
    )  # fmt: skip


def wrn():
    return nn.Sequential(
        StandardisedConv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(),
        StandardisedConv2d(8, 6, 3, stride=2, padding=1), nn.Flatten(), nn.Linear(96, 5),
    )  # fmt: skip


def depthwise():
    return nn.Sequential(
        nn.Conv2d(3, 6, 1), nn.Conv2d(6, 12, 3, padding=1, groups=6), nn.ReLU(), nn.Conv2d(12, 4, 1)
    )


def inplace():
    return nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.ReLU(inplace=True), nn.PReLU(5), nn.Conv2d(5, 3, (3, 2), dilation=2)
    )


def norms():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding="same", padding_mode="reflect"),
        nn.InstanceNorm2d(4, affine=True), nn.Flatten(2), nn.RMSNorm(64), nn.LayerNorm([4, 64]),
    )  # fmt: skip


def batch_norm():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3))
    net[1].running_mean = torch.linspace(-0.2, 0.3, 4)
    net[1].running_var = torch.linspace(0.5, 2, 4)
    return net.eval()


def transposed():
    return nn.Sequential(
        nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1), nn.SiLU(),
        nn.Flatten(2), nn.ConvTranspose1d(4, 4, 3, stride=2, groups=2),
    )  # fmt: skip


def encoder(batch_first=True):
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first)


VECTOR, SEQUENCE, IMAGE, VOLUME = (6,), (5, 8), (3, 8, 8), (2, 5, 4, 4)

NETWORKS = {
    "mlp": Network(lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)), VECTOR),
    "linear on many positions": Network(lambda: nn.Linear(8, 9), (40, 8)),
    "cnn": Network(cnn, IMAGE),
    "conv1d": Network(
        lambda: nn.Sequential(nn.Conv1d(5, 4, 3, stride=2), nn.Conv1d(4, 3, 2)), SEQUENCE
    ),
    "conv3d": Network(lambda: nn.Conv3d(2, 4, (3, 2, 2), stride=(1, 2, 1), groups=2), VOLUME),
    "transposed": Network(transposed, IMAGE),
    "depthwise, channels last": Network(depthwise, IMAGE, channels_last=True),
    "cnn, channels last": Network(cnn, IMAGE, channels_last=True),
    "weight-standardised": Network(wrn, IMAGE),
    "user's standardisation": Network(lambda: UserStandardised(3, 6, 3), IMAGE),
    "tied weights": Network(Tied, VECTOR),
    "called twice": Network(Twice, (4, 5, 5)),
    "tiny ViT": Network(TinyViT, IMAGE),
    "windows": Network(Windows, (48,)),
    "attention": Network(Attention, SEQUENCE),
    "attention, batch second": Network(lambda: Attention(batch_first=False), SEQUENCE),
    "attention across": Network(lambda: Attention(cross=True, kdim=8, vdim=8), SEQUENCE),
    "encoder layer": Network(encoder, SEQUENCE),
    "embedding tied to a head": Network(lambda: Words(nn.Embedding(7, 6), tied=True)),
    "embedding with padding": Network(lambda: Words(nn.Embedding(7, 6, padding_idx=2))),
    "embedding bag": Network(lambda: Words(nn.EmbeddingBag(7, 6))),
    "logit scale": Network(Contrastive, VECTOR),
    "frozen BatchNorm": Network(batch_norm, IMAGE),
    "norms": Network(norms, IMAGE),
    "bilinear": Network(Bilinear, SEQUENCE),
    "functional": Network(
        lambda: Apply(functional, w=(8, 8), q=(2,), v=(2,), u=(3, 6), r=(3, 8), e=(6, 4)), SEQUENCE
    ),
    "in-place, PReLU": Network(inplace, IMAGE),
    "checkpointing": Network(Checkpointed, (4, 7, 6)),
    "people": Network(cnn, IMAGE, rows=3),
    "views and padding": Network(wrn, IMAGE, rows=2, padding=2),
    "one example is NaN": Network(cnn, IMAGE, broken=1),
    "frozen parts": Network(cnn, IMAGE, frozen=("0.weight", "0.bias", "3.weight", "4.bias")),
    "bias alone": Network(
        lambda: nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 5)), SEQUENCE,
        frozen=("0.weight", "2.weight"),
    ),
    "bf16": Network(cnn, IMAGE, autocast=True),
    "bf16 ViT": Network(TinyViT, IMAGE, autocast=True),
}  # fmt: skip

WAYS = {
    "ghost_mixed": {},
    "ghost": {"mode": "ghost"},
    "non-ghost": {"mode": "non-ghost"},
    "per-layer": {"per_layer": True},
    "automatic": {"style": "automatic"},
    "auto-v": {"style": "auto-v"},
    "global": {"style": "global"},
    "per-layer automatic, ghost": {"mode": "ghost", "style": "automatic", "per_layer": True},
}
