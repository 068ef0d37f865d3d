"""What a generator of `sfumato invert` is made of: settings, networks, and what they learn from."""

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from sfumato.attacks.access import TargetAccess
from sfumato.attacks.inversion_loss import InversionLoss
from sfumato.models.ema import new_average
from sfumato.models.gan import Discriminator, Generator
from sfumato.settings.invert import GanSettings, Method, Views
from sfumato.training.fit import load_optimizer
from sfumato.training.setup import move_to_device


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
            load_optimizer(optimizer, state[f"optimizer{i}"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self.step, self.looks, self.luck = state["step"], list(state["looks"]), state["luck"]
        self.best = dict(state["best"])


def new_gan(method: Method, access: TargetAccess, settings: GanSettings, seed: int) -> Gan:
    """Networks at their start."""
    torch.manual_seed(seed)
    channels, size, _ = access.shape
    classes = len(access.classes)
    sizes = {"channels": channels, "size": size, "width": settings.gan_width}
    generator = Generator(classes if method == "plg" else None, latent=settings.latent, **sizes)
    heads: dict[str, Any] = {"plg": "projection", "gmi": "plain", "ked": "classes"}
    critic = Discriminator(classes, head=heads[method], **sizes)
    gpu = access.device.type == "cuda"
    nets = move_to_device(generator, access.device), move_to_device(critic, access.device)
    adams = [
        torch.optim.Adam(
            net.parameters(), lr=settings.gan_lr, betas=(0.0, 0.9), fused=gpu, capturable=gpu
        )
        for net in nets
    ]
    return Gan(nets[0], nets[1], (adams[0], adams[1]), new_average(nets[0], settings.gan_ema))


@dataclass(frozen=True)
class GanTask:
    """What a GAN learns from: public images with pseudo labels, and the target's answers."""

    pixels: Tensor
    labels: Int[Tensor, " n"]
    access: TargetAccess
    inversion_loss: InversionLoss
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
