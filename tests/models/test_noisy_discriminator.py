"""The noise-conditional discriminator: what it reads, and what it refuses."""

import pytest
import torch

from sfumato.diffusion.discriminator_guidance import density_ratio_gradient
from sfumato.errors import ConfigError
from sfumato.models.noisy_discriminator import NoisyDiscriminator


def test_noise_level_and_class_change_the_score():
    torch.manual_seed(0)
    model = NoisyDiscriminator(channels=1, size=8, classes=3, width=8).eval()
    with torch.no_grad():  # as after training: at the start every block is its shortcut
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    x = torch.randn(1, 1, 8, 8).expand(6, -1, -1, -1)
    found = model(x, torch.tensor([0.1, 0.1, 0.1, 1.0, 1.0, 1.0]), torch.tensor([0, 1, 2] * 2))
    assert len(found.detach().unique()) == 6
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x, torch.ones(6), torch.zeros(6).long()).dtype == torch.float32


def test_without_classes_labels_are_ignored_and_small_images_are_refused():
    x, sigma = torch.randn(4, 1, 8, 8), torch.ones(4)
    model = NoisyDiscriminator(channels=1, size=8, classes=None, width=8).eval()
    assert torch.equal(model(x, sigma), model(x, sigma, torch.arange(4)))
    with pytest.raises(ConfigError, match="images of 7 pixels are too small"):
        NoisyDiscriminator(channels=1, size=7, classes=None)
    with pytest.raises(ConfigError, match="a width of 6 has no groups"):
        NoisyDiscriminator(channels=1, size=8, classes=None, width=6)


@pytest.mark.parametrize(("size", "channels"), [(28, 1), (32, 3), (37, 3)])
def test_any_size_of_image_can_be_told(size, channels):
    model = NoisyDiscriminator(channels=channels, size=size, classes=10, width=8)
    x, sigma = torch.randn(3, channels, size, size), torch.tensor([1e-3, 1.0, 80.0])
    found = density_ratio_gradient(model, x, sigma, torch.tensor([0, 5, 9]))
    assert found.shape == x.shape
    assert found.isfinite().all()
    assert (found.flatten(1) != 0).any(dim=1).all()
