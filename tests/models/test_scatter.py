"""Scattering coefficients: fixed features of each example by itself."""

import torch

from sfumato.clipping.admit import admit
from sfumato.clipping.clip import GradientClipper
from sfumato.models.scatter import Scattering, gaussian, scatter_linear, wavelets


def images(n=3, size=28):
    return torch.rand(n, 1, size, size, generator=torch.Generator().manual_seed(0))


def test_there_are_81_coefficients_for_each_channel_and_patch():
    assert Scattering()(images()).shape == (3, 81, 7, 7)
    assert Scattering()(torch.rand(2, 3, 30, 33)).shape == (2, 243, 8, 9)


def test_wavelets_ignore_brightness_and_the_blur_keeps_it():
    for scale, size in ((0, 7), (1, 11)):
        assert float(wavelets(scale, size).sum(dim=(1, 2, 3)).abs().max()) < 1e-6
    assert float(gaussian(1.6, 11).sum()) == 1 or abs(float(gaussian(1.6, 11).sum()) - 1) < 1e-6


def test_a_turned_edge_moves_its_energy_to_the_turned_wavelet():
    rows = torch.arange(28.0)
    stripes = torch.sin(0.75 * torch.pi * rows).expand(28, 28)
    upright, turned = (
        Scattering()._average(_fine(image), 4).mean(dim=(0, 2, 3))
        for image in (stripes[None, None], stripes.T[None, None])
    )
    assert int(upright.argmax()) == 0
    assert int(turned.argmax()) == 4  # a quarter turn is four of eight angles


def _fine(image):
    from sfumato.models.scatter import moduli

    return moduli(image, Scattering().fine, 1)


def test_examples_do_not_touch_each_other():
    scattering = Scattering()
    x = images()
    alone = torch.cat([scattering(one[None]) for one in x])
    torch.testing.assert_close(scattering(x), alone, rtol=1e-4, atol=1e-4)


def test_only_the_linear_layer_learns_and_it_is_admitted():
    model = scatter_linear(10)
    model(images())
    assert [name for name, _ in model.named_parameters()] == ["2.weight", "2.bias"]
    loss = torch.nn.functional.cross_entropy
    admit(
        GradientClipper(model),
        lambda m, x, y: loss(m(x), y, reduction="none"),
        (images(), torch.arange(3)),
        3,
    )
