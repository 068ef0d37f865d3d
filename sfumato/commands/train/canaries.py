"""`sfumato train --canaries`: what is drawn before training, and written down around it.

    private/canaries.json        which examples, what class, and how the coins fell
    private/canary_start.json    before the first step: hashes of buffers, losses of canary images
    private/canary_steps.bin     gradient canaries: what each step let be seen (`Observations`)
    private/canary_end.json      losses of canary images after the last step

All of it is private: anyone who knows the coins knows who was in the data. `sfumato audit` reads
it.
"""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from sfumato.config import from_json
from sfumato.data.images import Images
from sfumato.errors import RunError
from sfumato.files import read_json
from sfumato.privacy.budget import Plan
from sfumato.runs import Run
from sfumato.settings.train import Train
from sfumato.training.canaries import CanaryInclusion, Observations, draw_canaries
from sfumato.training.evaluate import logits_of
from sfumato.training.fit import TrainState
from sfumato.training.inputs import Inputs
from sfumato.training.process_group import ProcessGroup


def find_canaries(
    config: Train, images: Images, run: Run | None, processes: ProcessGroup
) -> CanaryInclusion | None:
    """The canaries of the settings: drawn once, and after a cut those that were drawn.

    A run that has begun and lost its coins cannot go on: others would tell of some steps, and an
    audit would believe that they tell of all.
    """
    if not config.canaries:
        return None

    def drawn() -> CanaryInclusion | None:
        if run is None:
            return None
        if not (run.private / "canaries.json").exists():
            if len(run.ledger_records()) > 1:
                raise RunError(
                    f"{run.path} has charged its ledger, and private/canaries.json is gone: nobody "
                    "knows who was in its first steps. Start a new run with another --out."
                )
            chosen = draw_canaries(config.canary_kind, config.canaries, images)
            run.write_json("private/canaries.json", chosen)
        return read_canaries(run.path)

    return processes.ask(drawn)


def read_canaries(path: Path) -> CanaryInclusion:
    """Those that the run there has drawn."""
    return from_json(CanaryInclusion, read_json(path / "private" / "canaries.json"))


def observe_canaries(canaries: CanaryInclusion, plan: Plan, run: Run | None) -> Observations | None:
    """Where a run keeps what its steps show of gradient canaries."""
    if run is None:
        return None
    return Observations(run.private / "canary_steps.bin", plan.steps, len(canaries))


def note_losses_at_start(
    canaries: CanaryInclusion, train_state: TrainState, inputs: Inputs, run: Run | None
) -> None:
    """Write down, before the first step, what the last will be compared with."""
    if run is not None and train_state.step == 0:
        found = {
            "buffers": hash_buffers(train_state.model),
            "losses": losses(canaries, train_state, inputs),
        }
        run.write_json("private/canary_start.json", found)


def note_losses_at_end(
    canaries: CanaryInclusion, train_state: TrainState, inputs: Inputs, run: Run
) -> None:
    """Write down what has become of the losses."""
    run.write_json("private/canary_end.json", {"losses": losses(canaries, train_state, inputs)})


def hash_buffers(model: nn.Module) -> dict[str, str]:
    """A hash of each buffer that is saved with the model."""
    saved, buffers = model.state_dict(), dict(model.named_buffers())
    return {name: tensor_hash(saved[name]) for name in saved if name in buffers}


def tensor_hash(tensor: Any) -> str:
    """A hash of what a tensor holds."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def losses(canaries: CanaryInclusion, train_state: TrainState, inputs: Inputs) -> list[float]:
    """The loss of each canary image as it is, with the class it was given; none of gradients."""
    if canaries.kind == "gradient":
        return []
    chosen = replace(inputs, images=inputs.images.select(canaries.places))
    logits = logits_of(train_state.best, chosen)
    return F.cross_entropy(logits, torch.tensor(canaries.labels), reduction="none").tolist()
