"""The steps that `benchmarks/gpu.py` compares: plain, private, and those of other libraries.

A step is forward, backward, clip, noise and SGD; a plain one has no clip and no noise. All make
their gradient first and end with the same optimizer. Where a way captures CUDA graphs, the gradient
is captured, of plain and private by the same code, and the rest is not. A step may have several
physical batches: their gradients are added up before the rest is done.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from cpu import opacus_step
from gpu_cases import Case, Losses, Way
from gpu_loop import loop_step
from torch import Tensor, nn

from sfumato.clipping.clip import Clipped, GradientClipper
from sfumato.clipping.compiled import Compiled
from sfumato.clipping.factors import Clipping
from sfumato.clipping.plain_group_norm import QuickGroupNorm
from sfumato.privacy.budget import Plan
from sfumato.privacy.flat import Layout
from sfumato.privacy.ledger import Ledger, LedgerHeader
from sfumato.privacy.noise import privatize
from sfumato.privacy.session_key import SessionKey
from sfumato.training.batch_stats import BROKEN, BatchStats
from sfumato.training.cuda_graph import Replay
from sfumato.training.process_group import ProcessGroup

Step = Callable[[], object]
Inputs = tuple[Tensor, Tensor]


def private_clip(
    model: nn.Module, losses: Losses, inputs: Inputs, way: Way, max_norm: float = 1.0
) -> tuple[GradientClipper, Callable[..., Clipped]]:
    """How a private gradient is made: what to call like `GradientClipper.clip`, eager or
    compiled.
    """
    clipper = GradientClipper(model, clipping=Clipping(max_norm=max_norm))
    (x, y), few = inputs, min(3, len(inputs[1]))
    clipper.clip(losses, (x[: few * (len(x) // len(y))], y[:few]), few)  # it examines the model
    return clipper, Compiled(clipper) if way.compiled else clipper.clip


def new_step(
    method: str, case: Case, way: Way, device: torch.device, batch: int, chunks: int = 1
) -> tuple[Step, float]:
    """A step of so many physical batches, ready to be called; what share of the model it trains."""
    if method in LOOPS:
        model, step = loop_step(method, case, way, device, batch, chunks)
        return step, trained_share(model)
    model, inputs = case.model(device, way), case.inputs(batch, device, way)
    losses = case.losses(device, low=way.low)
    if method in PEERS:
        if chunks > 1:
            raise NotImplementedError("is measured with one physical batch a step")
        step = peer_step(method, model, inputs, case.views)
    elif method == "plain":
        step = plain_step(model, losses, inputs, way, chunks)
    else:
        secure = method == "private, secure"
        step = private_step(model, losses, inputs, way, chunks, secure=secure)
    return step, trained_share(model)


def trained_share(model: nn.Module) -> float:
    """The share of a model's numbers that learn."""
    counts = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, learns in counts if learns) / sum(n for n, _ in counts)


def plain_step(model: nn.Module, losses: Losses, inputs: Inputs, way: Way, chunks: int = 1) -> Step:
    """Ordinary training: the gradient of the mean loss.

    Captured and uncompiled it has our GroupNorm, as in `sfumato train`; eager, it is torch's own.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]

    def mean_loss(x: Tensor, y: Tensor) -> Tensor:
        return losses(model, x, y).mean()

    loss = torch.compile(mean_loss) if way.compiled else mean_loss
    quick = way.graphs and not way.compiled

    def pass_once() -> Sequence[Tensor]:
        with QuickGroupNorm() if quick else nullcontext():
            found = loss(*inputs)
        return torch.autograd.grad(found, parameters)

    one = captured(pass_once, inputs, way)

    def gradient() -> Sequence[Tensor]:
        if chunks == 1:
            return one()
        total = [part.clone() for part in one()]
        for _ in range(chunks - 1):
            torch._foreach_add_(total, one())  # pyright: ignore
        return total

    return with_optimizer(parameters, gradient)


def private_step(
    model: nn.Module, losses: Losses, inputs: Inputs, way: Way, chunks: int = 1, *, secure: bool
) -> Step:
    """Ours: clipped sum, noise and ledger, then the same optimizer.

    As in training, whether all gradients are finite is read before noise is drawn.
    """
    examples, secret = len(inputs[1]), SessionKey.draw()
    noise = "chacha20" if secure else "philox"
    ledger = Ledger(LedgerHeader(data="noise", delta=1e-5, noise=noise, secret=secret.commitment))
    plan = Plan(noise_multiplier=1.0, expected_batch=chunks * examples, rate=0.01, steps=10**6)
    clipper, clip = private_clip(model, losses, inputs, way, plan.max_norm)
    named, numbers = clipper.parameters, itertools.count()
    layout, stats = Layout.of(named), BatchStats(inputs[0].device)
    one = captured(lambda: clip(losses, inputs, examples, tell=stats).total, inputs, way)

    def gradient() -> list[Tensor]:
        total = layout.zeros()
        stats.begin()
        for _ in range(chunks):
            total.add(one())
        if stats.read(chunks, ProcessGroup())[BROKEN]:
            raise ArithmeticError("gradients of noise are not finite")
        noisy = privatize(total, plan, ledger, secret, step=next(numbers), stage="train")
        return [noisy[name] for name in named]

    return with_optimizer(list(named.values()), gradient)


def captured(work: Callable[[], Any], inputs: Inputs, way: Way) -> Callable[[], Any]:
    """The work; or its capture in a CUDA graph, after a few calls, if the way is such."""
    if not way.graphs:
        return work
    result: list[Any] = [None]

    def keep(_: torch.Generator) -> None:
        result[0] = work()

    replay = Replay(keep, inputs[0].device)

    def call() -> Any:
        replay(0)
        return result[0]

    return call


def with_optimizer(
    parameters: Sequence[nn.Parameter], gradient: Callable[[], Sequence[Tensor]]
) -> Step:
    """Make the gradient, and take a step of SGD with it, all parameters in one launch."""
    # A rate of zero: as much work as any other, and the model stays what it is.
    optimizer = torch.optim.SGD(parameters, lr=0.0, fused=True)

    def step() -> None:
        for parameter, found in zip(parameters, gradient(), strict=True):
            if found.stride() != parameter.stride():
                found = torch.empty_like(parameter).copy_(found)
            parameter.grad = found
        optimizer.step()
        optimizer.zero_grad()

    return step


def peer_step(method: str, model: nn.Module, inputs: Inputs, views: int) -> Step:
    """A step of another library; parameters outside its layers are frozen, as it needs."""
    package, make = PEERS[method]
    if find_spec(package) is None:
        raise ModuleNotFoundError(f"{package} is not installed")
    freeze_loose(model)
    if views == 1:
        return make(model, inputs)
    if method != "Opacus":
        raise NotImplementedError("knows no views of an image")
    return _opacus_views_step(model, inputs, views)


def freeze_loose(model: nn.Module) -> None:
    """Freeze parameters that are no layer's own: tokens, positions, LayerScale."""
    for module in model.modules():
        if any(module.children()) or "LayerScale" in type(module).__name__:
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(False)


