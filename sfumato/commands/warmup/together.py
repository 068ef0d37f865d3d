"""`torchrun -m sfumato warmup generator | sample`: the stages that several processes take together.

Each learns its part of every batch and draws its part of the images. The leader alone has the run
directory: it looks, writes and speaks, and says which stages are finished.
"""

from collections.abc import Callable, Mapping
from typing import Any

from sfumato.commands.warmup.context import make_context
from sfumato.errors import ConfigError
from sfumato.runs import Run
from sfumato.settings.warmup import Warmup

SHARED = ("generator", "sample")
"""What all processes do; the rest before the last of them is the leader's."""
ALONE = ("warmup", "train", "evaluate", "all")
"""Stages that are for one process, or reach one that is."""


def together(
    config: Warmup, run: Run | None, stages: Mapping[str, Callable[..., object]]
) -> dict[str, Any]:
    """Take the stages up to the one that was asked for."""
    from sfumato.training.process_group import join_processes, leave_processes
    from sfumato.training.setup import pick_device

    if config.stage in ALONE:
        words = "sfumato warmup" if config.stage == "all" else f"sfumato warmup {config.stage}"
        raise ConfigError(
            f"{words} is for one process. With torchrun, take sfumato warmup generator or sample, "
            "then go on by one process with sfumato warmup --out RUN --epsilon EPSILON."
        )
    processes = join_processes(pick_device(config.device))
    try:
        context = make_context(config, run, processes)
        summary: dict[str, Any] = {}
        for name, work in stages.items():
            stage = None if run is None else run.stage(name)
            if not processes.agree(stage is not None and stage.finished):
                if run is not None:
                    run.log(f"stage {name}, {processes.size} processes")
                if name in SHARED or stage is not None:
                    work(context, stage)
            summary = {} if stage is None else stage.summary
            if name == config.stage:
                break
        processes.any(False)  # all leave at once: the leader may have had more to do
        return {**summary, "stage": config.stage, "run": "" if run is None else str(run.path)}
    finally:
        leave_processes()
