"""`privatize`: the only way from private sums to something that may leave the room.

Bookkeeping, noise and division are one call, so that none of them can be forgotten, done twice or
done with a different number than the ledger records. The divisor is the public expected batch.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from sfumato.errors import PrivacyError
from sfumato.privacy.budget import Plan
from sfumato.privacy.ledger import Ledger
from sfumato.privacy.sampling import Secret
from sfumato.privacy.secure import add_secure_noise


def privatize(
    total: Mapping[str, Tensor],
    plan: Plan,
    ledger: Ledger,
    secret: Secret,
    *,
    step: int,
    stage: str,
    family: str = "",
) -> dict[str, Tensor]:
    """Turn sums over private examples into values that may be released.

    Charges the ledger for this step, adds Gaussian noise of deviation noise multiplier times norm
    bound, those of `plan.at(step)`, to every coordinate, and divides by `plan.expected_batch`.

    Guarantee: if `total` is a sum over the Poisson batch of step `step` of vectors whose norm,
    taken over all tensors together, is at most that norm bound, the result is the subsampled
    Gaussian mechanism that the ledger now records. An empty batch is an all-zero `total`: it is
    noised and charged like any other.

    The noise is a function of the secret, the ledger, stage, step, tensor name and the sum itself.
    So a step repeated after a crash releases the same values and is not charged again, and no noise
    ever hides two different sums. (Where arithmetic does not repeat to the last bit, as in some GPU
    kernels, a repeated step is another release, and pays.) With a fixed seed, which is never for
    release, the noise depends on stage, step and name alone.
    """
    _check(total, plan, ledger, secret)
    tag = fingerprint(total, secret, (ledger.header.id, stage, step))
    event = plan.event(stage, step, data=ledger.header.data)
    ledger.charge(replace(event, tag=tag, family=family))
    plan = plan.at(step)
    # With a fixed seed the noise must repeat, in another run and with other rounding of the sum.
    book = () if secret.fixed else (ledger.header.id, tag)
    secure = ledger.header.noise == "chacha20"
    dimension = sum(tensor.numel() for tensor in total.values())
    released = {}
    for name, tensor in total.items():
        purpose = ("noise", stage, step, name, *book)
        noisy = tensor.detach()
        if plan.noise_multiplier > 0 and secure:
            noisy = add_secure_noise(noisy, plan, secret.derive(purpose, 32), dimension)
        elif plan.noise_multiplier > 0:
            noisy = add_noise(noisy, plan.noise_deviation, secret.derive(purpose, 16))
        released[name] = noisy / plan.expected_batch
    return released


def add_noise(total: Tensor, deviation: float, key: bytes) -> Tensor:
    """Noise from a Philox generator under `key`, 128 bits: fast, and fit for research.

    On a GPU torch's own Philox is used, which takes 64 bits of the key. Neither is a cryptographic
    generator; `add_secure_noise` has one.
    """
    if total.device.type == "cpu":
        # Not torch's CPU generator: it takes 32 bits of its seed, which can be searched.
        words = np.frombuffer(key, dtype=np.uint64)
        drawn = np.random.Generator(np.random.Philox(key=words)).standard_normal(
            tuple(total.shape), dtype=np.float64 if total.dtype == torch.float64 else np.float32
        )
        return total + deviation * torch.from_numpy(np.asarray(drawn)).to(total.dtype)
    (seed,) = struct.unpack("<q", key[:8])
    generator = torch.Generator(total.device).manual_seed(seed)
    noise = torch.empty(total.shape, device=total.device, dtype=total.dtype)
    return total + noise.normal_(0.0, deviation, generator=generator)


def fingerprint(total: Mapping[str, Tensor], secret: Secret, place: Sequence[str | int]) -> str:
    """A short tag of the sums, under the secret and for this place alone.

    It tells a repeated release from another one. In another place the same sums have another tag,
    so that a ledger, which is public, does not show which sums were equal.
    """
    digest = hashlib.blake2b(key=secret.derive(("tag", *place), 32), digest_size=12)
    for name, tensor in sorted(total.items()):
        # Noise of a GPU is other noise, so what is released there is another release.
        where = tensor.device.type
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {where};".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _check(total: Mapping[str, Tensor], plan: Plan, ledger: Ledger, secret: Secret) -> None:
    header = ledger.header
    if plan.relation != header.relation:
        raise PrivacyError(
            f"the plan hides examples by {plan.relation}, its ledger by {header.relation}."
        )
    if secret.fixed and not header.fixed_seed:
        raise PrivacyError(
            "the noise would come from a fixed seed, and the ledger does not say so. Open the "
            "ledger with fixed_seed=True: its results are then marked not for release."
        )
    if header.secret != secret.commitment:
        raise PrivacyError(
            "this is not the secret that the ledger was opened with, so its events would not be "
            "those that are released. Open the ledger with secret=secret.commitment."
        )
    if not isinstance(total, Mapping):
        raise PrivacyError("give the sums as a dictionary of tensors, {name: sum}.")
    for name, tensor in total.items():
        if tensor.dtype not in (torch.float32, torch.float64):
            raise PrivacyError(
                f'"{name}" holds {tensor.dtype}: a sum in less than float32 can jump by more than '
                "the norm bound when one example joins. Add up in float32."
            )
        if not bool(torch.isfinite(tensor).all()):
            raise PrivacyError(
                f'"{name}" is not finite, so no noise can hide it. Clip first: a clipped sum is '
                "finite whatever the examples were."
            )
