"""Kernels do what the torch expressions do: here in Triton's interpreter, and on a GPU for real."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux")

from sfumato.ghost import contract
from sfumato.ghost.clip import Ghost
from sfumato.ghost.contract import Geometry
from sfumato.ghost.kernels.convolution import conv_gradients
from sfumato.nn.wrn import WideResNet

CASES = {
    "3x3": (5, 8, 6, 3, 1, 1, 1, 1, 1),
    "one channel": (1, 16, 6, 5, 1, 2, 1, 1, 1),
    "views": (4, 8, 5, 3, 1, 1, 1, 1, 3),
    "strided": (16, 20, 7, 3, 2, 1, 1, 1, 2),
    "1x1, strided": (24, 8, 6, 1, 2, 0, 1, 1, 1),
    "dilated": (6, 9, 9, 3, 1, 2, 2, 1, 1),
    "groups": (8, 12, 6, 3, 1, 1, 1, 4, 2),
    "several tiles": (40, 70, 4, 3, 1, 1, 1, 1, 1),
    "more positions than a tile": (4, 8, 15, 3, 1, 0, 1, 1, 1),
}
"""Channels, outputs, height, kernel, stride, padding, dilation, groups, views."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_a_convolution(case, layout, dtype):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    channels, outputs, height, kernel, stride, padding, dilation, groups, views = CASES[case]
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    examples = 3
    x = draw(examples * views, channels, height, height + 1).contiguous(memory_format=layout)
    weight = draw(outputs, channels // groups, kernel, kernel)
    pairs = [(n, n) for n in (stride, padding, dilation)]
    geometry = Geometry(*pairs, False, (0, 0), groups)
    g = draw(*contract.output_shape(x, weight, geometry)).contiguous(memory_format=layout)
    columns = contract.columns(x, g, weight, geometry, examples)
    wanted = contract.per_example_gradient(*columns).reshape(examples, *weight.shape)
    found = conv_gradients(x, g, [kernel, kernel], *(list(p) for p in pairs), groups, examples)
    assert found.dtype == torch.float32
    loose = device == "cuda" and dtype == torch.float32 and torch.backends.cudnn.allow_tf32
    torch.testing.assert_close(found, wanted, rtol=1e-2 if loose else 1e-5, atol=1e-4)


@pytest.mark.parametrize("views", [1, 2])
def test_the_engine_gives_the_same_numbers_with_the_kernel(views, monkeypatch):
    torch.manual_seed(0)
    model = WideResNet(10, depth=10, width=1)

    def losses(m, x):
        return m(x).unflatten(0, (-1, views)).square().mean(dim=(1, 2))

    x, used = torch.randn(3 * views, 3, 8, 8), []
    wanted = Ghost(model).clip(losses, (x,), 3)

    def everywhere(x, g, weight, geometry):
        used.append(1)
        return x.ndim == 4

    monkeypatch.setattr(contract, "_has_kernel", everywhere)
    found = Ghost(model).clip(losses, (x,), 3)
    assert used
    torch.testing.assert_close(found.norms, wanted.norms, rtol=1e-5, atol=1e-6)
    for name, total in wanted.total.items():
        torch.testing.assert_close(found.total[name], total, rtol=1e-4, atol=1e-5)


def test_the_kernel_is_known_to_the_compiler():
    x, g = torch.randn(2, 4, 5, 5), torch.randn(2, 8, 5, 5)
    settings = ([3, 3], [1, 1], [1, 1], [1, 1], 1, 2)
    torch.library.opcheck(
        conv_gradients, (x, g, *settings),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


def test_norms_and_sums_do_not_depend_on_how_a_gradient_lies_in_memory():
    weight, factors = torch.randn(6, 4, 3, 3), torch.rand(5)
    gradient = torch.randn(5, 6, 4, 3, 3)
    moved = gradient.movedim(2, -1).contiguous().movedim(-1, 2)
    for norm in (contract.square_norm, lambda v: contract.standardised_norm(v, weight, 1e-10)):
        torch.testing.assert_close(norm(moved), norm(gradient))
    wanted = torch.einsum("n,npchw->pchw", factors, gradient)
    for lying in (gradient, moved):
        torch.testing.assert_close(contract.weighted_sum(lying, factors), wanted)
