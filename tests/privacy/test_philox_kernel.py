"""Research noise of a GPU: here in Triton's interpreter, and on a GPU for real."""

import math

import numpy as np
import pytest
import torch
from normals import assert_normal
from samples import sampled
from scipy import stats

triton = pytest.importorskip("triton", reason="Triton is for Linux")
tl = pytest.importorskip("triton.language")

from sfumato.privacy.kernels.philox import _philox, normal_pair, philox_block, philox_flat
from sfumato.privacy.noise import _philox_on_gpu, to_philox_mean
from sfumato.privacy.seal import key_words

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KEYS = [(0, 0), (1, 0), (16, -1), (-(2**63), 2**63 - 1), (0x0123456789ABCDEF, -0x123456789)]
LOW, HIGH = KEYS[-1]
SIZES = [0, 1, 3, 4, 5, 127, 128, 513, 1023, 2048, 4 * 8192, 70_001]
"""Nothing, ragged in a stretch; programs that are full, ragged or nearly empty."""


def philox(counter, key):
    """Philox 4x32-10 by Python's own whole numbers (Salmon et al. 2011, section 3.3)."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p, q = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = q >> 32 ^ c1 ^ k0, q % 2**32, p >> 32 ^ c3 ^ k1, p % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def words(low, high, block):
    """The words of these blocks, of any shape, in arrays of whole numbers."""
    c = [halves.astype(object) for halves in (block % 2**32, block >> 32)]
    return philox(
        (*c, high % 2**32, high >> 32 & 0xFFFFFFFF), (low % 2**32, low >> 32 & 0xFFFFFFFF)
    )


def pair(a, b):
    """Box and Muller's deviates of two words, in float64."""
    a, b = np.asarray(a, dtype=np.int64), np.asarray(b, dtype=np.int64)
    x = (a % 2**31 + 0.5) * 2.0**-32
    radius = np.sqrt(-2 * np.where(a >= 2**31, np.log1p(-x), np.log(x)))
    angle = ((b + 2**29) % 2**30 - 2**29 + 0.5) * (math.pi / 2 * 2.0**-30)
    sine, cosine = np.sin(angle), np.cos(angle) * np.where(b >= 2**31, -1, 1)
    swap = (b & 2**30) != 0
    return radius * np.where(swap, sine, cosine), radius * np.where(swap, cosine, sine)


