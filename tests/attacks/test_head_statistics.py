import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sfumato.attacks.head_statistics import WeightStatistics, weight_statistics
from sfumato.attacks.heads import HeadRecipe
from sfumato.attacks.shadow_heads import Heads, ShadowHeads
from sfumato.errors import DataError, RunError


def heads(weights, kind="a"):
    return Heads(weights, torch.zeros(len(weights), 1, dtype=torch.int64), kind)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 2**31))
def test_statistics_in_pieces_are_numpys_of_the_whole(sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    pieces = [torch.randn(size, 4, generator=generator) for size in [*sizes, 20]]
    # A large mean and a small deviation: the naive formula loses all digits.
    pieces = [
        piece * torch.tensor([1.0, 1e-3, 10, 1]) + torch.tensor([0, 50.0, 0, 1]) for piece in pieces
    ]
    found = weight_statistics([heads(piece) for piece in pieces], correlation=True)
    whole = torch.cat(pieces).double().numpy()
    assert found.count == len(whole)
    np.testing.assert_allclose(found.mean.numpy(), whole.mean(0), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(found.std.numpy(), whole.std(0), rtol=1e-9)
    assert found.keep.all()
    wanted = np.corrcoef(whole.T)
    np.testing.assert_allclose(found.correlation.numpy(), wanted, rtol=0, atol=1e-9)


def test_correlation_is_found_only_when_asked_for():
    assert weight_statistics([heads(torch.randn(5, 3))]).correlation is None


def test_standardised_heads_have_mean_zero_and_deviation_one():
    sample = heads(3 + 0.01 * torch.randn(500, 6))
    found = weight_statistics([sample]).standardise(sample)
    assert found.dtype == torch.float32
    assert found.mean(0).abs().max() < 1e-5
    assert (found.std(0, correction=0) - 1).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, 0.1, 1e6 / 3])
def test_weights_that_do_not_vary_are_named_and_say_nothing(value, dtype):
    recipe = HeadRecipe(classes=2)
    weights = torch.randn(301, recipe.num_parameters(3), dtype=dtype)
    weights[:, 4] = weights[:, 7] = value
    found = weight_statistics(map(heads, weights.split(50)), correlation=True)
    assert found.dropped(recipe, 3) == ["weight[1, 1]", "bias[1]"]
    z = found.standardise(heads(weights))
    assert z.shape == weights.shape
    assert not z[:, [4, 7]].any()
    assert z.isfinite().all()
    assert found.correlation.isfinite().all()
    assert found.correlation[4].tolist() == [0, 0, 0, 0, 1, 0, 0, 0]


def test_a_dead_feature_of_heads_that_start_at_zero_says_nothing():
    features = torch.randn(40, 5)
    features[:, 2] = 0
    recipe = HeadRecipe(classes=2, init_std=0.0)
    shadow_heads = ShadowHeads(features, torch.arange(40) % 2, recipe, 0)
    found = weight_statistics([shadow_heads.batch(0, 100), shadow_heads.batch(1, 100)])
    assert found.dropped(recipe, 5)[:2] == ["weight[0, 2]", "weight[1, 2]"]
    assert found.standardise(shadow_heads.batch(2, 9)).isfinite().all()


def test_heads_of_other_shadow_heads_are_refused():
    features, labels = torch.randn(40, 5), torch.arange(40) % 2
    recipe = HeadRecipe(classes=2)
    ours = ShadowHeads(features, labels, recipe, 0)
    found = weight_statistics([ours.batch(0, 20)])
    found.standardise(ShadowHeads(features, labels, recipe, 1).batch(0, 3))
    for other in (
        ShadowHeads(features + 1, labels, recipe, 0),
        ShadowHeads(features, labels, HeadRecipe(classes=2, lr=0.1), 0),
    ):
        with pytest.raises(RunError, match="statistics from other shadow heads"):
            found.standardise(other.batch(0, 3))
        with pytest.raises(RunError, match="came after heads of kind"):
            weight_statistics([ours.batch(0, 3), other.batch(0, 3)])


def test_statistics_of_nothing_are_refused():
    for batches in ([], [heads(torch.randn(0, 3))]):
        with pytest.raises(DataError, match="no heads"):
            weight_statistics(batches)


def test_statistics_survive_a_file(tmp_path):
    sample = heads(torch.randn(50, 6))
    found = weight_statistics([sample], correlation=True)
    found.save(tmp_path / "statistics.safetensors")
    again = WeightStatistics.load(tmp_path / "statistics.safetensors")
    assert (again.count, again.kind) == (found.count, found.kind)
    assert torch.equal(again.standardise(sample), found.standardise(sample))
    assert torch.equal(again.correlation, found.correlation)


def test_fake_weights_have_the_correlation_of_real_ones():
    mixed = torch.randn(4000, 3) @ torch.tensor([[1.0, 0.8, 0], [0, 0.6, 0], [0, 0, 2]])
    found = weight_statistics([heads(mixed)], correlation=True)
    fake = found.fake(40_000, seed=0).double()
    np.testing.assert_allclose(np.corrcoef(fake.T), found.correlation.numpy(), atol=0.03)
