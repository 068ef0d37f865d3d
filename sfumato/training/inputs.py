"""How images become inputs: device, pixel statistics, augmented views, the images of a person.

What a private step samples, clips and hides is a *unit*: one image, or one person with up to K
images. A unit has several rows in the inputs (its images, and of each its augmented views), next
to each other, and one loss, their mean. So all of them together are clipped as one.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato.data.augment import Augmentation
from sfumato.data.example_rng import ExampleRng
from sfumato.data.images import Images
from sfumato.data.people import People
from sfumato.device_transfer import to_device
from sfumato.errors import ConfigError
from sfumato.privacy.sampling import Chunk

Losses = Callable[..., Tensor]
"""One loss a unit, of a model and inputs."""


@dataclass(frozen=True)
class Inputs:
    """Images and everything that is done to them on their way into a model."""

    images: Images
    device: torch.device
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    augmentation: Augmentation = field(default_factory=Augmentation)
    views: int = 1
    precision: torch.dtype = torch.float32
    people: People | None = None
    seed: int = 0
    wrap_loss: Callable[[Losses], Losses] | None = None
    """What an extender, or canaries, make of the losses (see `hooks`)."""
    canaries: int = 0
    """So many of the images, the last, stand for canaries: inputs then end with their numbers."""

    def __len__(self) -> int:
        """The number of units: images, or people."""
        return len(self.images) if self.people is None else len(self.people)

    @property
    def rows(self) -> int:
        """Rows of the inputs that belong to one unit."""
        return self.views * (1 if self.people is None else self.people.most)

    def tensors(self, chunk: Chunk, step: int) -> tuple[Tensor, ...]:
        """Normalised views, those of one unit side by side, and the labels of its images.

        Guarantee: what a unit looks like in a step depends on the seed, the step and the unit.
        """
        places = self.places(chunk, step)
        pixels = self.scale(places).repeat_interleave(self.views, dim=0)
        views = self.augmentation(pixels, self.rng(places, step))
        labels = to_device(self.images.labels[places], self.device)
        return self.normalise(views), labels, *self.numbers(chunk.indices)

    def rng(self, places: Tensor, step: int, *more: int) -> ExampleRng:
        """What is drawn for each row in a step; `more` names a stream of its own."""
        images = to_device(places.repeat_interleave(self.views), self.device)
        row = torch.arange(len(images), device=self.device) % self.rows
        return ExampleRng.of(self.seed, step, images, row, *more)

    def places(self, chunk: Chunk, step: int) -> Tensor:
        """Where the images of the chunk's units are."""
        if self.people is None:
            return chunk.indices
        return self.people.pick(chunk.indices, self.seed, step)

    def numbers(self, units: Tensor) -> tuple[Tensor, ...]:
        """The number of each unit's canary, -1 for one that is none; nothing without canaries."""
        if not self.canaries:
            return ()
        return (to_device((units - len(self) + self.canaries).clamp(min=-1), self.device),)

    def scale(self, places: Tensor | slice) -> Tensor:
        """Pixels at these places, between 0 and 1, on the device."""
        if isinstance(places, Tensor):
            places = to_device(places, self.images.pixels.device)
        return to_device(self.images.pixels[places], self.device).float() / 255

    def normalise(self, pixels: Tensor) -> Tensor:
        """Pixels between 0 and 1, centred and scaled by fixed, public numbers."""
        mean, deviation = self._constants
        layout = torch.channels_last if pixels.is_cuda else torch.contiguous_format
        return ((pixels - mean) / deviation).contiguous(memory_format=layout)

    @cached_property
    def _constants(self) -> tuple[Tensor, Tensor]:
        # Made once: a GPU would wait for numbers from the host.
        mean = torch.tensor(self.mean, device=self.device).reshape(1, -1, 1, 1)
        return mean, torch.tensor(self.deviation, device=self.device).reshape(1, -1, 1, 1)

    def logits(self, model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """The model's answers, in the precision asked for, as float32."""
        lower = self.precision != torch.float32
        with torch.autocast(self.device.type, self.precision) if lower else nullcontext():
            answers = model(x)
        if not isinstance(answers, Tensor):
            raise ConfigError(
                f"in training the model answers with {type(answers).__name__}, not with a tensor "
                "of one row an image: drop its other heads, or return the first answer alone."
            )
        return answers.float()

    def losses(self, model: nn.Module, *inputs: Tensor) -> Tensor:
        """One loss a unit, averaged over all of its rows; or what was made of it."""
        losses = self._losses if self.wrap_loss is None else self.wrap_loss(self._losses)
        return losses(model, *inputs)

    def _losses(self, model: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """The cross-entropy of the model's answers."""
        x, y = inputs
        labels = y.repeat_interleave(self.views)
        each = F.cross_entropy(self.logits(model, x), labels, reduction="none")
        return each.reshape(-1, self.rows).mean(dim=1)

    def trial(self, units: int = 3) -> tuple[Tensor, ...]:
        """Noise of the right shape: no private image is looked at."""
        generator = torch.Generator().manual_seed(0)
        shape = (units * self.rows, *self.images.shape)
        x = torch.randn(shape, generator=generator).to(self.device)
        layout = torch.channels_last if x.is_cuda else torch.contiguous_format
        y = torch.arange(units * self.rows // self.views) % len(self.images.classes)
        # Where there are canaries, every other unit is one.
        turns = torch.arange(units)
        canary = torch.where(turns % 2 == 1, turns % max(1, self.canaries), -1)
        numbers = self.numbers(len(self) - self.canaries + canary)
        return x.contiguous(memory_format=layout), y.to(self.device), *numbers
