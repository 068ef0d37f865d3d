"""What names a sum, and what its noise is drawn from: both are functions of the sum itself.

So a step that is repeated after a crash gets the same noise and the same name, and is known to be
the same release; and no noise ever hides two different sums. All is made under the run's secret and
for one place alone: in another place the same sum has another name, so that a ledger, which is
public, does not show which sums were equal.

On a GPU names and keys are made where the sums lie, and used there (`kernels.digest`,
`kernels.seal`). The host need not know a name to go on, and is told when it asks.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sfumato.errors import PrivacyError
from sfumato.privacy.flat import Sums
from sfumato.privacy.kernels import from_device, has_kernels, to_device
from sfumato.privacy.secret import Secret

Place = tuple[str, str, int]
"""Id of the ledger, stage and step."""
Key = bytes | Tensor
"""32 bytes; on a GPU eight words (int32), and a ninth that is not zero if the sum is not finite."""


@dataclass(frozen=True)
class Seal:
    """The name of a sum, and a key for the noise of each of its flat vectors."""

    tag: str | Callable[[], str]
    """The name, or what to call for it: that may be to wait for a GPU."""
    keys: Sequence[Key]


def seal(sums: Sums, secret: Secret, place: Place, deviation: float) -> Seal:
    """Name the sums, and make keys for their noise, which is to have this deviation.

    The deviation belongs to the keys: the same noise in two sizes would cancel, and leave the sums.
    With a fixed seed the keys are those of the place alone, so that noise repeats in another run
    and with other rounding of the sums. Sums that are not finite are refused: on a CPU here, on a
    GPU when the tag is asked for. Until then their keys let kernels show nothing of them.
    """
    ledger, stage, step = place
    book = () if secret.fixed else (*secret.scope(ledger), repr(deviation))
    if any(has_kernels(flat) for flat in sums.flats):
        rows = _rows(sums, secret, place)
        tag, keys = _reader(rows[0], place), list(rows[1:])
        for number, key in enumerate(keys):  # the ninth word stays the sums'
            words = _words(_noise_key(secret, stage, step, number, *book), key.device)
            key[:8] = words if secret.fixed else key[:8] ^ words
        return Seal(tag, [_at(flat, k, tag) for flat, k in zip(sums.flats, keys, strict=True)])
    _refuse_broken(sums)
    tag = _hash(sums, secret, place)
    book = (*book, tag) if book else ()
    return Seal(tag, [_noise_key(secret, stage, step, n, *book) for n in range(len(sums.flats))])


def fingerprint(total: Mapping[str, Tensor], secret: Secret, place: Sequence[str | int]) -> str:
    """The tag of the sums. Two different ones have the same with a chance of about 2^-96."""
    sums = Sums.of(total)
    if any(has_kernels(flat) for flat in sums.flats):
        return _reader(_rows(sums, secret, place)[0], place)()
    return _hash(sums, secret, place)


def key_words(key: Key, device: torch.device) -> Tensor:
    """A key as kernels take it; one of bytes is for a sum that is finite."""
    if isinstance(key, Tensor):
        return key
    return _words(key[:32].ljust(36, b"\0"), device)


def _noise_key(secret: Secret, stage: str, step: int, number: int, *book: str) -> bytes:
    return secret.derive(("noise", stage, step, number, *book), 32)


def _hash(sums: Sums, secret: Secret, place: Sequence[str | int]) -> str:
    tag = hashlib.blake2b(key=secret.derive(("tag", *place), 32), digest_size=12)
    tag.update(sums.layout.description)
    for flat in sums.flats:
        tag.update(memoryview(flat.cpu().numpy()))  # pyright: ignore
    return tag.hexdigest()


def _rows(sums: Sums, secret: Secret, place: Sequence[str | int]) -> Tensor:
    """A row of words that the tag is made of, and one for each flat vector, the noise's key."""
    from sfumato.privacy.kernels.digest import digest
    from sfumato.privacy.kernels.seal import seal_words

    device = next(flat.device for flat in sums.flats if has_kernels(flat))
    broken = torch.zeros(1, dtype=torch.int32, device=device)
    found = []
    for number, flat in enumerate(sums.flats):
        purpose = ("digest", number, *place)
        there = to_device(flat, device)
        found.append(digest(there, lambda n, size, p=purpose: secret.derive((*p, n), size), broken))
    # Names, shapes and order of the sums are not in the words, so they are in the key.
    layout = hashlib.blake2b(sums.layout.description).hexdigest()
    key = _words(secret.derive(("seal", layout, *place), 64), device)
    return seal_words(torch.cat(found), key, broken, 1 + len(found))


def _at(flat: Tensor, key: Tensor, tag: Callable[[], str]) -> Key:
    """The key where its vector lies, for there are models of which a part is on a CPU."""
    if has_kernels(flat):
        return key.to(flat.device)
    tag()  # refuses what is not finite, which a CPU would show
    return key[:8].cpu().numpy().tobytes()


def _words(data: bytes, device: torch.device) -> Tensor:
    return to_device(torch.frombuffer(bytearray(data), dtype=torch.int32), device)


def _reader(row: Tensor, place: Sequence[str | int]) -> Callable[[], str]:
    """The tag of a row, for whoever asks: the row is on its way from now on."""
    read = from_device(row)

    def tag() -> str:
        words = read()
        if int(words[8]):
            raise PrivacyError(
                f"the sums of {place[-2]}, step {place[-1]}, are not finite, so no noise can hide "
                f"them: all that noise was put on is NaN. Nothing that came after is kept. {CLIP}"
            )
        return words[:3].numpy().tobytes().hex()

    return tag


def _refuse_broken(sums: Sums) -> None:
    """Name the tensor that is not finite, if there is one."""
    extremes = [torch.stack(torch.aminmax(flat)) for flat in sums.flats if flat.numel()]
    if all(bool(pair.isfinite().all()) for pair in extremes):
        return
    name = next(name for name, tensor in sums.items() if not bool(tensor.isfinite().all()))
    raise PrivacyError(f'"{name}" is not finite, so no noise can hide it. {CLIP}')


CLIP = "Clip first: a clipped sum is finite whatever the examples were."
