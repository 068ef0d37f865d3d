import math

import pytest

from sfumato.errors import PrivacyError, RunError, SfumatoError
from sfumato.privacy.budget import Plan
from sfumato.privacy.ledger import Ledger, LedgerHeader
from sfumato.privacy.releases import Release


def header(**changes):
    return LedgerHeader(**{"data": "faces", "delta": 1e-5, **changes})


def filled(steps=4, **changes):
    ledger = Ledger(header(**changes))
    plan = Plan(noise_multiplier=1.1, expected_batch=10, rate=0.1, steps=100)
    for step in range(steps):
        ledger.charge(plan.release("train", step))
    return ledger


def test_epsilon_is_derived_from_the_events():
    plan = Plan(noise_multiplier=1.1, expected_batch=10, rate=0.1, steps=4)
    assert filled(4).epsilon() == plan.epsilon(1e-5)
    assert Ledger(header()).epsilon() == 0
    assert filled(4, relation="replace").epsilon() > filled(4).epsilon()
    for delta in (None, 1e-7):
        told = filled(4).guarantee(delta)
        assert told["delta"] == (delta or 1e-5)
        assert told["epsilon"] == plan.epsilon(told["delta"])


def test_records_bring_the_same_ledger_back():
    ledger = filled()
    again = Ledger.from_records(ledger.records())
    assert again.header == ledger.header
    assert again.releases == ledger.releases
    assert again.records() == ledger.records()


def test_every_line_is_written_when_charge_returns():
    written = []
    ledger = Ledger(header(), written.append)
    for step in range(3):
        ledger.charge(Release(stage="a", step=step, noise_multiplier=2.0))
        assert written == ledger.records()


def test_a_line_that_cannot_be_written_is_not_charged():
    def write(record):
        if "event" in record:
            raise OSError("disk full")

    ledger = Ledger(header(), write)
    with pytest.raises(OSError, match="disk full"):
        ledger.charge(Release(stage="a", noise_multiplier=2.0))
    assert ledger.releases == ()


def test_a_step_repeated_after_a_crash_is_not_charged_twice():
    written = []
    resumed = Ledger.from_records(filled(4).records(), written.append)
    plan = Plan(noise_multiplier=1.1, expected_batch=10, rate=0.1, steps=100)
    resumed.charge(plan.release("train", 3))
    assert written == []
    resumed.charge(plan.release("train", 4))
    assert len(written) == 1
    assert len(resumed.releases) == 5


def test_a_repeated_step_must_be_the_same_event():
    resumed = Ledger.from_records(filled(4).records())
    with pytest.raises(PrivacyError, match="its own stage"):
        resumed.charge(Release(stage="train", step=3, rate=0.1, noise_multiplier=0.5))


def test_a_step_is_refused_twice_in_one_process():
    ledger = filled(4)
    with pytest.raises(PrivacyError, match="already taken"):
        ledger.charge(ledger.releases[3])


def test_a_student_carries_the_cost_of_its_teacher_once():
    teacher, student = filled(4), Ledger(header(data="synthetic"))
    student.inherit(teacher)
    student.inherit(teacher)
    assert student.epsilon() == teacher.epsilon()
    student.charge(Release(stage="moments", noise_multiplier=5.0))
    assert student.epsilon() > teacher.epsilon()
    again = Ledger.from_records(student.records())
    assert again.epsilon() == student.epsilon()


def test_two_teachers_add_up():
    child = Ledger(header())
    child.inherit(filled(4))
    child.inherit(filled(4))
    assert len(child.releases) == 8
    assert child.epsilon() > filled(4).epsilon()


@pytest.mark.parametrize("change", [{"relation": "replace"}, {"unit": "person"}])
def test_guarantees_about_different_neighbours_do_not_mix(change):
    with pytest.raises(PrivacyError, match="do not add up"):
        Ledger(header()).inherit(filled(1, **change))


def test_a_fixed_seed_is_an_objection_that_children_inherit():
    parent = filled(1, fixed_seed=True)
    assert "fixed seed" in parent.objections[0]
    child, grandchild = Ledger(header()), Ledger(header())
    child.inherit(parent)
    grandchild.inherit(Ledger.from_records(child.records()))
    assert parent.header.id in grandchild.objections[0]


def test_an_exact_release_is_an_objection_and_costs_everything():
    ledger = filled(2)
    assert ledger.objections == []
    ledger.charge(Release(stage="statistics", noise_multiplier=0.0))
    assert ledger.objections == ['stage "statistics" released exact values']
    assert ledger.epsilon() == math.inf


def test_a_run_is_not_resumed_under_another_guarantee():
    records = filled(2).records()
    with pytest.raises(PrivacyError, match="another guarantee"):
        Ledger.resume(records, header(delta=1e-3), lambda _: None)
    assert len(Ledger.resume(records, header(), lambda _: None).releases) == 2


@pytest.mark.parametrize(
    "records",
    [
        [],
        [{"event": {}}],
        [5],
        [{"header": {"data": "x", "delta": 1e-5, "colour": "red"}}],
        [{"header": {"data": "x"}}],
        [{"header": {"data": "x", "delta": 1e-5}}, {"surprise": 1}],
        [{"header": {"data": "x", "delta": 1e-5}}, {"event": {"stage": "a"}}],
        [{"header": {"data": "x", "delta": 1e-5}}, {"event": {"noise": 1, "stage": "a"}}],
    ],
)
def test_a_ledger_that_is_not_one_is_refused(records):
    with pytest.raises(SfumatoError):
        Ledger.from_records(records)


