"""The generator of class images, and the discriminators that teach it."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load, save
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from sfumato.errors import ConfigError
from sfumato.models.gan import ClassNorm, Discriminator, Generator, GeneratorBlock
from sfumato.models.spectral import SpectralNorm, update_spectral_norms

SIZES = [8, 16, 28, 32, 64, 128]


def generator(classes=3, size=16, channels=1, seed=0):
    torch.manual_seed(seed)
    return Generator(classes, channels=channels, size=size, width=4, latent=6)


def discriminator(classes=3, size=16, channels=1, head="projection"):
    torch.manual_seed(1)
    return Discriminator(classes, channels=channels, size=size, width=4, head=head)


def noise(n=5):
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(0))


def photos(n=5, channels=1, size=16):
    return torch.rand(n, channels, size, size, generator=torch.Generator().manual_seed(0))


def normed_layers(network):
    return {name: m for name, m in network.named_modules() if is_parametrized(m, "weight")}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", SIZES)
def test_images_of_every_size_are_drawn_and_judged(size, channels):
    labels = torch.tensor([0, 2])
    images = generator(3, size, channels)(noise(2), labels)
    assert images.shape == (2, channels, size, size)
    assert 0 <= images.min() < images.max() <= 1
    shapes = {"projection": (2,), "plain": (2,), "classes": (2, 3)}
    for head, shape in shapes.items():
        assert discriminator(3, size, channels, head)(images, labels).shape == shape


@pytest.mark.parametrize("size", [*SIZES, 30, 33])
def test_the_discriminator_sums_a_map_of_three_to_seven_pixels(size):
    judge, found = discriminator(size=size), []
    judge.blocks.register_forward_hook(lambda m, args, out: found.append(out))
    features = judge.features(photos(size=size))
    assert 3 <= found[0].shape[-1] == found[0].shape[-2] <= 7
    torch.testing.assert_close(features, found[0].clamp(min=0).sum(dim=(2, 3)))


def test_the_published_sizes():
    with torch.device("meta"):
        networks = Generator(1000), Discriminator(1000)
    found = [sum(p.numel() for p in network.parameters()) / 1e6 for network in networks]
    assert found == pytest.approx([17.97, 11.17], rel=0.02)
    tables = [m for m in networks[0].modules() if isinstance(m, nn.Embedding)]
    assert sum(table.weight.numel() for table in tables) == 5_760_000


@pytest.mark.parametrize(("size", "near"), [(30, "28 or 32"), (4, "8 or 10"), (66, "64 or 80")])
def test_what_cannot_be_drawn_is_refused_with_sizes_that_can(size, near):
    with pytest.raises(ConfigError, match=near):
        Generator(3, size=size, width=4)
    for other in near.split(" or "):
        Generator(3, size=int(other), width=4)


def test_what_cannot_be_judged_is_refused():
    with pytest.raises(ConfigError, match="--image-size 8"):
        discriminator(size=7)
    for head in ("projection", "classes"):
        with pytest.raises(ConfigError, match=f'"{head}".*"plain"'):
            discriminator(None, head=head)


def test_a_new_generator_does_not_know_its_classes():
    network = generator()
    first, second = torch.tensor([0, 0, 0, 0, 0]), torch.tensor([0, 1, 2, 2, 1])
    torch.testing.assert_close(network(noise(), first), network(noise(), second), rtol=0, atol=0)


@pytest.mark.parametrize("table", ["gain", "bias"])
@pytest.mark.parametrize("place", ["0.norm1", "0.norm2", "1.norm1", "1.norm2"])
def test_a_class_whose_gain_or_bias_moves_is_the_only_one_that_changes(place, table):
    network, labels = generator().eval(), torch.tensor([0, 1, 2, 1, 0])
    before = network(noise(), labels)
    network.get_parameter(f"blocks.{place}.{table}.weight").data[1] += 0.5
    moved = (network(noise(), labels) - before).abs().amax(dim=(1, 2, 3))
    assert torch.equal(moved > 0, labels == 1)


def test_the_class_norm_is_batch_norm_with_the_gain_and_bias_of_the_class():
    torch.manual_seed(0)
    norm, x, labels = ClassNorm(4, 3), torch.randn(6, 4, 5, 5), torch.tensor([2, 0, 1, 1, 0, 2])
    assert [name for name, _ in norm.named_parameters()] == ["gain.weight", "bias.weight"]
    nn.init.normal_(norm.gain.weight)
    nn.init.normal_(norm.bias.weight)
    centred = x - x.mean(dim=(0, 2, 3), keepdim=True)
    plain = centred / (centred.square().mean(dim=(0, 2, 3), keepdim=True) + 1e-5).sqrt()
    wanted = [norm.gain.weight[k][:, None, None] * p + norm.bias.weight[k][:, None, None]
              for p, k in zip(plain, labels, strict=True)]  # fmt: skip
    torch.testing.assert_close(norm(x, labels), torch.stack(wanted))


def test_without_classes_labels_are_ignored():
    network = generator(None)
    assert not [m for m in network.modules() if isinstance(m, nn.Embedding)]
    images = network(noise())
    torch.testing.assert_close(images, network(noise(), torch.arange(5)), rtol=0, atol=0)
    judge = discriminator(None, head="plain").eval()
    torch.testing.assert_close(judge(images), judge(images, torch.arange(5)), rtol=0, atol=0)


def test_doubling_is_bilinear_and_halving_is_pooling():
    torch.manual_seed(0)
    up, x = GeneratorBlock(4, 2, None), torch.randn(2, 4, 7, 7)
    found, wanted = up.conv1(x), plainly(up.conv1, bilinear(x))
    inside = (..., slice(2, -2), slice(2, -2))  # beyond the border are zeros
    torch.testing.assert_close(found[inside], wanted[inside])
    zeros = bilinear(F.pad(x, (1, 1, 1, 1)))[..., 1:-1, 1:-1]
    torch.testing.assert_close(found, F.conv2d(zeros, up.conv1.weight))
    inner = up.conv2(F.relu(up.norm2(up.conv1(F.relu(up.norm1(x, None))), None)))
    torch.testing.assert_close(up(x, None), up.shortcut(bilinear(x)) + inner)
    judge, x = discriminator(size=33).eval(), photos(size=33)
    first, down = judge.first, judge.blocks[0]
    long_way = plainly(first.conv2, F.relu(first.conv1(x))) + plainly(first.shortcut, x)
    torch.testing.assert_close(first(x), F.avg_pool2d(long_way, 2))
    x = first(x) - 0.1
    long_way = plainly(down.conv2, F.relu(down.conv1(F.relu(x)))) + plainly(down.shortcut, x)
    torch.testing.assert_close(down(x), F.avg_pool2d(long_way, 2))


def plainly(conv, x):
    """The convolution without its halving."""
    return F.conv2d(x, conv.weight, conv.bias, padding=conv.padding)


def bilinear(x):
    """Twice the size by its definition: three quarters of a pixel, one of its neighbour."""
    for axis in (2, 3):
        n = x.shape[axis]
        before = x.index_select(axis, torch.arange(-1, n - 1).clamp(min=0))
        after = x.index_select(axis, torch.arange(1, n + 1).clamp(max=n - 1))
        x = torch.stack([0.75 * x + 0.25 * before, 0.75 * x + 0.25 * after], axis + 1)
        x = x.flatten(axis, axis + 1)
    return x


def test_a_projection_adds_the_inner_product_with_the_class():
    judge, x, labels = discriminator().eval(), photos(), torch.tensor([0, 2, 1, 1, 0])
    features = judge.features(x)
    wanted = features @ judge.score.weight[0] + judge.score.bias
    wanted = wanted + (features * judge.classes.weight[labels]).sum(dim=1)
    torch.testing.assert_close(judge(x, labels), wanted)
    assert not torch.equal(judge(x, labels), judge(x, labels.flip(0)))


@pytest.mark.parametrize("head", ["projection", "plain", "classes"])
def test_every_weight_has_spectral_norm_one_also_after_it_was_moved(head):
    judge = discriminator(head=head)
    layers = normed_layers(judge)
    weights = [m for m in judge.modules() if isinstance(m, nn.Conv2d | nn.Linear | nn.Embedding)]
    assert len(layers) == len(weights) >= 10
    with torch.no_grad():
        for layer in layers.values():
            original = layer.parametrizations.weight.original
            original.add_(3 * torch.randn_like(original))
    for _ in range(30):
        update_spectral_norms(judge)
    for name, layer in layers.items():
        norm = torch.linalg.matrix_norm(layer.weight.flatten(1), 2)
        assert norm.item() == pytest.approx(1, abs=0.02), name


def test_the_gradient_of_a_normed_weight_is_that_of_autograd():
    torch.manual_seed(0)
    weight = torch.randn(3, 4, 3, 3, dtype=torch.float64, requires_grad=True)
    norm = SpectralNorm(weight.detach().float()).double()
    norm.tighten(weight.detach())
    matrix = weight.permute(0, 2, 3, 1).flatten(1)
    sigma = norm.u @ matrix @ norm.v
    found, wanted, other = norm(weight), weight / sigma, torch.randn_like(weight)
    torch.testing.assert_close(found, wanted)
    grads = [torch.autograd.grad((y * other).sum(), weight)[0] for y in (found, wanted)]
    torch.testing.assert_close(*grads)
    torch.testing.assert_close(sigma, torch.linalg.matrix_norm(matrix, 2), rtol=0.02, atol=0)


def test_looking_leaves_the_estimate_as_it_is():
    judge = discriminator()
    before = copy.deepcopy(judge.state_dict())
    judge(photos(), torch.arange(5) % 3)
    torch.testing.assert_close(judge.state_dict(), before, rtol=0, atol=0)


def test_gradients_reach_the_noise_and_every_weight():
    network, judge, labels = generator(), discriminator(), torch.arange(5) % 3
    z = noise().requires_grad_(True)
    judge(network(z, labels), labels).mean().backward()
    assert (z.grad.abs().sum(dim=1) > 0).all()
    for part in (network, judge):
        for name, parameter in part.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name


def test_autocast_keeps_statistics_estimates_and_results_in_float32():
    network, judge, labels = generator(), discriminator(), torch.arange(5) % 3
    seen, lower, inner = [], [], network.blocks[-1].norm2.norm
    inner.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    for layer in normed_layers(judge).values():
        layer.parametrizations.weight[0].register_forward_pre_hook(
            lambda m, args: lower.append(torch.is_autocast_enabled("cpu"))
        )
    with torch.autocast("cpu", torch.bfloat16):
        images = network(noise(), labels)
        scores, features = judge(images, labels), judge.features(images)
    assert {images.dtype, scores.dtype, features.dtype} == {torch.float32}
    assert seen[0].dtype == torch.bfloat16
    mean = 0.1 * seen[0].float().mean(dim=(0, 2, 3))
    torch.testing.assert_close(inner.running_mean, mean, rtol=1e-5, atol=1e-6)
    # On a GPU, autocast would take the power iteration along; here it can only be seen.
    assert set(lower) == {False}
    torch.testing.assert_close(judge(images, labels), scores, rtol=0.05, atol=0.05)


def test_maps_stay_channels_last_and_in_low_precision_throughout():
    labels, found = torch.arange(5) % 3, []
    network, judge = generator(channels=3), discriminator(channels=3)
    for part in (network, judge):
        part.to(memory_format=torch.channels_last)
        for block in part.modules():
            if isinstance(block, ClassNorm | nn.Conv2d):
                block.register_forward_hook(lambda m, args, out: found.append(out))
    with torch.autocast("cpu", torch.bfloat16):
        judge(network(noise(), labels), labels).sum().backward()
    assert len(found) == 20
    assert all(x.is_contiguous(memory_format=torch.channels_last) for x in found)
    assert {x.dtype for x in found} == {torch.bfloat16}


@pytest.mark.parametrize("make", [generator, discriminator])
def test_weights_come_back_from_a_file(make):
    network, other = make().eval(), make().eval()
    with torch.no_grad():
        for value in other.state_dict().values():
            value.zero_()
    state = {name: value.contiguous() for name, value in network.state_dict().items()}
    other.load_state_dict(load(save(state)))
    inputs = noise() if make is generator else photos()
    for twin in (other, copy.deepcopy(network)):  # a copy is what averages of weights start from
        labels = torch.arange(5) % 3
        torch.testing.assert_close(twin(inputs, labels), network(inputs, labels), rtol=0, atol=0)


@pytest.mark.full
def test_both_networks_compile_in_one_graph_each():
    # In a process of its own: the run-time type checks of the tests would be traced along.
    script = Path(__file__).with_name("compiled_gan.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
