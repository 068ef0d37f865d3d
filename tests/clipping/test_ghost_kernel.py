"""The fused ghost norm: the norm of the gradient, and a bound of what rounding adds to a sum."""

import pytest
import torch
from samples import sampled

pytest.importorskip("triton", reason="Triton is for Linux")

from sfumato.clipping import gpu_kernels, grams
from sfumato.clipping.geometry import LINEAR
from sfumato.clipping.kernels.ghost import ghost_norm_kernel, scaled

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float32]
SHAPES = [
    (1, 5, 7),
    (5, 20, 33),
    (16, 8, 8),
    (64, 40, 70),
    (69, 33, 65),
    (100, 24, 8),
    (131, 16, 9),
    (197, 9, 8),
    (256, 8, 5),
    (459, 6, 7),
]
"""Positions, inputs, outputs: less than a tile, whole tiles, a few positions over, many over; lines
of tiles that are as long as a program takes, longer, and more than twice as long."""


def draw(examples, positions, *widths, dtype=torch.float32):
    generator = torch.Generator().manual_seed(positions)
    return [
        torch.randn(examples, positions, width, generator=generator).to(DEVICE, dtype)
        for width in widths
    ]


def truth(x, g):
    """Squared norms of the gradients, and sums of lengths, in float64."""
    x, g = x.double(), g.double()
    return (
        torch.einsum("ntd,ntp->npd", x, g).square().sum(dim=(1, 2)),
        (x.norm(dim=2) * g.norm(dim=2)).sum(dim=1),
    )


@sampled(shape=SHAPES, dtype=DTYPES)
def test_the_kernel_finds_norms_and_lengths(shape, dtype):
    positions, inputs, outputs = shape
    x, g = draw(3, positions, inputs, outputs, dtype=dtype)
    squares, lengths = ghost_norm_kernel(x, g)
    wanted, long = truth(x, g)
    loose = DEVICE == "cuda" and dtype == torch.float32
    torch.testing.assert_close(squares.double(), wanted, rtol=1e-3 if loose else 1e-4, atol=0)
    torch.testing.assert_close(lengths.double(), long, rtol=1e-3 if loose else 1e-5, atol=0)


def test_positions_may_lie_far_apart():
    x, g = draw(2, 70, 48, 32)
    apart = torch.stack([x, torch.full_like(x, torch.nan)], dim=2)[:, :, 0]
    assert not apart.is_contiguous()
    torch.testing.assert_close(ghost_norm_kernel(apart, g), ghost_norm_kernel(x, g))


def test_positions_may_lie_further_apart_than_32_bits_can_tell():
    memory = torch.empty(2**31 + 8, dtype=torch.bfloat16)  # of which three pages are used
    x, g = memory.as_strided((1, 3, 8), (0, 2**30, 1)), draw(1, 3, 5, dtype=torch.bfloat16)[0]
    x.copy_(draw(1, 3, 8, dtype=torch.bfloat16)[0].cpu())
    x, g = x.to(DEVICE) if DEVICE == "cuda" else x, g
    torch.testing.assert_close(ghost_norm_kernel(x, g), ghost_norm_kernel(x.contiguous(), g))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_that_cancel_are_never_measured_too_short(dtype):
    """Tokens one per cent apart, output gradients of mean zero: almost nothing is left."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(4, 1, 64, generator=generator)
    x = (base + 0.01 * torch.randn(4, 100, 64, generator=generator)).to(DEVICE, dtype)
    g = torch.randn(4, 100, 32, generator=generator)
    g = (g - g.mean(dim=1, keepdim=True)).to(DEVICE, dtype)
    squares, _ = ghost_norm_kernel(x, g)
    wanted, _ = truth(x, g)
    assert (squares.double() >= wanted * (1 - 1e-5)).all()
    torch.testing.assert_close(squares.double(), wanted, rtol=0.25, atol=0)


@pytest.mark.parametrize("cancels", [False, True])
def test_what_is_summed_after_rounding_stays_below_the_second_norm(cancels, monkeypatch):
    """Factor times gradient is rounded to bf16 on its way into a sum: here, by hand."""
    monkeypatch.setattr(gpu_kernels, "rounding", lambda _: 2.0**-8)
    x, g = draw(3, 60, 24, 40, dtype=torch.bfloat16)
    if cancels:
        x = x[:, :1] + 0.01 * x
        g = g - g.float().mean(dim=1, keepdim=True).to(g.dtype)
    squares, above = grams.ghost_norm(x, g, torch.empty(40, 24), LINEAR, 3)
    for factor in torch.linspace(0.1, 1.0, 19):
        rounded = (g.float() * factor).to(torch.bfloat16)
        added = truth(x, rounded)[0].sqrt()
        assert (added <= above.sqrt() * factor * (1 + 1e-5)).all()
    # The bound is worth something: not far above where nothing cancels.
    assert cancels or (above <= 1.1 * squares).all()


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter's numpy
@sampled(odd=[torch.nan, torch.inf, -torch.inf], whose=[0, 1])
def test_an_example_that_is_not_finite_has_no_finite_norm_and_others_keep_theirs(odd, whose):
    pair = draw(3, 70, 12, 9)
    wanted, _ = ghost_norm_kernel(*pair)
    pair[whose][1, 66, 5] = odd
    squares, _ = ghost_norm_kernel(*pair)
    assert squares.isfinite().tolist() == [True, False, True]
    assert torch.equal(squares[::2], wanted[::2])


@sampled(each=[1, 37, 128, 4099, 9000], dtype=DTYPES)
def test_numbers_are_scaled_by_the_factor_of_their_example(each, dtype):
    factors = torch.tensor([1.0, 0.0, 0.3, 1e-20], device=DEVICE)
    (rows,) = draw(4, 2, each, dtype=dtype)
    found = scaled(rows.flatten(0, 1), factors)
    assert found.dtype == dtype
    wanted = rows.double() * factors.double()[:, None, None]
    # The interpreter cuts bits of bfloat16 off, where a GPU rounds.
    close = {"rtol": 2**-7 if dtype == torch.bfloat16 else 1e-6, "atol": 0.0}
    torch.testing.assert_close(found.double(), wanted.flatten(0, 1), **close)


def test_numbers_that_lie_apart_are_scaled_too():
    (rows,) = draw(3, 8, 5)
    factors = torch.rand(3, device=DEVICE)
    torch.testing.assert_close(scaled(rows.mT, factors), rows.mT * factors[:, None, None])


def test_the_kernels_are_known_to_the_compiler():
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(ghost_norm_kernel, tuple(draw(2, 5, 8, 4)), test_utils=checks)
    rows = draw(4, 3, 5, dtype=torch.bfloat16)
    torch.library.opcheck(scaled, (*rows, torch.rand(2, device=DEVICE)), test_utils=checks)
