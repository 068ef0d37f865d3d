"""`privatize`: the only way from private sums to something that may leave the room.

Bookkeeping, noise and division are one call, so that none of them can be forgotten, done twice or
done with a different number than the ledger records. The divisor is the public expected batch.

All is done to one flat vector of the sums, in the order of their mapping, where it lies: a model of
hundreds of parameters takes a few passes over memory, and no wait for the GPU.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from sfumato.errors import PrivacyError
from sfumato.privacy.budget import Plan
from sfumato.privacy.flat import Sums
from sfumato.privacy.kernels import has_noise_kernels
from sfumato.privacy.ledger import Ledger
from sfumato.privacy.seal import Key, key_words, seal
from sfumato.privacy.secure import to_secure_mean
from sfumato.privacy.session_key import SessionKey


@torch.no_grad()
def privatize(
    total: Mapping[str, Tensor],
    plan: Plan,
    ledger: Ledger,
    secret: SessionKey,
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
    noised and charged like any other. A sum that is not finite is refused; on a GPU noise makes it
    NaN everywhere, and it is refused when the ledger is next asked for anything.

    The noise is a function of the secret, the ledger, stage, step and the sums themselves, with
    their names and their order. So a step repeated after a crash releases the same values and is
    not charged again, and no noise ever hides two different sums. Two repeats do pay again: where
    arithmetic differs in the last bit (some GPU kernels), and, on a GPU, the step under way at the
    crash, whose tag was not on disk yet. With a fixed seed, which is never for release, the noise
    depends on stage, step and a number's place alone.

    `Sums` are overwritten where they lie, so that nothing exact is left, and the result is views of
    them: add up the next step in new ones. Any other mapping is copied into a flat vector first,
    and its tensors stay as they are.
    """
    _check(total, plan, ledger, secret)
    sums = Sums.of(total)
    release = replace(plan.release(stage, step, data=ledger.header.data), family=family)
    sealed = seal(sums, secret, (ledger.header.id, stage, step), plan.at(step).noise_deviation)
    ledger.charge(release, sealed.tag)
    dimension = sum(flat.numel() for flat in sums.flats)
    for flat, key in zip(sums.flats, sealed.keys, strict=True):
        _release(flat, plan.at(step), ledger.header.noise, key, dimension)
    return dict(sums)


def _release(flat: Tensor, plan: Plan, source: str, key: Key, dimension: int) -> None:
    """Noise from the source that the ledger names, and the division, on one flat vector."""
    if plan.noise_multiplier == 0:
        flat.div_(plan.expected_batch)
    elif source == "chacha20":
        to_secure_mean(flat, plan, key, dimension)
    else:
        to_philox_mean(flat, plan.noise_deviation, plan.expected_batch, key)


def to_philox_mean(
    total: Float[Tensor, " numbers"], deviation: float, divisor: float, key: Key
) -> None:
    """Put noise from a Philox generator under the first 128 bits of a key on the sum, and divide.

    It is fit for research, and no cryptographic generator: `to_secure_mean` has one. On a GPU one
    kernel does all of it (`kernels.philox`); its deviates are in float32, and not a CPU's.
    """
    if has_noise_kernels(total):
        _philox_on_gpu(total, deviation, divisor, key_words(key, total.device))
        return
    assert isinstance(key, bytes)
    noise = torch.empty_like(total, device="cpu")
    # Not torch's CPU generator: it takes 32 bits of its seed, which can be searched.
    philox = np.random.Philox(key=np.frombuffer(key[:16], dtype=np.uint64))
    drawn = noise.numpy()
    np.random.Generator(philox).standard_normal(dtype=drawn.dtype, out=drawn)
    noise *= deviation / divisor
    total.copy_(noise.to(total.device).add_(total, alpha=1 / divisor))


def _philox_on_gpu(total: Tensor, deviation: float, divisor: float, key: Tensor) -> None:
    from sfumato.privacy.kernels.philox import philox_flat

    if total.dtype == torch.float32:
        philox_flat(total, key, 1 / divisor, deviation / divisor)
        return
    noise = torch.zeros_like(total, dtype=torch.float32)
    philox_flat(noise, key, 1.0, deviation)
    total.add_(noise).div_(divisor)


def _check(total: Mapping[str, Tensor], plan: Plan, ledger: Ledger, secret: SessionKey) -> None:
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
