"""`sfumato demo`: the story on real digits, in seconds.

For now: the mean image of each digit, released with differential privacy. Ten sums over private
images, clipped, noised and paid for in one call; a picture that may be shared and, in `private/`,
the exact one that may not.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfumato.errors import ConfigError
from sfumato.runs import Run

if TYPE_CHECKING:
    from torch import Tensor

    from sfumato.data.images import Images
    from sfumato.privacy.budget import Plan
    from sfumato.privacy.ledger import Ledger

NEEDS_RUN = True


@dataclass(frozen=True, kw_only=True)
class Config:
    """The story on the embedded digits: so far, a private mean image of each digit."""

    data: str = "digits"
    """Images to average: a name, an .npz file or a folder."""
    data_root: Path = Path("data")
    """Where named data sets are."""
    download: bool = False
    """Let torchvision fetch a named data set that is not there."""
    image_size: int | None = None
    """Resize images to this many pixels a side."""
    epsilon: float = 1.0
    """The promise: smaller is stronger, and noisier."""
    delta: float | None = None
    """Chance of failure; chosen by the data's size when left out."""
    max_norm: float = 9.0
    """Norm bound of one image. About the norm of a digit, which is a public fact."""
    secure: bool = False
    """Noise from a cryptographic stream, safe against floating-point attacks."""
    noise_seed: int | None = None
    """Repeat exactly, for experiments: the result is marked not for release."""


def digits_cpu() -> Config:
    """Epsilon 1 on 4,000 digits; nearest-mean accuracy about 0.77, without privacy 0.80."""
    return Config()


PRESETS = {"digits-cpu": digits_cpu}


def run(config: Config, run: Run) -> dict[str, Any]:
    """Load, plan, release, score, draw."""
    from sfumato.data.load import load_splits
    from sfumato.privacy.budget import Budget, default_delta, make_plan

    if math.isinf(config.epsilon):
        raise ConfigError("epsilon=inf promises nothing, and the demo releases what it makes.")
    train, test = load_splits(
        config.data,
        image_size=config.image_size,
        data_root=config.data_root,
        download=config.download,
    )
    run.log(f'"{train.name}": {len(train)} private images of {len(train.classes)} classes')

    delta = default_delta(len(train)) if config.delta is None else config.delta
    budget = Budget(epsilon=config.epsilon, delta=delta)
    plan = make_plan(budget, size=len(train), max_norm=config.max_norm)
    run.write_json("plan.json", plan)
    run.log(f"epsilon {budget.epsilon:g} needs noise of {plan.noise_multiplier:.3g} norm bounds")

    ledger, means = release_means(train, plan, config, delta, run)
    run.log(f"the ledger adds up to epsilon {ledger.epsilon():.3g} at delta {delta:.2g}")
    run.write_json(
        "private/scores.json",
        {
            "test_accuracy": nearest_mean_accuracy(means, test),
            "test_accuracy_without_privacy": nearest_mean_accuracy(exact_means(train), test),
        },
    )
    draw(means, train, config.epsilon, run)
    return run.finish(
        {
            "epsilon": ledger.epsilon(),
            "delta": delta,
            "noise_multiplier": plan.noise_multiplier,
            "data": train.name,
            "run": str(run.path),
            "not_for_release": ledger.objections,
        }
    )


def show(summary: Mapping[str, Any]) -> str:
    """What was promised, and where to look."""
    lines = [
        f"A mean image of each class of {summary['data']}, released with differential privacy:",
        f"  promise   epsilon {summary['epsilon']:.3g}, delta {summary['delta']:.2g} "
        "(one image more or less)",
        f"  picture   {summary['run']}/means.png",
        f"  ledger    {summary['run']}/ledger.jsonl",
        f"  private   {summary['run']}/private: the exact means and the scores; do not share",
    ]
    lines += [f"  NOT FOR RELEASE: {objection}" for objection in summary["not_for_release"]]
    return "\n".join(lines)


def release_means(
    images: "Images", plan: "Plan", config: Config, delta: float, run: Run
) -> "tuple[Ledger, Tensor]":
    """The mean image of each class, through the ledger.

    Every image is one vector: its pixels, and a constant that counts it. So class sizes need not
    be public: the noisy sum is divided by the noisy count.
    """
    import torch

    from sfumato.privacy.ledger import Header, Ledger
    from sfumato.privacy.moments import sum_by_group
    from sfumato.privacy.noise import privatize
    from sfumato.privacy.sampling import Secret

    seed = config.noise_seed
    secret = (
        Secret(run.secret(lambda: Secret.draw().key)) if seed is None else Secret.from_seed(seed)
    )
    header = Header(
        data=images.name,
        delta=delta,
        relation=plan.relation,
        noise="chacha20" if config.secure else "philox",
        fixed_seed=secret.fixed,
        secret=secret.commitment,
    )
    ledger = Ledger.resume(run.ledger_records(), header, run.write_ledger)
    pixels = images.pixels.flatten(1).double() / 255
    counter = torch.full((len(images), 1), config.max_norm / 3, dtype=torch.float64)
    table = sum_by_group(
        torch.cat([pixels, counter], dim=1), images.labels, len(images.classes), plan.max_norm
    )
    noisy = privatize({"table": table}, plan, ledger, secret, step=0, stage="means")["table"]
    count = noisy[:, -1:].clamp(min=1 / len(images)) / counter[0]
    means = (noisy[:, :-1] / count).reshape(-1, *images.shape).clamp(0, 1).float()
    run.save_tensors("means.safetensors", {"means": means})
    return ledger, means


def exact_means(images: "Images") -> "Tensor":
    """What must not be shared: the same means without noise."""
    import torch

    pixels = images.pixels.float() / 255
    classes = range(len(images.classes))
    return torch.stack([pixels[images.labels == label].mean(dim=0) for label in classes])


def nearest_mean_accuracy(means: "Tensor", test: "Images") -> float:
    """How often the nearest mean names the right class."""
    import torch

    distances = torch.cdist((test.pixels.float() / 255).flatten(1), means.flatten(1))
    return float((distances.argmin(dim=1) == test.labels).float().mean())


def draw(means: "Tensor", train: "Images", epsilon: float, run: Run) -> None:
    """The released picture, and the comparison that stays in `private/`."""
    from sfumato.report.figures import save_image_rows

    released = (f"epsilon {epsilon:g}", means)
    save_image_rows(run.path / "means.png", [released], train.classes)
    exact = ("exact", exact_means(train))
    save_image_rows(run.private / "comparison.png", [exact, released], train.classes)
