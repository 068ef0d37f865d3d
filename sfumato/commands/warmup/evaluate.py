"""The last stage of `sfumato warmup`: what each step was worth, and how good the drawn images are.

All of it compares with test or private images, without noise: it goes to `private/`, and to the
screen of the person who runs it. Controls are models that nobody gets; each has a place of its own,
goes on where it was cut, and is not made again when it is there.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from sfumato.commands.train import command as train
from sfumato.commands.warmup.classifier import drawn_images, from_weights, one_by_one, warm_model
from sfumato.commands.warmup.context import Context
from sfumato.data.images import Images
from sfumato.files import read_json
from sfumato.metrics.fidelity import FEWEST, Extractor, compare_sets, named_extractor, thin_images
from sfumato.reporting.scores import keep_scores
from sfumato.runs import Run
from sfumato.training.evaluate import accuracy

MOST = 10_000
"""Images of a set that are compared with others."""
CONTROLS = {
    "scratch": "private training without a warm-up",
    "public-alone": "the same warm-up on public images alone",
    "public-alone-dp": "private training after the warm-up on public images alone",
}
"""Controls by the names of their places."""


def evaluate(context: Context, stage: Run) -> None:
    """Score warm-up, private stage and controls, and compare images: private, for test images are.

    A stage that is taken again keeps the controls that it scored before.
    """
    extractor = prepare_evaluation(context)
    known = context.run.private / "scores.json"
    before = read_json(known) if stage.finished and known.exists() else {}
    accuracies = {name: value for name, value in before.items() if isinstance(value, float)}
    accuracies |= {
        "warmup": score_weights(context),
        "dp": read_json(context.run.stage("train").private / "scores.json")["test_accuracy"],
    }
    if context.config.controls:
        accuracies |= control_runs(context, stage)
    # On the screen only, for the owner of the images: nothing else may keep the scores.
    told = ", ".join(f"{name} {value:.3f}" for name, value in accuracies.items())
    context.run.say(f"test accuracy (private): {told}")
    scores = {**accuracies, "test_images": len(context.test)}
    if context.config.number:
        scores["fidelity"] = fidelity(context, extractor)
        context.run.say(f"images (private): {log_fidelity(scores['fidelity'])}")
    keep_scores(context.run, "warmup", scores)
    stage.finish({"controls": sorted(accuracies.keys() - {"warmup", "dp"})})


def prepare_evaluation(context: Context) -> Extractor:
    """The extractor, which is made first: one that cannot be had is refused at once."""
    config = context.config
    return named_extractor(config.extractor, config.extractor_weights, context.test.shape)


def control_runs(context: Context, stage: Run) -> dict[str, float]:
    """The same recipe on public images alone, in as many steps, and DP without a warm-up."""
    scratch = {"dp_from_scratch": privately_from(None, context, stage, "scratch")}
    if not context.config.number:
        return scratch
    warm, place = context.config.warm_epochs, own_place(stage, "public-alone")
    alone = place.path / "model.safetensors"
    if not place.finished:
        drawn, public = len(drawn_images(context)), len(context.public)
        shown = warm * (drawn + context.config.warm_repeats * public)
        log_control(stage, "public-alone")
        warm_model(context, context.public, place, epochs=shown / len(context.public))
    return {
        "warmup_on_public_images_alone": score_weights(context, alone),
        "dp_from_public_images_alone": privately_from(alone, context, stage, "public-alone-dp"),
        **scratch,
    }


def privately_from(weights: Path | None, context: Context, stage: Run, name: str) -> float:
    """Test accuracy after the private stage, from these weights; no drawn image is looked at."""
    place = own_place(stage, name)
    if not place.finished:
        log_control(stage, name)
    settings = replace(from_weights(context, weights), extender="none", extender_images=None)
    train.run_on(settings, context.private, context.test, place)
    return read_json(place.private / "scores.json")["test_accuracy"]


def log_control(stage: Run, name: str) -> None:
    """Which control comes now: what it says of itself sounds like the run's own words."""
    stage.say(f"control {name}: {CONTROLS[name]}")


def own_place(stage: Run, name: str) -> Run:
    """Where a control is made: in `private/`, for it is nobody's."""
    place = Run(stage.private / name, stage.say)
    place.path.mkdir(exist_ok=True)
    return place


def score_weights(context: Context, weights: Path | None = None) -> float:
    """Test accuracy of the classifier with these weights, or those after the warm-up."""
    weights = weights or context.run.stage("warmup").path / "model.safetensors"
    settings = one_by_one(from_weights(context, weights))
    train_state, inputs = train.prepare_classifier(settings, context.test, context.device)
    return accuracy(train_state.model, replace(inputs, precision=context.precision))


def fidelity(context: Context, extractor: Extractor) -> dict[str, Any]:
    """How drawn images compare with test images, and for scale, how as many real ones do.

    `drawn` stands beside the public images that the generator was trained on; `drawn_more`, where
    there are more of them, beside private ones: what images from the very source of the test images
    have.
    """
    drawn = drawn_images(context)
    sets = equally_many("drawn", drawn, "public", context.public) if len(context.public) else {}
    if len(drawn) > len(context.public):
        sets |= equally_many("drawn_more" if sets else "drawn", drawn, "private", context.private)
    if min(map(len, (context.test, *sets.values()))) < FEWEST:
        return {"features": extractor.name}
    return compare_sets(extractor, context.test, sets, context.device, MOST)


def equally_many(name: str, some: Images, other: str, others: Images) -> dict[str, Images]:
    """Equally many of both: distances shrink as images are added, whatever these look like."""
    count = min(len(some), len(others), MOST)
    return {name: thin_images(some, count), other: thin_images(others, count)}


def log_fidelity(found: dict[str, Any]) -> str:
    """The distances, in a line: drawn images stand before as many real ones."""
    sets = {name: part for name, part in found.items() if name != "features"}
    if not sets:
        return f"too few of them to compare: that takes {FEWEST} of each kind"
    distances = ", ".join(
        f"{part['made_count']:,} {name.removesuffix('_more')} {part['frechet']:.4g}"
        for name, part in sets.items()
    )
    count = next(iter(sets.values()))["real_count"]
    return (
        f"Frechet distance to {count:,} test images: {distances}; lower is nearer "
        f"({found['features']})"
    )
