"""What `GradientClipper.clip` guarantees whatever the model, the batch and the precision."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from oracle import compare, norm_of
from torch import nn

from sfumato.clipping.admit import one_at_a_time
from sfumato.clipping.clip import GradientClipper
from sfumato.clipping.factors import CLIP_STYLES, Clipping
from sfumato.clipping.method_choice import MODES
from sfumato.errors import ConfigError, UnsupportedLayer

STYLES = list(CLIP_STYLES)


def small_net(classes=5):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 12, 3, stride=2),
        nn.Flatten(),
        nn.Linear(12 * 9, classes),
    )


def data(n=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, 8, 8, generator=generator), torch.arange(n) % 5


def loss_of(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match="there are ghost_mixed"):
        GradientClipper(small_net(), mode="ghostly")


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("per_layer", [False, True])
def test_the_contribution_of_one_example_stays_within_the_bound(style, per_layer):
    clipping = Clipping(max_norm=0.3, style=style, per_layer=per_layer)
    clipper = GradientClipper(small_net(), clipping=clipping)
    x, y = data()
    for i in range(6):
        clipped = clipper.clip(loss_of, (50 * x[i : i + 1], y[i : i + 1]), 1)
        assert norm_of(clipped.total) <= 0.3


def test_per_layer_clipping_clips_each_layer_on_its_own():
    model, (x, y) = small_net(), data()
    clipper = GradientClipper(model, clipping=Clipping(max_norm=0.2, per_layer=True))
    clipped = clipper.clip(loss_of, (x, y), 6)
    rows = one_at_a_time(model, loss_of, (x, y))
    layers = sorted({name.rpartition(".")[0] for name in rows[0]})
    bound = 0.2 / math.sqrt(len(layers)) * (1 - 1e-5)
    for layer in layers:
        names = [name for name in rows[0] if name.rpartition(".")[0] == layer]
        for name in names:
            wanted = torch.zeros_like(rows[0][name])
            for row in rows:
                norm = math.sqrt(sum(float(row[n].square().sum()) for n in names))
                wanted += row[name] * min(1, bound / norm)
            torch.testing.assert_close(clipped.total[name], wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(5,), (4, 5)])
def test_an_empty_batch_adds_nothing(shape):
    clipper = GradientClipper(nn.Linear(5, 3))
    clipped = clipper.clip(
        lambda model, x: model(x).flatten(1).sum(1), (torch.randn(0, *shape),), 0
    )
    assert {name: total.shape for name, total in clipped.total.items()} == {
        "weight": (3, 5),
        "bias": (3,),
    }
    assert not any(total.any() for total in clipped.total.values())
    assert clipped.norms.shape == clipped.losses.shape == (0,)


def test_masked_examples_add_nothing():
    model, (x, y) = small_net(), data()
    clipper = GradientClipper(model)
    mask = torch.tensor([True, False, True, True, False, True])
    all_there = clipper.clip(loss_of, (x[mask], y[mask]), 4)
    padded = clipper.clip(loss_of, (x, y), 6, mask)
    for name, total in all_there.total.items():
        torch.testing.assert_close(padded.total[name], total, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_a_broken_example_adds_nothing_and_spoils_nothing(bad):
    model, (x, y) = small_net(), data()
    clipper = GradientClipper(model)
    good = clipper.clip(loss_of, (x[1:], y[1:]), 5)
    broken = x.clone()
    broken[0, 0, 0, 0] = bad
    broken[0] *= bad
    clipped = clipper.clip(loss_of, (broken, y), 6)
    assert not clipped.norms[0].isfinite()
    for name, total in good.total.items():
        torch.testing.assert_close(clipped.total[name], total, rtol=1e-5, atol=1e-6)


def test_an_example_that_is_broken_in_one_layer_adds_nothing_to_the_others():
    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x):
            return self.one(x[:, :3]) + self.other(x[:, 3:])

    clipper = GradientClipper(Beside(), clipping=Clipping(per_layer=True))
    x = torch.randn(4, 6)
    x[0, 0] = 1e30
    clipped, sound = (
        clipper.clip(lambda m, x: m(x).sum(dim=1), (some,), len(some)) for some in (x, x[1:])
    )
    assert not clipped.norms[0].isfinite()
    assert not clipped.factors[:, 0].any()
    for name, total in sound.total.items():
        torch.testing.assert_close(clipped.total[name], total)


@pytest.mark.parametrize("views", [2, 3])
@pytest.mark.parametrize("mode", ["ghost_mixed", "ghost", "non-ghost"])
def test_views_of_one_example_count_as_one_example(views, mode):
    model = small_net().double()
    x = torch.randn(4 * views, 3, 8, 8, dtype=torch.float64)
    y = torch.arange(4)

    def loss(model, x, y):
        losses = F.cross_entropy(model(x), y.repeat_interleave(views), reduction="none")
        return losses.unflatten(0, (-1, views)).mean(dim=1)

    compare(model, (x, y), 4, loss, mode=mode)


@pytest.mark.parametrize("mode", ["ghost_mixed", "ghost", "non-ghost"])
def test_the_model_is_left_as_it_was(mode):
    model, (x, y) = small_net(), data()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    GradientClipper(model, mode=mode).clip(loss_of, (x, y), 6)
    assert all(type(p) is nn.Parameter and p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_two_engines_in_one_process_do_not_meet():
    one, other, (x, y) = small_net(), small_net(), data()
    first, second = GradientClipper(one), GradientClipper(other)

    def nested(model, x, y):
        return loss_of(model, x, y) + 0 * second.clip(loss_of, (x.detach(), y), len(y)).norms

    torch.testing.assert_close(
        first.clip(nested, (x, y), 6).norms, second.clip(loss_of, (x, y), 6).norms
    )


def test_a_loss_that_is_not_per_example_is_refused():
    x, y = data()
    with pytest.raises(ConfigError, match='reduction="none"'):
        GradientClipper(small_net()).clip(lambda m, x, y: F.cross_entropy(m(x), y), (x, y), 6)


def test_half_precision_parameters_are_refused():
    x, y = data()
    with pytest.raises(ConfigError, match="autocast"):
        GradientClipper(small_net().bfloat16()).clip(loss_of, (x.bfloat16(), y), 6)


def test_a_data_dependent_path_is_refused():
    class Wanderer(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.b(x) if float(x.detach().sum()) > 0 else self.a(self.b(x))

    clipper = GradientClipper(Wanderer())
    clipper.clip(lambda m, x: m(x).sum(dim=1), (torch.ones(3, 4),), 3)
    with pytest.raises(UnsupportedLayer, match="another path"):
        clipper.clip(lambda m, x: m(x).sum(dim=1), (-torch.ones(3, 4),), 3)


@pytest.mark.parametrize("mode", ["ghost_mixed", "ghost", "non-ghost"])
def test_bf16_autocast_gives_norms_of_what_is_summed(mode):
    model, (x, y) = small_net(), data()

    def loss(model, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        return F.cross_entropy(out.float(), y, reduction="none")

    exact = GradientClipper(model).clip(loss_of, (x, y), 6)
    for i in range(6):
        clipper = GradientClipper(model, mode=mode, clipping=Clipping(max_norm=0.1))
        clipped = clipper.clip(loss, (x[i : i + 1], y[i : i + 1]), 1)
        assert norm_of(clipped.total) <= 0.1
        assert float(clipped.norms[0]) == pytest.approx(float(exact.norms[i]), rel=0.05)
        assert all(total.dtype == torch.float32 for total in clipped.total.values())


def test_collinear_tokens_in_bf16_do_not_lose_their_norm():
    # Gram matrices rounded to bf16 give norm 0 here, which means no clipping at all.
    torch.manual_seed(0)
    tokens = (torch.randn(8, 1, 64) + 0.01 * torch.randn(8, 32, 64)).bfloat16().float()
    layer = nn.Linear(64, 64, bias=False)
    weights = torch.randn(8, 32, 64)
    weights -= weights.mean(dim=1, keepdim=True)

    def loss(model, x, weights):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        return (out.float() * weights).sum(dim=(1, 2))

    clipper = GradientClipper(layer, mode="ghost", clipping=Clipping(max_norm=1e-3))
    exact = GradientClipper(layer, mode="non-ghost").clip(loss, (tokens, weights), 8)
    found = clipper.clip(loss, (tokens, weights), 8)
    assert (found.norms >= 0.999 * exact.norms).all()
    # Where almost everything cancels, what rounding could hide is added: over, never under.
    assert (found.norms <= 1.05 * exact.norms).all()


@pytest.mark.parametrize(
    ("net", "backend"),
    [
        ("small_net", "aot_eager"),
        ("conv", "inductor"),
        pytest.param("beit", "aot_eager", marks=pytest.mark.full),
        pytest.param("vit", "aot_eager", marks=pytest.mark.full),
        pytest.param("computed", "aot_eager", marks=pytest.mark.full),
        pytest.param("small_net", "inductor", marks=pytest.mark.full),
        pytest.param("vit", "inductor", marks=pytest.mark.full),
    ],
)
def test_the_forward_pass_compiles_in_one_graph(net, backend):
    # In a process of its own: the run-time type checks of the tests would be traced along.
    script = [sys.executable, str(Path(__file__).with_name("compiled.py")), net, backend]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 8])
def test_sizes_that_coincide_with_the_batch_are_not_mistaken_for_it(n):
    class Odd(nn.Module):
        """Expansions and look-ups by numbers that a batch may have too."""

        def __init__(self):
            super().__init__()
            self.places, self.grid = nn.Embedding(8, 4), nn.Parameter(torch.randn(2, 4))
            self.heads, self.token = (
                nn.Parameter(torch.randn(1, 8)),
                nn.Parameter(torch.randn(1, 1, 4)),
            )

        def forward(self, x):
            x = x + self.places(torch.arange(8)) + self.grid.unsqueeze(0).repeat(4, 1, 1).view(8, 4)
            x = x * self.heads.expand(4, 8).t()[:, :4]
            return torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)

    torch.manual_seed(0)
    model, x = Odd().double(), torch.randn(n, 8, 4, dtype=torch.float64)

    def loss(model, x):
        return model(x).sin().sum(dim=(1, 2))

    compare(model, x, n, loss)


def test_a_weight_made_from_two_layers_is_clipped_as_one():
    class Factored(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 4, bias=False), nn.Linear(4, 6, bias=False)

        def forward(self, x):
            return F.linear(x, self.b.weight @ self.a.weight)

    model = Factored()
    with torch.no_grad():
        model.a.weight.mul_(1e-3)
    clipper = GradientClipper(model, clipping=Clipping(max_norm=1.0, per_layer=True))
    for i in range(3):
        x = 100 * torch.randn(1, 6, generator=torch.Generator().manual_seed(i))
        clipped = clipper.clip(lambda m, x: m(x).square().sum(dim=1), (x,), 1)
        assert norm_of(clipped.total) <= 1.0


def test_an_untracked_use_is_named():
    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.token = nn.Linear(4, 4), nn.Parameter(torch.randn(4))

        def forward(self, x):
            out = torch.zeros(len(x), 2, 4)
            out[:, 0] = self.token
            out[:, 1] = self.layer(x)
            return out.tanh()

    with pytest.raises(UnsupportedLayer, match=r'"token" is used in a way'):
        GradientClipper(Written()).clip(lambda m, x: m(x).sum(dim=(1, 2)), (torch.randn(4, 4),), 4)


@pytest.mark.parametrize("mode", ["ghost", "non-ghost"])
def test_large_layers_in_float32_do_not_lose_their_norm(mode):
    # One float32 sum over four million squares is short by 2e-4: too little clipping.
    model, x = nn.Linear(40_000, 100, bias=False), torch.randn(2, 40_000) + 3
    clipper = GradientClipper(model, mode=mode, clipping=Clipping(max_norm=1e-2))
    clipped = clipper.clip(lambda m, x: m(x).sin().sum(dim=1), (x,), 2)
    rows = one_at_a_time(model, lambda m, x: m(x).sin().sum(dim=1), (x,))
    exact = torch.tensor([norm_of(row) for row in rows])
    torch.testing.assert_close(clipped.norms, exact, rtol=1e-6, atol=0)


def test_tiny_gradients_do_not_escape_the_bound():
    model = nn.Linear(2000, 2, bias=False)
    x = torch.full((1, 2000), 1e-23)
    x[0, 0] = 9e-22
    clipping = Clipping(max_norm=1.0, style="auto-v")
    clipped = GradientClipper(model, clipping=clipping).clip(lambda m, x: m(x).sum(dim=1), (x,), 1)
    assert norm_of(clipped.total) <= 1.0


def test_two_passes_are_no_more_and_the_argument_says_what_to_do():
    model, (x, y) = small_net(), data()
    with pytest.warns(DeprecationWarning, match="physical batch"):
        asked = GradientClipper(model, two_pass=True)
    for name, total in GradientClipper(model).clip(loss_of, (x, y), 6).total.items():
        assert torch.equal(replace(asked, layouts={}).clip(loss_of, (x, y), 6).total[name], total)


def test_a_broken_constant_image_is_left_out():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(192, 5)

        def forward(self, x):
            x = x.flatten(1)
            return self.layer(x / (x - x.mean(dim=1, keepdim=True)).norm(dim=1, keepdim=True))

    x, y = data()
    x[2] = 0.0
    clipped = GradientClipper(Scaled()).clip(loss_of, (x, y), 6)
    assert not clipped.norms[2].isfinite()
    assert all(total.isfinite().all() for total in clipped.total.values())


@pytest.mark.parametrize("mode", MODES)
def test_a_caller_s_autocast_does_not_round_the_sum(mode):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(288, 5))
    clipper = GradientClipper(model, mode, clipping=Clipping(max_norm=1.0))
    x = torch.randn(4, 3, 8, 8)
    for i in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            found = clipper.clip(
                lambda m, x: 100 * m(x).float().square().sum(dim=1), (x,), 4, torch.arange(4) == i
            )
        assert 0.99 < norm_of(found.total) <= 1
