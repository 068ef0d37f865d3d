"""Configs: frozen, keyword-only dataclasses that survive a round trip through JSON, strictly.

Reading is the strict direction: a key that is missing, unknown or of the wrong type is an error
that names it. So a config on disk means what it says, and a run is never resumed by half a config.
What is finished is read by `read_finished` instead: it stays readable when settings come and go.
"""

import dataclasses
import json
import math
import os
import types
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from sfumato.errors import ConfigError
from sfumato.setting_groups import Settings, defaults, flatten, leaves, types_of, ungrouped

Config = TypeVar("Config")

VERSION = 2
"""Of config.json. In version 1, which says none, some settings were in groups."""
ANY = object()


@dataclasses.dataclass(frozen=True)
class Withdrawn:
    """A setting of earlier versions that no longer exists.

    The class that had it lists it by name in `WITHDRAWN`. A finished run that has it is read
    without it. An unfinished one goes on without it if it has the usual value.
    """

    instead: str
    """What to do instead."""
    usual: Any = ANY
    """The value, as JSON, that stands for what is done today; ANY if all that was done before the
    last stage is the same with every value."""
    ignored: bool = False
    """Whether its flag is ignored with a warning, and not refused."""


HOW_TO_COMPUTE = {
    "two_pass": Withdrawn("half the --physical-batch-size saves as much memory", ignored=True),
    "check_every": Withdrawn(
        "every run measures what one example adds, at first and then rarely", ignored=True
    ),
}
"""Settings of several classes that said how to compute, not what, and were withdrawn."""


def withdrawn_settings(kind: Any) -> Mapping[str, Withdrawn]:
    """The settings of a config class that were withdrawn, by name."""
    return {**HOW_TO_COMPUTE, **getattr(kind, "WITHDRAWN", {})}


