"""Sixty plans and ledgers cost what they cost in the version before."""

import pytest

from golden.adapter import epsilon_of
from golden.files import read
from golden.plans import PLANS

FROZEN = read("epsilon.json")


@pytest.mark.parametrize("name", PLANS)
def test_epsilon_is_the_frozen_one(name):
    # Only the rounding of floats may differ: a change of the accountant's cells moves it by 1e-4.
    assert epsilon_of(PLANS[name]) == pytest.approx(FROZEN[name], rel=0, abs=1e-9)


def test_every_plan_is_frozen():
    assert set(FROZEN) == set(PLANS)
    assert len(PLANS) == 60
