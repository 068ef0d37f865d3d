"""Judges look at images in one range, and what they say must fit together."""

import pytest
import torch
from scenes import NAMES, context

from sfumato.errors import ConfigError, DataError
from sfumato.metrics.inversion import inversion_scores
from sfumato.metrics.judges import Judged, JudgedSets, JudgeOutput, judge_images


def test_a_judge_looks_at_everything_in_pieces_and_learns_nothing():
    weight = torch.randn(12, NAMES, requires_grad=True)
    sizes = []

    def judge(pixels):
        sizes.append(len(pixels))
        return pixels.flatten(1) @ weight, pixels[:, :, ::2]

    pixels = JudgedSets(*(torch.rand(count, 1, 3, 4) for count in (7, 3, 4, 1)))
    judged = judge_images(judge, pixels, batch=3)
    assert sizes == [3, 3, 1, 3, 3, 1, 1]
    assert torch.allclose(judged.guesses.logits, (pixels.guesses.flatten(1) @ weight).detach())
    assert judged.members.features.shape == (3, 8)
    assert not judged.public.logits.requires_grad
    assert isinstance(judged, JudgedSets)
    rebuilt = Judged(judged.guesses, judged.members, judged.held_out, judged.public)
    assert list(vars(rebuilt)) == ["guesses", "members", "held_out", "public"]


@pytest.mark.parametrize("value", [-0.5, 1.5, torch.nan, 200])
def test_pixels_in_another_range_are_refused(value):
    fine = torch.rand(2, 1, 3, 3)
    bad = torch.full((2, 1, 3, 3), value, dtype=torch.uint8 if value == 200 else torch.float32)
    with pytest.raises(ConfigError, match="Divide bytes by 255"):
        judge_images(lambda pixels: (pixels.flatten(1), pixels), JudgedSets(bad, fine, fine, fine))


def test_images_of_classes_that_nobody_guessed_change_nothing():
    labels, judged = context(classes=6, each=(8, 12, 9, 7))
    keep = labels.each(lambda numbers: numbers < 5)
    fewer = labels.each(lambda numbers, rows: numbers[rows], keep)
    seen = judged.each(lambda seen, rows: JudgeOutput(seen.logits[rows], seen.features[rows]), keep)
    some = JudgedSets(fewer.guesses, labels.members, labels.held_out, labels.public)
    all_else = JudgedSets(seen.guesses, judged.members, judged.held_out, judged.public)
    assert inversion_scores(some, {"one": all_else}) == inversion_scores(fewer, {"one": seen})


@pytest.mark.parametrize("kind", ["members", "held_out", "public"])
def test_a_class_that_a_set_lacks_is_refused_with_the_remedy(kind):
    labels, judged = context()
    changed = {**vars(labels), kind: getattr(labels, kind).where(getattr(labels, kind) != 2, 3)}
    with pytest.raises(ConfigError, match=f"{kind} has no image of class 2.*give {kind} images"):
        inversion_scores(JudgedSets(**changed), {"one": judged})


def test_what_cannot_be_judged_is_refused():
    labels, judged = context()
    with pytest.raises(ConfigError, match="at least one judge"):
        inversion_scores(labels, {})
    short = JudgedSets(labels.guesses[1:], labels.members, labels.held_out, labels.public)
    with pytest.raises(ConfigError, match=r'"one" saw 40 images of guesses.* 39 labels'):
        inversion_scores(short, {"one": judged})
    for labelled in (labels.each(lambda n: n + 8), labels.each(lambda n: n - 1)):
        with pytest.raises(ConfigError, match="knows 10 names"):
            inversion_scores(labelled, {"one": judged})
    nobody = judged.each(lambda seen: JudgeOutput(seen.logits[:0], seen.features[:0]))
    with pytest.raises(ConfigError, match="no guesses"):
        inversion_scores(labels.each(lambda n: n[:0]), {"one": nobody})
    for part in ("logits", "features"):
        broken = judged.each(lambda seen: JudgeOutput(seen.logits.clone(), seen.features.clone()))
        getattr(broken.public, part)[3, 2] = torch.nan
        with pytest.raises(DataError, match="NaN or infinity of public"):
            inversion_scores(labels, {"one": broken})
    for bad in ({"level": 1.0}, {"resamples": 0}):
        with pytest.raises(ConfigError, match="usual"):
            inversion_scores(labels, {"one": judged}, **bad)
