"""The engine lets the optimizer apply no gradient but its own, and clips as the schedule says."""

import pytest
import torch
from loops import dataset, engine_for, losses, net, repeatable
from oracle import norm_of
from torch import nn

from sfumato.errors import PrivacyError

pytestmark = pytest.mark.filterwarnings("ignore:these batches do not come")


@pytest.mark.parametrize("how", ["step", "virtual_step"])
def test_a_gradient_on_a_parameter_outside_the_module_is_not_applied(how):
    model, outside = net(), nn.Parameter(torch.zeros(3), requires_grad=False)
    optimizer = torch.optim.SGD([*model.parameters(), outside], lr=0.1)
    engine = engine_for(model)
    engine.attach(optimizer)
    x, y = dataset()[:12]
    loss = losses(model, x, y)
    outside.grad = torch.ones(3)
    with pytest.raises(PrivacyError, match="wrote a gradient"):
        getattr(optimizer, how)(loss=loss)
    assert not outside.any()
    assert engine.taken == 0


def test_before_the_step_of_an_empty_batch_gradients_are_looked_at_too():
    model, outside = net(), nn.Parameter(torch.zeros(3), requires_grad=False)
    optimizer = torch.optim.SGD([*model.parameters(), outside], lr=0.1)
    engine = engine_for(model, batch_size=1e-6, epochs=None, steps=3, **repeatable())
    engine.attach(optimizer)
    outside.grad = torch.ones(3)
    with pytest.raises(PrivacyError, match="wrote a gradient"):
        list(engine.loader(dataset()))
    assert not outside.any()
    assert engine.taken == 0


def test_each_step_clips_to_the_norm_bound_that_its_schedule_has_then():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = engine_for(
        model, clip_decay=0.1, target_epsilon=None, noise_multiplier=0.0, batch_size=1, epochs=None,
        steps=5, max_grad_norm=0.01,
    )  # fmt: skip
    engine.attach(optimizer)
    x, y = dataset()[:1]
    for number in range(5):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.step(loss=losses(model, x, y))
        moved = norm_of({n: before[n] - p.detach() for n, p in model.named_parameters()})
        assert moved == pytest.approx(engine.plan.at(number).max_norm, rel=1e-3)
    assert engine.plan.at(4).max_norm < 0.2 * engine.plan.max_norm
