"""The familiar API, and that it cannot be used to lie."""

import copy

import pytest
import torch
import torch.nn.functional as F
from loops import attached, dataset, engine_for, losses, net, repeatable
from oracle import norms_of
from torch import nn
from torch.utils.data import DataLoader

import sfumato
from sfumato.clipping.admit import one_at_a_time
from sfumato.errors import ConfigError, PrivacyError, UnsupportedLayer
from sfumato.privacy.accounting import shuffled_epsilon
from sfumato.privacy.session_key import SessionKey

pytestmark = pytest.mark.filterwarnings("ignore:these batches do not come")


@pytest.mark.parametrize("known", [True, False])
def test_the_ordinary_loop_of_private_vision_runs(known):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    engine = engine_for(model, ghost_clipping=True, mixed=True)
    engine.attach(optimizer)
    loader = DataLoader(dataset(), batch_size=6, shuffle=True)
    for _ in range(2):
        for i, (x, y) in enumerate(engine.shuffled(loader) if known else loader):
            loss = losses(model, x, y)
            if i % 2 == 1:
                optimizer.step(loss=loss)
                optimizer.zero_grad()
            else:
                optimizer.virtual_step(loss=loss)
    assert engine.taken == 10
    spent = optimizer.get_privacy_spent()
    honest = shuffled_epsilon(engine.plan.noise_multiplier, 2 if known else 10, 1e-3)
    assert spent["epsilon"] == pytest.approx(honest)
    assert spent["epsilon"] > 3
    assert set(optimizer.get_training_stats()) >= {"med_clip", "min_clip", "max_clip"}


def test_an_ordinary_loader_is_told_what_it_costs():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine_for(model).attach(optimizer)
    x, y = dataset()[:12]
    with pytest.warns(UserWarning, match="not Poisson samples"):
        optimizer.step(loss=losses(model, x, y))


