"""What is chosen before the first step: device, parameters, optimizer, schedule."""

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import nn

from sfumato.errors import ConfigError
from sfumato.models.zoo import head_parameters
from sfumato.processes import local_rank

Model = TypeVar("Model", bound=nn.Module)

OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def pick_device(name: str) -> torch.device:
    """The device asked for, if it is there; with torchrun, each process its own GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f'device "{name}" was asked for and torch finds no GPU. Use --device cpu.'
        )
    try:
        device = torch.device(name)
    except RuntimeError as problem:
        raise ConfigError(f'device "{name}": there are cpu, cuda, cuda:0 and auto.') from problem
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", local_rank())
    if device.type == "cuda" and not 0 <= (device.index or 0) < torch.cuda.device_count():
        raise ConfigError(f'device "{name}": torch finds {torch.cuda.device_count()} GPUs.')
    return device


def quick_precision(device: torch.device) -> torch.dtype:
    """What to run in where no norm is taken: bf16 on a GPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def move_to_device(model: Model, device: torch.device) -> Model:
    """The model on a device; on a GPU its filters lie as fast convolutions want them."""
    layout = torch.channels_last if device.type == "cuda" else torch.preserve_format
    return model.to(device).to(memory_format=layout)  # pyright: ignore


def choose_parameters(model: nn.Module, which: str, freeze: Sequence[str] = ()) -> None:
    """Freeze what is not to learn: all but the head, all but biases and head, and patterns."""
    head = head_parameters(model)
    for name, parameter in model.named_parameters():
        learns = which == "all" or name in head or (which == "bias" and name.endswith("bias"))
        if not learns:
            parameter.requires_grad_(False)
    for pattern in freeze:
        found = [p for name, p in model.named_parameters() if fnmatchcase(name, pattern)]
        if not found:
            some = ", ".join(name for name, _ in list(model.named_parameters())[:3])
            raise ConfigError(
                f'--freeze "{pattern}" fits no parameter. Patterns are like "blocks.0.*"; the '
                f"parameters are called {some}, ..."
            )
        for parameter in found:
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError("every parameter is frozen: there is nothing to learn.")


def make_optimizer(
    model: nn.Module, kind: str, *, lr: float, momentum: float, weight_decay: float
) -> torch.optim.Optimizer:
    """An optimizer of the parameters that learn; on a GPU it moves all of them in one kernel."""
    learning = [p for p in model.parameters() if p.requires_grad]
    options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
    if kind == "sgd":
        options["momentum"] = momentum
    if all(p.is_cuda for p in learning):
        options["fused"] = True
    return OPTIMIZERS[kind](learning, **options)


def make_schedule(
    optimizer: torch.optim.Optimizer, kind: str, steps: int, warmup: int = 0
) -> torch.optim.lr_scheduler.LRScheduler:
    """The learning rate over time: constant, or half a cosine down to zero, after a warm-up.

    Stairs go down to a tenth at 60 % of the way, and to a hundredth at 80 %.
    """
    factors = {
        "constant": lambda _: 1.0,
        "cosine": lambda step: 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps))),
        "stairs": lambda step: 0.1 ** ((step >= 0.6 * steps) + (step >= 0.8 * steps)),
    }
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: factors[kind](step) * min(1.0, (step + 1) / (warmup + 1))
    )
