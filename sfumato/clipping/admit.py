"""The test a model passes before its norms are believed.

Two questions, on a few inputs. Independence: when one example changes, do the losses of the others
stay as they are? If not, the model mixes examples (BatchNorm in any disguise, attention across the
batch) and no per-example gradient exists. And is the loss of an example the same among more
examples, and in another order? If not, one example more changes the gradients of all. The same is
asked of its gradient, which a straight-through estimator takes from elsewhere than its loss.
Equality: are the norms, and the clipped sum, those of autograd asked for one loss at a time? A
wrong norm is never silent.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from sfumato.clipping.buffers import Buffers
from sfumato.clipping.checks import check_batch, check_inputs, check_losses, refusing_compiled
from sfumato.clipping.clip import Clipped, GradientClipper
from sfumato.clipping.factors import Clipping, check_clip_function
from sfumato.clipping.mixing import EXACT, PLACE_MATTERS, place_matters
from sfumato.clipping.probe import (
    copy_with_nonzero_weights,
    evaluation_mode,
    examples_at,
    random_state,
    resize_batch,
    same_state,
    set_random_state,
    without_dropout,
)
from sfumato.errors import ConfigError, PrivacyError, UnsupportedLayer

SLACK = 1e-5
"""How far over the bound the double-precision norm of a float32 sum may come out."""
DRAWS = 24
"""How often a model is tried that throws dice of its own: a branch taken one time in ten shows."""
TOLERANCE = 2e-4
"""Relative; float32 sums in another order differ by less, wrong rules by much more."""
SELDOM = 100
"""In the long run what one example adds is measured in one of this many batches: 1 % of work."""
_DICE = random.SystemRandom()  # not torch's, so that nobody else's chance moves


def admit(
    clipper: GradientClipper,
    loss_fn: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    examples: int,
    exact_loss_fn: Callable[..., Tensor] | None = None,
) -> None:
    """Raise `UnsupportedLayer`, with the parameter and the remedy, unless the model passes.

    `inputs` may be noise of the right shape; nothing of them is kept. Dropout and other per-example
    randomness is switched off for the length of the test.

    Both are asked of a copy of the model, in float64 and with no weight at zero, where that can be
    had: rounding flips activations that have a kink, and behind a weight of zero nothing is seen.
    `exact_loss_fn` is the loss without lower precision. That each contribution is within the bound
    is tested as it is.
    """
    check_batch(inputs, examples)
    if examples == 1:  # alone, it cannot be taken for another
        inputs, examples = resize_batch(inputs, 1, 2), 2
    refuse_batch_norm(clipper.model)
    refuse_drop_block(clipper.model)
    # Norms from far below the bound to far beyond it.
    check_clip_function(clipper.clipping.max_norm * torch.logspace(-3, 3, 13), clipper.clipping)
    exact_loss_fn = exact_loss_fn or loss_fn
    compiled = refusing_compiled(exact_loss_fn)
    with compiled, without_dropout(clipper.model), torch.enable_grad():
        _check_buffers(clipper.model, loss_fn, inputs, examples)
        model, exact_inputs = copy_with_nonzero_weights(clipper.model, exact_loss_fn, inputs)
        _check_independence(model, exact_loss_fn, exact_inputs, examples)
        _check_places(model, exact_loss_fn, exact_inputs, examples)
        exact = replace(clipper, model=model, layouts={})
        rows = _check_equality(exact, exact_inputs, exact_loss_fn, examples)
        if not _check_company(model, exact_loss_fn, exact_inputs, rows):
            with evaluation_mode(model):
                rows = one_at_a_time(model, exact_loss_fn, exact_inputs)
                _check_company(model, exact_loss_fn, exact_inputs, rows)
        _check_bound(clipper, loss_fn, inputs, examples)


def clipped_gradient(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    *,
    max_norm: float,
    mask: Tensor | None = None,
    mode: str = "ghost_mixed",
) -> Clipped:
    """The sum of clipped gradients of `loss_fn(model, *inputs)`, which gives one loss per example.

    Guarantee: that of `GradientClipper.clip`, for a model that has been admitted on noise of the
    same shape. For a single sum; in a loop make a `GradientClipper`, admit it once and call its
    `clip`.
    """
    clipper = GradientClipper(model, mode, clipping=Clipping(max_norm=max_norm))
    check_inputs(inputs)
    if not inputs:
        raise ConfigError("there are no inputs: their first axis says how many examples there are.")
    examples = len(inputs[0])
    noise = [torch.randn_like(x) if x.is_floating_point() else x for x in inputs]
    few = min(examples, 3)
    if few:
        admit(clipper, loss_fn, [x[:few] for x in noise], few)
    return clipper.clip(loss_fn, inputs, examples, mask)


def refuse_batch_norm(model: nn.Module) -> None:
    """Raise for the first BatchNorm that would use the statistics of the batch."""
    for name, module in model.named_modules():
        # The parent of all of them (1-D to 3-D, lazy, synchronised, timm's) has no public name.
        mixes = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if mixes and (module.training or module.running_mean is None):
            raise UnsupportedLayer(
                f'"{name}" is a {type(module).__name__}: it mixes the examples of a batch, so no '
                "per-example gradient exists. Replace it by a GroupNorm, or freeze it: norm=group "
                "or frozen (sfumato.models.normalise.replace_batch_norm, freeze_batch_norm)."
            )


def refuse_drop_block(model: nn.Module) -> None:
    """Raise for a DropBlock: it divides by how much is left of the whole batch."""
    for name, module in model.named_modules():
        if module.training and "dropblock" in type(module).__name__.lower():
            raise UnsupportedLayer(
                f'"{name}" is a {type(module).__name__}: it divides by how much it left of the '
                "whole batch, so what one example adds depends on the others. Use "
                "torch.nn.Dropout2d, or stochastic depth."
            )


def one_at_a_time(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    places: Sequence[int] | None = None,
) -> list[dict[str, Tensor]]:
    """The oracle: autograd, asked for the gradient of one example's loss after the other."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    losses = loss_fn(model, *inputs)
    rows = []
    for loss in losses if places is None else losses[list(places)]:
        found = torch.autograd.grad(
            loss, list(named.values()), retain_graph=True, allow_unused=True
        )
        pairs = zip(named.items(), found, strict=True)
        rows.append({n: torch.zeros_like(p) if g is None else g for (n, p), g in pairs})
    return rows


