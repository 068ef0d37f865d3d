"""What sfumato warmup refuses, and how it says so: shares, settings, stages, private images."""

from dataclasses import replace

import pytest
from warmups import tiny, warm
from whole_runs import fixtures

from sfumato.cli import main
from sfumato.commands.warmup import generator as warmup_generator
from sfumato.commands.warmup.context import make_context
from sfumato.errors import ConfigError, DataError, PrivacyError
from sfumato.runs import open_run
from sfumato.settings.diffusion import Diffusion
from sfumato.settings.warmup import PRESETS

settings, _ = fixtures(tiny, warm)


def test_a_share_that_leaves_a_class_empty_is_refused(settings, tmp_path):
    with pytest.raises(DataError, match="Raise the share"):
        warm(replace(settings, public_share=0.005), tmp_path / "run")
    with pytest.raises(DataError, match="Lower the share"):
        warm(replace(settings, public_share=0.999), tmp_path / "run")
    assert not (tmp_path / "run/stages").exists()


def test_nobody_is_public_by_default(settings, capsys):
    with pytest.raises(PrivacyError, match=r"people.*--public-share.*--public-images.*--private"):
        replace(settings, public_share=None)
    with pytest.raises(SystemExit) as stopped:
        main(["warmup", "split", "--data", settings.data])
    assert stopped.value.code == 2
    assert "decision about people" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("share", [0.0, 1.0, float("nan")])
def test_a_share_is_some_and_not_all(settings, share):
    with pytest.raises(ConfigError, match="must lie between 0 and 1"):
        replace(settings, public_share=share)


def test_a_share_of_which_nothing_can_be_held_out_is_refused(settings, tmp_path):
    few = replace(settings, diffusion=replace(settings.diffusion, gen_held_out=0.001))
    for stage in ("all", "split"):  # there already: a split that was made is kept
        with pytest.raises(DataError, match=r"--gen-held-out 0\.001.* Raise --public-share"):
            warm(replace(few, stage=stage), tmp_path / stage)
        assert not (tmp_path / stage / "stages").exists()
    assert warm(replace(few, stage="split", number=0), tmp_path / "none")["public"] > 0


def test_a_network_is_built_when_a_stage_that_needs_it_is_asked_for(settings, tmp_path):
    small = replace(settings, image_size=8, model="tanh-cnn", epsilon=None, stage="generator")
    assert warm(small, tmp_path / "run")["images_seen"] == 96
    for config in (replace(small, stage="warmup"), replace(small, stage="all", epsilon=8.0)):
        with pytest.raises(ConfigError, match="does not take images"):
            warm(config, tmp_path / "other")
        assert not (tmp_path / "other/stages").exists()


def test_a_later_stage_is_checked_though_an_earlier_one_is_there(settings, tmp_path):
    small = replace(settings, image_size=8, model="tanh-cnn", epsilon=None, stage="split")
    for stage in ("split", "generator"):
        warm(replace(small, stage=stage), tmp_path / "run")
    with pytest.raises(ConfigError, match="does not take images"):
        warm(replace(small, stage="warmup"), tmp_path / "run")
    assert not (tmp_path / "run/stages/sample").exists()


def test_private_images_never_reach_the_generator(settings, tmp_path):
    with open_run(settings, verb="warmup", out=tmp_path / "run") as run:
        context = make_context(settings, run)
        with pytest.raises(PrivacyError, match="which is private"):
            warmup_generator.generator_data_of(replace(context, public=context.private))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_sound(name):
    config = PRESETS[name]()
    assert config.training.epsilon == config.epsilon
    assert PRESETS[name].__doc__


@pytest.mark.parametrize(
    "change",
    [
        {"gen_half_life": 0}, {"gen_lr": -1.0}, {"gen_lr": float("nan")}, {"gen_dropout": 2.0},
        {"gen_multipliers": (0,)}, {"gen_multipliers": ()}, {"gen_moves": 2.0}, {"gen_ramp": -1},
        {"gen_patience": -1}, {"gen_held_out": 1.0}, {"gen_batch": 0},
    ],
)  # fmt: skip
def test_settings_of_the_generator_are_checked_by_their_names(settings, change):
    (name,) = change
    with pytest.raises(ConfigError, match=name):
        replace(settings.diffusion, **change)


def test_images_to_draw_are_at_least_one_of_each_class(settings, tmp_path):
    with pytest.raises(ConfigError, match="each of 3 classes"):
        warm(replace(settings, number=2), tmp_path / "run")
    with pytest.raises(ConfigError, match="sample_steps=1 must be at least 2"):
        replace(settings, sample_steps=1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"warm_repeats": 0}, "at least 1"), ({"warm_colour": 1.5}, "between 0 and 1"),
        ({"warm_affine": -0.1}, "between 0 and 1"), ({"warm_affine": float("nan")}, "between"),
    ],
)  # fmt: skip
def test_settings_of_the_warm_up_are_checked_by_their_names(settings, change, words):
    (name,) = change
    with pytest.raises(ConfigError, match=f"{name}=.*{words}"):
        replace(settings, **change)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stage": "sample"}, "no stage sample"), ({"extender": "dope"}, "--extender"),
        ({"warm_repeats": 2}, "--warm-repeats"),
        ({"guide_weight": 1.0}, "--guide-weight"), ({"denoiser": "nets:small"}, "--denoiser"),
        (
            {"private": True, "public_share": None, "crop": 0, "diffusion": Diffusion()},
            "--private",
        ),
    ],
)  # fmt: skip
def test_what_needs_drawn_images_is_refused_where_none_are_drawn(settings, changes, words):
    with pytest.raises(ConfigError, match=words):
        replace(settings, number=0, **changes)
