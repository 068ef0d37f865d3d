"""Private images on their way into a denoiser: what is drawn, and gradients one image at a time."""

from dataclasses import replace

import pytest
import torch
from people import portraits
from scipy.stats import kstest

from sfumato.clipping.admit import admit, one_at_a_time
from sfumato.clipping.clip import GradientClipper
from sfumato.clipping.factors import Clipping
from sfumato.data.example_rng import ExampleRng
from sfumato.data.load import load_images
from sfumato.data.people import People
from sfumato.diffusion.denoise import Denoiser, denoising_losses
from sfumato.diffusion.denoising_inputs import NoisingInputs
from sfumato.diffusion.generator import new_denoiser
from sfumato.privacy.sampling import Chunk
from sfumato.settings.diffusion import Diffusion

SMALL = Diffusion(gen_width=8, gen_multipliers=(1, 2), gen_blocks=1, gen_dropout=0.0)


@pytest.fixture(name="inputs")
def digits_with_noise():
    images = load_images("digits", "train", private=True, image_size=8)
    return NoisingInputs(images, torch.device("cpu"), (0.5,), (0.5,), views=3, seed=5)


def chunk_of(*indices):
    return Chunk(torch.tensor(indices), torch.ones(len(indices), dtype=torch.bool))


def denoiser_of(inputs) -> Denoiser:
    """A denoiser in which nothing is still zero."""
    torch.manual_seed(0)
    made = new_denoiser(SMALL, inputs.images.shape, len(inputs.images.classes), told=False)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return made


def test_dice_throw_normal_numbers():
    drawn = ExampleRng.of(3, torch.arange(200)).normal(101)
    assert drawn.shape == (101, 200)
    assert kstest(drawn.flatten().numpy(), "norm").pvalue > 1e-3
    assert drawn.T.corrcoef().abs().fill_diagonal_(0).max() < 0.5
    assert drawn.corrcoef().abs().fill_diagonal_(0).max() < 0.4


def test_pixels_lie_between_minus_one_and_one_under_noise_of_the_right_distribution(inputs):
    images, noise, sigma, labels = inputs.tensors(chunk_of(*range(100)), 2)
    assert images.shape == noise.shape == (300, 1, 8, 8)
    assert -1 == images.min() < images.max() <= 1
    assert torch.equal(labels, inputs.images.labels[:100])
    assert kstest(noise.flatten().numpy(), "norm").pvalue > 1e-3
    assert kstest((sigma.log().numpy() + 1.2) / 1.2, "norm").pvalue > 1e-3


def test_what_is_drawn_for_an_image_does_not_depend_on_the_others(inputs):
    alone = inputs.tensors(chunk_of(7), 4)
    among = inputs.tensors(chunk_of(3, 7, 9), 4)
    for own, found in zip(alone[:3], among[:3], strict=True):
        assert torch.equal(own, found[3:6])
    later = inputs.tensors(chunk_of(7), 5)
    assert not torch.equal(alone[1], later[1])
    assert not torch.equal(alone[1][0], alone[1][1])  # every view has noise of its own


def test_the_loss_of_an_image_is_the_mean_over_its_draws(inputs):
    model, chunk = denoiser_of(inputs), chunk_of(1, 2)
    images, noise, sigma, labels = inputs.tensors(chunk, 0)
    found = inputs.losses(model, images, noise, sigma, labels)
    each = denoising_losses(model, images, labels.repeat_interleave(3), sigma=sigma, noise=noise)
    torch.testing.assert_close(found, torch.stack([each[:3].mean(), each[3:].mean()]))


@pytest.mark.parametrize("mode", ["ghost_mixed", "ghost", "non-ghost"])
def test_clipped_sums_of_a_denoiser_are_those_of_autograd_one_image_at_a_time(inputs, mode):
    model = denoiser_of(inputs).double()
    single = inputs.tensors(chunk_of(*range(4)), 0)
    tensors = [x.double() if x.is_floating_point() else x for x in single]
    rows = one_at_a_time(model, inputs.losses, tensors)
    norms = [float(torch.cat([part.flatten() for part in row.values()]).norm()) for row in rows]
    bound = sorted(norms)[1] + 1e-3  # two are clipped, and two are not
    clipper = GradientClipper(model, mode, clipping=Clipping(max_norm=bound))
    found = clipper.clip(inputs.losses, tensors, 4)
    for name, part in found.total.items():
        pairs = zip(rows, norms, strict=True)
        wanted = sum(row[name] * min(1.0, bound / norm) for row, norm in pairs)
        torch.testing.assert_close(part.double(), wanted, rtol=1e-4, atol=1e-6)


def test_a_denoiser_passes_the_test_on_noise_and_every_parameter_is_reached(inputs):
    clipper = GradientClipper(denoiser_of(inputs), "ghost_mixed")
    admit(clipper, inputs.losses, inputs.trial(), 3)
    found = clipper.clip(inputs.losses, inputs.trial(), 3)
    assert all(bool(part.any()) for part in found.total.values())


def test_all_images_of_a_person_are_clipped_as_one():
    images = portraits()
    assert images.people is not None
    inputs = NoisingInputs(
        images, torch.device("cpu"), (0.5,), (0.5,), views=2, people=People(images.people, 3)
    )
    tensors = inputs.tensors(chunk_of(0, 1), 0)
    assert len(tensors[0]) == 2 * 2 * 3
    model = denoiser_of(inputs)
    assert inputs.losses(model, *tensors).shape == (2,)
    other = replace(inputs, seed=1).tensors(chunk_of(0, 1), 0)
    assert not torch.equal(tensors[1], other[1])
