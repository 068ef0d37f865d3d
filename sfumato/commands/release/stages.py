"""The stages of `sfumato release` that make the bundle: teacher, moments, match.

Private images are read here in three places, and each is charged: the teacher's training, the sum
of statistics, and the count of near copies for the data card.
"""

from dataclasses import replace
from functools import partial

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sfumato.commands.release.budget import one_release, require_within, teacher_settings
from sfumato.commands.release.context import Context, finished_book, open_book, teacher_of
from sfumato.commands.train import command as train
from sfumato.commands.train.train_state import group_by_person
from sfumato.data.arrays import load_npz
from sfumato.data.images import Images
from sfumato.files import read_json
from sfumato.metrics.quality import nearest_distances
from sfumato.privacy.moments import weighted_means
from sfumato.privacy.noise import privatize
from sfumato.runs import Run
from sfumato.sharing.bundle import write_bundle
from sfumato.sharing.card import BundleCard
from sfumato.sharing.feature_matching import MatchingTarget, deal_classes
from sfumato.sharing.feature_matching import match_features as move_all
from sfumato.sharing.moments import MomentScale, make_gauge, sum_moments
from sfumato.training.evaluate import logits_of
from sfumato.training.inputs import Inputs


def train_teacher(context: Context, stage: Run) -> None:
    """The teacher: trained here, as `sfumato train` would, or one that is there already."""
    if context.book is None:
        settings = teacher_settings(context.config, context.shares.teacher)
        train.run(settings.train.alone, stage)
        return
    assert context.config.teacher is not None
    stage.finish({"teacher": context.config.teacher.resolve().name, "model": context.teacher.model})


def moments(context: Context, stage: Run) -> None:
    """What the teacher sees in private images, released with noise."""
    noise = context.shares.moments
    if noise is None:
        stage.finish({"statistics": "none: no image is moved"})
        return
    model, inputs = teacher_of(context)
    inputs = replace(inputs, precision=torch.float32)
    public = replace(inputs, images=context.public.to(context.device), people=None)
    gauge = make_gauge(model, public, context.config.moments_slack)
    exact = stage.private / "sums.safetensors"
    if not exact.exists():
        groups = context.private.labels if context.config.per_class else None
        count = len(context.private.classes) if context.config.per_class else 1
        table = sum_moments(model, inputs, gauge, groups, count)
        stage.save_tensors("private/sums.safetensors", {"table": table, **gauge.state()})
    # Read back, so that a run cut here releases the same sums again, with the same noise. They go
    # when the stage is finished: adding up again might round otherwise.
    kept = load_file(exact)
    gauge = type(gauge).load(kept, torch.device("cpu"))
    plan = one_release(context.config, context.units, noise, gauge.max_norm)
    ledger, secret = open_book(context)
    before = [release for release in ledger.releases if release.stage not in ("moments", "card")]
    card = one_release(context.config, context.units, context.shares.card)
    require_within(
        context.config, [*before, plan.release("moments", 0), card.release("card", 0)], ledger
    )
    noisy = privatize({"table": kept["table"]}, plan, ledger, secret, step=0, stage="moments")
    means = weighted_means(noisy["table"], gauge.weight, least=1 / context.units).float()
    stage.save_tensors("moments.safetensors", {"means": means, **gauge.state()})
    stage.finish({"numbers": means.numel(), "noise_multiplier": noise, "epsilon": ledger.epsilon()})


def goal_of(context: Context) -> MatchingTarget | None:
    """What was released of the statistics."""
    path = context.run.stage("moments").path / "moments.safetensors"
    if not path.exists():
        return None
    kept = load_file(path)
    return MatchingTarget(MomentScale.load(kept, context.device), kept["means"].to(context.device))


