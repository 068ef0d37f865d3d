"""Activation checkpointing computes operations again, in which parameters are found by name."""

import pytest
import torch
from oracle import compare
from torch import nn
from torch.utils.checkpoint import checkpoint

from sfumato.clipping.method_choice import MODES


class Mixer(nn.Module):
    """Two layers of one shape, one with the examples on the second axis."""

    def __init__(self, tokens):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.before = tokens, nn.Linear(6, tokens * 4)
        self.first, self.second, self.after = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def block(self, x):
        x = self.first(x).tanh()
        return self.second(x.transpose(0, 1)).transpose(0, 1).tanh()

    def forward(self, x):
        tokens = self.before(x).reshape(len(x), self.tokens, 4)
        return self.after(checkpoint(self.block, tokens, use_reentrant=False).mean(dim=1))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tokens", [3, 4])
def test_layers_of_one_shape_are_told_apart(tokens, mode):
    compare(Mixer(tokens).double(), torch.randn(5, 6).double(), 5, mode=mode)
