"""A model is admitted if its per-example gradients are those of autograd; others are named."""

import pytest
import torch
import torch.nn.functional as F
from test_clip import data, loss_of, small_net
from torch import nn

from sfumato.clipping import grams, sums
from sfumato.clipping.admit import admit
from sfumato.clipping.clip import GradientClipper
from sfumato.clipping.factors import Clipping
from sfumato.clipping.method_choice import explain
from sfumato.errors import UnsupportedLayer


def test_a_sound_model_is_admitted():
    x, y = data()
    admit(GradientClipper(small_net()), loss_of, (x, y), 6)


def test_batch_norm_is_refused_with_its_path_and_the_remedy():
    model = nn.Sequential(nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(320, 5))
    x, y = data()
    with pytest.raises(UnsupportedLayer, match=r'"1" is a BatchNorm2d.*norm=group'):
        admit(GradientClipper(model), loss_of, (x, y), 6)
    model[1].eval()
    admit(GradientClipper(model), loss_of, (x, y), 6)


def test_a_hand_made_mixing_of_examples_is_noticed():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(192, 5)

        def forward(self, x):
            x = x.flatten(1)
            return self.layer(x - x.mean(dim=0))

    x, y = data()
    with pytest.raises(UnsupportedLayer, match="mixes the examples"):
        admit(GradientClipper(Centred()), loss_of, (x, y), 6)


def test_a_wrong_rule_is_noticed(monkeypatch):
    x, y = data()
    monkeypatch.setattr(
        grams, "ghost_norm", lambda x, *_: x.flatten(1).square().sum(dim=1).expand(2, -1)
    )
    with pytest.raises(UnsupportedLayer, match="not those of autograd"):
        admit(GradientClipper(small_net(), mode="ghost"), loss_of, (x, y), 6)


def test_statistics_in_buffers_are_refused():
    norm = nn.InstanceNorm2d(3, track_running_stats=True)
    model = nn.Sequential(norm, nn.Flatten(), nn.Linear(192, 5))
    with pytest.raises(UnsupportedLayer, match=r'buffer "0.running_mean"'):
        admit(GradientClipper(model), loss_of, data(), 6)


@pytest.mark.parametrize("kind", ["later", "labels"])
def test_mixing_is_noticed_wherever_it_comes_from(kind):
    def loss(model, x, y):
        each = loss_of(model, x, y)
        if kind == "labels":
            return each / torch.bincount(y, minlength=5)[y]
        return each.flip(0).cumsum(0).flip(0)

    with pytest.raises(UnsupportedLayer, match="mixes the examples"):
        admit(GradientClipper(small_net()), loss, data(), 6)


def test_a_loss_that_runs_the_model_it_was_made_for_is_tested_on_that(monkeypatch):
    model, (x, y) = small_net(), data()

    def tied(_, x, y):
        return loss_of(model, x.float(), y)

    admit(GradientClipper(model, mode="ghost"), tied, (x, y), 6)
    monkeypatch.setattr(
        grams, "ghost_norm", lambda x, *_: x.flatten(1).square().sum(dim=1).expand(2, -1)
    )
    with pytest.raises(UnsupportedLayer, match="not those of autograd"):
        admit(GradientClipper(model, mode="ghost"), tied, (x, y), 6)


@pytest.mark.parametrize("kind", ["another model", "numbers"])
def test_losses_that_do_not_depend_on_the_model_are_refused(kind):
    other = small_net()

    def loss(_, x, y):
        return loss_of(other, x, y) if kind == "another model" else x.flatten(1).sum(dim=1)

    with pytest.raises(UnsupportedLayer, match="no trainable parameter"):
        admit(GradientClipper(small_net()), loss, data(), 6)


@pytest.mark.parametrize("kind", ["a head of zeros", "dead units"])
def test_gradients_that_are_zero_are_no_reason_to_refuse(kind):
    layers = [nn.Flatten(), nn.Linear(192, 4), nn.ReLU(), nn.Linear(4, 5, bias=False)]
    if kind == "a head of zeros":
        nn.init.zeros_(layers[3].weight)
        layers[3].requires_grad_(False)
    else:
        nn.init.constant_(layers[1].bias, -100)
    model, (x, y) = nn.Sequential(*layers), data()
    admit(GradientClipper(model), loss_of, (x, y), 6)
    assert not GradientClipper(model).clip(loss_of, (x, y), 6).norms.any()


class Branch(nn.Module):
    """Something beside the way of the input, with a scale of zero at its end, as ResNets begin."""

    def __init__(self, within, insists=False):
        super().__init__()
        self.within, self.insists = within, insists
        self.scale = nn.Parameter(torch.zeros(1))
        self.head = nn.Linear(192, 5)

    def forward(self, x):
        x = (x.float() if self.insists else x).flatten(1)
        return self.head(x + self.scale * self.within(x))


class Centred(nn.Linear):
    def forward(self, x):
        return super().forward(x) - super().forward(x).mean(dim=0)


