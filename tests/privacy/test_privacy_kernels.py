"""Noise and tags of a GPU: here in Triton's interpreter, and on a GPU for real."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from normals import assert_normal
from samples import sampled

triton = pytest.importorskip("triton", reason="Triton is for Linux")
tl = pytest.importorskip("triton.language")

from sfumato.privacy.budget import Plan
from sfumato.privacy.kernels.chacha import chacha_block
from sfumato.privacy.kernels.digest import COLUMNS, FEW, HASHES, ROWS, digest, hash_columns
from sfumato.privacy.kernels.release import release_flat
from sfumato.privacy.kernels.seal import seal_words
from sfumato.privacy.secure import chacha20, grid_noise, normal_deviates, to_secure_mean
from sfumato.privacy.session_key import SessionKey

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float64]
KEY = bytes(range(7, 39))
PLAN = Plan(noise_multiplier=0.8, max_norm=3.0, expected_batch=20)
SIZES = [1, 7, 8, 9, 1024, 8 * 8192, 8 * 8192 + 1, 70_001]
"""Less than a block, ragged in the last block; programs that are full, ragged or nearly empty."""


def release(total, plan=PLAN, key=KEY):
    grid, deviation = grid_noise(plan, total.numel())
    numbers = (1 / grid, deviation / grid, grid / plan.expected_batch)
    settings = torch.tensor(numbers, dtype=torch.float64, device=DEVICE)
    found = total.to(DEVICE, copy=True)
    release_flat(found, key_of(key), settings)
    return found.cpu()


def secure_mean(total, plan=PLAN):
    found = total.clone()
    to_secure_mean(found, plan, KEY, len(total))
    return found


def deviates(count, key=KEY):
    """The kernel's deviates, to 2^-51, as noise on zeros with a grid as fine as that."""
    settings = torch.tensor([1.0, 2.0**50, 2.0**-50], dtype=torch.float64, device=DEVICE)
    zeros = torch.zeros(count, dtype=torch.float64, device=DEVICE)
    release_flat(zeros, key_of(key), settings)
    return zeros.cpu()


def key_of(data, broken=0):
    """The key as kernels take it."""
    return torch.cat([words_of(data), torch.tensor([broken], dtype=torch.int32, device=DEVICE)])


def words_of(data):
    return torch.frombuffer(bytearray(data), dtype=torch.int32).to(DEVICE)


@triton.jit
def store_blocks(key, first, out, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    words = chacha_block(key, tl.load(first) + lane)
    for number in tl.static_range(16):
        tl.store(out + 16 * lane + number, words[number].to(tl.int32, bitcast=True))


@pytest.mark.parametrize("first", [0, 1000, 75_000_000, 2**32 - 8, 2**40 + 3])
@pytest.mark.parametrize("key", [bytes(32), KEY], ids=["zero", "other"])
def test_the_stream_is_that_of_the_cpu_word_for_word(key, first):
    # Past 2^32 blocks too, though a stream of 300 million numbers has 38 million.
    found = torch.empty(16 * 16, dtype=torch.int32, device=DEVICE)
    start = torch.tensor([first], dtype=torch.int64, device=DEVICE)
    store_blocks[(1,)](words_of(key), start, found, 16)
    blocks = [chacha20(key, 64, n.to_bytes(16, "little")) for n in range(first, first + 16)]
    assert found.cpu().numpy().tobytes() == b"".join(blocks)


@pytest.mark.parametrize("count", SIZES)
def test_deviates_are_those_of_the_cpu_to_rounding(count):
    found, wanted = deviates(count), normal_deviates(KEY, count)
    # Rounded to 2^-50; and CPU and GPU are each off by 5e-16 of a pair's length.
    torch.testing.assert_close(found, wanted, rtol=0, atol=2.0**-51 + 8 * 1e-15)


@sampled(count=SIZES, dtype=DTYPES)
def test_releases_are_those_of_the_cpu(count, dtype):
    total = 100 * torch.randn(count, dtype=dtype, generator=torch.Generator().manual_seed(0))
    found, wanted = release(total), secure_mean(total)
    assert found.dtype == dtype
    # Deviates that differ by 1e-15 round to different steps of 1e-6 once in 10^9 numbers.
    assert torch.equal(found, wanted)


def test_every_number_gets_noise_of_its_own():
    count = 8 * 8192 + 4321
    one, other = deviates(count), deviates(count, bytes(32))
    assert (one != 0).all()
    assert len(one.unique()) == count
    assert not (one == other).any()
    assert abs(float(np.corrcoef(one, other)[0, 1])) < 5 / math.sqrt(count)


def test_the_kernels_deviates_are_normal():
    count = 400_000
    drawn = deviates(count).numpy()
    assert_normal(drawn)
    rows = drawn.reshape(8, -1)
    for values in (rows, rows**2):
        assert np.abs(np.corrcoef(values) - np.eye(8)).max() < 5 / math.sqrt(count / 8)


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e3, 1e30])
def test_sums_of_any_size_come_out_on_the_grid(size):
    drawn = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    total = size * drawn.double()
    plan = Plan(noise_multiplier=0.8, max_norm=3.0, expected_batch=1)
    found = release(total, plan)
    grid, _ = grid_noise(plan, len(total))
    assert torch.equal(found / grid, (found / grid).round())
    assert torch.equal(found, secure_mean(total, plan))