def test_a_tag_that_comes_later_has_a_line_of_its_own():
    written, asked = [], []
    ledger = Ledger(header(), written.append)

    def tag():
        asked.append(True)
        return "abc"

    ledger.charge(Release(stage="a", step=3, noise_multiplier=2.0), tag)
    assert not asked
    assert [set(record) for record in written] == [{"header"}, {"event"}]
    (release,) = ledger.releases
    assert (release.tag, len(asked)) == ("abc", 1)
    assert written[-1] == {"stage": "a", "step": 3, "tag": "abc"}
    again = Ledger.from_records(written)
    assert again.releases == ledger.releases
    assert again.tags("a", 3) == {"abc"}
    again.charge(Release(stage="a", step=3, noise_multiplier=2.0), tag)
    assert len(again.releases) == 1, "a repetition is known by its tag, which is asked for at once"
    assert len(asked) == 2


def test_the_next_charge_and_all_questions_ask_for_the_tag_before():
    for look in (Ledger.epsilon, Ledger.records, lambda book: book.tags("a", 0), Ledger.settle):
        ledger = Ledger(header())
        ledger.charge(Release(stage="a", noise_multiplier=2.0), lambda: "abc")
        look(ledger)
        assert ledger._untold is None
    ledger.charge(Release(stage="a", step=1, noise_multiplier=2.0), lambda: "def")
    ledger.charge(Release(stage="a", step=2, noise_multiplier=2.0), lambda: "ghi")
    assert [release.tag for release in ledger.releases] == ["abc", "def", "ghi"]


def test_a_tag_that_cannot_be_told_or_written_leaves_the_line_that_was_paid():
    def refuse():
        raise PrivacyError("not finite")

    ledger = Ledger(header())
    ledger.charge(Release(stage="a", noise_multiplier=2.0), refuse)
    for ask in (ledger.settle, ledger.epsilon, ledger.records):
        with pytest.raises(PrivacyError, match="not finite"):
            ask()
    with pytest.raises(PrivacyError, match="not finite"):
        ledger.charge(Release(stage="a", step=1, noise_multiplier=2.0))

    def write(record):
        if "tag" in record and full:
            raise OSError("disk full")

    full, ledger = True, Ledger(header(), write)
    ledger.charge(Release(stage="a", noise_multiplier=2.0), lambda: "abc")
    with pytest.raises(OSError, match="disk full"):
        ledger.settle()
    full = False
    assert [release.tag for release in ledger.releases] == ["abc"]


def test_a_step_whose_tag_was_never_told_is_not_taken_again_with_other_noise():
    written = []
    Ledger(header(), written.append).charge(Release(stage="a", noise_multiplier=2.0), lambda: "abc")
    for change in ({"noise_multiplier": 1.0}, {"max_norm": 2.0}, {"rate": 0.5}):
        release = Release(**{"stage": "a", "noise_multiplier": 2.0, **change})
        with pytest.raises(PrivacyError, match="its own stage"):
            Ledger.from_records(written).charge(release, lambda: "abc")
    again = Ledger.from_records(written)
    again.charge(Release(stage="a", noise_multiplier=2.0), lambda: "abc")
    assert len(again.releases) == 2


def test_a_tag_for_a_line_that_waits_for_none_is_refused():
    records = filled(2).records()
    ledger = Ledger(header())
    ledger.charge(Release(stage="a", noise_multiplier=2.0), "abc")
    told = {"stage": "a", "step": 0, "tag": "def"}
    for lines in ([*ledger.records(), told], [*records, {**told, "stage": "none"}]):
        with pytest.raises(RunError, match="waits for no tag"):
            Ledger.from_records(lines)


def test_a_line_that_stands_twice_is_refused():
    records = filled(2).records()
    with pytest.raises(RunError, match="twice"):
        Ledger.from_records([*records, records[-1]])


@pytest.mark.parametrize(
    "change", [{"noise": "ChaCha20"}, {"relation": "bogus"}, {"delta": 5.0}, {"unit": "pixel"}]
)
def test_a_header_that_means_nothing_is_refused(change):
    values = {**filled(1).records()[0]["header"], **change}
    with pytest.raises(SfumatoError):
        Ledger.from_records([{"header": values}])


def test_a_repetition_with_another_norm_bound_is_refused():
    resumed = Ledger.from_records(filled(4).records())
    plan = Plan(noise_multiplier=1.1, expected_batch=10, rate=0.1, steps=100, max_norm=2.0)
    with pytest.raises(PrivacyError, match="its own stage"):
        resumed.charge(plan.release("train", 3))


def test_an_impossible_event_is_refused():
    for change in ({"rate": 0.0}, {"rate": 1.5}, {"noise_multiplier": -1.0}, {"max_batch": 3}):
        with pytest.raises(PrivacyError):
            Release(**{"stage": "a", "noise_multiplier": 1.0, **change})
