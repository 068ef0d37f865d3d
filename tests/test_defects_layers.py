"""Defects of private_vision (D) and fastDP (F) in layers: wrong norms, wrong gradients, refusals.

Every layer is compared with autograd asked for one example at a time, in all modes. One test a
defect, by its number. D12, D18, F4, torch's layers in D22: see CASES in
tests/clipping/test_rules.py.
"""

import pytest
import torch
import torch.nn.functional as F
from oracle import compare, largest_contribution, loss_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sfumato.clipping.admit import admit
from sfumato.clipping.clip import GradientClipper
from sfumato.clipping.method_choice import MODES
from sfumato.errors import UnsupportedLayer
from sfumato.models.normalise import group_norm_like, replace_batch_norm

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def built(make, *args, **settings):
    torch.manual_seed(0)
    return make(*args, **settings).double()


def two_convolutions():
    convolutions = (nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 6, 3, stride=2))
    return nn.Sequential(convolutions[0], nn.ReLU(), convolutions[1], nn.Flatten())


def test_d11_non_ghost_convolution_gradients_are_exact():
    clipper, _ = compare(built(two_convolutions), randn(4, 4, 7, 7), 4, mode="non-ghost")
    (parts,) = clipper.layouts.values()
    assert {part.method for part in parts} == {"store"}


def test_d17_every_resolution_has_its_own_choice_of_method():
    model = built(lambda: nn.Sequential(nn.Conv2d(4, 32, 3), nn.AdaptiveAvgPool2d(1)))
    methods = {}
    clipper = GradientClipper(model)
    for size in (4, 24):
        x = randn(3, 4, size, size)
        admit(clipper, loss_of, (x,), 3)
        clipper.clip(loss_of, (x,), 3)
        (key,) = [k for k in clipper.layouts if k[0][0] == (4, size, size)]
        methods[size] = clipper.layouts[key][0].method
    assert methods == {4: "ghost", 24: "store"}


