"""Clip factors keep every contribution within the bound, or are refused."""

import math
from functools import partial
from typing import get_args, get_type_hints

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import norm_of
from torch import nn

from sfumato.clipping.admit import admit, check_contributions
from sfumato.clipping.clip import GradientClipper
from sfumato.clipping.factors import CLIP_STYLES, Clipping, check_clip_function, clip_factors
from sfumato.errors import ConfigError, PrivacyError
from sfumato.settings.train import Privacy

STYLES = list(CLIP_STYLES)
LENGTHENING = {
    "three bounds": lambda norms, bound, stability: 3 * bound / norms,
    "a constant": lambda norms, bound, stability: torch.full_like(norms, 100.0),
    "backwards": lambda norms, bound, stability: -3 * bound / norms,
    "a power": lambda norms, bound, stability: (bound / norms) ** 2 + 1,
    "norms made short": lambda norms, bound, stability: norms.zero_() + 100.0,
    "norms made long": lambda norms, bound, stability: 100.0 * (norms.mul_(-1.0) < 0),
}
"""Clip functions of a user that would let an example add more than the bound."""
LOOKING = {
    "at the mean": lambda norms, bound, stability: bound / (norms + norms.mean()),
    "at their number": lambda norms, bound, stability: bound / (norms * len(norms)),
    "at the largest": lambda norms, bound, stability: bound / norms.max().expand_as(norms),
    "at a quantile": lambda norms, bound, stability: (norms <= norms.quantile(0.9)).float(),
    "at ranks": lambda norms, bound, stability: 1 / (1.0 + norms.argsort().argsort()),
    "at places": lambda norms, bound, stability: 1 / (1.0 + torch.arange(len(norms))),
    "in place": lambda norms, bound, stability: norms.div_(norms.sum()),
}
"""Clip functions of a user by which one example changes what the others add."""
NO_FACTORS = {
    "None": lambda norms, bound, stability: None,
    "a number": lambda norms, bound, stability: 1,
    "numpy": lambda norms, bound, stability: norms.cpu().numpy(),
    "too few": lambda norms, bound, stability: norms[..., :-1],
    "an axis more": lambda norms, bound, stability: norms[None].expand(2, *norms.shape),
    "complex numbers": lambda norms, bound, stability: norms + 0j,
}
"""What is no factor for each example."""


@settings(deadline=None)
@given(
    st.lists(st.floats(0, 1e30), min_size=1, max_size=9),
    st.floats(1e-6, 1e6),
    st.sampled_from(STYLES),
    st.sampled_from([0.0, 0.01, 1e6]),
)
def test_no_factor_lets_a_contribution_over_the_bound(norms, max_norm, style, stability):
    norms = torch.tensor(norms)
    factors = clip_factors(norms, max_norm, style, stability)
    assert (factors >= 0).all()
    assert (factors.double() * norms.double() <= max_norm).all()


@pytest.mark.parametrize("style", STYLES)
def test_zero_infinite_and_missing_norms_have_safe_factors(style):
    factors = clip_factors(torch.tensor([0.0, math.inf, math.nan]), 1.0, style, 0.01)
    assert factors.isfinite().all()
    assert factors[1:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("style", "stability"), [("automatic", 0.0), ("auto-v", 0.01)])
def test_norms_whose_squares_vanish_are_not_trusted(style, stability):
    assert clip_factors(torch.tensor([1e-18]), 1.0, style, stability).tolist() == [0.0]


@pytest.mark.parametrize("value", [-0.5, math.nan, math.inf])
def test_clipping_that_bounds_nothing_is_refused(value):
    with pytest.raises(ConfigError, match=r"stability=.*norm bound"):
        Clipping(style="automatic", stability=value)
    with pytest.raises(ConfigError, match=r"max_norm=.*positive and finite"):
        Clipping(max_norm=value)
    with pytest.raises(ConfigError, match="max_norm=0 must be positive"):
        Clipping(max_norm=0.0)


def test_the_clip_functions_are_the_published_ones():
    norms = torch.tensor([0.5, 1.0, 4.0])
    expected = {
        "vanilla": [1.0, 1.0, 0.25],
        "automatic": [1 / 0.51, 1 / 1.01, 1 / 4.01],
        "auto-v": [2.0, 1.0, 0.25],
        "global": [1.0, 0.0, 0.0],
    }
    assert set(expected) == set(CLIP_STYLES) == set(get_args(get_type_hints(Privacy)["clip"]))
    for style, values in expected.items():
        found = clip_factors(norms, 1.0, style, 0.01)
        torch.testing.assert_close(found, torch.tensor(values), rtol=2e-5, atol=1e-6)


def test_an_unknown_style_is_refused():
    with pytest.raises(ConfigError, match="there are vanilla"):
        clip_factors(torch.ones(1), 1.0, "hard", 0.01)


