"""Defects of private_vision (D) and fastDP (F) around the layers: loop, optimizer, statistics.

One test a defect, by its number. What D26 and F12 ask for besides is tested elsewhere: several
processes in training/test_world.py, guarantees to persons in training/test_people.py, compilation
in clipping/test_clip.py.
"""

import threading
import tomllib
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from loops import attached, dataset, engine_for, losses, net, repeatable
from oracle import compare, largest_contribution, norms_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from sfumato.clipping.admit import one_at_a_time
from sfumato.clipping.clip import GradientClipper
from sfumato.clipping.factors import Clipping, clip_factors
from sfumato.data.images import Images
from sfumato.errors import ConfigError
from sfumato.privacy.ledger import Ledger, LedgerHeader
from sfumato.privacy.sampling import Batch, Chunk
from sfumato.privacy.session_key import SessionKey
from sfumato.training.inputs import Inputs
from sfumato.training.plain_step import plain_step
from sfumato.training.private_step import PrivacyContext, private_step

pytestmark = pytest.mark.filterwarnings("ignore:these batches do not come")


def digits(n=12):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (n, 1, 8, 8), generator=generator, dtype=torch.uint8)
    labels = torch.arange(n) % 3
    return Images(pixels=pixels, labels=labels, classes=("a", "b", "c"), name="toy", private=True)


def batch_of(n, chunk_size):
    parts = torch.arange(n).split(chunk_size)
    return Batch(0, tuple(Chunk(part, torch.ones(len(part), dtype=torch.bool)) for part in parts))


@pytest.mark.parametrize("mode", [{"ghost_clipping": True}, {"ghost_clipping": False}])
def test_d13_the_optimizer_answers_with_epsilon_and_clip_statistics(mode):
    model, optimizer, engine = attached(**mode)
    x, y = dataset()[:12]
    optimizer.step(loss=losses(model, x, y))
    assert optimizer.get_privacy_spent() == engine.get_privacy_spent()
    assert optimizer.get_privacy_spent()["epsilon"] > 0
    norms = norms_of(one_at_a_time(net(), losses, (x, y)))
    factors = clip_factors(norms, 0.1, "vanilla", 0.01)
    found = optimizer.get_training_stats()
    assert found["min_clip"] == pytest.approx(float(factors.min()), rel=1e-4)
    assert found["max_clip"] == pytest.approx(float(factors.max()), rel=1e-4)


def test_d14_accumulated_micro_batches_are_one_logical_batch_from_the_first_on():
    def train(micro):
        model, optimizer, engine = attached(**repeatable())
        for start in range(0, 36, micro):
            loss = losses(model, *dataset()[start : start + micro])
            complete = (start + micro) % 12 == 0
            (optimizer.step if complete else optimizer.virtual_step)(loss=loss)
        assert engine.taken == 3
        return model[3].weight.detach()

    torch.testing.assert_close(train(3), train(12), rtol=1e-4, atol=1e-6)


def test_d14_a_loader_left_in_the_middle_of_a_batch_adds_no_example_twice():
    def train(leave):
        model, optimizer, engine = attached(epochs=None, steps=1, **repeatable())
        if leave:
            x, y = next(engine.loader(dataset(), physical_batch_size=3))
            optimizer.step(loss=losses(model, x, y))
        assert engine.taken == 0
        for x, y in engine.loader(dataset(), physical_batch_size=3):
            optimizer.step(loss=losses(model, x, y))
        return model[3].weight.detach()

    torch.testing.assert_close(train(leave=True), train(leave=False), rtol=1e-4, atol=1e-6)


def test_d15_plain_training_in_micro_batches_has_the_mean_gradient():
    model, images = net(), digits()
    inputs = Inputs(images, torch.device("cpu"), (0.5,), (0.5,))
    plain_step(model, inputs)(batch_of(12, 5))
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    x, y = inputs.tensors(batch_of(12, 12).chunks[0], 0)
    losses(model, x, y).mean().backward()
    for one, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.other, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 3)
        self.other.weight = self.layer.weight

    def forward(self, x):
        return self.head(self.other(self.layer(x.flatten(1)).tanh()))


