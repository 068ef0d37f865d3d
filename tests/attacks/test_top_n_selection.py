"""Top-n selection against a heap for each class."""

import heapq

import pytest
import torch
from toy_target import access_by_table, access_to_toy, numbered_images, some_images

from sfumato.attacks.inversion_loss import margin_scale
from sfumato.attacks.top_n_selection import Selection, select_top_n
from sfumato.errors import ConfigError, DataError, PrivacyError


def table(n=40, classes=4, sure=3.0):
    return sure * torch.randn(n, classes, generator=torch.Generator().manual_seed(0))


def slow_select(logits, n):
    """The places of the n largest confidences of each class, best first."""
    confidence = logits.double().softmax(dim=1).T.tolist()
    return [heapq.nlargest(n, range(len(column)), key=column.__getitem__) for column in confidence]


@pytest.mark.parametrize("n", [1, 7, 40])
@pytest.mark.parametrize("sure", [0.1, 3.0, 12.0])
def test_each_class_gets_what_a_heap_would_keep(n, sure):
    logits = table(sure=sure)
    found = select_top_n(access_by_table(logits), numbered_images(40), n)
    assert found.places.tolist() == slow_select(logits, n)
    sureness = logits.softmax(dim=1).T.gather(1, found.places)
    torch.testing.assert_close(found.confidence, sureness, check_dtype=False)
    assert found.scale == pytest.approx(margin_scale(logits))


def test_a_class_that_is_never_the_first_answer_gets_n_images_too():
    logits = table()
    logits[:, 2] -= 100
    found = select_top_n(access_by_table(logits), numbered_images(40), 10)
    assert found.places.shape == (4, 10)
    assert found.places.tolist() == slow_select(logits, 10)


def test_a_very_sure_target_still_ranks():
    """In float32 a lead of 17 is a confidence of 1, and all of these would be one tie."""
    logits = torch.zeros(30, 3)
    logits[:, 0] = torch.linspace(18, 32, 30)[torch.randperm(30)]
    found = select_top_n(access_by_table(logits), numbered_images(30), 5)
    assert found.places[0].tolist() == slow_select(logits, 5)[0]


def test_ties_are_broken_somehow_and_nobody_is_taken_twice():
    logits = table(20, 3).repeat(2, 1)
    found = select_top_n(access_by_table(logits), numbered_images(40), 7)
    slow = torch.tensor(slow_select(logits, 7))
    sureness = logits.softmax(dim=1).T
    torch.testing.assert_close(found.confidence, sureness.gather(1, slow), check_dtype=False)
    assert all(len(row.unique()) == 7 for row in found.places)
    flat = select_top_n(access_by_table(torch.zeros(9, 3)), numbered_images(9), 4)
    assert all(len(row.unique()) == 4 for row in flat.places)


def test_labels_follow_places_class_by_class():
    found = select_top_n(access_by_table(table()), numbered_images(40), 3)
    assert found.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_every_image_is_asked_about_once():
    access = access_to_toy()
    select_top_n(access, some_images(30), 5)
    assert access.asked == 30


def test_more_images_than_there_are_cannot_be_had():
    with pytest.raises(DataError, match=r'"numbers" has 40 images, and 41 are wanted.*--n'):
        select_top_n(access_by_table(table()), numbered_images(40), 41)


def test_private_images_are_not_chosen_from():
    access = access_by_table(table())
    with pytest.raises(PrivacyError, match="numbers"):
        select_top_n(access, numbered_images(40, private=True), 3)
    assert access.asked == 0


def test_public_images_of_another_size_are_refused():
    access = access_to_toy()
    access.shape = (3, 8, 8)
    with pytest.raises(ConfigError, match="takes images"):
        select_top_n(access, some_images(), 2)


def test_words_say_how_sure_and_how_shared():
    places = torch.tensor([[0, 1], [1, 2]])
    words = Selection(places, torch.tensor([[0.9, 0.5], [0.4, 0.2]]), 2.5).words()
    assert words == pytest.approx(
        {
            "least_confidence": 0.2,
            "mean_confidence": 0.5,
            "worst_class_mean": 0.3,
            "shared_between_classes": 0.25,
            "margin_scale": 2.5,
        }
    )
