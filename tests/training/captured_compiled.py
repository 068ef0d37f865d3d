"""A compiled clip that is captured on a GPU, against the same clip uncompiled: `... cuda`.

Weights that are standardised come before the batch: their graphs must not be kept.
"""

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from people import portraits
from torch import nn

from sfumato.clipping.clip import GradientClipper
from sfumato.clipping.compiled import Compiled
from sfumato.clipping.factors import Clipping
from sfumato.models.wrn import StandardisedConv2d
from sfumato.training.captured_clip import captured
from sfumato.training.cuda_graph import WARM
from sfumato.training.inputs import Inputs


def main():
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    device = torch.device(sys.argv[1])
    inputs = Inputs(portraits(), device, (0.5,), (0.5,), seed=3)
    layers = [StandardisedConv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(800, 3)]
    clipper = GradientClipper(nn.Sequential(*layers).to(device), clipping=Clipping(max_norm=1e-2))
    clip = captured(clipper, Compiled(clipper), inputs)
    mask = torch.ones(4, dtype=torch.bool, device=device)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for turn in range(WARM + 3):
            x, y = inputs.trial(4)
            tensors = (x * (1 + turn), y)
            found = clip(inputs.losses, tensors, 4, mask)
            exact = clipper.clip(inputs.losses, tensors, 4, mask)
            torch.testing.assert_close(found.norms, exact.norms, rtol=1e-5, atol=0)
            torch.testing.assert_close(found.factors, exact.factors, rtol=1e-5, atol=0)
            for name, total in exact.total.items():
                torch.testing.assert_close(found.total[name], total, rtol=1e-4, atol=1e-7)
    uncaptured = [str(one.message) for one in heard if "cannot be captured" in str(one.message)]
    assert not uncaptured, uncaptured


if __name__ == "__main__":
    main()
