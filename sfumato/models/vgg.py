"""VGG-tiny: the small network whose features the published reconstruction of digits starts from."""

import torch.nn.functional as F
from torch import Tensor, nn


class VggTiny(nn.Module):
    """Eight 3 x 3 convolutions in three stages, two layers of 256 units, a linear head.

    Maciazek and Allison 2025 (arXiv 2505.14323): 240,010 parameters for 26 classes of 32 x 32
    images. Other sizes are averaged to the same 4 x 4 map.
    """

    def __init__(self, classes: int, channels: int = 1, features: int = 256) -> None:
        super().__init__()
        stages = [[4, 8], [16, 16, 32, 32], [32, 32]]
        layers: list[nn.Module] = []
        inputs = channels
        for stage in stages:
            for outputs in stage:
                layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
                inputs = outputs
            layers.append(nn.MaxPool2d(2))
        self.body = nn.Sequential(*layers)
        self.dense1 = nn.Linear(inputs * 16, features)
        self.dense2 = nn.Linear(features, features)
        self.head = nn.Linear(features, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        maps = F.adaptive_avg_pool2d(self.body(x), 4)
        features = F.relu(self.dense2(F.relu(self.dense1(maps.flatten(1)))))
        return self.head(features)
