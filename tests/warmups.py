"""Small warm-ups: three digits of 16 pixels, a third of them public, a generator of a few steps."""

import json
from dataclasses import replace

import pytest
from contents import content
from inversions import save

from sfumato.commands.warmup import command as warmup
from sfumato.commands.warmup.command import Config
from sfumato.runs import open_run
from sfumato.settings.diffusion import Diffusion

TINY = Diffusion(
    gen_width=8, gen_multipliers=(1,), gen_blocks=1, gen_images=96, gen_batch=16, gen_ramp=16,
    gen_half_life=32, gen_mirror=False, gen_looks=3, gen_patience=0, gen_held_out=0.2,
)  # fmt: skip

MADE = (
    "stages/split/public.npz", "stages/generator/model.safetensors", "stages/sample/images.npz",
    "stages/warmup/model.safetensors", "stages/train/model.safetensors",
)  # fmt: skip


def tiny(folder, **changes):
    """Settings of a warm-up that takes seconds; its images are written to the folder."""
    config = Config(
        data=save(folder / "digits.npz", "0-2"), public_share=0.3, device="cpu",
        model="group-cnn-small", epsilon=8.0, batch_size=40, steps=3, lr=0.2, noise_seed=3,
        physical_batch_size=64, number=30, solver="dpm", sample_steps=4, warm_epochs=2.0,
        warm_batch=16, warm_lr=0.05, warm_rho=0.05, warm_cutout=4, crop=1, diffusion=TINY,
    )  # fmt: skip
    return replace(config, **changes)


def warm(config, out):
    with pytest.MonkeyPatch.context() as patch:
        # Copies among the samples that are shown, and no more: that is quick.
        patch.setattr("sfumato.diffusion.generator_data.ENOUGH", 0)
        with open_run(config, verb="warmup", out=out) as run:
            return warmup.run(config, run)


def scores_of(out):
    return json.loads((out / "private" / "scores.json").read_text())


def same(out, other, names=MADE):
    """Which of these files are equal, byte by byte."""
    return {name: content(out / name) == content(other / name) for name in names}
