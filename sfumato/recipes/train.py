"""`sfumato train`: private, or plain, training and fine-tuning of any vision model.

Load, build, plan, train, score: the privacy is in the plan and in the step that `private_step`
makes; everything else is ordinary training.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from sfumato.errors import ConfigError
from sfumato.runs import Run

if TYPE_CHECKING:
    import torch

    from sfumato.data.images import Images
    from sfumato.ghost.clip import Clipped, Ghost
    from sfumato.privacy.budget import Plan
    from sfumato.privacy.ledger import Ledger
    from sfumato.privacy.sampling import Secret
    from sfumato.train.loop import Learner
    from sfumato.train.reading import Reading
    from sfumato.train.world import World

NEEDS_RUN = True

Mode = Literal["ghost_mixed", "ghost", "non-ghost", "non-private"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Private (or plain) training of any vision model."""

    MAY_CHANGE: ClassVar = ("physical_batch_size", "two_pass", "compile", "device", "check_every")
    """Settings that say how, not what: a run may go on with others."""

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
    freeze: tuple[str, ...] = ()
    """Patterns of parameters that do not, such as "blocks.0.*"."""
    unit: Literal["example", "person"] = "example"
    """Whose presence is hidden: one image, or one person with all of theirs."""
    people: str | None = None
    """Who is on which image: folder (class/PERSON/image) or FILE.csv[:COLUMN]; .npz has arrays."""
    images_per_person: int = 4
    """With people: how many images of one are taken at a time, as one example."""
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
    """Expected (logical) batch, of images or people."""
    physical_batch_size: int | Literal["auto"] = 256
    """Examples that are in memory at once; auto takes the largest number that fits."""
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
    noise_decay: float = 1.0
    """Schedule: what the noise multiplier has been multiplied by at the end."""
    clip_decay: float = 1.0
    """Schedule: what the norm bound has been multiplied by at the end."""
    clip: Literal["vanilla", "automatic", "auto-v", "global"] = "vanilla"
    """Clip function."""
    per_layer: bool = False
    """Clip every layer on its own."""
    two_pass: bool = False
    """Less memory, more time."""
    check_every: int = 0
    """Every so many steps, measure what two examples add, and stop if it is beyond the bound."""
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
    compile: bool = False
    """Compile the private step: a minute once, then faster."""
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
        for name in ("physical_batch_size", "augmult", "images_per_person"):
            if getattr(self, name) != "auto" and getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.people is not None and self.unit == "example":
            raise ConfigError("--people says who is on each image: add --unit person.")


def digits_cpu() -> Config:
    """Epsilon 3 on 4,000 digits in half a minute on 2 cores: 0.93 to 0.94."""
    return Config(epsilon=3.0, batch_size=500, epochs=25, lr=1.0, physical_batch_size=500)


def mnist_eps1() -> Config:
    """Epsilon 1 on MNIST."""
    return Config(
        data="mnist", epsilon=1.0, batch_size=4096, epochs=20, lr=2.0, physical_batch_size=4096
    )


def fashion_eps2() -> Config:
    """Epsilon 2 on Fashion-MNIST."""
    return Config(
        data="fashion_mnist", model="wrn-10-2", epsilon=2.0, batch_size=4096, epochs=40, lr=2.0,
        augmult=4, crop=2, flip=True, ema=0.99, physical_batch_size="auto",
    )  # fmt: skip


def cifar10_scratch_eps8() -> Config:
    """Epsilon 8 on CIFAR-10 from scratch: WRN-16-4, the recipe of De et al. 2022."""
    return Config(
        data="cifar10", model="wrn-16-4", epsilon=8.0, delta=1e-5, batch_size=4096, steps=875,
        lr=4.0, augmult=16, crop=4, flip=True, ema=0.999, physical_batch_size="auto",
        precision="bf16", compile=True,
    )  # fmt: skip


def cifar10_finetune_eps1() -> Config:
    """Epsilon 1 on CIFAR-10, from public ImageNet weights: give --pretrained, or --weights FILE."""
    return Config(
        data="cifar10", model="tf_efficientnet_lite0", image_size=224, epsilon=1.0, delta=1e-5,
        batch_size=2000, epochs=5, optimizer="adam", lr=1e-3, schedule="cosine",
        clip="automatic", physical_batch_size="auto", precision="bf16",
    )  # fmt: skip


PRESETS: dict[str, Callable[[], Config]] = {
    "digits-cpu": digits_cpu,
    "mnist-eps1": mnist_eps1,
    "fashion-eps2": fashion_eps2,
    "cifar10-scratch-eps8": cifar10_scratch_eps8,
    "cifar10-finetune-eps1": cifar10_finetune_eps1,
}


