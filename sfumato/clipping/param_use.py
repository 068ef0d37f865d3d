"""What a tape writes down: the uses of parameters on a batch, and how parameters came there.

A *part* is one such use. The survey fills it in before any batch comes, and all that is decided
about the way back (`method_choice`) is decided from it. A *recipe* says how a `LeafTensor` was
computed from others, for those who must make it again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sfumato.clipping.batch_axis import ExampleAxis
from sfumato.clipping.geometry import WeightGeometry


@dataclass
class ParamUse:
    """One use of a parameter on a batch; what is known of it before any batch comes."""

    root: str | None
    """The parameter it is, perhaps reshaped; None if it is computed from parameters."""
    path: str
    """Name of a parameter it comes from, for people."""
    shape: tuple[int, ...]
    kind: str = "gradient"
    """gradient: per-example gradients are kept; product: a contraction; rows: a table."""
    operation: str = ""
    geometry: WeightGeometry | None = None
    positions: int = 0
    inputs: int = 0
    outputs: int = 0
    groups: int = 1
    on_gpu: bool = False
    gram_depth: int = 0
    """Products for one entry of the Gram matrix of its inputs."""
    method: str = "store"
    """store: keep per-example gradients; ghost: Gram norms."""
    sources: tuple[str, ...] = ()
    """All parameters it depends on."""
    standardised: float | None = None
    """If it is a parameter with standardised rows: the eps of the standardisation."""
    rounded: bool = False
    """Whether autocast is on here."""
    output_lost: bool = False
    """Whether the layer's output is rounded, or changed in place later: no norm can rest on it."""
    has_rule: bool = True
    """False if the operation runs once an example under vmap, which costs nobody knows what."""
    reads_input: bool = False
    """Whether nobody wants the gradient of the layer's input: the batch itself, or a constant."""
    func: str = ""
    """The torch operation that opened it."""
    call: int = -1
    """Number of that operation among those in which a LeafTensor meets another tensor."""
    meeting: ExampleAxis | None = None


@dataclass(frozen=True)
class Recipe:
    """How a LeafTensor was made of other LeafTensors and constants."""

    func: Callable[..., Any]
    args: Any
    kwargs: Any
    precision: torch.dtype | None = None
    """What autocast computed in, if it was on."""
    place: tuple[int, ...] = ()
    """Where it is in what the function gives."""


RESHAPING = {
    Tensor.view,
    Tensor.reshape,
    Tensor.permute,
    Tensor.transpose,
    Tensor.t,
    Tensor.squeeze,
    Tensor.unsqueeze,
    Tensor.flatten,
    Tensor.unflatten,
    Tensor.contiguous,
    Tensor.movedim,
    Tensor.view_as,
    Tensor.reshape_as,
    Tensor.float,
    Tensor.T.__get__,  # pyright: ignore
    Tensor.mT.__get__,  # pyright: ignore
    torch.reshape,
    torch.permute,
    torch.transpose,
    torch.squeeze,
    torch.unsqueeze,
    torch.flatten,
    torch.movedim,
}
"""Operations that only move numbers: the norm of a gradient is the same before and after."""
