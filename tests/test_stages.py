"""Stages: in order, once, as far as was asked for, and by the processes that they are for."""

import pytest

from sfumato.runs import Run
from sfumato.stages import Stage, check_stages, run_stages


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


@pytest.fixture
def done():
    return []


def stages(done, *checks, **options):
    """Two that note that they ran."""

    def work(name):
        def go(context, run):
            done.append(f"{context} {name}")
            if run is not None:
                run.finish({"name": name, "times": len(done)})

        return go

    first = Stage(name="first", run=work("first"), checks=checks)
    return [first, Stage(name="second", run=work("second"), checks=checks, **options)]


def test_stages_run_in_order_and_once(run, done):
    assert run_stages("a", stages(done), "first", run.stage) == {"name": "first", "times": 1}
    assert not (run.path / "stages" / "second").exists()
    assert run_stages("b", stages(done), "all", run.stage)["name"] == "second"
    assert run_stages("c", stages(done), "all", run.stage)["times"] == 2
    assert done == ["a first", "b second"]


def test_a_repeatable_stage_runs_again_when_it_is_asked_for_by_name(run, done):
    both = stages(done, repeatable=True)
    for asked in ("all", "all", "second"):
        found = run_stages("a", both, asked, run.stage)
    assert done == ["a first", "a second", "a second"]
    assert found["times"] == 3
    run_stages("a", stages(done), "second", run.stage)
    assert len(done) == 3


def test_what_is_ahead_is_checked_once_and_what_has_begun_is_not(run, done):
    both = stages(done, done.append)
    check_stages("a", both, "all", run.has_begun_stage)
    assert done == ["a"]
    run_stages("a", both, "all", run.stage)
    check_stages("b", both, "all", run.has_begun_stage)
    assert done == ["a", "a first", "a second"]


def test_a_process_that_does_not_lead_takes_part_where_all_do(done):
    both = stages(done, all_ranks=True)
    assert run_stages("a", both, "all", lambda _: None) == {}
    assert done == ["a second"]
    run_stages("a", both, "all", lambda _: None, agree=lambda _: True)  # finished, says the leader
    assert done == ["a second"]