def run(config: Config, run: Run | None) -> dict[str, Any]:
    """Load, build, plan, train, score. Of several processes, all but the leader have no run."""
    from sfumato.data.load import load_splits
    from sfumato.train.setup import pick_device
    from sfumato.train.world import join_world, leave_world

    device = pick_device(config.device)
    world = join_world(device)
    if world.agree(run is not None and run.finished):
        return {} if run is None else run.summary
    train, test = load_splits(
        config.data, image_size=config.image_size, data_root=config.data_root,
        download=config.download, people=config.people,
    )  # fmt: skip
    learner, reading = prepare(config, train, device)
    if config.explain:
        return {"explanation": explain_layers(config, learner, reading)}
    secret = draw_secret(config, run, world)
    plan, ledger = promise(config, reading, secret, run, world)
    learn(config, learner, reading, plan, ledger, secret, run, world)
    leave_world()
    if run is None:
        return {}
    return conclude(config, learner, replace(reading, images=test), plan, ledger, run)


def show(summary: Mapping[str, Any]) -> str:
    """What was promised, and where it is."""
    if "explanation" in summary:
        return summary["explanation"]
    promise = "no promise: plain training"
    if summary["epsilon"] != "inf":
        promise = f"epsilon {summary['epsilon']:.3g}, delta {summary['delta']:.2g}"
        promise += f", for each {summary['unit']}"
    lines = [
        f"{summary['model']} trained on {summary['data']}: {summary['steps']} steps",
        f"  promise   {promise}",
        f"  model     {summary['run']}/model.safetensors",
        f"  private   {summary['run']}/private: test accuracy, losses; do not share",
    ]
    lines += [f"  NOT FOR RELEASE: {objection}" for objection in summary["not_for_release"]]
    return "\n".join(lines)


def prepare(config: Config, images: "Images", device: "torch.device") -> "tuple[Learner, Reading]":
    """The model, its optimizer, and how it reads images."""
    import torch

    from sfumato.data.augment import Augmentation
    from sfumato.nn.average import new_average
    from sfumato.nn.normalise import apply_norm_policy
    from sfumato.nn.zoo import build_model, pixel_statistics
    from sfumato.train.loop import Learner
    from sfumato.train.reading import Reading
    from sfumato.train.setup import choose_parameters, make_optimizer, make_schedule

    torch.manual_seed(config.seed)
    model = build_model(
        config.model, classes=len(images.classes), shape=images.shape,
        pretrained=config.pretrained, weights=config.weights,
    )  # fmt: skip
    statistics = pixel_statistics(model, images.shape[0])
    has_weights = config.pretrained or config.weights is not None
    model = apply_norm_policy(model, config.norm or ("frozen" if has_weights else "group"))
    layout = torch.channels_last if device.type == "cuda" else torch.preserve_format
    model = model.to(device, memory_format=layout)
    choose_parameters(model, config.train_only, config.freeze)
    reading = Reading(
        images.to(device), device, *statistics,
        Augmentation(crop=config.crop, flip=config.flip), config.augmult,
        torch.bfloat16 if config.precision == "bf16" else torch.float32,
        group_by_person(config, images), config.seed,
    )  # fmt: skip
    optimizer = make_optimizer(
        model, config.optimizer, lr=config.lr, momentum=config.momentum,
        weight_decay=config.weight_decay,
    )  # fmt: skip
    schedule = make_schedule(optimizer, config.schedule, number_of_steps(config, len(reading)))
    return Learner(model, optimizer, schedule, new_average(model, config.ema)), reading


def group_by_person(config: Config, images: "Images") -> Any:
    """Who is on which image, if the promise is about people."""
    from sfumato.data.people import People

    if config.unit == "example":
        return None
    if images.people is None:
        raise ConfigError(
            f'nobody knows who is on the images of "{images.name}". Give --people folder, '
            "--people FILE.csv, or arrays people_train and people_test in an .npz file."
        )
    return People(images.people, config.images_per_person)


def number_of_steps(config: Config, size: int) -> int:
    """Steps that the settings ask for."""
    from sfumato.privacy.budget import count_steps

    epochs = 5.0 if config.epochs is None and config.steps is None else config.epochs
    return count_steps(size, config.batch_size, epochs=epochs, steps=config.steps)


def draw_secret(config: Config, run: Run | None, world: "World") -> "Secret":
    """The run's randomness, which all processes share."""
    from sfumato.privacy.sampling import Secret

    if config.noise_seed is not None:
        return Secret.from_seed(config.noise_seed)
    return Secret(world.agree(run and run.secret(lambda: Secret.draw().key)))


