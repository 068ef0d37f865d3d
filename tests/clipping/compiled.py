"""The private step of a model in one compiled graph, against the same step uncompiled."""

import gc
import sys

import timm
import torch
import torch.nn.functional as F
from torch import nn

from sfumato.clipping.clip import GradientClipper
from sfumato.clipping.compiled import Compiled
from sfumato.clipping.factors import Clipping
from sfumato.models.wrn import StandardisedConv2d


def small_net():
    layers = [StandardisedConv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(inplace=True)]
    layers += [nn.Conv2d(8, 12, 3, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(12, 5))


def conv():
    """The compiler chooses how its maps lie in memory."""
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8, 5))


def vit():
    name = "vit_tiny_patch16_224"
    return timm.create_model(name, img_size=16, patch_size=8, depth=2, num_classes=5)


def beit():
    """Its biases are put together in a list, its positions are rows of a table."""
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "num_heads": 2, "depth": 1}
    return timm.create_model("beit_base_patch16_224", num_classes=5, init_values=0.1, **sizes)


class Computed(nn.Module):
    """A table that is computed from parameters, in low precision, and read by a constant index."""

    def __init__(self):
        super().__init__()
        self.places, self.last = nn.Linear(2, 5), nn.Linear(768, 5)
        self.register_buffer("where", torch.randn(4, 2))
        self.register_buffer("index", torch.tensor([0, 3, 3, 1]))

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            table = self.places(self.where).sigmoid()
        return self.last(x.flatten(1)) * table[self.index].float().sum(dim=0)


NETS = {"small_net": small_net, "conv": conv, "vit": vit, "beit": beit, "computed": Computed}


def loss_of(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


def main():
    torch.manual_seed(0)
    model = NETS[sys.argv[1]]()
    clipper = GradientClipper(model, clipping=Clipping(max_norm=0.3))
    x, y = torch.randn(6, 3, 16, 16), torch.arange(6) % 5
    clip = Compiled(clipper, backend=sys.argv[2])
    clip(loss_of, (x, y), 6)
    with torch.no_grad():  # what was compiled, and what came before it, follow the parameters
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    gc.collect()
    gc.disable()  # what is left afterwards is not to be collected, it is not to be there
    compiled, eager = clip(loss_of, (x, y), 6), clipper.clip(loss_of, (x, y), 6)
    torch.testing.assert_close(compiled.norms, eager.norms)
    assert compiled.total.keys() == eager.total.keys() == dict(model.named_parameters()).keys()
    for name, total in eager.total.items():
        torch.testing.assert_close(compiled.total[name], total, msg=name)
    held = [name for name, parameter in model.named_parameters() if is_held(parameter)]
    assert not held, held


def is_held(parameter):
    """Whether a graph refers to the parameter: it would tie a capture to the stream of then."""
    torch.autograd.graph.get_gradient_edge(parameter).node.metadata["seen"] = True
    return "seen" in torch.autograd.graph.get_gradient_edge(parameter).node.metadata


if __name__ == "__main__":
    main()
