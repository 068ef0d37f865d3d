"""Tags and keys: a repeated release is known, and no noise hides two different sums."""

from dataclasses import replace

import pytest
import torch
from noises import BOTH, EACH, PLAN, SEED, SOURCES, both_ways, ledger, release
from samples import sampled

from sfumato.privacy.flat import Sums
from sfumato.privacy.ledger import Ledger, LedgerHeader
from sfumato.privacy.noise import privatize
from sfumato.privacy.seal import seal, tag_of
from sfumato.privacy.session_key import SessionKey

way = both_ways


@pytest.mark.parametrize("noise", SOURCES)
def test_no_noise_ever_hides_two_different_sums(noise):
    # The same secret, stage and step, in two ledgers: the difference must not come out exactly.
    secret = SessionKey.draw()
    one = release(torch.zeros(200), secret=secret, noise=noise)
    other = release(torch.ones(200), secret=secret, noise=noise)
    assert float(((other - one) * PLAN.expected_batch).std()) > PLAN.noise_deviation
    twin = release(torch.zeros(200), secret=secret, noise=noise)
    assert not (one == twin).any()


@EACH
def test_a_step_repeated_after_a_crash_is_the_same_release(noise):
    secret = SessionKey.draw()
    book = ledger(noise, secret)
    total = torch.randn(50)
    first = release(total, book=book, secret=secret)
    resumed = Ledger.from_records(book.records())
    assert torch.equal(release(total, book=resumed, secret=secret), first)
    assert len(resumed.releases) == 1
    again = Ledger.from_records(book.records())
    changed = total.clone()
    changed[0] += 1e-3
    other = release(changed, book=again, secret=secret)
    assert len(again.releases) == 2, "another sum is another release, and pays"
    assert again.epsilon() > book.epsilon()
    assert not (other == first).any()


def test_equal_sums_do_not_show_in_the_public_ledger():
    secret = SessionKey.draw()
    book = ledger(secret=secret)
    for step in range(5):
        release(torch.zeros(4), book=book, secret=secret, step=step)
    assert len({release.tag for release in book.releases}) == 5


def test_sums_that_differ_in_anything_have_different_tags():
    sums = [torch.tensor(values) for values in ([0.0, 0, 0, 2, 1], [0.0, 0, 1, 0, 2])]
    one, other = (tag_of({"x": t}, SEED, ("book", "a", 0)) for t in sums)
    assert one != other
    assert tag_of({"x": sums[0][None]}, SEED, ("book", "a", 0)) != one
    assert tag_of({"y": sums[0]}, SEED, ("book", "a", 0)) != one


def test_order_and_layout_belong_to_the_tag_since_noise_follows_them():
    one, other = torch.zeros(2, 3, 2, 2), torch.ones(4)
    first = tag_of({"a": one, "b": other}, SEED, ("book", "a", 0))
    assert tag_of({"b": other, "a": one}, SEED, ("book", "a", 0)) != first
    lying = one.contiguous(memory_format=torch.channels_last)
    assert tag_of({"a": lying, "b": other}, SEED, ("book", "a", 0)) != first
    assert tag_of({"a": one.double(), "b": other}, SEED, ("book", "a", 0)) != first
    assert tag_of(Sums.of({"a": one, "b": other}), SEED, ("book", "a", 0)) == first


@pytest.mark.parametrize("noise", SOURCES)
def test_a_difference_anywhere_is_other_noise_everywhere(noise):
    secret = SessionKey.draw()
    book = ledger(noise, secret)
    given = {"a": torch.zeros(200), "b": torch.zeros(200, dtype=torch.float64)}
    first = privatize(given, PLAN, book, secret, step=0, stage="train")
    for name in given:
        changed = {n: t + (n == name) for n, t in given.items()}
        again = Ledger.from_records(book.records())
        found = privatize(changed, PLAN, again, secret, step=0, stage="train")
        assert len(again.releases) == 2
        assert not any((found[n] == first[n]).any() for n in given)


def test_what_the_ledger_shows_is_no_part_of_what_noise_is_drawn_from():
    secret = SessionKey.draw()
    sums = Sums.of({"a": torch.randn(20), "b": torch.randn(20, dtype=torch.float64)})
    found = seal(sums, secret, ("book", "train", 0), 1.0)
    tag = found.tag if isinstance(found.tag, str) else found.tag()
    keys = [key if isinstance(key, bytes) else key[:8].numpy().tobytes() for key in found.keys]
    assert len(tag) == 24
    assert len(set(keys)) == 2
    for key in keys:
        assert len(key) == 32
        assert not any(key[at : at + 4].hex() in tag for at in range(0, 32, 4))


@sampled(noise=SOURCES, change=[{"noise_multiplier": 2.0}, {"noise_decay": 2.0}])
def test_the_same_sums_under_noise_of_another_size_get_other_noise(noise, change):
    # Twice the first less the second would be the sums, if both were the same deviates.
    secret, total = SessionKey.draw(), torch.randn(500)
    header = ledger(noise, secret).header
    plans = [replace(PLAN, **{"noise_multiplier": 1.0, **more}) for more in ({}, change)]
    one, two = (release(total, plan=p, book=Ledger(header), secret=secret, step=49) for p in plans)
    left = (2 * one - two) * PLAN.expected_batch - total
    assert float(left.std()) > 2 * PLAN.max_norm


@BOTH
def test_what_a_gpu_cannot_tell_yet_is_paid_before_and_told_after(way):
    written, secret = [], SessionKey.draw()
    header = LedgerHeader(data="faces", delta=1e-5, secret=secret.commitment)
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
    assert Ledger.from_records(written).releases == book.releases
    for step, line in enumerate(book.releases):
        place = (header.id, "train", step)
        assert line.tag == tag_of({"x": torch.ones(4)}, secret, place)


@pytest.mark.parametrize("way", ["kernels"], indirect=True)
def test_a_crash_before_a_tag_is_told_costs_that_release_and_never_hides_one(way):
    # A CPU knows the tag before it pays.
    written, secret = [], SessionKey.draw()
    header = LedgerHeader(data="faces", delta=1e-5, secret=secret.commitment)
    first = release(torch.ones(4), book=Ledger(header, written.append), secret=secret)
    resumed = Ledger.from_records(written, written.append)
    assert torch.equal(release(torch.ones(4), book=resumed, secret=secret), first)
    assert len(resumed.releases) == 2, "nobody knows that it was the same"
    assert Ledger.from_records(written).releases == resumed.releases
