"""Kernels that normalise, against float64 autograd asked for one example at a time.

In Triton's interpreter, and on a GPU for real.
"""

import pytest
import torch
import torch.nn.functional as F
from oracle import compare, norms_of
from samples import sampled
from torch import nn

pytest.importorskip("triton", reason="Triton is for Linux")

from sfumato.clipping import normalisation_functions
from sfumato.clipping.admit import one_at_a_time
from sfumato.clipping.clip import GradientClipper
from sfumato.clipping.kernels.group_norm_backward import channel_sums, group_norm_backward
from sfumato.clipping.kernels.group_norm_forward import group_norm_forward
from sfumato.clipping.kernels.layer_norm import layer_norm_backward, layer_norm_forward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16]
# What float32 can know of numbers around 1000 with deviation 1: their mean to 3e-5.
FAR = {0.0: 1e-5, 1000.0: 2e-4}
# Of what is written in bfloat16: the interpreter cuts bits off, where a GPU rounds to the nearest.
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-7}
AFFINES = [(True, True), (True, False), (False, True), (False, False)]


def cases(table):
    """Every case with scale and shift, and one of them without."""
    some = list(table)[1]
    pairs = [(case, AFFINES[0]) for case in table] + [(some, affine) for affine in AFFINES[1:]]
    return sampled(case=pairs, centre=FAR, dtype=DTYPES)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def draw(*shape, dtype=torch.float32, centre=0.0):
    # Each channel and each example has its own mean and deviation.
    own = torch.rand(shape[0], shape[1], *[1] * (len(shape) - 2))
    values = torch.randn(shape) * (0.5 + own) + own
    if centre and dtype == torch.bfloat16:
        values *= 16  # around 1000 it counts in fours: smaller differences would round to none
    return (values + centre).to(DEVICE, dtype)


def parameters(size, affine):
    return [torch.randn(size, device=DEVICE) if wanted else None for wanted in affine]


def close(found, wanted, error):
    """Each example by itself, in relation to its own length."""
    assert torch.isfinite(found).all()
    apart = (found.double() - wanted).flatten(1).norm(dim=1)
    assert (apart <= error * wanted.flatten(1).norm(dim=1) + 1e-12).all(), apart


def oracle(normalise, x, g, examples):
    """Output, gradient of x, and the gradients of a scale and a shift, one example at a time."""
    out, grad, by_weight, by_bias = [], [], [], []
    for some, above in zip(x.double().chunk(examples), g.double().chunk(examples), strict=True):
        some = some.clone().requires_grad_()
        y, scale, shift = normalise(some)
        found = torch.autograd.grad(y, (some, scale, shift), above)
        for kept, one in zip((out, grad, by_weight, by_bias), (y.detach(), *found), strict=True):
            kept.append(one)
    return torch.cat(out), torch.cat(grad), torch.stack(by_weight), torch.stack(by_bias)


def trainable(parameter, size, otherwise):
    """A scale or shift to differentiate by, also where the layer has none."""
    plain = torch.full((size,), otherwise, dtype=torch.float64, device=DEVICE)
    return (plain if parameter is None else parameter.double()).requires_grad_()


ROWS = {
    "one row an example": (3, 1, 24),
    "tokens": (3, 21, 48),
    "several chunks, the last ragged": (2, 300, 100),
    "one number in a row more than a tile": (2, 5, 129),
    "wide rows": (2, 3, 4100),
}
"""Examples, rows of each, numbers in a row."""


@cases(ROWS)
def test_layer_norm_and_its_sums_match_one_example_at_a_time(case, centre, dtype):
    (name, affine), error = case, FAR[centre]
    examples, rows, width = ROWS[name]
    x = draw(examples, rows, width, dtype=dtype, centre=centre)
    g = torch.randn(examples, rows, width, device=DEVICE)
    weight, bias = parameters(width, affine)

    def normalise(some):
        scale, shift = trainable(weight, width, 1.0), trainable(bias, width, 0.0)
        return F.layer_norm(some, (width,), scale, shift), scale, shift

    out, grad, by_weight, by_bias = oracle(normalise, x, g, examples)
    found, mean, scale = layer_norm_forward(x, weight, bias, width, 1e-5)
    close(found, out, error)
    grad_x, sums = layer_norm_backward(g, x, mean, scale, weight, width, examples)
    assert grad_x.dtype == x.dtype
    assert sums.dtype == torch.float32
    close(grad_x, grad, max(error, ROUNDING[dtype]))
    close(sums[0], by_weight, error)
    close(sums[1], by_bias, 1e-5)


