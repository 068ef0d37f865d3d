"""`sfumato train` with public images and uphill steps: the guarantee is that of a run without."""

import json
from dataclasses import replace

import pytest
import torch
from cuts import cut_in
from safetensors.torch import load_file
from samples import few

from sfumato.cli import main
from sfumato.commands.invert import command as invert
from sfumato.commands.release import command as release
from sfumato.commands.train import command as train
from sfumato.config import to_json
from sfumato.data.embedded import load_digits
from sfumato.errors import ConfigError, DataError, PrivacyError
from sfumato.files import read_lines
from sfumato.privacy.ledger import Ledger
from sfumato.runs import open_run

SMALL = train.Config(
    noise_multiplier=1.0, batch_size=60, steps=4, lr=0.5, noise_seed=1, augmult=2, crop=1
)


def run_train(out, config):
    with open_run(config, verb="train", out=out) as run:
        return train.run(config, run)


def weights(out):
    return load_file(out / "model.safetensors")


@pytest.fixture(scope="module")
def public(tmp_path_factory):
    """Digits turned upside down: nobody's, but of the right size and classes."""
    images = load_digits("train", private=False).select(range(0, 4000, 20))
    images = replace(images, pixels=images.pixels.flip(2))
    return str(images.save_npz(tmp_path_factory.mktemp("public") / "turned.npz"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    out = tmp_path_factory.mktemp("extenders") / "plain"
    return run_train(out, SMALL), weights(out), paid(out)


def paid(out):
    releases = Ledger.from_records(read_lines(out / "ledger.jsonl")).releases
    return [replace(release, tag="", ledger="") for release in releases]


WAYS = {
    "dope": {"extender": "dope"},
    "mirror": {"extender": "mirror"},
    "weight-multiplicity": {"extender": "weight-multiplicity"},
    "uphill": {"sharpness": 0.1},
    "both": {"extender": "dope", "sharpness": 0.1, "precision": "bf16"},
}


MIRROR = {"extender": "mirror", "extender_images": "x"}


def changed(way, public):
    settings = {}
    if "extender" in WAYS[way]:
        settings = {"extender_images": public, "public_batch_size": 16}
    return replace(SMALL, **settings, **WAYS[way])


@few("way", [(way,) for way in WAYS], every=4)
def test_another_model_for_the_same_guarantee_also_after_a_cut(tmp_path, plain, public, way):
    config = changed(way, public)
    summary = run_train(tmp_path / "whole", config)
    assert summary["epsilon"] == plain[0]["epsilon"]
    assert summary["noise_multiplier"] == plain[0]["noise_multiplier"]
    assert paid(tmp_path / "whole") == plain[2]
    moved = [float((weights(tmp_path / "whole")[n] - v).norm()) for n, v in plain[1].items()]
    assert max(moved) > 1e-4
    header = read_lines(tmp_path / "whole" / "ledger.jsonl")[0]["header"]
    assert (f"the images of {public}" in header["public"]) == ("extender" in WAYS[way])

    with cut_in("sfumato.training.fit:TrainState.advance", 2):
        run_train(tmp_path / "cut", config)
    run_train(tmp_path / "cut", config)
    for name, value in weights(tmp_path / "whole").items():
        assert torch.equal(weights(tmp_path / "cut")[name], value)
    assert paid(tmp_path / "cut") == plain[2]


def test_a_head_on_features_has_the_public_gradient_of_the_whole_model(
    tmp_path, public, monkeypatch
):
    config = replace(changed("dope", public), augmult=1, crop=0, train_only="head")
    run_train(tmp_path / "features", config)
    assert "features of" in (tmp_path / "features" / "log.txt").read_text()
    monkeypatch.setattr("sfumato.training.features.free_bytes", lambda device: 0)
    run_train(tmp_path / "whole", config)
    assert "features of" not in (tmp_path / "whole" / "log.txt").read_text()
    for name, value in weights(tmp_path / "features").items():
        torch.testing.assert_close(weights(tmp_path / "whole")[name], value, rtol=1e-4, atol=1e-5)


def test_plain_training_can_be_sharp_as_well(tmp_path):
    config = replace(SMALL, mode="non-private", noise_multiplier=None)
    run_train(tmp_path / "plain", config)
    run_train(tmp_path / "sharp", replace(config, sharpness=0.1))
    one, other = weights(tmp_path / "plain"), weights(tmp_path / "sharp")
    assert any(not torch.allclose(one[name], other[name], atol=1e-4) for name in one)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extender": "dope"}, "add --extender-images"),
        (
            {**MIRROR, "mode": "non-private", "noise_multiplier": None},
            "steps",
        ),
        ({**MIRROR, "explain": True}, "--explain is about the model"),
        ({"extender": "dope", "extender_images": "x", "per_layer": True}, "leave --per-layer out"),
        ({"extender_images": "x"}, "are for an extender"),
        ({"sharpness": -0.1}, "sharpness=-0.1"),
        ({"sharpness": float("nan")}, "sharpness=nan"),
        ({"public_rho": float("inf")}, "public_rho=inf"),
        ({"public_batch_size": 0}, "public_batch_size=0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(SMALL, **changes)


def test_public_images_that_are_private_or_of_other_classes_are_refused(tmp_path, public):
    config = changed("mirror", public)
    with pytest.raises(PrivacyError, match="4000 images are both"):
        run_train(tmp_path / "same", replace(config, extender_images="digits"))
    with pytest.raises(DataError, match="they must be the same, in one order"):
        run_train(tmp_path / "some", replace(config, extender_images=f"{public}@0-4"))


@pytest.mark.parametrize("verb", [release, invert])
def test_a_verb_whose_public_images_are_others_hands_an_extender_on(verb):
    config = verb.Config(epsilon=3.0)
    assert config.train.alone.extender_images is None
    config = replace(config, **MIRROR)
    assert config.public not in (None, "x")
    assert (config.train.alone.extender, config.train.alone.extender_images) == ("mirror", "x")


def test_a_teacher_may_learn_with_an_extender(tmp_path, public):
    config = release.Config(
        noise_multiplier=1.0, batch_size=60, steps=2, model="group-cnn-small", grey=True,
        image_size=28, extender="mirror", extender_images=public, stage="teacher",
    )  # fmt: skip
    with open_run(config, verb="release", out=tmp_path / "run") as run:
        release.run(config, run)
    header = read_lines(tmp_path / "run/stages/teacher/ledger.jsonl")[0]["header"]
    assert f"the images of {public}" in header["public"]


def test_a_run_with_the_setting_of_old_is_refused_in_words(tmp_path, capsys):
    old = to_json(SMALL)
    old["public"] = old.pop("extender_images")
    write = {"verb": "train", "config": old}
    (tmp_path / "config.json").write_text(json.dumps(write))
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--out", str(tmp_path)])
    assert 'unknown setting "public"' in capsys.readouterr().err
