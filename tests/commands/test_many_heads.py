"""Networks with several answers: only the first is trained."""

import pytest
import torch
from torch import nn

import sfumato
from sfumato.commands.train import command as train
from sfumato.data.images import Images
from sfumato.errors import ConfigError
from sfumato.runs import open_run


@pytest.fixture
def photos(tmp_path):
    labels = torch.arange(8) % 2
    pixels = torch.randint(0, 256, (8, 3, 8, 8), generator=torch.Generator().manual_seed(0))
    images = Images(
        pixels=pixels.to(torch.uint8), labels=labels, classes=("cat", "dog"), name="photos",
        private=True,
    )  # fmt: skip
    return images.save_npz(tmp_path / "photos.npz", images)


def go(photos, out, **options):
    config = train.Config(
        data=str(photos), epsilon=8.0, batch_size=2, steps=1, train_only="bias", device="cpu",
        **options,
    )  # fmt: skip
    with open_run(config, verb="train", out=out) as run:
        train.run(config, run)
    return sfumato.load_model(out, trust_code=True)


@pytest.mark.parametrize(
    ("name", "size"), [("googlenet", 32), pytest.param("inception_v3", 75, marks=pytest.mark.full)]
)
def test_a_network_of_torchvision_with_auxiliary_heads_takes_a_private_step(
    name, size, photos, tmp_path
):
    trained = go(photos, tmp_path / "run", model=f"torchvision:{name}", image_size=size)
    assert trained.guarantee is not None
    assert trained.logits(torch.zeros(1, 3, 8, 8, dtype=torch.uint8)).shape == (1, 2)


class TwoAnswers(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.head = nn.Linear(3 * 8 * 8, classes)

    def forward(self, x):
        answer = self.head(x.flatten(1))
        return (answer, answer) if self.training else answer


def test_a_network_that_answers_otherwise_in_training_is_refused(photos, tmp_path, monkeypatch):
    import gan_tasks

    monkeypatch.setattr(gan_tasks, "two_answers", TwoAnswers, raising=False)
    with pytest.raises(ConfigError, match="tuple"):
        go(photos, tmp_path / "run", model="gan_tasks:two_answers")
