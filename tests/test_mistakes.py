"""Mistakes that users make are answered in words of ours, whatever they are handed to."""

import json
import os
import subprocess
import sys
from pathlib import Path

import mistakes
import pytest

import sfumato
from sfumato import errors

NAMES = [name for name, _ in mistakes.cases()]


@pytest.fixture(scope="module")
def answers():
    """What each mistake is answered with."""
    paths = [str(Path(sfumato.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, mistakes.__file__],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_a_mistake_is_answered_by_an_error_of_ours(name, answers):
    kind, is_ours = answers["answers"][name]
    assert is_ours, kind


def test_the_errors_are_at_hand():
    for name in ("SfumatoError", "ConfigError", "DataError", "PrivacyError", "RunError"):
        assert getattr(sfumato, name) is getattr(errors, name)
    assert sfumato.UnsupportedLayer is errors.UnsupportedLayer
    assert sfumato.SfumatoWarning is errors.SfumatoWarning
    assert {"__version__", "SfumatoError"} <= set(dir(sfumato))


@pytest.mark.parametrize("compiled", ["model", "step"])
def test_what_is_compiled_in_the_loop_trains_as_it_is(compiled, answers):
    assert answers["same if compiled in the loop"][compiled]
