"""The public base: a network that turns images into the features that heads are trained on.

The attacker has it too, for it is public. Features may be scaled to one norm, since a recipe's
learning rate and norm bound are meant for features of one length.
"""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file
from torch import Tensor, nn

from sfumato.data.framing import resize
from sfumato.data.images import Images
from sfumato.errors import DataError, RunError
from sfumato.files import read_json
from sfumato.models.zoo import head_parameters
from sfumato.runs import Run
from sfumato.training.plain import inputs_of, train_plainly
from sfumato.training.plain_step import plain_step

AT_ONCE = 256
"""Images whose features are found together."""


@dataclass(frozen=True)
class Features:
    """Features of a set of images, and their labels. `norm` is what they were scaled to, if so."""

    values: Float[Tensor, "n d"]
    labels: Int[Tensor, " n"]
    norm: float | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def digest(self) -> str:
        """What they are known by: shadow heads belong to one set of features."""
        return hash_of(self.values, self.labels)

    def to(self, device: torch.device) -> "Features":
        """The same, elsewhere."""
        return replace(self, values=self.values.to(device), labels=self.labels.to(device))

    def save(self, folder: Path) -> None:
        """Keep them in a folder, with what they are known by."""
        run = Run(folder)
        run.save_tensors("features.safetensors", {"values": self.values, "labels": self.labels})
        run.write_json("features.json", {"norm": self.norm, "digest": self.digest})

    @staticmethod
    def load(folder: Path) -> "Features":
        """Features from a folder; files that do not belong together are refused."""
        path = folder / "features.safetensors"
        if not path.exists():
            raise RunError(f"{path} is not there: run the stage features first.")
        tensors, notes = load_file(path), read_json(folder / "features.json")
        found = Features(tensors["values"], tensors["labels"], notes["norm"])
        if found.digest != notes["digest"]:
            raise RunError(f"{path} is not the file that features.json speaks of: make it again.")
        return found


def turned_classes(images: Images) -> Images:
    """Images turned over their diagonal, and mirrored ones: other letters by the same hands.

    They stand in for a public set of letters: neither these images nor these classes are those that
    heads are trained on later. (0, 1 and 8 look much the same when turned: a little of the classes
    is known to the base then.)
    """
    if images.shape[1] != images.shape[2]:
        raise DataError(f'"{images.name}" has images that are not square: give --image-size.')
    count = len(images.classes)
    names = [f"{name}-{how}" for how in ("turned", "mirrored") for name in images.classes]
    return replace(
        images,
        pixels=torch.cat([images.pixels.transpose(2, 3), images.pixels.flip(3)]),
        labels=torch.cat([images.labels, images.labels + count]),
        classes=tuple(names),
        name=f"{images.name}-turned",
        people=None,
    )


def pretrain(
    model: nn.Module,
    images: Images,
    run: Run,
    *,
    epochs: float,
    lr: float,
    device: torch.device,
    batch_size: int = 64,
    shift: int = 2,
    seed: int = 0,
) -> nn.Module:
    """Train a base on public images, shifted at random; a run that was cut goes on."""
    images.require_public("training a base model")
    model = model.to(device)
    inputs = inputs_of(model, images, device, seed=seed, shift=shift)
    step = plain_step(model, inputs)
    return train_plainly(
        model, len(images), step, run, epochs=epochs, lr=lr, batch_size=batch_size, seed=seed
    )


def without_head(model: nn.Module) -> nn.Module:
    """The model without its last layer: what goes into that comes out."""
    (path,) = {name.rpartition(".")[0] for name in head_parameters(model)}
    model.set_submodule(path, nn.Identity())
    return model.eval()


@torch.no_grad()
def extract(
    base: nn.Module,
    images: Images,
    device: torch.device,
    *,
    size: int | None = None,
    norm: float | None = None,
    batch_size: int = AT_ONCE,
) -> Features:
    """Features of all images, in float32; with `norm`, each scaled to that length."""
    pieces = []
    for start in range(0, len(images), batch_size):
        some = images.select(range(start, min(start + batch_size, len(images))))
        inputs = inputs_of(base, resize(some, size) if size else some, device)
        pieces.append(base(inputs.normalise(inputs.scale(slice(None)))).float().cpu())
    values = torch.cat(pieces).flatten(1)
    if norm is not None:
        values = values * (norm / values.norm(dim=1, keepdim=True).clamp(min=1e-12))
    return Features(values, images.labels.clone(), norm)


def hash_of(features: Tensor, labels: Tensor) -> str:
    """What a table of features is known by."""
    digest = hashlib.sha256(f"{tuple(features.shape)} {features.dtype};".encode())
    for tensor in (features, labels):
        digest.update(np.ascontiguousarray(tensor.cpu().numpy()).data)
    return digest.hexdigest()