MAPS = {
    "groups of one channel": (4, 6, 6, (5, 4)),
    "groups of three": (2, 24, 8, (7, 7)),
    "one group": (3, 20, 1, (4, 4)),
    "groups of eight, one position": (4, 32, 4, (1, 1)),
    "vectors": (4, 24, 4, ()),
    "a line": (3, 10, 5, (33,)),
    "volumes": (2, 6, 2, (3, 4, 5)),
    "several chunks, the last ragged": (2, 6, 3, (47, 47)),
    "more chunks than a tile": (1, 250, 25, (47, 46)),
    "several blocks of channels": (2, 300, 3, (5, 5)),
    "a group wider than a tile": (1, 4100, 1, (2, 3)),
}
"""Rows, channels, groups, sizes of a map."""


def maps(case, **options):
    rows, channels, groups, sizes = MAPS[case]
    x = draw(rows, channels, *sizes, **options).movedim(1, -1).contiguous().movedim(-1, 1)
    return x, torch.randn(rows, channels, *sizes, device=DEVICE), groups


@cases(MAPS)
def test_group_norm_and_its_sums_match_one_row_at_a_time(case, centre, dtype):
    (name, affine), error = case, FAR[centre]
    x, g, groups = maps(name, dtype=dtype, centre=centre)
    rows, channels = x.shape[:2]
    weight, bias = parameters(channels, affine)

    def normalise(some):
        scale, shift = trainable(weight, channels, 1.0), trainable(bias, channels, 0.0)
        return F.group_norm(some, groups, scale, shift), scale, shift

    out, grad, by_weight, by_bias = oracle(normalise, x, g, rows)
    found, mean, scale = group_norm_forward(x, weight, bias, groups, 1e-5)
    assert found.movedim(1, -1).is_contiguous()
    close(found, out, error)
    grad_x, sums = group_norm_backward(g, x, mean, scale, weight)
    assert grad_x.dtype == x.dtype
    assert grad_x.movedim(1, -1).is_contiguous()
    close(grad_x, grad, max(error, ROUNDING[dtype]))
    close(sums[0], by_weight, error)
    close(sums[1], by_bias, 1e-5)


@sampled(case=MAPS, dtype=DTYPES)
def test_sums_for_fixed_statistics_match_one_row_at_a_time(case, dtype):
    x, g, _ = maps(case, dtype=dtype, centre=3.0)
    mean, scale = torch.randn(x.shape[1], device=DEVICE), torch.rand(x.shape[1], device=DEVICE)
    shape = (-1, *[1] * (x.ndim - 2))
    normal = (x.double() - mean.reshape(shape)) * scale.reshape(shape)
    for found, values in zip(channel_sums(g, x, mean, scale), (g * normal, g), strict=True):
        close(found, values.double().flatten(2).sum(2) if x.ndim > 2 else values.double(), 1e-5)


def test_no_position_of_a_real_map_is_left_out():
    # What a chunk or a lane loses shows only where there are many: 112 x 112 places, as in ResNet.
    x = torch.full((1, 8, 112, 112), 7.0, device=DEVICE).to(memory_format=torch.channels_last)
    g = torch.ones_like(x)
    ones, zeros = torch.ones(8, device=DEVICE), torch.zeros(8, device=DEVICE)
    by_weight, by_bias = channel_sums(g, x, zeros, ones)
    assert (by_weight == 7.0 * 112 * 112).all()
    assert (by_bias == 112 * 112).all()
    _, mean, _ = group_norm_forward(x, None, None, 2, 1e-5)
    assert (mean == 7.0).all()


