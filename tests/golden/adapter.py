"""The only module here that touches the inside of the package.

When something is renamed or moved, this file changes and the frozen data does not.
"""

import hashlib
import json
from collections.abc import Callable
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from sfumato import load_model
from sfumato.attacks.head_randomness import draw_chance
from sfumato.attacks.heads import HeadRecipe
from sfumato.attacks.shadow_heads import ShadowHeads
from sfumato.attacks.shadow_models import _generator as shadow_generator
from sfumato.cli import main
from sfumato.clipping.clip import GradientClipper
from sfumato.clipping.factors import Clipping
from sfumato.data.augment import Augmentation
from sfumato.data.example_rng import ExampleRng, seed_of
from sfumato.data.images import Images
from sfumato.data.people import People
from sfumato.models.wrn import StandardisedConv2d as StandardisedConv2d
from sfumato.privacy.accounting import mechanisms_of, price, shuffled_epsilon
from sfumato.privacy.budget import Budget, Plan, make_plan, steps_within
from sfumato.privacy.ledger import Ledger
from sfumato.privacy.noise import to_philox_mean
from sfumato.privacy.sampling import Chunk, flip_coins, poisson_sample
from sfumato.privacy.secure import chacha20, normal_deviates, to_secure_mean
from sfumato.privacy.session_key import SessionKey
from sfumato.training.canaries import draw_canaries
from sfumato.training.inputs import Inputs


