"""The first half of an inversion: a generator that draws what the target would take for a class.

A conditional GAN learns from public images under the labels that the target gave them
(`top_n_selection`), and its generator also from the target itself: A fake of class y, seen in a
random view, should be named y (Yuan et al. 2023). Baselines are the same loop with less in it:
GMI-like has no labels and no target here, KED-MI-like has a discriminator that repeats the target's
soft answers.

Written for speed: images stay on the device, the generator draws the fakes of all discriminator
steps at once and without gradients, target and discriminator are frozen where only the generator
learns, nothing waits for a number to be read, and a GPU replays a captured iteration.
"""

import copy
import time
from collections.abc import Callable
from math import isfinite
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from sfumato.attacks.gan_losses import (
    feature_matching,
    hinge_discriminator,
    hinge_generator,
    real_or_fake,
    soft_cross_entropy,
)
from sfumato.attacks.gan_state import Gan, GanTask
from sfumato.attacks.inversion_loss import margins
from sfumato.attacks.random_views import random_view
from sfumato.errors import SfumatoError
from sfumato.models.spectral import update_spectral_norms
from sfumato.runs import Run
from sfumato.training.cuda_graph import Replay
from sfumato.training.progress import progress, stale


def train_gan(
    gan: Gan,
    task: GanTask,
    run: Run,
    *,
    seed: int,
    say: Callable[[str], None] = lambda _: None,
    compiled: bool = False,
) -> nn.Module:
    """Train until the target is as convinced as it will be; the generator at its best.

    The stopping rule looks at no private image: at each look the target is asked about fakes of
    random codes, and the generator with the largest median margin is kept. A look at numbers that
    are not finite goes back to the last good one, with other luck; three times in a row is an
    error. A run that was cut goes on.
    """
    state = run.load_checkpoint()
    if state is not None:
        gan.load(state)
    settings, falls = task.settings, 0
    good = copy.deepcopy(gan.state())
    if compiled:
        gan.generator.compile()
        gan.discriminator.compile()
    turn, since = train_iteration(gan, task), time.monotonic()
    tell = progress(
        settings.iterations, gan.step, None, run.say, unit="images", counted="iteration"
    )
    # Asked before each step: a run that was cut after its last look has nothing left to do.
    while gan.step < settings.iterations and not stale(gan.looks, settings.patience):
        turn(seed, gan.step, gan.luck)
        gan.step += 1
        if gan.step % settings.look_every and gan.step < settings.iterations:
            tell(gan.step, {"batch": settings.gan_batch})
            continue
        convinced = evaluate_gan(gan, task, seed)
        if convinced is None:
            falls += 1
            if falls == 3:
                raise SfumatoError(
                    "the GAN diverged three times in a row. Lower --gan-lr or --alpha."
                )
            say(f"the GAN diverged before iteration {gan.step}; back to {good['step']}")
            gan.load(copy.deepcopy(good))
            turn = train_iteration(gan, task)
            gan.luck += falls
            continue
        falls = 0
        _record(gan, convinced)
        good = copy.deepcopy(gan.state())
        run.save_checkpoint(good)
        left = (time.monotonic() - since) / settings.look_every * (settings.iterations - gan.step)
        since = time.monotonic()
        say(
            f"iteration {gan.step}/{settings.iterations}  margin of fakes {convinced:.2f}  at most "
            f"{left:.0f} s left"
        )
    gan.generator.load_state_dict(gan.best)
    return gan.generator.eval().requires_grad_(False)


def _record(gan: Gan, convinced: float) -> None:
    """Note how convinced the target is, and keep the generator if it never was more so."""
    if not gan.looks or convinced > max(gan.looks):
        source = gan.generator if gan.average is None else gan.average.module
        gan.best = {k: v.detach().clone() for k, v in source.state_dict().items()}
    gan.looks.append(convinced)


def train_iteration(gan: Gan, task: GanTask) -> Callable[..., None]:
    """One iteration, as a function of a seed."""
    turn = Replay(lambda generator: run_iteration(gan, task, generator), task.access.device)

    def whole(*seed: int) -> None:
        turn(*seed)
        if gan.average is not None:
            gan.average.update_parameters(gan.generator)

    return whole


