"""`sfumato demo`: the story on real digits, in under two minutes.

One budget, two stages. First the mean image of each digit, released with differential privacy: ten
sums over private images, clipped, noised and paid for in one call. Then a small network, trained
with what is left of the budget. The picture may be shared; in `private/` are the exact means and
the test scores, which may not.

Then the attacker's turn: digits are stolen from the weights of heads that were trained without
noise, and not from the same heads with it; and a network that learnt without noise is asked what
its classes look like, by somebody who has only ever seen other digits.
"""

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sfumato.errors import ConfigError
from sfumato.recipes import train
from sfumato.recipes.image_source import ImageSource
from sfumato.runs import Run

if TYPE_CHECKING:
    from torch import Tensor

    from sfumato.data.images import Images
    from sfumato.privacy.budget import Budget
    from sfumato.privacy.ledger import Ledger
    from sfumato.privacy.sampling import Secret


@dataclass(frozen=True, kw_only=True)
class Config(ImageSource):
    """The story on the embedded digits: private means, and a network trained privately."""

    epsilon: float = 3.0
    """The promise for everything together: smaller is stronger, and noisier."""
    delta: float | None = None
    """Chance of failure; chosen by the data's size when left out."""
    means_noise: float = 5.0
    """Noise multiplier of the means; the network gets what this leaves of the budget."""
    max_norm: float = 9.0
    """Norm bound of one image. About the norm of a digit, which is a public fact."""
    secure: bool = False
    """Noise from a cryptographic stream, safe against floating-point attacks."""
    noise_seed: int | None = None
    """Repeat exactly, for experiments: the result is marked not for release."""

    def __post_init__(self) -> None:
        if math.isinf(self.epsilon):
            raise ConfigError("epsilon=inf promises nothing, and the demo releases what it makes.")

    @property
    def training(self) -> train.Config:
        """The network's settings: those of `sfumato train --preset digits-cpu`."""
        return replace(train.PRESETS["digits-cpu"](), epsilon=self.epsilon, secure=self.secure)


def digits_cpu() -> Config:
    """Epsilon 3 on 4,000 digits: test accuracy 0.93."""
    return Config()


PRESETS = {"digits-cpu": digits_cpu}


def needs_run(_: Config) -> bool:
    """The demo leaves pictures and a model."""
    return True


def run(config: Config, run: Run) -> dict[str, Any]:
    """Load, promise, release means, train with the rest, sum up."""
    from sfumato.data.load import load_splits

    images, test = load_splits(config.data, **config.loading)
    run.log(f'"{images.name}": {len(images)} private images of {len(images.classes)} classes')
    budget, ledger, secret = open_budget(config, images, run)
    means = release_means(images, config, ledger, secret, run)
    run.log(f"a mean image of each class: epsilon {ledger.epsilon():.2f} of {budget.epsilon:g}")
    scores = train_network(config, images, test, budget, ledger, secret, run)
    exact = images.class_means()
    scores["nearest_mean_accuracy"] = nearest_mean_accuracy(means, test)
    scores["nearest_exact_mean_accuracy"] = nearest_mean_accuracy(exact, test)
    run.write_json("private/scores.json", scores)
    draw(means, exact, images, ledger.events[0].noise_multiplier, run)
    if config.data == "digits":
        steal(run)
        invert(run)
    return run.finish(
        {
            "epsilon": ledger.epsilon(),
            "delta": budget.delta,
            "data": images.name,
            "run": str(run.path),
            "not_for_release": ledger.objections,
        }
    )


def show(summary: Mapping[str, Any]) -> str:
    """What was promised, and where to look."""
    lines = [
        f"From the {summary['data']} images, with differential privacy:",
        f"  promise   epsilon {summary['epsilon']:.3g}, delta {summary['delta']:.2g} in all "
        "(one image more or less)",
        f"  picture   {summary['run']}/means.png: the mean image of each class",
        f"  model     {summary['run']}/model.safetensors",
        f"  ledger    {summary['run']}/ledger.jsonl: every use of the private images",
        f"  private   {summary['run']}/private: test accuracy and the exact means; do not share",
    ]
    if summary["data"] == "digits-train":
        lines += [
            f"  stolen    {summary['run']}/private/stolen.png: what an attacker sees in the",
            "            weights of a head that learnt without noise, and of the same head with it",
            f"  inverted  {summary['run']}/private/inverted.png: what a network without noise says",
            "            of 0 to 4 to an attacker who has images of 5 to 9 alone",
        ]
    lines += [f"  NOT FOR RELEASE: {objection}" for objection in summary["not_for_release"]]
    return "\n".join(lines)