def contributions_due(before: int) -> bool:
    """Whether to measure what examples add, after this many other batches.

    Of the first for certain, later of one in `SELDOM`, which nobody can foresee.
    """
    return before == 0 or _DICE.randrange(SELDOM) == 0


def check_contributions(
    clipper: GradientClipper, clip: Callable[[Tensor], Clipped], examples: int, count: int = 2
) -> None:
    """Raise `PrivacyError` if one of `count` examples, drawn at random, adds more than the bound.

    Also if the clip function gives it another factor because of the other examples.

    For use while training, on the very inputs of a step, in its mode and precision. `clip` does
    what the step does, for a mask: the sum is formed for one example with all others masked, and
    measured. Norms and sums are found in different ways, so that a wrong norm shows.
    """
    bound = clipper.clipping.max_norm
    for i in _DICE.sample(range(examples), min(count, examples)):
        found = clip(torch.arange(examples, device=clipper.seed.device) == i)
        check_clip_function(found.norms, clipper.clipping)
        added = _length(found)
        if not added <= bound * (1 + SLACK):
            raise PrivacyError(
                f"an example adds a gradient of norm {added:.6g}, beyond the bound {bound:.6g}: a "
                "norm was found too small. No step was taken with it. Please report the model."
            )


def _length(clipped: Clipped) -> float:
    """The norm of the whole sum."""
    return float(sum(g.double().square().sum() for g in clipped.total.values())) ** 0.5


def _check_buffers(
    model: nn.Module, loss_fn: Callable[..., Tensor], inputs: Sequence[Tensor], examples: int
) -> None:
    """A buffer that the batch writes to would carry private statistics out without noise."""
    buffers = Buffers(model)
    buffers.remember_parameters()
    check_losses(loss_fn(model, *inputs), examples, graph=False)
    buffers.check(values=True)
    buffers.remember_parameters()
    try:
        with torch.no_grad():
            loss_fn(model, *inputs)
    except RuntimeError as problem:
        raise UnsupportedLayer(
            f"{type(model).__name__} works with gradients on and not without ({problem}). A model "
            "that asks for gradients inside its forward pass (a penalty on them) has no "
            "per-example gradients that can be followed: take the penalty out."
        ) from problem
    buffers.check(values=True)


