"""What an attack is scored by, on made-up guesses."""

import pytest
import torch

from sfumato.data.images import Images
from sfumato.errors import ConfigError
from sfumato.metrics.reconstruction_trials import (
    Trials,
    pick_examples,
    reconstruction_scores,
    shuffle_partners,
    usual_errors,
)


def images(count, seed, classes=2):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (count, 1, 4, 4), generator=generator, dtype=torch.uint8)
    names = tuple("abcdef"[:classes])
    labels = torch.arange(count) % classes
    return Images(pixels=pixels, labels=labels, classes=names, name="noise", private=False)


def trials(heads=200, leak=1.0, per=50):
    """Heads of two images, and guesses that are a mixture of truth and noise."""
    targets = images(2 * per, seed=1)
    slots = torch.arange(heads) % per
    members = torch.stack([2 * slots, 2 * slots + 1], dim=1)
    truths = (targets.pixels.float() / 127.5 - 1)[members][:, :, None]
    generator = torch.Generator().manual_seed(2)
    noise = torch.rand(heads, 2, 1, 4, 4, generator=generator) * 2 - 1
    guesses = leak * truths[:, :, 0] + (1 - leak) * noise
    references = torch.rand(64, 2, 1, 4, 4, generator=generator) * 2 - 1
    usual = usual_errors(targets, references)
    return Trials(guesses, truths, members, shuffle_partners(heads, per), usual, 0.5), targets


@pytest.mark.parametrize(("count", "per"), [(10, 5), (12, 5), (7, 9), (2, 3)])
def test_partners_are_of_the_same_permutation(count, per):
    for head, other in enumerate(shuffle_partners(count, per).tolist()):
        assert other // per == head // per
        assert other != head


@pytest.mark.parametrize(("count", "per"), [(11, 5), (1, 3), (5, 1)])
def test_a_head_without_another_is_refused(count, per):
    with pytest.raises(ConfigError, match="--trials"):
        shuffle_partners(count, per)


def test_one_picture_of_any_image_is_held_against_all_and_against_one():
    truths = torch.rand(30, 1, 4, 1, 4, 4) * 2 - 1
    guesses = truths[:, :, 3]  # always the last image of a head
    made = Trials(
        guesses, truths, torch.arange(30)[:, None], shuffle_partners(30, 30), torch.ones(30, 2), 0.5
    )
    assert not made.errors(made.guesses).any()
    records = made.records()
    assert not records[3::4].any()
    assert (records[0::4] > 0.1).all()


def test_guesses_that_are_all_alike_have_no_power():
    made, targets = trials()
    flat = torch.zeros_like(made.guesses)
    usual = usual_errors(targets, torch.zeros(64, 2, 1, 4, 4))
    alike = Trials(flat, made.truths, made.images, made.partner, usual, 0.5)
    scores, _ = reconstruction_scores(alike, targets, images(60, seed=5), level=0.95)
    assert scores["auc"] == pytest.approx(0.5, abs=0.05)


def test_a_leak_is_seen_and_its_absence_too():
    for leak, low, high in ((1.0, 1.0, 1.0), (0.5, 0.9, 1.0), (0.0, 0.42, 0.58)):
        made, targets = trials(leak=leak)
        scores, curves = reconstruction_scores(made, targets, images(60, seed=5), level=0.95)
        assert low <= scores["auc"] <= high
        assert low <= scores["by_error"]["auc"] <= high
        assert scores["auc_interval"][0] <= scores["auc"] <= scores["auc_interval"][1]
        assert curves["error"].auc == scores["by_error"]["auc"]


def test_guesses_of_other_heads_prove_nothing():
    made, targets = trials(leak=0.8)
    mixed = made.guesses[torch.randperm(200, generator=torch.Generator().manual_seed(0))]
    swapped = Trials(mixed, made.truths, made.images, made.partner, made.usual, 0.5)
    scores, _ = reconstruction_scores(swapped, targets, images(60, seed=5), level=0.95)
    low, high = scores["auc_interval"]
    assert low < 0.55
    assert high > 0.45


def test_the_mean_of_a_class_has_no_power_at_all():
    made, targets = trials()
    scores, _ = reconstruction_scores(made, targets, images(60, seed=5), level=0.95)
    assert scores["baselines"]["class_mean"]["auc"] == pytest.approx(0.5, abs=1e-6)


def test_pictures_are_the_nearest_truth_and_its_guess():
    made, _ = trials(heads=20, leak=0.7)
    blocks = pick_examples(made)
    assert [name for name, _, _ in blocks] == ["best", "median", "worst"]
    gaps = [float((truth - guess).square().mean()) for _, truth, guess in blocks]
    assert gaps == sorted(gaps)
    assert all(truth.shape == guess.shape == (2, 1, 4, 4) for _, truth, guess in blocks)