def test_a_batch_gives_the_same_bits_again():
    x, g, groups = maps("several chunks, the last ragged")
    once, again = (
        group_norm_backward(g, x, *group_norm_forward(x, None, None, groups, 1e-5)[1:], None)
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def frozen(module, *names):
    for name in names:
        getattr(module, name).requires_grad_(False)
    return module


def network(dtype=torch.float32):
    norm = nn.BatchNorm2d(12).eval()
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    layers = [
        nn.Conv2d(3, 12, 3), nn.GroupNorm(4, 12), nn.CELU(inplace=True), nn.Conv2d(12, 12, 3), norm,
        nn.CELU(inplace=True),
        frozen(nn.GroupNorm(2, 12), "weight"), frozen(nn.GroupNorm(3, 12), "bias"),
        nn.Flatten(2), nn.LayerNorm(16), frozen(nn.LayerNorm([12, 16]), "weight"), nn.Tanh(),
        nn.LayerNorm(16, bias=False), nn.LayerNorm(16, elementwise_affine=False), nn.Linear(16, 3),
    ]  # fmt: skip
    return nn.Sequential(*layers).to(DEVICE, dtype, memory_format=torch.channels_last)


def losses_of(views):
    def losses(model, x):
        out = model(x).float().flatten(1)
        return (out.sin() + 0.1 * out.square()).sum(dim=1).unflatten(0, (-1, views)).sum(dim=1)

    return losses


def images(count):
    return torch.randn(count, 3, 8, 8).to(DEVICE, memory_format=torch.channels_last)


def with_kernels(monkeypatch):
    """Kernels in the interpreter too; returns the types of what they read, to come."""
    used = []

    def everywhere(x):
        used.append(x.dtype)
        return x.dtype in normalisation_functions.NARROW

    monkeypatch.setattr(normalisation_functions, "has_kernel", everywhere)
    return used


def test_the_engine_gives_exact_norms_and_sums_with_the_kernels(monkeypatch):
    views = 2
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model, x, losses = network(), images(4 * views), losses_of(views)
    exact = network().double()
    exact.load_state_dict(model.state_dict())
    rows = one_at_a_time(exact, losses, (x.double(),))
    used = with_kernels(monkeypatch)
    found = GradientClipper(model).clip(losses, (x,), 4)
    assert len(used) > 6
    torch.testing.assert_close(found.norms.double(), norms_of(rows), rtol=1e-5, atol=0)
    for name, total in found.total.items():
        factors = found.factors[0].double()
        wanted = sum(f * row[name] for f, row in zip(factors, rows, strict=True))
        assert (total - wanted).norm() <= 1e-5 * wanted.norm() + 1e-6, name


def test_under_autocast_the_kernels_read_what_was_rounded(monkeypatch):
    model, x = network(), images(4)

    def losses(model, x):
        with torch.autocast(DEVICE, torch.bfloat16):
            return losses_of(1)(model, x)

    monkeypatch.setattr(normalisation_functions, "has_kernel", lambda x: False)
    wanted = GradientClipper(model).clip(losses, (x,), 4)
    used = with_kernels(monkeypatch)
    found = GradientClipper(model).clip(losses, (x,), 4)
    assert torch.bfloat16 in used
    # The same rounded tensors, but sums in another order may round an output to its neighbour.
    torch.testing.assert_close(found.norms, wanted.norms, rtol=1e-2, atol=0)
    torch.testing.assert_close(found.losses, wanted.losses, rtol=1e-2, atol=0)


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("layer", [nn.GroupNorm(2, 8), nn.LayerNorm(8)])
def test_a_rounded_input_is_kept_as_it_is(layer, kernels, monkeypatch):
    layer.to(DEVICE)
    if kernels:
        with_kernels(monkeypatch)
    kept, x = [], torch.randn(4, 8, 8, 8).to(DEVICE, memory_format=torch.channels_last)

    def losses(model, x):
        with torch.autocast(DEVICE, torch.bfloat16):
            return model(x.bfloat16()).flatten(1).sum(dim=1)

    clipper = GradientClipper(layer)
    wanted = clipper.clip(losses, (x,), 4)

    def note(tensor):
        kept.append((tensor.numel(), tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        found = clipper.clip(losses, (x,), 4)
    assert (x.numel(), torch.bfloat16) in kept
    assert (x.numel(), torch.float32) not in kept
    assert torch.equal(found.norms, wanted.norms)


COMPILED = {
    "maps": lambda: (nn.Conv2d(4, 6, 3), nn.GroupNorm(2, 6)),
    "maps, shift alone": lambda: (nn.Conv2d(4, 6, 3), frozen(nn.GroupNorm(6, 6), "weight")),
    "vectors": lambda: (nn.Flatten(), nn.Linear(80, 6), nn.GroupNorm(2, 6)),
}
"""Another layer comes first, to which the gradient of the input matters."""


@pytest.mark.parametrize("case", COMPILED)
def test_the_expressions_for_a_compiler_are_exact(case, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    x = torch.randn(3, 4, 5, 4, dtype=torch.float64).to(memory_format=torch.channels_last)
    compare(nn.Sequential(*COMPILED[case]()).double(), x, 3)


def test_the_expressions_for_a_compiler_leave_channels_last():
    x = torch.randn(2, 6, 5, 4).to(memory_format=torch.channels_last)
    out, mean, scale = normalisation_functions._normalised_groups(
        x, torch.ones(6), torch.ones(6), 3, 1e-5
    )
    grad_x, *_ = normalisation_functions._group_backward_compiled(
        out, x, mean, scale, torch.ones(6), (2, 6, 20, 3), (True, True, True)
    )
    for found in (out, grad_x):
        assert found.is_contiguous(memory_format=torch.channels_last)


def test_the_kernels_are_known_to_the_compiler():
    checks = {"test_utils": ("test_schema", "test_faketensor")}
    x, g = (draw(3, 5, 8) for _ in range(2))
    weight = torch.randn(8, device=DEVICE)
    torch.library.opcheck(layer_norm_forward, (x, weight, None, 8, 1e-5), **checks)
    _, mean, scale = layer_norm_forward(x, None, None, 8, 1e-5)
    torch.library.opcheck(layer_norm_backward, (g, x, mean, scale, weight, 8, 3), **checks)
    x, g, groups = maps("groups of three", dtype=torch.bfloat16)
    torch.library.opcheck(group_norm_forward, (x, None, None, groups, 1e-5), **checks)
    _, mean, scale = group_norm_forward(x, None, None, groups, 1e-5)
    torch.library.opcheck(group_norm_backward, (g, x, mean, scale, None), **checks)
    of_channels = (mean[0].repeat_interleave(3), scale[0].repeat_interleave(3))
    torch.library.opcheck(channel_sums, (g, x, *of_channels), **checks)


@pytest.mark.parametrize("told", [True, pytest.param(False, marks=pytest.mark.gpu)])
def test_on_a_gpu_kernels_take_maps_with_channels_last_and_no_others(told, monkeypatch):
    if told:  # elsewhere they wait to be told
        with_kernels(monkeypatch)
    # TF32 convolutions would hide a difference of 1e-4 behind their own.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    used = []

    def spy(x, *others):
        used.append(x)
        return group_norm_forward(x, *others)

    monkeypatch.setattr("sfumato.clipping.kernels.group_norm_forward.group_norm_forward", spy)
    model, x = network(), images(4)
    found = GradientClipper(model).clip(losses_of(1), (x,), 4)
    assert used
    assert all(one.is_contiguous(memory_format=torch.channels_last) for one in used)
    used.clear()
    model = model.to(memory_format=torch.contiguous_format)
    wanted = GradientClipper(model).clip(losses_of(1), (x.contiguous(),), 4)
    assert not used
    torch.testing.assert_close(found.norms, wanted.norms, rtol=1e-5, atol=0)
    for name, total in wanted.total.items():
        torch.testing.assert_close(found.total[name], total, rtol=1e-4, atol=1e-5, msg=name)
