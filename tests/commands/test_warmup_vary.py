"""Images drawn from public ones under noise: whose they are, and what cannot be varied."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from warmups import tiny, warm

from sfumato.cli import parse
from sfumato.commands.warmup.draw import in_turn
from sfumato.data.load import load_images
from sfumato.errors import ConfigError
from sfumato.settings.warmup import Warmup as Config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run whose images were drawn with next to no noise, and with much."""
    folder = tmp_path_factory.mktemp("varied")
    config = tiny(folder, number=100, stage="sample")
    for vary in (0.01, 2.0):
        warm(replace(config, vary=vary), folder / str(vary))
    return folder


def images_of(run, name):
    return load_images(str(run / name), "train", private=False)


def test_with_little_noise_they_are_the_public_images_of_each_class_in_turn(folder):
    run = folder / "0.01"
    public, drawn = (images_of(run, f"stages/{n}.npz") for n in ("split/public", "sample/images"))
    assert drawn.labels.tolist() == [n % 3 for n in range(100)]
    places = in_turn(public, torch.arange(100))
    assert torch.equal(public.labels[places], drawn.labels)
    assert (drawn.pixels.int() - public.pixels[places].int()).abs().max() < 12
    assert len(set(places.tolist())) == min(100, len(public)), "each of them has its turn"


def test_with_much_noise_they_are_others_and_two_of_one_image_differ(folder):
    run = folder / "2.0"
    public, drawn = (images_of(run, f"stages/{n}.npz") for n in ("split/public", "sample/images"))
    places = in_turn(public, torch.arange(100))
    apart = (drawn.pixels.float() - public.pixels[places].float()).abs().mean(dim=(1, 2, 3))
    assert apart.min() > 10
    first = {}
    for number, place in enumerate(places.tolist()):
        other = first.setdefault(place, number)
        assert other == number or not torch.equal(drawn.pixels[other], drawn.pixels[number])
    assert len(first) < 100


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vary": 0.001}, "vary=0.001 must be 0, or between 0.01 and 80"),
        ({"vary": -1.0}, "vary=-1 must be 0, or"),
        ({"vary": float("nan")}, "vary=nan must be 0, or"),
        ({"vary": 1.0, "number": 0}, "--vary: .*--number 0"),
        ({"vary": 1.0, "samples": Path("x.npz")}, "--vary: .*--samples"),
        (
            {"vary": 1.0, "private": True, "public_share": None},
            "--vary: without meaning beside --private",
        ),
    ],
)
def test_what_cannot_be_varied_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        Config(**{"public_share": 0.1, "epsilon": 1.0, "steps": 3, **changes})


def test_a_run_that_is_drawn_from_keeps_its_public_images_to_itself(folder):
    with pytest.raises(
        ConfigError, match="--vary is for sfumato warmup, not for sfumato warmup draw"
    ):
        parse("warmup", ["draw", str(folder / "2.0"), "--vary", "1.0"])
