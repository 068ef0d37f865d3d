from dataclasses import replace

import numpy as np
import pytest
import torch
from interpreted import interpret_kernels
from scipy import stats

from sfumato.errors import ConfigError, PrivacyError
from sfumato.privacy.budget import Plan
from sfumato.privacy.flat import Sums
from sfumato.privacy.ledger import Header, Ledger
from sfumato.privacy.noise import privatize, to_noisy_mean
from sfumato.privacy.sampling import Secret
from sfumato.privacy.seal import fingerprint, seal

PLAN = Plan(noise_multiplier=1.5, max_norm=4.0, expected_batch=20, rate=0.1, steps=50)
SOURCES = ["philox", "chacha20"]
SEED = Secret.from_seed(0)


@pytest.fixture(autouse=True, params=["torch", "kernels"])
def way(request, monkeypatch):
    """Noise and tags as a CPU makes them; and as a GPU does, in Triton's interpreter."""
    if request.param == "kernels":
        interpret_kernels(monkeypatch)
    return request.param


def ledger(noise="philox", secret=SEED, **changes):
    settings = {"fixed_seed": secret.fixed, "secret": secret.commitment, **changes}
    return Ledger(Header(data="faces", delta=1e-5, noise=noise, **settings))


def release(total, *, plan=PLAN, book=None, secret=SEED, step=0, noise="philox"):
    book = ledger(noise, secret) if book is None else book
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
        book = ledger(noise, secret)
        noisy = privatize(zeros, PLAN, book, secret, step=step, stage=stage)
        return [tensor.double().numpy() for tensor in noisy.values()]

    rows = [*draw(), *draw(seed=1), *draw(stage="moments"), *draw(step=1), *draw(step=2)]
    correlation = np.corrcoef(rows) - np.eye(len(rows))
    assert np.abs(correlation).max() < 0.1
    assert np.array_equal(draw()[0], rows[0])


@pytest.mark.parametrize("noise", SOURCES)
def test_two_runs_from_the_operating_system_never_share_noise(noise):
    first = release(torch.zeros(100), secret=Secret.draw(), noise=noise)
    second = release(torch.zeros(100), secret=Secret.draw(), noise=noise)
    assert not (first == second).any()


@pytest.mark.parametrize("noise", SOURCES)
def test_no_noise_ever_hides_two_different_sums(noise):
    # The same secret, stage and step, in two ledgers: the difference must not come out exactly.
    secret = Secret.draw()
    one = release(torch.zeros(200), secret=secret, noise=noise)
    other = release(torch.ones(200), secret=secret, noise=noise)
    assert float(((other - one) * PLAN.expected_batch).std()) > PLAN.noise_deviation
    twin = release(torch.zeros(200), secret=secret, noise=noise)
    assert not (one == twin).any()


@pytest.mark.parametrize("noise", SOURCES)
def test_a_step_repeated_after_a_crash_is_the_same_release(noise):
    secret = Secret.draw()
    book = ledger(noise, secret)
    total = torch.randn(50)
    first = release(total, book=book, secret=secret)
    resumed = Ledger.from_records(book.records())
    assert torch.equal(release(total, book=resumed, secret=secret), first)
    assert len(resumed.events) == 1
    again = Ledger.from_records(book.records())
    changed = total.clone()
    changed[0] += 1e-3
    other = release(changed, book=again, secret=secret)
    assert len(again.events) == 2, "another sum is another release, and pays"
    assert again.epsilon() > book.epsilon()
    assert not (other == first).any()


def test_equal_sums_do_not_show_in_the_public_ledger():
    secret = Secret.draw()
    book = ledger(secret=secret)
    for step in range(5):
        release(torch.zeros(4), book=book, secret=secret, step=step)
    assert len({event.tag for event in book.events}) == 5


def test_sums_that_differ_in_anything_have_different_tags():
    sums = [torch.tensor(values) for values in ([0.0, 0, 0, 2, 1], [0.0, 0, 1, 0, 2])]
    one, other = (fingerprint({"x": t}, SEED, ("a", 0)) for t in sums)
    assert one != other
    assert fingerprint({"x": sums[0][None]}, SEED, ("a", 0)) != one
    assert fingerprint({"y": sums[0]}, SEED, ("a", 0)) != one


