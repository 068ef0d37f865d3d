"""The judge's part of an inversion attack, against slow loops, laws, and made-up judges."""

import json

import numpy as np
import pytest
import torch
from scenes import NAMES, answers, context

from sfumato.metrics.class_intervals import over_classes
from sfumato.metrics.inversion import inversion_scores, member_gaps
from sfumato.metrics.judges import JudgedSets, JudgeOutput


def scored(labels, judged, **settings):
    """By one judge."""
    return inversion_scores(labels, {"one": judged}, **settings)


def with_guesses(labels, judged, kind):
    """The same, but another set is handed in as guesses."""
    return tuple(
        JudgedSets(getattr(both, kind), both.members, both.held_out, both.public)
        for both in (labels, judged)
    )


def slow_nearest(row, others):
    return min(sum((a - b) ** 2 for a, b in zip(row, other, strict=True)) for other in others)


def slow_rows(table, labels, label):
    rows = zip(table.double().tolist(), labels.tolist(), strict=True)
    return [row for row, found in rows if found == label]


@pytest.mark.parametrize("k", [1, 5])
def test_a_guess_counts_if_its_class_is_among_the_first_names(k):
    labels, judged = context(sure=1.0)
    found = scored(labels, judged)["judges"]["one"]
    for prefix, kind in (
        ("", "guesses"), ("floor_", "public"), ("held_out_", "held_out"), ("members_", "members"),
    ):  # fmt: skip
        logits, numbers = getattr(judged, kind).logits.tolist(), getattr(labels, kind).tolist()
        rates = []
        for label in range(5):
            hits = [
                label in sorted(range(NAMES), key=lambda name: -row[name])[:k]
                for row, number in zip(logits, numbers, strict=True)
                if number == label
            ]
            rates.append(sum(hits) / len(hits))
        estimate = found[f"{prefix}top{k}"]
        assert estimate["mean"] == pytest.approx(sum(rates) / 5)
        assert (estimate["lowest"], estimate["highest"]) == (min(rates), max(rates))
        assert [row[f"{prefix}top{k}"] for row in found["by_class"]] == pytest.approx(rates)
        assert 0 < estimate["mean"] < 1


def test_distances_are_those_of_slow_loops():
    labels, judged = context()
    found = scored(labels, judged)["judges"]["one"]
    for prefix, kind in (("", "guesses"), ("held_out_", "held_out")):
        for label in range(5):
            rows = slow_rows(getattr(judged, kind).features, getattr(labels, kind), label)
            members = slow_rows(judged.members.features, labels.members, label)
            centre = [sum(column) / len(members) for column in zip(*members, strict=True)]
            table = found["by_class"][label]
            nearest = np.mean([slow_nearest(row, members) for row in rows])
            assert table[f"{prefix}knn"] == pytest.approx(nearest)
            middle = np.mean([slow_nearest(row, [centre]) for row in rows])
            assert table[f"{prefix}centroid"] == pytest.approx(middle)
        column = [row[f"{prefix}knn"] for row in found["by_class"]]
        assert found[f"{prefix}knn"]["mean"] == pytest.approx(np.mean(column))


def test_the_gap_is_that_of_slow_loops_where_nothing_is_cut():
    labels, judged = context(each=(4, 6, 6, 3))
    gaps = member_gaps(judged.each(lambda seen: seen.features), labels)
    for gap, row, label in zip(
        gaps.tolist(), judged.guesses.features.double().tolist(), labels.guesses, strict=True
    ):
        members, others = (
            slow_rows(seen.features, numbers, label)
            for seen, numbers in (
                (judged.members, labels.members), (judged.held_out, labels.held_out)
            )
        )  # fmt: skip
        assert gap == pytest.approx(slow_nearest(row, others) - slow_nearest(row, members))