def test_d16_shared_parameters_train_and_zero_grad_may_be_forgotten():
    torch.manual_seed(0)
    model, optimizer, engine = attached(Shared(), lr=1.0)
    before = model.layer.weight.detach().clone()
    for start in (0, 12):
        optimizer.step(loss=losses(model, *dataset()[start : start + 12]))
    assert engine.taken == 2
    assert model.other.weight is model.layer.weight
    assert not torch.equal(model.layer.weight, before)


def test_d16_a_model_called_twice_for_one_step_is_told_so():
    model, optimizer, _ = attached()
    x, y = dataset()[:12]
    loss = losses(model, x, y) + losses(model, x + 1, y)
    with pytest.raises(ConfigError, match="ran 2 times"):
        optimizer.step(loss=loss)
    optimizer.step(loss=losses(model, x, y))


@pytest.mark.parametrize("mode", ["ghost", "ghost_mixed", "non-ghost"])
def test_d20_global_clipping_keeps_short_gradients_and_drops_long_ones(mode):
    model, (x, y) = net().double(), dataset()[:12]
    rows = one_at_a_time(model, losses, (x.double(), y))
    norms = norms_of(rows)
    clipping = Clipping(max_norm=float(norms.median()) * 1.001, style="global")
    clipped = GradientClipper(model, mode, clipping=clipping).clip(losses, (x.double(), y), 12)
    short = [row for row, norm in zip(rows, norms, strict=True) if norm <= norms.median()]
    assert 0 < len(short) < 12
    for name, total in clipped.total.items():
        torch.testing.assert_close(total, sum(row[name] for row in short))


def test_d20_an_unknown_clip_function_is_refused():
    with pytest.raises(ConfigError, match='"hard": vanilla'):
        engine_for(net(), clip_function="hard")


def test_d21_a_pass_without_gradients_keeps_nothing():
    model, optimizer, engine = attached()
    x, y = dataset()[:12]
    with torch.no_grad():
        assert model.training
        model(x)
    assert engine.recorder.tape is None
    assert not engine.clipper.layouts
    loss = losses(model, x, y)
    with torch.no_grad():
        model(x[:3])
    optimizer.step(loss=loss)


def trained(seed, start, model=None):
    """A model after two steps, by an engine that is alone."""
    model, optimizer, _ = attached(model, **repeatable(seed))
    for place in (start, start + 12):
        optimizer.step(loss=losses(model, *dataset()[place : place + 12]))
    return model[0].weight.detach()


def test_d25_two_engines_in_one_process_do_not_meet():
    one, first, _ = attached(**repeatable(1))
    other, second, _ = attached(**repeatable(2))
    for start in (0, 12):
        mine = losses(one, *dataset()[start : start + 12])
        theirs = losses(other, *dataset()[start + 24 : start + 36])
        first.step(loss=mine)
        second.step(loss=theirs)
    torch.testing.assert_close(one[0].weight.detach(), trained(1, 0))
    torch.testing.assert_close(other[0].weight.detach(), trained(2, 24))


