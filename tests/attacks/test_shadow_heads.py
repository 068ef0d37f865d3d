import subprocess
import sys

import numpy as np
import pytest
import torch

from sfumato.attacks.batched_heads import train_primal
from sfumato.attacks.head_randomness import BLOCK, draw_chance
from sfumato.attacks.heads import HeadRecipe, accuracy_of_heads, labels_of
from sfumato.attacks.shadow_heads import ShadowHeads, train_heads
from sfumato.errors import ConfigError, DataError

PRIVATE = {"noise_multiplier": 1.0, "max_norm": 2.0, "rate": 0.5}
RECIPES = [
    HeadRecipe(epochs=5),
    HeadRecipe(epochs=5, class_size=2, **PRIVATE),
    HeadRecipe(epochs=5, hidden=3, positive=(0, 1), **PRIVATE),
    HeadRecipe(epochs=5, optimizer="adam"),
]


def table(rows=200, d=9, dtype=torch.float32):
    """Clusters, one a class, and classes in no order."""
    generator = torch.Generator().manual_seed(7)
    labels = torch.randint(0, 10, (rows,), generator=generator)
    labels[:50] = torch.arange(50) % 10
    centres = 3 * torch.randn(10, d, generator=generator)
    features = centres[labels] + torch.randn(rows, d, generator=generator)
    return features.to(dtype), labels


def shadow_heads(recipe=RECIPES[0], seed=1, **changes):
    features, labels = table(**changes)
    return ShadowHeads(features, labels, recipe, seed)


@pytest.mark.parametrize("recipe", RECIPES)
def test_any_batch_can_be_replayed_bit_for_bit(recipe):
    once = shadow_heads(recipe).batch(1, 300)
    assert torch.equal(shadow_heads(recipe).batch(1, 300).weights, once.weights)
    assert not torch.equal(shadow_heads(recipe, seed=2).batch(1, 300).weights, once.weights)
    assert not torch.equal(shadow_heads(recipe, seed=2).batch(1, 300).members, once.members)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_head_is_the_same_in_every_batch_and_with_any_memory(recipe):
    ours = shadow_heads(recipe)
    whole = ours.heads(0, 3 * BLOCK + 10)
    assert torch.equal(ours.heads(0, 3 * BLOCK + 10, room=1).weights, whole.weights)
    for first, count in ((0, 1), (100, 200), (BLOCK - 1, BLOCK + 2), (BLOCK, BLOCK), (700, 78)):
        part = ours.heads(first, count)
        assert torch.equal(part.weights, whole.weights[first : first + count])
        assert torch.equal(part.members, whole.members[first : first + count])
    assert len(ours.heads(5, 0)) == 0


def test_the_heads_of_a_batch_belong_to_their_members():
    ours = shadow_heads(HeadRecipe(epochs=5, class_size=2, rate=0.5), dtype=torch.float64)
    made = ours.heads(BLOCK, BLOCK)
    chance = draw_chance(ours.recipe, 9, ours.seed, range(1, 2), ours.features)
    again = train_primal(ours.recipe, ours.features[made.members], labels_of(ours.recipe), chance)
    torch.testing.assert_close(made.weights, again, rtol=0, atol=1e-12)
    labels = ours.labels[made.members]
    assert torch.equal(labels, labels_of(ours.recipe).expand_as(labels))


def test_heads_of_one_permutation_share_no_image_and_the_next_one_combines_anew():
    ours = shadow_heads(HeadRecipe(class_size=2))
    per = ours.per_permutation
    assert per == int(torch.bincount(ours.labels).min()) // 2
    for turn in range(3):
        rows = ours.members(turn * per, per).flatten()
        assert len(rows.unique()) == len(rows)
    first, second = (ours.members(turn * per, per).sort(1)[0].tolist() for turn in (0, 1))
    assert not {tuple(row) for row in first} & {tuple(row) for row in second}
    torch.testing.assert_close(ours.members(3, 2 * per)[per:], ours.members(3 + per, per))


def test_every_image_is_used_equally_often():
    ours = shadow_heads(HeadRecipe())
    turns = 400
    counts = torch.bincount(ours.members(0, turns * ours.per_permutation).flatten(), minlength=200)
    for label, size in enumerate(torch.bincount(ours.labels).tolist()):
        share = turns * ours.per_permutation / size
        spread = (counts[ours.labels == label] - share).abs().max()
        # In each permutation an image is in or out: at most 5 deviations of a fair coin.
        assert spread <= 2.5 * turns**0.5


