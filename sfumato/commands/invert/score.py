"""How good the guesses of `sfumato invert` are, in the eyes of judges.

It compares with the images that the target was trained on: the owner's part, not the attacker's.
All of it goes to `private/`.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato.attacks.access import TargetAccess
from sfumato.commands.invert.context import Context, open_access
from sfumato.commands.invert.stages import (
    guesses_of,
    judged_classes,
    judges_training_images,
    new_judge,
    selection_of,
)
from sfumato.commands.stages import read_given_run
from sfumato.commands.train import command as train
from sfumato.data.images import Images
from sfumato.data.load import load_images
from sfumato.data.overlap import overlap
from sfumato.errors import ConfigError, DataError
from sfumato.metrics.inversion import inversion_scores as count
from sfumato.metrics.judges import Judge, Judged, JudgedSets, judge_images
from sfumato.models.zoo import head_parameters, load_weights, read_state
from sfumato.reporting.inversion_figures import contact_sheet
from sfumato.reporting.scores import keep_scores
from sfumato.runs import Run
from sfumato.training.inputs import Inputs
from sfumato.training.plain import inputs_of

EACH = 500
"""Images of a class that guesses are compared with, at most."""


def score(context: Context, stage: Run) -> None:
    """Let judges look at guesses, at members, at images nobody saw, and at the public ones."""
    pixels, labels = four_sets(context)
    judged_by = judge_all(context, pixels)
    found = count(labels, judged_by)
    unseen = context.unseen
    found["target_test_accuracy"] = accuracy_of(open_access(context), unseen)
    found["test_images"] = len(unseen)
    found["attack_accuracy"] = found["majority"]["top1"]["mean"]
    found["method"] = context.config.method
    if ceiling_of(found) < 0.5:
        found["warning"] += (
            " A judge names fewer than half of real images rightly: its word means little. Raise "
            "--judge-epochs."
        )
    keep_scores(context.run, "invert", found)
    contact_sheet(
        context.run.private / "guesses.png",
        pixels.members,
        pixels.guesses,
        labels,
        judged_by,
        context.members.classes,
    )
    context.run.say(headline(found))
    if found["warning"]:
        context.run.say(f"  mind: {found['warning'].strip()}")
    stage.finish(
        {"text": tell(context), "data": context.members.name, "public": context.public.name}
    )


def accuracy_of(access: TargetAccess, images: Images) -> float:
    """How often the target names images rightly."""
    answers = access.answers(images.pixels).argmax(dim=1).cpu()
    return float((answers == images.labels).float().mean())


def four_sets(context: Context) -> tuple[JudgedSets[Tensor], JudgedSets[Tensor]]:
    """Pixels between 0 and 1, and labels, of guesses, members, held-out and public images."""
    guesses, chosen = guesses_of(context), selection_of(context)
    members, held_out = (
        sample_per_class(some, EACH) for some in (context.members, context.held_out)
    )
    # Images that judges were trained on would make the floor too low.
    strange = ~judges_training_images(context)
    left = [places[strange[places]] for places in chosen.places]
    each = [
        (some if len(some) else places)[:EACH]
        for some, places in zip(left, chosen.places, strict=True)
    ]
    public = [context.public.pixels[places] for places in each]

    def real(pixels: Tensor) -> Tensor:
        return (pixels.float() / 255).to(context.device)

    pixels = JudgedSets(
        guesses.images.clamp(0, 1).to(context.device),
        real(members.pixels),
        real(held_out.pixels),
        real(torch.cat(public)),
    )
    counts = torch.tensor([len(places) for places in each])
    pseudo = torch.arange(len(each)).repeat_interleave(counts)
    return pixels, JudgedSets(guesses.labels, members.labels, held_out.labels, pseudo)


def sample_per_class(images: Images, each: int) -> Images:
    """At most this many of each class, at random: files are often ordered, by writer for
    example."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    labels = images.labels[order]
    places = [order[labels == label][:each] for label in range(len(images.classes))]
    return images.select(torch.cat(places))


def judge_all(context: Context, pixels: JudgedSets[Tensor]) -> dict[str, Judged]:
    """What every judge says of every set."""
    found: dict[str, Judged] = {}
    for name in context.config.judges:
        model = new_judge(context, name)
        load_weights(model, context.shared.private / "judges" / name / "model.safetensors")
        found[name] = judge_images(
            as_judge(model, inputs_of(model, context.others, context.device)), pixels
        )
    for path in context.config.judge:
        found[str(path)] = judge_images(as_judge(*read_given_judge(context, path)), pixels)
    return found


