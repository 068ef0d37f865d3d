"""`load_model`: what was trained is used, and says what it said when it was scored."""

import json
import shutil
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from audits import few_digits
from PIL import Image
from safetensors.torch import load_file, save_file
from unchecked import unchecked

import sfumato
from sfumato.commands.train import command as train
from sfumato.errors import ConfigError, DataError, RunError
from sfumato.models.zoo import build_model
from sfumato.runs import Run, open_run

load_model = partial(sfumato.load_model, trust_code=True)


def go(out, data, **options):
    config = train.Config(**{
        "data": str(data), "epsilon": 8.0, "batch_size": 60, "steps": 20, "lr": 0.5,
        "model": "audits:small_network", "device": "cpu", **options,
    })  # fmt: skip
    with open_run(config, verb="train", out=out) as run:
        train.run(config, run)
    return out


def accuracy(trained, test):
    named = [prediction.label for prediction in trained.predict(test)]
    right = [name == test.classes[label] for name, label in zip(named, test.labels, strict=True)]
    return sum(right) / len(right)


def scored(out):
    return json.loads((out / "private/scores.json").read_text())["test_accuracy"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return few_digits(tmp_path_factory.mktemp("data") / "digits.npz")


@pytest.fixture(scope="module")
def run(digits, tmp_path_factory):
    return go(tmp_path_factory.mktemp("runs") / "private", digits)


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "copy")


def test_a_loaded_model_says_what_it_was_and_guarantees(run):
    trained = load_model(run)
    assert trained.classes == tuple("0123456789")
    assert trained.image_size == (8, 8)
    assert not trained.network.training
    assert trained.guarantee is not None
    assert 7.9 < trained.guarantee["epsilon"] <= 8
    assert trained.guarantee["unit"] == "example"
    assert trained.guarantee["delta"] == json.loads((run / "done.json").read_text())["delta"]


def test_predictions_are_by_name_and_those_of_the_network(run, digits, tmp_path):
    trained = load_model(run)
    test = sfumato.load_images(digits, "test")
    inputs = trained.preprocess(test)
    assert inputs.equal((test.pixels.float() / 255 - 0.5) / 0.5)
    with torch.no_grad():
        answers = trained.network(inputs)
    assert trained.logits(test).equal(answers)
    path = tmp_path / "digit.png"
    Image.fromarray(test.pixels[0, 0].numpy()).save(path)
    (found,) = trained.predict(path)
    assert found.label == trained.classes[int(answers[0].argmax())]
    assert found.probability == found.probabilities[found.label]
    assert list(found.probabilities) == list(trained.classes)
    assert sum(found.probabilities.values()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ema": 0.9},
        {"precision": "bf16"},
        {"train_only": "head"},
        {"mode": "non-private", "epsilon": None},
        {"model": "group-cnn-small", "steps": 3, "augmult": 2, "crop": 1},
        {"model": "resnet10t", "image_size": 32, "steps": 2},
        pytest.param(
            {"model": "torchvision:resnet18", "steps": 1, "image_size": 32}, marks=pytest.mark.full
        ),
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "plain",
)
def test_what_train_scored_is_what_a_loaded_model_reaches(options, digits, tmp_path):
    if str(options.get("model")).startswith("torchvision"):
        digits = in_colour(digits, tmp_path / "colour.npz")
    out = go(tmp_path / "run", digits, **options)
    test = sfumato.load_images(digits, "test", image_size=options.get("image_size"))
    trained = load_model(out)
    assert accuracy(trained, test) == scored(out)
    assert (trained.guarantee is None) == (options.get("mode") == "non-private")
    saved = load_file(out / "model.safetensors")
    assert all(value.equal(saved[name]) for name, value in trained.network.state_dict().items())


def in_colour(source, path):
    parts = [sfumato.load_images(source, split) for split in ("train", "test")]
    parts = [replace(part, pixels=part.pixels.expand(-1, 3, -1, -1)) for part in parts]
    return parts[0].save_npz(path, parts[1])


def test_a_head_on_frozen_features_needs_the_weights_that_it_began_with_no_more(digits, tmp_path):
    began = build_model("resnet10t", classes=10, shape=(1, 32, 32))
    for name, buffer in began.named_buffers():
        if "running" in name:
            buffer.uniform_(0.5, 1.5)
    save_file(began.state_dict(), tmp_path / "began.safetensors")
    out = go(
        tmp_path / "run", digits, model="resnet10t", image_size=32, train_only="head", steps=3,
        weights=tmp_path / "began.safetensors",
    )  # fmt: skip
    (tmp_path / "began.safetensors").unlink()
    trained = load_model(out)
    assert trained.description.norm == "frozen"
    assert any(isinstance(m, torch.nn.BatchNorm2d) for m in trained.network.modules())
    assert accuracy(trained, sfumato.load_images(digits, "test", image_size=32)) == scored(out)


