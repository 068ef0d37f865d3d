"""An optimizer that goes on from a file: the same numbers, laid out as its parameters are."""

import torch

from sfumato.train.resume import load_optimizer


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
