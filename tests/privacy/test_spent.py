"""What was spent before: releases of one step, families, and the plan that gets the rest."""

import math
from dataclasses import replace

import pytest

from sfumato.privacy.accounting import epsilon
from sfumato.privacy.budget import Budget, Plan, make_plan
from sfumato.privacy.events import Event

BUDGET = Budget(epsilon=4, delta=1e-5)
SINGLE = [Event(stage="a", step=i, rate=0.05, noise_multiplier=1.1) for i in range(5)]
DOUBLED = [replace(event, tag=tag) for event in SINGLE for tag in ("first", "again")]
FAMILY = [
    Event(stage="b", step=i, noise_multiplier=8.0, family=f"epoch {i // 50}") for i in range(200)
]
SPENT = {
    "single steps": SINGLE,
    "doubled steps": DOUBLED,
    "families": FAMILY,
    "families with doubled steps": [*FAMILY, *(replace(event, tag="x") for event in FAMILY[40:60])],
    "all of it": [*DOUBLED, *FAMILY],
}


def events_of(plan: Plan) -> list[Event]:
    return [plan.event("next", step) for step in range(plan.steps)]


@pytest.mark.parametrize("spent", SPENT.values(), ids=SPENT)
def test_a_plan_and_what_was_spent_before_keep_the_budget_and_use_it(spent):
    plan = make_plan(BUDGET, size=1000, batch_size=50, steps=40, spent=spent)
    assert 0.99 * 4 < epsilon([*spent, *events_of(plan)], 1e-5) <= 4
    less = replace(plan, noise_multiplier=0.98 * plan.noise_multiplier)
    assert epsilon([*spent, *events_of(less)], 1e-5) > 4, "the noise is the least there is"


def test_a_second_release_of_a_step_costs_more_and_one_more_of_a_family_nothing():
    assert epsilon(DOUBLED, 1e-5) > 1.5 * epsilon(SINGLE, 1e-5)
    one_of_each = [FAMILY[0], FAMILY[50], FAMILY[100], FAMILY[150]]
    assert epsilon(FAMILY, 1e-5) == epsilon(one_of_each, 1e-5)


def test_a_family_is_not_widened_by_a_release_that_is_not_in_it():
    others = [replace(event, family="", tag="other") for event in FAMILY[:50]]
    apart = [replace(event, stage="c") for event in others]
    assert epsilon([*FAMILY, *others], 1e-5) >= epsilon([*FAMILY, *apart], 1e-5) > 3.9


def test_a_batch_that_was_cut_in_two_ways_has_no_price():
    plain = Event(stage="a", rate=0.1, noise_multiplier=3.0)
    cut = replace(plain, max_batch=5, size=100, tag="cut")
    assert epsilon([cut, replace(cut, tag="again")], 1e-5) > epsilon([cut], 1e-5)
    assert epsilon([plain, cut], 1e-5) == epsilon([cut, plain], 1e-5) == math.inf
