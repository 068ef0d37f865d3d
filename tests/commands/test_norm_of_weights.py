"""Weights go into the network that they are of: GroupNorm is not taken for BatchNorm."""

import json
import shutil
from pathlib import Path

import pytest
import timm
import torch
from audits import few_digits
from finished import forge
from safetensors.torch import load_file, save_file

import sfumato
from sfumato.commands.train import command as train
from sfumato.errors import ConfigError
from sfumato.models.zoo import build_model
from sfumato.runs import open_run

PAGE = Path(__file__).parents[2] / "docs/train.md"


def go(out, data, **options):
    config = train.Config(**{
        "data": str(data), "mode": "non-private", "batch_size": 8, "steps": 1, "lr": 0.5,
        "model": "resnet10t", "image_size": 32, "device": "cpu", **options,
    })  # fmt: skip
    with open_run(config, verb="train", out=out) as run:
        train.run(config, run)
    return out


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return few_digits(tmp_path_factory.mktemp("data") / "digits.npz")


@pytest.fixture(scope="module")
def first(digits, tmp_path_factory):
    """A run from scratch: BatchNorm was replaced by GroupNorm."""
    return go(tmp_path_factory.mktemp("runs") / "first", digits)


@pytest.mark.parametrize("copied", [False, True], ids=["in the run", "a copy of the file alone"])
def test_a_run_is_fine_tuned_with_the_norm_that_it_had(first, digits, tmp_path, copied):
    weights = first / "model.safetensors"
    if copied:
        weights = Path(shutil.copy(weights, tmp_path / "copy.safetensors"))
    out = go(tmp_path / "second", digits, weights=weights, lr=1e-12)
    before, after = sfumato.load_model(first), sfumato.load_model(out)
    assert after.description.norm == "group"
    x = torch.rand(20, 1, 32, 32)
    torch.testing.assert_close(after.network(x), before.network(x))


def test_a_frozen_batch_norm_does_not_do_without_statistics(first, digits, tmp_path):
    save_file(load_file(first / "model.safetensors"), tmp_path / "plain.safetensors")
    for norm in (None, "frozen"):
        with pytest.raises(ConfigError, match=r"running_mean.*--norm group"):
            go(tmp_path / "run", digits, weights=tmp_path / "plain.safetensors", norm=norm)
    with pytest.raises(ConfigError, match="running_mean"):
        build_model(
            "resnet10t", classes=10, shape=(1, 32, 32), weights=tmp_path / "plain.safetensors"
        )


def test_scale_and_shift_of_a_batch_norm_go_into_the_group_norm_in_its_place(digits, tmp_path):
    state = timm.create_model("resnet10t", num_classes=10, in_chans=1).state_dict()
    scale = torch.nn.init.uniform_(state["layer1.0.bn1.weight"], 2, 3)
    save_file(state, tmp_path / "batch.safetensors")
    out = go(
        tmp_path / "run", digits, weights=tmp_path / "batch.safetensors", norm="group", lr=1e-12
    )
    found = sfumato.load_model(out).network.state_dict()
    torch.testing.assert_close(found["layer1.0.bn1.weight"], scale)


def test_a_description_without_groups_is_read_as_before(first, tmp_path):
    folder = shutil.copytree(first, tmp_path / "old")
    made = json.loads((folder / "model.json").read_text())
    assert made.pop("groups")
    forge(folder, model=made)
    x = torch.rand(4, 1, 32, 32)
    old, new = sfumato.load_model(folder).network, sfumato.load_model(first).network
    assert old(x).equal(new(x))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("resnet18", {}),
        ("efficientnet_lite0", {}),
        ("resnet10t", {"norm": "keep"}),
    ],
    ids=["GroupNorm", "GroupNorm that activates", "BatchNorm"],
)
def test_the_network_of_a_run_is_built_without_sfumato_as_the_page_shows(
    model, options, digits, tmp_path, monkeypatch
):
    out = go(tmp_path / "runs/photos", digits, model=model, **options)
    (code,) = [b for b in PAGE.read_text().split("```python\n") if "timm.create_model(made" in b]
    code = code.partition("```")[0]
    assert "sfumato" not in code
    context: dict = {}
    monkeypatch.chdir(tmp_path)
    exec(code, context)
    trained = sfumato.load_model(out)
    x = torch.rand(50, 1, 32, 32)
    torch.testing.assert_close(context["network"](x), trained.network(x))
