"""An optimizer that goes on from a file: the same numbers, laid out as its parameters are."""

import pytest
import torch
from torch import nn

from sfumato.commands.train.command import Config
from sfumato.runs import open_run
from sfumato.training.fit import TrainState, load_optimizer
from sfumato.training.setup import make_optimizer, make_schedule


def stepped(weight: torch.Tensor) -> torch.optim.Adam:
    """Adam after a step."""
    parameter = torch.nn.Parameter(weight)
    optimizer = torch.optim.Adam([parameter])
    (parameter**3).sum().backward()
    optimizer.step()
    return optimizer


def test_moments_lie_as_channels_last_parameters_do() -> None:
    weight = torch.randn(4, 3, 2, 2)
    old = stepped(weight.clone())  # whose moments lie as a file keeps them
    new = stepped(weight.clone(memory_format=torch.channels_last) * 0)
    load_optimizer(new, old.state_dict())
    (parameter,) = new.param_groups[0]["params"]
    (was,) = old.state.values()
    found = new.state[parameter]
    assert found["step"] == 1
    for name in ("exp_avg", "exp_avg_sq"):
        assert found[name].stride() == parameter.stride() != was[name].stride()
        assert torch.equal(found[name], was[name])


def test_a_rate_that_is_a_tensor_stays_the_tensor_it_was() -> None:
    rates = torch.tensor(0.5), torch.tensor(0.25)
    old, new = (torch.optim.Adam([torch.zeros(2)], lr=rate, capturable=True) for rate in rates)
    load_optimizer(new, old.state_dict())
    assert new.param_groups[0]["lr"] is rates[1]
    assert float(rates[1]) == 0.5


def train_state(kind: str) -> TrainState:
    """A small network as on a GPU, with channels last, after a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(2))
    model(torch.zeros(1, 3, 5, 5))
    model = model.to(memory_format=torch.channels_last)  # pyright: ignore
    optimizer = make_optimizer(model, kind, lr=0.1, momentum=0.9, weight_decay=0.0)
    made = TrainState(model, optimizer, make_schedule(optimizer, "constant", 10))
    model(torch.ones(2, 3, 5, 5)).square().sum().backward()
    made.advance()
    return made


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_a_checkpoint_of_training_gives_moments_that_lie_as_their_parameters_do(kind, tmp_path):
    old, new = train_state(kind), train_state(kind)
    with open_run(Config(epsilon=1.0), verb="train", out=tmp_path / "run") as run:
        run.save_checkpoint(old.state())
        new.load(run.load_checkpoint())
    weight, wanted = new.model[0].weight, old.optimizer.state[old.model[0].weight]
    moments = {n: m for n, m in new.optimizer.state[weight].items() if m.shape == weight.shape}
    assert moments
    for name, moment in moments.items():
        assert moment.stride() == weight.stride() != weight.contiguous().stride()
        assert torch.equal(moment, wanted[name])
