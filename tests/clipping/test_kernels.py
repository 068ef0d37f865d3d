"""Kernels do what the torch expressions do: here in Triton's interpreter, and on a GPU for real."""

import pytest
import torch
from oracle import norm_of
from samples import few, sampled
from torch import nn

pytest.importorskip("triton", reason="Triton is for Linux")

from sfumato.clipping import arithmetic, gpu_kernels, grams, layer_algebra, standardised
from sfumato.clipping.clip import GradientClipper
from sfumato.clipping.factors import Clipping
from sfumato.clipping.geometry import LINEAR, WeightGeometry
from sfumato.clipping.kernels import conv_norms, convolution
from sfumato.clipping.kernels.conv_norms import conv_ghost_norm
from sfumato.clipping.kernels.convolution import conv_gradients, conv_total
from sfumato.clipping.kernels.ghost import scaled
from sfumato.clipping.method_choice import MODES, choose_methods
from sfumato.clipping.param_use import ParamUse
from sfumato.models.wrn import StandardisedConv2d

CASES = {
    "few channels": (5, 8, 6, 3, 1, 1, 1, 1, 1),
    "few channels, views": (3, 9, 5, 5, 2, 2, 1, 1, 3),
    "few channels, groups": (8, 12, 4, 3, 1, 1, 1, 4, 2),
    "a line of taps": (16, 8, 5, 3, 1, 1, 1, 1, 2),
    "a line of taps, strided and dilated": (24, 8, 9, 3, 2, 2, 2, 1, 1),
    "askew": (17, 9, 5, 3, 1, 1, 1, 1, 1),
    "1x1, strided": (24, 8, 6, 1, 2, 0, 1, 1, 1),
    "several tiles": (136, 40, 3, 2, 1, 1, 1, 1, 1),
    "groups": (32, 48, 4, 3, 1, 1, 1, 2, 1),
    "one pixel": (16, 8, 1, 3, 1, 1, 1, 1, 1),
    "more positions than a tile": (16, 8, 12, 3, 1, 0, 1, 1, 1),
    "depthwise": (20, 20, 6, 5, 1, 2, 1, 20, 2),
    "depthwise, twice as many outputs": (8, 16, 7, 3, 2, 1, 1, 8, 1),
    "depthwise, several tiles": (72, 72, 3, 3, 1, 2, 2, 72, 1),
    "depthwise, more lines than a tile": (128, 128, 3, 7, 1, 3, 1, 128, 1),
    "depthwise, askew": (9, 27, 4, 3, 1, 1, 1, 9, 2),
    "depthwise, one line of taps": (8, 8, 9, (1, 7), 1, (0, 3), 1, 8, 2),
    "depthwise, one column of taps": (8, 8, 9, (7, 1), (2, 1), (3, 0), 1, 8, 1),
    "depthwise, many taps": (8, 8, 5, (9, 11), 1, (4, 5), 1, 8, 1),
    "depthwise, strides beyond the taps": (8, 16, 7, (3, 2), (1, 3), (2, 1), 1, 8, 1),
    "depthwise, pixels left over": (8, 8, 7, 3, 2, 0, 1, 8, 1),
    "depthwise, taps far apart": (8, 8, 6, 3, (2, 2), (3, 4), (2, 3), 8, 2),
    "depthwise, taps further apart than outputs": (8, 8, 4, (1, 2), 1, 0, (1, 4), 8, 1),
    "depthwise, one pixel": (8, 8, (1, 1), 3, 1, 1, 1, 8, 1),
}
"""Channels, outputs, height, kernel, stride, padding, dilation, groups, views."""

GHOSTLY = [
    "few channels, views", "a line of taps", "a line of taps, strided and dilated", "askew",
    "groups", "one pixel", "depthwise, twice as many outputs",
]  # fmt: skip
DTYPES = [torch.bfloat16, torch.float32]
TYPED = [(case, torch.bfloat16) for case in CASES]
TYPED += [(case, torch.float32) for case in ("few channels", "a line of taps", "depthwise")]

