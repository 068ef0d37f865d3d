"""How good the images of `sfumato release` are, and what they give away.

All of this compares with private or test images, without noise: it is for the owner's eyes, and
everything but the pictures of public and released images goes to `private/`.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from sfumato.commands.release.context import Context, teacher_of
from sfumato.commands.release.stages import pixel_rows, released_images
from sfumato.commands.release.student import distil, new_student, trained_student
from sfumato.data.images import Images
from sfumato.metrics.features import without_head
from sfumato.metrics.fidelity import Extractor, compare_sets, thin_images
from sfumato.metrics.leakage import roc
from sfumato.metrics.quality import nearest_distances
from sfumato.models.zoo import load_weights
from sfumato.reporting.figures import save_image_rows
from sfumato.reporting.scores import keep_scores
from sfumato.runs import Run
from sfumato.sharing.bundle import read_bundle
from sfumato.sharing.feature_matching import deal_classes
from sfumato.training.distil import cached
from sfumato.training.evaluate import accuracy


def evaluate(context: Context, stage: Run) -> None:
    """Score the student, its teacher and controls; compare images; look for near copies."""
    images, logits, _, _ = read_bundle(context.run.path / "bundle")
    model, inputs = teacher_of(context)
    dealt = deal_classes(len(logits), len(context.private.classes))
    scores: dict[str, Any] = {
        "test_accuracy": accuracy(*trained_student(context)),
        "teacher_accuracy": accuracy(
            model, replace(inputs, images=context.test.to(context.device))
        ),
        "test_images": len(context.test),
        "agreement_with_dealt_classes": float((logits.argmax(dim=1) == dealt).float().mean()),
    }
    if context.config.controls:
        scores["controls"] = control_students(context, model)
    scores["quality"] = compare_images(context, images, model)
    scores["membership"] = membership(context, images)
    keep_scores(context.run, "release", scores)
    chance = 1 / len(context.private.classes)
    words = "" if scores["test_accuracy"] > 2 * chance else ": about as good as guessing"
    # On the screen only, for the owner of the images: nothing else may keep the score.
    context.run.say(
        f"test accuracy (private): teacher {scores['teacher_accuracy']:.3f}, student "
        f"{scores['test_accuracy']:.3f}{words}"
    )
    draw_comparison(context, images)
    stage.finish({"bundle": str(context.run.path / "bundle"), "student": context.student})


def control_students(context: Context, teacher: nn.Module) -> dict[str, float]:
    """Accuracy of students of other material: what did matching, and the teacher, bring?

    k=0 are the public images, unmoved, with the teacher's answers. public has no teacher: its own
    labels if it has the same classes, else classes dealt out. real are the private images with
    their labels, without privacy.
    """
    _, inputs = teacher_of(context)
    untouched, logits = released_images(context, teacher, inputs, context.public.pixels)
    same = context.public.classes == context.private.classes
    dealt = deal_classes(len(untouched), len(untouched.classes))
    labelled = replace(untouched, labels=context.public.labels if same else dealt)
    return {
        "k=0": score_student(context, "k0", untouched, cached(logits.to(context.device))),
        "public-only": score_student(context, "public-only", labelled),
        "real": score_student(context, "real", context.private),
    }


def score_student(context: Context, name: str, images: Images, answers: Any = None) -> float:
    """Test accuracy of a student of these images, trained once and kept in `private/`."""
    place = Run(context.run.private / "students" / name, context.run.say)
    place.path.mkdir(parents=True, exist_ok=True)
    model, inputs = new_student(context, images)
    if place.finished:
        load_weights(model, place.path / "model.safetensors")
    else:
        context.run.log(f'a student of other material, "{name}", for comparison')
        distil(context, model, inputs, answers, place)
        place.save_tensors("model.safetensors", model.state_dict())
        place.finish({"images": len(images)})
    return accuracy(model.eval(), replace(inputs, images=context.test.to(context.device)))


def compare_images(context: Context, images: Images, teacher: nn.Module) -> dict[str, Any]:
    """Released images beside private ones, in the teacher's features.

    For scale, public and test images stand beside them.
    """
    extractor = Extractor(
        without_head(teacher), f"last layer of the teacher, {context.teacher.model}"
    )
    sets = {"released": images, "public": context.public, "test": context.test}
    return compare_sets(extractor, context.private, sets, context.device)


def membership(context: Context, images: Images) -> dict[str, float]:
    """Are released images nearer to the private images than to test images, which they never met?

    In pixels, of 0 to 255. An AUC of a half: no; but train and test sets may differ of themselves,
    so beside it stands the AUC of public images, which know nothing. (That is also why no epsilon
    is derived from it: images that were never in are not those that might have been.)
    """

    def distances(some: Images, made: Images) -> np.ndarray:
        rows = pixel_rows(thin_images(some), context.device), pixel_rows(made, context.device)
        return nearest_distances(*rows).cpu().numpy()

    near, far = distances(context.private, images), distances(context.test, images)
    blind = distances(context.private, context.public), distances(context.test, context.public)
    return {
        "nearest_released_to_private": float(np.median(near)),
        "nearest_released_to_test": float(np.median(far)),
        "nearest_released_to_private_at_1_percent": float(np.quantile(near, 0.01)),
        "nearest_released_to_test_at_1_percent": float(np.quantile(far, 0.01)),
        "membership_auc": roc(near, far).auc,
        "membership_auc_of_public": roc(*blind).auc,
    }


def draw_comparison(context: Context, images: Images) -> None:
    """Public before and released after, a class a column; and, privately, the nearest images."""
    classes = context.private.classes[:10]
    dealt = deal_classes(len(images), len(context.private.classes))
    rows = []
    for turn in range(min(4, len(images) // len(context.private.classes))):
        places = [int(torch.nonzero(dealt == label)[turn]) for label in range(len(classes))]
        for name, some in (("public", context.public), ("released", images)):
            rows.append((name, some.pixels[places].float() / 255))
    save_image_rows(context.run.path / "pictures.png", rows, classes)
    some = thin_images(context.private)
    made = pixel_rows(images, context.device)
    places = [int(torch.nonzero(dealt == label)[0]) for label in range(len(classes))]
    distances = torch.cdist(made[places].float(), pixel_rows(some, context.device).float())
    nearest = distances.argmin(dim=1).cpu()
    pairs = [
        ("released", images.pixels[places].float() / 255),
        ("nearest private", some.pixels[nearest].float() / 255),
    ]
    save_image_rows(context.run.private / "nearest.png", pairs, classes)
