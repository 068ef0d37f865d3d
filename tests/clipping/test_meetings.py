"""Where a parameter meets the batch: labels, frozen features, constants, any axis; and refusals."""

import oracle
import pytest
import torch
import torch.nn.functional as F
from test_rules import Apply
from torch import nn

from sfumato.clipping.admit import admit
from sfumato.clipping.clip import GradientClipper
from sfumato.clipping.method_choice import MODES
from sfumato.errors import UnsupportedLayer

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


class Frozen(nn.Module):
    """A backbone that learns nothing, and a head on what it says."""

    def __init__(self, *, trainable=False, detach=False):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 7), nn.Tanh()).requires_grad_(trainable)
        self.head = nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 5))
        self.scale, self.detach = nn.Parameter(torch.rand(7)), detach

    def forward(self, x, y):
        if self.detach:
            return self.head(self.body(x).detach() * self.scale)
        with torch.no_grad():
            features = self.body(x)
        return self.head(features * self.scale)


class Positions(nn.Module):
    """Coordinates expanded to the batch before they meet a parameter (ConViT, EdgeNeXt)."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.mix, self.places = layer, nn.Parameter(torch.rand(2)), None

    def forward(self, x, y):
        if self.places is None:
            # Kept from the first pass, as ConViT does: the second makes fewer operations.
            self.places = torch.linspace(-1, 1, 18, dtype=x.dtype).reshape(1, 3, 3, 2)
        found = self.layer(self.places.expand(len(x), -1, -1, -1)).flatten(1)[:, :6]
        return found.softmax(-1) * self.mix.sigmoid()[0] + self.mix.tanh()[1] * x


class Dropped(nn.Module):
    """Attention that drops some of what it looks at, the mask being given."""

    def __init__(self, need_weights, batch_first=True, cross=False):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.4, batch_first=batch_first)
        self.need_weights, self.batch_first, self.cross = need_weights, batch_first, cross

    def forward(self, x, y):
        torch.manual_seed(5)
        x = torch.stack([x, x.cos(), x.sin(), x * x], dim=1 if self.batch_first else 0)
        other = x.tanh() if self.cross else x
        out, weights = self.attention(x, other, other, need_weights=self.need_weights)
        assert (weights is not None) == self.need_weights
        out = out if self.batch_first else out.transpose(0, 1)
        return out if weights is None else out + weights.mean(dim=(1, 2))[:, None, None]


class Labelled(Apply):
    def forward(self, x, y):
        return self.function(self, x, y)


def sequence_first(m, x, y):
    x = torch.stack([x, x.cos(), x.sin()])
    x = F.layer_norm(F.linear(x, m.w, m.b), (4,), m.g, m.b)
    return (x * m.g + m.token.expand(-1, x.shape[1], -1)).transpose(0, 1)


def queries(m, x, y):
    asked = m.q.unsqueeze(1).repeat(1, len(x), 1)
    return (asked * x).transpose(0, 1)


def of_fifteen(m, x, y):
    # 15 rows: as many as 3 or 5 examples could have, and no example's.
    return x + m.t.expand(15, 6).cumsum(0)[::4].mean(0) + m.u.repeat(15, 1).sin().sum(0)


def conv_transpose(**options):
    layer = nn.ConvTranspose2d(2, 3, 3, padding=1, **options)
    return nn.Sequential(nn.Unflatten(1, (2, 3, 1)), layer)


class Themselves(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        return self.attention(x, x, x)[0]


class NoLabels(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, y):
        return self.model(x)


CASES = {
    "frozen backbone, no_grad": Frozen,
    "frozen backbone, detached": lambda: Frozen(detach=True),
    "a backbone that could learn, no_grad": lambda: Frozen(trainable=True),
    "coordinates, linear": lambda: Positions(nn.Linear(2, 4)),
    "coordinates, conv": lambda: Positions(nn.Conv2d(3, 4, 2)),
    "one-hot": lambda: Labelled(lambda m, x, y: F.one_hot(y, 5).to(x) @ m.w * x, w=(5, 6)),
    "prototypes": lambda: Labelled(lambda m, x, y: (x - m.p[y]).square(), p=(5, 6)),
    "prototypes, from the end": lambda: Labelled(lambda m, x, y: x * m.p[y - 5], p=(5, 6)),
    "prototypes, several axes": lambda: Labelled(lambda m, x, y: x * m.p[y,].sum(1), p=(5, 2, 6)),
    "a number a class": lambda: Labelled(lambda m, x, y: x * m.t[y][:, None].exp(), t=(5,)),
    "columns by label": lambda: Labelled(lambda m, x, y: x * m.p[:, y].t(), p=(6, 5)),
    "index_select": lambda: Labelled(
        lambda m, x, y: x * m.p.index_select(0, y) + torch.index_select(m.q, 1, y).t(),
        p=(5, 6), q=(6, 5),
    ),
    "labels twice": lambda: Labelled(lambda m, x, y: x * m.p[y] + m.p[(y + 1) % 5], p=(5, 6)),
    "weighted bags": lambda: Labelled(
        lambda m, x, y: F.embedding_bag(
            torch.stack([y, 4 - y], 1), m.w, mode="sum", per_sample_weights=x[:, :2].sin()
        ),
        w=(5, 6),
    ),
    "distances": lambda: Labelled(lambda m, x, y: torch.cdist(x, m.p), p=(5, 6)),
    "w @ x.T": lambda: Labelled(lambda m, x, y: (m.w @ x.T).T, w=(5, 6)),
    "w @ x.T, then along the last axis": lambda: Labelled(
        lambda m, x, y: ((m.w @ x.T).sin() * m.s + m.b).T, w=(5, 6), s=(5, 1), b=(1,)
    ),
    "w @ x, a matrix an example": lambda: Labelled(
        lambda m, x, y: m.w @ torch.stack([x, x.sin()], dim=2), w=(5, 6)
    ),
    "x @ w, examples second": lambda: Labelled(
        lambda m, x, y: (torch.stack([x, x.sin()]) @ m.w).transpose(0, 1), w=(6, 5)
    ),
    "sequence first": lambda: Labelled(
        sequence_first, w=(4, 6), b=(4,), g=(4,), token=(1, 1, 4)
    ),
    "words, sequence first": lambda: Labelled(
        lambda m, x, y: F.embedding(torch.stack([y, y + 1]), m.w).sum(0) * x, w=(6, 6)
    ),
    "queries": lambda: Labelled(queries, q=(3, 6)),
    "rows repeated": lambda: Labelled(
        lambda m, x, y: m.q.repeat(len(x), 1).reshape(len(x), 2, 6) * x[:, None], q=(2, 6)
    ),
    "fifteen": lambda: Labelled(of_fifteen, t=(1, 6), u=(1, 6)),
    "attention with dropout": lambda: Dropped(need_weights=True),
    "attention with dropout, no weights": lambda: Dropped(need_weights=False),
    "attention with dropout, across": lambda: Dropped(need_weights=False, cross=True),
    "attention with dropout, batch second": lambda: Dropped(need_weights=True, batch_first=False),
    "output padding over the stride": lambda: NoLabels(
        conv_transpose(stride=1, dilation=2, output_padding=1)
    ),
    "output padding at the stride": lambda: NoLabels(
        conv_transpose(stride=2, dilation=3, output_padding=2)
    ),
}  # fmt: skip


def loss_of(model, x, y):
    out = model(x, y).flatten(1)
    weights = torch.linspace(-1, 2, out.shape[1], dtype=out.dtype)
    return (out.sin() * weights).sum(dim=1) + 0.1 * out.square().sum(dim=1)


def batch(n):
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, 6, generator=generator).double(), torch.arange(n) * 2 % 5


def compare(model, n, clipper=None, **options):
    return oracle.compare(model, batch(n), n, loss_of, clipper, **options)[0]


@pytest.mark.parametrize("case", CASES)
def test_a_parameter_meets_the_batch_in_any_way(case):
    torch.manual_seed(0)
    model = CASES[case]().double()
    # A survey of one batch serves those of other sizes: of one, and of what constants have.
    clipper = compare(model, 4)
    for n in (1, 2, 5, 15):
        compare(model, n, clipper)
    for mode in MODES:
        compare(model, 4, mode=mode)


def test_products_in_other_words_need_no_gradient_of_each_example():
    model = Labelled(lambda m, x, y: (m.w @ (x @ m.v).T).T, w=(5, 6), v=(6, 6)).double()
    (parts,) = compare(model, 4, mode="ghost").layouts.values()
    assert [part.method for part in parts] == ["ghost", "ghost"]


def mean_of_features(m, x, y):
    with torch.no_grad():
        centre = x.mean(0)
    return x * m.w + centre * m.v


REFUSED = {
    "a batch added to": lambda m, x, y: torch.cat([m.w[None], x])[1:],
    "stacked": lambda m, x, y: x * torch.stack([m.w] * len(x)),
    "a mask": lambda m, x, y: x * m.w[F.one_hot(y[:1], 6)[0].bool()],
    "mean of the batch": lambda m, x, y: x + m.w * x.mean(0),
    "all pairs": lambda m, x, y: x + (x @ x.T).softmax(0).mean() * m.w,
    "written": lambda m, x, y: x + torch.empty_like(x).copy_(m.w),
    "summed over examples": lambda m, x, y: x + torch.einsum("bd,d->", x, m.w),
    "softmax over examples": lambda m, x, y: F.softmax(x * m.w, 0) + torch.outer(x[:, 0], m.w),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_told_apart_is_refused_or_not_admitted(case):
    torch.manual_seed(0)
    model = Labelled(REFUSED[case], w=(6,)).double()
    with pytest.raises(UnsupportedLayer):
        admit(GradientClipper(model), loss_of, batch(4), 4)


@pytest.mark.parametrize("case", ["a batch added to", "stacked", "mean of the batch", "all pairs"])
def test_a_refusal_names_the_parameter_and_the_remedy(case):
    model = Labelled(REFUSED[case], w=(6,)).double()
    with pytest.raises(UnsupportedLayer, match=r'"w" .*(freeze|expand)'):
        GradientClipper(model).clip(loss_of, batch(4), 4)


def test_attention_over_the_examples_is_refused():
    attention = nn.MultiheadAttention(6, 2)
    model = NoLabels(nn.Sequential(nn.Unflatten(1, (1, 6)), Themselves(attention))).double()
    with pytest.raises(UnsupportedLayer, match=r'in_proj_weight" attends over .*batch_first'):
        GradientClipper(model).clip(loss_of, batch(4), 4)


def places_first(m, x, y):
    x = torch.stack([x, x.sin(), x.cos()]).flatten(0, 1)
    return F.linear(x, m.w).unflatten(0, (3, -1)).sum(0)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_interleaved_rows_are_not_admitted(n):
    model = Labelled(places_first, w=(5, 6)).double()
    with pytest.raises(UnsupportedLayer, match=r'worst at "w"'):
        admit(GradientClipper(model), loss_of, batch(n), n)


def test_a_mean_of_frozen_features_is_not_admitted():
    model = Labelled(mean_of_features, w=(6,), v=(6,)).double()
    with pytest.raises(UnsupportedLayer, match="mixes the examples"):
        admit(GradientClipper(model), loss_of, batch(4), 4)


def test_a_value_kept_from_an_earlier_pass_is_refused():
    class Kept(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.kept = nn.Parameter(torch.randn(6)), None

        def forward(self, x, y):
            if self.kept is None:
                self.kept = self.table.exp()
            return x * self.kept

    with pytest.raises(UnsupportedLayer):
        GradientClipper(Kept().double()).clip(loss_of, batch(4), 4)
