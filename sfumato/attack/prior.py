"""The first half of an inversion: a generator that draws what the target would take for a class.

A conditional GAN learns from public images under the labels that the target gave them (`select`),
and its generator also from the target itself: A fake of class y, seen in a random view, should be
named y (Yuan et al. 2023). Baselines are the same loop with less in it: GMI-like has no labels and
no target here, KED-MI-like has a discriminator that repeats the target's soft answers.

Written for speed: images stay on the device, the generator draws the fakes of all discriminator
steps at once and without gradients, target and discriminator are frozen where only the generator
learns, nothing waits for a number to be read, and a GPU replays a recorded iteration.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from sfumato.attack.access import Access
from sfumato.attack.adversarial import (
    feature_matching,
    hinge_discriminator,
    hinge_generator,
    real_or_fake,
    soft_cross_entropy,
)
from sfumato.attack.inversion import Wish, margins
from sfumato.attack.views import Views
from sfumato.errors import ConfigError, SfumatoError
from sfumato.nn.average import new_average
from sfumato.nn.gan import Discriminator, Generator
from sfumato.nn.spectral import tighten
from sfumato.runs import Run
from sfumato.train.replay import Replay

Method = Literal["plg", "gmi", "ked", "pixels"]


@dataclass(frozen=True, kw_only=True)
class GanSettings:
    """How the generator is trained."""

    iterations: int = 10_000
    """Steps of the generator, at most."""
    gan_batch: int = 64
    """Images in a step."""
    d_steps: int = 5
    """Steps of the discriminator for each of the generator."""
    alpha: float = 0.2
    """Weight of the inversion loss beside the adversarial one."""
    gan_lr: float = 2e-4
    """Learning rate of both (Adam, betas 0 and 0.9)."""
    gan_width: int = 64
    """Width of both networks."""
    latent: int = 128
    """Length of a code."""
    gan_ema: float = 0.0
    """Decay of the average of the generator's weights; 0 for none."""
    look_every: int = 250
    """Iterations between looks at how convinced the target is."""
    patience: int = 8
    """Looks without a better one after which training stops; 0 for never."""

    def __post_init__(self) -> None:
        for name in ("iterations", "gan_batch", "d_steps", "gan_width", "latent", "look_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1.")
        if not 0 < self.gan_lr < inf or not 0 <= self.alpha < inf:
            raise ConfigError(
                f"gan_lr={self.gan_lr:g} must be above 0, alpha={self.alpha:g} 0 or more; finite."
            )
        if self.patience < 0:
            raise ConfigError(f"patience={self.patience} must be 0 (never stop) or more.")
        if not 0 <= self.gan_ema < 1:
            raise ConfigError(f"gan_ema={self.gan_ema:g} must be 0 (none) or more, and below 1.")


