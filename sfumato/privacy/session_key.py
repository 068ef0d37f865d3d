"""The secret of a run, from which all of its chance derives: coins, noise, tags, views.

It is 32 bytes from the operating system, gone when the run is done. Whoever has them can draw the
batches and subtract the noise, so nothing that is shared may give them away.

What is drawn is a function of the secret and of what it is for (a ledger, a stage, a step), never
of what was drawn before. So a run killed anywhere goes on with the same batches and the same noise,
and a step that is repeated is the same release, not a second one.
"""

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sfumato.errors import PrivacyError


@dataclass(frozen=True)
class SessionKey:
    """The randomness of one run. Keep it in `private/`, and only until the run is finished."""

    key: bytes = field(repr=False)
    fixed: bool = False
    """Made from a seed that is known: whatever it protects is not for release."""

    def __post_init__(self) -> None:
        if len(self.key) != 32:
            raise PrivacyError(f"a secret has 32 bytes, and this one has {len(self.key)}.")

    @property
    def commitment(self) -> str:
        """A name for the secret that gives nothing of it away."""
        return self.derive(("commitment",), 16).hex()

    @classmethod
    def draw(cls) -> "SessionKey":
        """A fresh secret from the operating system."""
        return cls(secrets.token_bytes(32))

    @classmethod
    def from_seed(cls, seed: int) -> "SessionKey":
        """A secret that is none, for tests and experiments that must repeat exactly."""
        return cls(hashlib.sha256(f"sfumato seed {seed}".encode()).digest(), fixed=True)

    def scope(self, ledger_id: str) -> tuple[str, ...]:
        """What every purpose of a ledger has in it: its id, so that no two ledgers share chance.

        Empty for a fixed seed, whose chance must repeat in the next run, under another ledger.
        """
        return () if self.fixed else (ledger_id,)

    def derive(self, purpose: Sequence[str | int], num_bytes: int) -> bytes:
        """Bytes for one purpose, independent of those for any other (SHAKE-256).

        The purpose is written as JSON, so that no two of them can read alike.
        """
        name = json.dumps(list(purpose)).encode()
        return hashlib.shake_256(self.key + name).digest(num_bytes)

    def words(self, purpose: Sequence[str | int], count: int) -> np.ndarray:
        """The same bytes as `count` unsigned 64-bit integers."""
        return np.frombuffer(self.derive(purpose, 8 * count), dtype="<u8")

    def seed(self, purpose: Sequence[str | int]) -> int:
        """A seed of 64 bits for a generator that needs one."""
        return int.from_bytes(self.derive(purpose, 8), "little", signed=True)
