"""Whatever takes minutes says how far it is, every few seconds."""

from itertools import count
from types import SimpleNamespace

import pytest
import torch
from gan_tasks import new_lesson, small_gan
from torch import nn
from toy_target import access_to_toy, some_images

from sfumato.attacks.gan_training import train_gan
from sfumato.attacks.inversion_loss import InversionLoss
from sfumato.attacks.latent_search import Search, search_codes
from sfumato.attacks.random_views import Views
from sfumato.attacks.shadow_models import train_copies
from sfumato.runs import Run
from sfumato.training import progress
from sfumato.training.plain import inputs_of, train_plainly
from sfumato.training.plain_step import plain_step


@pytest.fixture(autouse=True)
def slow(monkeypatch):
    """Every look at the clock finds it ten seconds later."""
    clock = count(step=10)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))


def linear():
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(3))


def read():
    model, images = linear(), some_images()
    model(images.pixels.float())
    return model, inputs_of(model, images, torch.device("cpu"))


def judge(run):
    model, inputs = read()
    step = plain_step(model, inputs)
    train_plainly(model, 12, step, run, epochs=3, lr=0.01, batch_size=12)


def gan(run):
    task = new_lesson()
    train_gan(small_gan(task), task, run, seed=0)


def search(run):
    def draw(codes, labels):
        return codes.sigmoid().reshape(-1, 1, 8, 8)

    search_codes(
        draw,
        lambda n, rng: torch.randn(n, 64, generator=rng),
        access_to_toy(),
        InversionLoss(),
        Views(),
        Search(restarts=2, z_steps=2, z_batch=3),
        say=run.say,
    )


def shadows(run):
    model, inputs = read()

    def optimize(tensors):
        rule = torch.optim.SGD(list(tensors), lr=0.1)
        return rule, torch.optim.lr_scheduler.ConstantLR(rule)

    batches = torch.zeros(2, 3, 4, dtype=torch.int64)
    train_copies([model, model], inputs, batches, optimize, say=run.say)


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (judge, ["step 1/3", "step 2/3", "step 3/3"]),
        # At each third one it looks, and says so.
        (gan, [f"iteration {k}/9" for k in (1, 2, 4, 5, 7, 8)]),
        (search, [f"step {k}/4" for k in (1, 2, 3, 4)]),
        (shadows, ["step 1/3", "step 2/3", "step 3/3"]),
    ],
)
def test_work_that_may_take_minutes_says_how_far_it_is(work, words, tmp_path):
    said = []
    work(Run(tmp_path, said.append))
    assert [line.partition("  ")[0] for line in said] == words
    assert all("s left" in line for line in said)