def test_every_step_is_the_noisy_mean_of_its_own_clipped_gradients():
    model, twin = net(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    secret = SessionKey.from_seed(0)
    engine = engine_for(model, secret=secret)
    engine.attach(optimizer)
    header = sfumato.LedgerHeader(data="", delta=1e-3, fixed_seed=True, secret=secret.commitment)
    book = sfumato.Ledger(header)
    for step in range(3):
        twin.load_state_dict(model.state_dict())
        x, y = dataset()[12 * step : 12 * step + 12]
        optimizer.step(loss=losses(model, x, y))
        clipper = sfumato.GradientClipper(twin, clipping=sfumato.Clipping(max_norm=0.1))
        total = clipper.clip(losses, (x, y), 12).total
        # In the order of the parameters, as the noise follows it.
        total = {name: total[name] for name, _ in twin.named_parameters()}
        noisy = sfumato.privatize(total, engine.plan, book, secret, step=step, stage="train")
        for name, start in twin.named_parameters():
            parameter = dict(model.named_parameters())[name]
            torch.testing.assert_close(parameter, start - noisy[name], rtol=1e-4, atol=1e-6)


def test_what_an_abandoned_loader_left_in_part_counts_once():
    def first_step(abandon):
        model, data = net(), dataset()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        engine = engine_for(model, secret=SessionKey.from_seed(0))
        engine.attach(optimizer)
        if abandon:
            x, y = next(engine.loader(data, physical_batch_size=2))
            optimizer.step(loss=losses(model, x, y))
            assert engine.taken == 0, "there is more to come of this batch"
        for x, y in engine.loader(data, physical_batch_size=2):
            optimizer.step(loss=losses(model, x, y))
            if engine.taken:
                return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(first_step(abandon=True), first_step(abandon=False))


def test_empty_batches_are_stepped_with_noise_alone():
    before = net()[0].weight
    model, _, engine = attached(batch_size=1e-6, epochs=None, steps=3, **repeatable())
    assert list(engine.loader(dataset())) == []
    assert engine.taken == 3
    assert not torch.equal(model[0].weight, before)


def test_misspelt_arguments_are_errors():
    with pytest.raises(TypeError, match="max_grad_nrom"):
        engine_for(net(), max_grad_nrom=1.0)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine_for(model).attach(optimizer)
    with pytest.raises(ConfigError, match="no argument losses"):
        optimizer.step(losses=torch.zeros(3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip_function": "hard"}, "vanilla"),
        ({"accounting_mode": "gdp"}, "too small an epsilon"),
        ({"accounting_mode": "vibes"}, "there are pld"),
        ({"target_epsilon": None}, "either target_epsilon"),
        ({"noise_multiplier": 1.0}, "either target_epsilon"),
        ({"numerical_stability_constant": -0.5}, "numerical_stability_constant"),
        ({"batch_size": 100}, "at most 60"),
        ({"target_delta": 0.1}, "not below 1/60"),
    ],
)
def test_settings_that_cannot_work_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        engine_for(net(), **change)


def test_steps_beyond_the_plan_are_refused():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine_for(model, epochs=None, steps=1).attach(optimizer)
    x, y = dataset()[:12]
    optimizer.step(loss=losses(model, x, y))
    with pytest.raises(PrivacyError, match="budget is spent"):
        optimizer.step(loss=losses(model, x, y))


def test_backward_is_refused():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine_for(model).attach(optimizer)
    x, y = dataset()[:12]
    loss = losses(model, x, y)
    with pytest.raises(ConfigError, match=r"no loss.backward\(\)"):
        optimizer.step()
    model[0].weight.grad = torch.zeros_like(model[0].weight)
    with pytest.raises(PrivacyError, match="not private"):
        optimizer.step(loss=loss)


def test_an_optimizer_with_other_parameters_is_refused():
    model, other = net(), net()
    with pytest.raises(PrivacyError, match="does not govern"):
        engine_for(model).attach(torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(PrivacyError, match="lacks 2"):
        engine_for(model).attach(torch.optim.SGD(model[0].parameters(), lr=0.1))


def test_an_optimizer_that_asks_for_gradients_itself_is_refused():
    model = net()
    with pytest.raises(ConfigError, match=r"LBFGS calls a closure.*SGD"):
        engine_for(model).attach(torch.optim.LBFGS(model.parameters()))


def test_a_model_with_an_engine_is_not_pickled_but_copied(tmp_path):
    model, optimizer, engine = attached()
    x, y = dataset()[:12]
    optimizer.step(loss=losses(model, x, y))
    with pytest.raises(ConfigError, match=r"Save model.state_dict\(\).*detach"):
        torch.save(model, tmp_path / "model.pt")
    twin = copy.deepcopy(model).eval()
    assert torch.equal(twin(x), model.eval()(x))
    engine.detach()
    torch.save(model, tmp_path / "model.pt")


def test_a_secret_that_somebody_knows_is_objected_to():
    assert "not_for_release" not in attached()[2].get_privacy_spent()
    (objection,) = attached(**repeatable())[2].get_privacy_spent()["not_for_release"]
    assert "fixed seed" in objection


def test_named_params_do_not_leave_others_unprotected():
    model = net()
    with pytest.raises(PrivacyError, match="without noise"):
        engine_for(model, named_params=list(model[3].named_parameters(prefix="3")))


def test_batch_norm_is_refused():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedLayer, match="BatchNorm1d"):
        engine_for(model).attach(optimizer)


def test_detach_gives_everything_back():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = engine_for(model)
    engine.attach(optimizer)
    engine.detach()
    x, y = dataset()[:12]
    losses(model, x, y).mean().backward()
    optimizer.step()
    assert not hasattr(optimizer, "virtual_step")


def test_evaluation_is_not_recorded():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = engine_for(model)
    engine.attach(optimizer)
    x, _ = dataset()[:12]
    with torch.no_grad():
        model(x)
    with pytest.raises(ConfigError, match="no recorded forward"):
        optimizer.step(loss=torch.zeros(12))
    model.eval()
    assert torch.isfinite(model(x)).all()


@pytest.mark.parametrize("name", ["input", "both"])
def test_inputs_given_by_name_are_part_of_the_batch(name):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, input, other):
            return self.a(input) + self.b(other).tanh()

    torch.manual_seed(0)
    (x, z), y = torch.randn(2, 12, 4), torch.arange(12) % 3

    def loss(model, x, z):
        out = model(x, other=z) if name == "input" else model(other=z, input=x)
        return F.cross_entropy(out, y[: len(out)], reduction="none")

    model = Two()
    norms = norms_of(one_at_a_time(model, loss, (x, z)))
    model, optimizer, _ = attached(model)
    optimizer.step(loss=loss(model, x, z))
    middle = float(norms.sort().values[6])
    assert optimizer.get_training_stats()["med_norm"] == pytest.approx(middle, rel=1e-4)


