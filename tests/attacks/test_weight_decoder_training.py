"""Networks that see images in weights, and what they are asked for."""

import pytest
import torch

from sfumato.attacks.heads import HeadRecipe
from sfumato.attacks.shadow_heads import ShadowHeads
from sfumato.attacks.weight_decoder_training import (
    ReconstructionTask,
    nearest_images,
    reconstruct,
    softmin_error,
)
from sfumato.errors import ConfigError
from sfumato.metrics.features import Features
from sfumato.models.decoder import PublishedDecoder, RowDecoder


@pytest.mark.parametrize("size", [28, 32, 64])
@pytest.mark.parametrize("kind", [PublishedDecoder, RowDecoder])
def test_a_picture_of_each_wanted_class(kind, size):
    decoder = kind(5 * 9, (3, size, size), 5, 8).eval()
    wanted = torch.tensor([[0, 3], [4, 4]])
    z = torch.randn(2, 45)
    found = decoder(z, wanted)
    assert found.shape == (2, 2, 3, size, size)
    assert found.abs().max() <= 1
    alone = decoder(z, wanted[:, :1])
    torch.testing.assert_close(found[:, :1], alone)
    torch.testing.assert_close(found[1, 0], found[1, 1])


def test_without_classes_there_is_one_picture_a_head():
    task = ReconstructionTask(torch.zeros(4, 1, 28, 28, dtype=torch.uint8), 2, 1, conditional=False)
    decoder = PublishedDecoder(12, (1, 28, 28), 0, 4)
    assert reconstruct(decoder, torch.randn(3, 12), task).shape == (3, 1, 1, 28, 28)
    assert task.truths(torch.tensor([[0, 1], [2, 3]])).shape == (2, 1, 2, 1, 28, 28)


def test_the_published_sizes():
    sizes = {(2570, (1, 32, 32), 10, 256): 53.0, (8201, (3, 64, 64), 0, 512): 316.2}
    for settings, wanted in sizes.items():
        with torch.device("meta"):
            decoder = PublishedDecoder(*settings)
        found = sum(parameter.numel() for parameter in decoder.parameters())
        assert found / 1e6 == pytest.approx(wanted, abs=0.1)


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ConfigError, match="28, 32 or 64"):
        PublishedDecoder(10, (1, 30, 30), 2, 4)
    with pytest.raises(ConfigError, match="published"):
        RowDecoder(11, (1, 28, 28), 2, 4)


def test_the_row_of_the_wanted_class_counts():
    decoder = RowDecoder(3 * 4 + 3, (1, 28, 28), 3, 8).eval()
    z = torch.randn(1, 15, requires_grad=True)
    decoder(z, torch.tensor([[1]])).square().sum().backward()
    rows = z.grad[0, :12].reshape(3, 4).abs().sum(dim=1)
    assert rows[1] > 3 * rows[0]
    torch.testing.assert_close(rows[0], rows[2])  # of the others only the mean is seen


def test_the_error_is_that_of_the_nearest_image():
    truths = torch.zeros(1, 1, 3, 1, 2, 2)
    truths[0, 0, 1], truths[0, 0, 2] = 0.5, -1.0
    guess = torch.full((1, 1, 1, 2, 2), 0.45)
    nearest = (0.05**2 + 0.05) / 2
    assert softmin_error(guess, truths).item() == pytest.approx(nearest, rel=1e-3)
    one = softmin_error(guess, truths[:, :, :1]).item()
    assert one == pytest.approx((0.45**2 + 0.45) / 2)


def test_a_row_of_weights_points_at_its_image():
    generator = torch.Generator().manual_seed(0)
    features = Features(torch.randn(40, 30, generator=generator), torch.arange(40) % 4)
    recipe = HeadRecipe(classes=4, lr=0.1)
    heads = ShadowHeads(features.values, features.labels, recipe, 0).heads(0, 6)
    pixels = torch.arange(40, dtype=torch.uint8).reshape(40, 1, 1, 1)
    found = nearest_images(heads, recipe, features, ReconstructionTask(pixels, 4, 1))
    places = ((found[..., 0, 0, 0] + 1) * 127.5).round().long()
    assert torch.equal(places, heads.members)


def test_members_become_pictures_class_by_class():
    pixels = torch.arange(4, dtype=torch.uint8).reshape(4, 1, 1, 1).expand(4, 1, 2, 2) * 85
    task = ReconstructionTask(pixels, classes=2, class_size=2)
    found = task.truths(torch.tensor([[3, 0, 1, 2]]))
    assert found.shape == (1, 2, 2, 1, 2, 2)
    torch.testing.assert_close(
        found[0, :, :, 0, 0, 0], torch.tensor([[1.0, -1.0], [-1 / 3, 1 / 3]])
    )
