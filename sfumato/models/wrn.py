"""Wide residual networks as private training likes them: GroupNorm and standardised weights.

De et al. 2022 (arXiv 2204.13650): WRN-16-4 with 16 groups and weight standardisation is the
network of the best private CIFAR-10 results without public data.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary


class StandardisedConv2d(nn.Conv2d):
    """A convolution whose weight has mean 0 and variance 1 / fan-in for each output channel."""

    def forward(self, input: Tensor) -> Tensor:
        """Standardise, then convolve."""
        return self._conv_forward(input, standardise(self.weight), self.bias)


EPS = 1e-10


def standardise(weight: Tensor) -> Tensor:
    """Rows with mean 0 and sum of squares 1 (Qiao et al. 2019, with the scale of De et al.)."""
    if has_torch_function_unary(weight) and not torch.compiler.is_compiling():
        # Announced by its plain form, which can be called. (A compiler sees through it anyway.)
        return handle_torch_function(standardised_rows, (weight,), weight)
    return standardised_rows(weight)


def standardised_rows(weight: Tensor) -> Tensor:
    """What `standardise` computes, in float64: a mean far from zero would cancel away the rest."""
    flat = weight.flatten(1).double()
    variance, mean = torch.var_mean(flat, dim=1, keepdim=True, correction=0)
    rows = (flat - mean) * torch.rsqrt((variance + EPS) * flat.shape[1])
    packed = weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    layout = torch.channels_last if packed else torch.contiguous_format
    return rows.view_as(weight).to(weight.dtype, memory_format=layout)


# Who takes per-example gradients may use that this only removes two directions from each row.
standardised_rows.standardises_rows = EPS  # pyright: ignore


class WideResNetBlock(nn.Module):
    """Two normalised and activated convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(min(groups, inputs), inputs)
        self.conv1 = StandardisedConv2d(inputs, outputs, 3, stride, 1)
        self.norm2 = nn.GroupNorm(groups, outputs)
        self.conv2 = StandardisedConv2d(outputs, outputs, 3, 1, 1)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else StandardisedConv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """The shortcut leaves after the first activation, as in WRN."""
        active = F.relu(self.norm1(x))
        shortcut = x if isinstance(self.shortcut, nn.Identity) else self.shortcut(active)
        return shortcut + self.conv2(F.relu(self.norm2(self.conv1(active))))


class WideResNet(nn.Module):
    """WRN-depth-width for small images."""

    def __init__(
        self, classes: int, channels: int = 3, depth: int = 16, width: int = 4, groups: int = 16
    ) -> None:
        super().__init__()
        widths = [16 * width, 32 * width, 64 * width]
        layers: list[nn.Module] = [StandardisedConv2d(channels, 16, 3, 1, 1)]
        inputs = 16
        for stage, outputs in enumerate(widths):
            for i in range((depth - 4) // 6):
                layers.append(WideResNetBlock(inputs, outputs, 2 if stage and not i else 1, groups))
                inputs = outputs
        self.body = nn.Sequential(*layers, nn.GroupNorm(groups, inputs), nn.ReLU())
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.body(x).mean(dim=(2, 3)))


def tanh_cnn(classes: int, channels: int = 1) -> nn.Module:
    """The small convolutional network with tanh of Papernot et al. 2020, for 28 x 28 images."""
    return nn.Sequential(
        nn.Conv2d(channels, 16, 8, stride=2, padding=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.LazyLinear(32),
        nn.Tanh(),
        nn.Linear(32, classes),
    )
