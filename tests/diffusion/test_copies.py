"""Copies: planted ones are found, fresh images are not, however the work is cut."""

from dataclasses import replace

import pytest
import torch

from sfumato.data.images import Images
from sfumato.diffusion.copies import copy_rates, find_copies
from sfumato.errors import DataError, PrivacyError


def noise(n, seed=0, shape=(3, 6, 6)):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, *shape), generator=generator, dtype=torch.uint8)


def near(pixels, size, seed=5):
    """The same images with a little noise."""
    change = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(seed)) * size
    return (pixels.float() + change).round().clamp(0, 255).to(torch.uint8)


def images(pixels, name="public", private=False):
    labels = torch.zeros(len(pixels), dtype=torch.int64)
    return Images(pixels=pixels, labels=labels, classes=("a",), name=name, private=private)


def slowly(made, trained_on):
    """Ratios written out, one pair at a time."""
    ratios, nearest = [], []
    for image in made.double():
        gaps = torch.stack([(image - other).norm() for other in trained_on.double()])
        first, second = gaps.sort().values[:2]
        ratios.append(first / second)
        nearest.append(int(gaps.argmin()))
    return torch.stack(ratios).float(), nearest


def test_planted_copies_are_found_and_fresh_images_are_not():
    trained_on = noise(200)
    planted = torch.tensor([3, 77, 150])
    made = torch.cat([noise(20, 1), trained_on[planted[:1]], near(trained_on[planted[1:]], 15.0)])
    found = find_copies(made, trained_on)
    assert found.places.tolist()[0] == 20, "the exact copy first"
    assert set(found.places.tolist()) == {20, 21, 22}
    assert torch.equal(found.nearest[20:], planted)
    assert found.ratios[20] == 0
    assert (found.ratios[:20] > 0.8).all()
    assert found.share == 3 / 23


def test_ratios_and_places_are_those_of_slow_and_obvious_code():
    trained_on, made = noise(40), torch.cat([noise(15, 1), near(noise(40)[:15], 40.0)])
    found = find_copies(made, trained_on, piece=7)
    ratios, nearest = slowly(made, trained_on)
    torch.testing.assert_close(found.ratios, ratios)
    assert found.nearest.tolist() == nearest


@pytest.mark.parametrize("piece", [1, 2, 7, 64])
def test_pieces_give_what_one_piece_gives(piece):
    trained_on = torch.cat([noise(40), noise(40)[:9]])
    made = torch.cat([noise(30, 1), near(noise(40)[:5], 10.0), noise(40)[:4]])
    whole, cut = (
        find_copies(made, trained_on, piece=10**6),
        find_copies(made, trained_on, piece=piece),
    )
    assert torch.equal(whole.ratios, cut.ratios)
    assert torch.equal(whole.nearest, cut.nearest)


@pytest.mark.parametrize("piece", [2, 2048])
def test_a_copy_of_an_image_that_was_learnt_twice_is_a_copy(piece):
    trained_on = torch.cat([noise(10), noise(10)[4:5]])
    made = torch.cat([near(noise(10)[4:5], 3.0), noise(10)[4:5]])
    found = find_copies(made, trained_on, piece=piece)
    assert found.share == 1
    assert found.nearest.tolist() == [4, 4]


def test_a_third_is_the_border():
    trained_on = torch.tensor([0, 40], dtype=torch.uint8).reshape(2, 1, 1, 1)
    made = torch.tensor([9, 10, 11, 31, 20], dtype=torch.uint8).reshape(5, 1, 1, 1)
    found = find_copies(made, trained_on)
    torch.testing.assert_close(found.ratios, torch.tensor([9 / 31, 1 / 3, 11 / 29, 9 / 31, 1]))
    assert found.places.tolist() == [0, 3]


def test_rates_stand_beside_those_of_images_nobody_learnt():
    trained_on, held_out = images(noise(100)), images(torch.cat([noise(8, 2), noise(100)[:2]]))
    made = images(torch.cat([noise(6, 3), noise(100)[:4]]))
    assert copy_rates(made, trained_on, held_out) == {"copies": 0.4, "copies_among_held_out": 0.2}


def test_private_images_are_not_compared_without_noise():
    fine, secret = images(noise(5)), images(noise(5), "faces", private=True)
    for trained_on, held_out in ((secret, fine), (fine, secret)):
        with pytest.raises(PrivacyError, match='counting copies would read "faces"'):
            copy_rates(fine, trained_on, held_out)
    rates = copy_rates(replace(fine, private=True), fine, fine)
    assert rates["copies"] == 1


def test_no_made_image_is_no_copy():
    found = find_copies(noise(0), noise(5))
    assert found.share == 0
    assert len(found.ratios) == len(found.nearest) == 0


def test_images_that_cannot_be_compared_are_refused():
    with pytest.raises(
        DataError, match=r"made images are \(3, 6, 6\) and training images \(1, 6, 6"
    ):
        find_copies(noise(3), noise(3, shape=(1, 6, 6)))
    with pytest.raises(DataError, match="3 training images, 1 of them different"):
        find_copies(noise(3), noise(1).expand(3, -1, -1, -1))
    with pytest.raises(DataError, match="0 training images"):
        find_copies(noise(3), noise(0))
