"""Defects of private_vision (D) and fastDP (F) that broke or bent the guarantee: none is inherited.

One test a defect, by its number. Layers are in test_defects_layers.py, the loop around them in
test_defects_loop.py.
"""

import pytest
import torch
import torch.nn.functional as F
from loops import attached, dataset, engine_for, losses, net, repeatable
from oracle import compare, largest_contribution, norm_of, norms_of
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader

from sfumato.clipping.admit import one_at_a_time
from sfumato.clipping.clip import GradientClipper
from sfumato.clipping.factors import Clipping
from sfumato.engine import PrivacyEngine
from sfumato.errors import ConfigError, PrivacyError, UnsupportedLayer
from sfumato.models.normalise import BatchNorm, freeze_batch_norm, replace_batch_norm
from sfumato.privacy.accounting import shuffled_epsilon

pytestmark = pytest.mark.filterwarnings("ignore:these batches do not come")

CIFAR = {
    "batch_size": 1000,
    "sample_size": 50_000,
    "epochs": 1,
    "max_grad_norm": 0.1,
    "target_delta": 1e-5,
}


def timm_net(name="test_efficientnet"):
    import timm

    torch.manual_seed(0)
    return timm.create_model(name, num_classes=3)


def pictures(n=4):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 3, 32, 32, generator=generator), torch.arange(n) % 3


def test_d1_the_noise_that_gdp_calls_epsilon_2_is_priced_at_4_47():
    claimed = PrivacyEngine(net(), noise_multiplier=0.620, **CIFAR)
    assert claimed.plan.epsilon(1e-5) == pytest.approx(4.47, abs=0.02)
    honest = PrivacyEngine(net(), target_epsilon=2.0, **CIFAR)
    assert honest.plan.noise_multiplier == pytest.approx(0.828, abs=0.004)
    with pytest.raises(ConfigError, match="too small an epsilon"):
        PrivacyEngine(net(), target_epsilon=2.0, accounting_mode="gdp", **CIFAR)


def test_d2_only_poisson_batches_are_accounted_as_poisson():
    model, optimizer, engine = attached()
    for x, y in engine.loader(dataset()):
        optimizer.step(loss=losses(model, x, y))
    assert {release.rate for release in engine.ledger.releases} == {12 / 60}
    assert engine.get_privacy_spent()["epsilon"] <= 3
    model, optimizer, engine = attached()
    for x, y in engine.shuffled(DataLoader(dataset(), batch_size=12, shuffle=True)):
        optimizer.step(loss=losses(model, x, y))
    assert {release.rate for release in engine.ledger.releases} == {1.0}
    honest = shuffled_epsilon(engine.plan.noise_multiplier, 1, 1e-3)
    assert engine.get_privacy_spent()["epsilon"] == pytest.approx(honest)


def test_d2_the_loader_tosses_a_coin_for_every_example():
    _, _, engine = attached(epochs=None, steps=200, **repeatable(1))
    sizes = []
    engine._take_step = lambda: setattr(engine, "taken", engine.taken + 1)
    for x, _ in engine.loader(dataset()):
        sizes.append(len(x))
        engine._drawn = None
        engine._take_step()
    # Fixed-size batches have no variance at all; coins have 60 * 0.2 * 0.8.
    spread = torch.tensor(sizes, dtype=torch.float64).var() / 9.6 * (len(sizes) - 1)
    assert 1e-3 < stats.chi2.cdf(float(spread), len(sizes) - 1) < 1 - 1e-3


