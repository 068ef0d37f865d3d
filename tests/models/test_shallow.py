"""The denoiser of one hidden layer: what it is told, and gradients that are of one image each."""

import torch
from torch.func import functional_call, grad, vmap

from sfumato.diffusion.denoise import Denoiser, Diffusers, require_fit
from sfumato.models.shallow import Shallow, grey_of_8_pixels


def woken():
    """As after training: at the start it answers zero."""
    torch.manual_seed(0)
    model = Shallow(channels=1, size=8, classes=3, width=8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def test_it_fits_as_a_denoiser_and_is_zero_before_training():
    network = grey_of_8_pixels(10)
    require_fit(Denoiser(Diffusers(network)), (1, 8, 8), 10)
    found = network(torch.randn(2, 1, 8, 8), torch.zeros(2), torch.tensor([0, 9])).sample
    assert torch.equal(found, torch.zeros(2, 1, 8, 8))


def test_class_and_noise_level_change_the_answer_and_far_levels_are_the_outermost():
    model, x = woken(), torch.randn(1, 1, 8, 8).expand(6, -1, -1, -1)
    level, labels = torch.tensor([-0.5, -0.5, -0.5, 0.2, 0.2, 0.2]), torch.tensor([0, 1, 2] * 2)
    assert len(model(x, level, labels).sample.detach().flatten(1).unique(dim=0)) == 6
    loud = model(x[:2], torch.tensor([2.0, 20.0]), labels[:1].expand(2)).sample
    torch.testing.assert_close(loud[0], loud[1], atol=1e-4, rtol=1e-4)


def test_an_image_has_no_part_in_the_gradient_of_another():
    model, x = woken(), torch.randn(4, 1, 8, 8)
    level, labels = torch.linspace(-1, 1, 4), torch.tensor([0, 1, 2, 0])
    weights = dict(model.named_parameters())

    def loss(weights, x, level, label):
        found = functional_call(model, weights, (x[None], level[None], label[None])).sample
        return found.square().sum()

    each = vmap(grad(loss), in_dims=(None, 0, 0, 0))(weights, x, level, labels)
    model(x, level, labels).sample.square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(each[name].sum(dim=0), parameter.grad)
