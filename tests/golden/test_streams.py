"""Random streams give the numbers of the version before."""

import pytest

from golden import streams
from golden.files import read

FROZEN = read("streams.json")


@pytest.fixture(scope="module")
def found():
    return streams.compute()


@pytest.mark.parametrize("name", FROZEN)
def test_a_stream_gives_the_frozen_numbers(name, found):
    streams.compare(found[name], FROZEN[name], name)


def test_every_stream_is_frozen(found):
    assert set(found) == set(FROZEN)
