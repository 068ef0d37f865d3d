"""A tiny model, its data, and an engine for them: what a private training loop needs."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from sfumato.engine import PrivacyEngine
from sfumato.privacy.session_key import SessionKey


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


def dataset(n=60):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(n, 1, 8, 8, generator=generator), torch.arange(n) % 3)


def engine_for(model, **changes):
    settings = {
        "batch_size": 12,
        "sample_size": 60,
        "epochs": 2,
        "max_grad_norm": 0.1,
        "target_epsilon": 3.0,
        "target_delta": 1e-3,
    }
    return PrivacyEngine(model, **{**settings, **changes})


def losses(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


def attached(model=None, lr=0.1, **changes):
    """Model, optimizer and an engine that is attached to them."""
    model = net() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    engine = engine_for(model, **changes)
    engine.attach(optimizer)
    return model, optimizer, engine


def repeatable(seed=0):
    """Settings for runs that are compared number by number; nothing is searched for."""
    return {"secret": SessionKey.from_seed(seed), "target_epsilon": None, "noise_multiplier": 1.0}
