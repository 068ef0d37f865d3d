"""The stages of a command: run in their order, each in a sub-run of its own, each once.

A stage finds what the ones before it left on disk. So a command that was cut, or was asked for one
stage, goes on with the first stage that is not finished.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sfumato.runs import Run

Context = TypeVar("Context")


@dataclass(frozen=True, kw_only=True)
class Stage(Generic[Context]):
    """One stage of a command."""

    name: str
    """As it is typed, and as its directory is called."""
    run: Callable[[Context, Any], object]
    """Does the work in the sub-run that it is given, and finishes it."""
    checks: tuple[Callable[[Context], object], ...] = ()
    """Refuse early what the stage would fail at: hours later it would be too late to say so."""
    repeatable: bool = False
    """Whether it runs again, though it is finished, when it is asked for by name."""
    all_ranks: bool = False
    """Whether all processes take part. Those that do not lead have no sub-run."""


def stages_up_to(stages: Sequence[Stage[Context]], asked: str) -> Sequence[Stage[Context]]:
    """The stages up to the one that was asked for; "all" is all of them."""
    names = [stage.name for stage in stages]
    return stages if asked == "all" else stages[: names.index(asked) + 1]


def check_stages(
    context: Context,
    stages: Sequence[Stage[Context]],
    asked: str,
    has_begun: Callable[[str], bool] = lambda _: False,
) -> None:
    """Check, each once, what the stages need that are still ahead."""
    ahead = [stage for stage in stages_up_to(stages, asked) if not has_begun(stage.name)]
    for check in dict.fromkeys(check for stage in ahead for check in stage.checks):
        check(context)


def run_stages(
    context: Context,
    stages: Sequence[Stage[Context]],
    asked: str,
    place: Callable[[str], Run | None],
    *,
    say: Callable[[str], None] = lambda _: None,
    agree: Callable[[Any], Any] = lambda value: value,
) -> dict[str, Any]:
    """Run the stages up to the one that was asked for that are not finished; the last's summary.

    `place` gives the sub-run of a stage, or None in a process that does not lead; `agree` is the
    leader's value, in every process.
    """
    run = None
    for stage in stages_up_to(stages, asked):
        run, again = place(stage.name), stage.repeatable and stage.name == asked
        if not agree(run is not None and run.finished and not again):
            if run is not None:
                say(f"stage {stage.name}")
            if run is not None or stage.all_ranks:
                stage.run(context, run)
    return {} if run is None else run.summary
