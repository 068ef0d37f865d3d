"""What is observed at normalisation layers, against sums written out by hand."""

import pytest
import timm
import torch
from torch import nn

from sfumato.errors import UnsupportedLayer
from sfumato.models.observe import normalisation_layers, observed
from sfumato.models.zoo import MODELS, build_model


class Tokens(nn.Module):
    """Pixels as a sequence of tokens, with their channels last; then one vector an image."""

    def __init__(self, norm):
        super().__init__()
        self.embed = nn.Linear(3, 6)
        self.norm = norm(6)
        self.last = norm(6)

    def forward(self, x):
        tokens = self.norm(self.embed(x.flatten(2).transpose(1, 2)))
        return self.last(tokens.mean(dim=1))


def convolutions(norm):
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), norm(6), nn.ReLU(), nn.Conv2d(6, 10, 3, 2), norm(10),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(10, 3),
    )  # fmt: skip


def small_vit():
    return timm.models.VisionTransformer(
        img_size=32, patch_size=16, embed_dim=24, depth=2, num_heads=2, num_classes=3
    )


def small_convnext():
    return timm.models.ConvNeXt(in_chans=3, depths=(1, 1, 1, 1), dims=(6, 6, 10, 10), num_classes=3)


NETWORKS = {
    "group": lambda: convolutions(lambda c: nn.GroupNorm(2, c)),
    "batch": lambda: convolutions(nn.BatchNorm2d),
    "instance": lambda: convolutions(nn.InstanceNorm2d),
    "layer": lambda: Tokens(nn.LayerNorm),
    "rms": lambda: Tokens(nn.RMSNorm),
    "timm's rms": lambda: Tokens(timm.layers.RmsNorm),
    "timm's rms2d": lambda: convolutions(timm.layers.RmsNorm2d),
    "vit": small_vit,
    "convnext": small_convnext,
}


def images(n=4, side=32):
    return torch.randn(n, 3, side, side, generator=torch.Generator().manual_seed(0))


def network(kind):
    torch.manual_seed(1)
    return NETWORKS[kind]().eval()


def look(model, x):
    with observed(model) as found:
        model(x)
    return list(found)


def width(module):
    """How many channels a layer says it has."""
    for name in ("num_channels", "num_features", "normalized_shape"):
        if hasattr(module, name):
            value = getattr(module, name)
            return value if isinstance(value, int) else value[-1]
    raise AssertionError(module)


def by_hand(model, x):
    """Inputs of all normalisation layers in order of their calls, summed up image by image.

    The channels are on the only axis that is as long as the layer is wide.
    """
    seen = []

    def keep(module, inputs):
        (entered,) = inputs
        (axis,) = [i for i in range(1, entered.ndim) if entered.shape[i] == width(module)]
        rows = []
        for image in entered.double():
            channels = [image.select(axis - 1, c).flatten() for c in range(width(module))]
            means = [float(values.sum() / len(values)) for values in channels]
            squares = [float((values**2).sum() / len(values)) for values in channels]
            rows.append((means, squares))
        seen.append(torch.tensor(rows).transpose(0, 1))

    named = [m for m in model.modules() if "norm" in type(m).__name__.lower()]
    layers = [m for m in named if not list(m.children())]
    handles = [layer.register_forward_pre_hook(keep) for layer in layers]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("kind", NETWORKS)
def test_means_and_mean_squares_are_those_taken_by_hand(kind):
    model, x = network(kind), images(2)
    found, wanted = look(model, x), by_hand(model, x)
    assert len(found) == len(wanted) == len(normalisation_layers(model))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.detach(), other.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_row_depends_on_its_own_image_alone(kind):
    model, x = network(kind), images()
    changed = x.clone()
    changed[2] = 5 * torch.randn(x[2].shape) + 1
    others = torch.tensor([0, 1, 3])
    for before, after in zip(look(model, x), look(model, changed), strict=True):
        torch.testing.assert_close(before[:, others], after[:, others], rtol=1e-5, atol=1e-6)
        assert (before[:, 2] - after[:, 2]).abs().max() > 1e-3


