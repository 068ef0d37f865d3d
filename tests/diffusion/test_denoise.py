"""A denoiser is preconditioned as published, learns, and can be trained privately."""

import pytest
import torch
from denoisers import StandIn
from torch import nn

from sfumato.clipping.admit import admit
from sfumato.clipping.clip import GradientClipper
from sfumato.diffusion.denoise import (
    Denoiser,
    Diffusers,
    denoising_losses,
    draw_sigma,
    preconditioning,
    require_fit,
)
from sfumato.errors import ConfigError
from sfumato.models.unet import UNet

SIGMAS = torch.tensor([0.002, 0.1, 0.5, 3.0, 80.0])


class Answer(nn.Module):
    """A network that gives what it is told to, and remembers what it was given."""

    def __init__(self, answer=1.0):
        super().__init__()
        self.answer = answer

    def forward(self, x, noise_level, labels, conditions):
        self.given = (x, noise_level, labels, conditions)
        return torch.full_like(x, self.answer)


def tiny(classes=2, seed=0, **settings):
    torch.manual_seed(seed)
    sizes = {"channels": 3, "size": 8, "width": 8, "multipliers": (1, 2), "blocks": 1}
    return Denoiser(UNet(classes=classes, **{**sizes, **settings}))


def woken(denoiser):
    with torch.no_grad():
        for parameter in denoiser.parameters():
            if 0 < parameter.abs().max() < 1e-4:
                parameter.mul_(1e5)
    return denoiser


