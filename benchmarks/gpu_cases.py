"""What `benchmarks/gpu.py` measures: models with their batches, and the ways they are run.

The cases are those of the peers' table (measured elsewhere in one run of its own), and six more.
BatchNorm is GroupNorm for all methods alike. Ours trains every parameter of every model.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sfumato.models.normalise import replace_batch_norm
from sfumato.models.wrn import WideResNet

Losses = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Way:
    """How a step is run: the same for plain and private."""

    name: str
    low: bool = False
    """bf16 by autocast; otherwise float32 with TF32 products."""
    compiled: bool = False
    graphs: bool = False
    """Whether forward and backward pass are captured in a CUDA graph."""

    @property
    def layout(self) -> torch.memory_format:
        """How images and weights lie in memory: as `sfumato train` has them, or as most do."""
        return torch.channels_last if self.low or self.graphs else torch.contiguous_format


_EAGER = [Way("tf32"), Way("bf16", low=True), Way("bf16+compile", low=True, compiled=True)]
WAYS = {
    way.name: way
    for plain in _EAGER
    for way in (plain, replace(plain, name=f"{plain.name}+graphs", graphs=True))
}


@dataclass(frozen=True)
class Case:
    """A model, the size of its images and how many of them make a batch."""

    title: str
    build: Callable[[], nn.Module]
    size: int
    batch: int
    views: int = 1
    classes: int = 1000

    def model(self, device: torch.device, way: Way) -> nn.Module:
        """The model, the same numbers each time."""
        torch.manual_seed(0)
        with torch.device(device):
            model = replace_batch_norm(self.build())
        return model.to(memory_format=way.layout)  # pyright: ignore

    def inputs(self, batch: int, device: torch.device, way: Way) -> tuple[Tensor, Tensor]:
        """Images of noise, the views of one side by side, and a label for each image."""
        torch.manual_seed(1)
        x = torch.randn(batch * self.views, 3, self.size, self.size, device=device)
        y = torch.randint(0, self.classes, (batch,), device=device)
        return x.contiguous(memory_format=way.layout), y

    def losses(self, device: torch.device, *, low: bool) -> Losses:
        """One loss an example, the mean over its views."""

        def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast(device.type, torch.bfloat16, enabled=low):
                found = model(x).float()
            each = F.cross_entropy(found, y.repeat_interleave(self.views), reduction="none")
            return each.reshape(-1, self.views).mean(dim=1)

        return losses


def _timm(title: str, name: str, size: int, batch: int, **options: Any) -> Case:
    return Case(title, lambda: timm.create_model(name, **options), size, batch)


CASES = {
    "resnet50": _timm("ResNet-50, 224", "resnet50", 224, 96),
    "vit-b": _timm("ViT-B/16, 224", "vit_base_patch16_224", 224, 96),
    "vgg19": _timm("VGG-19, 32", "vgg19", 32, 512),
    "resnet18-32": _timm("ResNet-18, 32", "resnet18", 32, 2048),
    "resnet18": _timm("ResNet-18, 224", "resnet18", 224, 128),
    "convnext-t": _timm("ConvNeXt-T, 224", "convnext_tiny", 224, 96),
    "beit-l": _timm("BEiT-L/16, 224, all parameters", "beit_large_patch16_224", 224, 32),
    "wrn50-2": _timm("WRN-50-2, 224", "wide_resnet50_2", 224, 48),
    "wrn16-4": Case("WRN-16-4, 32, 16 views", lambda: WideResNet(10), 32, 256, 16, 10),
    "convnext-b": _timm("ConvNeXt-B, 224", "convnext_base", 224, 64),
    "swin-t": _timm("Swin-T, 224", "swin_tiny_patch4_window7_224", 224, 96),
    "vit-l": _timm("ViT-L/16, 224", "vit_large_patch16_224", 224, 64),
    "vit-l-384": _timm("ViT-L/16, 384", "vit_large_patch16_384", 384, 16),
}

_SMALL = {"img_size": 32, "depth": 2, "embed_dim": 48, "num_heads": 3}
TINY = {
    "tiny-vit": _timm("a small ViT, 32", "vit_tiny_patch16_224", 32, 4, **_SMALL),
    "tiny-resnet": _timm("a small ResNet, 32", "test_resnet", 32, 4),
    "tiny-wrn": Case(
        "WRN-10-1, 32, 2 views", lambda: WideResNet(10, depth=10, width=1), 32, 4, 2, 10
    ),
}
"""For a look at the benchmark itself, without a GPU."""