def test_halves_are_rounded_to_even_as_on_the_cpu():
    # Above 2^52 all are whole, and odd ones must stay.
    large = [2.0**51 + 0.5, -(2.0**51) - 1.5, 2.0**52 + 1, -(2.0**52) - 3]
    steps = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, *large, 0.0], dtype=torch.float64)
    total = steps * grid_noise(PLAN, len(steps))[0]
    assert torch.equal(release(total), secure_mean(total))


def test_nothing_is_released_of_nothing():
    assert release(torch.zeros(0)).shape == (0,)


SECRET = SessionKey.from_seed(0)


def digest_of(flat, secret=SECRET):
    return digested(flat, secret)[0]


def digested(flat, secret=SECRET):
    """The digest, and whether something in it is not finite."""
    broken = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    found = digest(flat.to(DEVICE), lambda n, count: secret.derive(("keys", n), count), broken)
    return found.cpu().numpy().tobytes(), int(broken)


def test_hashes_are_sums_of_products_with_the_keys():
    # By Python's own whole numbers, column by column.
    count = ROWS * COLUMNS + 1000
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (count,), generator=generator).int()
    keys = torch.randint(-(2**63), 2**63 - 1, (ROWS * HASHES,), generator=generator)
    found = hash_columns(words.to(DEVICE), keys.to(DEVICE), words_of(bytes(4)), 0)
    found = found.cpu().view(2, HASHES, COLUMNS)
    full = np.zeros(2 * ROWS * COLUMNS, dtype=object)
    full[:count] = [w % 2**32 for w in words.tolist()]
    by_row = np.array(keys.tolist(), dtype=object).reshape(ROWS, HASHES)
    wanted = np.einsum("trc,rh->thc", full.reshape(2, ROWS, COLUMNS), by_row) % 2**64
    assert (np.array(found.tolist(), dtype=object) % 2**64 == wanted).all()


@sampled(count=[5, FEW + 1, ROWS * COLUMNS + 77], dtype=DTYPES)
def test_a_digest_changes_with_every_bit(count, dtype):
    flat = torch.randn(count, dtype=dtype, generator=torch.Generator().manual_seed(0))
    first = digest_of(flat)
    assert digest_of(flat.clone()) == first
    kind = torch.int64 if dtype == torch.float64 else torch.int32
    bits = 64 if dtype == torch.float64 else 32
    end_of_tile = min(count, ROWS * COLUMNS) - 1
    for place, bit in ((0, 0), (end_of_tile, 17), (count - 1, 0), (count - 1, bits - 1)):
        changed = flat.clone()
        changed.view(kind)[place] ^= -(2**bit) if bit == bits - 1 else 2**bit
        assert digest_of(changed) != first


def test_numbers_that_change_places_change_the_digest():
    flat = torch.randn(ROWS * COLUMNS + 5, generator=torch.Generator().manual_seed(0))
    first = digest_of(flat)
    for one, other in ((0, 1), (0, COLUMNS), (0, 8 * COLUMNS), (3, ROWS * COLUMNS + 3)):
        changed = flat.clone()
        changed[one], changed[other] = flat[other], flat[one]
        assert digest_of(changed) != first