def test_d25_two_engines_in_two_threads_do_not_meet():
    # Models are made here: their initial weights come from torch's one generator.
    models, found = [net() for _ in range(4)], {}

    def train(i):
        found[i] = trained(i, 12 * i, models[i])

    threads = [threading.Thread(target=train, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(4):
        torch.testing.assert_close(found[i], trained(i, 12 * i))


def test_d25_one_model_has_one_engine_and_detach_gives_everything_back():
    model, optimizer, engine = attached()
    with pytest.raises(ConfigError, match="an engine attached already"):
        engine_for(model).attach(torch.optim.SGD(model.parameters(), lr=0.1))
    engine.detach()
    assert "forward" not in vars(model)
    x, y = dataset()[:12]
    losses(model, x, y).mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.GELU())
        self.head = nn.Linear(144, 3)

    def forward(self, x):
        return self.head(checkpoint(self.body, x, use_reentrant=False).flatten(1))


def test_d26_checkpointing_channels_last_and_autocast_go_together():
    torch.manual_seed(0)
    model = Checkpointed().to(memory_format=torch.channels_last)
    x, y = dataset()[:12]
    x = x.to(memory_format=torch.channels_last)
    compare(Checkpointed().double(), x.double(), 12)

    def loss(model, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        return F.cross_entropy(out.float(), y, reduction="none")

    assert largest_contribution(model, loss, (x, y), 0.1) <= 0.1
    model, optimizer, _ = attached(model)
    optimizer.step(loss=loss(model, x, y))
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in model.parameters())


def test_d26_no_hooks_are_left_on_the_model_and_a_closure_is_answered():
    model, optimizer, _ = attached()
    model(dataset()[:12][0])
    for module in model.modules():
        assert not module._backward_hooks
        assert not module._forward_hooks
    assert not any(p._backward_hooks for p in model.parameters())
    with pytest.raises(ConfigError, match="needs the per-example losses"):
        optimizer.step(lambda: torch.zeros(()))


def test_f8_the_norm_bound_matters_under_automatic_clipping():
    x, y = dataset()[:12]
    small, large = (
        GradientClipper(net(), clipping=Clipping(max_norm=bound, style="automatic")).clip(
            losses, (x, y), 12
        )
        for bound in (0.1, 0.7)
    )
    for name, total in small.total.items():
        torch.testing.assert_close(large.total[name], 7 * total)
    model, optimizer, engine = attached(max_grad_norm=0.7, clip_function="autos")
    optimizer.step(loss=losses(model, x, y))
    assert engine.ledger.releases[0].max_norm == 0.7
    assert all(np.isfinite(value) for value in optimizer.get_training_stats().values())


def test_f11_no_dependency_has_an_upper_bound():
    # The version pins of both projects: what they need can no longer be installed.
    text = Path(__file__).parents[1].joinpath("pyproject.toml").read_text()
    needs = tomllib.loads(text)["project"]
    everything = [*needs["dependencies"], *chain(*needs["optional-dependencies"].values())]
    assert len(everything) > 10
    assert not [need for need in everything if any(sign in need for sign in ("==", "~=", "<"))]


@pytest.mark.parametrize("order", ["before", "after"])
def test_f12_a_schedule_works_whether_made_before_or_after_the_engine(order):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = engine_for(model)
    if order == "after":
        engine.attach(optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    if order == "before":
        engine.attach(optimizer)
    for start in (0, 12):
        optimizer.step(loss=losses(model, *dataset()[start : start + 12]))
        schedule.step()
    assert engine.taken == 2
    assert optimizer.param_groups[0]["lr"] == 0.25
    engine.detach()
    losses(model, *dataset()[:12]).mean().backward()
    optimizer.step()


def test_f12_augmented_views_and_the_images_of_one_person_are_one_contribution():
    model, images = net(), digits(6)
    inputs = Inputs(images, torch.device("cpu"), (0.5,), (0.5,), views=4)
    clipper = GradientClipper(model, clipping=Clipping(max_norm=0.1))
    x, y = inputs.tensors(batch_of(6, 6).chunks[0], 0)
    assert len(x) == 24
    clipped = clipper.clip(inputs.losses, (x, y), 6)
    norms = norms_of(one_at_a_time(model, inputs.losses, (x, y)))
    torch.testing.assert_close(clipped.norms, norms, rtol=1e-4, atol=1e-6)
    secret = SessionKey.from_seed(0)
    header = LedgerHeader(data="toy", delta=1e-3, fixed_seed=True, secret=secret.commitment)
    ledger, plan = Ledger(header), engine_for(model).plan
    private_step(clipper, inputs, PrivacyContext(plan, ledger, secret))(batch_of(6, 4))
    assert len(ledger.releases) == 1
    assert all(p.grad is not None for p in model.parameters())