@dataclass
class Gan:
    """Two networks and their optimizers: what a checkpoint holds."""

    generator: nn.Module
    discriminator: nn.Module
    optimizers: tuple[torch.optim.Adam, torch.optim.Adam]
    average: Any = None
    step: int = 0
    looks: list[float] = field(default_factory=list)
    """How convinced the target was at each look; the best generator so far is `best`."""
    best: dict[str, Tensor] = field(default_factory=dict)
    luck: int = 0
    """How often training has gone back: it goes on with other draws."""

    def stale(self, patience: int) -> bool:
        """Whether so many looks have brought nothing better; with 0 never."""
        since = len(self.looks) - 1 - self.looks.index(max(self.looks)) if self.looks else 0
        return 0 < patience <= since

    def state(self) -> dict[str, Any]:
        """Everything that a later `load` needs."""
        pieces = {"generator": self.generator, "discriminator": self.discriminator}
        found: dict[str, Any] = {name: piece.state_dict() for name, piece in pieces.items()}
        found |= {f"optimizer{i}": o.state_dict() for i, o in enumerate(self.optimizers)}
        if self.average is not None:
            found["average"] = self.average.state_dict()
        found |= {"step": self.step, "looks": list(self.looks), "luck": self.luck}
        return {**found, "best": dict(self.best)}

    def load(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        self.generator.load_state_dict(state["generator"])
        self.discriminator.load_state_dict(state["discriminator"])
        for i, optimizer in enumerate(self.optimizers):
            optimizer.load_state_dict(state[f"optimizer{i}"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self.step, self.looks, self.luck = state["step"], list(state["looks"]), state["luck"]
        self.best = dict(state["best"])


def new_gan(method: Method, access: Access, settings: GanSettings, seed: int) -> Gan:
    """Networks at their start."""
    torch.manual_seed(seed)
    channels, size, _ = access.shape
    classes = len(access.classes)
    sizes = {"channels": channels, "size": size, "width": settings.gan_width}
    generator = Generator(classes if method == "plg" else None, latent=settings.latent, **sizes)
    heads: dict[str, Any] = {"plg": "projection", "gmi": "plain", "ked": "classes"}
    critic = Discriminator(classes, head=heads[method], **sizes)
    gpu = access.device.type == "cuda"
    layout = torch.channels_last if gpu else torch.preserve_format
    nets = [net.to(access.device).to(memory_format=layout) for net in (generator, critic)]  # pyright: ignore
    adams = [
        torch.optim.Adam(
            net.parameters(), lr=settings.gan_lr, betas=(0.0, 0.9), fused=gpu, capturable=gpu
        )
        for net in nets
    ]
    return Gan(nets[0], nets[1], (adams[0], adams[1]), new_average(nets[0], settings.gan_ema))


@dataclass(frozen=True)
class Lesson:
    """What a GAN learns from: public images with pseudo labels, and the target's answers."""

    pixels: Tensor
    labels: Int[Tensor, " n"]
    access: Access
    wish: Wish
    views: Views
    method: Method
    settings: GanSettings
    precision: torch.dtype

    def lower(self) -> torch.autocast:
        """Where networks run in a lower precision."""
        low = self.precision != torch.float32
        return torch.autocast(self.access.device.type, self.precision, enabled=low)

    def real(
        self, count: int, generator: torch.Generator
    ) -> tuple[Float[Tensor, "count c h w"], Int[Tensor, " count"]]:
        """Public images between 0 and 1, with the noise that bytes have lost, and labels."""
        device = self.pixels.device
        where = torch.randint(len(self.pixels), (count,), generator=generator, device=device)
        x = self.pixels[where].float()
        noise = torch.rand(x.shape, generator=generator, device=device)
        return (x + noise) / 256, self.labels[where]


def train_gan(
    gan: Gan, lesson: Lesson, run: Run, *, seed: int, say: Callable[[str], None] = lambda _: None,
    compiled: bool = False,
) -> nn.Module:  # fmt: skip
    """Train until the target is as convinced as it will be; the generator at its best.

    The stopping rule looks at no private image: at each look the target is asked about fakes of
    random codes, and the generator with the largest median margin is kept. A look at numbers that
    are not finite goes back to the last good one, with other luck; three times in a row is an
    error. A run that was cut goes on.
    """
    state = run.load_checkpoint()
    if state is not None:
        gan.load(state)
    settings, falls = lesson.settings, 0
    good = copy.deepcopy(gan.state())
    if compiled:
        gan.generator.compile()
        gan.discriminator.compile()
    turn, since = iteration(gan, lesson), time.monotonic()
    # Asked before each step: a run that was cut after its last look has nothing left to do.
    while gan.step < settings.iterations and not gan.stale(settings.patience):
        turn(seed, gan.step, gan.luck)
        gan.step += 1
        if gan.step % settings.look_every and gan.step < settings.iterations:
            continue
        convinced = look(gan, lesson, seed)
        if convinced is None:
            falls += 1
            if falls == 3:
                raise SfumatoError(
                    "the GAN diverged three times in a row. Lower --gan-lr or --alpha."
                )
            say(f"the GAN diverged before iteration {gan.step}; back to {good['step']}")
            gan.load(copy.deepcopy(good))
            turn = iteration(gan, lesson)
            gan.luck += falls
            continue
        falls = 0
        if not gan.looks or convinced > max(gan.looks):
            source = gan.generator if gan.average is None else gan.average.module
            gan.best = {k: v.detach().clone() for k, v in source.state_dict().items()}
        gan.looks.append(convinced)
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


def iteration(gan: Gan, lesson: Lesson) -> Callable[..., None]:
    """One iteration, as a function of a seed."""
    turn = Replay(lambda generator: iterate(gan, lesson, generator), lesson.access.device)

    def whole(*seed: int) -> None:
        turn(*seed)
        if gan.average is not None:
            gan.average.update_parameters(gan.generator)

    return whole


def iterate(gan: Gan, lesson: Lesson, generator: torch.Generator) -> None:
    """Steps of the discriminator on one draw of fakes, then one of the generator."""
    settings = lesson.settings
    batch, steps = settings.gan_batch, settings.d_steps
    z, y = codes(lesson, batch * (steps + 1), generator)
    with torch.no_grad(), lesson.lower():
        fakes = gan.generator(z[batch:], y[batch:]).float()
    gan.discriminator.requires_grad_(True)
    for fake, label in zip(fakes.split(batch), y[batch:].split(batch), strict=True):
        gan.optimizers[1].zero_grad(set_to_none=True)
        discriminator_loss(gan, lesson, fake, label, generator).backward()
        gan.optimizers[1].step()
        tighten(gan.discriminator)
    gan.discriminator.requires_grad_(False)
    gan.optimizers[0].zero_grad(set_to_none=True)
    generator_loss(gan, lesson, z[:batch], y[:batch], generator).backward()
    gan.optimizers[0].step()


def codes(
    lesson: Lesson, count: int, generator: torch.Generator
) -> tuple[Float[Tensor, "count z"], Int[Tensor, " count"]]:
    """Codes, and classes drawn evenly."""
    device, classes = lesson.access.device, len(lesson.access.classes)
    z = torch.randn(count, lesson.settings.latent, generator=generator, device=device)
    return z, torch.randint(classes, (count,), generator=generator, device=device)


def discriminator_loss(
    gan: Gan, lesson: Lesson, fake: Tensor, label: Tensor, generator: torch.Generator
) -> Float[Tensor, ""]:
    """Tell public images from fakes: each under its label, or none, or by the target's answers."""
    real, real_label = lesson.real(len(fake), generator)
    with lesson.lower():
        if lesson.method != "ked":
            labels = torch.cat([real_label, label]) if lesson.method == "plg" else None
            both = gan.discriminator(torch.cat([real, fake]), labels).float()
            return hinge_discriminator(*both.split(len(fake)))
        found = gan.discriminator(torch.cat([real, fake])).float()
    on_real, on_fake = found.split(len(fake))
    with torch.no_grad():
        answers = lesson.access.logits(real).softmax(dim=1)
    return soft_cross_entropy(on_real, answers) + 0.5 * real_or_fake(on_real, on_fake)


def generator_loss(
    gan: Gan, lesson: Lesson, z: Tensor, y: Tensor, generator: torch.Generator
) -> Float[Tensor, ""]:
    """Pass for public images of the class, and be named so by the target."""
    critic: Any = gan.discriminator
    with lesson.lower():
        fake = gan.generator(z, y).float()
        if lesson.method == "ked":
            real, _ = lesson.real(len(fake), generator)
            pair = critic.features(real).detach(), critic.features(fake)
            answers = critic(fake).float()
            entropy = soft_cross_entropy(answers, answers.softmax(dim=1))
            return feature_matching(*pair) + 1e-4 * entropy
        labels = y if lesson.method == "plg" else None
        loss = hinge_generator(critic(fake, labels).float())
    if lesson.method == "gmi":
        return loss
    answers = lesson.access.logits(lesson.views(fake, generator))
    return loss + lesson.settings.alpha * lesson.wish(answers, y)


@torch.no_grad()
def look(gan: Gan, lesson: Lesson, seed: int, count: int = 256) -> float | None:
    """The median margin that the target gives fakes of random codes; None if all is lost."""
    generator = torch.Generator(lesson.access.device).manual_seed(seed)
    net = gan.generator if gan.average is None else gan.average.module
    z, y = codes(lesson, count, generator)
    net.eval()
    with lesson.lower():
        fakes = net(z, y).float()
    net.train()
    logits = lesson.access.logits(fakes) / lesson.wish.scale
    wanted = y if lesson.method == "plg" else logits.argmax(dim=1)
    found = float(margins(logits, wanted).median())
    weights = [p for net in (gan.generator, gan.discriminator) for p in net.parameters()]
    finite = all(bool(p.isfinite().all()) for p in weights)
    return found if finite and isfinite(found) else None
