"""What public images add to a private step: a gradient that costs nothing.

In every step the mean gradient p of a batch of public images is found at the weights of that step.
Weights have their noise already and public images need none, so p may be used anywhere:

    DOPE-SGD (Nasr et al. 2023)    per-example gradients less p are clipped; p is added afterwards
    Mirror-GD (Amid et al. 2022)   the noisy mean is mixed with a little of p
    weight multiplicity            view k of an example is taken at weights moved along p_k

None of them touches what is sampled, how far an example can move the sum, the noise, or the ledger:
they change the losses that are clipped (`Inputs.wrap_loss`), and what becomes of the noisy mean.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sfumato.data.example_rng import seed_of
from sfumato.privacy.sampling import Batch, Chunk
from sfumato.training.hooks import StepHook
from sfumato.training.inputs import Inputs, Losses
from sfumato.training.process_group import ProcessGroup
from sfumato.training.sharpness import of_length, trainable_parameters


@dataclass(frozen=True)
class PublicGradient:
    """The mean gradient of public images, at the weights that the model has now."""

    model: nn.Module
    inputs: Inputs
    """How the model reads them: images, one by one, in one view each."""
    batch_size: int = 64
    seed: int = 0
    processes: ProcessGroup = field(default_factory=ProcessGroup)

    def __post_init__(self) -> None:
        self.inputs.images.require_public("a public gradient")

    def __call__(self, step: int, turn: int = 0) -> dict[str, Tensor]:
        """By name, zero where nothing was reached.

        Which images, views and dropout make it up depends on the seed, the step and the turn. All
        processes are given the leader's.
        """
        rng = seed_of(self.seed, step, turn)
        size = len(self.inputs)
        order = torch.randperm(size, generator=torch.Generator().manual_seed(rng))
        chosen = order[: self.batch_size]
        chunk = Chunk(chosen, torch.ones(len(chosen), dtype=torch.bool))
        inputs = self.inputs.tensors(chunk, step)
        torch.manual_seed(rng)
        loss = self.inputs.losses(self.model, *inputs).mean()
        named = trainable_parameters(self.model)
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        pairs = zip(named.items(), found, strict=True)
        gradient = {n: torch.zeros_like(p) if g is None else g for (n, p), g in pairs}
        self.processes.broadcast(gradient)
        return gradient


class PublicExtender(StepHook):
    """Finds a public gradient before a private step, and uses it on what the step has left."""

    def __init__(self, public: PublicGradient) -> None:
        self.public = public

    def begin(self, step: int) -> None:
        """Get ready for the step, at the weights that it is taken at."""

    def finish(self, step: int, gradient: Mapping[str, Tensor]) -> None:
        """Change the noisy mean, in place, to what the optimizer is given."""

    @contextmanager
    def around(self, batch: Batch) -> Iterator[None]:
        """Public images before, the noisy mean after; a step that left nothing is left alone."""
        self.begin(batch.step)
        yield
        named = trainable_parameters(self.public.model)
        gradient = {name: p.grad for name, p in named.items() if p.grad is not None}
        if gradient:
            self.finish(batch.step, gradient)


class Dope(PublicExtender):
    """DOPE-SGD: g_i - p is clipped, summed and noised, and p is added to the mean.

    An example whose gradient is near the public one is hardly clipped, so a small norm bound, and
    with it little noise, loses less. The shift is part of the loss, l_i(w) - <w, p>, so that mask,
    norm, factor and sum are all those of g_i - p, and what is measured is what is added up.
    """

    def __init__(self, public: PublicGradient) -> None:
        super().__init__(public)
        self.shift = {n: torch.zeros_like(p) for n, p in trainable_parameters(public.model).items()}

    def begin(self, step: int) -> None:
        """Look at public images; in place, for a compiled step knows the tensors."""
        for name, part in self.public(step).items():
            self.shift[name].copy_(part)

    def wrap_loss(self, losses: Losses) -> Losses:
        """Every loss less <w, p>, whose value is taken out again: losses stay what they are."""

        def shifted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            named = dict(model.named_parameters())
            products = [
                ((named[name] - named[name].detach()) * part.to(named[name].dtype)).sum()
                for name, part in self.shift.items()
            ]
            return losses(model, x, y) - torch.stack(products).sum()

        return shifted

    def finish(self, step: int, gradient: Mapping[str, Tensor]) -> None:
        """Give back what was taken from each, once."""
        for name, part in gradient.items():
            part += self.shift[name]


class Mirror(PublicExtender):
    """Mirror-GD: beta times the noisy mean and 1 - beta times the public gradient.

    beta is cos(pi / 20 * step / steps), as published: from 1 down to 0.988.
    """

    def __init__(self, public: PublicGradient, steps: int) -> None:
        super().__init__(public)
        self.steps = steps
        self.gradient: dict[str, Tensor] = {}

    def begin(self, step: int) -> None:
        """Look at public images, where the private ones are looked at."""
        self.gradient = self.public(step)

    def finish(self, step: int, gradient: Mapping[str, Tensor]) -> None:
        """Mix."""
        beta = math.cos(math.pi / 20 * step / self.steps)
        for name, part in gradient.items():
            part.mul_(beta).add_(self.gradient[name], alpha=1 - beta)


class WeightMultiplicity(PublicExtender):
    """View k of each example is taken at w + rho p_k / |p_k|, p_k that of a fresh public batch.

    The views of an example still make one loss, so its gradient is averaged and clipped as one.
    """

    def __init__(self, public: PublicGradient, views: int, rho: float) -> None:
        super().__init__(public)
        self.rho = rho
        named = trainable_parameters(public.model)
        self.moves = [{n: torch.zeros_like(p) for n, p in named.items()} for _ in range(views)]

    def begin(self, step: int) -> None:
        """Look at as many public batches as there are views."""
        for turn, move in enumerate(self.moves):
            for name, part in of_length(self.rho, self.public(step, turn)).items():
                move[name].copy_(part)

    def wrap_loss(self, losses: Losses) -> Losses:
        """The same losses, of a network that has other weights for each view."""
        return lambda model, x, y: losses(self.scattered(model), x, y)

    def scattered(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        """The network whose rows k, k + views, k + 2 views, ... go through w + v_k."""
        named = dict(model.named_parameters())

        def network(x: Tensor) -> Tensor:
            rows = x.unflatten(0, (-1, len(self.moves)))
            answers = []
            for turn, move in enumerate(self.moves):
                weights = {n: named[n] + part.to(named[n].dtype) for n, part in move.items()}
                answers.append(functional_call(model, weights, (rows[:, turn],)))
            return torch.stack(answers, dim=1).flatten(0, 1)

        return network
