"""A generator in a folder is the one that was left there, whatever network it has."""

import json
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from denoisers import StandIn
from warmups import TINY

from sfumato.diffusion.stored_generator import Blueprint, read_stored
from sfumato.errors import ConfigError, RunError
from sfumato.runs import Run

OURS = Blueprint(shape=(3, 8, 8), classes=("cat", "dog"), diffusion=TINY)
KINDS = [
    OURS,
    replace(OURS, told=False),
    replace(OURS, brought="brought_networks:small"),
]


@pytest.fixture(autouse=True)
def brought(monkeypatch):
    module = ModuleType("brought_networks")
    module.small = lambda classes: StandIn(num_class_embeds=classes)
    monkeypatch.setitem(sys.modules, "brought_networks", module)


def leave(blueprint, folder):
    torch.manual_seed(0)
    made = blueprint.new_denoiser().eval()
    Run(folder).save_tensors("model.safetensors", made.state_dict())
    blueprint.keep(Run(folder))
    return made


@pytest.mark.parametrize("blueprint", KINDS)
def test_what_was_left_denoises_as_before(tmp_path, blueprint):
    made = leave(blueprint, tmp_path)
    stored = read_stored(tmp_path, known=blueprint.brought)
    found = stored.denoiser(torch.device("cpu"))
    assert stored.blueprint == blueprint
    noisy, sigma, labels = torch.randn(2, 3, 8, 8), torch.tensor([0.1, 2.0]), torch.tensor([0, 1])
    torch.testing.assert_close(found(noisy, sigma, labels), made(noisy, sigma, labels))
    assert not any(weight.requires_grad for weight in found.parameters())
    assert bool(found.network.conditions) == (blueprint.told and blueprint.brought is None)


def test_a_ledger_beside_the_weights_is_spoken_of(tmp_path):
    (tmp_path / "ledger.jsonl").touch()
    leave(OURS, tmp_path)
    assert read_stored(tmp_path).blueprint.ledger
    assert json.loads((tmp_path / "generator.json").read_text())["classes"] == ["cat", "dog"]


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(RunError, match=r"generator\.json is not there"):
        read_stored(tmp_path)
    leave(OURS, tmp_path)
    with pytest.raises(RunError, match="has no guide"):
        read_stored(tmp_path, tmp_path / "guide").guide(torch.device("cpu"), torch.float32)
    with pytest.raises(ConfigError, match="for images of 3 x 8 x 8"):
        replace(KINDS[-1], shape=(1, 8, 8)).new_denoiser()
