import numpy as np
import pytest
import torch
from scipy import stats

from sfumato.errors import PrivacyError
from sfumato.privacy.budget import Plan
from sfumato.privacy.ledger import Header, Ledger
from sfumato.privacy.noise import privatize
from sfumato.privacy.sampling import Secret

PLAN = Plan(noise_multiplier=1.5, max_norm=4.0, expected_batch=20, rate=0.1, steps=50)
SOURCES = ["torch", "chacha20"]


def ledger(noise="torch", fixed_seed=True, **changes):
    return Ledger(Header(data="faces", delta=1e-5, noise=noise, fixed_seed=fixed_seed, **changes))


def release(total, *, plan=PLAN, book=None, secret=None, step=0, noise="torch"):
    book = ledger(noise) if book is None else book
    secret = Secret.from_seed(0) if secret is None else secret
    return privatize({"x": total}, plan, book, secret, step=step, stage="train")["x"]


@pytest.mark.parametrize("noise", SOURCES)
def test_the_noise_has_the_right_scale_and_two_thirds_of_it_is_rejected(noise):
    # A sound mechanism fails once in 1000 seeds; the seed is fixed.
    drawn = release(torch.zeros(20_000), noise=noise).double().numpy() * PLAN.expected_batch
    assert stats.kstest(drawn, "norm", (0, PLAN.noise_deviation)).pvalue > 1e-3
    for wrong in (2 / 3, 3 / 2, 0.9, 1.1):
        assert stats.kstest(drawn, "norm", (0, wrong * PLAN.noise_deviation)).pvalue < 1e-6


@pytest.mark.parametrize("noise", SOURCES)
def test_the_sum_is_divided_by_the_public_expected_batch(noise):
    total = torch.full((50_000,), 300.0)
    result = release(total, noise=noise)
    allowed = 5 * PLAN.noise_deviation / PLAN.expected_batch / len(total) ** 0.5
    assert float(result.mean()) == pytest.approx(300 / 20, abs=allowed)


@pytest.mark.parametrize("noise", SOURCES)
def test_an_empty_batch_is_still_noised_and_charged(noise):
    book = ledger(noise)
    result = release(torch.zeros(1000), book=book)
    assert float(result.std()) == pytest.approx(1.5 * 4 / 20, rel=0.1)
    assert len(book.events) == 1


@pytest.mark.parametrize("noise", SOURCES)
def test_steps_stages_tensors_and_runs_get_independent_noise(noise):
    def draw(seed=0, stage="train", step=0):
        zeros = {"a": torch.zeros(2000), "b": torch.zeros(2000)}
        secret = Secret.from_seed(seed)
        noisy = privatize(zeros, PLAN, ledger(noise), secret, step=step, stage=stage)
        return [tensor.double().numpy() for tensor in noisy.values()]

    rows = [*draw(), *draw(seed=1), *draw(stage="moments"), *draw(step=1), *draw(step=2)]
    correlation = np.corrcoef(rows) - np.eye(len(rows))
    assert np.abs(correlation).max() < 0.1
    assert np.array_equal(draw()[0], rows[0])


@pytest.mark.parametrize("noise", SOURCES)
def test_two_runs_from_the_operating_system_never_share_noise(noise):
    book = ledger(noise, fixed_seed=False)
    first = release(torch.zeros(100), book=book, secret=Secret.draw())
    second = release(torch.zeros(100), book=book, secret=Secret.draw(), step=1)
    assert not (first == second).any()


def test_the_ledger_is_charged_before_the_noise_is_made():
    def write(record):
        if "event" in record:
            raise OSError("disk full")

    book = Ledger(Header(data="faces", delta=1e-5, fixed_seed=True), write)
    with pytest.raises(OSError, match="disk full"):
        release(torch.zeros(3), book=book)


def test_the_event_says_what_was_done():
    book = ledger()
    release(torch.zeros(3), book=book, step=7)
    (event,) = book.events
    assert (event.stage, event.step, event.rate, event.data) == ("train", 7, 0.1, "faces")
    assert event.noise_multiplier == 1.5


def test_steps_beyond_the_plan_are_refused():
    with pytest.raises(PrivacyError, match="budget is spent"):
        release(torch.zeros(3), step=50)


def test_the_same_step_cannot_be_released_twice():
    book = ledger()
    release(torch.zeros(3), book=book)
    with pytest.raises(PrivacyError, match="second sum"):
        release(torch.ones(3), book=book)


def test_a_fixed_seed_must_be_declared():
    with pytest.raises(PrivacyError, match="not for release"):
        release(torch.zeros(3), book=ledger(fixed_seed=False))


def test_plan_and_ledger_must_speak_of_the_same_neighbours():
    with pytest.raises(PrivacyError, match="replace"):
        release(torch.zeros(3), book=ledger(relation="replace"))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_sum_that_is_not_finite_is_refused(bad):
    with pytest.raises(PrivacyError, match="not finite"):
        release(torch.tensor([0.0, bad]))


def test_whole_numbers_are_refused():
    with pytest.raises(PrivacyError, match="floating point"):
        release(torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("noise", SOURCES)
def test_half_precision_sums_are_noised_in_float32(noise):
    result = release(torch.zeros(64, dtype=torch.bfloat16), noise=noise)
    assert result.dtype == torch.float32
    assert release(torch.zeros(4, dtype=torch.float64), noise=noise).dtype == torch.float64


def test_no_noise_is_an_exact_release_and_the_ledger_says_infinite():
    book = ledger()
    plan = Plan(noise_multiplier=0.0, expected_batch=2)
    assert release(torch.ones(3), plan=plan, book=book).tolist() == [0.5, 0.5, 0.5]
    assert book.epsilon() == float("inf")
    assert book.objections


def test_the_sum_that_was_given_is_left_alone():
    total = torch.zeros(5)
    release(total)
    assert total.tolist() == [0.0] * 5
