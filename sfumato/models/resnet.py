"""Residual networks for small images.

`resnet18-small` is the usual ResNet-18 (He et al. 2016) with a 3 x 3 stem and no pooling before
the blocks: 11 million parameters. `group-cnn` has four convolutions and 71,000 parameters: what
private training from scratch on small grey images likes, with normalisation layers to look into.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from sfumato.models.normalise import replace_batch_norm


class BasicBlock(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """The activation comes after the sum."""
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.shortcut(x) + self.norm2(self.conv2(inner)))


class SmallResNet(nn.Module):
    """ResNet-18 for images of about 32 x 32 pixels, with BatchNorm."""

    def __init__(self, classes: int, channels: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()
        )
        blocks: list[nn.Module] = []
        inputs = 64
        for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [BasicBlock(inputs, outputs, stride), BasicBlock(outputs, outputs, 1)]
            inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))


def group_cnn(classes: int, channels: int = 1) -> nn.Module:
    """Four convolutions, each normalised in groups, on maps of full, half and quarter size."""
    return _plain_cnn(classes, channels, ((32, 1), (32, 2), (64, 2), (64, 1)))


def small_group_cnn(classes: int, channels: int = 1) -> nn.Module:
    """Three convolutions, a sixth of the work of `group_cnn`."""
    return _plain_cnn(classes, channels, ((16, 2), (32, 2), (32, 1)))


def _plain_cnn(classes: int, channels: int, sizes: tuple[tuple[int, int], ...]) -> nn.Module:
    layers: list[nn.Module] = []
    for outputs, stride in sizes:
        layers += [nn.Conv2d(channels, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
        channels = outputs
    layers += [nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(9 * channels, classes)]
    return replace_batch_norm(nn.Sequential(*layers))
