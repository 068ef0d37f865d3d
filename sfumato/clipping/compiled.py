"""`GradientClipper.clip` with its passes compiled, as ordinary training compiles them.

The forward pass is a function of the batch and of the dummies; the compiler differentiates it, and
decides as in ordinary training what to keep for the way back and what to compute again. Factors and
sums, which come after, are a few large operations: they need no compiler. What a parameter went
through before it met the batch (standardised rows, tables of relative positions) is made once more
for them, from a recipe, for nothing but numbers may leave compiled code.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sfumato.clipping.batch_axis import FEW, flat_tensors
from sfumato.clipping.checks import check_losses
from sfumato.clipping.clip import GradientClipper, kind_of_batch
from sfumato.clipping.leaf import LeafTensor, change_leaves
from sfumato.clipping.param_use import Recipe
from sfumato.clipping.probe import random_state, resize_batch, set_random_state
from sfumato.clipping.sums import Clipped, Tell, clip_and_sum
from sfumato.errors import UnsupportedLayer


class InLists(TorchFunctionMode):
    """Tells LeafTensors of operations that take them in a list, of which the compiler does not."""

    def __init__(self, kind: type[LeafTensor]) -> None:
        super().__init__()
        self.kind = kind
        self.inside = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Hand the operation to a LeafTensor in its list, if there is one."""
        kwargs = kwargs or {}
        if func is Tensor.unflatten:  # torch 2.11 cannot follow the method here, but the function
            func = torch.unflatten
        if (
            self.inside
            or func not in LISTING
            or not any(isinstance(t, LeafTensor) for t in flat_tensors(args))
        ):
            return func(*args, **kwargs)
        self.inside = True
        try:
            return self.kind.__torch_function__(func, types, args, kwargs)
        finally:
            self.inside = False


SIZES = 8
"""Sizes of batch that are compiled, as many as torch allows a function; others go uncompiled."""

LISTING = (torch.cat, torch.concat, torch.stack, torch.hstack, torch.vstack)


@dataclass(frozen=True)
class PassLayout:
    """What is known beforehand of a pass of this many examples."""

    norms: tuple[Tensor, ...]
    keeps: tuple[Tensor, ...]
    values: list[Any]
    """What met the batch in a trial with a few examples, one a part."""
    recipes: dict["LeafPlaceholder", Recipe]
    """How that came from parameters."""
    leaves: dict["LeafPlaceholder", str]
    """What is a parameter itself, and which."""

    @property
    def has_lists(self) -> bool:
        """Whether an operation takes LeafTensors in a list."""
        return any(recipe.func in LISTING for recipe in self.recipes.values())


@dataclass(frozen=True)
class LeafPlaceholder:
    """Stands for a LeafTensor of the trial, which is made again at every pass.

    The LeafTensor itself is not kept: autograd remembers on which stream its parameters were first
    used, as long as something refers to them, and would wait for that stream in the middle of a
    capture.
    """

    number: int

    @classmethod
    def of(cls, item: Any) -> Any:
        """The same with `LeafPlaceholder` in the place of LeafTensors."""
        return change_leaves(item, lambda leaf: cls(id(leaf)))


