"""What was spent before: releases of one step, families, and the plan that gets the rest."""

import math
from collections import Counter
from dataclasses import replace

import pytest

from sfumato.privacy.accounting import epsilon, price
from sfumato.privacy.budget import Budget, Plan, make_plan
from sfumato.privacy.releases import Mechanism, Release

BUDGET = Budget(epsilon=4, delta=1e-5)
SINGLE = [Release(stage="a", step=i, rate=0.05, noise_multiplier=1.1) for i in range(5)]
DOUBLED = [replace(release, tag=tag) for release in SINGLE for tag in ("first", "again")]
FAMILY = [
    Release(stage="b", step=i, noise_multiplier=8.0, family=f"epoch {i // 50}") for i in range(200)
]
SPENT = {
    "single steps": SINGLE,
    "doubled steps": DOUBLED,
    "families": FAMILY,
    "families with doubled steps": [
        *FAMILY,
        *(replace(release, tag="x") for release in FAMILY[40:60]),
    ],
    "all of it": [*DOUBLED, *FAMILY],
}


def events_of(plan: Plan) -> list[Release]:
    return [plan.release("next", step) for step in range(plan.steps)]


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
    others = [replace(release, family="", tag="other") for release in FAMILY[:50]]
    apart = [replace(release, stage="c") for release in others]
    assert epsilon([*FAMILY, *others], 1e-5) >= epsilon([*FAMILY, *apart], 1e-5) > 3.9


def test_a_batch_that_was_cut_in_two_ways_has_no_price():
    plain = Release(stage="a", rate=0.1, noise_multiplier=3.0)
    cut = replace(plain, max_batch=5, size=100, tag="cut")
    assert epsilon([cut, replace(cut, tag="again")], 1e-5) > epsilon([cut], 1e-5)
    assert epsilon([plain, cut], 1e-5) == epsilon([cut, plain], 1e-5) == math.inf


@pytest.mark.parametrize("rates", [(0.01, 0.5, 0.2), (0.5, 0.2, 0.01)])
def test_releases_of_one_step_at_several_rates_cost_what_the_largest_rate_does(rates):
    lines = [
        Release(stage="a", rate=rate, noise_multiplier=2.0, tag=str(rate), ledger="one")
        for rate in rates
    ]
    # They share one batch: three releases are one with less noise, and the batch is that of 0.5.
    wanted = price(Counter({Mechanism(0.5, 2.0 / math.sqrt(3)): 1}), 1e-5)
    assert epsilon(lines, 1e-5) == pytest.approx(wanted)
    assert epsilon(lines, 1e-5) > max(epsilon([line], 1e-5) for line in lines)


@pytest.mark.parametrize("where", ["ledger", "stage"])
@pytest.mark.parametrize("family", ["", "classes"])
def test_lines_of_two_ledgers_or_stages_that_are_named_alike_are_paid_for_twice(where, family):
    # In one ledger and stage a family touches disjoint examples. Another ledger's, of the same
    # name, touches the same examples once more; and so does another step 0.
    kind = {"stage": "moments", "noise_multiplier": 8.0, "family": family}
    one = [Release(**kind, step=i) for i in range(3 if family else 1)]
    two = [replace(release, **{where: "another"}) for release in one]
    gaussian = Mechanism(1.0, 8.0)
    assert epsilon(one, 1e-5) == price(Counter({gaussian: 1}), 1e-5)
    assert epsilon([*one, *two], 1e-5) == price(Counter({gaussian: 2}), 1e-5)


def test_steps_of_two_ledgers_are_two_samples_and_not_two_releases_of_one():
    one = [Release(stage="a", step=i, rate=0.05, noise_multiplier=1.1) for i in range(4)]
    two = [replace(release, ledger="another") for release in one]
    wanted = price(Counter({Mechanism(0.05, 1.1): 8}), 1e-5)
    assert epsilon([*one, *two], 1e-5) == pytest.approx(wanted)