def test_d19_layer_norm_needs_no_bias_and_a_bias_alone_costs_nothing_else():
    compare(built(nn.LayerNorm, 8, bias=False), randn(4, 5, 8), 4)
    model = built(lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    clipper, _ = compare(model, randn(4, 5, 8), 4)
    (parts,) = clipper.layouts.values()
    assert [(part.path, part.kind) for part in parts] == [
        ("0.bias", "gradient"),
        ("1.bias", "gradient"),
    ]


def timm_layer(name, **settings):
    from timm import layers

    return lambda: getattr(layers, name)(8, **settings)


def layer_scale():
    from timm.models.vision_transformer import LayerScale

    return LayerScale(8, init_values=0.3)


UNSUPPORTED = {
    "LayerNorm2d": (timm_layer("LayerNorm2d"), (8, 3, 3)),
    "LayerScale": (layer_scale, (5, 8)),
    "timm's RmsNorm": (timm_layer("RmsNorm"), (5, 8)),
    "BatchNormAct2d, frozen": (lambda: timm_layer("BatchNormAct2d")().eval(), (8, 3, 3)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_d22_layers_that_used_to_crash_are_exact(kind, mode):
    make, shape = UNSUPPORTED[kind]
    compare(built(make), randn(4, *shape), 4, mode=mode)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(8, 4, batch_first=True)

    def forward(self, x):
        return self.layer(x)[0]


def test_d22_a_recurrent_layer_is_refused_by_name_and_not_by_accident():
    with pytest.raises(UnsupportedLayer, match=r'"layer\.\w+" is used by lstm'):
        GradientClipper(Recurrent()).clip(loss_of, (randn(3, 5, 8).float(),), 3)


def test_d23_beit_is_trained_whole():
    import timm

    small = {"img_size": 16, "patch_size": 8, "depth": 1, "embed_dim": 12, "num_heads": 2}
    model = built(timm.create_model, "beit_base_patch16_224", num_classes=3, **small).eval()
    with torch.no_grad():
        model.blocks[0].attn.relative_position_bias_table.normal_()
    _, clipped = compare(model, randn(3, 3, 16, 16), 3)
    assert set(clipped.total) == {name for name, _ in model.named_parameters()}
    assert all(bool(total.any()) for total in clipped.total.values())


class Linear(nn.Module):
    """Not torch's: a low-rank update beside a weight, as adapters have it."""

    def __init__(self):
        super().__init__()
        self.weight, self.down = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(2, 6))
        self.up = nn.Parameter(torch.randn(4, 2))

    def forward(self, x):
        return 2 * F.linear(x, self.weight) + F.linear(F.linear(x, self.down), self.up).relu()


@pytest.mark.parametrize("mode", MODES)
def test_d24_a_class_that_is_only_called_linear_is_not_taken_for_one(mode):
    compare(built(Linear), randn(4, 5, 6), 4, mode=mode)


@pytest.mark.parametrize("channels", [2, 8, 12, 64])
def test_d27_a_replaced_norm_does_not_flatten_a_map_of_one_pixel(channels):
    norm = group_norm_like(nn.BatchNorm2d(channels))
    for examples in (1, 3):
        out = norm(randn(examples, channels, 1, 1).float())
        assert float(out.detach().std()) > 0.5
    assert not torch.equal(norm(torch.randn(1, channels, 1, 1)), norm.bias.reshape(1, -1, 1, 1))


def test_d27_split_attention_still_depends_on_its_input():
    from timm.layers import SplitAttn

    torch.manual_seed(0)
    model = SplitAttn(8, norm_layer=nn.BatchNorm2d)
    model = replace_batch_norm(model).double()
    x = randn(1, 8, 4, 4)
    compare(model, torch.cat([x, 2 + x.flip(1)]), 2)
    gates = []
    model.rsoftmax.register_forward_hook(lambda _, given, out: gates.append(out))
    model(x), model(2 + x.flip(1))
    assert (gates[0] - gates[1]).abs().max() > 1e-3


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.layer(torch.tanh(self.layer(x))))


@pytest.mark.parametrize("mode", MODES)
def test_f2_a_module_called_twice_has_the_gradient_of_both_calls(mode):
    model, x = built(Twice), randn(4, 5, 6)
    compare(model, x, 4, mode=mode)
    assert largest_contribution(model, loss_of, (10 * x,), 0.1, mode=mode) <= 0.1


class T5LayerNorm(nn.Module):
    """As Transformers writes it: no class of torch, nor a functional norm."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x):
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-6))


@pytest.mark.parametrize("mode", MODES)
def test_f6_a_hand_written_rms_norm_is_summed_over_the_batch(mode):
    _, clipped = compare(built(T5LayerNorm), randn(4, 5, 8), 4, mode=mode)
    assert clipped.total["weight"].shape == (8,)


@pytest.mark.parametrize("mode", MODES)
def test_f9_subclasses_of_layer_norm_are_trained_like_their_parent(mode):
    from timm.layers import LayerNorm

    assert LayerNorm is not nn.LayerNorm
    model = built(lambda: nn.Sequential(LayerNorm(8), nn.Linear(8, 3)))
    _, clipped = compare(model, randn(4, 5, 8), 4, mode=mode)
    assert clipped.total["0.weight"].any()


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else [made]:
            self.numel = max(self.numel, one.numel() if isinstance(one, torch.Tensor) else 0)
        return made


def test_f10_a_large_table_makes_no_one_hot_product():
    words, width, n, length = 5000, 4, 6, 7
    model = nn.Sequential(nn.Embedding(words, width), nn.Flatten(), nn.Linear(28, 3))
    ids = torch.arange(n * length).reshape(n, length) % 11
    clipper = GradientClipper(model)
    clipper.clip(loss_of, (ids,), n)
    with Largest() as seen:
        clipper.clip(loss_of, (ids,), n)
    # Neither a one-hot batch, n * length * words, nor a gradient an example, n * words * width.
    assert words * width <= seen.numel < 2 * words * width
    compare(model.double(), ids, n)
