"""The U-Net is the published one, and hears what it is told."""

import pytest
import torch
from torch import nn

from sfumato.errors import ConfigError
from sfumato.models.unet import Attention, Embedding, UNet, UNetBlock

TINY = {"channels": 3, "size": 8, "classes": 4, "width": 8, "multipliers": (1, 2), "blocks": 1}


def tiny(**settings):
    torch.manual_seed(0)
    return UNet(**{**TINY, **settings})


def woken(net):
    """The network with last layers and biases that count: they begin at nearly zero."""
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.endswith(("conv2.weight", "out.weight")) or name == "last.weight":
                parameter.mul_(1e5)
            if name.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return net.eval()


def batch(n=5, size=8, channels=3):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, channels, size, size, generator=generator)
    level = torch.linspace(-1.5, 1.0, n)
    conditions = torch.randn(n, 9, generator=generator)
    return x, level, torch.arange(n) % 4, conditions


@pytest.mark.parametrize(
    ("settings", "millions"),
    [
        ({"width": 128, "blocks": 4}, 55.74),
        ({"width": 96, "blocks": 3}, 25.6),
        ({"width": 64, "blocks": 4}, 14.0),
        ({"width": 64, "blocks": 2, "multipliers": (1, 2, 2)}, 7.0),
    ],
)
def test_the_parameters_are_as_many_as_the_published(settings, millions):
    with torch.device("meta"):
        net = UNet(channels=3, size=32, classes=10, **settings)
    count = sum(p.numel() for p in net.parameters())
    assert count == pytest.approx(1e6 * millions, rel=5e-3)


def test_attention_stands_where_the_published_network_has_it():
    with torch.device("meta"):
        net = UNet(channels=3, size=32, classes=10, width=32)
    found = [name for name, module in net.named_modules() if isinstance(module, Attention)]
    # Four blocks at 16 x 16 on the way down and the last one on the way up, and the smallest map.
    down, up = [f"down.{i}.attention" for i in (5, 6, 7, 8)], "up.10.attention"
    assert found == [*down, up, "middle.0.attention"]


@pytest.mark.parametrize(("size", "attended"), [(16, 16), (28, 14), (32, 16)])
def test_images_of_usual_sizes_fit_and_attention_is_nearest_to_16(size, attended):
    net = tiny(size=size, multipliers=(1, 2, 2), channels=1)
    sides = set()
    for module in net.down.modules():
        if isinstance(module, Attention):
            module.register_forward_hook(lambda _, given, out: sides.add(given[0].shape[-1]))
    x, *told = batch(2, size, 1)
    assert net(x, *told).shape == x.shape
    assert sides == {attended}


@pytest.mark.parametrize(
    ("size", "fitting"), [(30, "28 or 32"), (33, "32 or 36"), (6, "8 or 12"), (4, "8 or 12")]
)
def test_other_sizes_are_refused_with_those_that_fit(size, fitting):
    with pytest.raises(ConfigError, match=f"{size} pixels .* --image-size {fitting}"):
        tiny(size=size, multipliers=(2, 2, 2))


def test_a_width_without_groups_is_refused():
    with pytest.raises(ConfigError, match="width 10 has no groups"):
        tiny(width=10)


def test_an_untrained_network_gives_nearly_zero():
    net = tiny().eval()
    assert net(*batch()).abs().max() < 1e-3
    assert woken(net)(*batch()).std() > 0.1


@pytest.mark.parametrize("which", ["noise level", "labels", "conditions"])
def test_whatever_it_is_told_matters(which):
    net = woken(tiny())
    x, level, labels, conditions = batch()
    before = net(x, level, labels, conditions)
    changed = {
        "noise level": (x, level + 0.1, labels, conditions),
        "labels": (x, level, (labels + 1) % 4, conditions),
        "conditions": (x, level, labels, conditions + 0.1),
    }[which]
    assert (before - net(*changed)).abs().amax(dim=(1, 2, 3)).min() > 1e-3


def test_zero_conditions_are_the_same_as_none():
    net = woken(tiny())
    x, level, labels, conditions = batch()
    assert torch.equal(net(x, level, labels, 0 * conditions), net(x, level, labels, None))


def test_without_classes_labels_are_ignored():
    net = woken(tiny(classes=None))
    x, level, labels, _ = batch()
    assert torch.equal(net(x, level, labels), net(x, level))


def test_an_image_is_treated_alone():
    net = woken(tiny()).double()
    x, level, labels, conditions = (t.double() if t.is_floating_point() else t for t in batch())
    whole = net(x, level, labels, conditions)
    for i in range(len(x)):
        one = net(*(t[i : i + 1] for t in (x, level, labels, conditions)))
        torch.testing.assert_close(one, whole[i : i + 1])


def test_a_fresh_block_passes_its_input_on():
    torch.manual_seed(0)
    x, told = torch.randn(2, 8, 4, 4), torch.randn(2, 12)
    passed = UNetBlock(8, 8, 12)(x, told)
    torch.testing.assert_close(passed, x * 0.5**0.5, rtol=0.0, atol=1e-3)
    halved, doubled = (UNetBlock(8, 8, 12, resize=way) for way in ("halve", "double"))
    means = halved.shortcut(x.unflatten(3, (2, 2)).unflatten(2, (2, 2)).mean(dim=(3, 5)))
    torch.testing.assert_close(halved(x, told), means * 0.5**0.5, rtol=0.0, atol=1e-3)
    copies = doubled.shortcut(x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3))
    torch.testing.assert_close(doubled(x, told), copies * 0.5**0.5, rtol=0.0, atol=1e-3)


def test_attention_is_the_softmax_of_products_within_an_image():
    torch.manual_seed(0)
    x, layer = torch.randn(3, 8, 2, 4), Attention(8)
    nn.init.eye_(layer.out.weight)
    rows = layer.norm(x).flatten(2).mT
    query, key, value = layer.asked(rows).split(8, dim=-1)
    taken = (query @ key.mT / 8**0.5).softmax(dim=-1) @ value
    expected = (x + taken.mT.unflatten(2, (2, 4))) * 0.5**0.5
    torch.testing.assert_close(layer(x), expected)


def test_autocast_does_not_blur_the_noise_level():
    told = Embedding(16, None, 0)
    levels = torch.tensor([0.5, 0.5005])
    exact = told(levels)
    with torch.autocast("cpu", torch.bfloat16):
        found = told(levels)
    assert torch.equal(found, exact)
    assert not torch.equal(found[0], found[1])


def test_channels_last_maps_give_the_same():
    net = woken(tiny())
    x, *told = batch()
    expected = net(x, *told)
    found = net.to(memory_format=torch.channels_last)(
        x.contiguous(memory_format=torch.channels_last), *told
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_dropout_is_there_in_training_only():
    net = woken(tiny(dropout=0.5))
    given = batch()
    assert torch.equal(net(*given), net(*given))
    net.train()
    assert not torch.equal(net(*given), net(*given))


def test_groups_of_a_normalisation_are_at_most_32_of_at_least_4_maps():
    for width in (8, 64, 132):
        net = tiny(width=width)
        for norm in (m for m in net.modules() if isinstance(m, nn.GroupNorm)):
            assert norm.num_groups <= min(32, norm.num_channels // 4)
            assert norm.num_channels % norm.num_groups == 0