def test_order_and_layout_belong_to_the_tag_since_noise_follows_them():
    one, other = torch.zeros(2, 3, 2, 2), torch.ones(4)
    first = fingerprint({"a": one, "b": other}, SEED, ("a", 0))
    assert fingerprint({"b": other, "a": one}, SEED, ("a", 0)) != first
    lying = one.contiguous(memory_format=torch.channels_last)
    assert fingerprint({"a": lying, "b": other}, SEED, ("a", 0)) != first
    assert fingerprint({"a": one.double(), "b": other}, SEED, ("a", 0)) != first
    assert fingerprint(Sums.of({"a": one, "b": other}), SEED, ("a", 0)) == first


@pytest.mark.parametrize("noise", SOURCES)
def test_every_coordinate_of_every_tensor_gets_its_noise_once(noise):
    # With a fixed seed the noise depends on the place alone: parts get what the whole gets.
    whole = torch.arange(5000.0)
    parts = {
        "a": whole[:24].view(2, 3, 4),
        "none": whole[:0],
        "b": whole[24:4999],
        "c": whole[4999],
    }
    found = privatize(parts, PLAN, ledger(noise), SEED, step=0, stage="train")
    assert {name: t.shape for name, t in found.items()} == {n: t.shape for n, t in parts.items()}
    wanted = release(whole, noise=noise)
    assert torch.equal(torch.cat([t.flatten() for t in found.values()]), wanted)
    drawn = wanted * PLAN.expected_batch - whole
    assert (drawn != 0).all()
    assert len(drawn.unique()) > 4900


@pytest.mark.parametrize("noise", SOURCES)
def test_sums_that_lie_flat_are_released_like_others(noise):
    given = {"a": torch.randn(3, 4), "b": torch.randn(7)}
    secret = Secret.draw()
    book = ledger(noise, secret)
    first = privatize(given, PLAN, book, secret, step=0, stage="train")
    sums = Sums.of(given)
    resumed = Ledger.from_records(book.records())
    second = privatize(sums, PLAN, resumed, secret, step=0, stage="train")
    assert len(resumed.events) == 1
    for name in given:
        assert torch.equal(first[name], second[name])
        assert torch.equal(sums[name], second[name]), "of the exact sums nothing is left"


@pytest.mark.parametrize("noise", SOURCES)
def test_tensors_that_lie_apart_are_left_as_they_are(noise):
    given = {"a": torch.randn(3, 4), "b": torch.randn(1)}
    before = {name: tensor.clone() for name, tensor in given.items()}
    privatize(given, PLAN, ledger(noise), SEED, step=0, stage="train")
    assert all(torch.equal(given[name], before[name]) for name in given)


@pytest.mark.parametrize("noise", SOURCES)
def test_tensors_of_several_types_share_no_noise(noise):
    zeros = {"a": torch.zeros(3000), "b": torch.zeros(3000, dtype=torch.float64)}
    found = privatize(zeros, PLAN, ledger(noise), SEED, step=0, stage="train")
    assert {name: t.dtype for name, t in found.items()} == {n: t.dtype for n, t in zeros.items()}
    rows = np.stack([tensor.double().numpy() for tensor in found.values()])
    assert abs(np.corrcoef(rows)[0, 1]) < 0.1
    for row in rows:
        drawn = row * PLAN.expected_batch
        assert stats.kstest(drawn, "norm", (0, PLAN.noise_deviation)).pvalue > 1e-3


@pytest.mark.parametrize("noise", SOURCES)
def test_a_difference_anywhere_is_other_noise_everywhere(noise):
    secret = Secret.draw()
    book = ledger(noise, secret)
    given = {"a": torch.zeros(200), "b": torch.zeros(200, dtype=torch.float64)}
    first = privatize(given, PLAN, book, secret, step=0, stage="train")
    for name in given:
        changed = {n: t + (n == name) for n, t in given.items()}
        again = Ledger.from_records(book.records())
        found = privatize(changed, PLAN, again, secret, step=0, stage="train")
        assert len(again.events) == 2
        assert not any((found[n] == first[n]).any() for n in given)


