"""Models by name: ours, timm's, torchvision's, or your own. The door to both libraries."""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any
from warnings import warn

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sfumato.batch_norm import guard_batch_norm
from sfumato.errors import ConfigError, SfumatoWarning
from sfumato.models.faces import IrNet, VggFace, mcnn, scnn
from sfumato.models.resnet import SmallResNet, group_cnn, small_group_cnn
from sfumato.models.scatter import scatter_linear
from sfumato.models.vgg import VggTiny
from sfumato.models.wrn import WideResNet, tanh_cnn

MODELS: dict[str, Callable[..., nn.Module]] = {
    "tanh-cnn": tanh_cnn,
    "group-cnn": group_cnn,
    "group-cnn-small": small_group_cnn,
    "ir-50": IrNet,
    "ir-152": lambda classes, channels: IrNet(classes, channels, units=(3, 8, 36, 3)),
    "mcnn": mcnn,
    "resnet18-small": SmallResNet,
    "scatter-linear": scatter_linear,
    "scnn": scnn,
    "vgg-tiny": VggTiny,
    "vgg16-face": VggFace,
    "wrn-10-2": lambda classes, channels: WideResNet(classes, channels, depth=10, width=2),
    "wrn-16-4": WideResNet,
    "wrn-40-4": lambda classes, channels: WideResNet(classes, channels, depth=40),
}
"""Our own models: name -> function of the number of classes and of image channels."""

WRAPPINGS = ("state_dict", "model_state_dict", "model")
"""Where checkpoints have the state dict, beside an optimizer's and the number of epochs."""
AUXILIARY = ("googlenet", "inception_v3")
"""Networks of torchvision that answer with several heads in training."""
PREFIXES = ("_orig_mod.", "module.")
"""What torch.compile and DistributedDataParallel put before every name."""
STATISTICS = ("running_mean", "running_var")
"""Buffers of BatchNorm that a network cannot do without."""
COUNTERS = ".num_batches_tracked"
"""A buffer of BatchNorm that plays no part in what it computes."""


def build_model(
    name: str,
    *,
    classes: int,
    shape: tuple[int, int, int],
    pretrained: bool = False,
    weights: Path | None = None,
) -> nn.Module:
    """A model for images of `shape` (channels, height, width).

    `name` is one of ours, a timm name, `torchvision:NAME`, or `package.module:function`, a function
    that takes the number of classes and returns a module. `weights` is a state dict in a file
    (.safetensors, or .pt with tensors only); a head that does not fit the classes is left out, and
    starts at zero: no step is spent on unlearning it.
    """
    model = _build(name, classes, shape[0], pretrained)
    # First of all: layers whose size follows from that of the images get it here.
    try:
        with torch.no_grad():
            out = model.eval()(torch.zeros(2, *shape))
    except (RuntimeError, AssertionError) as problem:
        raise ConfigError(
            f'"{name}" does not take images of {shape[0]} x {shape[1]} x {shape[2]} ({problem}). '
            "Set --image-size to what it expects, or choose another --model."
        ) from problem
    if not isinstance(out, Tensor) or out.shape != (2, classes):
        found = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ConfigError(f'"{name}" gives {found} for two images, not 2 x {classes} classes.')
    own_classes = (getattr(model, "pretrained_cfg", None) or {}).get("num_classes", 0)
    if pretrained and own_classes != classes:
        _start_at_zero(model, head_parameters(model))
    if weights is not None:
        load_weights(model, weights)
    return guard_batch_norm(model).train()


def pixel_statistics(
    model: nn.Module, channels: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation that a model's inputs are normalised with: fixed, public numbers.

    Models of timm and torchvision want those of their checkpoints, also when they start afresh, so
    that the same model always reads images the same way; others get 0.5 and 0.5.
    """
    known: Mapping[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    if not known and type(model).__module__.startswith("torchvision."):
        known = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    mean, deviation = known.get("mean", (0.5,)), known.get("std", (0.5,))
    if len(mean) == channels:
        return tuple(mean), tuple(deviation)
    average = sum(mean) / len(mean), sum(deviation) / len(deviation)
    return (average[0],) * channels, (average[1],) * channels


def wanted_size(name: str) -> int | None:
    """Pixels a side, in three channels, that a model with published weights was trained on.

    None for a model that is made for the images at hand: one of ours, or your own.
    """
    prefix, _, rest = name.partition(":")
    if name in MODELS or (rest and prefix != "torchvision"):
        return None
    import timm  # here, as torchvision below: they take longer than torch, for a few models

    known = None if rest else timm.get_pretrained_cfg(name)
    return known.input_size[-1] if known else 224


def head_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters of the last layer, the one that was made for the classes."""
    own = model.get_classifier() if hasattr(model, "get_classifier") else None  # pyright: ignore
    heads = [own] if isinstance(own, nn.Module) and any(True for _ in own.parameters()) else []
    if isinstance(own, tuple | list):
        heads = [head for head in own if isinstance(head, nn.Module)]
    if not heads:
        owners = [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))]
        heads = owners[-1:]
    ids = {id(p) for head in heads for p in head.parameters()}
    return {name for name, p in model.named_parameters() if id(p) in ids}


