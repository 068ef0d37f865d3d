"""Sixty plans and ledgers whose epsilon is frozen.

Ledgers are given as the records of version 1, which stay readable for ever.
"""

from collections.abc import Iterable

SMALL = {"expected_batch": 100.0, "rate": 0.02, "steps": 200, "noise_multiplier": 1.0}


def plan(delta=1e-5, **changes):
    return {"kind": "plan", "delta": delta, **SMALL, **changes}


def make(epsilon, delta=1e-5, **changes):
    return {
        "kind": "make", "epsilon": epsilon, "delta": delta, "size": 5000, "batch_size": 200.0,
        "steps": 100, **changes,
    }  # fmt: skip


def header(id="one", **changes):
    return {"header": {
        "data": "digits-train", "delta": 1e-5, "relation": "add-or-remove", "unit": "example",
        "neighbours": "data sets", "public": "settings", "noise": "philox", "fixed_seed": False,
        "secret": "", "id": id, **changes,
    }}  # fmt: skip


def release(stage="train", step=0, *, ledger="one", **changes):
    return {"event": {
        "stage": stage, "step": step, "rate": 1.0, "noise_multiplier": 2.0, "max_batch": None,
        "size": None, "max_norm": 1.0, "divisor": 1.0, "data": "digits-train", "ledger": ledger,
        "family": "", "tag": f"{ledger}{stage}{step}", **changes,
    }}  # fmt: skip


def training(steps: int, ledger="one", rate=0.05, noise=1.1) -> Iterable[dict]:
    return [release(step=s, ledger=ledger, rate=rate, noise_multiplier=noise) for s in range(steps)]


def ledger(*records, delta=1e-5, accountant="pld", parents=()):
    return {
        "kind": "ledger", "records": list(records), "delta": delta, "accountant": accountant,
        "parents": list(parents),
    }  # fmt: skip


REPLACE = {"relation": "replace"}
CUT = {"max_batch": 130, "size": 5000}
PARENT = [header("two", data="mnist"), *training(30, "two")]
GRANDCHILD = [header("three"), *training(10, "three"), *training(30, "two")]
FAMILY = [release("moments", c, family="classes", noise_multiplier=3.0) for c in range(10)]
TWICE = [release(rate=0.05, tag="a"), release(rate=0.05, tag="b")]

PLANS = {
    "plain": plan(),
    "less noise": plan(noise_multiplier=0.5),
    "much noise": plan(noise_multiplier=5.0),
    "hardly any noise": plan(noise_multiplier=0.1, steps=3),
    "one step": plan(steps=1),
    "many steps": plan(steps=20_000),
    "first steps": plan(first=50),
    "whole data": plan(rate=1.0, steps=1, noise_multiplier=4.0),
    "whole data, often": plan(rate=1.0, steps=40, noise_multiplier=20.0),
    "small rate": plan(rate=1e-4),
    "large rate": plan(rate=0.5),
    "smaller delta": plan(1e-8),
    "larger delta": plan(1e-3),
    "replace": plan(**REPLACE),
    "replace, less noise": plan(noise_multiplier=0.7, **REPLACE),
    "replace, whole data": plan(rate=1.0, steps=1, noise_multiplier=4.0, **REPLACE),
    "replace, one step": plan(steps=1, **REPLACE),
    "cut": plan(**CUT),
    "cut, less noise": plan(noise_multiplier=0.6, **CUT),
    "cut close": plan(max_batch=101, size=5000),
    "cut, replace": plan(**CUT, **REPLACE),
    "cut, whole data": plan(rate=1.0, max_batch=100, size=200, steps=5, noise_multiplier=3.0),
    "noise falls": plan(noise_decay=0.5),
    "noise rises": plan(noise_decay=3.0),
    "noise falls, few steps": plan(noise_decay=0.5, steps=5),
    "noise falls, replace": plan(noise_decay=0.5, **REPLACE),
    "noise falls, first steps": plan(noise_decay=0.5, first=120),
    "noise falls, cut": plan(noise_decay=0.8, steps=24, **CUT),
    "bound falls": plan(clip_decay=0.3),
    "both fall": plan(noise_decay=0.7, clip_decay=0.3),
    "rdp": plan(accountant="rdp"),
    "rdp, whole data": plan(rate=1.0, steps=3, noise_multiplier=4.0, accountant="rdp"),
    "make epsilon 1": make(1.0),
    "make epsilon 8": make(8.0),
    "make by epochs": make(3.0, steps=None, epochs=2.5),
    "make one release": make(2.0, steps=None, batch_size=None),
    "make, replace": make(2.0, **REPLACE),
    "make, cut": make(2.0, steps=20, max_batch=260),
    "make, noise falls": make(2.0, noise_decay=0.5),
    "make after a release": make(2.0, spent=[header(), release(noise_multiplier=5.0)]),
    "make after a training": make(4.0, spent=[header(), *training(20)]),
    "steps within 1": {**plan(), "kind": "steps", "epsilon": 1.0},
    "steps within 3, replace": {**plan(**REPLACE), "kind": "steps", "epsilon": 3.0},
    "shuffled": {"kind": "shuffled", "noise_multiplier": 2.0, "epochs": 3.0, "delta": 1e-5},
    "shuffled, part of an epoch": {
        "kind": "shuffled", "noise_multiplier": 1.0, "epochs": 1.2, "delta": 1e-6,
    },
    "shuffled, replace": {
        "kind": "shuffled", "noise_multiplier": 2.0, "epochs": 3.0, "delta": 1e-5, **REPLACE,
    },
    "ledger without lines": ledger(header()),
    "ledger of a training": ledger(header(), *training(40)),
    "ledger, another delta": ledger(header(), *training(40), delta=1e-7),
    "ledger, replace": ledger(header(**REPLACE), *training(40)),
    "ledger by rdp": ledger(header(), *training(40), accountant="rdp"),
    "ledger, exact line": ledger(header(), release(noise_multiplier=0.0)),
    "family": ledger(header(), *FAMILY),
    "family and training": ledger(header(), *training(40), *FAMILY),
    "family, unequal noise": ledger(
        header(), *FAMILY, release("moments", 10, family="classes", noise_multiplier=1.5)
    ),
    "one step released twice": ledger(header(), *TWICE, *training(40)[1:]),
    "one step cut in two ways": ledger(
        header(), TWICE[0], release(rate=0.05, tag="c", max_batch=50, size=1000)
    ),
    "inherited": ledger(header(), release("card"), parents=[PARENT]),
    "inherited in two ways": ledger(header(), *training(5), parents=[PARENT, GRANDCHILD]),
    "seeded parent": ledger(
        header(), release("card"), parents=[[header("four", fixed_seed=True), *training(3, "four")]]
    ),
}  # fmt: skip
