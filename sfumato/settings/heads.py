"""How one head is trained: a recipe that an adversary knows."""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from sfumato.errors import ConfigError
from sfumato.privacy.releases import Mechanism
from sfumato.settings.checks import check_above_0, check_counts_above_0, check_not_negative


@dataclass(frozen=True, kw_only=True)
class HeadRecipe:
    """The training of one head. The defaults are those published for MNIST."""

    classes: int = 10
    """Number of classes in the data."""
    class_size: int = 1
    """Images of each class that one head is trained on."""
    hidden: int = 0
    """Hidden units (ReLU) of a binary head; 0 for a linear softmax head."""
    positive: tuple[int, ...] = ()
    """Classes that count as 1 for a binary head."""
    lr: float = 0.01
    """Learning rate of a head."""
    weight_decay: float = 1e-5
    """Weight decay of a head."""
    init_std: float = 0.002
    """Standard deviation of a head's initial weights; its biases start at 0."""
    epochs: int | None = None
    """Epochs of a head; left out, --epochs-base + --epochs-per-image * --class-size."""
    epochs_base: int = 26
    """Epochs that every head gets when --epochs is left out (published: 26, for CIFAR-10 38)."""
    epochs_per_image: int = 6
    """Further epochs of a head for each image per class when --epochs is left out (published: 6,
    for CIFAR-10 10)."""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """Optimizer of a head."""
    noise_multiplier: float = 0.0
    """Standard deviation of the noise in a head's gradients, in units of --max-norm; 0 for no
    noise."""
    max_norm: float | None = None
    """Norm to which each example's gradient is clipped in a head's training; left out, nothing is
    clipped."""
    rate: float = 1.0
    """Chance of each image to be in a step of a head's training; 1 takes all images."""

    def __post_init__(self) -> None:
        _check_counts(self)
        _check_kind(self)
        _check_privacy(self)

    @property
    def images(self) -> int:
        """N, the number of images a head is trained on."""
        return self.classes * self.class_size

    @property
    def outputs(self) -> int:
        """Logits for each example: one a class, or one in all."""
        return 1 if self.hidden else self.classes

    @property
    def passes(self) -> int:
        """Epochs, by number or by rule."""
        automatic = self.epochs_base + self.epochs_per_image * self.class_size
        return automatic if self.epochs is None else self.epochs

    @property
    def steps(self) -> int:
        """T, the number of updates: with rate 1/2, two an epoch."""
        return round(self.passes / self.rate)

    @property
    def divisor(self) -> float:
        """The public number that each sum is divided by: the expected batch."""
        return self.images * self.rate

    def layers(self, d: int) -> list[tuple[int, int]]:
        """Rows and columns of each layer's weight, for features of dimension `d`."""
        return [(self.hidden, d), (1, self.hidden)] if self.hidden else [(self.classes, d)]

    def num_parameters(self, d: int) -> int:
        """P, the length of the flat vector."""
        return sum(rows * (columns + 1) for rows, columns in self.layers(d))

    def mechanisms(self) -> Counter[Mechanism]:
        """What the accountant prices, under either relation: T steps of this rate and noise."""
        return Counter({Mechanism(self.rate, self.noise_multiplier): self.steps})


def _check_counts(recipe: HeadRecipe) -> None:
    check_counts_above_0(recipe, "classes", "class_size")
    check_above_0(recipe, "lr")
    check_not_negative(recipe, "weight_decay", "init_std")
    if recipe.passes < 1:
        raise ConfigError(
            f"a head of {recipe.passes} epochs learns nothing: raise epochs, or epochs_base."
        )


def _check_kind(recipe: HeadRecipe) -> None:
    if recipe.optimizer not in ("sgd", "adam"):
        raise ConfigError(f'optimizer="{recipe.optimizer}" is not known. There are: sgd, adam.')
    if recipe.hidden < 0:
        raise ConfigError(f"hidden={recipe.hidden} must be 0, a linear head, or more.")
    if not recipe.hidden:
        if recipe.positive:
            raise ConfigError("positive classes are for binary heads: give hidden units too.")
        if recipe.classes < 2:
            raise ConfigError("a linear head needs at least 2 classes to tell apart.")
        return
    positive = set(recipe.positive)
    if not (positive < set(range(recipe.classes)) and positive):
        raise ConfigError(
            f"positive={recipe.positive} must name some of the classes 0 to {recipe.classes - 1}, "
            "and not all: a binary head tells them from the rest, as in --positive 1 3 5 7 9."
        )
    if len(positive) < len(recipe.positive):
        raise ConfigError(f"positive={recipe.positive} names a class twice. Name each once.")


def _check_privacy(recipe: HeadRecipe) -> None:
    if not 0 < recipe.rate <= 1:
        raise ConfigError(f"rate={recipe.rate:g} must lie in (0, 1]: 1 takes all images.")
    check_above_0(recipe, "max_norm")
    check_not_negative(recipe, "noise_multiplier")
    if recipe.noise_multiplier and recipe.max_norm is None:
        raise ConfigError(
            "noise is measured in norm bounds: give max_norm with noise_multiplier, or neither."
        )
