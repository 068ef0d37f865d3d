"""Is our own code for normalisation and for the inversion GAN still needed? On a GPU only.

    python benchmarks/own_kernels.py --out own.jsonl

Part 1: forward and per-example backward of GroupNorm and LayerNorm, by our Triton kernels, by
compiled expressions, and by torch's kernels, for maps as they occur in ResNet-50, ConvNeXt-T and
ViT-B (bf16 input, channels last). Part 2: one discriminator and one generator step of the GAN of
`sfumato invert` with our spectral norm and resizing convolutions, and with torch's
`parametrizations.spectral_norm`, `avg_pool2d` and `interpolate`, recorded as a CUDA graph,
uncompiled and compiled. Times are medians on the clock of the GPU.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from triton.testing import do_bench

from sfumato.clipping import normalisation_functions as norms
from sfumato.clipping.kernels.group_norm_backward import group_norm_backward
from sfumato.clipping.kernels.group_norm_forward import group_norm_forward
from sfumato.clipping.kernels.layer_norm import layer_norm_backward, layer_norm_forward
from sfumato.models import gan
from sfumato.models.resize import ResizingConv2d
from sfumato.models.spectral import update_spectral_norms

MAPS = [
    (96, 64, 112, 32),
    (96, 256, 56, 32),
    (96, 512, 28, 32),
    (96, 2048, 7, 32),
    (2048, 64, 32, 32),
]
"""Examples, channels, side and groups of what GroupNorm is given."""

TOKENS = [(96, 3136, 96), (96, 196, 384), (96, 197, 768), (64, 197, 1024)]
"""Examples, tokens and width of what LayerNorm is given."""


def median(work: Callable[[], object]) -> float:
    """Milliseconds."""
    work()
    torch.cuda.synchronize()
    return float(do_bench(work, warmup=50, rep=200, return_mode="median"))


def compiled_layer_backward(
    g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, examples: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the input, and sums over the tokens of each example, in expressions."""
    normal = (x.float() - mean) * rstd
    by_weight = (g * normal).reshape(examples, -1, x.shape[-1]).sum(dim=1)
    by_bias = g.reshape(examples, -1, x.shape[-1]).sum(dim=1)
    inner = g * weight
    along = (inner * normal).mean(-1, keepdim=True)
    grad = (inner - inner.mean(-1, keepdim=True) - normal * along) * rstd
    return grad.to(x.dtype), by_weight, by_bias


def time_group_norm(n: int, channels: int, side: int, groups: int) -> dict:
    """Kernels of ours, compiled expressions and torch's kernels with two reductions more."""
    x = torch.randn(n, channels, side, side, device="cuda", dtype=torch.bfloat16)
    x = x.to(memory_format=torch.channels_last)
    g = torch.randn_like(x, dtype=torch.float32)
    weight, bias = torch.randn(2, channels, device="cuda").unbind()
    sizes, wanted = (n, channels, side * side, groups), (True, True, True)
    forward = torch.compile(norms._normalised_groups, dynamic=False)
    backward = torch.compile(norms._group_backward_compiled, dynamic=False)

    def ours() -> object:
        _, mean, rstd = group_norm_forward(x, weight, bias, groups, 1e-5)
        return group_norm_backward(g, x, mean, rstd, weight)

    def compiled() -> object:
        with torch.autocast("cuda", torch.bfloat16):
            _, mean, rstd = forward(x, weight, bias, groups, 1e-5)
        return backward(g, x, mean, rstd, weight, sizes, wanted)

    def torchs() -> object:
        wide = x.float().contiguous()
        _, mean, rstd = torch.native_group_norm(wide, weight, bias, *sizes, 1e-5)
        return norms._group_backward_on_gpu(g, x, mean, rstd, weight, sizes, wanted)

    return times("GroupNorm", [n, channels, side], ours, compiled, torchs)


def time_layer_norm(n: int, tokens: int, width: int) -> dict:
    """The same of tokens."""
    x = torch.randn(n, tokens, width, device="cuda", dtype=torch.bfloat16)
    g = torch.randn_like(x, dtype=torch.float32)
    weight, bias = torch.randn(2, width, device="cuda").unbind()
    backward = torch.compile(compiled_layer_backward, dynamic=False)

    def ours() -> object:
        _, mean, rstd = layer_norm_forward(x, weight, bias, width, 1e-5)
        return layer_norm_backward(g, x, mean, rstd, weight, width, n)

    def compiled() -> object:
        _, mean, rstd = torch.native_layer_norm(x.float(), (width,), weight, bias, 1e-5)
        return backward(g, x, mean, rstd, weight, n)

    def torchs() -> object:
        wide = x.float()
        _, mean, rstd = torch.native_layer_norm(wide, (width,), weight, bias, 1e-5)
        torch.ops.aten.native_layer_norm_backward(
            g, wide, (width,), mean, rstd, weight, bias, [True, False, False]
        )
        return (wide - mean).mul_(rstd).mul_(g).sum(dim=1), g.sum(dim=1)

    return times("LayerNorm", [n, tokens, width], ours, compiled, torchs)