def _check_independence(
    model: nn.Module, loss_fn: Callable[..., Tensor], inputs: Sequence[Tensor], examples: int
) -> None:
    """Asked of two numbers of examples, odd and even, and of inputs with and without a sign."""
    if examples < 2:
        return
    more = [
        x.abs() if x.is_floating_point() else x
        for x in resize_batch(inputs, examples, examples + 1)
    ]
    for given, number in ((inputs, examples), (more, examples + 1)):
        throws_dice = _check_unmoved(model, loss_fn, given, number, range(number))
        for i in range(DRAWS if throws_dice else 0):
            _check_unmoved(model, loss_fn, given, number, [i % number])


def _check_places(
    model: nn.Module, loss_fn: Callable[..., Tensor], inputs: Sequence[Tensor], examples: int
) -> None:
    """The loss of an example may depend neither on its place nor on how many examples there are."""
    more = resize_batch(inputs, examples, examples + 1)

    def losses(places: Tensor) -> list[Tensor]:
        return [loss_fn(model, *(examples_at(x, places, examples + 1) for x in more))]

    if place_matters(model, losses, examples + 1, examples, TOLERANCE):
        raise UnsupportedLayer(PLACE_MATTERS)


@torch.no_grad()
def _check_unmoved(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    examples: int,
    changing: Iterable[int],
) -> bool:
    """Change one example after the other, under the same dice; whether any were thrown."""
    state = random_state()
    before = loss_fn(model, *inputs)
    later = random_state()
    for i in changing:
        changed = [_with_example_changed(x, i, examples) for x in inputs]
        set_random_state(state)
        after = loss_fn(model, *changed)
        others = torch.arange(examples, device=before.device) != i
        moved = (before - after)[others].abs()
        if bool((moved > 1e-5 * before.abs().clamp(min=1e-3)[others]).any()):
            raise UnsupportedLayer(
                f"{type(model).__name__} mixes the examples of a batch: changing one of them "
                "changed the loss of another, so no per-example gradient exists. Look for "
                "normalisation over the batch, or attention across it, and replace that layer."
            )
    set_random_state(later)
    return not same_state(state, later)


def _check_bound(
    clipper: GradientClipper,
    loss_fn: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    examples: int,
) -> None:
    """What one example adds, with all others masked, must be within the bound."""
    small = replace(clipper.clipping, max_norm=1e-3)
    trial = replace(clipper, clipping=small, layouts={})
    for i in range(examples):
        alone = torch.arange(examples, device=clipper.seed.device) == i
        norm = _length(trial.clip(loss_fn, inputs, examples, alone))
        if not norm <= 1e-3 * (1 + SLACK):
            raise UnsupportedLayer(
                f"one example added a gradient of norm {norm:.3g} where 0.001 is the bound. Use "
                "another mode, or clip all layers together."
            )


def _check_company(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    rows: Sequence[dict[str, Tensor]],
) -> bool:
    """The gradient of an example must be the same beside one other, whatever that is.

    The other is far above all there are, and then far below: a mean over both changes its sign.
    False if the model draws random numbers, so that nothing can be compared.
    """
    before = random_state()
    for i, row in enumerate(rows):
        for far, place in ((5.0, 0), (-5.0, 1)):
            pair = _beside_another(inputs, i, len(rows), far, place)
            set_random_state(before)
            found = one_at_a_time(model, loss_fn, pair, [place])[0]
            if not same_state(before, random_state()):
                set_random_state(before)
                return False
            floor = EXACT * sum(float(g.square().sum()) for g in row.values()) ** 0.5
            for name, gradient in row.items():
                apart = float((found[name] - gradient).norm())
                if apart > EXACT * max(float(gradient.norm()), floor, 1e-30):
                    raise UnsupportedLayer(
                        f'the gradient of an example for "{name}" depends on the other examples, '
                        "on how many they are, or on its place among them, though its loss does "
                        "not. Look for a straight-through estimator or a gradient hook that uses "
                        "the whole batch, or its length."
                    )
    set_random_state(before)
    return True


def _beside_another(
    inputs: Sequence[Tensor], example: int, examples: int, far: float, place: int
) -> list[Tensor]:
    """The inputs of two examples: this one at `place`, and one that is `far` from all there are."""
    one = torch.tensor([example])
    found = []
    for x in inputs:
        pair = [examples_at(x, one, examples)]
        other = _with_example_changed(x, example, examples, far)
        pair.insert(1 - place, examples_at(other, one, examples))
        found.append(torch.cat(pair))
    return found


