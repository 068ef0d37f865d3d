"""How far a training is: the line that shows it, and whether going on brings anything."""

import math
import time
from collections.abc import Callable, Sequence

from sfumato.privacy.accounting import mechanisms_of, price
from sfumato.privacy.budget import Plan
from sfumato.privacy.ledger import Ledger


def progress(
    steps: int,
    first: int,
    spent: Callable[[int], float] | None,
    say: Callable[[str], None] | None,
    seconds: float = 5.0,
    unit: str = "examples",
    counted: str = "step",
) -> Callable[[int, dict[str, float]], None]:
    """A function for `fit` to call after each step; it speaks every few seconds.

    `first` is what was done before, which tells nothing of the time that is left; `counted` is what
    is numbered, if not steps. Numbers without a loss are fine; with one, it and the speed, which
    tells how large batches are, come from private images, and are marked so.
    """
    started = last = time.monotonic()
    seen = 0.0

    def tell(done: int, numbers: dict[str, float]) -> None:
        nonlocal last, seen
        seen += numbers["batch"]
        now = time.monotonic()
        if say is None or now - last < seconds:
            return
        last = now
        left = (now - started) / max(1, done - first) * (steps - done)
        budget = "" if spent is None else f"  epsilon {spent(done):.2f}"
        rate = seen / (now - started)
        speed = f"{rate:.0f} {unit}/s" if rate >= 10 else f"{rate:.2g} {unit}/s"
        if "loss" in numbers:
            speed = f"private: loss {numbers['loss']:.3f}, {speed}"
        say(f"{counted} {done}/{steps}{budget}  {left:.0f} s left  {speed}")

    return tell


def price_list(plan: Plan, ledger: Ledger, stage: str) -> Callable[[int], float] | None:
    """Epsilon after each step, priced at twenty places and read off in between, from above.

    All that the ledger holds already is in it: other stages, other ledgers' lines, and steps of
    this stage that an earlier try has paid for, whether they are taken again or not.
    """
    if plan.noise_multiplier == 0:
        return None
    spent, delta = mechanisms_of(ledger.releases), ledger.header.delta
    ours = (release for release in ledger.releases if release.ledger == ledger.header.id)
    paid = plan.mechanisms(len({release.step for release in ours if release.stage == stage}))
    marks = sorted({max(1, math.ceil(plan.steps * i / 20)) for i in range(1, 21)})

    def price_at(mark: int) -> float:
        unpaid = plan.mechanisms(mark) - paid
        return price(spent + unpaid, delta, plan.relation, cells_for=plan.steps)

    prices = {mark: price_at(mark) for mark in marks}
    return lambda step: prices[next(mark for mark in marks if mark >= step)]


def stale(looks: Sequence[float], patience: int) -> bool:
    """Whether this many looks have brought nothing better, which is more; with patience 0 never."""
    since = len(looks) - 1 - looks.index(max(looks)) if looks else 0
    return 0 < patience <= since
