"""`sfumato warmup --private`: a generator of private images that keeps a guarantee.

The denoising loss goes through the same private step as a classifier's (`NoisingInputs`), so the
generator's weights, and whatever is drawn with them, are covered by its ledger. A classifier that
learns from drawn images alone shows what they are worth.
"""

import math

import torch
from torch import nn

from sfumato.commands.train import command as train
from sfumato.commands.train.privacy_setup import guarantee_summary, open_ledger, plan_for
from sfumato.commands.train.train_state import make_inputs, make_train_state
from sfumato.commands.warmup.context import Context
from sfumato.commands.warmup.evaluate import (
    fidelity,
    log_fidelity,
    prepare_evaluation,
    score_weights,
)
from sfumato.commands.warmup.generator import blueprint_of, make_denoiser, show_samples
from sfumato.data.fingerprint import require_same_data
from sfumato.diffusion.denoising_inputs import NoisingInputs
from sfumato.diffusion.generator_data import SHOWN
from sfumato.diffusion.sampler import draw_images
from sfumato.reporting.scores import keep_scores
from sfumato.runs import Run


def private_generator(context: Context, stage: Run | None) -> None:
    """A diffusion model of the private images, under a ledger of its own, by all processes."""
    settings, processes = context.config.training, context.processes
    processes.ask(lambda: require_same_data(context.private, stage))
    half = (0.5,) * context.private.shape[0]  # pixels from 0 to 1 become -1 to 1
    inputs = make_inputs(NoisingInputs, settings, context.private, context.device, (half, half))
    train_state = make_train_state(settings, make_denoiser(context), inputs)
    planned = plan_for(settings, len(inputs))
    paid = open_ledger(settings, inputs, stage, processes, planned)
    plan = paid.plan
    every = math.ceil(plan.steps / context.config.diffusion.gen_looks)

    def look(done: int) -> None:
        if not done % every and done < plan.steps:
            save_progress_picture(
                context, stage, math.ceil(done * plan.expected_batch), train_state.best
            )

    train.train_model(settings, train_state, inputs, paid, stage, processes, look=look)
    if stage is None:
        return
    save_progress_picture(
        context, stage, math.ceil(plan.steps * plan.expected_batch), train_state.best
    )
    state, guarantee = train_state.best.state_dict(), guarantee_summary(paid)
    stage.save_tensors("model.safetensors", state, paid.ledger.guarantee())
    blueprint_of(context).keep(stage)
    stage.finish({**guarantee, "model": "a generator", "run": str(stage.path)})


def save_progress_picture(context: Context, stage: Run | None, seen: int, made: nn.Module) -> None:
    """A picture of what the generator draws after about this many images.

    Its weights are paid for by then, and nothing else is looked at.
    """
    labels = torch.arange(len(context.private.classes)).repeat_interleave(SHOWN)
    seeds = -1 - torch.arange(len(labels))
    samples = draw_images(
        made,
        labels,
        seeds,
        context.private.shape,
        solver="dpm",
        steps=12,
        precision=context.precision,
    )
    show_samples(context, stage, seen, samples)


def evaluate_drawn_images(context: Context, stage: Run) -> None:
    """What drawn images teach a classifier, on test images: private, for they are."""
    found, reached = fidelity(context, prepare_evaluation(context)), score_weights(context)
    scores = {"drawn": reached, "test_images": len(context.test), "fidelity": found}
    keep_scores(context.run, "warmup", scores)
    context.run.say(f"test accuracy after drawn images alone (private): {reached:.3f}")
    context.run.say(f"images (private): {log_fidelity(found)}")
    stage.finish({"controls": []})
