"""What the engine refuses and warns of, so that the guarantee that it states holds."""

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sfumato.config import check_counts, check_given, check_numbers
from sfumato.errors import ConfigError, PrivacyError
from sfumato.privacy.budget import Plan
from sfumato.privacy.ledger import Ledger
from sfumato.privacy.session_key import SessionKey


def refuse_foreign_gradients(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Refuse gradients that others wrote: the optimizer would apply them without noise."""
    if optimizer is None:
        raise ConfigError("the engine is not attached: call engine.attach(optimizer) first.")
    names = {id(p): name for name, p in module.named_parameters()}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter.grad is not None:
            raise PrivacyError(
                f'something wrote a gradient on "{names.get(id(parameter), "a parameter")}" that '
                "is not private: loss.backward()? Call optimizer.zero_grad() and leave gradients "
                "to the engine."
            )


PARALLEL = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}


def refuse_several_processes(module: nn.Module) -> None:
    """Refuse a model that several processes train: each would clip and noise alone."""
    for name, part in module.named_modules():
        kinds = PARALLEL & {kind.__name__ for kind in type(part).__mro__}
        if kinds:
            raise ConfigError(
                f"the model{f' has a {min(kinds)} at {name}' if name else f' is a {min(kinds)}'}, "
                "and the engine trains in one process, on one device: each process would clip, "
                "noise and step alone. Give the engine the module inside (model.module), or train "
                "on several GPUs by `torchrun -m sfumato train`."
            )
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    if several and torch.distributed.get_world_size() > 1:
        raise ConfigError(
            f"this is one of {torch.distributed.get_world_size()} processes, and the engine trains "
            "in one: the others would train, and spend, on their own. Use one process, or train on "
            "several GPUs by `torchrun -m sfumato train`."
        )


HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def refuse_hooks(module: nn.Module) -> None:
    """Refuse hooks and a `__call__` of the model's own: no test of the model sees what they do."""
    every = nn.modules.module
    hooked = any(getattr(module, name) or getattr(every, f"_global{name}") for name in HOOKS)
    if hooked or type(module).__call__ is not nn.Module.__call__:
        raise PrivacyError(
            "the model has hooks, or a __call__ of its own. They would see the whole batch outside "
            "of model.forward, where the engine tests that examples are not mixed. Remove them "
            "(handle.remove()), or do the same in forward, or put the model into a module "
            "(nn.Sequential(model)): hooks on its parts are tested."
        )


def refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that asks for several gradients a step (LBFGS): one noisy one is paid."""
    if not callable(getattr(optimizer, "step", None)):
        raise ConfigError(
            f"the optimizer must be a torch.optim.Optimizer, and is a {type(optimizer).__name__}."
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{type(optimizer).__name__} calls a closure for several gradients in a step, and one "
            "noisy gradient is paid for. Use an optimizer that takes one: SGD, Adam, AdamW."
        )


def check_governed(
    now: Mapping[str, nn.Parameter], governed: set[int], optimizer: torch.optim.Optimizer
) -> None:
    """Refuse if model or optimizer train other parameters than when the engine was made."""
    if {id(p) for p in now.values()} != governed:
        raise PrivacyError(
            "parameters were frozen or unfrozen after the engine was made. Make a new one: "
            "new.load_state_dict(old.state_dict()) takes the ledger over."
        )
    given = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    trained = {key for key, p in given.items() if p.requires_grad}
    if trained != governed:
        raise PrivacyError(
            f"the optimizer has {len(trained - governed)} trainable parameters that the engine "
            f"does not govern and lacks {len(governed - set(given))} that it does. Build it from "
            "the same model's parameters, after freezing what is frozen."
        )


def check_drawn(examples: int, drawn: tuple[int, bool] | None) -> bool:
    """Refuse a step on other examples than the loader drew; returns whether they are the last.

    Each example is clipped alone. One that comes as eight rows, each with a loss of its own, would
    add eight times the norm bound, and one is paid for.
    """
    if drawn is None:
        raise PrivacyError("this batch did not come from engine.loader, and others did.")
    count, last = drawn
    if examples != count:
        raise PrivacyError(
            f"{count} examples were drawn and the model was given {examples}. Each of these is "
            "clipped alone, so one that comes several times adds more than is paid for. Give every "
            "example once. Several views of it go on an axis of their own, (examples, views, ...): "
            "the model flattens them inside, and the loss is their average, one an example."
        )
    return last


def check_turn(step: int, before: int, taken: int, gathered: int) -> None:
    """Refuse a piece of a step unless the engine has come to it, with `before` examples gathered.

    Two loaders that take turns would give the same piece twice, or to the step that follows.
    """
    if (step, before) != (taken, gathered):
        raise PrivacyError(
            f"step {step} was taken, or begun, with another loader of this data. Go on with that."
        )


def refuse_second_loader(taken: int, plan: Plan) -> None:
    """Refuse a loader after the last step: a loop over epochs, as people write it, asks for one."""
    if taken >= plan.steps:
        raise ConfigError(
            f"all {plan.steps} steps of the plan are taken: one loader is the whole plan, all "
            "epochs of it. Leave the loop over epochs out."
        )


PATIENCE = 5
"""Steps in a row whose losses were all NaN or infinite, and that were paid for all the same."""


class FiniteLossCheck:
    """Refuses to go on after several steps without a finite loss: nothing is learned from those."""

    def __init__(self) -> None:
        self._some_finite: bool | None = None
        self._bad_steps = 0  # steps in a row

    def add(self, losses: Tensor) -> None:
        """Note some of the losses of the step that comes next."""
        self._some_finite = bool(self._some_finite) or bool(losses.isfinite().any())

    def check(self) -> None:
        """Refuse a step if in all of the last few no loss was finite; it is not paid for."""
        if self._some_finite is None:  # an empty batch says nothing
            return
        self._bad_steps = 0 if self._some_finite else self._bad_steps + 1
        self._some_finite = None
        if self._bad_steps > PATIENCE:
            raise ConfigError(
                f"in {self._bad_steps} steps in a row no loss was finite: training has diverged, "
                "or the inputs hold NaN. This step was not taken, and it and the later ones are "
                "not paid for. Go back to weights from before, with a smaller learning rate. "
                "(Losses are private, so keep to yourself that training stopped here.)"
            )


def refuse_ungoverned(module: nn.Module, named: Mapping[str, nn.Parameter]) -> None:
    """Refuse a choice of parameters that leaves others to be trained without noise."""
    others = [n for n, p in module.named_parameters() if p.requires_grad and n not in named]
    if others:
        raise PrivacyError(
            f'"{others[0]}" is trainable and not among named_params: its gradient would be applied '
            "without noise. Freeze it with requires_grad_(False), or name it."
        )


def check_settings(secret: object, *, sample_size: Any, steps: Any, **numbers: Any) -> None:
    """Refuse a setting that is missing or no number, and a secret that is no key."""
    check_given(
        batch_size=numbers["batch_size"],
        sample_size=sample_size,
        max_grad_norm=numbers["max_grad_norm"],
    )
    check_counts(sample_size=sample_size, steps=steps)
    check_numbers(**numbers)
    if not isinstance(secret, SessionKey | None):
        raise ConfigError("secret must be a sfumato.SessionKey: leave it out, and one is drawn.")


def check_guarantee(target_epsilon: float | None, noise_multiplier: float | None) -> None:
    """Refuse both a target epsilon and a noise multiplier, or neither."""
    if (target_epsilon is None) == (noise_multiplier is None):
        raise ConfigError(
            "give either target_epsilon, and the noise that it needs is found, or "
            "noise_multiplier, and get_privacy_spent() says what that comes to."
        )


def check_length(epochs: float | None, steps: int | None) -> None:
    """Refuse a training of no length: `make_plan` would take it for a single release."""
    if epochs is None and steps is None:
        raise ConfigError(
            "how long is the training? Noise and epsilon depend on it: give epochs, or steps."
        )


def add_releases(ledger: Ledger, before: Ledger) -> Ledger:
    """The ledger of a loaded state, with what the engine has released since: it stays paid for."""
    known = len(ledger.releases)
    if before.releases:
        ledger.inherit(before)
    more = len(ledger.releases) - known
    if more:
        warnings.warn(
            f"this engine has made {more} releases that the state does not know. They stay paid "
            "for, and steps that are taken again pay again: get_privacy_spent() will say more than "
            "was planned. To keep to the plan, load the last state.",
            stacklevel=3,
        )
    return ledger