def test_a_run_its_path_its_weights_or_two_files_of_it_will_do(run, tmp_path):
    whole = load_model(run)
    for name in ("model.json", "model.safetensors"):
        shutil.copy(run / name, tmp_path)
    for given in (Run(run), str(run), run / "model.safetensors", tmp_path):
        trained = load_model(given)
        assert trained.description == whole.description
        assert (trained.guarantee is None) == (given == tmp_path)


def without_model(copy):
    (copy / "model.json").unlink()


def of_another_verb(copy):
    without_model(copy)
    record = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**record, "verb": "audit"}))


def unfinished(copy):
    without_model(copy)
    (copy / "done.json").unlink()


def of_a_generator(copy):
    without_model(copy)
    (copy / "stages/generator").mkdir(parents=True)
    (copy / "stages/generator/generator.json").write_text("{}")


def without_weights(copy):
    (copy / "model.safetensors").unlink()


def with_more_weights(copy):
    state = {**load_file(copy / "model.safetensors"), "4.weight": torch.zeros(3)}
    made = json.loads((copy / "model.json").read_text())
    Run(copy).save_tensors("model.safetensors", state, made=made)


def described(**changes):
    """As if the run had been of another network from the start."""

    def change(copy):
        made = {**json.loads((copy / "model.json").read_text()), **changes}
        (copy / "model.json").write_text(json.dumps(made))
        state = load_file(copy / "model.safetensors")
        Run(copy).save_tensors("model.safetensors", state, made=made)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shutil.rmtree, "there is no such folder"),
        (lambda copy: [file.unlink() for file in copy.glob("*.js*")], "copy is no run"),
        (of_another_verb, "a run of sfumato audit, which leaves no classifier"),
        (unfinished, r"is not finished.* sfumato train --out .*copy goes on with it"),
        (of_a_generator, r"a generator, and no classifier.*warmup draw"),
        (without_model, "an earlier version of sfumato made it"),
        (without_weights, "model.safetensors is missing"),
        (
            described(model="audits:narrow_network"),
            r'first that differs is "1.weight".*Was its code changed since',
        ),
        (with_more_weights, r'first that differs is "4.weight"'),
        (described(model="not_there:network"), r"not_there:network cannot be loaded.*code of your"),
        (described(model="tanh-cn"), r"cannot be built again: no model is called"),
        (described(classes=7), r"model.json cannot be read: .*classes"),
    ],
)
def test_what_is_no_model_is_refused_in_words(change, message, copy):
    change(copy)
    with pytest.raises(RunError, match=message):
        load_model(copy)


def test_a_stage_that_is_no_classifier_says_so(tmp_path):
    (tmp_path / "stages/sample").mkdir(parents=True)
    with pytest.raises(RunError, match="a stage without a classifier"):
        load_model(tmp_path / "stages/sample")


def test_own_code_is_found_where_one_is(run, digits, tmp_path, monkeypatch):
    code = "import audits\n\ndef network(classes):\n    return audits.small_network(classes)\n"
    (tmp_path / "my_networks.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    out = go(tmp_path / "run", digits, model="my_networks:network", steps=1)
    monkeypatch.delitem(sys.modules, "my_networks")
    assert load_model(out).description.model == "my_networks:network"


def test_code_that_a_folder_names_is_run_for_those_who_trust_it_alone(run, tmp_path, monkeypatch):
    copied = tmp_path / "got_by_mail"
    shutil.copytree(run, copied)
    described(model="got_by_mail.evil:network")(copied)
    (copied / "evil.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match=r"code that would be imported and run.*trust_code=True"):
        sfumato.load_model(copied)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("given", [None, 3, 2.5, object()])
def test_what_is_no_run_and_no_image_is_refused_by_what_it_is(given, run):
    with unchecked():
        with pytest.raises(ConfigError, match="load_model"):
            load_model(given)
        trained = load_model(run)
        for call in (trained.predict, trained.logits, trained.preprocess):
            for images in (given, [given]):
                with pytest.raises(DataError, match=type(given).__name__):
                    call(images)


@pytest.mark.parametrize("given", ["~nobody-of-this-name/x", "x" * 5000, "a\0b"])
def test_a_path_that_cannot_be_is_refused_in_words(given, run):
    with pytest.raises(RunError):
        load_model(given)
    with pytest.raises(DataError):
        load_model(run).predict(given)


def test_images_without_pixels_are_refused_and_others_are_cut_in_silence(run):
    trained = load_model(run)
    for shape in ((0, 1, 28, 28), (1, 0, 0), (0, 28, 28)):
        with pytest.raises(DataError):
            trained.predict(torch.zeros(shape, dtype=torch.uint8))
    assert len(trained.predict(torch.zeros(1, 40, 30, dtype=torch.uint8))) == 1  # no warning