@pytest.mark.parametrize("per_layer", [False, True], ids=["together", "per layer"])
@pytest.mark.parametrize("wanted", LENGTHENING)
def test_no_clip_function_of_a_user_can_lengthen_a_gradient_beyond_the_bound(
    wanted, per_layer, monkeypatch
):
    monkeypatch.setitem(CLIP_STYLES, "my own", LENGTHENING[wanted])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    clipping = Clipping(max_norm=0.1, style="my own", per_layer=per_layer)
    clipper, x = GradientClipper(model, clipping=clipping), torch.randn(6, 5)
    x[3] *= 1e-4
    for i in range(6):
        found = clipper.clip(
            lambda m, x: m(x).square().sum(dim=1), (x,), 6, mask=torch.arange(6) == i
        )
        assert norm_of(found.total) <= 0.1
    assert float(found.factors.min()) >= 0.0


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e30), min_size=1, max_size=9), st.floats(1e-6, 1e6))
def test_a_clip_function_is_obeyed_where_it_keeps_the_bound(norms, max_norm):
    norms = torch.tensor(norms)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CLIP_STYLES, "half", lambda norms, bound, _: bound / 2 / (norms + 1))
        found = clip_factors(norms, max_norm, "half", 0.0, margin=0.0)
    torch.testing.assert_close(found, max_norm / 2 / (norms + 1))


@pytest.mark.parametrize("per_layer", [False, True], ids=["together", "per layer"])
@pytest.mark.parametrize("looking", LOOKING)
def test_a_clip_function_that_looks_at_other_examples_is_not_admitted(
    looking, per_layer, monkeypatch
):
    monkeypatch.setitem(CLIP_STYLES, "my own", LOOKING[looking])
    model, x = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(3, 5)
    clipper = GradientClipper(model, clipping=Clipping(style="my own", per_layer=per_layer))
    with pytest.raises(PrivacyError):
        admit(clipper, lambda m, x: m(x).square().sum(dim=1), (x,), 3)


def test_a_clip_function_that_looks_at_places_far_behind_is_refused(monkeypatch):
    # Only the first 64 are asked alone.
    monkeypatch.setitem(
        CLIP_STYLES, "my own", lambda norms, *_: (torch.arange(len(norms)) < 80) / (1 + norms)
    )
    with pytest.raises(PrivacyError):
        check_clip_function(torch.rand(100), Clipping(style="my own"))


def test_a_factor_that_is_not_finite_is_zero(monkeypatch):
    monkeypatch.setitem(CLIP_STYLES, "my own", lambda norms, *_: norms.log().sqrt())
    assert clip_factors(torch.tensor([0.5, math.e]), 9.0, "my own", 0.0).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("given", NO_FACTORS)
def test_a_clip_function_that_gives_no_factor_for_each_example_is_named(given, monkeypatch):
    monkeypatch.setitem(CLIP_STYLES, "my own", NO_FACTORS[given])
    clipper, x = (
        GradientClipper(nn.Linear(5, 4), clipping=Clipping(style="my own")),
        torch.randn(3, 5),
    )
    for call in (clipper.clip, partial(admit, clipper)):
        with pytest.raises(ConfigError, match='clip function "my own"'):
            call(lambda m, x: m(x).square().sum(dim=1), (x,), 3)


@pytest.mark.parametrize("per_layer", [False, True], ids=["together", "per layer"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.bool])
def test_factors_of_any_real_type_are_those_of_the_norms_type(dtype, per_layer, monkeypatch):
    def wanted(norms, bound, stability):
        return (0.5 * (norms >= 0) if dtype.is_floating_point else norms >= 0).to(dtype)

    monkeypatch.setitem(CLIP_STYLES, "my own", wanted)
    monkeypatch.setitem(CLIP_STYLES, "float32", lambda *given: wanted(*given).float())
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(3, 5)

    def loss(m, x):
        return m(x).square().sum(dim=1)

    found = []
    for style in ("my own", "float32"):
        clipper = GradientClipper(model, clipping=Clipping(style=style, per_layer=per_layer))
        admit(clipper, loss, (x,), 3)
        found.append(clipper.clip(loss, (x,), 3))
    assert found[0].factors.dtype == torch.float32
    torch.testing.assert_close(found[0].total, found[1].total, rtol=0, atol=0)


@pytest.mark.parametrize("style", STYLES)
def test_clip_functions_that_look_at_each_example_are_admitted(style):
    model = nn.Linear(5, 4)
    clipper = GradientClipper(model, clipping=Clipping(style=style))
    admit(clipper, lambda m, x: m(x).square().sum(dim=1), (torch.randn(3, 5),), 3)


def test_a_clip_function_that_looks_at_others_in_large_batches_is_refused_in_the_first(
    monkeypatch,
):
    def looking(norms, bound, stability):
        others = norms.mean() if len(norms) > 20 else 0.0
        return bound / (norms + others + 1.0)

    monkeypatch.setitem(CLIP_STYLES, "my own", looking)
    model, x = nn.Linear(5, 4), torch.randn(24, 5)
    clipper = GradientClipper(model, clipping=Clipping(style="my own"))

    def clip(mask):
        return clipper.clip(lambda m, x: m(x).square().sum(dim=1), (x,), 24, mask)

    admit(clipper, lambda m, x: m(x).square().sum(dim=1), (x[:3],), 3)
    with pytest.raises(PrivacyError):
        check_contributions(clipper, clip, 24)