class Compiled:
    """`clipper.clip`, compiled for each size of batch that it meets. Guarantee: that of
    `GradientClipper.clip`.

    What a parameter meets before the batch is that of the first pass, and of buffers themselves
    their content of today: a model that computes other constants there at each step, from numbers
    or from buffers, must not be compiled. (No example adds more than the bound even then, but what
    is added is another gradient.) `options` are torch.compile's.
    """

    def __init__(self, clipper: GradientClipper, **options: Any) -> None:
        self.clipper = clipper
        self.passes: dict[Any, PassLayout] = {}
        self.forward = torch.compile(self._forward, fullgraph=True, dynamic=False, **options)

    def __call__(
        self,
        loss_fn: Callable[..., Tensor],
        inputs: Sequence[Tensor],
        examples: int,
        mask: Bool[Tensor, " n"] | None = None,
        tell: Tell | None = None,
    ) -> Clipped:
        """As `GradientClipper.clip`."""
        kind = kind_of_batch(inputs, examples)
        if (kind, examples) not in self.passes:
            if len(self.passes) == SIZES:
                return self.clipper.clip(loss_fn, inputs, examples, mask, tell)
            self.passes[kind, examples] = self._prepare(loss_fn, inputs, examples, kind)
        known = self.passes[kind, examples]
        dummies = (known.norms, known.keeps)
        losses, extras = self.forward(
            loss_fn, tuple(inputs), examples, kind, dummies, known.has_lists
        )
        check_losses(losses, examples)
        found = torch.autograd.grad(losses.sum(), [*known.norms, *known.keeps], allow_unused=True)
        tape = self.clipper.new_tape(examples, kind, dummies=dummies)
        tape.values, tape.extras = self._values(known), extras
        clipping, margin = self.clipper.clipping, self.clipper.margin
        with torch.autocast(self.clipper.seed.device.type, enabled=False):
            return clip_and_sum(tape, losses, found, clipping, margin, mask, tell)

    def _forward(
        self,
        loss_fn: Callable[..., Tensor],
        inputs: tuple[Tensor, ...],
        examples: int,
        kind: Any,
        dummies: tuple[tuple[Tensor, ...], tuple[Tensor, ...]],
        has_lists: bool,
    ) -> tuple[Tensor, list[Tensor | None]]:
        recording = self.clipper.recording(examples, kind, dummies=dummies)
        looking = InLists(self.clipper.leaf_type) if has_lists else nullcontext()
        with looking, recording as tape:
            losses = loss_fn(self.clipper.model, *tape.mark(inputs))
        return losses, tape.extras

    def _prepare(
        self, loss_fn: Callable[..., Tensor], inputs: Sequence[Tensor], examples: int, kind: Any
    ) -> PassLayout:
        """Learn from a few examples which dummies there are: all have the examples first."""
        clipper, state = self.clipper, random_state()
        if kind not in clipper.layouts:
            clipper.survey(lambda marked: loss_fn(clipper.model, *marked), inputs, examples, kind)
        with clipper.recording(FEW, kind, recipes={}) as tape:
            losses = loss_fn(clipper.model, *tape.mark(resize_batch(inputs, examples, FEW)))
            leaves = {LeafPlaceholder.of(leaf): name for name, leaf in tape.leaves.items()}
        set_random_state(state)
        del losses
        recipes = {
            LeafPlaceholder(number): replace(
                recipe,
                args=LeafPlaceholder.of(recipe.args),
                kwargs={name: LeafPlaceholder.of(value) for name, value in recipe.kwargs.items()},
            )
            for number, recipe in (tape.recipes or {}).items()
        }
        assert all(keep.shape[0] % FEW == 0 for keep in tape.keeps)
        norms = tuple(self._dummy((2, examples), norm.dtype) for norm in tape.norms)
        keeps = tuple(
            self._dummy((keep.shape[0] // FEW * examples, *keep.shape[1:]), keep.dtype)
            for keep in tape.keeps
        )
        made = PassLayout(norms, keeps, LeafPlaceholder.of(tape.values), recipes, leaves)
        for seen, again in zip(tape.values, self._values(made), strict=True):
            if not torch.equal(seen.detach(), again.detach()):
                raise UnsupportedLayer(
                    "a parameter is changed in place, or by chance, before it meets the batch, "
                    "which compiled code cannot follow: do not compile it."
                )
        return made

    def _dummy(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros that take no memory and can be differentiated."""
        zero = torch.zeros((), dtype=dtype, device=self.clipper.seed.device)
        return zero.expand(shape).requires_grad_()

    def _values(self, known: PassLayout) -> list[Tensor]:
        """What met the batch, one a part, made again from the parameters as they are now."""
        named, device = self.clipper.parameters, self.clipper.seed.device
        made: dict[LeafPlaceholder, Tensor] = {
            leaf: named[name] for leaf, name in known.leaves.items()
        }
        with torch.enable_grad():
            return [_make(value, made, known.recipes, device) for value in known.values]


def _make(
    item: Any,
    made: dict[LeafPlaceholder, Tensor],
    recipes: dict[LeafPlaceholder, Recipe],
    device: torch.device,
) -> Any:
    """What a `LeafPlaceholder` stands for; anything else is itself."""
    if isinstance(item, list | tuple):
        return type(item)(_make(one, made, recipes, device) for one in item)
    if not isinstance(item, LeafPlaceholder):
        return item
    if item not in made:
        recipe = recipes[item]
        args = _make(recipe.args, made, recipes, device)
        kwargs = {n: _make(value, made, recipes, device) for n, value in recipe.kwargs.items()}
        low = recipe.precision
        with torch.autocast(device.type, low, enabled=low is not None):
            result = recipe.func(*args, **kwargs)
        for number in recipe.place:
            result = result[number]
        made[item] = result
    return made[item]