def read_given_judge(context: Context, path: Path) -> tuple[nn.Module, Inputs]:
    """A judge that is there already, or the reason why it must not judge.

    One trained on the same images as the target would know more of it than the class, and one whose
    classes have another order would name others than it means.
    """
    settings, weights, _ = read_given_run(path, context.config.train)
    judge_images = load_images(
        settings.data, "train", people=settings.people, **settings.source.loading
    )
    if judge_images.shape[0] != context.members.shape[0]:
        raise ConfigError(
            f"judge {path}: takes {judge_images.shape[0]} colour channels, and images of the "
            f"target have {context.members.shape[0]}. Train it with --grey, or on colour images."
        )
    if judge_images.classes != judged_classes(context):
        raise ConfigError(
            f"judge {path} knows the classes {', '.join(judge_images.classes)}. It should know "
            f"{', '.join(judged_classes(context))}, private and public ones, in this order. Train "
            "it on them, or use --judges."
        )
    trained = context.target if context.config.target else context.config.train
    framed = load_images(settings.data, "train", people=settings.people, **trained.source.loading)
    for own, whose in (
        (context.members, "the target was trained on"),
        (context.held_out, "nobody may know"),
    ):
        shared = len(overlap(own, framed))
        if shared:
            raise DataError(
                f"judge {path} was trained on {shared} of the images that {whose}, so it cannot "
                "tell the class from its training images. Take another judge."
            )
    twins = equal_tensors(weights, context.weights) if context.weights.exists() else []
    if twins:
        raise DataError(
            f'judge {path} shares weights with the target ("{twins[0]}", {len(twins)} tensors in '
            "all), so what convinces one convinces the other. Take another judge."
        )
    train_state, inputs = train.prepare_classifier(settings, judge_images, context.device)
    missing = load_weights(train_state.model, weights)
    if missing:
        raise ConfigError(f'{weights} has no "{missing[0]}": the run {path} is not whole.')
    return train_state.model, inputs


def equal_tensors(one: Path, other: Path) -> list[str]:
    """Names in the first file of weights that are the same numbers in the second, by any name.

    Vectors and constants do not count: those of untrained layers are alike everywhere.
    """

    def telling(path: Path) -> dict[str, Tensor]:
        state = read_state(path)
        return {k: v for k, v in state.items() if v.dim() > 1 and v.min() < v.max()}

    known = list(telling(other).values())
    return [k for k, v in telling(one).items() if any(v.equal(another) for another in known)]


def as_judge(model: nn.Module, inputs: Inputs) -> Judge:
    """The model's answers, and what goes into its last layer."""
    paths = {name.rpartition(".")[0] for name in head_parameters(model)}
    if len(paths) != 1:
        raise ConfigError(
            f"a judge needs one last layer, and {type(model).__name__} has {len(paths)}: "
            f"{', '.join(sorted(paths))}. Take another."
        )
    seen: list[Tensor] = []
    model.eval().get_submodule(paths.pop()).register_forward_pre_hook(
        lambda _, tensors: seen.append(tensors[0])
    )
    side = inputs.images.shape[1:]

    def ask(pixels: Tensor) -> tuple[Tensor, Tensor]:
        seen.clear()
        if pixels.shape[2:] != side:  # a judge looks at images of the size that it was trained on
            pixels = F.interpolate(pixels, side, mode="bilinear", antialias=True)
        return model(inputs.normalise(pixels)).float(), seen[-1].float()

    return ask


def headline(found: dict[str, Any]) -> str:
    """One line for the screen; nothing else may keep it."""
    top, floor = found["majority"]["top1"], found["majority"]["floor_top1"]
    between = "" if top["interval"] is None else " ({:.2f} to {:.2f})".format(*top["interval"])
    return (
        f"attack accuracy (private): {top['mean']:.2f}{between}; of public images that the "
        f"target takes for these classes {floor['mean']:.2f}, of real images "
        f"{ceiling_of(found):.2f}; test accuracy of the target {found['target_test_accuracy']:.3f} "
        f"({found['test_images']} images)"
    )


def ceiling_of(found: dict[str, Any]) -> float:
    """How often judges name real images rightly: what attacks can reach at most."""
    return min(judge["held_out_top1"]["mean"] for judge in found["judges"].values())


def tell(context: Context) -> str:
    """For people: what was attacked, and where to look."""
    folder = context.run.private
    return "\n".join(
        [
            f"{len(context.members.classes)} classes of {context.members.name} asked of "
            f"{context.target.model}, with public images of {context.public.name}:",
            f"  pictures  {folder}/guesses.png: training images above, guesses below",
            f"  scores    {folder}/scores.json: do not share",
        ]
    )
