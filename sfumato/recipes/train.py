"""`sfumato train`: private, or plain, training and fine-tuning of any vision model.

Load, build, plan, train, score: the privacy is in the plan and in the step that `private_step`
makes; everything else is ordinary training.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sfumato.errors import ConfigError
from sfumato.runs import Run

if TYPE_CHECKING:
    import torch
    from torch import nn

    from sfumato.privacy.budget import Plan
    from sfumato.privacy.ledger import Ledger
    from sfumato.privacy.sampling import Secret
    from sfumato.train.loop import Learner
    from sfumato.train.steps import Reading

NEEDS_RUN = True

Mode = Literal["ghost_mixed", "ghost", "non-ghost", "non-private"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Private (or plain) training of any vision model."""

    data: str = "digits"
    """Private images: a name, an .npz file, or a folder with one folder a class."""
    data_root: Path = Path("data")
    """Where named data sets are."""
    download: bool = False
    """Let torchvision fetch a named data set that is not there."""
    image_size: int | None = None
    """Resize images to this many pixels a side."""
    model: str = "tanh-cnn"
    """tanh-cnn, wrn-16-4, any timm name, torchvision:NAME, or module:function."""
    pretrained: bool = False
    """Start from the library's public weights."""
    weights: Path | None = None
    """Start from a state dict in a file."""
    norm: Literal["group", "frozen", "keep"] | None = None
    """BatchNorm: group replaces, frozen keeps public statistics. Frozen if there are weights."""
    train_only: Literal["all", "head", "bias"] = "all"
    """Which parameters learn."""
    epsilon: float | None = None
    """The promise. Give this or a noise multiplier."""
    delta: float | None = None
    """Chance of failure; chosen by the data's size when left out."""
    noise_multiplier: float | None = None
    """Noise deviation over norm bound, instead of epsilon."""
    relation: Literal["add-or-remove", "replace"] = "add-or-remove"
    """Which data sets are neighbours."""
    mode: Mode = "ghost_mixed"
    """How norms are found; all private modes give the same numbers."""
    batch_size: float = 400
    """Expected (logical) batch."""
    physical_batch_size: int = 256
    """Examples that are in memory at once."""
    epochs: float | None = None
    """Passes over the data (5 when neither this nor steps is given)."""
    steps: int | None = None
    """Steps, instead of epochs."""
    lr: float = 0.5
    """Learning rate."""
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """Optimizer."""
    momentum: float = 0.0
    """Momentum of sgd."""
    weight_decay: float = 0.0
    """Weight decay."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate over time."""
    max_grad_norm: float = 1.0
    """Norm bound of one example's gradient."""
    clip: Literal["vanilla", "automatic", "auto-v", "global"] = "vanilla"
    """Clip function."""
    per_layer: bool = False
    """Clip every layer on its own."""
    two_pass: bool = False
    """Less memory, more time."""
    augmult: int = 1
    """Augmented views of each example; they count as one example."""
    crop: int = 0
    """Random crops with this much reflect padding."""
    flip: bool = False
    """Random mirror images."""
    ema: float = 0.0
    """Decay of the average of weights; 0 for none."""
    precision: Literal["float32", "bf16"] = "float32"
    """Precision of activations; sums and noise are always float32."""
    device: str = "auto"
    """cpu, cuda, or auto."""
    secure: bool = False
    """Noise from a cryptographic stream."""
    seed: int = 0
    """Seed of initial weights and augmentations; batches and noise are always secret."""
    explain: bool = False
    """Print how each layer's norms are found and what that costs, and stop."""
    noise_seed: int | None = None
    """Repeat batches and noise exactly: the result is marked not for release."""

    def __post_init__(self) -> None:
        if self.mode == "non-private":
            if self.epsilon is not None or self.noise_multiplier is not None:
                raise ConfigError("mode non-private keeps no promise: leave --epsilon out.")
        elif (self.epsilon is None) == (self.noise_multiplier is None):
            raise ConfigError("give --epsilon or --noise-multiplier (or --mode non-private).")
        for name in ("physical_batch_size", "augmult"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1.")


def digits_cpu() -> Config:
    """Epsilon 3 on 4,000 digits in half a minute on 2 cores: 0.93 to 0.94."""
    return Config(epsilon=3.0, batch_size=500, epochs=25, lr=1.0, physical_batch_size=500)


PRESETS: dict[str, Callable[[], Config]] = {"digits-cpu": digits_cpu}


def run(config: Config, run: Run) -> dict[str, Any]:
    """Load, build, plan, train, score."""
    from sfumato.data.load import load_splits
    from sfumato.privacy.sampling import Secret

    train, test = load_splits(
        config.data,
        image_size=config.image_size,
        data_root=config.data_root,
        download=config.download,
    )
    device = pick_device(config.device)
    learner, reading = prepare(config, train, device)
    if config.explain:
        return {"explanation": explain_layers(config, learner, reading)}
    seed = config.noise_seed
    secret = (
        Secret(run.secret(lambda: Secret.draw().key)) if seed is None else Secret.from_seed(seed)
    )
    plan, ledger = promise(config, len(train), train.name, secret, run)
    learn(config, learner, reading, plan, ledger, secret, run)
    return conclude(config, learner, replace(reading, images=test), plan, ledger, run)


def show(summary: Mapping[str, Any]) -> str:
    """What was promised, and where it is."""
    if "explanation" in summary:
        return summary["explanation"]
    promise = "no promise: plain training"
    if summary["epsilon"] != "inf":
        promise = f"epsilon {summary['epsilon']:.3g}, delta {summary['delta']:.2g}"
    lines = [
        f"{summary['model']} trained on {summary['data']}: {summary['steps']} steps",
        f"  promise   {promise}",
        f"  model     {summary['run']}/model.safetensors",
        f"  private   {summary['run']}/private: test accuracy, losses; do not share",
    ]
    lines += [f"  NOT FOR RELEASE: {objection}" for objection in summary["not_for_release"]]
    return "\n".join(lines)


def pick_device(name: str) -> "torch.device":
    """The device asked for, if it is there."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f'device "{name}" was asked for and torch finds no GPU. Use --device cpu.'
        )
    return torch.device(name)


def prepare(config: Config, images: Any, device: "torch.device") -> "tuple[Learner, Reading]":
    """The model, its optimizer, and how it reads images."""
    import torch

    from sfumato.data.augment import Augmentation
    from sfumato.nn.normalise import apply_norm_policy
    from sfumato.nn.zoo import build_model
    from sfumato.train.loop import Learner, new_average
    from sfumato.train.steps import Reading

    torch.manual_seed(config.seed)
    classes = len(images.classes)
    model = build_model(
        config.model, classes=classes, shape=images.shape, pretrained=config.pretrained,
        weights=config.weights,
    )  # fmt: skip
    has_weights = config.pretrained or config.weights is not None
    policy = config.norm or ("frozen" if has_weights else "group")
    model = apply_norm_policy(model, policy).to(device)
    choose_parameters(model, config.train_only)
    parameters = [p for p in model.parameters() if p.requires_grad]
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer == "sgd":
        options["momentum"] = config.momentum
    optimizer = kinds[config.optimizer](parameters, **options)
    steps = number_of_steps(config, len(images))
    schedules = {
        "constant": lambda _: 1.0,
        "cosine": lambda step: 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps))),
    }
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, schedules[config.schedule])
    generator = torch.Generator().manual_seed(config.seed)
    learner = Learner(model, optimizer, schedule, generator, new_average(model, config.ema))
    channels = images.shape[0]
    reading = Reading(
        images, device, (0.5,) * channels, (0.5,) * channels,
        Augmentation(crop=config.crop, flip=config.flip), config.augmult,
        torch.bfloat16 if config.precision == "bf16" else torch.float32,
    )  # fmt: skip
    return learner, reading


def choose_parameters(model: "nn.Module", which: str) -> None:
    """Freeze what is not to learn."""
    if which == "all":
        return
    names = [name for name, _ in model.named_parameters()]
    layer = names[-1].rpartition(".")[0]
    for name, parameter in model.named_parameters():
        is_head = name.rpartition(".")[0] == layer
        learns = is_head if which == "head" else is_head or name.endswith("bias")
        parameter.requires_grad_(learns)


def number_of_steps(config: Config, size: int) -> int:
    """Steps that the settings ask for."""
    from sfumato.privacy.budget import count_steps

    epochs = 5.0 if config.epochs is None and config.steps is None else config.epochs
    return count_steps(size, config.batch_size, epochs=epochs, steps=config.steps)


def promise(
    config: Config, size: int, data: str, secret: "Secret", run: Run
) -> "tuple[Plan, Ledger]":
    """The plan that keeps the budget, and the ledger that will show it."""
    from sfumato.privacy.budget import Budget, default_delta, make_plan
    from sfumato.privacy.ledger import Header, Ledger

    delta = default_delta(size) if config.delta is None else config.delta
    budget = None if config.epsilon is None else Budget(epsilon=config.epsilon, delta=delta)
    noise = 0.0 if config.mode == "non-private" else config.noise_multiplier
    plan = make_plan(
        budget, size=size, batch_size=config.batch_size, steps=number_of_steps(config, size),
        noise_multiplier=noise, max_norm=config.max_grad_norm, relation=config.relation,
    )  # fmt: skip
    run.write_json("plan.json", plan)
    header = Header(
        data=data, delta=delta, relation=config.relation,
        noise="chacha20" if config.secure else "philox", fixed_seed=secret.fixed,
        secret=secret.commitment,
    )  # fmt: skip
    ledger = Ledger.resume(run.ledger_records(), header, run.write_ledger)
    return plan, ledger


def learn(
    config: Config,
    learner: "Learner",
    reading: "Reading",
    plan: "Plan",
    ledger: "Ledger",
    secret: "Secret",
    run: Run,
) -> None:
    """Take all the steps, from wherever an earlier try was cut."""
    import torch

    from sfumato.ghost.admit import admit
    from sfumato.ghost.clip import Clipping, Ghost
    from sfumato.privacy.sampling import poisson_batches
    from sfumato.train.loop import fit
    from sfumato.train.steps import plain_step, private_step

    learner.load(run)
    if config.mode == "non-private":
        ledger.charge(replace(plan, steps=1).event("train", 0, data=reading.images.name))
        step = plain_step(learner.model, reading)
    else:
        clipping = Clipping(
            max_norm=config.max_grad_norm, style=config.clip, per_layer=config.per_layer
        )
        ghost = Ghost(learner.model, config.mode, config.two_pass, clipping)
        # In full precision: that rules are right cannot be told from numbers of eight bits.
        admit(ghost, *_trial(replace(reading, precision=torch.float32)))
        step = private_step(ghost, reading, plan, ledger, secret)
    spent = _price_list(plan, ledger)
    batches = poisson_batches(
        plan, len(reading.images), secret, ledger, stage="train", start=learner.step,
        chunk_size=config.physical_batch_size, pad=False,
    )  # fmt: skip
    fit(learner, batches, step, run, steps=plan.steps, spent=spent, say=_every_second(run.say))


def explain_layers(config: Config, learner: "Learner", reading: "Reading") -> str:
    """The table of layers: method, work, memory, share, and the predicted cost."""
    from sfumato.ghost.clip import Ghost
    from sfumato.ghost.layout import explain_layout

    mode = "ghost_mixed" if config.mode == "non-private" else config.mode
    ghost = Ghost(learner.model, mode, config.two_pass)
    loss_fn, inputs, examples = _trial(reading)
    ghost.clip(loss_fn, inputs, examples)
    (parts,) = ghost.layouts.values()
    return explain_layout(parts, learner.model)


def conclude(
    config: Config, learner: "Learner", test: "Reading", plan: "Plan", ledger: "Ledger", run: Run
) -> dict[str, Any]:
    """Save the model, score it privately, sum up."""
    from sfumato.train.steps import accuracy

    run.save_tensors("model.safetensors", learner.best.state_dict())
    run.write_json("private/scores.json", {"test_accuracy": accuracy(learner.best, test)})
    return run.finish(
        {
            "epsilon": ledger.epsilon(),
            "delta": ledger.header.delta,
            "noise_multiplier": plan.noise_multiplier,
            "rate": plan.rate,
            "steps": plan.steps,
            "relation": plan.relation,
            "data": ledger.header.data,
            "model": config.model,
            "run": str(run.path),
            "not_for_release": ledger.objections,
        }
    )


def _trial(reading: "Reading") -> tuple[Any, Any, int]:
    """Noise of the right shape, for the admission test: no private image is looked at."""
    import torch

    n, views = 3, reading.views
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n * views, *reading.images.shape, generator=generator).to(reading.device)
    y = (torch.arange(n) % len(reading.images.classes)).to(reading.device)
    return reading.losses, (x, y), n


def _price_list(plan: "Plan", ledger: "Ledger") -> Callable[[int], float] | None:
    """Epsilon after each step, priced at twenty places and read off in between, from above."""
    from collections import Counter

    from sfumato.privacy.accounting import price

    if plan.noise_multiplier == 0:
        return None
    before = Counter(event.cost for event in ledger.events if event.stage != "train")
    cost, delta = plan.event("train", 0).cost, ledger.header.delta
    marks = sorted({max(1, math.ceil(plan.steps * i / 20)) for i in range(1, 21)})
    prices = {
        mark: price(before + Counter({cost: mark}), delta, plan.relation, cells_for=plan.steps)
        for mark in marks
    }
    return lambda step: prices[next(mark for mark in marks if mark >= step)]


def _every_second(say: Callable[[str], None]) -> Callable[[str], None]:
    import time

    last = 0.0

    def quietly(message: str) -> None:
        nonlocal last
        if time.monotonic() - last > 5.0:
            last = time.monotonic()
            say(message)

    return quietly
