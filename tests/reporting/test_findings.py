"""Findings: what a run found is written once, read by any report, and told of its parts too."""

import json
import math

import pytest
from pages import make_run, write

from sfumato.commands.audit import command as audit
from sfumato.errors import SfumatoError
from sfumato.reporting.scores import findings_of, keep_audit, keep_scores
from sfumato.results import FINDINGS, Audited, Finding, Findings, read_findings
from sfumato.runs import Run


def test_findings_are_the_same_when_they_are_read_again(tmp_path):
    points = ((0.0, 1.0), (0.0, 1.0))
    found = Findings(
        found=(
            Finding(kind="accuracy", name="a", value=(0.5, 0.4, None), means="of 3"),
            Finding(kind="attack", name="b", value=(0.5, None, None), roc=points, band=points),
            Finding(kind="bound", name="c", value=(math.inf, None, None), delta=1e-5, kept=False),
            Finding(kind="check", name="d?", passed=None, p_value=0.25),
            Finding(kind="cost", name="e", seconds_per_step=0.1, seconds_per_example=0.01),
        ),
        target="run",
        guarantee=Audited(epsilon=3.0, delta=1e-5, relation="replace", unit="person"),
        allowed=points,
        notes=("rough",),
        parts={"x": "private/x"},
    )
    assert read_findings(Run(tmp_path).write_json(FINDINGS, found)) == found
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o700


def test_findings_without_fields_that_came_later_are_read_and_others_are_refused(tmp_path):
    write(tmp_path / "a.json", {"found": [{"kind": "accuracy", "name": "x"}]})
    (finding,) = read_findings(tmp_path / "a.json").found
    assert finding == Finding(kind="accuracy", name="x")
    for wrong in ({"kind": "guess", "name": "x"}, {"kind": "bound", "name": "x", "shape": 1}):
        write(tmp_path / "b.json", {"found": [wrong]})
        with pytest.raises(SfumatoError):
            read_findings(tmp_path / "b.json")


def test_a_run_of_before_is_read_like_one_of_today(tmp_path):
    before, today = make_run(tmp_path / "before"), make_run(tmp_path / "today")
    keep_scores(Run(today), "train", json.loads((today / "private/scores.json").read_text()))
    assert (today / FINDINGS).exists()
    assert not (before / FINDINGS).exists()
    assert findings_of(before) == findings_of(today)
    assert [one.kind for one in findings_of(today).found] == ["accuracy", "cost"]


def test_a_second_audit_takes_the_place_of_the_first(tmp_path):
    run = Run(make_run(tmp_path / "run"))
    for name in ("first", "second"):
        keep_audit(run, {"target": name, "attacks": [{"name": name, "auc": [0.5, 0.4, 0.6]}]})
    found = findings_of(run.path)
    assert [attack.name for attack in found.of("attack")] == ["second"]
    assert found.of("accuracy")
    assert found.target == "second"


def test_a_part_outside_the_run_is_not_read(tmp_path):
    for name in ("run", "other"):
        keep_scores(Run(make_run(tmp_path / name)), "train", {"test_accuracy": 0.25})
    run = tmp_path / "run"
    (run / "link").symlink_to(tmp_path / "other")
    for folder in ("../other", str(tmp_path / "other"), "link", ".", ""):
        write(run / FINDINGS, {"parts": {"x": folder}})
        found = findings_of(run)
        assert found.parts == {"x": folder}
        assert found.with_parts(run, findings_of).found == ()
    said = []
    write(run / FINDINGS, [])
    audit.copy_to_target({"target": "run"}, Run(tmp_path / "other", said.append), run)
    assert "could not take a copy" in said[0]
    with pytest.raises(SfumatoError, match="damaged"):
        findings_of(run)
