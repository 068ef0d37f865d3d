"""What `sfumato demo` can be asked for, and what it asks of other commands."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from sfumato.errors import ConfigError
from sfumato.setting_groups import Settings
from sfumato.settings.release import PRESETS as PRESETS_OF_RELEASE
from sfumato.settings.release import ReleaseSettings
from sfumato.settings.train import Train

PAID_BY_TRAINING = 0.9
"""The share of epsilon that the network gets; the statistics of the shared images get the rest."""


@dataclass(frozen=True, kw_only=True, init=False)
class Demo(Settings):
    """The whole story on the embedded digits: protect, attack, share, and one page."""

    MAY_CHANGE: ClassVar = ("open_page",)
    """Settings that say how, not what: a run may go on with others."""

    epsilon: float = 3.0
    """Epsilon of the guarantee for all that is released: smaller is stronger, and needs more
    noise."""
    secure: bool = False
    """Draw noise from a cryptographic stream that is safe against floating-point attacks."""
    open_page: bool = True
    """Open the page in a browser where there is a screen."""

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < math.inf:
            raise ConfigError(
                f"epsilon={self.epsilon:g}: the demo releases what it makes, so it must be above "
                "0 and finite."
            )

    @property
    def private(self) -> Train:
        """How all digits, and some canaries among them, train a network with privacy."""
        return Train(
            **NETWORK,
            batch_size=1000,
            physical_batch_size=1000,
            steps=STEPS,
            lr=2.0,
            ema=0.9,
            clip="automatic",
            epsilon=PAID_BY_TRAINING * self.epsilon,
            secure=self.secure,
            canaries=CANARIES,
        )

    @property
    def plain(self) -> Train:
        """How all digits train the same network without privacy."""
        return Train(**NETWORK, **PLAIN, batch_size=500, steps=STEPS)

    def few_private(self, data: Path) -> Train:
        """How a few digits train it with privacy."""
        return Train(
            **NETWORK,
            data=str(data),
            batch_size=FEW // 2,
            steps=40,
            lr=1.0,
            ema=0.9,
            clip="automatic",
            epsilon=self.epsilon,
            secure=self.secure,
        )

    def few_plain(self, data: Path) -> Train:
        """How a few digits train it without: for as long as it takes to know them by heart."""
        return Train(**NETWORK, **PLAIN, data=str(data), batch_size=FEW // 3, steps=400)

    def sharing(self, teacher: Path) -> ReleaseSettings:
        """How the private network makes images that may be shared, with the rest of epsilon."""
        small = PRESETS_OF_RELEASE["digits-cpu"]()
        return replace(
            small,
            teacher=teacher,
            epsilon=self.epsilon,
            secure=self.secure,
            batch_size=self.private.batch_size,
            epochs=None,
            public_images=1000,
            student_epochs=10,
            student_batch=32,
        )


NETWORK: dict[str, Any] = {"model": "scatter-linear", "image_size": 28}
"""Fixed wavelet features and a linear layer: what needs no training costs no privacy."""
PLAIN: dict[str, Any] = {"mode": "non-private", "lr": 0.1, "momentum": 0.9}
STEPS = 60
FEW = 100
"""Digits that a model is trained on to see who was among them: so few that it learns each one."""
CANARIES = 1000
"""Examples that are nobody's, each in the training set by the toss of a coin."""


def digits_cpu() -> Demo:
    """Epsilon 3 on 4,000 digits: 0.96 with privacy and 0.96 without; two minutes on 2 cores."""
    return Demo()


PRESETS = {"digits-cpu": digits_cpu}

SETTINGS = Demo