def run_iteration(gan: Gan, task: GanTask, generator: torch.Generator) -> None:
    """Steps of the discriminator on one draw of fakes, then one of the generator."""
    settings = task.settings
    batch, steps = settings.gan_batch, settings.d_steps
    z, y = draw_codes(task, batch * (steps + 1), generator)
    with torch.no_grad(), task.lower():
        fakes = gan.generator(z[batch:], y[batch:]).float()
    gan.discriminator.requires_grad_(True)
    for fake, label in zip(fakes.split(batch), y[batch:].split(batch), strict=True):
        gan.optimizers[1].zero_grad(set_to_none=True)
        discriminator_loss(gan, task, fake, label, generator).backward()
        gan.optimizers[1].step()
        update_spectral_norms(gan.discriminator)
    gan.discriminator.requires_grad_(False)
    gan.optimizers[0].zero_grad(set_to_none=True)
    generator_loss(gan, task, z[:batch], y[:batch], generator).backward()
    gan.optimizers[0].step()


def draw_codes(
    task: GanTask, count: int, generator: torch.Generator
) -> tuple[Float[Tensor, "count z"], Int[Tensor, " count"]]:
    """Codes, and classes drawn evenly."""
    device, classes = task.access.device, len(task.access.classes)
    z = torch.randn(count, task.settings.latent, generator=generator, device=device)
    return z, torch.randint(classes, (count,), generator=generator, device=device)


def discriminator_loss(
    gan: Gan, task: GanTask, fake: Tensor, label: Tensor, generator: torch.Generator
) -> Float[Tensor, ""]:
    """Tell public images from fakes: each under its label, or none, or by the target's answers."""
    real, real_label = task.real(len(fake), generator)
    with task.lower():
        if task.method != "ked":
            labels = torch.cat([real_label, label]) if task.method == "plg" else None
            both = gan.discriminator(torch.cat([real, fake]), labels).float()
            return hinge_discriminator(*both.split(len(fake)))
        found = gan.discriminator(torch.cat([real, fake])).float()
    on_real, on_fake = found.split(len(fake))
    with torch.no_grad():
        answers = task.access.logits(real).softmax(dim=1)
    return soft_cross_entropy(on_real, answers) + 0.5 * real_or_fake(on_real, on_fake)


def generator_loss(
    gan: Gan, task: GanTask, z: Tensor, y: Tensor, generator: torch.Generator
) -> Float[Tensor, ""]:
    """Pass for public images of the class, and be named so by the target."""
    critic: Any = gan.discriminator
    with task.lower():
        fake = gan.generator(z, y).float()
        if task.method == "ked":
            real, _ = task.real(len(fake), generator)
            pair = critic.features(real).detach(), critic.features(fake)
            answers = critic(fake).float()
            entropy = soft_cross_entropy(answers, answers.softmax(dim=1))
            return feature_matching(*pair) + 1e-4 * entropy
        labels = y if task.method == "plg" else None
        loss = hinge_generator(critic(fake, labels).float())
    if task.method == "gmi":
        return loss
    answers = task.access.logits(random_view(task.views, fake, generator))
    return loss + task.settings.alpha * task.inversion_loss(answers, y)


@torch.no_grad()
def evaluate_gan(gan: Gan, task: GanTask, seed: int, count: int = 256) -> float | None:
    """The median margin that the target gives fakes of random codes; None if all is lost."""
    generator = torch.Generator(task.access.device).manual_seed(seed)
    net = gan.generator if gan.average is None else gan.average.module
    z, y = draw_codes(task, count, generator)
    net.eval()
    with task.lower():
        fakes = net(z, y).float()
    net.train()
    logits = task.access.logits(fakes) / task.inversion_loss.scale
    wanted = y if task.method == "plg" else logits.argmax(dim=1)
    found = float(margins(logits, wanted).median())
    weights = [p for net in (gan.generator, gan.discriminator) for p in net.parameters()]
    finite = all(bool(p.isfinite().all()) for p in weights)
    return found if finite and isfinite(found) else None
