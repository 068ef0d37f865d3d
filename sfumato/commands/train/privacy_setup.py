"""The plan within the budget, the session key and the ledger of `sfumato train`."""

from dataclasses import replace
from typing import Any

from sfumato.commands.origin import name_of
from sfumato.commands.train.train_state import number_of_steps
from sfumato.data.images import Images
from sfumato.files import read_lines
from sfumato.privacy.budget import Budget, Plan, check_delta, default_delta, make_plan
from sfumato.privacy.ledger import Ledger, LedgerHeader
from sfumato.privacy.session_key import SessionKey
from sfumato.runs import Run
from sfumato.settings.train import Train, Training
from sfumato.training.inputs import Inputs
from sfumato.training.private_step import LEFT_OUT, PrivacyContext
from sfumato.training.process_group import ProcessGroup


def open_ledger(
    config: Train,
    inputs: Inputs,
    run: Run | None,
    processes: ProcessGroup,
    planned: tuple[Plan, float],
    declared: str = "",
    before: Ledger | None = None,
) -> PrivacyContext:
    """The run's secret, and the ledger that will show that the plan keeps the budget.

    `planned` is what `plan_for` gave.
    `declared` names images that were declared public before: the ledger says so. `before` is what
    the weights to begin with have cost: the budget is for both.
    """
    secret, (plan, delta) = draw_secret(config, run, processes), planned
    header, given = header_of(config, inputs.images, delta, secret, declared), []
    if config.weights is not None and before is None:
        given.append(f"the weights that training began with ({name_of(config.weights)})")
    elif config.pretrained:
        given.append(f"the published weights of {config.model}")
    header = replace(header, public=", and ".join([header.public, *given]))
    if run is None:
        return PrivacyContext(plan, Ledger(processes.agree(None)), secret)
    run.write_json("plan.json", plan)
    things = "images" if config.unit == "example" else "people"
    # Canaries of other kinds are images of the data.
    added = config.canaries if config.canary_kind == "gradient" else 0
    who = f"{len(inputs) - added} {things} of {inputs.images.name}"
    run.log(
        f"{who}{f' and {added} canaries' if added else ''}, {plan.steps} steps of about "
        f"{plan.expected_batch:g}, noise multiplier {plan.noise_multiplier:.3g}"
    )
    ledger = Ledger.resume(run.ledger_records(), header, run.write_ledger)
    if before is not None:
        run.log(
            f"{config.weights} was trained on the same data: what that cost is in the ledger too"
        )
        ledger.inherit(before)
    processes.agree(ledger.header)
    return PrivacyContext(plan, ledger, secret)


def draw_secret(config: Training, run: Run | None, processes: ProcessGroup) -> SessionKey:
    """The run's randomness, which all processes share."""
    if config.noise_seed is not None:
        return SessionKey.from_seed(config.noise_seed)
    return SessionKey(processes.agree(run and run.secret(lambda: SessionKey.draw().key)))


def plan_for(config: Training, size: int, before: Ledger | None = None) -> tuple[Plan, float]:
    """The plan and its delta for this many images, or people; or why there is none.

    What `before` has cost is part of the budget.
    """
    delta = default_delta(size) if config.delta is None else config.delta
    check_delta(delta, size)
    budget = None if config.epsilon is None else Budget(epsilon=config.epsilon, delta=delta)
    noise = 0.0 if config.mode == "non-private" else config.noise_multiplier
    plan = make_plan(
        budget,
        size=size,
        batch_size=config.batch_size,
        steps=number_of_steps(config, size),
        noise_multiplier=noise,
        max_norm=config.max_grad_norm,
        relation=config.relation,
        noise_decay=config.noise_decay,
        clip_decay=config.clip_decay,
        spent=() if before is None else before.releases,
    )
    return plan, delta


def header_of(
    config: Training, data: Images, delta: float, secret: SessionKey, declared: str = ""
) -> LedgerHeader:
    """What the guarantee is about, and which images were declared public."""
    count = "the number of examples"
    if config.unit == "person":
        count = f"the number of people, up to {config.images_per_person} images of each a step"
    images = [f", and the images of {name}" for name in (declared, config.extender_images) if name]
    return LedgerHeader(
        data=data.name,
        delta=delta,
        relation=config.relation,
        unit=config.unit,
        neighbours="training parts" if data.drawn_part else "data sets",
        public="".join([f"settings, {count}, image size and class names", *images]),
        noise="chacha20" if config.secure else "philox",
        fixed_seed=secret.fixed,
        secret=secret.commitment,
    )


def guarantee_summary(paid: PrivacyContext) -> dict[str, Any]:
    """What was guaranteed, and by what noise."""
    names = ("noise_multiplier", "rate", "steps")
    numbers = {name: getattr(paid.plan, name) for name in names}
    return {**paid.ledger.guarantee(), **numbers}


def steps_left_out(run: Run) -> int:
    """How many steps were paid for, lost in a crash, and left out then.

    Private: which sums come out otherwise, in other chunks, depends on how long batches are.
    """
    return sum(LEFT_OUT in line for line in read_lines(run.path / "private" / "metrics.jsonl"))


def log_resume(paid: PrivacyContext, step: int, run: Run) -> None:
    """Say where a run goes on that was cut, and which steps it may have paid for and lost."""
    ledger = paid.ledger
    ours = {release.step for release in ledger.releases if release.ledger == ledger.header.id}
    if not ours:
        return
    begun = f"going on after step {step}" if step else "beginning again, without a checkpoint yet"
    again = 0 if paid.plan.noise_multiplier == 0 else len([s for s in ours if s >= step])
    lost = (
        f". {again} steps from here on were paid for and are taken again; where their sums come "
        "out otherwise (another --physical-batch-size, device or machine), they are left out"
    )
    run.log(f"{begun}: what was paid is not paid again{lost if again else ''}")