@pytest.mark.parametrize("insists", [False, True])
def test_what_a_scale_of_zero_hides_is_noticed(insists, monkeypatch):
    admit(GradientClipper(Branch(nn.Linear(192, 192), insists), mode="ghost"), loss_of, data(), 6)
    with pytest.raises(UnsupportedLayer, match="mixes the examples"):
        admit(GradientClipper(Branch(Centred(192, 192), insists)), loss_of, data(), 6)
    real = grams.ghost_norm
    monkeypatch.setattr(
        grams, "ghost_norm", lambda x, g, w, *more: real(x, g, w, *more) * (1 + (len(w) == 192))
    )
    with pytest.raises(UnsupportedLayer, match="not those of autograd"):
        admit(
            GradientClipper(Branch(nn.Linear(192, 192), insists), mode="ghost"), loss_of, data(), 6
        )


class Turning(nn.Module):
    """Adds an example to its neighbour `when` it likes."""

    def __init__(self, when):
        super().__init__()
        self.layer, self.when = nn.Linear(192, 5), when

    def forward(self, x):
        x = x.flatten(1)
        return self.layer(x + x.roll(1, 0) if self.when(x) else x)


WHEN = {
    "of even number": lambda x: len(x) % 2 == 0,
    "of odd number": lambda x: len(x) % 2 == 1,
    "without a sign": lambda x: bool((x >= 0).all()),
    "by chance": lambda _: float(torch.rand(())) < 0.2,
}


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("examples", [3, 6])
def test_batches_that_are_mixed_at_times_are_noticed(when, examples):
    torch.manual_seed(0)
    with pytest.raises(UnsupportedLayer, match="mixes the examples"):
        admit(GradientClipper(Turning(WHEN[when])), loss_of, data(examples), examples)


class Across(nn.Module):
    """Attention from example to example, behind a norm that makes all of them equal (CSATv2)."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(1), nn.Linear(192, 15)

    def forward(self, x):
        x = self.norm(x.flatten(1)[..., None]).squeeze(-1)
        q, k, v = self.qkv(x).chunk(3, dim=1)
        return (q @ k.T).softmax(dim=1) @ v


def test_mixing_that_equal_rows_hide_is_called_mixing():
    with pytest.raises(UnsupportedLayer, match="mixes the examples"):
        admit(GradientClipper(Across()), loss_of, data(), 6)


def test_what_has_no_rule_is_not_priced_at_zero():
    class Cumulated(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.weight = nn.Linear(192, 5), nn.Parameter(torch.randn(5))

        def forward(self, x):
            return torch.cdist(self.layer(x.flatten(1))[:, None], self.weight.expand(1, 1, 5))[:, 0]

    table = explain(Cumulated(), (3, 8, 8))
    row = next(line for line in table.splitlines() if line.startswith("weight"))
    assert "unknown" in row
    assert "Not in these numbers: weight" in table
    assert "unknown" not in explain(small_net(), (3, 8, 8))


def test_a_contribution_beyond_the_bound_in_the_model_s_own_precision_is_not_admitted(monkeypatch):
    # Norms and sums are compared with autograd in float64; training is in float32.
    right = sums._add_up

    def add_up(*given, **how):
        found = right(*given, **how)
        return {n: 1.1 * t if t.dtype == torch.float32 else t for n, t in found.items()}

    admit(GradientClipper(small_net()), loss_of, data(), 6)
    monkeypatch.setattr(sums, "_add_up", add_up)
    with pytest.raises(UnsupportedLayer, match="bound"):
        admit(GradientClipper(small_net()), loss_of, data(), 6)


def test_a_contribution_beyond_the_bound_of_layers_clipped_apart_is_not_admitted(monkeypatch):
    # Whether norms are right is asked of all layers together.
    right = sums.clip_factors

    def longer(above, *rest):
        last = torch.arange(above.shape[-1]) == above.shape[-1] - 1
        return right(above, *rest) * (1 + last)

    monkeypatch.setattr(sums, "clip_factors", longer)
    clipping = Clipping(per_layer=True)
    with pytest.raises(UnsupportedLayer, match="bound"):
        admit(GradientClipper(small_net(), clipping=clipping), loss_of, data(), 6)


class ExampleRng(nn.Module):
    """Drops numbers by itself, in whatever mode it is."""

    def __init__(self):
        super().__init__()
        self.body = small_net()

    def forward(self, x):
        return self.body(F.dropout(x, 0.5, training=True))


def test_a_model_that_throws_dice_of_its_own_is_compared_with_autograd_under_the_same_dice():
    admit(GradientClipper(ExampleRng()), loss_of, data(), 6)


def test_the_first_pass_of_a_kind_has_the_dropout_that_later_ones_have():
    # The first is examined before. A step that is taken again by another process begins with it.
    clipper, found = GradientClipper(ExampleRng()), []
    for _ in range(2):
        torch.manual_seed(5)
        found.append(clipper.clip(loss_of, data(), 6).total)
    for name, total in found[0].items():
        assert torch.equal(found[1][name], total)
