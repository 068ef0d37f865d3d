import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import pytest

from sfumato.config import differences, dumps, from_json, to_json
from sfumato.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    name: Literal["sgd", "adam"] = "sgd"
    momenta: tuple[float, float] = (0.9, 0.99)


@dataclass(frozen=True, kw_only=True)
class Training:
    data: Path = Path("faces")
    epsilon: float = 3.0
    steps: int | None = None
    layers: tuple[str, ...] = ("stem", "head")
    compiled: bool = False
    optimizer: Optimizer = Optimizer()
    others: dict[str, Optimizer] = field(default_factory=dict)


CONFIGS = [
    Training(),
    Training(others={"late": Optimizer(name="adam"), "": Optimizer()}),
    Training(epsilon=math.inf, steps=7, layers=(), compiled=True),
    Training(optimizer=Optimizer(name="adam", momenta=(0.1, 1e-9))),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_a_config_survives_the_round_trip(config):
    import json

    assert from_json(Training, json.loads(dumps(config))) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilom": 3}, 'unknown setting "epsilom"'),
        ({"epsilon": "3"}, 'setting "epsilon"'),
        ({"epsilon": True}, 'setting "epsilon"'),
        ({"steps": 7.0}, 'setting "steps"'),
        ({"compiled": 1}, 'setting "compiled"'),
        ({"layers": ["stem", 3]}, r'setting "layers\[1\]"'),
        ({"optimizer": {"name": "lion", "momenta": [1, 1]}}, 'setting "optimizer.name"'),
        ({"optimizer": {"name": "sgd", "momenta": [1]}}, "2 values"),
        ({"optimizer": {"name": "sgd"}}, '"optimizer.momenta" is missing'),
        ({"optimizer": 3}, "must be an object"),
        ({"others": {"late": {"name": "sgd"}}}, '"others.late.momenta" is missing'),
        ({"others": ["late"]}, 'setting "others"'),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, message):
    with pytest.raises(ConfigError, match=message):
        from_json(Training, {**to_json(Training()), **change})


def test_a_missing_setting_is_an_error():
    data = to_json(Training())
    del data["data"]
    with pytest.raises(ConfigError, match='"data" is missing'):
        from_json(Training, data)


def test_differences_name_the_fields_that_changed():
    after = replace(Training(), epsilon=8.0, optimizer=Optimizer(name="adam"))
    lines = differences(to_json(Training()), to_json(after))
    assert lines == ["epsilon: 3.0 -> 8.0", 'optimizer.name: "sgd" -> "adam"']
    assert differences(to_json(after), to_json(after)) == []


def test_a_config_holds_plain_values_only():
    with pytest.raises(TypeError, match="object"):
        to_json({"a": object()})
