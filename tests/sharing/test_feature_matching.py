"""Moving public images: against the loss written out, by what it reaches, and cut in the middle."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from teachers import PUBLIC, faces, gauge_of, inputs_of, sums_with, teacher, vectors_of

from sfumato.errors import PrivacyError
from sfumato.privacy.moments import weighted_means
from sfumato.runs import Run
from sfumato.sharing import feature_matching as module
from sfumato.sharing.feature_matching import (
    Matching,
    MatchingTarget,
    arrange_batches,
    deal_classes,
    match_features,
    move_batch,
    shift_and_mirror,
)

TARGETS = deal_classes(50, 3)


def goal_of(model, slack=3.0, groups=None):
    """What a teacher saw in private images, brighter than the public ones; without noise."""
    gauge, images = gauge_of(model, slack), replace(faces(), pixels=255 - faces().pixels)
    count = 1 if groups is None else 3
    table = sums_with(model, gauge, groups=groups, num_groups=count)(images)
    return MatchingTarget(gauge, weighted_means(table / 24, gauge.weight, least=1 / 24).float())


def moved(path, model, goal, matching, inputs=PUBLIC, targets=TARGETS, **options):
    path.mkdir(exist_ok=True)
    return match_features(model, inputs, targets, goal, matching, Run(path), **options)


def normalised(pixels):
    return pixels.float() / 255 * 2 - 1


def test_no_step_leaves_the_very_pixels(tmp_path):
    found = moved(tmp_path, teacher(), goal_of(teacher()), Matching(k=0))
    assert torch.equal(found, PUBLIC.images.pixels)
    found[0] += 1
    assert not torch.equal(found, PUBLIC.images.pixels), "they are a copy"


@pytest.mark.parametrize("k", [0, 1])
def test_private_images_are_never_moved(tmp_path, k):
    with pytest.raises(PrivacyError, match='would read "faces", which is private'):
        moved(tmp_path, teacher(), None, Matching(k=k), inputs_of(faces(50)))


def test_one_step_is_a_sign_step_of_the_learning_rate(tmp_path):
    pixels = moved(tmp_path, teacher(), goal_of(teacher()), Matching(k=1, match_lr=0.1))
    change = (normalised(pixels) - normalised(PUBLIC.images.pixels)).abs()
    rounding = 1 / 255
    assert float(change.max()) <= 0.1 + rounding
    inside = (PUBLIC.images.pixels > 15) & (PUBLIC.images.pixels < 240)
    assert float((change[inside] > 0.1 - rounding).float().mean()) > 0.95


def test_k_steps_move_pixels_by_about_k_learning_rates_at_most(tmp_path):
    pixels = moved(tmp_path, teacher(), goal_of(teacher()), Matching(k=4, match_lr=0.05))
    change = (normalised(pixels) - normalised(PUBLIC.images.pixels)).abs()
    assert 0.1 < float(change.max()) <= 1.1 * 4 * 0.05


def test_images_are_pixels_in_every_step(tmp_path):
    model, seen = teacher(), []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach().abs().max()))
    goal = goal_of(model)
    seen.clear()
    moved(tmp_path, model, goal, Matching(k=5, match_lr=0.5))
    assert len(seen) == 5
    assert max(seen) <= 1


def by_hand(model, x, y, goal, matching):
    """The loss as the paper has it, of activations that are taken out by hand."""
    first = model[1](x)
    second = model[4](model[3](model[2](first)))
    loss = matching.class_weight * F.cross_entropy(model[5:](second), y)
    wanted = goal.gauge.statistics(goal.means[0])
    for layer, entered in enumerate((first, second)):
        a, b = goal.gauge.units[2 * layer : 2 * layer + 2]
        mean, variance = entered.mean(dim=(0, 2, 3)), entered.var(dim=(0, 2, 3), correction=0)
        gap = (mean / a - wanted[2 * layer]).norm() + (variance / b - wanted[2 * layer + 1]).norm()
        loss = loss + matching.statistics_weight * gap
    return loss


def test_a_step_goes_down_the_loss_written_out_by_hand():
    # Weights are such that each part of the loss turns the sign of many pixels.
    model, places = teacher(), torch.arange(2, 32)
    goal = goal_of(model, slack=1e3)
    matching = Matching(k=1, match_batch=30, statistics_weight=0.1, tv_weight=0.5, l2_weight=0.02)
    x = normalised(PUBLIC.images.pixels[places]).requires_grad_()
    seen = shift_and_mirror(x, torch.Generator().manual_seed(5))
    loss = by_hand(model, seen, TARGETS[places], goal, matching)
    rough = sum(
        (x[:, :, top:, left:] - x[:, :, : 12 - top, : 12 - left]).abs().mean()
        for top, left in ((1, 0), (0, 1), (1, 1))
    )
    rough = rough + (x[:, :, 1:, :-1] - x[:, :, :-1, 1:]).abs().mean()
    (loss + 0.5 * rough + 0.02 * x.square().sum().sqrt()).backward()
    expected = (x.detach() - 0.1 * x.grad.sign()).clamp(-1, 1)
    generator = torch.Generator().manual_seed(5)
    found = move_batch(model, PUBLIC, places, TARGETS, goal, 0, matching, generator)
    same = (normalised(found) - expected).abs() < 0.01
    assert float(same.float().mean()) > 0.99


def distance(model, pixels, goal, group=0, where=slice(None)):
    vectors = vectors_of(model, replace(PUBLIC.images, pixels=pixels), goal.gauge)
    return float(goal.distance(vectors[where].float(), group))


def test_the_statistics_come_closer_and_the_teacher_agrees_more(tmp_path):
    model, before = teacher(), PUBLIC.images.pixels
    goal = goal_of(model)
    after = moved(tmp_path, model, goal, Matching(k=15, match_batch=50))
    assert distance(model, after, goal) < 0.3 * distance(model, before, goal)
    loss = [float(F.cross_entropy(model(normalised(p)), TARGETS)) for p in (before, after)]
    agreed = [
        float((model(normalised(pixels)).argmax(dim=1) == TARGETS).float().mean())
        for pixels in (before, after)
    ]
    assert loss[1] < 0.9 * loss[0]
    assert agreed[1] > agreed[0] + 0.2


def test_the_distance_is_none_where_the_batch_is_the_goal():
    model, gauge = teacher(), gauge_of(teacher())
    vectors = vectors_of(model, faces(), gauge).float()
    goal = MatchingTarget(gauge, gauge.mean(vectors)[None])
    assert float(goal.distance(vectors, 0)) == pytest.approx(0.0, abs=1e-5)
    assert float(goal.distance(vectors[:12], 0)) > 0.01
    two = MatchingTarget(gauge, torch.stack([gauge.mean(vectors), gauge.mean(vectors[:12])]))
    assert float(two.distance(vectors[:12], 1)) == pytest.approx(0.0, abs=1e-5)
    assert float(two.distance(vectors, 1)) > 0.01


def test_a_goal_for_each_class_is_met_by_images_of_that_class(tmp_path, monkeypatch):
    model, calls = teacher(), []
    goal = goal_of(model, groups=faces().labels)

    def spy(model, inputs, places, targets, goal, group, matching, generator):
        calls.append((places.tolist(), group))
        return move_batch(model, inputs, places, targets, goal, group, matching, generator)

    monkeypatch.setattr(module, "move_batch", spy)
    pixels = moved(tmp_path, model, goal, Matching(k=10, match_batch=9))
    assert sorted(place for places, _ in calls for place in places) == list(range(50))
    for places, group in calls:
        assert {int(TARGETS[place]) for place in places} == {group}
    for group in range(3):
        own = torch.arange(50) % 3 == group
        before = distance(model, PUBLIC.images.pixels, goal, group, own)
        assert distance(model, pixels, goal, group, own) < 0.7 * before


@given(st.integers(1, 200), st.integers(1, 50), st.integers(1, 7), st.booleans())
def test_every_place_is_in_one_batch_of_about_the_size_asked_for(count, batch, classes, by_class):
    targets = deal_classes(count, classes)
    parts = arrange_batches(targets, batch, by_class=by_class, seed=3)
    assert torch.cat(parts).sort().values.tolist() == list(range(count))
    assert all(0 < len(part) <= 1.5 * batch + 1 for part in parts)
    if by_class:
        assert all(len(targets[part].unique()) == 1 for part in parts)


def test_classes_are_dealt_in_turn():
    assert deal_classes(7, 3).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_a_run_cut_in_the_middle_ends_with_the_same_pixels(tmp_path, monkeypatch):
    model, matching = teacher(), Matching(k=2, match_batch=2)
    goal = goal_of(model)
    whole = moved(tmp_path / "whole", model, goal, matching)

    def power_cut(message):
        raise KeyboardInterrupt(message)

    with pytest.raises(KeyboardInterrupt, match="moved 40 of 50 images"):
        moved(tmp_path / "cut", model, goal, matching, say=power_cut)
    left = []
    monkeypatch.setattr(
        module, "move_batch", lambda *given: left.append(given[2]) or move_batch(*given)
    )
    again = moved(tmp_path / "cut", model, goal, matching)
    assert torch.equal(again, whole)
    assert len(left) == 5, "what was moved before the cut is not moved again"


def test_goal_teacher_and_public_images_are_all_that_counts(tmp_path):
    model, goal = teacher(), goal_of(teacher())
    torch.manual_seed(1)
    one = moved(tmp_path / "one", model, goal, Matching(k=3))
    torch.manual_seed(2)
    other = moved(tmp_path / "other", model, goal, Matching(k=3))
    assert torch.equal(one, other)
    without = moved(tmp_path / "without", model, None, Matching(k=3))
    assert not torch.equal(one, without)


def test_images_are_moved_in_half_precision_too(tmp_path):
    model = teacher()
    goal = goal_of(model)
    inputs = inputs_of(PUBLIC.images, precision=torch.bfloat16)
    pixels = moved(tmp_path, model, goal, Matching(k=15, match_batch=50), inputs)
    assert distance(model, pixels, goal) < 0.4 * distance(model, PUBLIC.images.pixels, goal)


def test_a_view_is_the_whole_batch_shifted_by_up_to_an_eighth_and_maybe_mirrored():
    x = torch.arange(2 * 16 * 16.0).reshape(2, 1, 16, 16)
    allowed = {
        (down, right, flip): torch.roll(x, (down, right), (2, 3)).flip([3] if flip else [])
        for down in range(-2, 3)
        for right in range(-2, 3)
        for flip in (False, True)
    }
    generator, seen = torch.Generator().manual_seed(0), set()
    for _ in range(600):
        view = shift_and_mirror(x, generator)
        seen |= {name for name, one in allowed.items() if torch.equal(one, view)}
    assert seen == set(allowed)


def test_roughness_is_the_mean_step_between_neighbours():
    assert float(module.roughness(torch.full((1, 1, 5, 5), 3.0))) == 0
    slope = torch.arange(5.0).expand(1, 1, 5, 5)
    assert float(module.roughness(slope)) == pytest.approx(0 + 1 + 1 + 1)
