"""Slow and obvious answers, which the fast ones are compared with."""

import torch

from sfumato.clipping.admit import one_at_a_time
from sfumato.clipping.clip import GradientClipper
from sfumato.clipping.factors import Clipping


def loss_of(model, x):
    # Every output counts, each with its own weight, and more than linearly.
    out = model(x).flatten(1)
    weights = torch.linspace(-1, 2, out.shape[1], dtype=out.dtype)
    return (out.sin() * weights).sum(dim=1) + 0.1 * out.square().sum(dim=1)


def norms_of(rows):
    """Norms of per-example gradients as `one_at_a_time` returns them."""
    return torch.stack([sum(g.square().sum() for g in row.values()) for row in rows]).sqrt()


def norm_of(total):
    """The norm of all tensors together."""
    return float(torch.sqrt(sum(t.double().square().sum() for t in total.values())))


def compare(model, x, n, loss_of=loss_of, clipper=None, **options):
    """Norms and clipped sums against autograd asked for one example at a time, in float64."""
    inputs = x if isinstance(x, tuple) else (x,)
    rows = one_at_a_time(model, loss_of, inputs)
    norms = norms_of(rows)
    clipper = clipper or GradientClipper(
        model, clipping=Clipping(max_norm=float(norms.median())), **options
    )
    clipped = clipper.clip(loss_of, inputs, n)
    torch.testing.assert_close(clipped.norms, norms, rtol=5e-6, atol=1e-9)
    for name in rows[0]:
        wanted = sum(f * row[name] for f, row in zip(clipped.factors[0], rows, strict=True))
        found = clipped.total.get(name, torch.zeros_like(wanted))
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    return clipper, clipped


def largest_contribution(model, loss_fn, inputs, max_norm, **options):
    """The norm of the largest clipped gradient that one example adds, each asked alone."""
    clipper = GradientClipper(model, clipping=Clipping(max_norm=max_norm), **options)
    alone = [tuple(x[i : i + 1] for x in inputs) for i in range(len(inputs[0]))]
    return max(norm_of(clipper.clip(loss_fn, one, 1).total) for one in alone)
