"""How a diffusion model of images is built and trained: the settings of `synth.generator`."""

import math
from dataclasses import dataclass

from sfumato.errors import ConfigError
from sfumato.settings.checks import (
    check_0_to_1,
    check_above_0,
    check_counts_above_0,
    check_not_negative,
    check_share,
)


@dataclass(frozen=True, kw_only=True)
class Diffusion:
    """How the generator is built and trained. Lengths are counted in images that it has seen."""

    gen_width: int = 64
    """Channels of the generator's network at its first level; published with 128."""
    gen_multipliers: tuple[int, ...] = (2, 2, 2)
    """Channels at each level of the generator's network, in units of --gen-width."""
    gen_blocks: int = 4
    """Blocks at each level of the generator's network."""
    gen_dropout: float = 0.13
    """Dropout in the generator's blocks."""
    gen_images: int = 4_000_000
    """Length of the generator's training, in images seen, at most; public images are seen many
    times."""
    gen_batch: int = 512
    """Images per step of the generator's training."""
    gen_lr: float = 1e-3
    """Highest learning rate of the generator's training (Adam)."""
    gen_ramp: int = 200_000
    """Images seen until the generator's learning rate is at its height; it falls in the last
    third."""
    gen_half_life: int = 100_000
    """Half-life, in images seen, of the moving average of the generator's weights."""
    gen_moves: float = 0.15
    """Chance that the generator's training images are scaled, turned or shifted; the network is
    told."""
    gen_mirror: bool = True
    """Mirror images at random in the generator's training; not for digits."""
    gen_held_out: float = 0.1
    """Share of the public images that is held out, to see when the generator should stop."""
    gen_looks: int = 20
    """How often the generator's loss on held-out images is measured during training."""
    gen_patience: int = 5
    """Measurements without a better held-out loss after which the generator's training stops; 0 for
    never."""

    def __post_init__(self) -> None:
        counts = ("width", "blocks", "images", "batch", "looks", "half_life")
        check_counts_above_0(self, *(f"gen_{name}" for name in counts))
        check_above_0(self, "gen_lr")
        check_not_negative(self, "gen_ramp", "gen_patience")
        check_0_to_1(self, "gen_dropout", "gen_moves")
        check_share(self, "gen_held_out")
        if not self.gen_multipliers or min(self.gen_multipliers) < 1:
            raise ConfigError("gen_multipliers needs a number above 0 for each size of map.")
        if self.gen_batch > self.gen_images:
            raise ConfigError(
                f"gen_batch={self.gen_batch} is more than all the images to learn from, "
                f"gen_images={self.gen_images}: that is less than a step."
            )

    @property
    def steps(self) -> int:
        """Steps, at most."""
        return max(1, math.ceil(self.gen_images / self.gen_batch))

    def rate(self, step: int) -> float:
        """The learning rate at a step."""
        rise = min(1.0, (step + 1) * self.gen_batch / max(1, self.gen_ramp))
        fall = min(1.0, 3 * (1 - step / self.steps))
        return self.gen_lr * rise * fall