def _opacus_views_step(model: nn.Module, inputs: Inputs, views: int) -> Step:
    """Opacus as the published code did it: view after view, then one clip an image."""
    from opacus.grad_sample import GradSampleModule  # pyright: ignore

    for module in model.modules():
        if hasattr(module, "inplace"):
            module.inplace = False  # pyright: ignore
    wrapped: Any = GradSampleModule(model, loss_reduction="sum")
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    x, y = inputs
    parts = x.unflatten(0, (-1, views)).transpose(0, 1).contiguous()

    def gradient() -> list[Tensor]:
        rows: list[Tensor] = []
        for view in parts:
            F.cross_entropy(wrapped(view), y, reduction="sum").backward()
            found = [p.grad_sample / views for p in trained]
            rows = [a + b for a, b in zip(rows, found, strict=True)] if rows else found
            for p in trained:
                p.grad_sample = p.grad = None
        norms = torch.stack([row.flatten(1).norm(dim=1) for row in rows]).norm(dim=0)
        factors = (1 / norms.clamp(min=1e-6)).clamp(max=1)
        sums = [torch.einsum("n...,n->...", row, factors) for row in rows]
        return [(total + torch.randn_like(total)) / len(y) for total in sums]

    return with_optimizer(trained, gradient)


def _fastdp_step(model: nn.Module, inputs: Inputs) -> Step:
    from fastDP import PrivacyEngine  # pyright: ignore

    x, y = inputs
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    engine = PrivacyEngine(
        model, batch_size=len(y), sample_size=100 * len(y), epochs=1, noise_multiplier=1.0,
        max_grad_norm=1.0, clipping_mode="MixOpt", clipping_fn="Abadi",
    )  # fmt: skip
    engine.attach(optimizer)

    def step() -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _private_vision_step(model: nn.Module, inputs: Inputs) -> Step:
    from private_vision import PrivacyEngine  # pyright: ignore

    x, y = inputs
    optimizer: Any = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    engine = PrivacyEngine(
        model, batch_size=len(y), sample_size=100 * len(y), epochs=1, noise_multiplier=1.0,
        max_grad_norm=1.0, ghost_clipping=True, mixed=True,
    )  # fmt: skip
    engine.attach(optimizer)

    def step() -> None:
        optimizer.step(loss=F.cross_entropy(model(x), y, reduction="none"))
        optimizer.zero_grad()

    return step


PEERS: dict[str, tuple[str, Callable[[nn.Module, Inputs], Step]]] = {
    "Opacus": ("opacus", lambda model, xy: opacus_step(model, *xy, clipper=False, noise=1.0)),
    "Opacus ghost": ("opacus", lambda model, xy: opacus_step(model, *xy, clipper=True, noise=1.0)),
    "fastDP": ("fastDP", _fastdp_step),
    "private_vision": ("private_vision", _private_vision_step),
}
"""Other libraries: the package, and how a step is made. They run in float32 with TF32."""
LOOPS = ("plain loop", "private loop")
"""The steps of `sfumato train` itself, reading included."""
METHODS = ("plain", "private", "private, secure", *LOOPS, *PEERS)