def _start_at_zero(model: nn.Module, names: set[str]) -> None:
    for name in names:
        nn.init.zeros_(model.get_parameter(name))


def load_weights(model: nn.Module, path: Path) -> list[str]:
    """Load a state dict; returns the names that it does not fill.

    These are of a head for other classes, which then starts at zero, or counters, which change
    nothing. A network whose BatchNorm was replaced leaves the statistics of BatchNorm out; one with
    BatchNorm needs them.
    """
    if not path.exists():
        raise ConfigError(f"there is no file {path}.")
    found = read_state(path)
    own = model.state_dict()
    for prefix in PREFIXES:
        if own.keys().isdisjoint(found):
            found = {key.removeprefix(prefix): value for key, value in found.items()}
    fits = {k: v for k, v in found.items() if k in own and own[k].shape == v.shape}
    missing = [key for key in own if key not in fits]
    head = head_parameters(model)
    lost = [name for name in missing if name not in head and not name.endswith(COUNTERS)]
    if lost and all(name.endswith(STATISTICS) for name in lost):
        raise ConfigError(
            f'{path} has no "{lost[0]}": it lacks the statistics that BatchNorm needs. If the '
            "network was trained with GroupNorm in place of BatchNorm, as sfumato train does "
            "without weights, say --norm group."
        )
    if lost:
        raise ConfigError(
            f"{path} does not fit this model: {len(fits)} of its {len(own)} tensors match. The "
            f'first that does not is "{lost[0]}".'
        )
    replaced = {name.removesuffix("weight") + s for name in own for s in STATISTICS}
    unused = [key for key in found if key not in own and not key.endswith(COUNTERS)]
    unused = [key for key in unused if key not in replaced]
    if unused:
        warn(
            f"{path} has {len(unused)} tensors that this model does not use, such as "
            f'"{unused[0]}": is it of another model?',
            SfumatoWarning,
            stacklevel=2,
        )
    model.load_state_dict(fits, strict=False)
    head &= own.keys()
    if not head.isdisjoint(missing):
        _start_at_zero(model, head)
    return missing


def load_exactly(model: nn.Module, path: Path) -> None:
    """Load a state dict that has every tensor of the model and no other, or say what differs."""
    found, own = read_state(path), model.state_dict()
    fits = {name for name in own if name in found and own[name].shape == found[name].shape}
    other = [name for name in (*own, *found) if name not in fits]
    if other:
        raise ConfigError(
            f"{path} does not fit this model: of its {len(own)} tensors {len(fits)} are there. The "
            f'first that differs is "{other[0]}".'
        )
    model.load_state_dict(found)


def read_state(path: Path) -> Mapping[str, Tensor]:
    """The tensors in a .safetensors file, or in a .pt file that holds nothing else.

    What training scripts put around them (WRAPPINGS) is taken off.
    """
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return unwrap_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as problem:
        # Not in torch's words: they say how to read a file that runs what it holds.
        raise ConfigError(
            f"{path} holds no state dict of plain tensors: it is damaged, or has more in it. Save "
            "model.state_dict() alone, best as .safetensors."
        ) from problem


