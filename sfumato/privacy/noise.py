"""`privatize`: the only way from private sums to something that may leave the room.

Bookkeeping, noise and division are one call, so that none of them can be forgotten, done twice or
done with a different number than the ledger records. The divisor is the public expected batch.
"""

from collections.abc import Mapping

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
) -> dict[str, Tensor]:
    """Turn sums over private examples into values that may be released.

    Charges the ledger for this step, adds Gaussian noise of deviation `plan.noise_multiplier *
    plan.max_norm` to every coordinate, and divides by `plan.expected_batch`.

    Guarantee: if `total` is a sum over the Poisson batch of step `step` of vectors whose norm,
    taken over all tensors together, is at most `plan.max_norm`, the result is the subsampled
    Gaussian mechanism that the ledger now records. An empty batch is an all-zero `total`: it is
    noised and charged like any other. A step of a run has one noise, so a step repeated after a
    crash releases nothing new; asking for a step twice in one process is refused. Half-precision
    sums are noised in float32.
    """
    if plan.relation != ledger.header.relation:
        raise PrivacyError(
            f"the plan hides examples by {plan.relation}, its ledger by {ledger.header.relation}."
        )
    if secret.fixed and not ledger.header.fixed_seed:
        raise PrivacyError(
            "the noise would come from a fixed seed, and the ledger does not say so. Open the "
            "ledger with fixed_seed=True: its results are then marked not for release."
        )
    for name, tensor in total.items():
        if not tensor.is_floating_point():
            raise PrivacyError(f'"{name}" holds {tensor.dtype}: noise needs floating point sums.')
        if not bool(torch.isfinite(tensor).all()):
            raise PrivacyError(
                f'"{name}" is not finite, so no noise can hide it. Clip first: a clipped sum is '
                "finite whatever the examples were."
            )
    ledger.charge(plan.event(stage, step, data=ledger.header.data))
    sums = {name: _at_least_float32(tensor) for name, tensor in total.items()}
    if plan.noise_deviation > 0:
        secure = ledger.header.noise == "chacha20"
        add = add_secure_noise if secure else add_noise
        sums = add(sums, plan, secret, ("noise", stage, step))
    return {name: tensor / plan.expected_batch for name, tensor in sums.items()}


def add_noise(
    sums: Mapping[str, Tensor], plan: Plan, secret: Secret, purpose: tuple[str | int, ...]
) -> dict[str, Tensor]:
    """Noise from torch's generator, on the tensors' own device: fast, and fit for research.

    The generator is seeded for this step alone with 64 bits of the secret. It is not a
    cryptographic one; `add_secure_noise` is.
    """
    seed = int(secret.words(purpose, 1)[0])
    generators: dict[torch.device, torch.Generator] = {}
    noisy = {}
    for name, tensor in sums.items():
        if tensor.device not in generators:
            generators[tensor.device] = torch.Generator(tensor.device).manual_seed(seed)
        noise = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        noise.normal_(0.0, plan.noise_deviation, generator=generators[tensor.device])
        noisy[name] = tensor + noise
    return noisy


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.detach()
