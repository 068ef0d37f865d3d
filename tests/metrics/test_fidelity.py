"""Images are compared in the features of a network whose name says all of it."""

from dataclasses import replace

import pytest
import torch
from inversions import digits
from safetensors.torch import save_file

from sfumato.errors import ConfigError
from sfumato.metrics.fidelity import FEWEST, compare_sets, named_extractor, thin_images
from sfumato.models.zoo import build_model

CPU = torch.device("cpu")
NETWORK = "mobilenetv3_small_050"


def noise_like(images):
    pixels = torch.randint(0, 256, images.pixels.shape, dtype=torch.uint8)
    return replace(images, pixels=pixels, name="noise")


@pytest.fixture(scope="module", name="weights")
def weights_in_a_file(tmp_path_factory):
    torch.manual_seed(0)
    made = build_model(NETWORK, classes=5, shape=(3, 32, 32))
    path = tmp_path_factory.mktemp("weights") / "mine.safetensors"
    save_file({name: value.contiguous() for name, value in made.state_dict().items()}, path)
    return path


@pytest.fixture(name="small")
def published_for_32_pixels(monkeypatch):
    """As if the network had been trained on small images: this is about names, not about time."""
    monkeypatch.setattr("sfumato.metrics.fidelity.wanted_size", lambda name: 32)


def test_fixed_features_tell_the_same_source_from_noise():
    real, more = digits("0-2", "test", 20), digits("0-2", "train", 20)
    extractor = named_extractor("scattering", None, real.shape)
    sets = {"itself": real, "more": more, "noise": noise_like(real)}
    found = compare_sets(extractor, real, sets, CPU)
    assert "scattering" in found["features"]
    assert found["itself"]["frechet"] == pytest.approx(0, abs=1e-6)
    assert found["itself"]["precision"] == found["itself"]["recall"] == 1
    assert 0.01 < found["more"]["frechet"] < 0.2 * found["noise"]["frechet"]
    assert found["noise"]["coverage"] < 0.1 < 0.7 < found["more"]["coverage"]


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (3, 28, 20), (4, 5, 5)])
def test_fixed_features_are_81_numbers_a_channel_and_quarter(shape):
    grey = digits("0-2", "test", 3)
    images = replace(grey, pixels=torch.randint(0, 256, (9, *shape), dtype=torch.uint8))
    found = named_extractor("scattering", None, shape).features(images, CPU)
    assert found.shape == (9, 81 * 4 * shape[0])
    assert found.isfinite().all()


def test_at_most_so_many_images_of_a_set_are_compared():
    real = digits("0-2", "test", 20)
    extractor = named_extractor("scattering", None, real.shape)
    found = compare_sets(extractor, real, {"all": real, "few": thin_images(real, 12)}, CPU, most=30)
    counts = {name: (found[name]["real_count"], found[name]["made_count"]) for name in sorted(found)
              if name != "features"}  # fmt: skip
    assert counts == {"all": (30, 30), "few": (30, 12)}
    assert thin_images(real, 30).labels.bincount().tolist() == [10, 10, 10]


def test_a_network_is_known_by_name_size_and_the_hash_of_its_weights(weights, small, tmp_path):
    extractor = named_extractor(NETWORK, weights, (1, 16, 16))
    assert extractor.name.startswith(
        f"last layer but one of {NETWORK}, weights of mine.safetensors"
    )
    assert extractor.name.endswith("images of 32 pixels")
    torch.manual_seed(1)
    other = build_model(NETWORK, classes=5, shape=(3, 32, 32)).state_dict()
    (tmp_path / "other").mkdir()
    path = tmp_path / "other" / weights.name
    save_file({name: value.contiguous() for name, value in other.items()}, path)
    assert named_extractor(NETWORK, path, (1, 16, 16)).name != extractor.name


def test_grey_images_are_shown_to_a_network_of_three_channels_three_times(weights, small):
    grey = digits("0-2", "test", 3)
    extractor = named_extractor(NETWORK, weights, grey.shape)
    colour = replace(grey, pixels=grey.pixels.repeat(1, 3, 1, 1))
    found = extractor.features(grey, CPU)
    assert len(found) == 9
    assert found.var(dim=0).max() > 0
    torch.testing.assert_close(found, extractor.features(colour, CPU))


def test_a_model_of_ours_is_shown_images_as_they_are(tmp_path):
    grey = digits("0-2", "test", 3)
    made = build_model("group-cnn-small", classes=3, shape=grey.shape)
    save_file(made.state_dict(), tmp_path / "model.safetensors")
    extractor = named_extractor("group-cnn-small", tmp_path / "model.safetensors", grey.shape)
    assert extractor.size is None
    assert extractor.features(grey, CPU).shape[0] == 9


def test_an_extractor_that_cannot_be_had_is_refused_with_what_to_do(tmp_path, weights, monkeypatch):
    with pytest.raises(ConfigError, match="have no weights: leave --extractor-weights out"):
        named_extractor("scattering", weights, (1, 8, 8))
    with pytest.raises(ConfigError, match=r"--extractor resnet19: .* Did you mean"):
        named_extractor("resnet19", None, (1, 8, 8))
    with pytest.raises(ConfigError, match="Give --extractor-weights FILE"):
        named_extractor("wrn-16-4", None, (1, 8, 8))
    with pytest.raises(ConfigError, match=f"--extractor {NETWORK}: there is no file"):
        named_extractor(NETWORK, tmp_path / "none.safetensors", (1, 8, 8))
    with pytest.raises(ConfigError, match="these have 4"):
        named_extractor(NETWORK, weights, (4, 8, 8))

    def fails(*_, **options):
        raise OSError if options["pretrained"] else AssertionError

    monkeypatch.setattr("timm.create_model", fails)
    with pytest.raises(ConfigError, match=r"could not be fetched .* --extractor-weights"):
        named_extractor(NETWORK, None, (1, 8, 8))


def test_nothing_here_is_called_by_a_name_that_belongs_to_another_network():
    real = digits("0-2", "test", 5)
    extractor = named_extractor("scattering", None, real.shape)
    found = compare_sets(extractor, real, {"itself": real}, CPU)
    assert not {"fid", "kid"} & {name.lower() for name in found["itself"]}


def test_fewer_images_than_a_ball_needs_are_refused_and_as_many_are_not():
    real = digits("0-2", "test", 5)
    extractor = named_extractor("scattering", None, real.shape)
    few, enough = (real.select(range(FEWEST - less)) for less in (1, 0))
    with pytest.raises(ConfigError, match="Give more images"):
        compare_sets(extractor, few, {"itself": few}, CPU)
    compare_sets(extractor, enough, {"itself": enough}, CPU)