def open_budget(config: Config, images: "Images", run: Run) -> "tuple[Budget, Ledger, Secret]":
    """One budget, one ledger and one secret for both stages."""
    from sfumato.privacy.budget import Budget, default_delta
    from sfumato.privacy.ledger import Header, Ledger
    from sfumato.privacy.sampling import Secret

    delta = default_delta(len(images)) if config.delta is None else config.delta
    budget = Budget(epsilon=config.epsilon, delta=delta)
    budget.check_against(len(images))
    seed = config.noise_seed
    secret = (
        Secret(run.secret(lambda: Secret.draw().key)) if seed is None else Secret.from_seed(seed)
    )
    header = Header(
        data=images.name,
        delta=delta,
        noise="chacha20" if config.secure else "philox",
        fixed_seed=secret.fixed,
        secret=secret.commitment,
    )
    return budget, Ledger.resume(run.ledger_records(), header, run.write_ledger), secret


def release_means(
    images: "Images", config: Config, ledger: "Ledger", secret: "Secret", run: Run
) -> "Tensor":
    """The mean image of each class, through the ledger.

    Every image is one vector: its pixels, and a constant that counts it. So class sizes need not
    be public: the noisy sum is divided by the noisy count.
    """

    from sfumato.privacy.budget import make_plan
    from sfumato.privacy.moments import sum_by_group, weighted_means, with_counter
    from sfumato.privacy.noise import privatize

    plan = make_plan(
        size=len(images), noise_multiplier=config.means_noise, max_norm=config.max_norm
    )
    pixels = images.pixels.flatten(1).double() / 255
    weight = config.max_norm / 3
    counted = with_counter(pixels, weight)
    table = sum_by_group(counted, images.labels, len(images.classes), plan.max_norm)
    noisy = privatize({"table": table}, plan, ledger, secret, step=0, stage="means")["table"]
    means = weighted_means(noisy, weight, least=1 / len(images))
    means = means.reshape(-1, *images.shape).clamp(0, 1).float()
    run.save_tensors("means.safetensors", {"means": means})
    return means


def train_network(
    config: Config, images: "Images", test: "Images", budget: "Budget", ledger: "Ledger",
    secret: "Secret", run: Run,
) -> dict[str, float]:  # fmt: skip
    """A small network, trained with what the means have left of the budget."""
    import torch

    from sfumato.privacy.budget import make_plan
    from sfumato.train.steps import accuracy
    from sfumato.train.world import World

    settings = config.training
    learner, reading = train.prepare(settings, images, torch.device("cpu"))
    spent = [event for event in ledger.events if event.stage == "means"]
    plan = make_plan(
        budget, size=len(images), batch_size=min(settings.batch_size, len(images)),
        epochs=settings.epochs, max_norm=settings.max_grad_norm, spent=spent,
    )  # fmt: skip
    run.write_json("plan.json", plan)
    train.learn(settings, learner, reading, plan, ledger, secret, run, World())
    run.save_tensors("model.safetensors", learner.best.state_dict())
    found = accuracy(learner.best, replace(reading, images=test))
    return {"test_accuracy": found, "test_images": len(test)}


def steal(run: Run) -> None:
    """Training images back from the weights of heads without noise, and of the same with it."""
    from sfumato.recipes import reconstruct

    run.log("an attacker learns to see training images in the weights of a head")
    stage = attacker(run, "reconstruct")
    if not stage.finished:
        reconstruct.run(reconstruct.PRESETS["digits-private"](), stage)
    for name, copy in (("pictures.png", "stolen.png"), ("study.md", "stolen.md")):
        shutil.copyfile(stage.private / name, run.private / copy)


def invert(run: Run) -> None:
    """What a network that learnt 0 to 4 without noise says of them to somebody who has 5 to 9."""
    from sfumato.recipes import invert

    run.log("another attacker asks a network what its classes look like")
    stage = attacker(run, "invert")
    if not stage.finished:
        invert.run(invert.PRESETS["digits-cpu"](), stage)
    shutil.copyfile(stage.private / "guesses.png", run.private / "inverted.png")


def attacker(run: Run, verb: str) -> Run:
    """The attacker's place: its own images are the demo's private ones, so all of it is private."""
    stage = Run(run.private / verb, run.say)
    stage.path.mkdir(exist_ok=True)
    return stage


def nearest_mean_accuracy(means: "Tensor", test: "Images") -> float:
    """How often the nearest mean names the right class."""
    import torch

    distances = torch.cdist((test.pixels.float() / 255).flatten(1), means.flatten(1))
    return float((distances.argmin(dim=1) == test.labels).float().mean())


def draw(means: "Tensor", exact: "Tensor", images: "Images", noise: float, run: Run) -> None:
    """The released picture, and the comparison that stays in `private/`."""
    from sfumato.report.figures import save_image_rows

    released = (f"noise {noise:g}", means)
    save_image_rows(run.path / "means.png", [released], images.classes)
    rows = [("exact", exact), released]
    save_image_rows(run.private / "comparison.png", rows, images.classes)