def batch(n=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, noise = torch.randn(2, n, 3, 8, 8, generator=generator)
    conditions = torch.randn(n, 9, generator=generator)
    return 0.5 * x, torch.arange(n) % 2, conditions, draw_sigma(n, generator), noise


def losses_of(denoiser, x, labels, conditions, sigma, noise):
    return denoising_losses(denoiser, x, labels, conditions, sigma=sigma, noise=noise)


def test_without_noise_it_is_the_identity_whatever_the_network():
    x = torch.randn(3, 3, 8, 8)
    labels = torch.tensor([0, 1, 0])
    for denoiser in (Denoiser(Answer(1000.0)), woken(tiny()).eval()):
        for sigma, distance in ((0.0, 0.0), (1e-8, 2e-5)):
            found = denoiser(x, torch.full((3,), sigma), labels)
            assert (found - x).abs().max() <= distance


def test_input_and_wanted_output_of_the_network_have_variance_1_at_every_sigma():
    generator = torch.Generator().manual_seed(0)
    y = 0.5 * torch.randn(5, 3, 64, 64, generator=generator, dtype=torch.float64)
    noise = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    sigma = SIGMAS.double()
    x = y + sigma[:, None, None, None] * noise
    network = Answer()
    found = Denoiser(network)(x, sigma)
    given, level, *_ = network.given
    assert (given.var(dim=(1, 2, 3)) - 1).abs().max() < 0.05
    torch.testing.assert_close(level, sigma.log() / 4)
    # D = c_skip x + c_out with an answer of 1: what the network should have said follows.
    skip, out, _, _ = (each[:, None, None, None] for each in preconditioning(sigma, 0.5))
    torch.testing.assert_close(found, skip * x + out)
    wanted = (y - skip * x) / out
    assert (wanted.var(dim=(1, 2, 3)) - 1).abs().max() < 0.05


def test_the_loss_is_the_mean_square_of_what_the_network_gets_wrong():
    y, labels, _, _, noise = batch(5)
    found = denoising_losses(Denoiser(Answer(0.3)), y, labels, sigma=SIGMAS, noise=noise)
    skip, out, _, _ = (each[:, None, None, None] for each in preconditioning(SIGMAS, 0.5))
    wanted = (y - skip * (y + SIGMAS[:, None, None, None] * noise)) / out
    torch.testing.assert_close(found, (0.3 - wanted).square().mean(dim=(1, 2, 3)))


def test_an_untrained_denoiser_has_a_loss_of_about_1():
    found = losses_of(tiny().eval(), *batch(64))
    assert found.mean().item() == pytest.approx(1, abs=0.1)


def test_training_noise_is_log_normal():
    found = draw_sigma(20_000, torch.Generator().manual_seed(0)).log()
    assert found.mean().item() == pytest.approx(-1.2, abs=0.03)
    assert found.std().item() == pytest.approx(1.2, abs=0.03)
    again = draw_sigma(20_000, torch.Generator().manual_seed(0)).log()
    assert torch.equal(found, again)


def test_a_tiny_denoiser_learns_a_colour_for_each_class():
    colours = torch.tensor([[0.8, -0.8, -0.2], [-0.8, 0.2, 0.8]])
    denoiser = tiny(dropout=0.0)
    optimizer = torch.optim.Adam(denoiser.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(60):
        labels = torch.randint(2, (16,), generator=generator)
        images = colours[labels][:, :, None, None].expand(-1, -1, 8, 8)
        noise = torch.randn(images.shape, generator=generator)
        sigma = draw_sigma(16, generator)
        loss = denoising_losses(denoiser, images, labels, sigma=sigma, noise=noise).mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert sum(losses[-8:]) < 0.7 * sum(losses[:8])
    # So much noise that nothing but the label can tell.
    x = 20 * torch.randn(64, 3, 8, 8, generator=generator)
    labels = torch.arange(64) % 2
    found = denoiser.eval()(x, torch.full((64,), 20.0), labels).mean(dim=(2, 3))
    for label in (0, 1):
        mean = found[labels == label].mean(dim=0)
        assert (mean - colours[label]).abs().max() < 0.3


def test_a_loss_is_that_of_its_own_image_alone():
    denoiser = woken(tiny()).eval().double()
    given = [t.double() if t.is_floating_point() else t for t in batch()]
    whole = losses_of(denoiser, *given)
    for i in range(4):
        torch.testing.assert_close(losses_of(denoiser, *(t[i : i + 1] for t in given))[0], whole[i])


@pytest.mark.parametrize("mode", ["ghost_mixed", "ghost", "non-ghost"])
def test_the_private_engine_admits_it(mode):
    denoiser = woken(tiny(width=8, multipliers=(2, 2)))
    given = batch(3)
    clipper = GradientClipper(denoiser, mode)
    admit(clipper, losses_of, given, 3)
    clipped = clipper.clip(losses_of, given, 3)
    assert set(clipped.total) == {name for name, _ in denoiser.named_parameters()}


def test_the_private_engine_admits_it_in_bfloat16_too():
    def lower(*given):
        with torch.autocast("cpu", torch.bfloat16):
            return losses_of(*given)

    admit(GradientClipper(woken(tiny())), lower, batch(3), 3, losses_of)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_bfloat16_keeps_results_in_float32_and_finite(layout):
    denoiser = woken(tiny()).eval().to(memory_format=layout)
    y, labels, conditions, _, noise = batch(5)
    exact = denoising_losses(denoiser, y, labels, conditions, sigma=SIGMAS, noise=noise)
    with torch.autocast("cpu", torch.bfloat16):
        found = denoiser(y, SIGMAS, labels, conditions)
        losses = denoising_losses(denoiser, y, labels, conditions, sigma=SIGMAS, noise=noise)
    assert found.dtype == losses.dtype == torch.float32
    assert found.isfinite().all()
    torch.testing.assert_close(losses, exact, rtol=0.05, atol=0.0)
    losses.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in denoiser.parameters())
    assert all(p.grad.isfinite().all() for p in denoiser.parameters())


def test_images_in_float64_stay_so_around_a_network_in_float32():
    denoiser = woken(tiny()).eval()
    y, labels, *_ = batch()
    sigma = torch.full((4,), 0.3)
    found = denoiser(y.double(), sigma.double(), labels)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.float(), denoiser(y, sigma, labels))


def test_images_of_another_shape_are_refused():
    with pytest.raises(ConfigError, match="images of 3 x 8 x 8, and was given images of 1 x 8 x 8"):
        tiny()(torch.zeros(2, 1, 8, 8), torch.ones(2), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ConfigError, match="given images of 3 x 16 x 16"):
        require_fit(tiny(), (3, 16, 16), 2)


def test_other_classes_and_missing_labels_are_refused():
    require_fit(tiny(), (3, 8, 8), 2)
    with pytest.raises(ConfigError, match="knows 2 classes, and the images have 10"):
        require_fit(tiny(), (3, 8, 8), 10)
    with pytest.raises(ConfigError, match="knows no classes, and the images have 10"):
        require_fit(tiny(classes=None), (3, 8, 8), 10)
    with pytest.raises(ConfigError, match="given no labels"):
        tiny()(torch.zeros(2, 3, 8, 8), torch.ones(2))
    with pytest.raises(ConfigError, match="above 0"):
        Denoiser(Answer(), sigma_data=0.0)