SMALL = {
    "one position": (321, 1, 24, 16, (1, 1), (3, 3), (1, 1), (1, 1), (1, 1)),
    "one position, more channels": (311, 1, 136, 24, (1, 1), (3, 3), (1, 1), (1, 1), (1, 1)),
    "taps beyond the image": (79, 1, 72, 8, (2, 2), (3, 3), (1, 1), (3, 3), (3, 3)),
    "four positions": (81, 1, 16, 40, (4, 4), (3, 3), (2, 2), (1, 1), (1, 1)),
    "1x1, strided": (53, 1, 24, 16, (5, 4), (1, 1), (2, 2), (0, 0), (1, 1)),
    "nine, askew": (35, 1, 17, 9, (3, 3), (3, 3), (1, 1), (1, 1), (1, 1)),
    "sixteen, views": (11, 2, 16, 24, (4, 4), (3, 3), (1, 1), (1, 1), (1, 1)),
    "49, dilated": (7, 1, 80, 8, (7, 7), (3, 3), (1, 1), (2, 2), (2, 2)),
    "few channels": (53, 1, 5, 8, (2, 3), (3, 3), (1, 1), (1, 1), (1, 1)),
    "sides that differ": (9, 2, 16, 8, (4, 11), (2, 3), (1, 2), (1, 0), (2, 1)),
}
"""Examples, views, channels, outputs, then pairs: sides, kernel, stride, padding, dilation."""

SHARED = [
    ((1, 1), 1, 1, 1), ((1, 1), 1, 2, 1), ((1, 3), 2, 1, 1), ((4, 3), 1, 1, 2), ((2, 2), 2, 2, 1),
    ((3, 3), 1, 1, 1),
]  # fmt: skip
"""Sides, groups, views, stride."""

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXAMPLES = 3
LOOSE = DEVICE == "cuda" and torch.backends.cudnn.allow_tf32