@pytest.mark.parametrize("physical", [5, 7, 100])
def test_d3_a_physical_batch_that_does_not_divide_changes_neither_steps_nor_batches(physical):
    def train(physical):
        model, optimizer, engine = attached(**repeatable())
        for x, y in engine.loader(dataset(), physical_batch_size=physical):
            optimizer.step(loss=losses(model, x, y))
        assert engine.taken == engine.plan.steps == len(engine.ledger.releases) == 10
        return model[0].weight.detach()

    torch.testing.assert_close(train(physical), train(None), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("drop_last", [False, True])
def test_d4_partial_batches_never_make_more_epochs_than_are_paid_for(drop_last):
    # 25 does not divide 60: an epoch has three batches, the last of 10, or two of them.
    model, optimizer, engine = attached(batch_size=25, epochs=8)
    epochs = 6
    assert engine.plan.steps == 20  # 8 * 60 / 25, rounded up
    for _ in range(epochs):
        for x, y in DataLoader(dataset(), batch_size=25, drop_last=drop_last):
            optimizer.step(loss=losses(model, x, y))
    noise = engine.plan.noise_multiplier
    spent = engine.get_privacy_spent()["epsilon"]
    assert spent >= shuffled_epsilon(noise, epochs, 1e-3) - 1e-9
    assert len(engine.ledger.releases) == epochs * (2 if drop_last else 3)


def test_d4_a_shuffled_batch_larger_than_planned_is_refused():
    model, optimizer, _ = attached()
    x, y = dataset()[:8]
    optimizer.virtual_step(loss=losses(model, x, y))
    with pytest.raises(PrivacyError, match="16 examples and batch_size is 12"):
        optimizer.step(loss=losses(model, x, y))


@pytest.mark.parametrize("noise", ["philox", "chacha20"])
def test_d5_the_noise_is_not_from_the_generator_that_a_seed_repeats(noise):
    def step():
        model, optimizer, _ = attached(noise=noise)
        x, y = dataset()[:12]
        loss = losses(model, x, y)
        torch.manual_seed(0)
        before = torch.get_rng_state()
        optimizer.step(loss=loss)
        assert torch.equal(torch.get_rng_state(), before)
        return model[3].weight.detach()

    assert not (step() == step()).any()


def test_d5_parameters_that_would_get_coarse_noise_are_refused():
    with pytest.raises(ConfigError, match="float32"):
        attached(net().bfloat16())


def test_d6_batch_norm_with_a_fused_activation_is_found_and_replaced():
    model = timm_net()
    fused = [m for m in model.modules() if type(m).__name__ == "BatchNormAct2d"]
    assert fused
    with pytest.raises(UnsupportedLayer, match="BatchNormAct2d"):
        attached(model)
    replace_batch_norm(model)
    assert not any(isinstance(m, BatchNorm) for m in model.modules())
    x, _ = pictures()
    other = x.clone()
    other[0] += 1
    torch.testing.assert_close(model(other)[1:], model(x)[1:], rtol=1e-5, atol=1e-6)
    activations = [m for m in model.modules() if isinstance(m, nn.SiLU | nn.ReLU)]
    assert len(activations) >= sum(not isinstance(m.act, nn.Identity) for m in fused)


@pytest.mark.parametrize("mode", ["ghost", "ghost_mixed"])
def test_d7_cancelling_gram_sums_give_neither_nan_nor_too_small_a_norm(mode):
    torch.manual_seed(0)
    layer = nn.Linear(48, 48, bias=False)
    tokens = 100 + 0.01 * torch.randn(16, 24, 48)
    pull = torch.randn(16, 24, 48)
    pull -= pull.mean(dim=1, keepdim=True)

    def loss(model, x, pull):
        return (model(x) * pull).sum(dim=(1, 2))

    exact = norms_of(one_at_a_time(layer.double(), loss, (tokens.double(), pull.double())))
    found = GradientClipper(layer.float(), mode).clip(loss, (tokens, pull), 16).norms
    assert found.isfinite().all()
    assert (found >= exact * (1 - 1e-4)).all()


def test_d7_no_gradient_at_all_has_norm_zero_and_not_nan():
    layer = nn.Linear(8, 8, bias=False)
    x = torch.randn(3, 4, 8)
    clipped = GradientClipper(layer, "ghost").clip(lambda m, x: 0 * m(x).sum(dim=(1, 2)), (x,), 3)
    assert clipped.norms.tolist() == [0.0, 0.0, 0.0]
    assert not clipped.total["weight"].any()


def test_d8_the_optimizer_holds_the_engines_parameters_and_no_foreign_gradient():
    model, x, y = net(), *dataset()[:12]
    with pytest.raises(PrivacyError, match="does not govern"):
        engine_for(model).attach(torch.optim.SGD(net().parameters(), lr=0.1))
    # A frozen layer keeps the gradient of an ordinary step: the optimizer would go on applying it.
    losses(model, x, y).mean().backward()
    model[3].zero_grad()
    model[0].requires_grad_(False)
    model, optimizer, _ = attached(model)
    with pytest.raises(PrivacyError, match=r'"0.weight" that is not private'):
        optimizer.step(loss=losses(model, x, y))


def test_d8_a_parameter_given_to_the_optimizer_later_is_noticed():
    model, optimizer, _ = attached()
    optimizer.add_param_group({"params": nn.Linear(3, 3).parameters()})
    with pytest.raises(PrivacyError, match="2 trainable parameters that the engine does not"):
        model(dataset()[:12][0])


def test_d9_a_subset_of_parameters_leaves_none_without_noise():
    model, head = net(), list(net()[3].named_parameters(prefix="3"))
    with pytest.raises(PrivacyError, match="without noise"):
        engine_for(model, named_params=head)
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    model, optimizer, engine = attached(model, named_params=head)
    for x, y in engine.loader(dataset()):
        optimizer.step(loss=losses(model, x, y))
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("after", ["construction", "a step"])
def test_d9_a_parameter_unfrozen_later_is_refused(after):
    model = net()
    model[0].requires_grad_(False)
    model, optimizer, _ = attached(model)
    x, y = dataset()[:12]
    if after == "a step":
        optimizer.step(loss=losses(model, x, y))
    model[0].requires_grad_(True)
    with pytest.raises(PrivacyError, match="frozen or unfrozen"):
        model(x)


def test_d10_a_resumed_engine_goes_on_counting():
    model, optimizer, engine = attached(epochs=None, steps=3, batch_size=30)
    x, y = dataset()[:30]
    for _ in range(2):
        optimizer.step(loss=losses(model, x, y))
    state, spent = engine.state_dict(), engine.get_privacy_spent()
    engine.detach()
    resumed = engine_for(model, epochs=None, steps=3, batch_size=30)
    resumed.load_state_dict(state)
    resumed.attach(optimizer)
    assert resumed.get_privacy_spent() == spent
    optimizer.step(loss=losses(model, x, y))
    assert resumed.get_privacy_spent()["epsilon"] > spent["epsilon"]
    with pytest.raises(PrivacyError, match="budget is spent"):
        optimizer.step(loss=losses(model, x, y))


class TiedWords(nn.Module):
    """A table of words that is also the head."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.table(ids).tanh())


def test_f1_an_example_adds_no_more_than_the_bound_through_tied_weights():
    torch.manual_seed(0)
    model, ids = TiedWords().double(), torch.arange(20).reshape(4, 5) % 7

    def loss(model, ids):
        return 10 * F.cross_entropy(model(ids).mT, ids.roll(1, 1), reduction="none").sum(dim=1)

    compare(model, ids, 4, loss)
    bound = 0.1
    assert min(norms_of(one_at_a_time(model, loss, (ids,)))) > 10 * bound
    assert 0.99 * bound < largest_contribution(model, loss, (ids,), bound) <= bound


class Backwards(nn.Module):
    """Registered in another order than it runs in."""

    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Linear(6, 3), nn.Linear(5, 6)

    def forward(self, x):
        return self.last(self.first(x).tanh())


def test_f3_the_order_of_registration_does_not_matter():
    torch.manual_seed(0)
    model = Backwards().double()
    x, y = torch.randn(8, 5, dtype=torch.float64), torch.arange(8) % 3
    for batch in (x, 10 * x):  # a second batch: nothing of the first may be mixed in
        compare(model, batch, 8)
    assert largest_contribution(model, losses, (10 * x, y), 0.1) <= 0.1


def test_f5_no_batch_statistics_and_no_parameter_left_out():
    model = freeze_batch_norm(timm_net())
    norms = [m for m in model.modules() if isinstance(m, BatchNorm)]
    before = [m.running_mean.clone() for m in norms]
    model, optimizer, engine = attached(model, noise_multiplier=0.1, target_epsilon=None)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    x, y = pictures()
    optimizer.step(loss=losses(model, x, y))
    assert all(torch.equal(m.running_mean, old) for m, old in zip(norms, before, strict=True))
    (parts,) = engine.clipper.layouts.values()
    assert {name for part in parts for name in part.sources} == set(start)
    assert all(bool((p != start[name]).any()) for name, p in model.named_parameters())
    model.train()
    with pytest.raises(UnsupportedLayer, match="mixes the examples"):
        model(x)


def test_f7_an_empty_poisson_batch_is_noised_stepped_and_paid_for():
    settings = {"batch_size": 1e-6, "epochs": None, "steps": 3, "max_grad_norm": 2.0}
    model, _, engine = attached(lr=1e-6, **settings, **repeatable())
    before = model[3].weight.detach().clone()
    assert list(engine.loader(dataset())) == []
    assert engine.taken == len(engine.ledger.releases) == 3
    # lr and expected batch cancel: three draws of deviation 2 are left.
    moved = model[3].weight.detach() - before
    assert float(moved.std()) == pytest.approx(2 * 3**0.5, rel=0.15)


@pytest.mark.parametrize("spread", [0.01, 0.03])
def test_bf16_ghost_norms_of_collinear_tokens_still_bound_what_is_added(spread):
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, bias=False)
    tokens = torch.randn(8, 1, 64) + spread * torch.randn(8, 32, 64)
    pull = torch.randn(8, 32, 64)
    pull -= pull.mean(dim=1, keepdim=True)

    def loss(model, x, pull):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        return (out.float() * pull).sum(dim=(1, 2))

    assert largest_contribution(layer, loss, (tokens, pull), 1e-3, mode="ghost") <= 1e-3
    clipping = Clipping(max_norm=1e-3)
    exact = GradientClipper(layer, "non-ghost", clipping=clipping).clip(loss, (tokens, pull), 8)
    found = GradientClipper(layer, "ghost", clipping=clipping).clip(loss, (tokens, pull), 8)
    torch.testing.assert_close(found.norms, exact.norms, rtol=0.05, atol=0)
    assert norm_of(found.total) > 0
