"""What a model and its losses must be before anything is clipped; the message says what is not."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sfumato.errors import ConfigError, UnsupportedLayer


def check_model(model: Any) -> None:
    """Refuse what is no model, what has nothing to train, and what cannot be followed."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model must be a torch.nn.Module, and is a {type(model).__name__}.")
    for name, module in model.named_modules():
        refuse_compiled(module, name)
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"{_place(name)} is TorchScript, in which parameters cannot be followed. Give the "
                "torch.nn.Module that it was made of."
            )
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        if isinstance(parameter, nn.UninitializedParameter):
            raise ConfigError(
                f'"{name}" has no shape yet: run the model once on an input of the right size.'
            )
    if not any(parameter.requires_grad for parameter in named.values()):
        what = "all are frozen" if named else "it has none"
        raise ConfigError(f"the model has no parameters to train: {what}.")
    check_precision(model)


def refuse_compiled(module: nn.Module, name: str = "") -> None:
    """Refuse a compiled module: its code was made for other tensors than those that are followed.

    A plan of its own is what `sfumato train --compile` has.
    """
    # There is no public way to ask; the class itself would load the compiler.
    if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
        raise ConfigError(
            f"{_place(name)} is compiled, and parameters cannot be followed through compiled code. "
            "Give the module before torch.compile (compiled._orig_mod), and do not call "
            "module.compile(). `sfumato train` can compile a private step as a whole."
        )


COMPILED_LOSS = (
    "the loss goes through compiled code (torch.compile), in which neither parameters nor what is "
    "done with the examples can be followed. Give the function as it was before it was compiled."
)


@contextmanager
def refusing_compiled(loss_fn: Callable[..., Any]) -> Iterator[None]:
    """Refuse a compiled loss: at once, or when the compiler fails at parameters that are followed.

    Compiled code may lie anywhere in what a loss calls, so that only the failure shows it.
    """
    # The compiler's mark on functions that it made; there is no public way to ask.
    if hasattr(loss_fn, "_torchdynamo_orig_callable"):
        raise ConfigError(COMPILED_LOSS)
    try:
        yield
    except RuntimeError as problem:
        by_compiler = type(problem).__module__.startswith("torch._dynamo")
        if by_compiler or "donated buffers" in str(problem):
            raise ConfigError(COMPILED_LOSS) from problem
        raise


def check_precision(model: nn.Module) -> None:
    """Refuse trainable parameters of types in which sums would be wrong."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.is_complex():
            raise UnsupportedLayer(
                f'"{name}" is {parameter.dtype}: there are no rules for complex parameters. Freeze '
                "it, or keep it as two real parameters and make no complex number of them."
            )
        if parameter.dtype in (torch.float16, torch.bfloat16):
            raise ConfigError(
                f'"{name}" is {parameter.dtype}: sums would be rounded before the noise comes. '
                "Keep parameters in float32 and use autocast."
            )


def check_inputs(inputs: Any) -> None:
    """Refuse inputs that are not a tuple of tensors with rows."""
    known = isinstance(inputs, tuple | list)
    if not known or not all(isinstance(x, Tensor) and x.ndim for x in inputs):
        raise ConfigError(
            "the inputs must be a tuple of tensors, (images, labels) say, one for each argument of "
            "the loss function after the model: for one tensor, (images,)."
        )


def check_batch(inputs: Any, examples: int) -> None:
    """Refuse inputs that do not have the same number of rows for each example."""
    check_inputs(inputs)
    for x in inputs:
        if x.shape[0] % examples or not x.shape[0]:
            raise ConfigError(
                f"an input has shape {tuple(x.shape)}, which is not the same number of rows for "
                f"each of {examples} examples. Along the first axis all inputs must go together."
            )


def check_losses(losses: Any, examples: int, *, graph: bool = True) -> None:
    """Refuse losses that are not one real number for each example, with a graph unless not asked.

    The first mistake of all is a mean.
    """
    advice = 'Use reduction="none", and average over views.'
    if not isinstance(losses, Tensor):
        raise ConfigError(
            f"the loss is a {type(losses).__name__}, and must be a tensor with one number for each "
            f"of the {examples} examples. {advice}"
        )
    if losses.shape != (examples,):
        raise ConfigError(
            f"the loss has shape {tuple(losses.shape)}, and must be one number for each of the "
            f"{examples} examples. {advice}"
        )
    if graph and not losses.requires_grad:
        raise ConfigError(
            "the loss has no graph (it was detached, or made under torch.no_grad): compute it from "
            "the model's output, with gradients on."
        )
    if not losses.is_floating_point():
        raise ConfigError(
            f"the losses are {losses.dtype}, and must be real numbers (torch.float32) that can be "
            "differentiated."
        )


def _place(name: str) -> str:
    return f'"{name}" in the model' if name else "the model"
