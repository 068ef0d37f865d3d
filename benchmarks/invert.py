"""The generator of `sfumato invert`, an iteration, against the published loop, in one run.

    python benchmarks/invert.py --device cuda [--compile]      64 x 64, VGG16-sized target
    python benchmarks/invert.py --device cuda --size 32 --model mcnn --classes 5 --channels 1 \\
        --width 32

The reference is the published loop as its description says: images are cropped and resized one by
one on the CPU; one step of the generator, then five of the discriminator, each with fakes of
its own that gradients flow through although they are not used; the target is asked about every
fake, and gathers gradients that nobody wants; numbers are read at every step; float32; maps are
interpolated and pooled beside the convolutions. Widths, depths and losses are the same in both.
Loops take turns; medians.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations
from torchvision.transforms.v2.functional import pil_to_tensor

from sfumato.attacks.access import TargetAccess
from sfumato.attacks.gan_losses import hinge_discriminator, hinge_generator
from sfumato.attacks.gan_state import Gan, GanSettings, GanTask, new_gan
from sfumato.attacks.gan_training import train_iteration
from sfumato.attacks.inversion_loss import InversionLoss
from sfumato.attacks.random_views import Views
from sfumato.models.resize import ResizingConv2d
from sfumato.models.zoo import build_model

ROUNDS, EACH = 5, 10
"""Rounds, and iterations of each loop in a round."""


def make_access(words: argparse.Namespace, device: torch.device, *, frozen: bool) -> TargetAccess:
    """A target with random weights: its answers do not matter to the time."""
    torch.manual_seed(0)
    shape = (words.channels, words.size, words.size)
    model = build_model(words.model, classes=words.classes, shape=shape).to(device).eval()
    model.requires_grad_(not frozen)
    low = frozen and device.type == "cuda"

    def ask(pixels: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=low):
            return model(pixels).float()

    return TargetAccess(ask, tuple(str(k) for k in range(words.classes)), shape, device)


class Resizing(nn.Module):
    """A convolution that interpolates before, or pools after, as it was published."""

    def __init__(self, ours: ResizingConv2d) -> None:
        super().__init__()
        self.conv = nn.Conv2d(
            ours.in_channels, ours.out_channels, *ours.kernel_size[:1], padding="same"
        )
        self.resize = ours.resize

    def forward(self, x: Tensor) -> Tensor:
        """Maps of half, twice, or the same size."""
        if self.resize == "double":
            x = F.interpolate(x, scale_factor=2, mode="bilinear")
        x = self.conv(x)
        return F.avg_pool2d(x, 2) if self.resize == "halve" else x


def as_published(network: nn.Module) -> None:
    """Put layers as they were published in the place of ours."""
    for name, layer in list(network.named_children()):
        normed = is_parametrized(layer)
        if isinstance(layer, ResizingConv2d):
            setattr(network, name, Resizing(layer))
            if normed:
                spectral_norm(getattr(network, name).conv)
        elif normed:
            remove_parametrizations(layer, "weight")
            spectral_norm(layer)
        else:
            as_published(layer)


def published_loop(
    gan: Gan, access: TargetAccess, words: argparse.Namespace, pictures: list[Image.Image]
) -> Callable[[], None]:
    """One iteration of the published loop."""
    device, batch = access.device, words.batch
    for network in (gan.generator, gan.discriminator):
        as_published(network)
        network.to(device).to(memory_format=torch.contiguous_format)  # pyright: ignore
    optimizers = [
        torch.optim.Adam(network.parameters(), lr=2e-4, betas=(0.0, 0.9))
        for network in (gan.generator, gan.discriminator)
    ]
    inversion_loss, views = InversionLoss(), Views()
    generator = torch.Generator(device).manual_seed(0)

    def read() -> tuple[Tensor, Tensor]:
        where = torch.randint(len(pictures), (batch,)).tolist()
        size = (words.size, words.size)
        edge = pictures[0].width // 8
        box = (edge, edge, pictures[0].width - edge, pictures[0].height - edge)
        read = [
            pil_to_tensor(pictures[i].crop(box).resize(size, Image.Resampling.BILINEAR))
            for i in where
        ]
        x = torch.stack(read).to(device).float() / 255
        return x, torch.randint(words.classes, (batch,), device=device)

    def draw() -> tuple[Tensor, Tensor]:
        y = torch.randint(words.classes, (batch,), device=device)
        return gan.generator(torch.randn(batch, 128, device=device), y), y

    def once() -> None:
        fake, y = draw()
        inversion = inversion_loss(access.logits(views(fake, generator)), y)
        loss = hinge_generator(gan.discriminator(fake, y)) + 0.2 * inversion
        optimizers[0].zero_grad()
        loss.backward()
        optimizers[0].step()
        _ = loss.item(), inversion.item()
        for _ in range(5):
            fake, y = draw()
            (access.logits(fake).argmax(dim=1) == y).float().mean().item()
            real, label = read()
            found = hinge_discriminator(gan.discriminator(real, label), gan.discriminator(fake, y))
            optimizers[1].zero_grad()
            found.backward()
            optimizers[1].step()
            found.item()

    return once


def our_loop(gan: Gan, access: TargetAccess, words: argparse.Namespace) -> Callable[[], None]:
    """One iteration of ours."""
    settings = GanSettings(gan_batch=words.batch, gan_width=words.width)
    count = 10_000
    shape = (count, words.channels, words.size, words.size)
    pixels = torch.randint(256, shape, dtype=torch.uint8, device=access.device)
    labels = torch.randint(words.classes, (count,), device=access.device)
    precision = torch.bfloat16 if access.device.type == "cuda" else torch.float32
    task = GanTask(pixels, labels, access, InversionLoss(), Views(), "plg", settings, precision)
    place = iter(range(10**9))
    if words.compile:
        gan.generator.compile()
        gan.discriminator.compile()
    turn = train_iteration(gan, task)
    return lambda: turn(next(place))


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--channels", type=int, default=3)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--model", default="vgg16-face")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--compile", action="store_true", help="ours")
    words = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    device = torch.device(words.device)
    settings = GanSettings(gan_batch=words.batch, gan_width=words.width)
    mode = "L" if words.channels == 1 else "RGB"
    pictures = [
        Image.effect_noise((178, 178), 50 + number % 50).convert(mode) for number in range(500)
    ]
    loops: dict[str, Callable[[], None]] = {}
    for name, frozen in (("published", False), ("ours", True)):
        access = make_access(words, device, frozen=frozen)
        gan = new_gan("plg", access, settings, 0)
        if frozen:
            loops[name] = our_loop(gan, access, words)
        else:
            loops[name] = published_loop(gan, access, words, pictures)
    times: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(ROUNDS + 1):
        for name, loop in loops.items():
            before = time.perf_counter()
            for _ in range(EACH):
                loop()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn:
                times[name].append(1000 * (time.perf_counter() - before) / EACH)
    found = {name: statistics.median(values) for name, values in times.items()}
    kind = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{kind}, torch {torch.__version__}, {words.size} px, {words.model}, batch {words.batch}")
    print("| published, ms | ours, ms | ratio | 10,000 iterations, s |\n|---|---|---|---|")
    ratio = found["published"] / found["ours"]
    print(
        f"| {found['published']:.1f} | {found['ours']:.1f} | {ratio:.1f} | "
        f"{10 * found['ours']:.0f} |"
    )


if __name__ == "__main__":
    main()