def to_json(value: Any) -> Any:
    """The value as plain JSON: dataclasses become objects, paths strings, infinity "inf".

    Settings are written without their groups.
    """
    if isinstance(value, Settings):
        value = flatten(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [entry.name for entry in dataclasses.fields(value)]
        return {name: to_json(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} has no place in a config: {value!r}")


def dumps(value: Any, indent: int | None = None) -> str:
    """The value as JSON text that any program can read."""
    text = json.dumps(to_json(value), indent=indent, allow_nan=False, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as problem:  # from a path or name that some other system wrote
        name = text[text.rfind('"', 0, problem.start) + 1 : text.find('"', problem.start)]
        raise ConfigError(f"{why_no_text(name)}.") from None
    return text


def why_no_text(name: str) -> str:
    """Why a name from the file system cannot be written as text; empty if it can."""
    try:
        name.encode()
    except UnicodeEncodeError:
        shown = name.encode(errors="backslashreplace").decode()
    else:
        return ""
    try:
        os.fsencode(name).decode()
    except UnicodeError:
        return f'the name "{shown}" is not UTF-8. Rename it (convmv renames many)'
    return f'the name "{shown}" cannot be read in this locale. Set PYTHONUTF8=1'


def from_json(kind: type[Config], data: Any) -> Config:
    """The config of this kind that `to_json` made `data` from."""
    return _read(kind, data, "")


def read_finished(kind: type[Config], data: Any) -> Config:
    """The same of something finished, which an earlier version of sfumato may have made.

    A setting that did not exist then takes its default, so the default of a new setting must be
    what was done before there was a choice. One that was removed since is left out.
    """
    return from_json(kind, complete_config(kind, data))


def read_record(kind: type[Config], record: Mapping[str, Any], *, finished: bool) -> Config:
    """The settings in a config.json, of this version of sfumato or of an earlier one."""
    if record.get("version", 1) > VERSION:
        raise ConfigError("config.json is of a newer version of sfumato: use that one.")
    return (read_finished if finished else from_json)(kind, record["config"])


def complete_config(kind: Any, data: Any) -> Any:
    """JSON of a finished config, with the keys that its class has in this version."""
    if not dataclasses.is_dataclass(kind):
        nested = [one for one in get_args(kind) if dataclasses.is_dataclass(one)]
        return complete_config(nested[0], data) if nested else data
    if not isinstance(data, dict):
        return data
    hints, usual = _types(kind), defaults(kind)
    gone = withdrawn_settings(kind).keys() - hints.keys()
    kept = {name: value for name, value in _plain(kind, data).items() if name not in gone}
    for name, hint in hints.items():
        if name in kept:
            kept[name] = complete_config(hint, kept[name])
        elif name in usual:
            kept[name] = to_json(usual[name])
    return kept


def _types(kind: Any) -> Mapping[str, Any]:
    """What may stand in JSON of a dataclass, by name."""
    return leaves(kind) if issubclass(kind, Settings) else types_of(kind)


def _plain(kind: Any, data: dict[str, Any]) -> dict[str, Any]:
    """JSON of a dataclass; in version 1 some settings were in groups."""
    return ungrouped(data) if isinstance(kind, type) and issubclass(kind, Settings) else data


def without_usual(kind: Any, data: Any) -> Any:
    """JSON of an unfinished config, without the withdrawn settings that have their usual value."""
    if not isinstance(data, dict):
        return data
    gone, data = withdrawn_settings(kind), _plain(kind, data)
    usual = {k for k in data.keys() & gone.keys() if gone[k].usual in (ANY, data[k])}
    return {name: value for name, value in data.items() if name not in usual}


def differences(before: Any, after: Any, name: str = "") -> list[str]:
    """One line for each field in which two JSON values differ, as `name: before -> after`."""
    if isinstance(before, dict) and isinstance(after, dict):
        lines = []
        for key in sorted(before.keys() | after.keys()):
            path = f"{name}.{key}" if name else key
            lines += differences(before.get(key), after.get(key), path)
        return lines
    # As text, because to Python 1 and True are the same; but 4 and 4.0 are one setting.
    texts = tuple(json.dumps(_as_float(value)) for value in (before, after))
    if texts[0] == texts[1]:
        return []
    return [f"{name}: {json.dumps(before)} -> {json.dumps(after)}"]


def _as_float(value: Any) -> Any:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _read(kind: Any, data: Any, name: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, data, name)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _read_union(arguments, data, name)
    if origin is tuple and isinstance(data, list):
        return _read_tuple(arguments, data, name)
    if origin is dict and isinstance(data, dict):
        return {key: _read(arguments[1], item, f"{name}.{key}") for key, item in data.items()}
    if origin is Literal:
        if data not in arguments:
            raise _mismatch(name, data, " or ".join(map(repr, arguments)))
        return data
    return _read_plain(kind, data, name)


def _read_plain(kind: Any, data: Any, name: str) -> Any:
    if kind is Path and isinstance(data, str):
        return Path(data)
    if kind is float and (type(data) in (int, float) or data in ("inf", "-inf", "nan")):
        return float(data)
    if kind in (bool, int, str, types.NoneType) and type(data) is kind:
        return data
    raise _mismatch(name, data, getattr(kind, "__name__", str(kind)))


def _read_tuple(kinds: tuple[Any, ...], data: list[Any], name: str) -> Any:
    kinds = kinds[:1] * len(data) if kinds[-1] is ... else kinds
    if len(kinds) != len(data):
        raise _mismatch(name, data, f"{len(kinds)} values")
    pairs = enumerate(zip(kinds, data, strict=True))
    return tuple(_read(kind, item, f"{name}[{i}]") for i, (kind, item) in pairs)


def _read_dataclass(kind: Any, data: Any, name: str) -> Any:
    if not isinstance(data, dict):
        raise _mismatch(name, data, "an object")
    prefix = f"{name}." if name else ""
    hints = _types(kind)
    names = list(hints)
    data = without_usual(kind, data)
    for key in sorted(data.keys() & withdrawn_settings(kind).keys()):
        raise ConfigError(
            f'setting "{prefix}{key}" is {data[key]!r}, and was removed: '
            f"{withdrawn_settings(kind)[key].instead}."
        )
    unknown, missing = set(data) - set(names), set(names) - set(data)
    if unknown:
        known = ", ".join(names)
        raise ConfigError(f'unknown setting "{prefix}{min(unknown)}". There are: {known}.')
    if missing:
        raise ConfigError(
            f'setting "{prefix}{min(missing)}" is missing: another version of sfumato wrote these '
            "settings, which did not know it. Go on with that version, or start again."
        )
    return kind(**{key: _read(hints[key], data[key], prefix + key) for key in names})


def _read_union(kinds: tuple[Any, ...], data: Any, name: str) -> Any:
    for kind in kinds:
        try:
            return _read(kind, data, name)
        except ConfigError:
            continue
    raise _mismatch(name, data, " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds))


def _mismatch(name: str, data: Any, expected: str) -> ConfigError:
    return ConfigError(f'setting "{name}" is {data!r}, and must be {expected}.')


def check_numbers(**named: Any) -> None:
    """Refuse settings that are no numbers; None is for those that are left out."""
    for name, value in named.items():
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if value is not None and not is_number:
            raise ConfigError(f"{name}={value!r} must be a number.")


def check_counts(**named: Any) -> None:
    """Refuse settings that are no whole numbers; None is for those that are left out."""
    for name, value in named.items():
        is_count = isinstance(value, Integral) and not isinstance(value, bool)
        if value is not None and not is_count:
            raise ConfigError(f"{name}={value!r} must be a whole number.")


def check_given(**named: Any) -> None:
    """Refuse to guess what must be said."""
    for name, value in named.items():
        if value is None:
            raise ConfigError(f"{name}=None: give a number.")
