"""A trained classifier, ready for use: its network, and all that stands between a picture and it.

`model.json` beside the weights says what they are weights of: the network, what became of its
BatchNorm, the names of the classes, and how images are framed and scaled. None of it was computed
from private images. A picture goes through the very code that test images went through.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sfumato.data.convert import AtHand, ImageKind
from sfumato.lineage import DESCRIPTION as NAME
from sfumato.models.normalise import NormPolicy, apply_norm_policy
from sfumato.models.zoo import build_model
from sfumato.privacy.ledger import Ledger
from sfumato.runs import Run
from sfumato.training.evaluate import logits_of
from sfumato.training.inputs import Inputs


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a classifier is built from, and what it takes."""

    model: str
    norm: NormPolicy
    """What became of its BatchNorm."""
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    """Channels, height and width of an image."""
    centre_crop: int | None
    """So many pixels a side are cut out of the middle, before an image is resized to that."""
    mean: tuple[float, ...]
    """Of each channel, on the scale from 0 to 1: subtracted."""
    deviation: tuple[float, ...]
    """The same: divided by."""
    precision: Literal["float32", "bf16"]
    """Of activations."""
    groups: dict[str, int] = field(default_factory=dict)
    """Of each GroupNorm, by the name of its layer; older files do not say."""

    @classmethod
    def of(
        cls,
        inputs: Inputs,
        network: nn.Module,
        *,
        name: str,
        norm: NormPolicy,
        centre_crop: int | None,
    ) -> "Description":
        """That of a network by name, which reads images in this way."""
        layers = network.named_modules()
        return cls(
            model=name,
            norm=norm,
            classes=inputs.images.classes,
            shape=inputs.images.shape,
            centre_crop=centre_crop,
            mean=inputs.mean,
            deviation=inputs.deviation,
            precision="bf16" if inputs.precision == torch.bfloat16 else "float32",
            groups={k: layer.num_groups for k, layer in layers if isinstance(layer, nn.GroupNorm)},
        )

    def keep(
        self, run: Run, network: nn.Module, guarantee: Mapping[str, Any] | None = None
    ) -> None:
        """Write the weights, and this in their file and beside it.

        Beside it last: with model.json there is a whole model.
        """
        run.save_tensors("model.safetensors", network.state_dict(), guarantee, self)
        run.write_json(NAME, self)

    def new_network(self) -> nn.Module:
        """Untrained; a name that means nothing here, or other classes, is a `ConfigError`."""
        network = build_model(self.model, classes=len(self.classes), shape=self.shape)
        network = apply_norm_policy(network, self.norm)
        for name, layer in network.named_modules():
            if isinstance(layer, nn.GroupNorm):
                layer.num_groups = self.groups.get(name, layer.num_groups)
        return network.eval()


@dataclass(frozen=True)
class Prediction:
    """What a network makes of one image."""

    label: str
    """The most probable class."""
    probability: float
    probabilities: dict[str, float] = field(repr=False)
    """Of all classes, by name."""


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A classifier, with what it takes to use it. `load_model` makes one of a run."""

    network: nn.Module = field(repr=False)
    """In evaluation mode. It takes what `preprocess` gives, and answers with logits."""
    description: Description
    ledger: Ledger | None = field(default=None, repr=False)
    """Of the private images that it was trained on, where there were any."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Their names, in the order of the network's answers."""
        return self.description.classes

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of what the network takes."""
        return self.description.shape[1:]

    @cached_property
    def guarantee(self) -> dict[str, Any] | None:
        """Epsilon, delta, unit and what else belongs to them; None if nothing is guaranteed."""
        guarantee = None if self.ledger is None else self.ledger.guarantee()
        return None if guarantee is None or math.isinf(guarantee["epsilon"]) else guarantee

    def preprocess(self, images: AtHand) -> Float[Tensor, "n c h w"]:
        """Inputs of the network, on its device: framed, scaled and normalised as in training.

        Images are paths, Pillow images, pixels (uint8, c h w or n c h w), or a set; one or
        several. Pixels of `image_size` count as framed.
        """
        inputs = self._inputs(images)
        return inputs.normalise(inputs.scale(slice(None)))

    def logits(self, images: AtHand) -> Float[Tensor, "n classes"]:
        """The network's answers, one row an image, on the CPU: as `sfumato train` scores them."""
        return logits_of(self.network, self._inputs(images))

    def predict(self, images: AtHand) -> list[Prediction]:
        """The most probable class of each image, and the probabilities of all."""
        logits = self.logits(images)
        found = zip(logits.argmax(dim=1).tolist(), logits.softmax(dim=1).tolist(), strict=True)
        return [
            Prediction(self.classes[best], row[best], dict(zip(self.classes, row, strict=True)))
            for best, row in found
        ]

    def _inputs(self, images: AtHand) -> Inputs:
        made = self.description
        kind = ImageKind(shape=made.shape, classes=made.classes, centre_crop=made.centre_crop)
        device = next(self.network.parameters()).device
        precision = torch.bfloat16 if made.precision == "bf16" else torch.float32
        return Inputs(kind.gather(images), device, made.mean, made.deviation, precision=precision)
