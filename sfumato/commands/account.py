"""`sfumato account`: budget arithmetic. What does a plan cost, and how much noise buys an epsilon?

Prints the PLD price, the Rényi price as a cross-check, and what the same noise is worth when
batches are shuffled instead of drawn by Poisson sampling.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from decimal import ROUND_CEILING, Context
from pathlib import Path
from typing import Any

from sfumato.commands import Command
from sfumato.config import to_json
from sfumato.errors import ConfigError
from sfumato.files import read_lines
from sfumato.integrity import damage
from sfumato.privacy.accounting import price, shuffled_epsilon
from sfumato.privacy.budget import (
    Budget,
    Plan,
    check_delta,
    default_delta,
    make_plan,
    steps_within,
)
from sfumato.privacy.ledger import Ledger
from sfumato.reporting.figures import save_epsilon_curve
from sfumato.runs import Run
from sfumato.settings.account import PRESETS as PRESETS
from sfumato.settings.account import Account

Config = Account


def run(config: Account, run: Run | None) -> dict[str, Any]:
    """Price the plan or the ledger; with a run directory, keep plan and plot there."""
    if config.ledger is not None:
        summary = _price_ledger(config)
        return summary if run is None else run.finish(summary)
    plan, delta = _plan(config)
    if run is not None:
        run.write_json("plan.json", plan)
    plot = run.path / "epsilon.png" if run is not None and config.plot is None else config.plot
    if plot is not None and not plot.parent.is_dir():
        raise ConfigError(f"--plot {plot}: there is no folder {plot.parent}.")
    summary = _price_plan(plan, delta, plot)
    if plot is not None:
        save_epsilon_curve(plot, plan, delta)
    return summary if run is None else run.finish(summary)


def show(summary: Mapping[str, Any]) -> str:
    """The prices as a few aligned lines."""
    lines = [("DAMAGED", problem) for problem in summary.get("damage", [])]
    lines.append(("epsilon", f"{_number(summary['epsilon'])}   (PLD, an upper bound)"))
    lines.append(("  by Renyi DP", _number(summary["rdp_epsilon"])))
    if "shuffled_epsilon" in summary:
        lines.append(
            ("  if shuffled", f"{_number(summary['shuffled_epsilon'])}   (no Poisson sampling)")
        )
    lines.append(("delta", f"{summary['delta']:.3g}"))
    lines.append(("relation", summary["relation"]))
    if "unit" in summary:
        lines.append(("unit", summary["unit"]))
    if summary.get("neighbours") == "training parts":
        lines.append(("neighbours", "training parts, as sfumato split the data"))
    if "noise_multiplier" in summary:
        lines.append(("noise multiplier", f"{summary['noise_multiplier']:.4g}"))
        lines.append(("rate", f"{summary['rate']:.4g}"))
        lines.append(("steps", f"{summary['steps']}"))
    for stage, count in summary.get("stages", {}).items():
        lines.append((f'stage "{stage}"', f"{count} event{'s' if count != 1 else ''}"))
    if summary.get("stages") == {}:
        lines.append(("events", "none: nothing has been spent"))
    for objection in summary.get("not_for_release", []):
        lines.append(("NOT FOR RELEASE", objection))
    if summary.get("plot"):
        lines.append(("plot", summary["plot"]))
    return "\n".join(f"{name:<17} {value}" for name, value in lines)


def alarm(summary: Mapping[str, Any]) -> str | None:
    """That the ledger cannot be believed, for programs."""
    return "DAMAGED: this ledger is no proof of anything." if summary.get("damage") else None


# Arithmetic leaves nothing, unless it is given a place.
COMMAND = Command(run=run, show=show, alarm=alarm, needs_run=lambda _: False)


def _plan(config: Account) -> tuple[Plan, float]:
    if config.size is None:
        raise ConfigError("--size is missing: how many private examples are there?")
    if config.epsilon is None and config.noise_multiplier is None:
        raise ConfigError("give --epsilon to find the noise, or --noise-multiplier to price it.")
    steps_follow = config.epsilon is not None and config.noise_multiplier is not None
    if config.batch_size is not None and config.epochs is config.steps is None and not steps_follow:
        raise ConfigError("how long? Give --epochs or --steps along with --batch-size.")
    delta = default_delta(config.size) if config.delta is None else config.delta
    if config.noise_multiplier is not None and config.delta is not None:
        check_delta(delta, config.size)
    budget = None if config.epsilon is None else Budget(epsilon=config.epsilon, delta=delta)
    plan = make_plan(
        None if config.noise_multiplier is not None else budget,
        size=config.size,
        batch_size=config.batch_size,
        epochs=config.epochs,
        steps=config.steps,
        noise_multiplier=config.noise_multiplier,
        relation=config.relation,
        max_batch=config.max_batch,
    )
    if budget is None or config.noise_multiplier is None:
        return plan, delta
    if config.epochs is not None or config.steps is not None:
        raise ConfigError(
            "--epsilon, --noise-multiplier and the number of steps fix each other: leave out one."
        )
    steps = steps_within(budget, plan)
    if steps == 0:
        raise ConfigError(
            f"epsilon={config.epsilon:g} does not allow even one step at noise multiplier "
            f"{config.noise_multiplier:g}. Add noise, or lower --batch-size."
        )
    return replace(plan, steps=steps), delta


def _price_plan(plan: Plan, delta: float, plot: Path | None) -> dict[str, Any]:
    mechanisms = plan.mechanisms()
    epochs = plan.steps * plan.rate
    return {
        "epsilon": plan.epsilon(delta),
        "delta": delta,
        "rdp_epsilon": price(mechanisms, delta, plan.relation, "rdp"),
        "shuffled_epsilon": shuffled_epsilon(plan.noise_multiplier, epochs, delta, plan.relation),
        **{key: to_json(plan)[key] for key in ("noise_multiplier", "rate", "steps", "relation")},
        "expected_batch": plan.expected_batch,
        "max_batch": plan.max_batch,
        "epochs": epochs,
        "plot": None if plot is None else str(plot),
    }


def _price_ledger(config: Account) -> dict[str, Any]:
    assert config.ledger is not None
    others = {key for key, value in to_json(config).items() if value is not None}
    unused = (
        others
        - {"ledger", "delta"}
        - ({"relation"} if config.relation == "add-or-remove" else set())
    )
    if unused:
        raise ConfigError(
            f"--{min(unused).replace('_', '-')} has no meaning with --ledger, which says it all."
        )
    path = config.ledger / "ledger.jsonl" if config.ledger.is_dir() else config.ledger
    if not path.exists():
        places = ("stages/*/ledger.jsonl", "private/stages/*/ledger.jsonl")
        inner = [found for place in places for found in sorted(path.parent.glob(place))]
        hint = f" Its stages have: --ledger {inner[0].parent}." if inner else ""
        raise ConfigError(f"there is no ledger at {path}.{hint}")
    ledger = Ledger.from_records(read_lines(path))
    delta = ledger.header.delta if config.delta is None else config.delta
    check_delta(delta)
    return {
        **ledger.guarantee(delta),
        "rdp_epsilon": ledger.epsilon(delta, "rdp"),
        "stages": dict(Counter(release.stage for release in ledger.releases)),
        "damage": list(damage(path.parent, ledger)),
    }


def _number(value: float | str) -> str:
    """An upper bound with four digits, which is still one."""
    value = float(value)
    return "no formula" if math.isnan(value) else f"{float(FOUR_UP.create_decimal(value)):.4g}"


FOUR_UP = Context(prec=4, rounding=ROUND_CEILING)
