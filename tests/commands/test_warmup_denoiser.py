"""sfumato warmup --denoiser: a network of diffusers draws, and one that does not fit is refused."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from cuts import cut_in
from warmups import MADE, same, tiny, warm

from sfumato.data.load import load_images
from sfumato.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs/warmup.md"


@pytest.fixture(scope="module", name="settings")
def settings_for_8_pixels(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("sets"), image_size=8, stage="sample")


def draws_and_goes_on(settings, folder):
    """Draw images in one go and again after a cut: both must be the same."""
    warm(settings, folder / "whole")
    drawn = load_images(str(folder / "whole" / MADE[2]), "train", private=False)
    assert drawn.shape == (1, 8, 8)
    assert len(drawn.pixels.flatten(1).unique(dim=0)) == settings.number
    with cut_in("sfumato.diffusion.generator:accumulate_gradient", 3):
        warm(settings, folder / "cut")
    warm(settings, folder / "cut")
    assert all(same(folder / "cut", folder / "whole", MADE[:3]).values())


def test_what_is_called_like_a_network_of_diffusers_draws(settings, tmp_path):
    draws_and_goes_on(replace(settings, denoiser="denoisers:grey"), tmp_path)


def test_the_unet_of_diffusers_in_the_docs_draws(settings, tmp_path, monkeypatch):
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    (example,) = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "nets_of_the_docs.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    draws_and_goes_on(replace(settings, denoiser="nets_of_the_docs:small"), tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("colour", "for images of 3 x 8 x 8, and was given images of 1 x 8 x 8"),
        ("of_two_classes", "knows 2 classes, and the images have 3"),
        ("plain", "Conv2d does not say in a config"),
        ("missing", "denoisers:missing cannot be loaded"),
        ("needs_a_package", "denoisers:needs_a_package .* ModuleNotFoundError: No module named"),
        ("breaks", "fails: RuntimeError: 16 channels are no 5 groups"),
    ],
)
def test_a_denoiser_that_does_not_fit_is_refused_before_anything(settings, tmp_path, name, message):
    with pytest.raises(ConfigError, match=message):
        warm(replace(settings, denoiser=f"denoisers:{name}"), tmp_path / "run")
    assert not (tmp_path / "run/stages").exists()
