"""`sfumato warmup`: a little public data, a diffusion model of it, a warm start, and then DP.

A small share of the images is declared public. A generator learns it and draws many more like it; a
classifier warms up on these, and only then learns the private rest, with differential privacy (Park
et al. 2024). The ledger speaks of the private rest alone: about the public share nothing is
promised, and the generator may replay it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sfumato.commands import Recipe, as_label, train
from sfumato.commands.stages import follow, tell_stage
from sfumato.commands.warmup.context import Context, make_context
from sfumato.commands.warmup.draw import show_drawn, write_file
from sfumato.commands.warmup.together import together
from sfumato.processes import num_processes
from sfumato.runs import Run
from sfumato.settings.warmup import PRESETS as PRESETS
from sfumato.settings.warmup import STAGES, Warmup

Config = Warmup

AGAIN = "evaluate"
"""The stage that a finished run may take again, with other controls."""


def run(config: Warmup, run: Run | None) -> dict[str, Any]:
    """Split, generator, guide, sample, warmup, train, evaluate."""
    if run is None or num_processes() > 1:
        return together(config, run, works(config))
    context = make_context(config, run)
    last = STAGES[-1] if config.stage == "all" else config.stage
    again = AGAIN if config.stage == AGAIN else ""
    summary = follow(context, works(config), last, run.stage, run.log, again)
    if last == STAGES[-1]:
        learnt = "generator" if config.private else "train"
        summary = {**run.stage(learnt).summary, **summary, "run": str(run.path)}
        told = {"public": context.public.name, "public_images": len(context.public)}
        made = run.stage("sample").summary if config.number else {"drawn": 0}
        told |= {name: made[name] for name in ("drawn", "samples") if name in made}
        run.finish({**summary, **told})
    return run.summary if config.stage == "all" else {**summary, "stage": config.stage,
                                                     "run": str(run.path)}  # fmt: skip


def works(config: Warmup) -> dict[str, Callable[[Context, Run], object]]:
    """What each stage does."""
    from sfumato.commands.warmup import brought as warmup_brought
    from sfumato.commands.warmup import private as warmup_private
    from sfumato.commands.warmup.classifier import privately, warm_up
    from sfumato.commands.warmup.evaluate import evaluate
    from sfumato.commands.warmup.generator import generator, guide, sample, split

    made = (split, generator, guide, sample, warm_up, privately, evaluate)
    found: dict[str, Callable[[Context, Run], object]] = dict(zip(STAGES, made, strict=True))
    if config.private:
        found |= {"generator": warmup_private.generator, "evaluate": warmup_private.evaluate}
    if config.samples is not None:
        found["sample"] = warmup_brought.sample
    return {name: found[name] for name in config.stages}


def show(summary: Mapping[str, Any]) -> str:
    """What was promised, and where it is."""
    if "file" in summary:
        return show_drawn(summary)
    if "stage" in summary:
        return tell_stage(summary)
    learnt = "train" if summary["public_images"] else "generator"
    # The word on private/ comes last; a generator is drawn from, and not loaded.
    left_out = ("private  ", "use it  ") if learnt == "generator" else ("private  ",)
    where = f"{summary['run']}/stages/{learnt}"
    lines = [
        line
        for line in train.show({**summary, "run": where}).splitlines()
        if not line.strip().startswith(left_out)
    ]
    if summary["public_images"]:
        lines.append(
            f"  public    {summary['public_images']} images of {summary['public']}: nothing is "
            "promised about them"
        )
    if "samples" in summary:
        lines.append(f"  samples   {summary['drawn']} images of {summary['samples']}")
    elif summary.get("drawn", True):  # runs of earlier versions do not say
        place, pictures = Path(summary["run"]), "stages/sample/samples"
        told = f"; pictures in {pictures}" if (place / pictures).is_dir() else ""
        lines.append(f"  drawn     {place}/stages/sample/images.npz{told}")
    lines.append(
        f"  private   {summary['run']}/private: do not share; scores.json has the accuracy"
    )
    return "\n".join(lines)


RECIPE = Recipe(
    run=run, show=show, again=AGAIN,
    label=lambda config: as_label(config.data, config.model, epsilon=config.epsilon),
    asks_more=lambda config: config.stage == AGAIN,
    # Images drawn from another run's generator go into a file.
    writes_file=lambda config: config.run is not None, write_file=write_file,
)  # fmt: skip