def match_images(context: Context, stage: Run) -> None:
    """Move the public images, write down the teacher's answers, and pack the bundle."""
    model, inputs = teacher_of(context)
    public = replace(inputs, images=context.public.to(context.device), people=None)
    public = replace(public, precision=context.precision)
    targets = deal_classes(len(context.public), len(context.private.classes))
    settings = context.config.matching
    pixels = move_all(model, public, targets, goal_of(context), settings, stage, context.run.log)
    images, logits = released_images(context, model, inputs, pixels)
    images.save_npz(stage.path / "images.npz")
    stage.save_tensors("soft_labels.safetensors", {"logits": logits})
    card = pack_bundle(context)
    stage.finish({"images": len(images), "epsilon": card.epsilon, "delta": card.delta})


def released_images(
    context: Context, model: nn.Module, inputs: Inputs, pixels: Tensor
) -> tuple[Images, Tensor]:
    """The moved images, with the teacher's answers to just these pixels."""
    moved = replace(
        context.public,
        pixels=pixels,
        labels=torch.zeros(len(pixels), dtype=torch.int64),
        classes=context.private.classes,
        name=f"{context.private.name}-from-{context.public.name}",
    )
    inputs = replace(inputs, images=moved.to(context.device), precision=torch.float32, people=None)
    logits = logits_of(model, inputs)
    return replace(moved, labels=logits.argmax(dim=1)), logits


def pack_bundle(context: Context) -> BundleCard:
    """Write the bundle, with what its card needs to say."""
    stage = context.run.stage("match")
    images = load_npz(stage.path / "images.npz", "train", private=False)
    name = f"{context.private.name}-from-{context.public.name}"
    logits = load_file(stage.path / "soft_labels.safetensors")["logits"]
    near = near_copies(context, images, stage)
    ledger = finished_book(context)
    require_within(context.config, ledger.releases, ledger)
    change = (images.pixels.int() - context.public.pixels.int()).abs().float()
    moved = {"mean": float(change.mean()), "largest": float(change.max())}
    return write_bundle(
        context.run.path / "bundle",
        replace(images, name=name),
        logits,
        ledger,
        format=context.config.format,
        k=context.config.k,
        model=context.teacher.model,
        public=context.public.name,
        temperature=context.config.temperature,
        moved=moved,
        near_copies=near,
    )


def near_copies(context: Context, images: Images, stage: Run) -> dict[str, float]:
    """The share of private images that have a released image very close to them, with noise.

    Very close: closer than 99 of 100 public images are to the nearest that is not their double.
    Each private image (or person) counts once or not at all, so one more or less changes the count
    by one.
    """
    if (stage.path / "near_copies.json").exists():
        return read_json(stage.path / "near_copies.json")
    rows = partial(pixel_rows, device=context.device)
    usual = nearest_distances(rows(context.public), rows(context.public), itself=True)
    usual = usual[usual > 0]  # doubles among public images say nothing of how far others are apart
    threshold = float(usual.sort().values[len(usual) // 100]) if len(usual) else 0.0
    if not (stage.path / "private" / "count.json").exists():
        near = (nearest_distances(rows(context.private), rows(images)) < threshold).cpu()
        people = group_by_person(context.teacher, context.private)
        if people is not None:
            assert context.private.people is not None
            counts = torch.zeros(len(people)).index_add(0, context.private.people, near.float())
            near = counts > 0
        stage.write_json("private/count.json", int(near.sum()))
    count = read_json(stage.path / "private" / "count.json")
    plan = one_release(context.config, context.units, context.shares.card)
    ledger, secret = open_book(context)
    total = {"count": torch.tensor([count], dtype=torch.float64)}
    noisy = privatize(total, plan, ledger, secret, step=0, stage="card")["count"]
    found = {
        "share": min(1.0, max(0.0, float(noisy))),
        "threshold": threshold,
        "standard_error": plan.noise_deviation / context.units,
    }
    stage.write_json("near_copies.json", found)
    return found


def pixel_rows(images: Images, device: torch.device) -> Tensor:
    """Pixels as rows of numbers."""
    return images.pixels.flatten(1).to(device).double()
