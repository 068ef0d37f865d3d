"""The engine trains in one process: wrappers for several are refused."""

import pytest
import torch
from loops import dataset, engine_for, losses, net, repeatable
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from sfumato.errors import ConfigError


@pytest.fixture
def group(tmp_path):
    """A group of this process alone."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


WRAPPERS = {
    "DistributedDataParallel": DistributedDataParallel,
    "DataParallel": nn.DataParallel,
    "FSDPModule": lambda model: fully_shard(model, mesh=mesh()),
}


def mesh():
    return torch.distributed.device_mesh.init_device_mesh("cpu", (1,))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_wrapper_for_several_devices_is_refused(kind, inside, group):
    model = WRAPPERS[kind](net())
    with pytest.raises(ConfigError, match=kind):
        engine_for(nn.Sequential(model) if inside else model, **repeatable())


def test_one_of_several_processes_is_refused(group, monkeypatch):
    engine_for(net(), **repeatable())
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    with pytest.raises(ConfigError, match="one of 2 processes"):
        engine_for(net(), **repeatable())


@pytest.mark.parametrize("when", ["before it is attached", "between two steps"])
def test_processes_that_come_after_the_engine_are_refused(when, group, monkeypatch):
    model = net()
    engine, optimizer = engine_for(model, **repeatable()), torch.optim.SGD(model.parameters())

    def step():
        x, y = next(loader)
        optimizer.step(loss=losses(model, x, y))

    loader = engine.loader(dataset(), physical_batch_size=5)
    if when == "between two steps":
        engine.attach(optimizer)
        step()
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    with pytest.raises(ConfigError, match="one of 2 processes"):
        step() if when == "between two steps" else engine.attach(optimizer)
    assert engine.taken == 0