def clip(
    model: nn.Module, loss: Callable[..., Tensor], x: Tensor, examples: int, *, max_norm: float,
    mask: Tensor | None = None, mode: str = "ghost_mixed", style: str = "vanilla",
    per_layer: bool = False,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
    """Norms, factors (a row for each group of layers) and sums of one clipped batch."""
    clipping = Clipping(max_norm=max_norm, style=style, per_layer=per_layer)
    clipped = GradientClipper(model, mode, clipping).clip(loss, (x,), examples, mask)
    return clipped.norms, clipped.factors, dict(clipped.total)


def epsilon_of(plan: dict) -> list[float]:
    """Epsilon of one of `plans.PLANS`, or what was asked for: noise and its epsilon, steps."""
    options = dict(plan)
    match options.pop("kind"):
        case "plan":
            delta, first = options.pop("delta"), options.pop("first", None)
            if options.pop("accountant", "pld") == "pld":
                return [Plan(**options).epsilon(delta, first)]
            return [price(Plan(**options).mechanisms(), delta, accountant="rdp")]
        case "make":
            budget = Budget(epsilon=options.pop("epsilon"), delta=options.pop("delta"))
            spent = read_ledger(options.pop("spent")).releases if "spent" in options else ()
            made = make_plan(budget, spent=spent, **options)
            total = mechanisms_of(spent) + made.mechanisms()
            return [made.noise_multiplier, price(total, budget.delta, made.relation)]
        case "steps":
            budget = Budget(epsilon=options.pop("epsilon"), delta=options.pop("delta"))
            return [float(steps_within(budget, Plan(**options)))]
        case "shuffled":
            return [shuffled_epsilon(**options)]
        case _:
            ledger = read_ledger(options["records"])
            for parent in options["parents"]:
                ledger.inherit(read_ledger(parent))
            return [ledger.epsilon(options["delta"], options["accountant"])]


def read_ledger(records: list[dict]) -> Ledger:
    """The ledger of these records, which are of version 1."""
    return Ledger.from_records(records)


Purpose = tuple[str | int, ...]


def derived(key: bytes, purpose: Purpose, count: int) -> tuple[bytes, np.ndarray, int]:
    """Bytes, 64-bit words and a seed for a purpose."""
    secret = SessionKey(key)
    return secret.derive(purpose, count), secret.words(purpose, count), secret.seed(purpose)


def key_of_seed(seed: int) -> bytes:
    """What --noise-seed makes."""
    return SessionKey.from_seed(seed).key


def commitment(key: bytes) -> str:
    return SessionKey(key).commitment


def seed_named(*names: object) -> int:
    """The seed of a generator that is named by a purpose, a seed, a step."""
    return seed_of(*names)


def poisson(
    key: bytes, purpose: Purpose, rate: float, size: int, max_batch: int | None = None
) -> np.ndarray:
    """The examples of a batch."""
    plan = Plan(
        noise_multiplier=1.0, expected_batch=rate * size, rate=rate, max_batch=max_batch, size=size
    )
    return poisson_sample(plan, size, SessionKey(key), purpose)


def coins(key: bytes, purpose: Purpose, rate: float, size: int) -> np.ndarray:
    return flip_coins(rate, size, SessionKey(key), purpose)


def philox(key: bytes, total: Tensor, deviation: float, divisor: float) -> Tensor:
    """The sum with noise of the fast stream, divided."""
    noisy = total.clone()
    to_philox_mean(noisy, deviation, divisor, key)
    return noisy


def chacha(key: bytes, count: int) -> bytes:
    """The cryptographic stream."""
    return bytes(chacha20(key, count))


def deviates(key: bytes, count: int) -> Tensor:
    """Normal deviates from it."""
    return normal_deviates(key, count)


def secure(key: bytes, total: Tensor, noise_multiplier: float, max_norm: float, divisor: float):
    """The sum with noise on a grid, divided."""
    noisy = total.clone()
    plan = Plan(noise_multiplier=noise_multiplier, max_norm=max_norm, expected_batch=divisor)
    to_secure_mean(noisy, plan, key, total.numel())
    return noisy


def example_streams(seed: int, *numbers: Tensor | int) -> dict[str, Tensor]:
    """What augmentation draws for each example: three kinds of numbers, one after the other."""
    rng = ExampleRng.of(seed, *numbers)
    return {
        "uniform": rng.throw(3), "normal": rng.normal(3), "integers": rng.integers(10, 3),
        "double": rng.throw(2, torch.float64),
    }  # fmt: skip


def augment(settings: dict, pixels: Tensor, seed: int, step: int) -> Tensor:
    rng = ExampleRng.of(seed, step, torch.arange(len(pixels)))
    return Augmentation(**settings)(pixels, rng)


def images_of_people(ids: list[int], most: int, people: list[int], seed: int, step: int) -> Tensor:
    return People(torch.tensor(ids), most).pick(torch.tensor(people), seed, step)


def images(count: int, people: list[int] | None = None) -> Images:
    pixels = np.random.default_rng(7).integers(0, 256, (count, 1, 8, 8), dtype=np.uint8)
    return Images(
        pixels=torch.from_numpy(pixels), labels=torch.arange(count) % 3, classes=("a", "b", "c"),
        name="golden", private=True,
        people=None if people is None else torch.tensor(people),
    )  # fmt: skip


def inputs(
    chosen: list[int], seed: int, step: int, *, settings: dict, views: int = 1,
    people: list[int] | None = None, most: int = 1,
) -> tuple[Tensor, ...]:  # fmt: skip
    """What the model is given of some examples, or groups, in a step."""
    inputs = Inputs(
        images=images(24, people), device=torch.device("cpu"), mean=(0.5,), deviation=(0.25,),
        augmentation=Augmentation(**settings), views=views, seed=seed,
        people=None if people is None else People(torch.tensor(people), most),
    )  # fmt: skip
    chunk = Chunk(torch.tensor(chosen), torch.ones(len(chosen), dtype=torch.bool))
    return inputs.tensors(chunk, step)


def canaries(kind: str, count: int) -> dict[str, list]:
    """Where canaries lie, their classes and coins, by known bits of the operating system."""
    with known_bits():
        drawn = draw_canaries(kind, count, images(24))
    return {
        "places": list(drawn.places), "labels": list(drawn.labels), "coins": list(drawn.included)
    }  # fmt: skip


@contextmanager
def known_bits():
    """The operating system's random bits, which canaries are drawn from, are a hash's instead."""
    calls = iter(range(10**6))

    def bits(count: int) -> int:
        word = hashlib.sha256(f"golden {next(calls)}".encode()).digest()
        return int.from_bytes(word, "little") % 2**count

    with patch("secrets.randbits", bits):
        yield


def split(share: float, seed: int) -> tuple[Tensor, Tensor]:
    """The pixels of the public share, and of the rest."""
    public, private = images(24).split(share, seed)
    return public.pixels, private.pixels


def shadow_draws(seed: int, *name: object) -> np.ndarray:
    """What the shadow models of an audit draw first."""
    return shadow_generator(seed, *name).integers(0, 1000, 6)


def head_members(seed: int) -> Tensor:
    """Which images some reconstruction heads are trained on."""
    features = torch.zeros(20, 4)
    shadow_heads = ShadowHeads(
        features, torch.arange(20) % 2, HeadRecipe(classes=2, class_size=2), seed
    )
    return shadow_heads.members(3, 5)


def head_starts(seed: int) -> Tensor:
    """Where the first heads of a block start."""
    return draw_chance(HeadRecipe(classes=2), 4, seed, range(2, 3)).start[:3]


SEEDED = ("batch", "truncate", "views", "dropout")
"""Purposes whose order and values are frozen. (Those of noise and tags will change.)"""


@contextmanager
def recording_seeds():
    """A dictionary that fills with torch's seeds and with derived keys, in order of first use."""
    found: dict[str, list] = {"torch": [], "keys": []}
    seed_torch, shake = torch.manual_seed, hashlib.shake_256

    def seeded(seed: int) -> torch.Generator:
        if seed not in found["torch"]:  # checks, which are made now and then, seed again
            found["torch"].append(int(seed))
        return seed_torch(seed)

    def shaken(data: bytes = b"", **options):
        made = shake(data, **options)
        try:
            purpose = json.loads(data[32:])
        except ValueError:
            purpose = [""]
        if purpose[:1] and purpose[0] in SEEDED:
            line = [purpose, made.digest(8).hex()]
            if line not in found["keys"]:
                found["keys"].append(line)
        return made

    with patch("torch.manual_seed", seeded), patch("hashlib.shake_256", shaken):
        yield found


def command(words: list[str]) -> tuple[int, str]:
    """Exit code of a command line, and what it prints."""
    out = StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(out):
            main(words)
    except SystemExit as stopped:
        return stopped.code or 0, out.getvalue()


def answers(run: Path, count: int = 3) -> Tensor:
    """What the classifier that a run left says of some images of 16 x 16 pixels."""
    pixels = np.random.default_rng(3).integers(0, 256, (count, 1, 16, 16), dtype=np.uint8)
    return load_model(run).logits(torch.from_numpy(pixels))