def test_more_members_alone_make_no_gap():
    """Uncut, the nearest of forty members is much closer than the nearest of four others."""
    labels, judged = context(classes=10, each=(40, 40, 4, 1))
    features = judged.each(lambda seen: seen.features)
    cut = [float(member_gaps(features, labels, seed=seed).mean()) for seed in range(10)]
    uncut = np.mean([
        slow_nearest(row, slow_rows(features.held_out, labels.held_out, label))
        - slow_nearest(row, slow_rows(features.members, labels.members, label))
        for row, label in zip(features.guesses.tolist(), labels.guesses.tolist(), strict=True)
    ])  # fmt: skip
    assert abs(np.mean(cut)) < 0.1 * uncut
    assert len(set(cut)) == 10, "which members are left should depend on the seed"


def test_the_interval_of_the_gap_draws_classes_and_then_guesses():
    labels, judged = context()
    gaps = member_gaps(judged.each(lambda seen: seen.features), labels, seed=3).numpy()
    found = scored(labels, judged, seed=3)["judges"]["one"]["member_gap"]
    assert found == over_classes(gaps, labels.guesses.numpy(), seed=3, inner=True)


def test_guesses_that_are_members_have_a_gap_and_score_as_the_judge_does():
    labels, judged = with_guesses(*context(classes=8, each=(8, 12, 12, 7)), "members")
    found = scored(labels, judged)["judges"]["one"]
    assert found["member_gap"]["mean"] > 0
    assert found["member_gap"]["interval"][0] > 0
    assert found["knn"]["mean"] == 0
    assert (found["top1"], found["top5"]) == (found["members_top1"], found["members_top5"])
    assert (found["precision"]["mean"], found["recall"]["mean"]) == (1, 1)


def test_guesses_that_are_held_out_have_the_opposite_gap_and_score_as_held_out_images():
    labels, judged = with_guesses(*context(classes=8, each=(8, 12, 12, 7)), "held_out")
    found = scored(labels, judged)["judges"]["one"]
    assert found["member_gap"]["interval"][1] < 0
    assert found["top1"] == found["held_out_top1"]
    for name in ("knn", "centroid"):
        assert found[name] == found[f"held_out_{name}"]


def test_guesses_that_know_only_the_class_have_a_gap_around_nought():
    inside = 0
    for seed in range(20):
        labels, judged = context(classes=10, each=(20, 15, 15, 1), seed=seed)
        low, high = scored(labels, judged)["judges"]["one"]["member_gap"]["interval"]
        inside += low <= 0 <= high
    assert inside >= 17, "an interval of 95 % should hold the truth almost always"


def test_a_judge_that_answers_at_random_scores_as_chance():
    labels, judged = context(classes=10, each=(60, 5, 30, 60), sure=0.0)
    found = inversion_scores(labels, {"coin": judged})["judges"]["coin"]
    for name in ("top1", "floor_top1", "held_out_top1"):
        low, high = found[name]["interval"]
        assert low <= 1 / NAMES <= high
    assert found["top5"]["interval"][0] <= 5 / NAMES <= found["top5"]["interval"][1]
    low, high = found["above_floor"]["interval"]
    assert low <= 0 <= high


def test_a_judge_whose_names_are_permuted_scores_nothing():
    labels, judged = context(sure=50.0)
    wrong = judged.each(lambda seen: JudgeOutput(seen.logits.roll(1, dims=1), seen.features))
    found = inversion_scores(labels, {"right": judged, "wrong": wrong})
    assert found["judges"]["right"]["top1"]["mean"] == 1
    assert found["judges"]["wrong"]["top1"]["mean"] == 0
    assert found["majority"]["top1"]["mean"] == found["all"]["top1"]["mean"] == 0


def test_a_judge_that_says_the_same_of_all_names_has_named_none():
    labels, judged = context()
    dumb = judged.each(lambda seen: JudgeOutput(torch.zeros_like(seen.logits), seen.features))
    found = inversion_scores(labels, {"dumb": dumb})["judges"]["dumb"]
    assert found["top1"]["mean"] == found["top5"]["mean"] == 0


