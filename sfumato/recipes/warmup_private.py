"""`sfumato warmup --private`: a generator of private images that keeps a promise.

The denoising loss goes through the same private step as a classifier's (`NoisingReading`), so the
generator's weights, and whatever is drawn with them, are covered by its ledger. A classifier that
learns from drawn images alone shows what they are worth.
"""

import math

from sfumato.recipes import train
from sfumato.recipes.train_learner import new_learner, new_reading
from sfumato.recipes.warmup_scene import Scene
from sfumato.runs import Run


def generator(scene: Scene, stage: Run | None) -> None:
    """A diffusion model of the private images, under a ledger of its own, by all processes."""
    import torch

    from sfumato.recipes.warmup_generator import blueprint_of, make_denoiser, show_samples
    from sfumato.synth.noising import NoisingReading
    from sfumato.synth.sample import draw_images

    settings, world = scene.config.training, scene.world
    half = (0.5,) * scene.private.shape[0]  # pixels from 0 to 1 become -1 to 1
    reading = new_reading(NoisingReading, settings, scene.private, scene.device, (half, half))
    learner = new_learner(settings, make_denoiser(scene), reading)
    secret = train.draw_secret(settings, stage, world)
    plan, ledger = train.promise(settings, reading, secret, stage, world)
    train.learn(settings, learner, reading, plan, ledger, secret, stage, world)
    if stage is None:
        return
    made = learner.best.eval()
    stage.save_tensors("model.safetensors", made.state_dict())
    labels = torch.arange(len(scene.private.classes)).repeat_interleave(8)
    seeds = -1 - torch.arange(len(labels))
    samples = draw_images(
        made, labels, seeds, scene.private.shape, solver="dpm", steps=12, precision=scene.precision
    )
    seen = math.ceil(plan.steps * plan.expected_batch)
    show_samples(scene, stage, seen, samples)
    blueprint_of(scene).keep(stage)
    stage.finish({**train.kept(plan, ledger), "model": "a generator", "run": str(stage.path)})


def evaluate(scene: Scene, stage: Run) -> None:
    """What drawn images teach a classifier, on test images: private, for they are."""
    from sfumato.recipes.warmup_evaluate import (
        fidelity,
        prepare_evaluation,
        score,
        tell_fidelity,
    )

    found, reached = fidelity(scene, prepare_evaluation(scene), stage), score(scene)
    scores = {"drawn": reached, "test_images": len(scene.test), "fidelity": found}
    scene.run.write_json("private/scores.json", scores)
    scene.run.say(f"test accuracy after drawn images alone, for your eyes: {reached:.3f}")
    scene.run.say(f"images, for your eyes: {tell_fidelity(found)}")
    stage.finish({"controls": []})
