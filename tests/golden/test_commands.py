"""A seeded run of every command leaves the files, weights and numbers of the version before."""

from golden import digests
from golden.files import read
from golden.machine import machine

FROZEN = read("commands.json.gz")
EQUAL = FROZEN["machine"] == machine()
TOLERANCE = digests.SAME if EQUAL else digests.OTHER


def test_seeded_runs_leave_what_is_frozen_and_ask_for_seeds_in_the_frozen_order(tmp_path):
    """One test: in several, every process of the test run would do all of the commands."""
    found, wrong = digests.compute(tmp_path), []
    assert set(found) == set(FROZEN["runs"])
    for name, frozen in FROZEN["runs"].items():
        try:
            assert found[name]["seeds"] == frozen["seeds"], f"{name}: other seeds"
            digests.compare(name, found[name], frozen, TOLERANCE)
        except AssertionError as problem:
            wrong.append(str(problem))
    assert not wrong, "\n\n".join(wrong)
