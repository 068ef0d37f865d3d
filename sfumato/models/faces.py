"""Networks that model inversion is tried on: who is this, and which digit is that.

`vgg16-face`, `ir-50` and `ir-152` are the targets of the published attacks on 64 x 64 faces, and
`ir-50` at 112 x 112 the judge: VGG-16 (Simonyan and Zisserman 2015) with one linear layer, and the
improved residual networks of face recognition (Deng et al. 2019, arXiv 1801.07698), which end in
512 numbers that tell people apart. `mcnn` and `scnn` are target and judge for digits. They differ
in every choice they can: a judge that is like its target is fooled by what fools the target.
"""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from sfumato.models.normalise import replace_batch_norm

EMBEDDING = 512


class VggFace(nn.Module):
    """The convolutions of VGG-16 with BatchNorm, 2 x 2 positions of 512 numbers, one linear layer.

    The tensors of its body are named as in torchvision's `vgg16_bn`. Images of 64 x 64 pixels end
    at 2 x 2 positions by themselves; other sizes, from 32 on, are averaged to that.
    """

    def __init__(self, classes: int, channels: int = 3) -> None:
        # Here: torchvision takes as long as torch, and few runs use this network.
        from torchvision.models.vgg import cfgs, make_layers

        super().__init__()
        self.features = make_layers(cfgs["D"], batch_norm=True)
        if channels != 3:
            self.features[0] = nn.Conv2d(channels, 64, 3, padding=1)
        for module in self.features:
            if isinstance(module, nn.Conv2d):  # without it, 13 layers of default weights fade
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        # Shifts stay at 0, so that only directions of the features tell classes apart.
        self.norm = nn.BatchNorm1d(4 * EMBEDDING)
        self.norm.bias.requires_grad_(False)
        self.head = nn.Linear(4 * EMBEDDING, classes)

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n classes"]:
        """Logits."""
        maps = F.adaptive_avg_pool2d(self.features(x), 2)
        return self.head(self.norm(maps.flatten(1)))


class IrUnit(nn.Module):
    """A normalised input through two convolutions, the second of which may halve the map."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(inputs),
            nn.Conv2d(inputs, outputs, 3, 1, 1, bias=False),
            nn.PReLU(outputs),
            nn.Conv2d(outputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        # A window of one pixel: the shortcut takes every second one, and learns nothing.
        self.shortcut: nn.Module = nn.MaxPool2d(1, stride)
        if inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n d i j"]:
        """Nothing follows the sum: the next unit begins with its own normalisation."""
        return self.shortcut(x) + self.body(x)


class IrNet(nn.Module):
    """Four stages of units, the first of each halving the map; 512 numbers; a linear layer.

    Takes any size, once: the layer that makes the 512 numbers is as large as the map of the first
    images it sees (8,192 inputs for 64 x 64 pixels, 25,088 for 112 x 112).
    """

    def __init__(
        self, classes: int, channels: int = 3, units: tuple[int, ...] = (3, 4, 14, 3)
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(channels, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.PReLU(64)
        )
        stages: list[nn.Module] = []
        inputs = 64
        for count, outputs in zip(units, (64, 128, 256, 512), strict=True):
            for i in range(count):
                stages.append(IrUnit(inputs, outputs, 1 if i else 2))
                inputs = outputs
        self.body = nn.Sequential(*stages)
        self.embed = nn.Sequential(
            nn.BatchNorm2d(inputs),
            nn.Dropout(),
            nn.Flatten(),
            nn.LazyLinear(EMBEDDING),
            nn.BatchNorm1d(EMBEDDING),
        )
        self.head = nn.Linear(EMBEDDING, classes)

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n classes"]:
        """Logits."""
        return self.head(self.embed(self.body(self.stem(x))))


def mcnn(classes: int, channels: int = 1) -> nn.Module:
    """Three wide convolutions, normalised in groups, and a linear layer over all positions.

    The target for digits of Peng et al. 2022 (BiDO), with GroupNorm in place of BatchNorm, so that
    one network is trained with privacy and without.
    """
    layers: list[nn.Module] = []
    for outputs, side, pooled in ((64, 7, True), (128, 5, True), (256, 5, False)):
        layers += [
            nn.Conv2d(channels, outputs, side, padding=side // 2),
            nn.BatchNorm2d(outputs),
            nn.LeakyReLU(0.2),
        ]
        layers += [nn.MaxPool2d(2)] if pooled else []
        channels = outputs
    return replace_batch_norm(nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(classes)))


def scnn(classes: int, channels: int = 1) -> nn.Module:
    """Five small convolutions with BatchNorm, averaged over positions, and a linear layer."""
    layers: list[nn.Module] = []
    for outputs in (32, 64, 128, 256, 512):
        stride = 1 if outputs == 32 else 2
        layers += [
            nn.Conv2d(channels, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.SiLU(),
        ]
        channels = outputs
    head = nn.Linear(channels, classes)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
