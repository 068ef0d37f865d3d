"""`sfumato warmup`: a little public data, a diffusion model of it, a warm start, and then DP.

A small share of the images is declared public. A generator learns it and draws many more like it; a
classifier warms up on these, and only then learns the private rest, with differential privacy (Park
et al. 2024). The ledger speaks of the private rest alone: about the public share nothing is
guaranteed, and the generator may replay it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sfumato.commands import Command, as_label
from sfumato.commands.stages import describe_stage
from sfumato.commands.warmup import private as warmup_private
from sfumato.commands.warmup.classifier import (
    build_classifier,
    check_plan,
    train_privately,
    warm_up,
)
from sfumato.commands.warmup.context import Context, make_context
from sfumato.commands.warmup.draw import draw_to_file, show_drawn
from sfumato.commands.warmup.evaluate import evaluate as evaluate_classifier
from sfumato.commands.warmup.evaluate import prepare_evaluation
from sfumato.commands.warmup.generator import (
    check_number,
    check_public_share,
    draw_samples,
    guide,
    make_denoiser,
    read_samples,
    split,
    store_brought,
)
from sfumato.commands.warmup.generator import generator as train_generator
from sfumato.errors import ConfigError
from sfumato.processes import num_processes
from sfumato.reporting.render import summary_text
from sfumato.runs import Run
from sfumato.settings.warmup import PRESETS as PRESETS
from sfumato.settings.warmup import Draw, Warmup
from sfumato.stages import Stage, check_stages, run_stages
from sfumato.training.process_group import join_processes, leave_processes
from sfumato.training.setup import pick_device

Config = Warmup


def run(config: Warmup, run: Run | None) -> dict[str, Any]:
    """Split, generator, guide, sample, warmup, train, evaluate."""
    if num_processes() > 1:
        require_shared(config.stage)
    processes = join_processes(pick_device(config.device))
    try:
        context, stages = make_context(config, run, processes), stages_of_warmup(config)
        has_begun = (lambda _: False) if run is None else run.has_begun_stage
        check_stages(context, stages, config.stage, has_begun)
        place = (lambda _: None) if run is None else run.stage
        say = (lambda _: None) if run is None else run.log
        summary = run_stages(context, stages, config.stage, place, say=say, agree=processes.agree)
        processes.any(False)  # all leave at once: the leader may have had more to do
    finally:
        leave_processes()
    if run is None:
        return {}
    if config.stage in ("all", "evaluate"):
        trained_in = "generator" if config.private else "train"
        summary = {**run.stage(trained_in).summary, **summary, "run": str(run.path)}
        told = {"public": context.public.name, "public_images": len(context.public)}
        made = run.stage("sample").summary if config.number else {"drawn": 0}
        told |= {name: made[name] for name in ("drawn", "samples") if name in made}
        run.finish({**summary, **told})
    return (
        run.summary
        if config.stage == "all"
        else {**summary, "stage": config.stage, "run": str(run.path)}
    )


def require_shared(asked: str) -> None:
    """Refuse several processes for stages that are for one, or reach one that is."""
    if asked in ("warmup", "train", "evaluate", "all"):
        words = "sfumato warmup" if asked == "all" else f"sfumato warmup {asked}"
        raise ConfigError(
            f"{words} is for one process. With torchrun, take sfumato warmup generator or sample, "
            "then go on by one process with sfumato warmup --out RUN --epsilon EPSILON."
        )


def stages_of_warmup(config: Warmup) -> list[Stage[Context]]:
    """The stages in their order. Several processes share the generator's work, and the drawing."""
    private, brought = config.private, config.samples is not None
    training_checks = (check_plan,) if private else (check_public_share,)
    draws = "generator" in config.stages and not private
    made = (
        Stage(name="split", run=split, checks=training_checks if draws else ()),
        Stage(
            name="generator",
            run=warmup_private.private_generator if private else train_generator,
            checks=(*training_checks, make_denoiser),
            all_ranks=True,
        ),
        Stage(name="guide", run=guide),
        Stage(
            name="sample",
            run=store_brought if brought else draw_samples,
            checks=(read_samples,) if brought else (check_number,),
            all_ranks=True,
        ),
        Stage(name="warmup", run=warm_up, checks=(build_classifier,)),
        Stage(name="train", run=train_privately, checks=(check_plan, build_classifier)),
        Stage(
            name="evaluate",
            run=warmup_private.evaluate_drawn_images if private else evaluate_classifier,
            checks=(prepare_evaluation,),
            repeatable=True,
        ),
    )
    return [stage for stage in made if stage.name in config.stages]


def show(summary: Mapping[str, Any]) -> str:
    """What was guaranteed, and where it is."""
    if "file" in summary:
        return show_drawn(summary)
    if "stage" in summary:
        return describe_stage(summary)
    trained = "train" if summary["public_images"] else "generator"
    where = Path(summary["run"]) / "stages" / trained
    lines = {"model": f"{where}/model.safetensors"}
    if summary["public_images"]:  # a generator is drawn from, and not loaded
        lines["use it"] = f'sfumato.load_model("{where}") in Python'
        lines["public"] = (
            f"{summary['public_images']} images of {summary['public']}: nothing is guaranteed "
            "about them"
        )
    if "samples" in summary:
        lines["samples"] = f"{summary['drawn']} images of {summary['samples']}"
    elif summary.get("drawn", True):  # runs of earlier versions do not say
        place, pictures = Path(summary["run"]), "stages/sample/samples"
        told = f"; pictures in {pictures}" if (place / pictures).is_dir() else ""
        lines["drawn"] = f"{place}/stages/sample/images.npz{told}"
    head = f"{summary['model']} trained on {summary['data']}: {summary['steps']} steps"
    return summary_text(summary, head, lines)


COMMAND = Command(
    run=run,
    show=show,
    again="evaluate",
    label=lambda config: as_label(config.data, config.model, epsilon=config.epsilon),
    asks_more=lambda config: config.stage == "evaluate",
    # Images drawn from another run's generator go into a file.
    writes_file=lambda config: isinstance(config, Draw),
    write_file=draw_to_file,
)
