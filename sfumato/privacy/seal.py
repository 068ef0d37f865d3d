"""The tag a ledger knows a sum by, and the keys its noise is drawn from.

Both are functions of the sum, the secret and the step: a repeated step is the same release, and no
noise hides two sums. In another step or ledger the same sum has another tag, so that a ledger,
which is public, does not show which sums were equal.

A CPU hashes the sums, and knows their tag before it goes on. On a GPU tag and keys are made where
the sums lie, and used there (`kernels.digest`, `kernels.seal`): nobody waits for the tag until
asked for.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato.device_transfer import from_device, to_device
from sfumato.errors import PrivacyError
from sfumato.privacy.flat import Sums
from sfumato.privacy.kernels import has_noise_kernels
from sfumato.privacy.session_key import SessionKey

StepName = tuple[str, str, int]
"""What names a step: id of the ledger, stage, and number of the step."""

Key = bytes | Tensor
"""32 bytes; on a GPU eight words (int32), and a ninth that is not zero if the sum is not finite."""


@dataclass(frozen=True)
class Seal:
    """The tag of sums, and a key for the noise of each of their flat vectors."""

    tag: str | Callable[[], str]
    """The tag, or what to call for it: that may be to wait for a GPU."""
    keys: Sequence[Key]


def seal(sums: Sums, secret: SessionKey, step: StepName, deviation: float) -> Seal:
    """The tag of the sums, and keys for their noise, which is to have this deviation.

    The deviation belongs to the keys: the same noise in two sizes would cancel, and leave the sums.
    With a fixed seed the keys are those of stage and step alone, so that noise repeats in another
    run and with other rounding of the sums. Sums that are not finite are refused: on a CPU here, on
    a GPU when the tag is asked for. Until then their keys let kernels show nothing of them.
    """
    seal_there = _seal_on_gpu if _any_on_gpu(sums) else _seal_on_cpu
    return seal_there(sums, secret, step, deviation)


def tag_of(total: Mapping[str, Tensor], secret: SessionKey, step: StepName) -> str:
    """The tag of the sums. Two different ones have the same with a chance of about 2^-96."""
    sums = Sums.of(total)
    if _any_on_gpu(sums):
        return _tag_reader(_tag_and_keys(sums, secret, step)[0], step)()
    return _cpu_tag(sums, secret, step)


def key_words(key: Key, device: torch.device) -> Tensor:
    """A key as kernels take it; one of bytes is for a sum that is finite."""
    if isinstance(key, Tensor):
        return key
    return _words(key[:32].ljust(36, b"\0"), device)


def _any_on_gpu(sums: Sums) -> bool:
    """Whether some of the sums lie on a GPU: there are models of which a part is on a CPU."""
    return any(has_noise_kernels(flat) for flat in sums.flats)


def _seal_on_cpu(sums: Sums, secret: SessionKey, step: StepName, deviation: float) -> Seal:
    _refuse_broken(sums)
    tag = _cpu_tag(sums, secret, step)
    numbers = range(len(sums.flats))
    return Seal(tag, [_noise_key(secret, step, number, deviation, tag) for number in numbers])


def _cpu_tag(sums: Sums, secret: SessionKey, step: StepName) -> str:
    """A keyed hash of the sums, and of how they lie."""
    tag = hashlib.blake2b(key=secret.derive(("tag", *step), 32), digest_size=12)
    tag.update(sums.layout.description)
    for flat in sums.flats:
        tag.update(memoryview(flat.cpu().numpy()))  # pyright: ignore
    return tag.hexdigest()


def _refuse_broken(sums: Sums) -> None:
    """Name the tensor that is not finite, if there is one."""
    extremes = [torch.stack(torch.aminmax(flat)) for flat in sums.flats if flat.numel()]
    if all(bool(pair.isfinite().all()) for pair in extremes):
        return
    name = next(name for name, tensor in sums.items() if not bool(tensor.isfinite().all()))
    raise PrivacyError(f'"{name}" is not finite, so no noise can hide it. {CLIP}')


def _seal_on_gpu(sums: Sums, secret: SessionKey, step: StepName, deviation: float) -> Seal:
    row, *keys = _tag_and_keys(sums, secret, step)
    tag = _tag_reader(row, step)
    for number, key in enumerate(keys):
        # Mixed with a key of the step and the deviation. The ninth word stays: is the sum finite?
        words = _words(_noise_key(secret, step, number, deviation), key.device)
        key[:8] = words if secret.fixed else key[:8] ^ words
    return Seal(tag, [_key_on(flat, k, tag) for flat, k in zip(sums.flats, keys, strict=True)])


def _tag_and_keys(sums: Sums, secret: SessionKey, step: StepName) -> Tensor:
    """A row of words that the tag is made of, and one for each flat vector: the sums' own keys."""
    from sfumato.privacy.kernels.digest import digest
    from sfumato.privacy.kernels.seal import seal_words

    device = next(flat.device for flat in sums.flats if has_noise_kernels(flat))
    broken = torch.zeros(1, dtype=torch.int32, device=device)
    found = []
    for number, flat in enumerate(sums.flats):
        purpose = ("digest", number, *step)
        there = to_device(flat, device)
        found.append(digest(there, lambda n, size, p=purpose: secret.derive((*p, n), size), broken))
    # Names, shapes and order of the sums are not in the words, so they are in the key.
    layout = hashlib.blake2b(sums.layout.description).hexdigest()
    key = _words(secret.derive(("seal", layout, *step), 64), device)
    return seal_words(torch.cat(found), key, broken, 1 + len(found))


def _tag_reader(row: Tensor, step: StepName) -> Callable[[], str]:
    """What to call for the tag: its row of words is on its way to the CPU from now on."""
    read = from_device(row)
    _, stage, count = step

    def tag() -> str:
        words = read()
        if int(words[8]):
            raise PrivacyError(
                f"the sums of {stage}, step {count}, are not finite, so no noise can hide "
                f"them: all that noise was put on is NaN. Nothing that came after is kept. {CLIP}"
            )
        return words[:3].numpy().tobytes().hex()

    return tag


def _key_on(flat: Tensor, key: Tensor, tag: Callable[[], str]) -> Key:
    """The key where its vector lies, as what works there takes it."""
    if has_noise_kernels(flat):
        return key.to(flat.device)
    tag()  # refuses what is not finite, which a CPU would show
    return key[:8].cpu().numpy().tobytes()


def _noise_key(
    secret: SessionKey, step: StepName, number: int, deviation: float, *tag: str
) -> bytes:
    """The key of the flat vector of that number: of the sums only if their tag is given."""
    ledger, stage, count = step
    own = () if secret.fixed else (*secret.scope(ledger), repr(deviation), *tag)
    return secret.derive(("noise", stage, count, number, *own), 32)


def _words(data: bytes, device: torch.device) -> Tensor:
    return to_device(torch.frombuffer(bytearray(data), dtype=torch.int32), device)


CLIP = "Clip first: a clipped sum is finite whatever the examples were."
