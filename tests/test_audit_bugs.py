"""Real bugs of private training, planted in real runs, and what catches each.

    noise of half the size             check "noise size"; the bound by the noise is above epsilon
    clipping skipped for one layer     admission; what one example adds
    clipping skipped for all           admission; what one example adds; check "contributions"
    noise for each micro-batch         the ledger, which refuses a step twice; check "noise size";
                                       where it adds up to too little, the bound by the noise too
    a shuffle, accounted as Poisson    check "visits"
    a divisor that is the batch's size check "steady noise"
    a parameter outside the norm       admission; what one example adds
    statistics without noise           admission; check "statistics"
    the same noise in every step       check "fresh noise"
    a seed that is known         the ledger, in its objections

What canaries cannot see (another layer than their own) is found by admission before the first step,
and by what one example adds, which is measured in the first step. In tests of the second line of
defence the first ones are switched off.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from canary_runs import ledger_of, run_small, unpriced

from sfumato.clipping import sums
from sfumato.clipping.clip import GradientClipper
from sfumato.commands.audit.canaries import check_run, examine_canaries
from sfumato.errors import PrivacyError, UnsupportedLayer
from sfumato.privacy import noise, sampling
from sfumato.training import noisy_gradient

SURE = 0.9999
"""So that a sound run fails here once in ten thousand times."""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Epsilon is priced where it is asked for."""
    unpriced(monkeypatch)


@pytest.fixture
def not_admitted(monkeypatch):
    """Models are not tested before training."""
    monkeypatch.setattr("sfumato.commands.train.step.admit", lambda *_, **__: None)


@pytest.fixture
def not_measured(monkeypatch):
    """What one example adds is not measured in the first step."""
    monkeypatch.setattr("sfumato.training.private_step.contributions_due", lambda _: False)


def caught(out, **changes):
    """Train, and return the checks that failed."""
    run_small(out, **changes)
    return {check.name for check in check_run(out, confidence=SURE) if check.passed is False}


def proved(out):
    """The largest of the bounds, and what the ledger guarantees."""
    bounds = examine_canaries(out, confidence=SURE).bounds
    return max(bound.epsilon for bound in bounds), ledger_of(out).epsilon()


def test_a_sound_run_passes(tmp_path):
    assert caught(tmp_path / "run") == set()
    bound, epsilon = proved(tmp_path / "run")
    assert bound <= epsilon


def test_noise_of_half_the_size_is_caught(tmp_path, monkeypatch):
    whole = noise.to_philox_mean
    monkeypatch.setattr(
        noise, "to_philox_mean", lambda total, size, *rest: whole(total, size / 2, *rest)
    )
    assert "noise size" in caught(tmp_path / "run")
    bound, epsilon = proved(tmp_path / "run")
    assert bound > 2 * epsilon


def unclipped_weight(original):
    """The sums of `_add_up`, with every example's whole gradient in that of the weight."""

    def add_up(tape, left, factors, broken, **options):
        present = (factors > 0).to(factors.dtype)
        total = original(tape, left, factors, broken, **options)
        with torch.enable_grad():
            whole = original(tape, left, present, broken)
        return {**total, "1.weight": whole["1.weight"]}

    return add_up


def retained(monkeypatch):
    """Let graphs be used twice, which the planted bugs do."""
    found = torch.autograd.grad
    monkeypatch.setattr(
        torch.autograd, "grad", lambda *a, **k: found(*a, **{**k, "retain_graph": True})
    )


def test_clipping_skipped_for_one_layer_is_not_admitted(tmp_path, monkeypatch):
    retained(monkeypatch)
    monkeypatch.setattr(sums, "_add_up", unclipped_weight(sums._add_up))
    with pytest.raises(UnsupportedLayer, match=r"1\.weight"):
        run_small(tmp_path / "run")


def test_clipping_skipped_for_one_layer_is_noticed_while_training(
    tmp_path, monkeypatch, not_admitted
):
    retained(monkeypatch)
    monkeypatch.setattr(sums, "_add_up", unclipped_weight(sums._add_up))
    with pytest.raises(PrivacyError, match="beyond the bound"):
        run_small(tmp_path / "run", max_grad_norm=0.01)


def unclipped(monkeypatch):
    """Every example's whole gradient in the sums."""
    monkeypatch.setattr(
        "sfumato.clipping.sums.clip_factors", lambda norms, *_, **__: torch.ones_like(norms)
    )


def test_clipping_skipped_for_all_is_noticed_while_training(tmp_path, monkeypatch, not_admitted):
    unclipped(monkeypatch)
    with pytest.raises(PrivacyError, match="beyond the bound"):
        run_small(tmp_path / "run")


def test_clipping_skipped_for_all_is_caught(tmp_path, monkeypatch, not_admitted, not_measured):
    unclipped(monkeypatch)
    assert "contributions" in caught(tmp_path / "run")