def test_votes_are_those_of_a_slow_count():
    labels, first = context(sure=1.0)
    others = {
        f"judge {seed}": first.each(
            lambda seen, numbers, seed=seed: JudgeOutput(
                answers(numbers, seed, 1.0), seen.features
            ),
            labels,
        )
        for seed in (50, 60)
    }
    judges = {"first": first, **others}
    found = inversion_scores(labels, judges)
    for kind, prefix in (("guesses", ""), ("public", "floor_")):
        numbers = getattr(labels, kind)
        said = [getattr(judged, kind).logits.argmax(1).tolist() for judged in judges.values()]
        for name, needed in (("majority", 2), ("all", 3)):
            agreed = [
                sum(one == label for one in three) >= needed
                for label, *three in zip(numbers.tolist(), *said, strict=True)
            ]
            # All classes have as many images, so this mean is that of classes too.
            assert found[name][f"{prefix}top1"]["mean"] == pytest.approx(np.mean(agreed))
    assert found["all"]["top1"]["mean"] < found["majority"]["top1"]["mean"]


def test_the_same_seed_gives_the_same_scores_and_they_are_json():
    labels, judged = context(each=(8, 12, 9, 7))
    found = scored(labels, judged)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert scored(labels, judged) == found
    assert scored(labels, judged, seed=1) != found


def test_few_classes_are_warned_of_and_many_are_not():
    assert "5 classes" in scored(*context(classes=5))["warning"]
    labels, judged = context(classes=10)
    more = judged.each(
        lambda seen: JudgeOutput(torch.cat([seen.logits, seen.logits - 9], 1), seen.features)
    )
    assert inversion_scores(labels, {"one": more})["warning"] == ""
    assert '"one" knows no other names' in scored(labels, judged)["warning"]


def test_all_classes_named_is_an_interval_that_still_has_a_width():
    labels, judged = context(sure=50.0)
    found = scored(labels, judged)["majority"]
    assert found["top1"]["interval"] == [1, 1]
    assert found["recovered"]["mean"] == 1
    assert found["recovered"]["interval"][0] == pytest.approx(0.025 ** (1 / 5))


def test_one_class_has_rates_and_no_interval():
    found = scored(*context(classes=1))
    assert found["classes"] == 1
    assert "one class" in found["warning"]
    assert found["majority"]["top1"]["interval"] is None
    assert found["judges"]["one"]["member_gap"]["interval"] is None


def test_one_guess_a_class_is_scored_and_says_why_it_has_no_precision():
    found = scored(*context(each=(1, 1, 1, 1)))["judges"]["one"]
    assert "precision" not in found
    assert set(found["left_out"]) == set("01234")
    assert "Give more images" in found["left_out"]["0"]
    assert found["top1"]["mean"] in {i / 5 for i in range(6)}


def test_a_class_with_too_few_images_is_left_out_of_precision_alone():
    labels, judged = context()
    keep = (labels.guesses != 3) | (torch.cumsum(labels.guesses == 3, 0) <= 2)
    guesses = JudgeOutput(judged.guesses.logits[keep], judged.guesses.features[keep])
    labels = JudgedSets(labels.guesses[keep], labels.members, labels.held_out, labels.public)
    judged = JudgedSets(guesses, judged.members, judged.held_out, judged.public)
    found = scored(labels, judged)["judges"]["one"]
    assert list(found["left_out"]) == ["3"]
    rows = found["by_class"]
    assert rows[3]["precision"] is None
    assert rows[3]["top1"] is not None
    rest = [row["precision"] for row in rows if row["class"] != 3]
    assert found["precision"]["mean"] == pytest.approx(np.mean(rest))


def test_five_names_have_no_top_five():
    labels, judged = context(classes=3)
    few = judged.each(lambda seen: JudgeOutput(seen.logits[:, :5], seen.features))
    assert "top5" not in inversion_scores(labels, {"one": few})["majority"]