def test_a_network_of_diffusers_is_a_denoiser():
    network = StandIn()
    denoiser = Denoiser(Diffusers(network))
    require_fit(denoiser, (3, 8, 8), 2)
    y, labels, _, sigma, noise = batch()
    skip, out, inside, level = (e[:, None, None, None] for e in preconditioning(sigma, 0.5))
    said = network.conv(inside * y) + level + network.class_embedding(labels)[:, :, None, None]
    torch.testing.assert_close(denoiser(y, sigma, labels), skip * y + out * said)
    assert denoiser(y.double(), sigma.double(), labels).dtype == torch.float64
    admit(
        GradientClipper(denoiser),
        lambda model, *given: denoising_losses(model, *given[:2], sigma=given[2], noise=given[3]),
        (y, labels, sigma, noise),
        4,
    )


def test_a_network_of_diffusers_without_classes_ignores_labels():
    y, labels, _, sigma, _ = batch()
    denoiser = Denoiser(Diffusers(StandIn(num_class_embeds=None, sample_size=None)))
    require_fit(denoiser, (3, 8, 8), None)
    assert torch.equal(denoiser(y, sigma, labels), denoiser(y, sigma))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"out_channels": 6}, "makes 6 channels of 3"),
        ({"time_embedding_type": "fourier"}, 'time_embedding_type="fourier"'),
        ({"class_embed_type": "timestep"}, 'class_embed_type="timestep"'),
    ],
)
def test_a_network_of_diffusers_that_cannot_be_a_denoiser_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        Diffusers(StandIn(**config))


def test_a_network_of_diffusers_of_another_size_or_told_of_augmentation_is_refused():
    y, labels, conditions, sigma, _ = batch()
    with pytest.raises(ConfigError, match="images of 3 x 32 x 32"):
        Denoiser(Diffusers(StandIn(sample_size=(32, 32))))(y, sigma, labels)
    with pytest.raises(ConfigError, match="takes no conditions"):
        Denoiser(Diffusers(StandIn()))(y, sigma, labels, conditions)


def test_a_network_that_says_nothing_of_its_images_is_refused():
    with pytest.raises(ConfigError, match="Conv2d does not say in a config"):
        Diffusers(nn.Conv2d(3, 3, 3))


def test_a_network_of_diffusers_is_tried_out_before_it_learns():
    network = StandIn(sample_size=None)
    network.conv = nn.Conv2d(3, 3, 9)
    denoiser = Denoiser(Diffusers(network))
    with pytest.raises(ConfigError, match=r"StandIn fails on images of 3 x 8 x 8 .* fewer levels"):
        require_fit(denoiser, (3, 8, 8), 2)
    assert network.training


def real_unet(**changes):
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    settings = {
        "sample_size": 8,
        "block_out_channels": (8, 16),
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "num_class_embeds": 2,
    }
    torch.manual_seed(0)
    return Denoiser(Diffusers(diffusers.UNet2DModel(**{**settings, **changes})))


def test_the_unet_of_diffusers_itself_is_accepted():
    denoiser = real_unet().eval()
    require_fit(denoiser, (3, 8, 8), 2)
    y, labels, _, sigma, noise = batch()
    found = denoising_losses(denoiser, y, labels, sigma=sigma, noise=noise)
    assert found.isfinite().all()
    assert not torch.equal(denoiser(y, sigma, labels), denoiser(y, sigma, 1 - labels))
    assert not torch.equal(denoiser(y, sigma, labels), denoiser(y, 2 * sigma, labels))


def test_the_unet_of_diffusers_itself_is_admitted_by_the_private_engine():
    y, labels, _, sigma, noise = batch()
    admit(
        GradientClipper(real_unet()),
        lambda model, *given: denoising_losses(model, *given[:2], sigma=given[2], noise=given[3]),
        (y, labels, sigma, noise),
        4,
    )


def test_the_unet_of_diffusers_itself_is_refused_where_images_cannot_be_halved():
    blocks = {"down_block_types": ["DownBlock2D"] * 4, "up_block_types": ["UpBlock2D"] * 4}
    deep = real_unet(sample_size=28, block_out_channels=(8, 8, 8, 8), **blocks)
    with pytest.raises(ConfigError, match="UNet2DModel fails on images of 3 x 28 x 28"):
        require_fit(deep, (3, 28, 28), 2)
