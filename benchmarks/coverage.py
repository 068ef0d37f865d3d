"""Exactness on real architectures: norms and clipped sums against autograd, one loss at a time.

    python benchmarks/coverage.py [NAME ...]        writes results/coverage.md (with no names)

Every model has random weights, every parameter trained, BatchNorm with frozen statistics.
The error of a parameter is relative to its own gradient, or to a thousandth of the whole where that
is smaller: gradients that vanish by symmetry (key biases) are rounding noise in both.
"""

import platform
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import timm
import torch
from torch import nn

from sfumato.ghost.admit import one_at_a_time
from sfumato.ghost.clip import Clipping, Ghost

NAMES = """
resnet18 resnet50 resnet152 wide_resnet50_2 seresnet50 legacy_seresnet18 ecaresnet26t dla34
hrnet_w18_small res2net50_26w_4s res2next50 resnext50_32x4d seresnext26d_32x4d senet154 resnest14d
resnest50d legacy_xception inception_v3 densenet121 densenet161 densenet201 vgg11 vgg13 vgg16
vgg19 vgg11_bn convnext_atto convnext_base convmixer_768_32 mobilenetv3_small_100 efficientnet_b0
tf_efficientnet_lite0 regnetx_002 resnetv2_50 nfnet_l0 poolformer_s12 focalnet_tiny_srf
vit_tiny_patch16_224 vit_base_patch16_224 deit_tiny_patch16_224 deit3_small_patch16_224
beit_base_patch16_224 cait_xxs24_224 convit_tiny crossvit_9_240 xcit_nano_12_p16_224 nest_tiny_jx
volo_d1_224 twins_pcpvt_small twins_svt_small pvt_v2_b0 visformer_tiny pit_ti_224 mixer_s32_224
mixer_b16_224 swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 maxvit_rmlp_pico_rw_256
coatnet_nano_rw_224 davit_tiny tiny_vit_5m_224 levit_128s efficientformer_l1 mvitv2_tiny
eva02_tiny_patch14_224 vit_small_patch14_dinov2 hiera_tiny_224 gcvit_xxtiny repvit_m0_9
""".split()  # noqa: SIM905 (a list this long is easier to read as text)


def build(name: str) -> tuple[nn.Module, int]:
    """The model, and the smallest image size it takes among a few."""
    torch.manual_seed(0)
    for size in (64, 128):
        try:
            model = timm.create_model(name, num_classes=10, img_size=size)
        except (TypeError, AssertionError, RuntimeError, ValueError):
            break
        if _runs(model, size):
            return model, size
    model = timm.create_model(name, num_classes=10)
    own = model.default_cfg["input_size"][-1]
    return model, next(size for size in (64, 96, 128, own) if _runs(model, size))


def _runs(model: nn.Module, size: int) -> bool:
    try:
        with torch.no_grad():
            return model.eval()(torch.zeros(2, 3, size, size)).shape == (2, 10)
    except (RuntimeError, AssertionError, ValueError):
        return False


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """One loss an example that never saturates, whatever random weights do to the logits."""
    out = model(x)
    return (out.sin() * torch.linspace(-1, 2, out.shape[1])).sum(dim=1)


def errors(model: nn.Module, x: torch.Tensor) -> tuple[float, float, Ghost, set[str]]:
    """Largest relative error of norms and of sums; the engine, and the parameters it trained."""
    rows = one_at_a_time(model, loss_of, (x,))
    norms = torch.stack([sum(g.double().square().sum() for g in row.values()) for row in rows])
    norms = norms.sqrt()
    ghost = Ghost(model, clipping=Clipping(max_norm=float(norms.min())))
    clipped = ghost.clip(loss_of, (x,), 2)
    of_norms = float(((clipped.norms - norms) / norms).abs().max())
    worst = 0.0
    for parameter in rows[0]:
        pairs = zip(clipped.factors[0], rows, strict=True)
        wanted = sum(f * row[parameter] for f, row in pairs)
        found = clipped.total.get(parameter, torch.zeros_like(wanted))
        scale = max(float(wanted.norm()), 1e-3 * float(norms.min()))
        worst = max(worst, float((found - wanted).norm()) / scale)
    return of_norms, worst, ghost, set(clipped.total)


def check(name: str) -> str:
    """One row of the table."""
    start = time.perf_counter()
    model, size = build(name)
    for parameter in model.parameters():
        if parameter.ndim <= 1 or bool((parameter == 0).all()):
            nn.init.normal_(parameter, float(parameter.detach().mean()), 0.1)
    x = torch.randn(2, 3, size, size)
    norms32, sums32, ghost, trained = errors(model, x)
    (parts,) = ghost.layouts.values()
    torch.set_default_dtype(torch.float64)
    try:
        norms64, sums64, _, _ = errors(model.double(), x.double())
    finally:
        torch.set_default_dtype(torch.float32)
    how = Counter(p.method if p.kind == "product" else "kept" for p in parts)
    share = sum(p.numel() for n, p in model.named_parameters() if n in trained)
    whole = sum(p.numel() for p in model.parameters())
    used = ", ".join(f"{kind} {count}" for kind, count in sorted(how.items()))
    return (
        f"| {name} | {size} | {whole / 1e6:.1f} | {100 * share / whole:.1f} % | {used} | "
        f"{norms32:.0e} | {sums32:.0e} | {norms64:.0e} | {sums64:.0e} | "
        f"{time.perf_counter() - start:.0f} |"
    )


def main() -> None:
    """Check all models and write the table."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    lines = [
        "# Exactness on real architectures",
        "",
        f"`python benchmarks/coverage.py`, commit {commit.stdout.strip()}, CPU, torch "
        f"{torch.__version__}, timm {timm.__version__}, Python {platform.python_version()}.",
        "Two random images, random weights, all parameters trained, BatchNorm frozen. Rules are",
        "judged by float64; in float32 a few networks are so steep that rounding shows.",
        "",
        "| model | pixels | M parameters | trained | uses | norms, float32 | sums | norms, float64 "
        "| sums | s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in sys.argv[1:] or NAMES:
        try:
            lines.append(check(name))
        except Exception as problem:  # a model that fails is a row of the table
            text = str(problem).replace("\n", " ")[:160]
            lines.append(f"| {name} | | | | FAILS: {type(problem).__name__}: {text} | | | | | |")
        print(lines[-1], flush=True)
        if not sys.argv[1:]:
            Path("results/coverage.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
