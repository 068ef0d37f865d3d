"""`sfumato release`: images to share, which carry a private task and not the people.

A teacher learns the private images, with differential privacy. What it sees in them is released as
noisy averages. Public images are moved until it sees the same in these; they and its answers are
the bundle. A student that has only the bundle then does the private task.
"""

from collections.abc import Mapping
from typing import Any

from sfumato.commands import Command, as_label
from sfumato.commands.release.context import Context, make_context, release_guarantee
from sfumato.commands.release.evaluate import evaluate as evaluate_student
from sfumato.commands.release.stages import match_images, moments, train_teacher
from sfumato.commands.release.student import new_student, student
from sfumato.commands.stages import describe_stage, require_one_process
from sfumato.errors import DataError, SfumatoError
from sfumato.reporting.render import summary_text
from sfumato.reporting.words import round_up
from sfumato.runs import Run
from sfumato.settings.release import PRESETS as PRESETS
from sfumato.settings.release import ReleaseSettings, Verify
from sfumato.sharing.bundle import verify_bundle
from sfumato.stages import Stage, check_stages, run_stages

Config = ReleaseSettings


def run(config: ReleaseSettings, run: Run | None) -> dict[str, Any]:
    """Teacher, moments, match, student, evaluate."""
    run = require_one_process("release", "trains a teacher: give it with --teacher RUN", run)
    context, stages = make_context(config, run), stages_of_release()
    check_stages(context, stages, config.stage, run.has_begun_stage)
    summary = run_stages(context, stages, config.stage, run.stage, say=run.log)
    done: dict[str, Any] = {}
    if config.stage in ("all", "evaluate"):  # a finished run throws its secret away
        done = run.finish({**release_guarantee(context), **summary, "run": str(run.path)})
    if config.stage != "all":
        return {**summary, "stage": config.stage, "run": str(run.path)}
    return done


def check_early(context: Context) -> None:
    """Refuse now what would otherwise fail when the budget is spent."""
    fewest = max(6, len(context.private.classes))
    for images in (context.public, context.private, context.test):
        if len(images) < fewest:
            raise DataError(
                f'"{images.name}" has {len(images)} images, and at least {fewest} are needed: one '
                "for each class, and neighbours to compare with. Give more."
            )
    new_student(context, context.public)
    context.run.log(f"noise multipliers: {context.shares.words}")


def stages_of_release() -> list[Stage[Context]]:
    """The stages in their order."""
    return [
        Stage(name="teacher", run=train_teacher, checks=(check_early,)),
        Stage(name="moments", run=moments),
        Stage(name="match", run=match_images),
        Stage(name="student", run=student),
        # Free, so it is done again when it is asked for, with more controls for example.
        Stage(name="evaluate", run=evaluate_student, repeatable=True),
    ]


def show(summary: Mapping[str, Any]) -> str:
    """What was guaranteed, and where it is."""
    if "verdict" in summary:
        return summary["verdict"]
    if "stage" in summary:
        return describe_stage(summary)
    run = summary["run"]
    return summary_text(
        summary,
        f"{summary['images']} images of {summary['public']}, moved by {summary['k']} steps to "
        f"carry {summary['data']}:",
        {
            "bundle": f"{run}/bundle: images, soft labels, ledger, card.md; to share",
            "check it": f"sfumato release verify {run}/bundle",
            "pictures": f"{run}/pictures.png: public before, released after",
        },
    )


def check(config: Verify, *_: object) -> dict[str, Any]:
    """What there is to say against a bundle; an error if there is anything."""
    assert config.verify is not None
    verdict = verify_bundle(config.verify)
    if not verdict.ok:
        listed = "\n  ".join(verdict.problems)
        raise SfumatoError(f"{config.verify} does not hold what it guarantees:\n  {listed}")
    assert verdict.card is not None
    card = verdict.card
    lines = [
        f"{config.verify} is sound: {card.images} images, epsilon {round_up(card.epsilon)} at "
        f"delta {card.delta:.2g}, as its ledger says.",
        *(f"  {remark}" for remark in verdict.remarks),
    ]
    return {
        "verdict": "\n".join(lines),
        "sound": True,
        "epsilon": card.epsilon,
        "delta": card.delta,
    }


COMMAND = Command(
    run=run,
    show=show,
    # A bundle is checked without a run.
    writes_file=lambda config: isinstance(config, Verify),
    write_file=check,
    asks_more=lambda config: config.stage != "all",
    again="evaluate",
    label=lambda config: as_label(config.teacher or config.data, epsilon=config.epsilon),
)
