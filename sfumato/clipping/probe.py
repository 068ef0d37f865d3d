"""Trial passes: more or fewer examples, the same dice each time, and a copy that hides nothing."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sfumato.errors import UnsupportedLayer


def resize_batch(inputs: Sequence[Any], examples: int, number: int) -> list[Any]:
    """The inputs of `number` examples, made by repeating those there are, ever fainter."""
    places = torch.arange(number) % max(1, examples)
    found = [examples_at(x, places, examples) if isinstance(x, Tensor) else x for x in inputs]
    return [fading_examples(x, number) if isinstance(x, Tensor) else x for x in found]


def fading_examples(x: Tensor, examples: int) -> Tensor:
    """Examples that no two are alike, so that rows of one are not taken for another's."""
    if not x.is_floating_point():
        return x
    strength = 1 / (1 + 0.1 * torch.arange(examples, device=x.device, dtype=x.dtype))
    rows = x.unflatten(0, (examples, -1))
    return (rows * strength.reshape(-1, *[1] * (rows.ndim - 1))).flatten(0, 1)


def examples_at(x: Tensor, places: Tensor, examples: int) -> Tensor:
    """All rows of the examples at these places; zeros if there are no examples at all."""
    rows = x.unflatten(0, (examples, -1)) if examples else x.new_zeros(1, 1, *x.shape[1:])
    return rows[places.to(x.device)].flatten(0, 1)


def random_state() -> tuple[Tensor, list[Tensor]]:
    """torch's own generators, which dropout draws from."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return torch.get_rng_state(), cuda


def same_state(one: tuple[Tensor, list[Tensor]], other: tuple[Tensor, list[Tensor]]) -> bool:
    """Whether nothing was drawn in between."""
    pairs = zip([one[0], *one[1]], [other[0], *other[1]], strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def set_random_state(state: tuple[Tensor, list[Tensor]]) -> None:
    """Draw the same again."""
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])


DROPOUTS = (
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
)


class _NoDropout(TorchFunctionMode):
    """torch's dropout functions hand back what they are given."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in DROPOUTS:
            return args[0] if args else (kwargs or {})["input"]
        return func(*args, **(kwargs or {}))


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Dropout is off inside: torch's functions, and modules of torch, torchvision and timm.

    Modules of others keep their mode, for it may change more than dropout.
    """
    kinds = ("drop", "stochasticdepth")
    with (
        _switched_off([m for m in model.modules() if m.training and _is_one_of(m, kinds)]),
        _NoDropout(),
    ):
        yield


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """The whole model is in evaluation mode inside."""
    with _switched_off([m for m in model.modules() if m.training]):
        yield


@contextmanager
def _switched_off(modules: Sequence[nn.Module]) -> Iterator[None]:
    # Each by itself: a module's own train() reaches those below it, and may be overridden.
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module in modules:
            module.training = True


def _is_one_of(module: nn.Module, kinds: tuple[str, ...]) -> bool:
    name, origin = type(module).__name__.lower(), type(module).__module__.partition(".")[0]
    known = origin in ("torch", "torchvision", "timm", "sfumato")
    return known and not list(module.children()) and any(kind in name for kind in kinds)


def copy_with_nonzero_weights(
    model: nn.Module, loss_fn: Callable[..., Tensor], inputs: Sequence[Tensor]
) -> tuple[nn.Module, Sequence[Tensor]]:
    """A copy in float64 with small numbers in place of zeros, or as much of that as can be had.

    Many networks begin with zeros, in a new head or at the end of each residual branch. What lies
    before has no gradient then, and a branch that mixes examples adds nothing, until the first step
    is taken. The model itself is what is left where the losses do not depend on the copy as they do
    on the model (a forward method that is tied to it, say), or where the copy breaks.
    """
    wanted, _ = used_parameters(model, loss_fn, inputs)
    for exact in (True, False):
        try:
            made = copy.deepcopy(model)
            made = made.double() if exact else made
            given = [x.double() if exact and x.is_floating_point() else x for x in inputs]
            fill_zeros(made)
            if used_parameters(made, loss_fn, given) == (wanted, True):
                return made, given
        except Exception:  # a user's model can break anywhere
            continue
    return model, inputs


@torch.no_grad()
def fill_zeros(model: nn.Module) -> None:
    """Give parameters that are all zero small numbers, the same each time."""
    chance = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if not bool(parameter.any()):
            parameter.copy_(torch.randn(parameter.shape, generator=chance) / 10)


def used_parameters(
    model: nn.Module, loss_fn: Callable[..., Tensor], inputs: Sequence[Tensor]
) -> tuple[set[str], bool]:
    """The trainable parameters that the losses depend on, be their gradients zero or not.

    And whether the losses are finite.
    """
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    total = loss_fn(model, *inputs).sum()
    found = [None] * len(named)
    if named and total.requires_grad:
        found = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    names = {n for n, gradient in zip(named, found, strict=True) if gradient is not None}
    if not names:
        raise UnsupportedLayer(
            f"the losses depend on no trainable parameter of this {type(model).__name__}, so no "
            "norm can be tested. Compute them from its own output, with gradients on, and see "
            "that not all of it is frozen."
        )
    return names, bool(total.isfinite())
