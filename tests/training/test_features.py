"""Features found once give the training of the whole model."""

from dataclasses import replace

import pytest
import timm
import torch
from people import portraits
from safetensors.torch import load_file
from torch import nn

from sfumato.commands.train import command as train
from sfumato.data.augment import Augmentation
from sfumato.errors import UnsupportedLayer
from sfumato.models.scatter import scatter_linear
from sfumato.privacy.sampling import Chunk
from sfumato.runs import open_run
from sfumato.training import features
from sfumato.training.features import with_features
from sfumato.training.inputs import Inputs
from sfumato.training.setup import choose_parameters


def inputs():
    return Inputs(portraits(), torch.device("cpu"), (0.5,), (0.5,))


def test_the_head_reads_features_and_gives_the_models_answers():
    model = timm.create_model("resnet18", num_classes=3, in_chans=1).eval()
    choose_parameters(model, "head")
    head, read = with_features(model, inputs())
    assert [name for name, _ in head.named_parameters()] == ["fc.weight", "fc.bias"]
    chunk = Chunk(torch.tensor([5, 1, 40]), torch.ones(3, dtype=torch.bool))
    found, y = read.tensors(chunk, 0)
    x, wanted_y = inputs().tensors(chunk, 0)
    torch.testing.assert_close(head(found), model(x), rtol=1e-4, atol=1e-4)
    assert torch.equal(y, wanted_y)


def test_what_is_not_a_frozen_body_and_a_head_is_left_alone():
    whole = scatter_linear(3)
    whole(torch.zeros(1, 1, 12, 12))
    moved = replace(inputs(), augmentation=Augmentation(flip=True))
    dropping = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(144, 3))
    after = nn.Sequential(nn.Flatten(), nn.Linear(144, 3), nn.Tanh())
    two = nn.Sequential(nn.Flatten(), nn.Linear(144, 5), nn.Linear(5, 3))
    for model, read in (
        (whole, moved),
        (dropping, inputs()),
        (after, inputs()),
        (two, inputs()),
    ):
        assert with_features(model, read) == (model, read)


def test_training_on_features_is_training_the_model(tmp_path, monkeypatch):
    config = train.Config(
        model="scatter-linear", epsilon=3.0, batch_size=200, steps=3, lr=1.0, noise_seed=1, ema=0.5
    )
    for name in ("cached", "whole"):
        if name == "whole":
            monkeypatch.setattr(features, "with_features", lambda model, inputs, _: (model, inputs))
        with open_run(config, verb="train", out=tmp_path / name) as run:
            train.run(config, run)
    cached, whole = (load_file(tmp_path / n / "model.safetensors") for n in ("cached", "whole"))
    assert cached.keys() == whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(cached[name], value, rtol=1e-4, atol=1e-5)


def test_features_of_a_body_in_bfloat16_are_admitted(tmp_path):
    config = train.Config(
        model="resnet18", image_size=32, norm="frozen", train_only="head", precision="bf16",
        epsilon=3.0, batch_size=40, steps=1,
    )  # fmt: skip
    with open_run(config, verb="train", out=tmp_path / "run") as run:
        train.run(config, run)
    assert "found once" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "resnet18", "image_size": 32, "norm": "keep", "train_only": "head"},
        {"model": "training.test_features:centred"},
    ],
)
def test_a_frozen_body_that_mixes_examples_is_refused(tmp_path, changes):
    config = replace(train.Config(epsilon=3.0, batch_size=40, steps=1), **changes)
    with (
        open_run(config, verb="train", out=tmp_path / "run") as run,
        pytest.raises(UnsupportedLayer, match="mixes the examples"),
    ):
        train.run(config, run)
    assert len(run.ledger_records()) == 1


class Centre(nn.Module):
    def forward(self, x):
        return x - x.mean(dim=0)


def centred(classes):
    return nn.Sequential(nn.Flatten(), Centre(), nn.Linear(784, classes))
