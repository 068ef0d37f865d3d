"""What is frozen of clipping: norms, factors, and the sums seen along fixed directions."""

import numpy as np
import torch

from golden.adapter import clip
from golden.networks import EXAMPLES, NETWORKS, WAYS, generator

PROJECTIONS = 2
"""Of each parameter's sum, beside its length."""


def compute(name: str, max_norm: float) -> dict[str, dict]:
    """All ways of clipping one network, at that norm bound."""
    network = NETWORKS[name]
    model, x, mask = network.model(), network.inputs(name), network.mask()
    found = {}
    for way, options in WAYS.items():
        norms, factors, sums = clip(
            model, network.loss, x, EXAMPLES, max_norm=max_norm, mask=mask, **options
        )
        seen = {key: see(key, value.detach()) for key, value in sorted(sums.items())}
        found[way] = {"norms": norms.tolist(), "factors": factors.tolist(), "sums": seen}
    return found


def freeze(name: str) -> dict:
    """What `compute` gives at the median of the norms, once autograd agrees with it."""
    norms, gradients = oracle(name)
    max_norm = float(np.nanmedian(norms))
    found = compute(name, max_norm)
    rtol = 1e-2 if NETWORKS[name].autocast else 1e-4
    for way, frozen in found.items():
        kept = np.isfinite(norms) & (np.max(frozen["factors"], axis=0) > 0)
        np.testing.assert_allclose(np.array(frozen["norms"])[kept], norms[kept], rtol=rtol)
        if WAYS[way].get("per_layer"):
            continue
        factors = torch.tensor(frozen["factors"][0], dtype=torch.float64)
        for key, rows in gradients.items():
            wanted = see(key, torch.tensordot(factors, rows.nan_to_num(), dims=1))
            np.testing.assert_allclose(frozen["sums"][key], wanted, atol=4 * rtol * max_norm)
    return {"max_norm": max_norm, "ways": found}


def compare(name: str, frozen: dict, rtol: float) -> None:
    """Fail where clipping differs from what is frozen by more than rounding."""
    max_norm = frozen["max_norm"]
    found = compute(name, max_norm)
    assert set(found) == set(frozen["ways"])
    for way, wanted in frozen["ways"].items():
        for part in ("norms", "factors"):
            what = f"{part} of {name}, {way}"
            np.testing.assert_allclose(found[way][part], wanted[part], rtol=rtol, err_msg=what)
        assert set(found[way]["sums"]) == set(wanted["sums"])
        for key, numbers in wanted["sums"].items():
            # Relative to what an example may add: a sum in which gradients cancel is no less exact.
            np.testing.assert_allclose(
                found[way]["sums"][key], numbers, rtol=0, atol=4 * rtol * max_norm,
                err_msg=f"sum for {key} of {name}, {way}",
            )  # fmt: skip


def see(name: str, value: torch.Tensor) -> list[float]:
    """The length of a tensor and its products with fixed random directions, in float64."""
    flat = value.double().numpy().ravel()
    directions = generator("directions", name).standard_normal((PROJECTIONS, flat.size))
    return [float(np.linalg.norm(flat)), *(directions @ flat).tolist()]


def oracle(name: str) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """Norms by torch's autograd alone, asked for one example at a time; and the gradients."""
    network = NETWORKS[name]
    model, x = network.model(), network.inputs(name)
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    rows = []
    for own in x.split(network.rows):
        loss = network.loss(model, own).sum()
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        pairs = zip(named.values(), found, strict=True)
        rows.append([torch.zeros_like(p) if g is None else g for p, g in pairs])
    columns = [torch.stack(column).double() for column in zip(*rows, strict=True)]
    squares = torch.stack([g.reshape(EXAMPLES, -1).square().sum(dim=1) for g in columns])
    return squares.sum(dim=0).sqrt().numpy(), dict(zip(named, columns, strict=True))
