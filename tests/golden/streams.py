"""What is frozen of random streams: functions of a key and a purpose, and the order of seeds.

Whole numbers, bytes and images that are only moved are exact: a digest, and the first numbers for
whoever looks for a difference. What goes through sine, logarithm or interpolation is a list of
floats ("close"), since torch rounds those in another way on another kind of CPU.
"""

import hashlib
from itertools import product

import numpy as np
import torch
from torch import Tensor

from golden import adapter
from golden.networks import generator

KEYS = {"zeros": bytes(32), "count": bytes(range(32)), "hash": hashlib.sha256(b"golden").digest()}
PURPOSES = [("train", 0), ("train", 7), ("0123456789ab", "train", 7), ("moments", 0)]
MOVED = {"crop": 2, "flip": True, "cutout": 3}
CHANGED = {"affine": 0.2, "crop": 2, "flip": True, "colour": 0.3, "cutout": 3}


def exact(values: Tensor | np.ndarray | bytes) -> dict:
    """A digest of the values, and the first of them."""
    if isinstance(values, bytes):
        return {"sha256": hashlib.sha256(values).hexdigest(), "first": values[:8].hex()}
    array = np.ascontiguousarray(values)
    digest = hashlib.sha256(f"{array.dtype} {array.shape}".encode() + array.tobytes())
    return {"sha256": digest.hexdigest(), "first": array.ravel()[:4].tolist()}


def close(values: Tensor) -> dict:
    return {"close": values.double().ravel().tolist()}


def compute() -> dict[str, object]:
    """Every stream by name."""
    found = {}
    for part in (keys, batches, noise, augmentation, drawn):
        for name, value in part():
            assert name not in found, name
            found[name] = value
    return found


def keys():
    for (name, key), purpose in product(KEYS.items(), PURPOSES):
        data, words, seed = adapter.derived(key, ("dropout", *purpose, 0), 100)
        yield f"derived {name} {purpose}", [exact(data), exact(words), seed]
    for seed in (0, 1, -1, 2**40):
        yield f"key of seed {seed}", adapter.key_of_seed(seed).hex()
    yield "commitment", adapter.commitment(KEYS["count"])
    for names in [(0, 1), (1, 0), ("members", 3), ("shadows", 0, "out", 2), (-1,), (-2,), ()]:
        yield f"seed named {names}", adapter.seed_named(*names)


def batches():
    for (name, key), purpose in product(KEYS.items(), PURPOSES):
        for rate, size, limit in [(0.1, 400, None), (0.013, 5000, None), (0.3, 300, 80)]:
            chosen = adapter.poisson(key, purpose, rate, size, limit)
            yield f"poisson {name} {purpose} {rate} {size} {limit}", exact(chosen)
    key = KEYS["count"]
    yield "poisson, few", adapter.poisson(key, ("train", 3), 0.05, 400).tolist()
    yield "poisson, few, cut", adapter.poisson(key, ("train", 3), 0.05, 400, 9).tolist()
    yield "poisson, all", exact(adapter.poisson(key, ("train", 3), 1.0, 40))
    yield "poisson, all, cut", adapter.poisson(key, ("train", 3), 1.0, 40, 12).tolist()
    yield "poisson, ties", exact(adapter.poisson(key, ("train", 3), 1 / 3, 100_000))
    yield "fair coins", adapter.coins(key, ("coins",), 0.5, 64).tolist()


def noise():
    for name, key in KEYS.items():
        for dtype in (torch.float32, torch.float64):
            total = torch.linspace(-2, 3, 1001, dtype=dtype)
            yield f"philox {name} {dtype}", exact(adapter.philox(key, total, 1.5, 64.0))
        yield f"philox alone {name}", exact(adapter.philox(key, torch.zeros(4096), 1.0, 1.0))
        yield f"chacha {name}", exact(adapter.chacha(key, 1000))
        yield f"normal deviates {name}", close(adapter.deviates(key, 43))
        total = torch.linspace(-2, 3, 37)
        yield f"secure {name}", close(adapter.secure(key, total, 1.1, 0.7, 50.0))


def augmentation():
    places = torch.tensor([5, 0, 17, 400])
    for numbers in [(3, places), (places, 2), (0, places, places + 1)]:
        drawn = adapter.example_streams(-(2**62) + 5, *numbers)
        for name in ("uniform", "integers", "double"):
            yield f"{name} {numbers}", exact(drawn[name])
        yield f"normal {numbers}", close(drawn["normal"])
    pixels = generator("pixels").random((4, 3, 8, 8)).astype(np.float32)
    for name, settings in {"moved": MOVED, "changed": CHANGED}.items():
        freeze = exact if name == "moved" else close
        yield f"views {name}", freeze(adapter.augment(settings, torch.from_numpy(pixels), 9, 4))
    ids = [0, 1, 1, 2, 0, 1, 3, 1, 1, 2]
    for step in range(3):
        yield (
            f"images of people {step}",
            adapter.images_of_people(ids, 3, [1, 0, 3, 2], 11, step).tolist(),
        )
    people = [i % 7 for i in range(24)]
    ways = {"one view": {}, "views": {"views": 3}, "people": {"people": people, "most": 2}}
    for (name, way), step in product(ways.items(), range(2)):
        x, labels = adapter.inputs([4, 0, 2], 13, step, settings=MOVED, **way)
        yield f"inputs, {name}, step {step}", [exact(x), labels.tolist()]


def drawn():
    for kind in ("gradient", "mislabelled", "natural"):
        yield f"canaries {kind}", adapter.canaries(kind, 9)
    for share, seed in [(0.3, 0), (0.5, 1)]:
        yield f"split {share} {seed}", [exact(part) for part in adapter.split(share, seed)]
    yield "shadows", adapter.shadow_draws(0, "member", 3).tolist()
    yield "members of heads", adapter.head_members(5).tolist()
    yield "starts of heads", close(adapter.head_starts(5))


def compare(found: object, frozen: object, name: str) -> None:
    """Fail where a stream differs; floats may differ by rounding."""
    if isinstance(frozen, dict) and "close" in frozen:
        # Float32 pictures are rounded to 6e-8, normal numbers in float64 far less.
        np.testing.assert_allclose(
            found["close"], frozen["close"], rtol=1e-6, atol=1e-6, err_msg=name
        )
        return
    assert found == frozen, f"{name}: {found} is not {frozen}"