def test_the_averages_are_what_a_batch_norm_records():
    model, x = network("batch"), images(7)
    means, squares = look(model, x)[0].mean(dim=1).detach()
    norm = nn.BatchNorm2d(6, momentum=1.0)
    entered = model[0](x)
    norm(entered)
    positions = entered[:, 0].numel()
    variances = norm.running_var * (positions - 1) / positions
    torch.testing.assert_close(means, norm.running_mean, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(squares - means.square(), variances, rtol=1e-4, atol=1e-6)


def test_a_layer_that_is_called_twice_adds_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.GroupNorm(1, 3)

        def forward(self, x):
            return self.norm(2 * self.norm(x) + 1)

    first, second = look(Twice(), images())
    torch.testing.assert_close(first[0], images().mean(dim=(2, 3)))
    assert float(second[0].detach().mean()) == pytest.approx(1.0, abs=1e-4)


def test_every_pass_adds_until_the_list_is_emptied():
    model = network("group")
    with observed(model) as found:
        model(images())
        model(images())
        assert len(found) == 4
        found.clear()
        model(images(2))
    assert [pair.shape for pair in found] == [(2, 2, 6), (2, 2, 10)]


class Windows(nn.Module):
    """Quarters of an image, each normalised as if it were one."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.GroupNorm(1, 3))

    def forward(self, x):
        return self.inner(torch.cat(x.chunk(4, dim=3)))


def test_a_layer_that_sees_other_rows_than_images_is_refused_by_its_path():
    with pytest.raises(UnsupportedLayer, match=r'"inner\.0" sees 16 rows for 4 images.*--k 0'):
        look(Windows(), images())


def hooks(model):
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def test_no_hook_is_left_behind_also_after_an_error():
    model = network("group")
    look(model, images())
    assert hooks(model) == 0
    broken = Windows()
    with pytest.raises(UnsupportedLayer):
        look(broken, images())
    assert hooks(broken) == 0
    broken(images())


def test_gradients_flow_to_the_pixels():
    model, x = network("group"), images(2).requires_grad_()
    first, second = look(model, x)
    (first[1].sum() + second[0].sum()).backward()
    other = images(2).requires_grad_()
    entered = model[0](other)
    further = model[3](model[2](model[1](entered)))
    (entered.square().mean(dim=(2, 3)).sum() + further.mean(dim=(2, 3)).sum()).backward()
    torch.testing.assert_close(x.grad, other.grad)


def test_the_numbers_are_float32_also_in_half_precision():
    model = network("group")
    with torch.autocast("cpu", torch.bfloat16):
        found = look(model, images())
    assert {pair.dtype for pair in found} == {torch.float32}


def test_the_answers_of_a_model_are_the_same_while_it_is_observed():
    model = network("vit")
    with observed(model), torch.no_grad():
        watched = model(images())
    assert torch.equal(watched, model(images()).detach())


@pytest.mark.parametrize("name", MODELS)
def test_our_own_models_can_be_looked_into_or_have_no_layer(name):
    model = build_model(name, classes=3, shape=(1, 32, 32)).eval()
    with observed(model) as found, torch.no_grad():
        model(torch.randn(2, 1, 32, 32))
    assert len(found) == len(normalisation_layers(model))
    assert bool(found) == (name not in ("tanh-cnn", "vgg-tiny"))


def test_the_small_residual_network_is_the_published_teacher():
    # 11.17 million weights, 20 layers with 4,800 channels in all: 9,600 moments.
    model = build_model("resnet18-small", classes=10, shape=(3, 32, 32))
    layers = normalisation_layers(model).values()
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(11.17e6, rel=1e-3)
    assert (len(layers), sum(width(layer) for layer in layers)) == (20, 4800)


@pytest.mark.parametrize(("name", "weights"), [("group-cnn", 71_000), ("group-cnn-small", 17_000)])
def test_the_plain_networks_are_as_small_as_they_say(name, weights):
    model = build_model(name, classes=10, shape=(1, 28, 28))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(weights, rel=0.02)
    assert all(isinstance(m, nn.GroupNorm) for m in normalisation_layers(model).values())
