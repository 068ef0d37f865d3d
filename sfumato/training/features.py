"""Features of a frozen body, found once, where nothing but the head learns.

Without augmentation an image has the same features in every step. So the body runs once over the
data, and each step runs the head alone: the same numbers, for a thousandth of the work.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sfumato.clipping.buffers import Buffers
from sfumato.data.augment import Augmentation
from sfumato.device_transfer import to_device
from sfumato.privacy.sampling import Chunk
from sfumato.training.inputs import Inputs
from sfumato.training.memory import free_bytes


@dataclass(frozen=True)
class FeatureInputs(Inputs):
    """Reads features that are there already, in place of images."""

    features: Tensor | None = None

    def tensors(self, chunk: Chunk, step: int) -> tuple[Tensor, ...]:
        """Features of the units' images, and their labels."""
        assert self.features is not None
        places = self.places(chunk, step)
        found = to_device(self.features[to_device(places, self.features.device)], self.device)
        labels = to_device(self.images.labels[places], self.device)
        return found, labels, *self.numbers(chunk.indices)

    def trial(self, units: int = 3) -> tuple[Tensor, ...]:
        """Noise of the right shape."""
        assert self.features is not None
        _, *others = super().trial(units)
        shape = (units * self.rows, *self.features.shape[1:])
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        return noise.to(self.device, self.features.dtype), *others


def with_features(
    model: nn.Module, inputs: Inputs, say: Callable[[str], None] | None = None
) -> tuple[nn.Module, Inputs]:
    """The head and its features, if nothing else learns; otherwise what was given.

    Guarantee: each example's gradient is the one the whole model would give.
    """
    plain = inputs.augmentation == Augmentation() and inputs.views == 1
    found = _head_of(model, inputs) if plain else None
    if found is None:
        return model, inputs
    path, head, example = found
    if len(inputs.images) * example.nbytes > free_bytes(inputs.device) // 2:
        return model, inputs
    if say is not None:
        say("only the head learns: features of each image are found once")
    pieces, buffers = [], Buffers(model)
    buffers.remember_parameters()
    for start in range(0, len(inputs.images), 256):
        x = inputs.normalise(inputs.scale(slice(start, start + 256)))
        pieces.append(_run(model, head, inputs, x)[0])
    buffers.check(values=True)
    values = {name: getattr(inputs, name) for name in Inputs.__dataclass_fields__}
    return _alone(path, head), FeatureInputs(**values, features=torch.cat(pieces))


def _head_of(model: nn.Module, inputs: Inputs) -> tuple[str, nn.Module, Tensor] | None:
    """Path, module and one example's features of the only layer that learns, if it comes last."""
    learning = [
        (path, module)
        for path, module in model.named_modules()
        if any(p.requires_grad for p in module.parameters(recurse=False))
    ]
    if len(learning) != 1:
        return None
    ((path, head),) = learning
    x = replace(inputs, people=None).trial(3)[0]
    try:
        features, logits = _run(model, head, inputs, x)
        again, _ = _run(model, head, inputs, x)
        with torch.no_grad():
            alone = inputs.logits(head, features)
    except _Unfit:
        return None
    same = torch.equal(features, again) and torch.equal(alone, logits)
    return (path, head, features[0]) if same and len(features) == len(x) else None


class _Unfit(Exception):
    """The layer is not called once with one tensor."""


@torch.no_grad()
def _run(model: nn.Module, head: nn.Module, inputs: Inputs, x: Tensor) -> tuple[Tensor, Tensor]:
    """What goes into the head, as float32, and what comes out of the model."""
    with _watched(head) as calls:
        logits = inputs.logits(model, x)
    if len(calls) != 1 or len(calls[0]) != 1 or not isinstance(calls[0][0], Tensor):
        raise _Unfit
    return calls[0][0].float(), logits


@contextmanager
def _watched(head: nn.Module) -> Iterator[list[tuple[Any, ...]]]:
    calls: list[tuple[Any, ...]] = []
    watch = head.register_forward_pre_hook(lambda _, args: calls.append(args))
    try:
        yield calls
    finally:
        watch.remove()


def _alone(path: str, head: nn.Module) -> nn.Module:
    """The head by itself, under the name it has in the model, so that its noise is the same."""
    root = place = _Alone()
    *parents, name = path.split(".")
    for parent in parents:
        inner = nn.Module()
        place.add_module(parent, inner)
        place = inner
    place.add_module(name, head)
    root.call = lambda x: head(x)
    return root


class _Alone(nn.Module):
    call: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        """What the head makes of features."""
        return self.call(x)