def layer(case, dtype, layout=torch.channels_last):
    channels, outputs, height, kernel, stride, padding, dilation, groups, views = CASES[case]
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    size = height if isinstance(height, tuple) else (height, height + 1)
    x = draw(EXAMPLES * views, channels, *size).contiguous(memory_format=layout)
    kernel, stride, padding, dilation = (
        n if isinstance(n, tuple) else (n, n) for n in (kernel, stride, padding, dilation)
    )
    weight = draw(outputs, channels // groups, *kernel)
    geometry = WeightGeometry(stride, padding, dilation, False, (0, 0), groups)
    g = draw(*layer_algebra.output_shape(x, weight, geometry)).contiguous(memory_format=layout)
    return x, g, weight, geometry


def true_gradients(x, g, weight, geometry):
    """In float64, by columns."""
    columns = layer_algebra.columns(x.cpu().double(), g.cpu().double(), weight, geometry, EXAMPLES)
    return layer_algebra.per_example_gradient(*columns).reshape(EXAMPLES, *weight.shape).to(DEVICE)


def assert_near(found, wanted, relative):
    assert found.dtype == torch.float32
    assert found.shape == wanted.shape
    assert float((found - wanted).norm()) <= relative * float(wanted.norm())


@sampled(typed=TYPED, summed=[False, True])
def test_gradients_of_a_convolution_and_their_total(typed, summed, monkeypatch):
    monkeypatch.setattr(convolution, "SHARE", 40)
    x, g, weight, geometry = layer(*typed)
    settings, wanted = (
        gpu_kernels.settings(weight, geometry),
        true_gradients(x, g, weight, geometry),
    )
    found = conv_total(x, g, *settings) if summed else conv_gradients(x, g, *settings, EXAMPLES)
    loose = LOOSE and typed[1] == torch.float32
    assert_near(found, wanted.sum(dim=0) if summed else wanted, 1e-3 if loose else 1e-6)


@pytest.mark.parametrize("case", ["few channels", "a line of taps", "depthwise"])
def test_channels_that_do_not_come_last_are_no_matter(case):
    x, g, weight, geometry = layer(case, torch.float32, torch.contiguous_format)
    found = conv_gradients(x, g, *gpu_kernels.settings(weight, geometry), EXAMPLES)
    assert_near(found, true_gradients(x, g, weight, geometry), 1e-3 if LOOSE else 1e-6)


@pytest.mark.parametrize("over", ["strides beyond the taps", "pixels left over"])
def test_pixels_that_no_tap_meets_may_be_anything(over):
    x, g, weight, geometry = layer(f"depthwise, {over}", torch.float32)
    wanted = true_gradients(x, g, weight, geometry)
    seen = torch.zeros_like(x, requires_grad=True)
    way = (geometry.stride, geometry.padding, geometry.dilation, geometry.groups)
    out = nn.functional.conv2d(seen, weight.abs(), None, *way)
    (met,) = torch.autograd.grad(out, seen, g.abs())
    assert not met.all()
    x[met == 0] = torch.nan
    found = conv_gradients(x, g, *gpu_kernels.settings(weight, geometry), EXAMPLES)
    assert_near(found, wanted, 1e-6)


def test_an_empty_batch_has_no_depthwise_gradients_and_a_sum_of_zero():
    x, g, weight, geometry = layer("depthwise, one pixel", torch.float32)
    x, g, settings = x[:0], g[:0], gpu_kernels.settings(weight, geometry)
    assert conv_gradients(x, g, *settings, 0).shape == (0, *weight.shape)
    assert not conv_total(x, g, *settings).any()


@sampled(case=SMALL, dtype=DTYPES)
def test_the_positions_of_small_images_follow_each_other(case, dtype, monkeypatch):
    monkeypatch.setattr(convolution, "SHARE", 150)  # two shares, of several steps
    examples, views, channels, outputs, sides, kernel, stride, padding, dilation = SMALL[case]
    generator = torch.Generator().manual_seed(0)
    geometry = WeightGeometry(stride, padding, dilation, False, (0, 0))
    weight = torch.empty(outputs, channels, *kernel)
    x = torch.randn(examples * views, channels, *sides, generator=generator).to(dtype)
    g = torch.randn(layer_algebra.output_shape(x, weight, geometry), generator=generator).to(dtype)
    # Powers of two: nothing is rounded.
    factors = 0.5 ** torch.randint(4, (examples,), generator=generator)
    factors[1] = 0.0
    each = factors.double().repeat_interleave(views)[:, None, None, None]
    wanted = torch.ops.aten.convolution_backward(
        each * g.double(), x.double(), weight.double(), None, *geometry, [False, True, False]
    )[1]
    x, g, factors = (t.to(DEVICE) for t in (x, g, factors))
    found = gpu_kernels.kernel_weighted_gradient(x, g, factors, weight, geometry)
    assert_near(found, wanted.to(DEVICE), 1e-3 if LOOSE and dtype == torch.float32 else 1e-6)


@few(("case", "dtype"), [(c, d) for c, d in TYPED if c in GHOSTLY])
def test_ghost_norms_of_a_convolution(case, dtype, monkeypatch):
    # Small tiles, so that there are several even of few positions.
    monkeypatch.setattr(conv_norms, "SIDE", 32)
    x, g, weight, geometry = layer(case, dtype)
    found, _ = conv_ghost_norm(x, g, *gpu_kernels.settings(weight, geometry), EXAMPLES)
    wanted = true_gradients(x, g, weight, geometry).flatten(1).square().sum(dim=1)
    loose = LOOSE and dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=2e-3 if loose else 2e-5, atol=0.0)
    assert loose or (found >= wanted * (1 - 1e-6)).all()