def _check_equality(
    clipper: GradientClipper,
    inputs: Sequence[Tensor],
    loss_fn: Callable[..., Tensor],
    examples: int,
) -> list[dict[str, Tensor]]:
    """Norms and clipped sum must be those of autograd; hands back the gradients that it found."""
    state = random_state()
    rows = one_at_a_time(clipper.model, loss_fn, inputs)
    squares = [sum(g.double().square().sum() for g in row.values()) for row in rows]
    norms = torch.stack([torch.as_tensor(s) for s in squares]).sqrt().to(torch.float32)
    finite = norms[norms.isfinite()]
    bound = float(finite.median()) if len(finite) else 1.0
    trial = replace(
        clipper,
        clipping=replace(clipper.clipping, max_norm=max(bound, 1e-12), per_layer=False),
        layouts={},
    )
    set_random_state(state)  # what chance there is left is the same for both
    clipped = trial.clip(loss_fn, inputs, examples)
    found = _difference(rows, norms, clipped)
    if found is None:
        return rows
    where, error = found
    if _reaches_others(trial.model, loss_fn, inputs, examples, where):
        raise UnsupportedLayer(
            f"{type(trial.model).__name__} mixes the examples of a batch: the loss of one depends "
            f'on what the layer of "{where}" says of another, so no per-example gradient exists. '
            "Look for attention across the batch, where an axis of examples is taken for one of "
            "positions."
        )
    raise UnsupportedLayer(
        f"the per-example gradients found for this model are not those of autograd (worst at "
        f'"{where}", relative error {error:.1e}). Freeze that parameter, or write a rule for the '
        "operation that uses it with @layer_rule; where there is one, it is wrong."
    )


def _reaches_others(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    examples: int,
    name: str,
) -> bool:
    """Whether the first loss depends on rows of other examples in what this parameter's layer says.

    No rule has a part in this. Rows that happen to be equal hide it from the losses themselves.
    """
    said: list[Tensor] = []
    layer = model.get_submodule(name.rpartition(".")[0])
    hook = layer.register_forward_hook(lambda *given: said.append(given[-1]))
    try:
        losses = loss_fn(model, *inputs)
    finally:
        hook.remove()
    rows = [t for t in said if isinstance(t, Tensor) and t.requires_grad and t.ndim > 1]
    rows = [t for t in rows if len(t) and len(t) % examples == 0]
    found = torch.autograd.grad(losses[0], rows, allow_unused=True) if rows else []
    return any(g is not None and bool(g.reshape(examples, -1)[1:].count_nonzero()) for g in found)


def _difference(
    rows: list[dict[str, Tensor]], norms: Tensor, clipped: Clipped
) -> tuple[str, float] | None:
    """The parameter whose sum is furthest from autograd's, and how far; None if all are right."""
    (factors,) = clipped.factors
    scale = max(float(norms.max()), 1e-12)
    worst, where = 0.0, ""
    for name in rows[0]:
        wanted = sum(f * row[name] for f, row in zip(factors, rows, strict=True))
        assert isinstance(wanted, Tensor)
        found = clipped.total.get(name, torch.zeros_like(wanted))
        # Gradients that vanish by symmetry are noise in both: compare on the scale of the whole.
        floor = 1e-3 * float(factors.max()) * scale
        error = float((found - wanted).norm()) / max(float(wanted.norm()), floor, 1e-30)
        if not error <= worst:
            worst, where = error, name
    wrong_norm = bool(((clipped.norms - norms).abs() > TOLERANCE * norms.clamp(min=1e-12)).any())
    return (where, worst) if wrong_norm or worst > TOLERANCE else None


def _with_example_changed(x: Tensor, example: int, examples: int, far: float = 0.0) -> Tensor:
    """The inputs with one example replaced: by noise, or, for labels, by another's.

    `far`: by how many standard deviations the noise is moved.
    """
    changed = x.clone()
    rows = changed.unflatten(0, (examples, -1))
    if x.is_floating_point():
        rows[example] = torch.randn_like(rows[example]) * x.std().clamp(min=0.1)
        rows[example] += x.mean() + far * x.std().clamp(min=0.1)
    else:
        rows[example] = rows[(example + 1) % examples].clone()
    return changed