def times(what: str, shape: list[int], *ways: Callable[[], object]) -> dict:
    """One line: the median of each way."""
    names = ("ours", "compiled", "torch")
    return {"what": what, "shape": shape} | {
        name: median(way) for name, way in zip(names, ways, strict=True)
    }


def measure_norms() -> Iterator[dict]:
    """All shapes of both layers."""
    for shape in MAPS:
        yield time_group_norm(*shape)
    for shape in TOKENS:
        yield time_layer_norm(*shape)


def plain_resize(layer: ResizingConv2d, x: Tensor) -> Tensor:
    """`ResizingConv2d.forward` with torch's functions."""
    edge = layer.kernel_size[0] // 2
    if layer.resize == "double":
        x = F.interpolate(x, scale_factor=2.0, mode="bilinear")
    x = F.conv2d(x, layer.weight, layer.bias, 1, edge)
    return F.avg_pool2d(x, 2) if layer.resize == "halve" else x


def torch_normed(layer: nn.Module, gain: float = 1.0) -> nn.Module:
    """`spectral.normed` with torch's parametrization."""
    nn.init.xavier_uniform_(layer.weight, gain)
    return nn.utils.parametrizations.spectral_norm(layer)


def gan_step(ours: bool, size: int, compiled: bool, batch: int = 64) -> Callable[[], object]:
    """Five steps of the discriminator and one of the generator, recorded."""
    with patch.object(gan, "normed", gan.normed if ours else torch_normed):
        critic = gan.Discriminator(1000, size=size).cuda().to(memory_format=torch.channels_last)
    maker = gan.Generator(1000, size=size).cuda().to(memory_format=torch.channels_last)
    optimizers = [
        torch.optim.Adam(net.parameters(), 2e-4, (0.0, 0.9), capturable=True, fused=True)
        for net in (maker, critic)
    ]
    made, judged = (torch.compile(net) if compiled else net for net in (maker, critic))
    real = torch.rand(batch, 3, size, size, device="cuda")
    labels = torch.randint(1000, (batch,), device="cuda")
    z = torch.randn(batch, 128, device="cuda")

    def work() -> None:
        lower = torch.autocast("cuda", torch.bfloat16, cache_enabled=False)
        critic.requires_grad_(True)
        for _ in range(5):
            with torch.no_grad(), lower:
                fake = made(z, labels).float()
            optimizers[1].zero_grad()
            with lower:
                scores = judged(torch.cat([real, fake]), torch.cat([labels, labels])).float()
            (F.relu(1 - scores[:batch]).mean() + F.relu(1 + scores[batch:]).mean()).backward()
            optimizers[1].step()
            if ours:
                update_spectral_norms(critic)
        critic.requires_grad_(False)
        optimizers[0].zero_grad()
        with lower:
            (-judged(made(z, labels).float(), labels).float().mean()).backward()
        optimizers[0].step()

    forward = ResizingConv2d.forward if ours else plain_resize
    with patch.object(ResizingConv2d, "forward", forward):
        aside = torch.cuda.Stream()
        with torch.cuda.stream(aside):
            for _ in range(3):
                work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
    return graph.replay


def measure_gan() -> Iterator[dict]:
    """Both GANs, at 64 and 128 pixels."""
    for size in (64, 128):
        for compiled in (False, True):
            found = {}
            for name, ours in (("ours", True), ("torch", False)):
                torch.compiler.reset()
                try:
                    found[name] = median(gan_step(ours, size, compiled))
                except Exception as error:
                    found[name] = f"{type(error).__name__}: {error}"[:300]
                torch.cuda.empty_cache()
            yield {"what": "GAN iteration", "size": size, "compiled": compiled, **found}


def main() -> None:
    """Every finding is a line of JSON."""
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--out", default="own.jsonl")
    ask.add_argument("--parts", nargs="+", default=["norms", "gan"])
    args = ask.parse_args()
    with open(args.out, "a", encoding="utf-8") as out:
        parts = {"norms": measure_norms, "gan": measure_gan}
        for part in args.parts:
            for line in parts[part]():
                print(json.dumps(line), flush=True)
                out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