def normals(count, low, high):
    """What the kernel should draw: 128 numbers in a row take the same word of 128 blocks."""
    stretches = -(-count // 512)
    a, b, c, d = words(low, high, np.arange(128 * stretches).reshape(stretches, 128))
    return np.stack([*pair(a, b), *pair(c, d)], axis=1).ravel()[:count]


def deviates(count, low=LOW, high=HIGH):
    return noisy(torch.zeros(count), low, high, 1.0, 1.0)


def key_of(low, high, broken=0):
    """The key as kernels take it: of its eight words the first four are used."""
    halves = np.array([low, high, 0, 0], dtype=np.int64).view(np.int32)
    return torch.tensor([*halves.tolist(), broken], dtype=torch.int32, device=DEVICE)


def noisy(total, low, high, *settings):
    found = total.to(DEVICE, copy=True)
    philox_flat(found, key_of(low, high), *settings)
    return found.cpu()


@triton.jit
def store_blocks(low, high, first, out, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    found = philox_block(tl.load(low), tl.load(high), tl.load(first) + lane)
    for number in tl.static_range(4):
        tl.store(out + number * LANES + lane, found[number].to(tl.int32, bitcast=True))


@triton.jit
def store_pairs(a, b, out, deviation, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    x, y = tl.load(a + lane), tl.load(b + lane)
    x, y = x.to(tl.uint32, bitcast=True), y.to(tl.uint32, bitcast=True)
    one, other = normal_pair(x, y, deviation)
    tl.store(out + lane, one)
    tl.store(out + LANES + lane, other)


def drawn_pairs(a, b):
    given = [torch.tensor(w, dtype=torch.int64).int().to(DEVICE) for w in (a, b)]
    found = torch.empty(2, len(a), device=DEVICE)
    store_pairs[(1,)](*given, found, 1.0, len(a))
    return found.cpu().double().numpy()


def test_the_reference_knows_the_published_vectors():
    # Random123's known answers, kat_vectors.
    wanted = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox((0, 0, 0, 0), (0, 0)) == wanted
    ones = 2**32 - 1
    wanted = (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    assert philox((ones,) * 4, (ones,) * 2) == wanted
    digits = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    wanted = (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)
    assert philox(digits, (0xA4093822, 0x299F31D0)) == wanted


@sampled(key=KEYS, first=[0, 75_000_000, 2**32 - 8, 2**40 + 3])
def test_words_are_those_of_philox(key, first):
    low, high = key
    found = torch.empty(4, 16, dtype=torch.int32, device=DEVICE)
    given = [torch.tensor([n], dtype=torch.int64, device=DEVICE) for n in (low, high, first)]
    store_blocks[(1,)](*given, found, 16)
    wanted = words(low, high, first + np.arange(16))
    assert (found.cpu().numpy().view(np.uint32) == np.array(wanted, dtype=object)).all()


@pytest.mark.parametrize("count", SIZES)
def test_every_number_has_the_noise_of_its_place(count):
    torch.testing.assert_close(
        deviates(count).double(), torch.tensor(normals(count, LOW, HIGH), dtype=torch.float64),
        rtol=1e-6, atol=1e-12,
    )  # fmt: skip


@pytest.mark.parametrize("count", [1, 127, 129, 300, 511, 513, 1999])
def test_nothing_is_written_beyond_the_end_whatever_the_programs(count):
    for lanes, parts, programs in ((128, 4, 2), (256, 2, 2), (1024, 1, 1)):
        found = torch.full((4096,), 7.0, device=DEVICE)
        _philox[(programs,)](found, key_of(LOW, HIGH), count, 0.0, 1.0, lanes, parts)
        assert (found[count:] == 7).all()
        torch.testing.assert_close(found[:count].cpu(), deviates(count), rtol=1e-6, atol=0)


def test_deviates_at_the_edges_are_as_exact_as_elsewhere():
    generator = np.random.default_rng(0)
    # Lengths near 0, near 6.76 and where x becomes 1 - x; angles at the axes and between them.
    ends = [at + by for at in (0, 2**31, 2**32, 3 * 2**30, 2**29) for by in range(-6, 7)]
    root = [int((1 - math.sqrt(0.5)) * 2**32) + 2**31 + by for by in range(-3, 4)]
    turns = [n * 2**29 + by for n in range(8) for by in range(-4, 5)]
    a = (np.array(ends + root, dtype=np.int64) % 2**32).repeat(len(turns))
    b = np.tile(np.array(turns, dtype=np.int64) % 2**32, len(ends + root))
    more = 2**13 - len(a)
    a = np.concatenate([a, generator.integers(0, 2**32, more)])
    b = np.concatenate([b, generator.integers(0, 2**32, more)])
    found, wanted = drawn_pairs(a, b), np.stack(pair(a, b))
    assert (found != 0).all()
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert 6.7 < np.abs(found).max() < 6.77


@pytest.mark.parametrize("scale", [1.0, 1 / 1000, 3.0])
def test_the_sum_is_scaled_and_the_noise_is_added(scale):
    total = 100 * torch.randn(5001, generator=torch.Generator().manual_seed(0))
    found = noisy(total, LOW, HIGH, scale, 0.25).double()
    wanted = total.double() * scale + 0.25 * normals(5001, LOW, HIGH)
    rounding = 2e-7 * (total.double().abs() * scale + 1)
    assert ((found - wanted).abs() <= rounding).all()
    assert noisy(total, LOW, HIGH, scale, 0.0).equal(total * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_halves_of_the_key_and_both_types_reach_the_kernel(dtype):
    key = bytes(range(240, 256))
    total = torch.linspace(-5, 5, 1000, dtype=dtype)
    found = total.to(DEVICE, copy=True)
    _philox_on_gpu(found, 3.0, 20.0, key_words(key, found.device))
    found = found.cpu()
    low, high = (int.from_bytes(half, "little", signed=True) for half in (key[:8], key[8:]))
    wanted = (total.double() + 3.0 * normals(1000, low, high)) / 20
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_of_a_sum_that_is_not_finite_nothing_is_shown(dtype):
    total = torch.arange(2000.0, dtype=dtype, device=DEVICE)
    total[7] = torch.inf
    _philox_on_gpu(total, 3.0, 20.0, key_of(LOW, HIGH, broken=1))
    assert total.isnan().all()


@pytest.mark.parametrize(
    "other", [(LOW ^ 1, HIGH), (LOW, HIGH ^ 1), (LOW, HIGH ^ 2**62), (LOW ^ 2**62, HIGH)]
)
def test_every_bit_of_the_key_makes_other_noise(other):
    count = 20_000
    one, two = deviates(count), deviates(count, *other)
    assert int((one == two).sum()) <= 2
    assert abs(float(np.corrcoef(one, two)[0, 1])) < 5 / math.sqrt(count)


def test_the_kernels_deviates_are_normal_and_independent():
    count = 400 * 512
    drawn = deviates(count).double().numpy()
    assert_normal(drawn)
    # The four of a block, two of which are a pair, and neighbours in memory.
    four = drawn.reshape(-1, 4, 128).transpose(1, 0, 2).reshape(4, -1)
    for values in (four, four**2):
        assert np.abs(np.corrcoef(values) - np.eye(4)).max() < 5 / math.sqrt(count / 4)
    for values in (drawn, drawn**2):
        assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 4 / math.sqrt(count)


def test_the_kernel_is_known_to_the_compiler():
    given = (torch.zeros(20, device=DEVICE), key_of(LOW, HIGH), 0.5, 1.0)
    torch.library.opcheck(philox_flat, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
def test_a_large_sum_on_a_gpu_gets_this_noise_in_every_place():
    count = 50_000_001
    total = torch.zeros(count, device="cuda")
    key = LOW.to_bytes(8, "little", signed=True) + HIGH.to_bytes(8, "little", signed=True)
    drawn = total.clone()
    for sums in (total, drawn):
        to_philox_mean(sums, 1.0, 1.0, key)
    assert torch.equal(drawn, total)
    assert torch.equal(drawn[:70_001], deviates(70_001).cuda())
    last = -(-count // 512) - 1
    a, b, c, d = words(LOW, HIGH, last * 128 + np.arange(128))
    wanted = torch.tensor(np.concatenate([*pair(a, b), *pair(c, d)])[: count - 512 * last])
    torch.testing.assert_close(drawn[512 * last :].cpu().double(), wanted, rtol=1e-6, atol=1e-12)
    assert stats.kstest(drawn[: 5 * 10**6].cpu().numpy(), "norm").pvalue > 1e-3
    wide = drawn.double()
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((wide**power).mean()) - mean) < 4 * math.sqrt(variance / count)
    assert float(drawn.abs().min()) > 0


@pytest.mark.parametrize("apart", [torch.arange(300.0)[::2], torch.tensor([3.0]).expand(150)])
def test_sums_that_do_not_lie_side_by_side_are_refused(apart):
    with pytest.raises(ValueError, match="side by side"):
        philox_flat(apart.to(DEVICE), key_of(LOW, HIGH), 1.0, 0.5)
