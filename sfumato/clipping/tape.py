"""How parameters are followed through a model.

During a recorded forward pass every trainable parameter is a `LeafTensor`: a tensor subclass that
is told of each operation it takes part in. As long as it only meets constants and other parameters
(reshaping, standardising, concatenating) the result is a `LeafTensor` again. Where it meets the
batch, a rule takes over and opens a *part*: a place where per-example gradients can be had.

What the backward pass learns comes back as gradients of dummy inputs, zeros that cost no memory:
the squared norms by `norms`, everything else by one `keep` a tensor. So one call of
`torch.autograd.grad` returns it all, and nothing is written to the side.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from sfumato.clipping.batch_axis import (
    NOWHERE,
    ExampleAxis,
    ShapeRecorder,
    Shapes,
    axis_of_examples,
    flat_tensors,
    shapes_of,
)
from sfumato.clipping.leaf import LeafTensor
from sfumato.clipping.param_use import RESHAPING, ParamUse, Recipe
from sfumato.errors import UnsupportedLayer


@dataclass
class Tape:
    """One recorded forward pass of `examples` examples.

    With `survey` the pass finds the parts and appends them to `parts`; otherwise it must meet those
    parts in the same order, which is checked.
    """

    examples: int
    seed: Tensor
    """One zero with a gradient, of which all dummies are views."""
    parts: list[ParamUse]
    survey: bool = False
    leaf_type: type[LeafTensor] = LeafTensor
    """That of the `GradientClipper` this pass belongs to."""
    group_of: dict[str, int] = field(default_factory=dict)
    """The group, by parameter, that it is clipped with."""
    num_groups: int = 1
    count: int = 0
    """Parts met so far."""
    keeps: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    """The parameter values that met the batch, one a part, still attached to the parameters."""
    extras: list[Tensor | None] = field(default_factory=list)
    """For tables, which rows were read; None for all other parts."""
    roots: dict[int, tuple[str, bool]] = field(default_factory=dict)
    """In a survey: id of a LeafTensor -> (parameter, whether it is that parameter reshaped)."""
    standardised: dict[int, float] = field(default_factory=dict)
    """In a survey: id of a LeafTensor with standardised rows -> the eps of the standardisation."""
    alive: list[Tensor] = field(default_factory=list)
    """LeafTensors that are known by their id, which must not go to another tensor."""
    inputs: list[int] = field(default_factory=list)
    """In a survey: ids of the batch itself."""
    watch: ShapeRecorder | None = None
    """In a survey: what the same operations looked like with another number of examples."""
    calls: int = 0
    """Operations so far in which a LeafTensor met another tensor."""
    func: str = ""
    """The last of them."""
    here: ExampleAxis = NOWHERE
    """Where the examples are in the operation that is being made."""
    outputs: list[tuple[ParamUse, Tensor]] = field(default_factory=list)
    """In a survey: outputs of layers, to see whether they are overwritten."""
    parameters: Mapping[str, nn.Parameter] = field(default_factory=dict)
    """The trainable parameters: looked up once, for a model takes long to name them."""
    dummies: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = None
    """Norms and keeps that are given, not made here: those of a compiled pass are its inputs."""
    recipes: dict[int, Recipe] | None = None
    """If wanted: id of a LeafTensor -> how to make it again."""
    leaves: Mapping[str, Tensor] = field(default_factory=dict)
    """With recipes: the LeafTensors that parameters are in this pass."""
    names: dict[int, str] = field(default_factory=dict)
    """Id of a LeafTensor that is a parameter as it is -> its name."""
    replaying: bool = False
    """Activation checkpointing computes again what it dropped: nothing new is recorded then."""
    norms: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        if self.dummies is not None:
            self.norms = self.dummies[0]
            return
        self.norms = tuple(
            self.keep_zeros((2, self.examples), self.seed.dtype) for _ in range(self.num_groups)
        )

    def keep_zeros(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """A dummy: zeros of any shape that take no memory and can be differentiated."""
        return self.seed.to(dtype).expand(shape)

    def keep(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A dummy whose gradient will be kept.

        Parts get theirs in the order of `open`: one each, the per-example gradient; a product that
        stores none gets its input and its output gradient.
        """
        if self.replaying:
            return self.keep_zeros(shape, dtype)
        given = None if self.dummies is None else self.dummies[1][len(self.keeps)]
        self.keeps.append(self.keep_zeros(shape, dtype) if given is None else given)
        return self.keeps[-1]

    def mark(self, inputs: Iterable[Any]) -> list[Any]:
        """Let the batch require gradients, by which it is known even where it has lost its axis."""
        marked = []
        for item in inputs:
            is_batch = isinstance(item, Tensor) and item.is_floating_point()
            marked.append(Mark.apply(item, self.seed) if is_batch else item)
        if self.survey:
            self.inputs = [id(item) for item in marked]
        return marked

    def open(self, leaf: Tensor, kind: str, operation: str) -> ParamUse:
        """The part for a LeafTensor that meets the batch here; `kind` is one of `ParamUse.kind`."""
        if self.replaying:
            wanted = (kind, operation, tuple(leaf.shape))
            same = [p for p in self.parts if (p.kind, p.operation, p.shape) == wanted]
            return self._of([leaf], same)[0]
        if leaf.is_complex():
            raise UnsupportedLayer(
                f'"{self.name_of(leaf)}" is made a complex number ({operation}), and there are no '
                "rules for those. Freeze it, or write the product out in real numbers."
            )
        if self.survey:
            name, same = self.roots[id(leaf)]
            root = name if same else None
            self.parts.append(ParamUse(root, name, tuple(leaf.shape), kind, operation))
            part = self.parts[-1]
            part.standardised = self.standardised.get(id(leaf))
            part.rounded = torch.is_autocast_enabled(leaf.device.type)
            part.func, part.call, part.meeting = self.func, self.calls, self.here
        elif self.count >= len(self.parts):
            raise UnsupportedLayer(self.lost_track(operation))
        part = self.parts[self.count]
        if (part.kind, part.operation, part.shape) != (kind, operation, tuple(leaf.shape)):
            raise UnsupportedLayer(self.lost_track(operation))
        self.count += 1
        self.values.append(leaf)
        self.extras.append(None)
        return part

    def name_of(self, leaf: Any) -> str:
        """The parameter's name, for people."""
        return self.roots.get(id(leaf), ("", True))[0]

    def meet(self, func: str, tensors: list[Tensor]) -> ExampleAxis | None:
        """On which axes a LeafTensor may meet the batch in this operation; None if it does not.

        The survey decides, by sizes; every later pass does as the survey did.
        """
        if self.replaying:
            return self._remember(func, tensors)
        self.calls, self.func = self.calls + 1, func
        if self.survey:
            found = self._compare(func, tensors)
        else:
            part = self.parts[self.count] if self.count < len(self.parts) else None
            found = part.meeting if part is not None and part.call == self.calls else None
            if found is None and any(_carries_gradient(t) for t in tensors):
                raise UnsupportedLayer(self.lost_track(func))
        self.here = found or NOWHERE
        return found

    def _remember(self, func: str, tensors: list[Tensor]) -> ExampleAxis | None:
        """What it was when it was made first; only values count now, not where they come from."""
        shapes = {tuple(t.shape) for t in tensors if isinstance(t, LeafTensor)}
        same = [p for p in self.parts if p.func == func and p.shape in shapes]
        same = self._of(tensors, same)
        self.here = (same[0].meeting if same else None) or NOWHERE
        return self.here if same else None

    def _of(self, tensors: list[Tensor], parts: list[ParamUse]) -> list[ParamUse]:
        """Those of these very parameters, if any are: layers of one shape may differ otherwise."""
        names = {self.names[id(t)] for t in tensors if id(t) in self.names}
        return [part for part in parts if part.root in names] or parts

    def _compare(self, func: str, tensors: list[Tensor]) -> ExampleAxis | None:
        """The axes that have grown since the pass with another number of examples."""
        leaf = next(t for t in tensors if isinstance(t, LeafTensor))
        seen = self._seen()
        if seen is None or len(seen.inputs) != len(tensors):
            raise UnsupportedLayer(
                f'"{self.name_of(leaf)}" is used by {func} inside an operation that hides it. Use '
                "it in an ordinary operation, or freeze it."
            )
        try:
            axes = tuple(
                axis_of_examples(tuple(t.shape), many)
                for t, many in zip(tensors, seen.inputs, strict=True)
            )
        except ValueError:
            axes = ()
        pairs = list(zip(tensors, axes, strict=bool(axes)))
        lost = any(axis is None and _carries_gradient(t) for t, axis in pairs)
        if (
            not axes
            or lost
            or any(axis is not None and isinstance(t, LeafTensor) for t, axis in pairs)
        ):
            raise UnsupportedLayer(
                f'"{self.name_of(leaf)}" meets in {func} a tensor that depends on the batch but '
                "has no axis of its own for the examples: they are mixed, or it was kept from an "
                "earlier pass. Keep examples on one axis (model.train() drops what layers keep), "
                "or freeze the parameter."
            )
        return ExampleAxis(axes, None)

    def _seen(self) -> Shapes | None:
        return None if self.watch is None else self.watch.here

    def grows(self, result: Any) -> bool:
        """Whether what an operation gives depends on the number of examples; asked in a survey."""
        seen = self._seen()
        return self.survey and seen is not None and seen.outputs != shapes_of((result,))

    def settle(self, result: Any) -> int | None:
        """The axis of examples of what the operation gives, which the survey notes."""
        seen = self._seen()
        if self.survey and seen is not None and isinstance(result, Tensor):
            try:
                axis = axis_of_examples(tuple(result.shape), seen.outputs[0])
            except ValueError:
                axis = None
            self.here = self.here._replace(out=axis)
        return self.here.out

    def derive(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """What an operation gives that no example takes part in: of LeafTensors, LeafTensors."""
        result = func(*args, **kwargs)
        device = self.seed.device.type
        on = self.recipes is not None and torch.is_autocast_enabled(device)
        precision = torch.get_autocast_dtype(device) if on else None
        return self._wrap(result, Recipe(func, args, kwargs, precision))

    def _wrap(self, result: Any, recipe: Recipe) -> Any:
        if isinstance(result, tuple | list):
            places = [replace(recipe, place=(*recipe.place, i)) for i in range(len(result))]
            pairs = zip(result, places, strict=True)
            return type(result)(self._wrap(item, place) for item, place in pairs)
        if not isinstance(result, Tensor) or not result.requires_grad:
            return result
        leaf, func, args = result.as_subclass(self.leaf_type), recipe.func, recipe.args
        if self.recipes is not None:
            self.recipes[id(leaf)] = recipe
            self.alive.append(leaf)
        if self.survey:
            known = [self.roots[id(a)] for a in flat_tensors(args) if id(a) in self.roots]
            name, same = known[0] if known else ("", False)
            reshaped = len(known) == 1 and func in RESHAPING and same
            same_size = leaf.numel() == next((a.numel() for a in flat_tensors(args)), 0)
            self.roots[id(leaf)] = (name, reshaped and same_size)
            eps = getattr(func, "standardises_rows", None)
            if eps is not None and same:
                self.standardised[id(leaf)] = eps
            self.alive.append(leaf)
        return leaf

    def lost_track(self, operation: str) -> str:
        """What to say when the pass is not the one that was examined."""
        return (
            f"the model took another path than when it was examined (at {operation}, use number "
            f"{self.count}): its operations must not depend on the batch. Examine it again with "
            "inputs of this size, or remove the data-dependent branch."
        )


class Mark(torch.autograd.Function):
    """The identity, on the way forward; the end, on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seed: Tensor) -> Tensor:
        """The same tensor, now of the batch."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        """Nobody wants the gradient of the images."""
        return None, None


def _carries_gradient(tensor: Tensor) -> bool:
    return tensor.requires_grad and not isinstance(tensor, LeafTensor)
