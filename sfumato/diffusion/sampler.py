"""Images from a denoiser: noise, taken down from a large sigma to none along an ordinary equation.

With D(x; sigma) the mean of all images that could have become x, dx/dsigma = (x - D) / sigma leads
from noise to images (Karras et al. 2022, eq. 1 and 3). Two solvers follow it, both of second order:
Heun's method asks the denoiser twice a step, DPM-Solver++ 2M (Lu et al. 2022) once, and remembers
the answer before.

A guide adds w g to the score, which is (D - x) / sigma^2; g is the gradient of a log density ratio
(Kim et al. 2023). It is asked once a step, where the step starts, and acts on all of the step: so
w = 1 is the whole correction. As published it is left out of Heun's second slope, which halves it:
their weight 2 is 1 here.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import log

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from sfumato.errors import ConfigError, SfumatoError
from sfumato.models.observe import in_evaluation_mode

State = Float[Tensor, "n c h w"]
Labels = Int[Tensor, " n"]
Denoise = Callable[[State, float], State]
"""The denoiser's answer to images with noise of one sigma."""
Push = Callable[[State, float], State | None]
"""What is added to the score of such images; None where nothing is."""
Guide = Callable[[State, float, Labels | None], State | None]
"""The gradient of log(p real / p made) at such images, for their labels; None where it is silent.

What it says of an image must not depend on the others of the batch."""


SIGMA_MAX = 80.0
"""So much noise that nothing is left of an image."""


def noise_schedule(
    steps: int, sigma_min: float = 0.002, sigma_max: float = SIGMA_MAX, rho: float = 7.0
) -> list[float]:
    """Sigmas for a number of steps: from `sigma_max` down to `sigma_min`, and then 0.

    Their rho-th roots are evenly spaced (Karras et al. 2022, eq. 5): steps are short where little
    noise is left. They are plain numbers, so that a step need not wait for a GPU to compare them.
    """
    if steps < 2:
        raise ConfigError(f"steps={steps} must be at least 2: a first sigma, and a last one.")
    if not 0 < sigma_min < sigma_max:
        raise ConfigError(
            f"sigma_min={sigma_min:g} must lie above 0 and below sigma_max={sigma_max:g}."
        )
    first, last = sigma_max ** (1 / rho), sigma_min ** (1 / rho)
    between = [(first + i / (steps - 1) * (last - first)) ** rho for i in range(1, steps - 1)]
    # Both ends are what was asked for, not what is left of it after a root and a power.
    return [sigma_max, *between, sigma_min, 0.0]


def heun(denoise: Denoise, x: State, sigmas: Sequence[float], push: Push | None = None) -> State:
    """Follow `x` from the first sigma to the last by the mean of the slopes at the ends of a step.

    Guarantee: of second order, so half the step leaves a quarter of the error. 2 evaluations a
    step; a step to sigma 0, where there is no slope, is Euler's and takes 1.
    """
    pushed = _Line()
    for sigma, after in pairwise(sigmas):
        step = after - sigma
        slope = (x - denoise(x, sigma)) / sigma
        extra = None if push is None else push(x, sigma)
        extra = pushed.middle(None if extra is None else -sigma * extra, step)
        ahead = x + step * (slope if extra is None else slope + extra)
        if after > 0:
            change = (ahead - denoise(ahead, after)) / after - slope
            ahead = ahead + step * change / 2
        x = ahead
    return x


def dpm_solver(
    denoise: Denoise, x: State, sigmas: Sequence[float], push: Push | None = None
) -> State:
    """Follow `x` from the first sigma to the last, with D on a line through its last two values.

    Guarantee: of second order, and exact where D stays the same. 1 evaluation a step. Time is
    lambda = -ln sigma (Lu et al. 2022, algorithm 2, with alpha = 1). The first step knows one value
    only, and a step to sigma 0 would be infinitely long: both take D as it is.
    """
    goals, pushed = _Line(), _Line()
    for sigma, after in pairwise(sigmas):
        step = log(sigma / after) if after > 0 else None
        goal = goals.middle(denoise(x, sigma), step)
        assert goal is not None
        extra = None if push is None else push(x, sigma)
        extra = pushed.middle(None if extra is None else sigma**2 * extra, step)
        goal = goal if extra is None else goal + extra
        x = goal + (after / sigma) * (x - goal)
    return x


class _Line:
    """Something known where steps start, told for their middle by a line through the last two."""

    def __init__(self) -> None:
        self.last: tuple[Tensor, float] | None = None

    def middle(self, value: Tensor | None, step: float | None) -> Tensor | None:
        """The value half a step on; as it is if the one before, or the step's length, is not known.

        After a silence the line starts again: it would lead across a gap of unknown length.
        """
        last, self.last = self.last, None
        if value is None or step is None:
            return value
        self.last = value, step
        return value if last is None else value + (value - last[0]) * (step / (2 * last[1]))


