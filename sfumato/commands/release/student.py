"""The student of `sfumato release`: a network that has seen the bundle and nothing else."""

from dataclasses import replace

import torch
from torch import nn

from sfumato.commands.release.context import Context, finished_book
from sfumato.data.images import Images
from sfumato.models.zoo import build_model, load_weights
from sfumato.runs import Run
from sfumato.sharing.bundle import read_bundle
from sfumato.training.distil import Answers, cached, distil_step
from sfumato.training.inputs import Inputs
from sfumato.training.plain import inputs_of, train_plainly
from sfumato.training.plain_step import plain_step
from sfumato.training.setup import move_to_device
from sfumato.training.trained_model import Description

FEW_STEPS = 300
"""Below this a student is warned of: batches are too large for so few images."""


def student(context: Context, stage: Run) -> None:
    """Train it on the bundle, as anybody could who was handed it."""
    images, logits, _, _ = read_bundle(context.run.path / "bundle")
    model, inputs = new_student(context, images)
    distil(context, model, inputs, cached(logits.to(context.device)), stage)
    guarantee = finished_book(context).guarantee()
    made = Description.of(
        inputs, model, name=context.student, norm="keep", centre_crop=context.config.centre_crop
    )
    made.keep(stage, model, guarantee)
    stage.finish({"student": context.student, "images": len(images)})


def new_student(context: Context, images: Images) -> tuple[nn.Module, Inputs]:
    """A student at its start, and how it reads images: on a GPU in bf16, for nothing is private."""
    seed = context.config.seed
    torch.manual_seed(seed)
    model = build_model(context.student, classes=len(images.classes), shape=images.shape)
    model = move_to_device(model, context.device)
    return model, inputs_of(model, images, context.device, seed=seed, precision=context.precision)


def distil(
    context: Context, model: nn.Module, inputs: Inputs, answers: Answers | None, stage: Run
) -> nn.Module:
    """Train a student on answers, or on labels where there are none."""
    config = context.config
    steps = round(config.student_epochs * len(inputs.images) / config.student_batch)
    if steps < FEW_STEPS:
        context.run.log(
            f"a student of {steps} steps learns little: lower --student-batch, or raise "
            "--student-epochs"
        )
    if answers is None:
        step = plain_step(model, inputs)
    else:
        step = distil_step(model, inputs, answers, temperature=config.temperature)
    return train_plainly(
        model,
        len(inputs.images),
        step,
        stage,
        epochs=config.student_epochs,
        lr=config.student_lr,
        batch_size=config.student_batch,
        weight_decay=1e-4,
        warmup=20,
        seed=config.seed,
    )


def trained_student(context: Context) -> tuple[nn.Module, Inputs]:
    """The student, and how it reads test images."""
    model, inputs = new_student(context, context.test)
    load_weights(model, context.run.stage("student").path / "model.safetensors")
    return model.eval(), replace(inputs, images=context.test.to(context.device))