def test_heads_start_at_different_weights_of_the_right_deviation():
    recipe = HeadRecipe(init_std=0.3)
    start = draw_chance(recipe, 50, 0, range(4)).start
    assert float(start[:, :500].std()) == pytest.approx(0.3, rel=0.01)
    assert (start[:, 500:] == 0).all()
    assert len(start.unique(dim=0)) == len(start)


def test_each_image_is_present_with_the_chance_of_the_rate():
    recipe = HeadRecipe(rate=0.25)
    masks = draw_chance(recipe, 2, 0, range(4)).masks
    assert masks is not None
    assert masks.shape == (4 * BLOCK, 128, 10)
    allowed = 5 * (0.25 * 0.75 / masks.numel()) ** 0.5
    assert float(masks.double().mean()) == pytest.approx(0.25, abs=allowed)
    each = masks.double().mean((0, 1)).numpy()
    assert np.abs(each - 0.25).max() < 5 * (0.25 * 0.75 / (masks.numel() / 10)) ** 0.5


def test_trained_heads_know_their_classes_and_noise_makes_them_worse():
    def accuracy(**settings):
        ours = shadow_heads(HeadRecipe(class_size=2, **settings))
        heads = ours.heads(0, 64)
        return float(accuracy_of_heads(heads.weights, ours.recipe, *table()).mean())

    assert accuracy() > 0.9
    assert accuracy(noise_multiplier=100.0, max_norm=1.0) < 0.5


MEASURE = """
import torch
from sfumato.attacks.shadow_heads import ShadowHeads
from sfumato.attacks.heads import HeadRecipe
torch.set_num_threads(1)
private = {"rate": 0.5, "noise_multiplier": 1.0, "max_norm": 1.0}
def peak(recipe, room):
    ShadowHeads(torch.randn(400, 256), torch.arange(400) % 10, recipe, 0).heads(0, 2048, room)
    # Not getrusage: its peak is inherited from the process that started this one.
    lines = dict(line.split(":") for line in open("/proc/self/status"))
    return 1024 * int(lines["VmHWM"].split()[0])
peaks = [peak(HeadRecipe(epochs=1, **private), 1)]
peaks += [peak(HeadRecipe(class_size=4, epochs=25, **private), 2**28)]
peaks += [peak(HeadRecipe(class_size=4, hidden=8, epochs=1, positive=(0,), **private), 2**28)]
print(peaks[1] - peaks[0], peaks[2] - peaks[0])
"""


@pytest.mark.full
def test_training_takes_about_the_memory_it_is_given():
    said = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True)
    dual, primal = (int(word) / 2**28 for word in said.stdout.split())
    assert 0.2 < dual < 1.1
    assert 0.2 < primal < 1.1


def test_shadow_heads_of_one_source_are_of_one_kind_and_others_are_not():
    (features, labels), recipe = table(), RECIPES[0]
    kinds = [
        ShadowHeads(features, labels, recipe, 0).kind,
        ShadowHeads(features + 1, labels, recipe, 0).kind,
        ShadowHeads(features, labels.flip(0), recipe, 0).kind,
        ShadowHeads(features, labels, HeadRecipe(epochs=6), 0).kind,
        ShadowHeads(features, labels, recipe, 0, source="vgg").kind,
        ShadowHeads(features, labels, HeadRecipe(epochs=6), 0, source="vgg").kind,
    ]
    assert len(set(kinds)) == len(kinds)
    assert ShadowHeads(features, labels, recipe, 5).kind == kinds[0]
    assert ShadowHeads(features[:100], labels[:100], recipe, 5, source="vgg").kind == kinds[4]


def test_bad_tables_are_refused_by_what_is_wrong_with_them():
    features, labels = table()
    broken = features.clone()
    broken[17, 2] = float("nan")
    cases = [
        ((features[:-1], labels), "199 images and 200 labels"),
        ((features.half(), labels), "float16"),
        ((broken, labels), "image 17"),
        ((features, labels + 1), "label 10"),
        ((features[labels != 4], labels[labels != 4]), "class 4 has 0 images"),
    ]
    for arguments, message in cases:
        with pytest.raises(DataError, match=message):
            ShadowHeads(*arguments, RECIPES[0], 0)
    with pytest.raises(ConfigError, match="count from 0"):
        shadow_heads().heads(-1, 2)
    recipe = HeadRecipe(class_size=2)
    chance = draw_chance(recipe, 4, 0, range(1))
    with pytest.raises(DataError, match=r"20 images.*given 10"):
        train_heads(recipe, torch.zeros(BLOCK, 10, 4), labels_of(recipe)[:10], chance)
