"""Whether the private step that `benchmarks/gpu.py` times is right, on the same machine.

What privacy rests on: the norm found for an example is that of what it adds (asked alone, others
masked), and no example adds more than the bound. What the model learns: norms and sums are those
of autograd asked for one loss at a time, in the same precision. There a forward pass rounded in
another way can flip a ReLU near zero and move one example, so the median stands beside the largest
error. And in float32 without TF32: bf16 itself moves norms by up to a hundredth, plain ones too.
"""

from collections.abc import Callable, Iterator

import torch
from gpu_cases import Case, Way
from gpu_measure import Record, in_few_words, use_tf32
from gpu_steps import private_clip
from torch import Tensor, nn

from sfumato.clipping.admit import one_at_a_time
from sfumato.clipping.clip import Clipped, GradientClipper

EXAMPLES = 8


def check_case(case: Case, way: Way, device: torch.device) -> Iterator[Record]:
    """Relative errors of norms and of the clipped sum, and the largest contribution."""
    try:
        yield {"kind": "check", "method": "private", **errors_of(case, way, device)}
    except Exception as problem:
        yield {"kind": "check", "method": "private", "error": in_few_words(problem)}


def errors_of(case: Case, way: Way, device: torch.device) -> Record:
    """One line of the table of checks."""
    # Nothing by chance: a layer that is dropped for an example (Swin) is another gradient.
    model = case.model(device, way).eval()
    inputs = case.inputs(EXAMPLES, device, way)
    losses = case.losses(device, low=way.low)
    rows = one_at_a_time(model, losses, inputs)
    same = norms_of(rows)
    bound = float(same.median())  # so that half of the examples are clipped
    _, clip = private_clip(model, losses, inputs, way, bound)

    def clip_only(mask: Tensor) -> Clipped:
        return clip(losses, inputs, EXAMPLES, mask)

    found = clip_only(torch.ones(EXAMPLES, dtype=torch.bool, device=device))
    total = sum_error(found.total, rows, found.factors[0])
    del rows
    added = contributions(clip_only, device)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    exact = norms_of(one_at_a_time(model, case.losses(device, low=False), inputs))
    use_tf32()
    return {
        "added": float(errors(added, found.factors[0] * found.norms).max()),
        "of_bound": float(added.max()) / bound,
        "norms": float(errors(found.norms, same).max()),
        "norms_median": float(errors(found.norms, same).median()),
        "sum": total,
        "norms_float32": float(errors(found.norms, exact).max()),
        "moved": float(errors(same, exact).max()),
    }


def contributions(clip_only: Callable[[Tensor], Clipped], device: torch.device) -> Tensor:
    """The norm of what each example adds, all others masked."""
    masks = torch.eye(EXAMPLES, dtype=torch.bool, device=device)
    return torch.cat([norms_of([clip_only(mask).total]) for mask in masks])


def sum_error(total: dict[str, Tensor], rows: list[dict[str, Tensor]], factors: Tensor) -> float:
    """How far the clipped sum is from that of autograd's gradients, as a whole."""
    off = size = 0.0
    for name in rows[0]:
        wanted = sum(f * row[name].float() for f, row in zip(factors, rows, strict=True))
        assert isinstance(wanted, Tensor)
        off += float((total[name] - wanted).double().square().sum())
        size += float(wanted.double().square().sum())
    return (off / max(size, 1e-30)) ** 0.5


def norms_of(rows: list[dict[str, Tensor]]) -> Tensor:
    """Norms of the gradients that `one_at_a_time` returns, in float64."""
    squares = [torch.stack([g.double().square().sum() for g in row.values()]) for row in rows]
    return torch.stack([square.sum() for square in squares]).sqrt()


def errors(found: Tensor, wanted: Tensor) -> Tensor:
    """Relative errors."""
    return (found.double() / wanted.double() - 1).abs()


def check_collinear(device: torch.device, spread: float = 0.01) -> Record:
    """Tokens one per cent apart with output gradients of mean zero: Grams in bf16 give norm 0.

    The ratio of the norms found to those of the gradients formed in float64 must not be below 1 by
    more than 0.001: an example whose norm is found too small is not clipped.
    """
    torch.manual_seed(0)
    n, t, d, p = 8, 197, 256, 320
    tokens = torch.randn(n, 1, d) + spread * torch.randn(n, t, d)
    weights = torch.randn(n, t, p)
    weights = (weights - weights.mean(dim=1, keepdim=True)).bfloat16().float()
    tokens = tokens.bfloat16().float()
    layer = nn.Linear(d, p, bias=False).to(device)

    def losses(model: nn.Module, x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            found = model(x)
        return (found.float() * w).sum(dim=(1, 2))

    exact = torch.einsum("ntd,ntp->npd", tokens.double(), weights.double()).flatten(1).norm(dim=1)
    clipper = GradientClipper(layer, "ghost")
    found = clipper.clip(losses, (tokens.to(device), weights.to(device)), n).norms.double().cpu()
    ratios = found / exact
    record = {"lowest": float(ratios.min()), "highest": float(ratios.max())}
    return {"kind": "collinear", "method": "private", **record}