def test_what_the_ledger_shows_is_no_part_of_what_noise_is_drawn_from():
    secret = Secret.draw()
    sums = Sums.of({"a": torch.randn(20), "b": torch.randn(20, dtype=torch.float64)})
    found = seal(sums, secret, ("book", "train", 0), 1.0)
    tag = found.tag if isinstance(found.tag, str) else found.tag()
    keys = [key if isinstance(key, bytes) else key[:8].numpy().tobytes() for key in found.keys]
    assert len(tag) == 24
    assert len(set(keys)) == 2
    for key in keys:
        assert len(key) == 32
        assert not any(key[at : at + 4].hex() in tag for at in range(0, 32, 4))


@pytest.mark.parametrize("noise", SOURCES)
def test_the_same_sums_under_noise_of_another_size_get_other_noise(noise):
    # Twice the first less the second would be the sums, if both were the same deviates.
    secret, total = Secret.draw(), torch.randn(500)
    header = ledger(noise, secret).header
    plans = [replace(PLAN, noise_multiplier=size) for size in (1.0, 2.0)]
    one, two = (release(total, plan=p, book=Ledger(header), secret=secret) for p in plans)
    left = (2 * one - two) * PLAN.expected_batch - total
    assert float(left.std()) > 2 * PLAN.max_norm


@pytest.mark.parametrize("noise", SOURCES)
@pytest.mark.parametrize("secret", [SEED, Secret.draw()], ids=["fixed", "drawn"])
def test_a_model_of_which_a_part_is_on_a_cpu_is_released_too(noise, secret, way, monkeypatch):
    if way == "torch":
        pytest.skip("that part is everything")
    interpret_kernels(monkeypatch, lambda flat: flat.dtype == torch.float32)
    zeros = {"a": torch.zeros(3000), "b": torch.zeros(3000, dtype=torch.float64)}
    book = ledger(noise, secret)
    first = privatize(zeros, PLAN, book, secret, step=0, stage="train")
    again = Ledger.from_records(book.records())
    second = privatize(zeros, PLAN, again, secret, step=0, stage="train")
    assert len(again.events) == 1
    for name, found in first.items():
        assert torch.equal(found, second[name])
        drawn = found.double().numpy() * PLAN.expected_batch
        assert stats.kstest(drawn, "norm", (0, PLAN.noise_deviation)).pvalue > 1e-4
    zeros["a"][3] = torch.inf
    with pytest.raises(PrivacyError, match="not finite"):
        privatize(zeros, PLAN, book, secret, step=1, stage="train")


def test_two_releases_of_one_step_cost_as_one_with_less_noise():
    # They share a Poisson batch, so they are not amplified twice.
    secret = Secret.draw()
    plan = Plan(noise_multiplier=1.0, rate=0.01, expected_batch=10, steps=1)
    book = ledger(secret=secret)
    release(torch.zeros(3), plan=plan, book=book, secret=secret)
    for _ in range(3):
        book = Ledger.from_records(book.records())
        release(torch.randn(3), plan=plan, book=book, secret=secret)
    assert len(book.events) == 4
    assert book.epsilon() == pytest.approx(3.03, rel=0.01)


def test_noise_that_would_vanish_is_refused():
    with pytest.raises(ConfigError, match="vanishes"):
        Plan(noise_multiplier=1.0, max_norm=1e-46, expected_batch=1)


def test_noise_on_the_cpu_has_more_than_32_bits_of_seed():
    # torch's own CPU generator takes the low 32 bits only: 9 minutes of search on 2 cores.
    def noise(key):
        found = torch.zeros(64)
        to_noisy_mean(found, 1.0, 1.0, bytes(key))
        return found

    low = noise(bytes(16))
    for byte in range(16):
        key = bytearray(16)
        key[byte] = 1
        assert not torch.equal(noise(key), low)


def test_the_ledger_is_charged_before_the_noise_is_made(monkeypatch):
    book = ledger()

    def spy(total, deviation, divisor, key):
        seen.append(len(book.events))

    seen = []
    monkeypatch.setattr("sfumato.privacy.noise.to_noisy_mean", spy)
    release(torch.zeros(3), book=book)
    assert seen == [1]