@sampled(shape=SHARED, dtype=DTYPES)
def test_examples_that_share_a_tile_have_norms_of_their_own(shape, dtype):
    sides, groups, views, stride = shape
    examples, generator = 19, torch.Generator().manual_seed(0)
    geometry = WeightGeometry((stride, stride), (1, 1), (1, 1), False, (0, 0), groups)
    weight = torch.empty(24, 48 // groups, 3, 3)
    x = torch.randn(examples * views, 48, *sides, generator=generator).to(dtype)
    g = torch.randn(layer_algebra.output_shape(x, weight, geometry), generator=generator).to(dtype)
    a, b = layer_algebra.columns(x.double(), g.double(), weight, geometry, examples)
    wanted = torch.stack([
        layer_algebra.per_example_gradient(a, b).flatten(1).square().sum(dim=1),
        (a.norm(dim=2) * b.norm(dim=2)).flatten(1).sum(dim=1),
    ])  # fmt: skip
    x.unflatten(0, (examples, -1))[1] = torch.nan
    settings = gpu_kernels.settings(weight, geometry)
    found = conv_ghost_norm(x.to(DEVICE), g.to(DEVICE), *settings, examples).cpu()
    assert not found[0, 1].isfinite()
    sound = torch.arange(examples) != 1
    relative = 2e-3 if LOOSE and dtype == torch.float32 else 2e-5
    torch.testing.assert_close(found[:, sound].double(), wanted[:, sound], rtol=relative, atol=0.0)


@pytest.mark.parametrize("kernel", [1, 3])
def test_pixels_that_are_almost_alike_stay_within_the_bound(kernel):
    # Pixels 1 % apart and output gradients that add up to nothing: Gram products cancel.
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(EXAMPLES, 32, 1, 1, generator=generator)
    x = base + 0.01 * torch.randn(EXAMPLES, 32, 7, 7, generator=generator)
    g = torch.randn(EXAMPLES, 16, 7, 7, generator=generator)
    g = g - g.mean(dim=(2, 3), keepdim=True)
    x, g = (t.to(DEVICE, torch.bfloat16) for t in (x, g))
    weight, edge = torch.zeros(16, 32, kernel, kernel), kernel // 2
    geometry = WeightGeometry((1, 1), (edge, edge), (1, 1))
    found, lengths = conv_ghost_norm(x, g, *gpu_kernels.settings(weight, geometry), EXAMPLES)
    a, b = layer_algebra.columns(x.cpu().double(), g.cpu().double(), weight, geometry, EXAMPLES)
    truth = (b @ a.mT).flatten(1).norm(dim=1)
    ratio = found.cpu().double().sqrt() / truth
    assert (ratio >= 1 - 1e-5).all()
    # What is added for rounding is what the torch expression adds.
    alike, _ = grams.ghost_norm(x.cpu().float(), g.cpu().float(), weight, geometry, EXAMPLES)
    torch.testing.assert_close(found.cpu().sqrt(), alike.sqrt(), rtol=1e-3, atol=0.0)
    # Output gradients are rounded after scaling, and then do not cancel: lengths say by how much.
    above = truth + 2.0**-8 * lengths.cpu()
    for i in range(EXAMPLES):
        factors = 0.83 * (torch.arange(EXAMPLES, device=DEVICE) == i)
        rounded = scaled(g.movedim(1, -1), factors).movedim(-1, 1)
        total = conv_total(x, rounded, *gpu_kernels.settings(weight, geometry))
        assert float(total.double().norm()) <= 0.83 * float(above[i]) * (1 + 1e-5)


@pytest.mark.parametrize(("views", "mode"), [(1, "ghost"), (2, "non-ghost")])
def test_the_engine_gives_the_same_numbers_with_the_kernels(views, mode, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(
        StandardisedConv2d(3, 16, 3), nn.GELU(), nn.Conv2d(16, 16, 3, stride=2, padding=1),
        nn.GELU(), nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.GELU(), nn.Conv2d(16, 6, 2, 2),
        nn.GELU(), nn.Conv2d(6, 5, 1), nn.GELU(), nn.Flatten(2), nn.Linear(4, 3),
    )  # fmt: skip

    def losses(m, x):
        return m(x).unflatten(0, (-1, views)).square().mean(dim=(1, 2, 3))

    x, used = torch.randn(2 * views, 3, 10, 10), []
    wanted = GradientClipper(model, mode).clip(losses, (x,), 2)

    def everywhere(x, geometry):
        used.append(1)
        return geometry.is_linear or len(geometry.stride) == 2

    monkeypatch.setattr(gpu_kernels, "supports", everywhere)
    found = GradientClipper(model, mode).clip(losses, (x,), 2)
    assert used
    torch.testing.assert_close(found.norms, wanted.norms, rtol=1e-5, atol=1e-6)
    for name, total in wanted.total.items():
        torch.testing.assert_close(found.total[name], total, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_clipped_sums_in_bf16_on_a_gpu_stay_within_the_bound(mode):
    torch.manual_seed(0)
    model = nn.Sequential(
        StandardisedConv2d(3, 32, 3, padding=1), nn.GELU(), nn.Conv2d(32, 64, 3, stride=2),
        nn.GELU(), nn.Conv2d(64, 64, 7, padding=3, groups=64), nn.GELU(), nn.Conv2d(64, 136, 1),
        nn.GELU(), nn.Conv2d(136, 40, 3, padding=1), nn.Flatten(), nn.Linear(40 * 49, 5),
    )  # fmt: skip
    model = model.to(DEVICE).to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 15, 15, device=DEVICE) + 3
    clipper = GradientClipper(model, mode, clipping=Clipping(max_norm=1e-3))

    def losses(m, x):
        with torch.autocast(DEVICE, torch.bfloat16):
            return m(x).float().square().sum(dim=1)

    for i in range(4):
        total = clipper.clip(losses, (x,), 4, torch.arange(4, device=DEVICE) == i).total
        norm = norm_of(total)
        assert 0.97e-3 < norm <= 1e-3


@pytest.mark.parametrize(
    ("positions", "inputs", "outputs", "method"),
    [
        (56 * 56, 9 * 64, 64, "store"),
        (14 * 14, 9 * 256, 256, "ghost"),
        (7 * 7, 9 * 512, 512, "ghost"),
        (7 * 7, 49, 1, "store"),
        (197, 768, 3072, "ghost"),
        (16 * 64, 9 * 256, 256, "store"),
    ],
)
def test_on_a_gpu_layers_store_what_is_smaller_than_their_gram_matrices(
    positions, inputs, outputs, method
):
    sizes = {"positions": positions, "inputs": inputs, "outputs": outputs}
    part = ParamUse("w", "w", (outputs, inputs), "product", on_gpu=True, **sizes)
    choose_methods([part], "ghost_mixed")
    assert part.method == method


def test_layers_that_are_matrices_are_told_from_those_that_are_not():
    x, linear, patch = torch.empty(2, 4, 6, 6), torch.empty(8, 4), torch.empty(8, 4, 2, 2)
    assert gpu_kernels.is_matrix(x[:, 0], linear, LINEAR)
    assert gpu_kernels.is_matrix(x, patch, WeightGeometry((2, 2), (0, 0), (1, 1)))
    for geometry in (((1, 1), (0, 0), (1, 1)), ((2, 2), (1, 1), (1, 1)), ((2, 2), (0, 0), (2, 2))):
        assert not gpu_kernels.is_matrix(x, patch, WeightGeometry(*geometry))
    wide, whole = torch.empty(8, 2, 3, 3), torch.empty(8, 4, 6, 6)
    assert not gpu_kernels.is_matrix(x, wide, WeightGeometry((3, 3), (0, 0), (1, 1), groups=2))
    assert gpu_kernels.is_matrix(x, whole, WeightGeometry((1, 1), (0, 0), (1, 1)))
    assert not gpu_kernels.is_matrix(x, whole, WeightGeometry((1, 1), (1, 1), (1, 1)))


def test_a_kernel_as_large_as_the_image_is_a_matrix_on_it():
    x, g, factors = torch.randn(3, 4, 5, 6), torch.randn(3, 7, 1, 1), torch.rand(3)
    weight, geometry = (
        torch.empty(7, 4, 5, 6),
        WeightGeometry((2, 2), (0, 0), (1, 1), False, (0, 0)),
    )
    wanted = torch.einsum("n,np,nchw->npchw", torch.ones(3), g.flatten(1), x)
    torch.testing.assert_close(gpu_kernels.kernel_gradients(x, g, weight, geometry, 3), wanted)
    total = gpu_kernels.kernel_weighted_gradient(x, g, factors, weight, geometry)
    torch.testing.assert_close(total, torch.einsum("n,n...->...", factors, wanted))


@pytest.mark.parametrize("channels", [4, 16])
@pytest.mark.parametrize("operation", [conv_gradients, conv_total, conv_ghost_norm])
def test_the_kernels_are_known_to_the_compiler(operation, channels):
    x, g = torch.randn(2, channels, 4, 4), torch.randn(2, channels, 4, 4)
    groups = 4 if channels == 4 else 1
    settings = ([3, 3], [1, 1], [1, 1], [1, 1], groups)
    last = () if operation is conv_total else (2,)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(operation, (x, g, *settings, *last), test_utils=checks)


def test_norms_and_sums_do_not_depend_on_how_a_gradient_lies_in_memory():
    weight, factors = torch.randn(6, 4, 3, 3), torch.rand(5)
    gradient = torch.randn(5, 6, 4, 3, 3)
    moved = gradient.movedim(2, -1).contiguous().movedim(-1, 2)
    for norm in (
        arithmetic.square_norm,
        lambda v: standardised.standardised_square_norm(v, weight, 1e-10),
    ):
        torch.testing.assert_close(norm(moved), norm(gradient))
    wanted = torch.einsum("n,npchw->pchw", factors, gradient)
    for lying in (gradient, moved):
        torch.testing.assert_close(arithmetic.weighted_sum(lying, factors), wanted)