def unwrap_state_dict(state: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """A state dict without what training scripts put around it; a TypeError if it is none."""
    for name in WRAPPINGS:
        state = state[name] if isinstance(state.get(name), Mapping) else state
    if not all(isinstance(value, Tensor) for value in state.values()):
        raise TypeError("not all of it are tensors")
    return state


def _build(name: str, classes: int, channels: int, pretrained: bool) -> nn.Module:
    if name in MODELS:
        if pretrained:
            raise ConfigError(f'"{name}" has no pretrained weights: give --weights FILE, or none.')
        return MODELS[name](classes, channels)
    prefix, _, rest = name.partition(":")
    if prefix == "torchvision":
        return _torchvision(rest, classes, pretrained)
    if rest:
        return own_function(prefix, rest, classes)
    return _timm(name, classes, channels, pretrained)


def _timm(name: str, classes: int, channels: int, pretrained: bool) -> nn.Module:
    import timm

    if not timm.is_model(name):
        hint = _did_you_mean(name, [*MODELS, *timm.list_models()])
        raise ConfigError(
            f'no model is called "{name}".{hint} Ours are {", ".join(MODELS)}; timm\'s go by their '
            "name, torchvision's by torchvision:NAME, yours by module:function."
        )
    settings: dict[str, Any] = {"num_classes": classes, "in_chans": channels}
    # It logs each of five retries, and then raises all the same.
    hub = logging.getLogger("huggingface_hub")
    level = hub.level
    hub.setLevel(logging.ERROR)
    try:
        return timm.create_model(name, pretrained=pretrained, **settings)
    except (RuntimeError, OSError, ValueError) as problem:
        if not pretrained:
            raise
        raise _not_fetched(name, problem) from problem
    finally:
        hub.setLevel(level)


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    """Names that begin like this one, the shortest first, and then those spelt alike."""
    longer = sorted((one for one in known if one.startswith(name)), key=len)
    near = list(dict.fromkeys([*longer, *get_close_matches(name, known, n=3)]))[:3]
    return f" Did you mean {' or '.join(near)}?" if near else ""


def _not_fetched(name: str, problem: Exception) -> ConfigError:
    return ConfigError(
        f'the published weights of "{name}" could not be fetched ({type(problem).__name__}), and '
        "are not on this machine. Is there a network? Or bring them as a file: --weights FILE."
    )


def _torchvision(name: str, classes: int, pretrained: bool) -> nn.Module:
    from torchvision import models

    if name not in models.list_models(module=models):
        hint = _did_you_mean(name, models.list_models(module=models))
        raise ConfigError(f'torchvision has no classifier called "{name}".{hint}')
    if not pretrained:
        # Said aloud, or torchvision warns of another default to come.
        options = {"init_weights": True} if name in AUXILIARY else {}
        return _without_auxiliary(models.get_model(name, num_classes=classes, **options))
    try:
        model = _without_auxiliary(models.get_model(name, weights="DEFAULT"))
    except (RuntimeError, OSError, ValueError) as problem:
        raise _not_fetched(f"torchvision:{name}", problem) from problem
    heads = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    if not heads:
        # The head of SqueezeNet goes through a ReLU: begun at zero, it would stay there.
        raise ConfigError(
            f'"torchvision:{name}" has no linear layer that would make way for one of {classes} '
            "classes. Choose another model, or start without its published weights."
        )
    path, old = heads[-1]
    parent, _, attribute = path.rpartition(".")
    setattr(model.get_submodule(parent), attribute, nn.Linear(old.in_features, classes))
    return model


@contextmanager
def files_beside_you() -> Iterator[None]:
    """Within this, modules in the folder that you stand in are found, as with python -m."""
    if "" in sys.path:
        yield
        return
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")


def _without_auxiliary(model: nn.Module) -> nn.Module:
    """Without the second and third head of GoogLeNet and Inception: losses are of one."""
    changes = {"aux_logits": False, "aux1": None, "aux2": None, "AuxLogits": None}
    for name, value in changes.items():
        if hasattr(model, name):
            setattr(model, name, value)
    return model


def find_function(module: str, function: str) -> Any:
    """What a module calls by that name; a file beside you is found."""
    try:
        with files_beside_you():
            return getattr(import_module(module), function)
    except (ImportError, AttributeError, TypeError) as problem:
        raise ConfigError(
            f"{module}:{function} cannot be loaded: {problem}. Before the colon stands a module's "
            "name, found in this folder or on PYTHONPATH: my_code:function for my_code.py."
        ) from problem


def own_function(module: str, function: str, classes: int) -> nn.Module:
    """The network that your own function makes for this many classes."""
    make = find_function(module, function)
    try:
        with files_beside_you():
            made = make(classes)
    except Exception as problem:  # whatever your own code raises
        raise ConfigError(
            f"{module}:{function} is called with the number of classes, and fails: "
            f"{type(problem).__name__}: {problem}."
        ) from problem
    if not isinstance(made, nn.Module):
        raise ConfigError(f"{module}:{function} gave a {type(made).__name__}, not a torch module.")
    return made