SOLVERS: dict[str, Callable[..., State]] = {"heun": heun, "dpm": dpm_solver}


def draw_images(
    denoiser: nn.Module,
    labels: Int[Tensor, " labels"] | None,
    seeds: Int[Tensor, " n"],
    shape: tuple[int, int, int],
    *,
    solver: str = "heun",
    steps: int = 18,
    base: UInt8[Tensor, "n c h w"] | None = None,
    sigma: float = SIGMA_MAX,
    guide: Guide | None = None,
    guide_weight: float = 1.0,
    batch_size: int = 256,
    precision: torch.dtype = torch.float32,
) -> UInt8[Tensor, "n c h w"]:
    """One image of `shape` (channels, height, width) for each seed; image i is of class labels[i].

    It begins as noise of deviation `sigma`; or, with a `base`, as base[i] under that noise: larger
    features stay, and smaller ones are drawn again (Meng et al. 2022).

    Guarantee: an image is a function of its own seed, label and base, whatever else is drawn and on
    whatever device, as far as the network's answers are. The path is kept in float64; the network
    sees float32, under autocast if `precision` is lower. It is in evaluation mode meanwhile, since
    dropout would add noise that no seed names. Raises `SfumatoError` if an answer is not finite.
    """
    if solver not in SOLVERS:
        raise ConfigError(f'solver "{solver}" is not known: there are {", ".join(SOLVERS)}.')
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size} must be at least 1.")
    if labels is not None and len(labels) != len(seeds):
        raise ConfigError(f"{len(labels)} labels and {len(seeds)} seeds: each image needs both.")
    if base is not None and base.shape != (len(seeds), *shape):
        raise ConfigError(
            f"{tuple(base.shape)} is the shape of the images to begin from, and must be "
            f"{(len(seeds), *shape)}: one for each seed."
        )
    sigmas = noise_schedule(steps, sigma_max=sigma)
    device = next((p.device for p in denoiser.parameters()), torch.device("cpu"))
    size = min(batch_size, max(1, len(seeds)))
    pieces = [torch.empty(0, *shape, dtype=torch.uint8)]
    for first in range(0, len(seeds), size):
        places = torch.arange(first, min(first + size, len(seeds)))
        # The last batch is filled up, so that a compiled network sees one shape alone.
        filled = places[torch.arange(size) % len(places)]
        y = None if labels is None else labels.cpu()[filled].to(device)
        x = start_noise(seeds.cpu()[filled], shape) * sigma
        x = (x if base is None else x + from_pixels(base.cpu()[filled])).to(device)
        answers = _Answers(denoiser, y, precision, guide, guide_weight)
        with in_evaluation_mode(denoiser), torch.no_grad():
            push = None if guide is None or guide_weight == 0 else answers.push
            x = SOLVERS[solver](answers.denoise, x, sigmas, push)[: len(places)].cpu()
        if not x.isfinite().all():
            raise SfumatoError(
                "the denoiser gave numbers that are not finite, so there is no image to draw. "
                "Train it with a lower learning rate, or lower the weight of the guide."
            )
        pieces.append(to_pixels(x))
    return torch.cat(pieces)


def start_noise(seeds: Int[Tensor, " n"], shape: tuple[int, int, int]) -> Float[Tensor, "n c h w"]:
    """Standard normal numbers, each image's from a generator of its own, on the CPU in float64."""
    generator = torch.Generator()
    each = [
        torch.randn(shape, generator=generator.manual_seed(seed), dtype=torch.float64)
        for seed in seeds.tolist()
    ]
    return torch.stack(each)


def to_pixels(x: State) -> UInt8[Tensor, "n c h w"]:
    """Images in [-1, 1] to the nearest bytes; what lies outside goes to the end it is beyond."""
    return ((x + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def from_pixels(pixels: UInt8[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
    """Bytes to images in [-1, 1], in float32."""
    return pixels.float() / 127.5 - 1


class _Answers:
    """A denoiser and a guide, asked about one batch at one sigma, in the precision of the path."""

    def __init__(
        self,
        denoiser: nn.Module,
        labels: Labels | None,
        precision: torch.dtype,
        guide: Guide | None,
        weight: float,
    ) -> None:
        self.denoiser, self.labels, self.precision = denoiser, labels, precision
        self.guide, self.weight = guide, weight

    def denoise(self, x: State, sigma: float) -> State:
        """The denoiser's answer."""
        low = self.precision != torch.float32
        layout = torch.channels_last if x.is_cuda else torch.contiguous_format
        inputs = x.to(torch.float32, memory_format=layout)
        with torch.autocast(x.device.type, self.precision, enabled=low):
            found = self.denoiser(inputs, inputs.new_full((len(x),), sigma), self.labels)
        return found.to(x.dtype)

    def push(self, x: State, sigma: float) -> State | None:
        """The guide's answer, weighted."""
        assert self.guide is not None
        found = self.guide(x.float(), sigma, self.labels)
        return None if found is None else self.weight * found.to(x.dtype)