def test_the_engine_follows_schedules_and_keeps_an_average():
    model, optimizer, engine = attached(noise_decay=0.5, clip_decay=0.1, ema=0.5)
    for x, y in engine.loader(dataset(), physical_batch_size=7):
        optimizer.step(loss=losses(model, x, y))
    releases = engine.ledger.releases
    assert releases[-1].noise_multiplier == pytest.approx(releases[0].noise_multiplier / 2)
    assert releases[-1].max_norm == pytest.approx(0.01)
    assert engine.clipper.clipping.max_norm == pytest.approx(0.01)
    assert 2.9 < engine.get_privacy_spent()["epsilon"] <= 3
    averaged = engine.average.module.state_dict()
    assert any(not torch.equal(averaged[name], p) for name, p in model.state_dict().items())
    other = engine_for(net(), noise_decay=0.5, clip_decay=0.1, ema=0.5)
    other.load_state_dict(engine.state_dict())
    torch.testing.assert_close(other.average.module.state_dict(), averaged)


def test_a_noise_schedule_asks_for_poisson_batches():
    model, optimizer, _ = attached(noise_decay=0.5)
    x, y = dataset()[:12]
    with pytest.raises(ConfigError, match="needs Poisson batches"):
        optimizer.step(loss=losses(model, x, y))


def test_a_loss_that_looks_at_other_examples_is_refused():
    model, optimizer, _ = attached()
    x, _ = dataset()[:12]
    out = model(x)
    with pytest.raises(PrivacyError, match="depends on what the model says of another"):
        optimizer.step(loss=F.cross_entropy(out @ out.T, torch.arange(12), reduction="none"))


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(5, 64), nn.Linear(64, 3)

    def forward(self, x, ids):
        x = x.flatten(1)
        return self.head(x - x.mean(dim=0) + self.table(ids))


def test_a_model_with_whole_numbers_among_its_inputs_is_admitted_too():
    model, _, _ = attached(Centred())
    x, y = dataset()[:12]
    with pytest.raises(UnsupportedLayer, match="mixes the examples"):
        model(x, y)


@pytest.mark.parametrize("why", ["the inputs", "the learning rate"])
@pytest.mark.parametrize("pieces", [None, 4])
def test_training_without_a_finite_loss_stops_and_its_budget_is_not_spent(why, pieces):
    model, optimizer, engine = attached(
        lr=1e30 if why == "the learning rate" else 0.1, **repeatable(), epochs=None, steps=50
    )
    broken = torch.nan if why == "the inputs" else 1.0

    def train():
        for x, y in engine.loader(dataset(), physical_batch_size=pieces):
            optimizer.step(loss=losses(model, x * broken, y))

    with pytest.raises(ConfigError, match="finite"):
        train()
    assert 5 <= engine.taken == len(engine.ledger.releases) < 10


def test_some_losses_that_are_not_finite_stop_nothing():
    model, optimizer, engine = attached(**repeatable(), epochs=None, steps=12)
    for x, y in engine.loader(dataset()):
        x[1:] = torch.inf
        optimizer.step(loss=losses(model, x, y))
    assert engine.taken == 12


def test_a_step_that_failed_does_not_count():
    model, optimizer, engine = attached()
    x, y = dataset()[:12]
    with pytest.raises(ConfigError, match="one number for each"):
        optimizer.step(loss=losses(model, x, y).mean())
    optimizer.step(loss=losses(model, x, y))
    assert engine.taken == 1


def test_a_backward_pass_by_mistake_is_explained():
    model, optimizer, _ = attached()
    x, y = dataset()[:12]
    loss = losses(model, x, y)
    loss.mean().backward()
    with pytest.raises(PrivacyError, match=r"loss\.backward\(\)"):
        optimizer.step(loss=loss)