def noise_in_parts(monkeypatch, size):
    """Noise for each micro-batch, and none for the step."""
    clip, keys = GradientClipper.clip, iter(range(10**9))

    def noisy(self, *arguments, **options):
        found = clip(self, *arguments, **options)
        drawn = {
            n: t + size * torch.randn(t.shape, generator=torch.Generator().manual_seed(next(keys)))
            for n, t in found.total.items()
        }
        return replace(found, total=drawn)

    monkeypatch.setattr(GradientClipper, "clip", noisy)
    monkeypatch.setattr(noise, "to_philox_mean", lambda total, _, divisor, key: total.div_(divisor))


def test_noise_for_each_micro_batch_is_caught(tmp_path, monkeypatch, not_admitted, not_measured):
    noise_in_parts(monkeypatch, 1.0)
    assert "noise size" in caught(tmp_path / "run")


def test_noise_divided_by_the_number_of_micro_batches_breaks_the_guarantee_and_is_caught(
    tmp_path, monkeypatch, not_admitted, not_measured
):
    # A batch of 150 comes in three parts of 64. Variances add up, so a third of the noise each is
    # 0.58 of it in all.
    noise_in_parts(monkeypatch, 1 / 3)
    assert "noise size" in caught(tmp_path / "run")
    bound, epsilon = proved(tmp_path / "run")
    assert bound > 1.5 * epsilon


def test_a_step_released_in_parts_is_refused(tmp_path, monkeypatch):
    once = noisy_gradient.privatize

    def twice(*arguments, **options):
        once(*arguments, **options)
        return once(*arguments, **options)

    monkeypatch.setattr(noisy_gradient, "privatize", twice)
    with pytest.raises(PrivacyError, match="already taken"):
        run_small(tmp_path / "run")


def test_a_shuffle_that_is_accounted_as_poisson_is_caught(tmp_path, monkeypatch):
    def shuffled(plan, size, secret, place):
        epoch, turn = divmod(place[-1], round(1 / plan.rate))
        order = np.random.default_rng(epoch).permutation(size)
        batch = round(plan.expected_batch)
        return np.sort(order[turn * batch : (turn + 1) * batch])

    monkeypatch.setattr(sampling, "poisson_sample", shuffled)
    assert "visits" in caught(tmp_path / "run")


def test_a_divisor_that_is_the_size_of_the_batch_is_caught(tmp_path, monkeypatch):
    drawn, fixed, sizes = sampling.poisson_sample, noisy_gradient.privatize, []

    def counted(*arguments):
        found = drawn(*arguments)
        sizes.append(len(found))
        return found

    def divided(total, plan, *arguments, **options):
        found = fixed(total, plan, *arguments, **options)
        for t in found.values():
            t.mul_(plan.expected_batch / sizes[-1])
        return found

    monkeypatch.setattr(sampling, "poisson_sample", counted)
    monkeypatch.setattr(noisy_gradient, "privatize", divided)
    assert "steady noise" in caught(tmp_path / "run")


def without_bias(original):
    """Squared norms that leave the bias out."""

    def measure(tape, kept, from_products):
        some = [one for one in kept if "1.bias" not in one.part.sources]
        return original(tape, some, from_products)[0], original(tape, kept, from_products)[1]

    return measure


def test_a_parameter_outside_the_norm_is_not_admitted(tmp_path, monkeypatch):
    monkeypatch.setattr(sums, "_measure", without_bias(sums._measure))
    with pytest.raises(UnsupportedLayer, match="not those of autograd"):
        run_small(tmp_path / "run")


def test_a_parameter_outside_the_norm_is_noticed_while_training(
    tmp_path, monkeypatch, not_admitted
):
    monkeypatch.setattr(sums, "_measure", without_bias(sums._measure))
    with pytest.raises(PrivacyError, match="beyond the bound"):
        run_small(tmp_path / "run", max_grad_norm=0.01)


def test_statistics_without_noise_are_not_admitted(tmp_path):
    with pytest.raises(UnsupportedLayer, match=r'buffer "1\.mean"'):
        run_small(tmp_path / "run", model="canary_runs:statistics")


def test_statistics_that_hide_from_admission_are_refused_while_training(tmp_path):
    with pytest.raises(UnsupportedLayer, match=r'buffer "2\.mean"'):
        run_small(tmp_path / "run", model="canary_runs:hidden_statistics")


def test_statistics_that_hide_from_all_of_that_are_caught(tmp_path, monkeypatch):
    monkeypatch.setattr("sfumato.clipping.buffers.Buffers.check", lambda *_, **__: None)
    assert caught(tmp_path / "run", model="canary_runs:hidden_statistics") == {"statistics"}


def test_noise_that_is_the_same_in_every_step_is_caught(tmp_path, monkeypatch):
    fresh = noise.to_philox_mean
    monkeypatch.setattr(noise, "to_philox_mean", lambda *given: fresh(*given[:3], bytes(16)))
    assert "fresh noise" in caught(tmp_path / "run")


def test_a_seed_that_somebody_knows_is_objected_to(tmp_path):
    run_small(tmp_path / "run", noise_seed=3, steps=2)
    assert "fixed seed" in ledger_of(tmp_path / "run").objections[0]