def test_nothing_is_released_when_the_ledger_cannot_be_written():
    def write(record):
        if "event" in record:
            raise OSError("disk full")

    header = Header(data="faces", delta=1e-5, fixed_seed=True, secret=SEED.commitment)
    with pytest.raises(OSError, match="disk full"):
        release(torch.zeros(3), book=Ledger(header, write))


def test_noise_from_another_secret_than_the_ledgers_is_refused():
    with pytest.raises(PrivacyError, match="not the secret"):
        release(torch.zeros(3), book=ledger(secret=Secret.draw()), secret=Secret.draw())


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
    with pytest.raises(PrivacyError, match="already taken"):
        release(torch.ones(3), book=book)


def test_a_fixed_seed_must_be_declared():
    with pytest.raises(PrivacyError, match="not for release"):
        release(torch.zeros(3), book=ledger(fixed_seed=False))


def test_plan_and_ledger_must_speak_of_the_same_neighbours():
    with pytest.raises(PrivacyError, match="replace"):
        release(torch.zeros(3), book=ledger(relation="replace"))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 500, 998])
def test_a_sum_that_is_not_finite_is_refused(bad, place, way):
    book, wrong = ledger(), torch.zeros(999)
    wrong[place] = bad
    sums = {"fine": torch.ones(999), "wrong": wrong, "empty": torch.zeros(0)}
    if way == "kernels":  # later, and until then nothing of it shows
        found = privatize(sums, PLAN, book, SEED, step=0, stage="train")
        assert all(tensor.isnan().all() for tensor in found.values())
        with pytest.raises(PrivacyError, match="of train, step 0, are not finite"):
            book.epsilon()
        return
    with pytest.raises(PrivacyError, match='"wrong" is not finite'):
        privatize(sums, PLAN, book, SEED, step=0, stage="train")
    assert not book.events


def test_what_a_gpu_cannot_tell_yet_is_paid_before_and_told_after(way):
    written, secret = [], Secret.draw()
    header = Header(data="faces", delta=1e-5, secret=secret.commitment)
    book = Ledger(header, written.append)
    for step in range(3):
        release(torch.ones(4), book=book, secret=secret, step=step)
    told_later = way == "kernels"
    # The header, three lines, and the tags of all but the last step.
    assert len(written) == 4 + 2 * told_later
    again = Ledger.from_records(written)
    assert again.tags("train", 2) == {""} if told_later else again.tags("train", 2) != {""}
    book.settle()
    book.settle()
    assert len(written) == 4 + 3 * told_later
    assert Ledger.from_records(written).events == book.events
    for step, event in enumerate(book.events):
        place = (header.id, "train", step)
        assert event.tag == fingerprint({"x": torch.ones(4)}, secret, place)


def test_a_crash_before_a_tag_is_told_costs_that_release_and_never_hides_one(way):
    if way == "torch":
        pytest.skip("a CPU knows the tag before it pays")
    written, secret = [], Secret.draw()
    header = Header(data="faces", delta=1e-5, secret=secret.commitment)
    first = release(torch.ones(4), book=Ledger(header, written.append), secret=secret)
    resumed = Ledger.from_records(written, written.append)
    assert torch.equal(release(torch.ones(4), book=resumed, secret=secret), first)
    assert len(resumed.events) == 2, "nobody knows that it was the same"
    assert Ledger.from_records(written).events == resumed.events


def test_whole_numbers_are_refused():
    with pytest.raises(PrivacyError, match="float32"):
        release(torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_in_half_precision_are_refused(dtype):
    # In bfloat16 1002 ones are 1000 and 1003 are 1004: one example moves the sum by four.
    with pytest.raises(PrivacyError, match="Add up in float32"):
        release(torch.zeros(4, dtype=dtype))


@pytest.mark.parametrize("noise", SOURCES)
def test_sums_keep_their_type(noise):
    for dtype in (torch.float32, torch.float64):
        assert release(torch.zeros(4, dtype=dtype), noise=noise).dtype == dtype


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
