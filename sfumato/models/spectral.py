"""Layers whose weight matrices have spectral norm 1, made so that a GPU has little to do.

An estimate of the largest singular value (two vectors, Miyato et al. 2018) divides the weight. It
follows the weight when `tighten` is called, after each step, and not in the forward pass, which so
changes nothing: it can be repeated, compiled and captured. The gradient is written out, since
autograd needs three times as many kernels for it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

Weight = Float[Tensor, "outputs ..."]


class Divide(torch.autograd.Function):
    """W / sigma, where sigma = u' W v for fixed vectors u and v."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, u: Tensor, v: Tensor, sigma: Tensor) -> Tensor:
        """The matrix, divided."""
        found = weight / sigma
        ctx.save_for_backward(found, u, v, sigma)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        """What points along the matrix itself turns into the direction of u v'."""
        found, u, v, sigma = ctx.saved_tensors
        (grad,) = grads
        along = grad.flatten().dot(found.flatten())
        return torch.addr(grad, u * along, v, alpha=-1) / sigma, None, None, None


class SpectralNorm(nn.Module):
    """A parametrization: the weight over its largest singular value, as `tighten` last found it."""

    def __init__(self, weight: Weight) -> None:
        super().__init__()
        matrix = as_matrix(weight)
        self.u: Tensor
        self.v: Tensor
        self.sigma: Tensor
        self.register_buffer("u", F.normalize(torch.randn(matrix.shape[0]), dim=0))
        self.register_buffer("v", torch.zeros(matrix.shape[1]))
        self.register_buffer("sigma", torch.ones(()))
        for _ in range(15):
            self.tighten(weight)

    def forward(self, weight: Weight) -> Weight:
        """The same shape, spectral norm 1."""
        matrix = Divide.apply(as_matrix(weight), self.u, self.v, self.sigma)
        assert isinstance(matrix, Tensor)
        if weight.dim() == 2:
            return matrix
        return matrix.view(*_last(weight).shape).permute(0, 3, 1, 2)

    @torch.no_grad()
    def tighten(self, weight: Weight) -> None:
        """One power iteration towards the singular vectors of the weight as it is now."""
        matrix = as_matrix(weight)
        v = matrix.t().mv(self.u)
        torch.div(v, v.norm(), out=self.v)
        u = matrix.mv(self.v)
        torch.linalg.vector_norm(u, out=self.sigma)
        torch.div(u, self.sigma, out=self.u)


def as_matrix(weight: Weight) -> Float[Tensor, "outputs inputs"]:
    """Outputs by all else: of maps in the order of channels_last, where that needs no copy."""
    return weight if weight.dim() == 2 else _last(weight).flatten(1)


def _last(weight: Tensor) -> Tensor:
    return weight.permute(0, 2, 3, 1)


def normed(layer: nn.Linear | nn.Embedding | nn.Conv2d, gain: float = 1.0) -> nn.Module:
    """The layer with spectral norm 1."""
    # Drawn before it is normed, so that the first estimate is of the weight that is used.
    nn.init.xavier_uniform_(layer.weight, gain)
    register_parametrization(layer, "weight", SpectralNorm(layer.weight.detach()))
    return layer


def update_spectral_norms(model: nn.Module) -> None:
    """Let all estimates in the model follow their weights by one power iteration."""
    for module in model.modules():
        weights = getattr(module, "parametrizations", None)
        if weights is not None and isinstance(weights.weight[0], SpectralNorm):
            weights.weight[0].tighten(weights.weight.original)
