"""`sfumato invert sweep`: the same attack on targets that keep different guarantees.

Each target is attacked again, with its own selection, generator and search, in its own unit of
logits. Beside each private target stands a control: a target without privacy that was stopped when
it was as accurate. Only what lies between the two is the merit of privacy; the rest is lost
usefulness. Example-level privacy bounds what one image changes, and guarantees nothing about what
all images of a class have in common: person-level privacy does, where a class is a person.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from sfumato.commands.invert.checks import check_context, check_target
from sfumato.commands.invert.context import Context, make_context, same_images
from sfumato.commands.invert.score import score
from sfumato.commands.invert.stages import judge, latent, prior, select, target
from sfumato.commands.train import command as train
from sfumato.files import read_json
from sfumato.reporting.inversion_figures import SweepRow, sweep_plots, sweep_table
from sfumato.reporting.scores import keep_scores
from sfumato.runs import Run
from sfumato.settings.invert import Invert
from sfumato.stages import Stage, run_stages

LADDER = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Steps at which a control may be stopped."""
CAUTION = (
    "Example-level privacy hides one image. It does not hide what all images of a class "
    "share, which is what inversion finds: compare each private target with its control, not with "
    "the first row. What the guarantee speaks of is the member gap."
)


def attack_target(context: Context, asked: str = "all") -> dict[str, Any]:
    """Run the stages of an attack on one target, up to this one."""
    made = (target, judge, select, prior, latent, score)
    names = context.config.stage_names()
    stages = [Stage(name=name, run=run) for name, run in zip(names, made, strict=True)]
    return run_stages(context, stages, asked, context.stage, say=context.run.log)


def sweep(config: Invert, run: Run) -> dict[str, Any]:
    """Attack every target, then one table and two plots."""
    base = make_context(config, run)
    check_sweep(base)
    rows: list[SweepRow] = []
    for name, kind, settings in targets(config):
        rows.append(attack_one(name, kind, settings, base))
        if math.isfinite(rows[-1].epsilon):
            plain = replace(config, sweep=False, mode="non-private", seed=settings.seed)
            stopped = match_accuracy(plain, rows[-1].test_accuracy, base)
            twin = rows[-1].epsilon
            rows.append(attack_one(f"{name}-control", kind, stopped, base, twin=twin))
    table = sweep_table(rows)
    keep_scores(run, "invert", {"rows": [asdict(row) for row in rows]})
    (run.private / "sweep.md").write_text(f"{table}\n\n{CAUTION}\n", encoding="utf-8")
    sweep_plots(run.private / "sweep.png", rows)
    text = (
        f"{len(rows)} targets attacked: {run.private}/sweep.md and sweep.png (do not share).\n"
        f"{CAUTION}"
    )
    return run.finish({"text": text, "run": str(run.path), "targets": len(rows)})


def check_sweep(base: Context) -> None:
    """Refuse at once what any of the targets would be refused for."""
    for number, (_, _, settings) in enumerate(targets(base.config)):
        context = same_images(base, settings, base.run)
        if number == 0:
            check_context(context)
        elif settings.seed == base.config.seed:
            check_target(context)


def targets(config: Invert) -> Iterator[tuple[str, str, Invert]]:
    """A name, what it is called in the table, and the settings of every target of the sweep."""
    without = {"inf": "not private", "clip": "clipped, no noise"}
    for unit in config.units:
        for epsilon in config.epsilons:
            for seed in range(config.seeds):
                base = replace(
                    config,
                    sweep=False,
                    seed=config.seed + seed,
                    unit=unit,
                    people=config.people if unit == "person" else None,
                    **budget_settings(config, epsilon),
                )
                name = f"{epsilon}-{seed}" if unit == "example" else f"{epsilon}-person-{seed}"
                yield name, without.get(epsilon, f"{unit}-level"), base


def budget_settings(config: Invert, epsilon: str) -> dict[str, Any]:
    """What of a target's settings depends on its guarantee."""
    if epsilon == "inf":
        return {"mode": "non-private"}
    private = {
        "mode": "ghost_mixed" if config.mode == "non-private" else config.mode,
        "optimizer": "sgd",
        "lr": config.private_lr,
        "momentum": 0.0,
        "clip": "automatic",
    }
    if epsilon == "clip":
        return {**private, "noise_multiplier": 0.0}
    return {**private, "epsilon": float(epsilon)}


def attack_one(
    name: str, kind: str, config: Invert, base: Context, twin: float | None = None
) -> SweepRow:
    """The whole attack on one target; all of it stays in `private/`, and is done once."""
    place = Run(base.run.private / "sweep" / name, base.run.say)
    place.path.mkdir(parents=True, exist_ok=True)
    context = same_images(base, config, place)
    if not context.stage("score").finished:
        base.run.log(f"target {name}")
        attack_target(context)
    found = read_json(place.path / "private" / "scores.json")
    judge = next(iter(found["judges"].values()))
    spent = float(read_json(context.stage("target").path / "done.json")["epsilon"])
    return SweepRow(
        target=kind,
        epsilon=spent if twin is None else twin,
        control=twin is not None,
        seed=config.seed,
        test_accuracy=found["target_test_accuracy"],
        attack=found["majority"]["top1"],
        floor=found["majority"]["floor_top1"],
        gap=judge["member_gap"],
    )


def match_accuracy(config: Invert, wanted: float, base: Context) -> Invert:
    """These settings without privacy, stopped early: about as accurate as `wanted`."""
    tried: dict[int, float] = {}

    def reached(steps: int) -> bool:
        scores = read_json(train_control(config, steps, base).private / "scores.json")
        tried[steps] = scores["test_accuracy"]
        return tried[steps] >= wanted

    enough = next((steps for steps in LADDER if reached(steps)), LADDER[-1])
    few = enough // 2
    while enough - few > max(1, enough // 16):  # between a step that was too few and one that did
        middle = (few + enough) // 2
        few, enough = (few, middle) if reached(middle) else (middle, enough)
    best = min(tried, key=lambda steps: abs(tried[steps] - wanted))
    return without_privacy(config, best)


def without_privacy(config: Invert, steps: int) -> Invert:
    """The settings for this many steps, with batches that repeat."""
    return replace(
        config, steps=steps, epochs=None, noise_seed=config.seed, unit="example", people=None
    )


def train_control(config: Invert, steps: int, base: Context) -> Run:
    """A target of this many steps, trained once."""
    place = Run(base.run.private / "ladder" / f"{config.seed}-{steps}", base.run.say)
    place.path.mkdir(parents=True, exist_ok=True)
    if not place.finished:
        context = same_images(base, without_privacy(config, steps), place)
        context.members.save_npz(place.private / "members.npz", context.held_out)
        train.run(context.target, place)
    return place
