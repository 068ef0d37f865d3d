"""How a diffusion model of images is built and trained: the settings of `synth.generator`."""

import math
from dataclasses import dataclass

from sfumato.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Diffusion:
    """How the generator is built and trained. Lengths are counted in images that it has seen."""

    gen_width: int = 64
    """Width of its network; 128 is the published one."""
    gen_multipliers: tuple[int, ...] = (2, 2, 2)
    """Widths at each level, in units of that."""
    gen_blocks: int = 4
    """Blocks at each level."""
    gen_dropout: float = 0.13
    """Dropout in them."""
    gen_images: int = 4_000_000
    """Images to learn from, at most: public ones, again and again."""
    gen_batch: int = 512
    """Images in a step."""
    gen_lr: float = 1e-3
    """Learning rate of Adam at its height."""
    gen_ramp: int = 200_000
    """It rises until here, and falls to 0 in the last third."""
    gen_half_life: int = 100_000
    """Half-life of the average of weights; early on a tenth of what was seen."""
    gen_moves: float = 0.15
    """Chance that an image is scaled, turned or shifted; the network is told."""
    gen_mirror: bool = True
    """Whether images may be mirrored: not for digits."""
    gen_held_out: float = 0.1
    """The share of the public images that is held out, to see when to stop."""
    gen_looks: int = 20
    """How often to look."""
    gen_patience: int = 5
    """Looks without a better one after which training stops; 0 for never."""

    def __post_init__(self) -> None:
        counts = ("width", "blocks", "images", "batch", "looks", "half_life")
        values = [(name, getattr(self, f"gen_{name}")) for name in counts]
        values += [("multipliers", value) for value in self.gen_multipliers]
        for name, value in values:
            if value < 1:
                raise ConfigError(f"gen_{name}={value} must be at least 1.")
        if self.gen_batch > self.gen_images:
            raise ConfigError(
                f"gen_batch={self.gen_batch} is more than all the images to learn from, "
                f"gen_images={self.gen_images}: that is less than a step."
            )
        if not self.gen_multipliers:
            raise ConfigError("gen_multipliers needs a number for each size of map.")
        if not 0 < self.gen_lr < math.inf:
            raise ConfigError(f"gen_lr={self.gen_lr:g} must be above 0 and finite.")
        for name, most in (("gen_dropout", 1.0), ("gen_moves", 1.0)):
            if not 0 <= getattr(self, name) <= most:
                raise ConfigError(f"{name}={getattr(self, name):g} must lie between 0 and 1.")
        if self.gen_ramp < 0 or self.gen_patience < 0:
            raise ConfigError("gen_ramp and gen_patience must be 0 or more.")
        if not 0 < self.gen_held_out < 1:
            raise ConfigError(f"gen_held_out={self.gen_held_out:g} must lie between 0 and 1.")

    @property
    def steps(self) -> int:
        """Steps, at most."""
        return max(1, math.ceil(self.gen_images / self.gen_batch))

    def rate(self, step: int) -> float:
        """The learning rate at a step."""
        rise = min(1.0, (step + 1) * self.gen_batch / max(1, self.gen_ramp))
        fall = min(1.0, 3 * (1 - step / self.steps))
        return self.gen_lr * rise * fall
