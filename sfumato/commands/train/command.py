"""`sfumato train`: private, or plain, training and fine-tuning of any vision model.

Load, build, plan, train, score: the privacy is in the plan and in the step that `private_step`
makes; everything else is ordinary training.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from sfumato.clipping.clip import GradientClipper
from sfumato.clipping.method_choice import explain_layout
from sfumato.commands import Command, as_label
from sfumato.commands.origin import book_of_weights, log_origin, note_start, require_covered
from sfumato.commands.train.canaries import (
    find_canaries,
    note_losses_at_end,
    note_losses_at_start,
    observe_canaries,
)
from sfumato.commands.train.privacy_setup import (
    guarantee_summary,
    log_resume,
    open_ledger,
    plan_for,
    steps_left_out,
)
from sfumato.commands.train.step import load_public, make_step
from sfumato.commands.train.train_state import count_units, describe_classifier
from sfumato.commands.train.train_state import prepare_classifier as prepare_classifier
from sfumato.data.fingerprint import require_same_data
from sfumato.data.images import Images
from sfumato.data.load import load_splits
from sfumato.models.diverged import has_diverged
from sfumato.privacy.sampling import Batch, poisson_batches
from sfumato.reporting.render import summary_text
from sfumato.reporting.scores import keep_scores
from sfumato.runs import Run
from sfumato.settings.train import PRESETS as PRESETS
from sfumato.settings.train import Train
from sfumato.training.canaries import CanaryHook, CanaryInclusion
from sfumato.training.chunks import ChunkSizes
from sfumato.training.evaluate import accuracy
from sfumato.training.fit import TrainState, fit
from sfumato.training.hooks import with_hooks
from sfumato.training.inputs import Inputs
from sfumato.training.memory import fitting_batch, memory_advice
from sfumato.training.private_step import PrivacyContext
from sfumato.training.process_group import ProcessGroup, join_processes, leave_processes
from sfumato.training.progress import price_list, progress
from sfumato.training.setup import pick_device

Config = Train


def needs_run(config: Train) -> bool:
    """Whether something is kept: an explanation is only printed."""
    return not config.explain


def run(config: Train, run: Run | None) -> dict[str, Any]:
    """Load, build, plan, train, score. Of several processes, all but the leader have no run."""
    device = pick_device(config.device)
    processes = join_processes(device)
    try:
        if processes.agree(run is not None and run.finished):
            return {} if run is None else run.summary
        require_covered(config)
        train, test = load_splits(config.data, people=config.people, **config.source.loading)
        if run is not None:
            log_origin(config, train, run.log)
            note_start(config.weights, run)
        public = load_public(config, train, test)
        if config.explain:
            return {
                "explanation": explain_layers(config, *prepare_classifier(config, train, device))
            }
        return run_on(config, train, test, run, processes, public=public)
    finally:
        leave_processes()


def run_on(
    config: Train,
    train: Images,
    test: Images,
    run: Run | None,
    processes: ProcessGroup | None = None,
    public: Images | None = None,
    declared: str = "",
) -> dict[str, Any]:
    """The same with images that are loaded already: what a recipe of several stages calls.

    `declared` names images that it declared public.
    """
    processes = ProcessGroup() if processes is None else processes
    if run is not None and run.finished:
        return run.summary
    processes.ask(lambda: require_same_data(train, run))
    before = book_of_weights(config, train)
    canaries = find_canaries(config, train, run, processes)
    train = train if canaries is None else canaries.place_in(train)
    say = run.log if run else lambda _: None
    # Weights may have to be fetched: what no plan can keep is said before.
    planned = plan_for(config, count_units(config, train), before)
    train_state, inputs = prepare_classifier(config, train, pick_device(config.device), say)
    paid = open_ledger(config, inputs, run, processes, planned, declared, before)
    train_model(config, train_state, inputs, paid, run, processes, public=public, canaries=canaries)
    processes.any(False)  # all leave at once: who is left behind while the leader scores would fail
    leave_processes()
    if run is None:
        return {}
    if canaries is not None:
        note_losses_at_end(canaries, train_state, inputs, run)
    return finish_training(config, train_state, replace(inputs, images=test), paid, run)


def show(summary: Mapping[str, Any]) -> str:
    """What was guaranteed, and where it is."""
    if "explanation" in summary:
        return summary["explanation"]
    return summary_text(
        summary,
        f"{summary['model']} trained on {summary['data']}: {summary['steps']} steps",
        {
            "model": f"{summary['run']}/model.safetensors",
            "use it": f'sfumato.load_model("{summary["run"]}") in Python',
        },
    )


def train_model(
    config: Train,
    train_state: TrainState,
    inputs: Inputs,
    paid: PrivacyContext,
    run: Run | None,
    processes: ProcessGroup,
    *,
    public: Images | None = None,
    canaries: CanaryInclusion | None = None,
    look: Callable[[int], None] = lambda _: None,
) -> None:
    """Take all the steps, from wherever an earlier try was cut.

    `look` is called on the leader after each step with its number: what it makes of the weights is
    covered by the ledger.
    """
    plan, ledger = paid.plan, paid.ledger
    on_noise = partial(inputs.losses, train_state.model, *inputs.trial())
    train_state.load(processes.agree(run and run.load_checkpoint()))
    if run is not None:
        log_resume(paid, train_state.step, run)
    if canaries is not None:
        note_losses_at_start(canaries, train_state, inputs, run)
    step, clipper, inputs, work = make_step(
        config,
        train_state,
        inputs,
        paid,
        processes=processes,
        public=public,
        say=run.log if run else lambda _: None,
    )
    if canaries is not None and canaries.kind == "gradient":
        step = with_hooks(
            step, [CanaryHook(clipper.model, plan, canaries, observe_canaries(canaries, plan, run))]
        )
    chunk_sizes = ChunkSizes.of(
        plan, processes=processes.size, device=inputs.device, compiled=config.compile
    )
    asked = config.physical_batch_size
    size = fitting_batch(clipper, inputs, asked, chunk_sizes, processes, work)
    if run is not None and size != asked:
        run.log(f"{size} examples are taken at once")
    batches = private_batches(paid, len(inputs), train_state.step, size, chunk_sizes, canaries)
    tell = progress(
        plan.steps, train_state.step, price_list(plan, ledger, "train"), run.say if run else None
    )

    def tell_and_look(done: int, numbers: dict[str, float]) -> None:
        tell(done, numbers)
        if run is not None:
            look(done)

    with memory_advice(clipper, inputs, size, work):
        fit(
            train_state,
            batches,
            step,
            run,
            processes=processes,
            before_saving=ledger.settle,
            diverged=partial(has_diverged, train_state.model, on_noise),
            tell=tell_and_look,
        )


def private_batches(
    paid: PrivacyContext,
    examples: int,
    start: int,
    size: int,
    chunk_sizes: ChunkSizes,
    canaries: CanaryInclusion | None,
) -> Iterator[Batch]:
    """The Poisson batches of all steps from `start`, without the canaries that are left out."""
    batches = poisson_batches(
        paid.plan,
        examples,
        paid.ledger,
        paid.secret,
        stage="train",
        start=start,
        chunk_size=size,
        round_to=chunk_sizes.round_to(size),
    )
    return batches if canaries is None else canaries.keep_out(batches)


def explain_layers(config: Train, train_state: TrainState, inputs: Inputs) -> str:
    """The table of layers: method, work, memory, share, and the predicted cost."""
    mode = "ghost_mixed" if config.mode == "non-private" else config.mode
    clipper = GradientClipper(train_state.model, mode)
    clipper.clip(inputs.losses, inputs.trial(), 3)
    (parts,) = clipper.layouts.values()
    return explain_layout(parts, train_state.model)


def finish_training(
    config: Train, train_state: TrainState, test: Inputs, paid: PrivacyContext, run: Run
) -> dict[str, Any]:
    """Save the model, score it privately, sum up."""
    describe_classifier(config, train_state.best, test).keep(
        run, train_state.best, paid.ledger.guarantee()
    )
    scores = {"test_accuracy": accuracy(train_state.best, test), "test_images": len(test.images)}
    left_out = steps_left_out(run)
    keep_scores(run, "train", {**scores, "steps_left_out": left_out})
    if left_out:
        run.say(f"{left_out} steps (a private count) were paid and had no effect")
    return run.finish({**guarantee_summary(paid), "model": config.model, "run": str(run.path)})


COMMAND = Command(
    run=run,
    show=show,
    needs_run=needs_run,
    label=lambda config: as_label(config.data, config.model, epsilon=config.epsilon),
)