def promise(
    config: Config, reading: "Reading", secret: "Secret", run: Run | None, world: "World"
) -> "tuple[Plan, Ledger]":
    """The plan that keeps the budget, and the ledger that will show it."""
    from sfumato.privacy.budget import Budget, default_delta, make_plan
    from sfumato.privacy.ledger import Header, Ledger

    size = len(reading)
    delta = default_delta(size) if config.delta is None else config.delta
    budget = None if config.epsilon is None else Budget(epsilon=config.epsilon, delta=delta)
    noise = 0.0 if config.mode == "non-private" else config.noise_multiplier
    plan = make_plan(
        budget, size=size, batch_size=config.batch_size, steps=number_of_steps(config, size),
        noise_multiplier=noise, max_norm=config.max_grad_norm, relation=config.relation,
        noise_decay=config.noise_decay, clip_decay=config.clip_decay,
    )  # fmt: skip
    count = "the number of examples"
    if config.unit == "person":
        count = f"the number of people, up to {config.images_per_person} images of each a step"
    header = Header(
        data=reading.images.name, delta=delta, relation=config.relation, unit=config.unit,
        public=f"settings, {count}, image size and class names",
        noise="chacha20" if config.secure else "philox", fixed_seed=secret.fixed,
        secret=secret.commitment,
    )  # fmt: skip
    if run is None:
        return plan, Ledger(world.agree(None))
    run.write_json("plan.json", plan)
    ledger = Ledger.resume(run.ledger_records(), header, run.write_ledger)
    world.agree(ledger.header)
    return plan, ledger


def learn(
    config: Config,
    learner: "Learner",
    reading: "Reading",
    plan: "Plan",
    ledger: "Ledger",
    secret: "Secret",
    run: Run | None,
    world: "World",
) -> None:
    """Take all the steps, from wherever an earlier try was cut."""
    from sfumato.ghost.clip import Clipping, Ghost
    from sfumato.privacy.sampling import poisson_batches
    from sfumato.train.loop import fit
    from sfumato.train.memory import catch, fitting_batch
    from sfumato.train.progress import price_list, progress
    from sfumato.train.steps import plain_step, private_step

    learner.load(world.agree(run and run.load_checkpoint()))
    clipping = Clipping(
        max_norm=config.max_grad_norm, style=config.clip, per_layer=config.per_layer
    )
    mode = "ghost_mixed" if config.mode == "non-private" else config.mode
    ghost = Ghost(learner.model, mode, config.two_pass, clipping)
    if config.mode == "non-private":
        ledger.charge(replace(plan, steps=1).event("train", 0, data=reading.images.name))
        step = plain_step(learner.model, reading, world=world)
    else:
        clip = admitted(ghost, reading, compiled=config.compile)
        step = private_step(
            ghost, reading, plan, ledger, secret, world=world, clip=clip,
            check_every=config.check_every,
        )  # fmt: skip
    size = fitting_batch(ghost, reading, config.physical_batch_size, plan.expected_batch, world)
    batches = poisson_batches(
        plan, len(reading), secret, ledger, stage="train", start=learner.step, chunk_size=size,
        pad=config.compile,
    )  # fmt: skip
    tell = progress(
        plan.steps, learner.step, price_list(plan, ledger, "train"), run.say if run else None
    )
    fit(learner, batches, catch(step, ghost, reading, size), run, world=world, tell=tell)


def admitted(ghost: "Ghost", reading: "Reading", *, compiled: bool) -> "Callable[..., Clipped]":
    """`ghost.clip`, after the model has passed its test on noise; compiled if so asked."""
    import torch

    from sfumato.ghost.admit import admit

    inputs, exact = reading.trial(), replace(reading, precision=torch.float32)
    admit(ghost, reading.losses, inputs, 3, exact.losses)
    if not compiled:
        return ghost.clip
    ghost.clip(reading.losses, inputs, 3)  # where parameters meet the batch is found eagerly
    torch._dynamo.config.trace_autograd_ops = True  # pyright: ignore
    return torch.compile(ghost.clip, fullgraph=True)


def explain_layers(config: Config, learner: "Learner", reading: "Reading") -> str:
    """The table of layers: method, work, memory, share, and the predicted cost."""
    from sfumato.ghost.clip import Ghost
    from sfumato.ghost.layout import explain_layout

    mode = "ghost_mixed" if config.mode == "non-private" else config.mode
    ghost = Ghost(learner.model, mode, config.two_pass)
    ghost.clip(reading.losses, reading.trial(), 3)
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
            "unit": ledger.header.unit,
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