def test_a_digest_is_short_and_depends_on_the_secret():
    flat = torch.zeros(3 * ROWS * COLUMNS)
    flat[5] = 1
    found = digest_of(flat)
    assert len(found) <= 4 * FEW
    assert digest_of(flat, SessionKey.from_seed(1)) != found


LARGE = ROWS * COLUMNS + 777


@sampled(count=[1, 5, 3000, LARGE], dtype=DTYPES[::-1])
def test_a_digest_tells_whether_all_numbers_are_finite(count, dtype):
    flat = torch.randn(count, dtype=dtype, generator=torch.Generator().manual_seed(0))
    flat[count // 2] = torch.finfo(dtype).max
    flat[0] = -torch.finfo(dtype).tiny / 4  # below what is normal, in its last digits
    assert digested(flat)[1] == 0
    bads, places = (torch.nan, torch.inf, -torch.inf), (0, count // 2, count - 1)
    # The interpreter takes a second over many numbers: there each comes once.
    for bad, place in product(bads, places) if count < LARGE else zip(bads, places, strict=True):
        spoilt = flat.clone()
        spoilt[place] = bad
        assert digested(spoilt)[1] == 1, (bad, place)
    # Words that would not be finite as float32 are, as the lower halves of float64.
    if dtype == torch.float64:
        flat.view(torch.int32)[::2] = -1
        assert digested(flat)[1] == 0


def sealed_by_hand(words, key, rows):
    """The rows by Python's own whole numbers, and the CPU's ChaCha20."""
    hashes = [0, 0, 0]
    for number, word in enumerate([*words, 1]):
        block = np.frombuffer(chacha20(key[:32], 24, number.to_bytes(16, "little")), "<u8")
        hashes = [h + word % 2**32 * int(k) for h, k in zip(hashes, block, strict=True)]
    nonce = b"".join((h % 2**64 >> 32).to_bytes(4, "little") for h in hashes)
    blocks = [chacha20(key[32:], 32, row.to_bytes(4, "little") + nonce) for row in range(rows)]
    return np.frombuffer(b"".join(blocks), "<i4").reshape(rows, 8)


@sampled(count=[0, 1, 1023, 1024, 4095, 4096], broken=[0, 1])
def test_rows_of_a_seal_are_chacha_blocks_under_hashes_of_the_words(count, broken):
    generator = torch.Generator().manual_seed(count)
    words = torch.randint(-(2**31), 2**31, (count,), generator=generator).int()
    key, rows = bytes(range(100, 164)), 3
    found = seal_words(
        words.to(DEVICE), words_of(key), torch.tensor([broken]).int().to(DEVICE), rows
    )
    assert (found[:, 8] == broken).all()
    assert (found[:, :8].cpu().numpy() == sealed_by_hand(words.tolist(), key, rows)).all()


def test_a_seal_has_as_many_rows_as_it_can_make_and_no_more():
    words, broken = torch.zeros(5, dtype=torch.int32, device=DEVICE), words_of(bytes(4))
    assert len(seal_words(words, words_of(bytes(64)), broken, 16).unique(dim=0)) == 16
    with pytest.raises(ValueError, match="16 at the most"):
        seal_words(words, words_of(bytes(64)), broken, 17)


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_a_sum_that_is_not_finite_nothing_is_shown(dtype):
    total = torch.arange(2000.0, dtype=dtype, device=DEVICE)
    total[7] = torch.nan
    settings = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64, device=DEVICE)
    release_flat(total, key_of(KEY, broken=1), settings)
    assert total.isnan().all()


def test_the_kernels_are_known_to_the_compiler():
    settings = torch.ones(3, dtype=torch.float64, device=DEVICE)
    keys = torch.ones(ROWS * HASHES, dtype=torch.int64, device=DEVICE)
    for kernel, given in (
        (release_flat, (torch.zeros(20, device=DEVICE), key_of(KEY), settings)),
        (hash_columns, (words_of(bytes(80)), keys, words_of(bytes(4)), 4)),
        (seal_words, (words_of(bytes(80)), words_of(bytes(64)), words_of(bytes(4)), 2)),
    ):
        torch.library.opcheck(kernel, given, test_utils=("test_schema", "test_faketensor"))
