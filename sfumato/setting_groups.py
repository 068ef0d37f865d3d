"""Settings in groups, and each of them known by one name: that of its flag.

    @dataclass(frozen=True, kw_only=True, init=False)
    class Train(Settings):
        network: Model = Model()
        optim: Optim = Optim()

    Train(model="wrn-16-4", lr=0.1).optim.lr

A name is taken once in all the groups of a class. So settings are given, replaced and stored by
name alone, and a setting that moves to another group orphans no run.
"""

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any, ClassVar, get_args, get_type_hints


class Settings:
    """Base of frozen dataclasses whose fields are settings, or groups of settings.

    A keyword is a field, or a setting of a group. `dataclasses.replace` takes both too.
    """

    WORD: ClassVar[str | None] = None
    """The setting that a first word gives: sfumato account RUN, sfumato audit run RUN."""
    WORDS: ClassVar[str | None] = None
    """The setting that all words without a flag give: sfumato report RUN RUN."""
    ONE_OF: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Settings of which one is given: it takes the place of what a preset has of the other."""
    WITHDRAWN: ClassVar[Mapping[str, Any]] = {}
    """Settings of earlier versions, and what to do instead: see `sfumato.config.Withdrawn`."""
    MAY_CHANGE: ClassVar[tuple[str, ...]] = ()
    """Settings that say how, not what: a run may go on with others."""
    NOT_REMEMBERED: ClassVar[tuple[str, ...]] = ()
    """Those of them that take their default again when a run goes on."""

    def __init__(self, **given: Any) -> None:
        for entry in fields(self):  # pyright: ignore[reportArgumentType]
            group = types_of(type(self))[entry.name]
            names = leaves(group) if is_dataclass(group) else ()
            own = {name: given.pop(name) for name in names if name in given}
            value = given.pop(entry.name) if entry.name in given else default_of(entry)
            object.__setattr__(self, entry.name, replace(value, **own) if own else value)
        if given:
            raise TypeError(f"{type(self).__name__} has no setting {min(given)!r}.")
        self.__post_init__()

    def __post_init__(self) -> None:
        """Checks of settings that mean nothing together."""

    @classmethod
    def first_words(cls) -> Mapping[str, tuple[str, ...]]:
        """First words, and the flags that each stands for."""
        return {}

    @property
    def without_noise(self) -> str:
        """The flag that takes the noise out of private training; empty if none does."""
        return ""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in leaves(type(self)):
            return flatten(self)[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class WithStages(Settings):
    """Settings of a command with stages: they have a field `stage`, a Literal of "all" and each.

    It is the stage to stop after, and may be the first word too: sfumato release moments.
    """

    MAY_CHANGE: ClassVar = ("stage",)
    NOT_REMEMBERED: ClassVar = ("stage",)

    @classmethod
    def stage_names(cls) -> tuple[str, ...]:
        """The stages in their order."""
        return get_args(types_of(cls)["stage"])[1:]

    @classmethod
    def first_words(cls) -> Mapping[str, tuple[str, ...]]:
        """A stage, or another word and the flags that it stands for."""
        return {name: ("--stage", name) for name in cls.stage_names()}


@dataclass(frozen=True, kw_only=True)
class Subcommand:
    """A part of a command that has settings of its own: sfumato audit heads."""

    kind: type[Settings]
    """What it can be asked for."""
    former: tuple[str, ...] = ()
    """The flag that asked for it in the last version, and a first word that went with it."""


@cache
def types_of(kind: Any) -> Mapping[str, Any]:
    """The type of each field of a dataclass."""
    hints = get_type_hints(kind)
    return {entry.name: hints[entry.name] for entry in fields(kind)}


@cache
def leaves(kind: Any) -> Mapping[str, Any]:
    """The type of each setting of a class, in whichever group it is."""
    found: dict[str, Any] = {}
    for entry in fields(kind):
        inner = types_of(kind)[entry.name]
        found |= leaves(inner) if is_dataclass(inner) else {entry.name: inner}
    return found


def flatten(settings: Any) -> dict[str, Any]:
    """The value of each setting, by name."""
    found: dict[str, Any] = {}
    for entry in fields(settings):
        value = getattr(settings, entry.name)
        found |= flatten(value) if is_dataclass(value) else {entry.name: value}
    return found


def defaults(kind: Any) -> dict[str, Any]:
    """The default of each field that has one, or of each setting. Together they may be unsound."""
    found: dict[str, Any] = {}
    for entry in fields(kind):
        if entry.default is MISSING and entry.default_factory is MISSING:
            continue
        value, in_groups = default_of(entry), issubclass(kind, Settings)
        found |= flatten(value) if in_groups and is_dataclass(value) else {entry.name: value}
    return found


def default_of(entry: Field[Any]) -> Any:
    """The default of a field."""
    if entry.default is not MISSING:
        return entry.default
    if entry.default_factory is not MISSING:
        return entry.default_factory()
    raise TypeError(f"setting {entry.name!r} is missing.")


def ungrouped(data: Mapping[str, Any]) -> dict[str, Any]:
    """JSON of settings without groups: version 1 of config.json had some in groups."""
    found: dict[str, Any] = {}
    for name, value in data.items():
        found |= ungrouped(value) if isinstance(value, dict) else {name: value}
    return found
