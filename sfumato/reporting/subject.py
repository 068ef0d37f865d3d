"""The model that an attack or a release is about: a target, or a teacher that was given.

It has settings and a guarantee of its own, which its own directory tells. Those that the
config.json of the attack or release has in their place were never used.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sfumato.config import HOW_TO_COMPUTE
from sfumato.errors import RunError
from sfumato.files import read_json
from sfumato.integrity import damage
from sfumato.reporting.guarantee import Guarantee, guarantee_of, ledger_of
from sfumato.setting_groups import leaves
from sfumato.settings.train import Augment, Canaries, Data, Extender, Model, Optim, Privacy

ROLES = {"invert": "target", "release": "teacher"}
"""Commands whose model may be given, and the setting that gives it."""
GROUPS = (Model, Privacy, Optim, Augment, Extender, Canaries, Data)
TRAINING = {*(name for group in GROUPS for name in leaves(group)), "physical_batch_size", "compile"}
"""Settings that say how a model is trained: a model that is there already has its own."""
OWN = {
    "invert": ("data_root", "download"),
    "release": (
        "data_root",
        "download",
        "epsilon",
        "delta",
        "secure",
        "noise_seed",
        "centre_crop",
        "image_size",
        "grey",
    ),
}
"""Those that the command itself uses."""
ELSEWHERE = ("data", "centre_crop", "image_size", "grey", "norm", "weights")
"""Those that say what a model from elsewhere is, and what it is asked."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A target under attack, or the teacher of released images."""

    role: str
    """target or teacher."""
    model: str
    guarantee: Guarantee | None = None
    """What its own ledger says."""
    instead: tuple[str, str] = ("", "")
    """Where there is no guarantee: a word for the headline, and why."""


def read_subject(
    path: Path, verb: str, settings: Mapping[str, Any], *, include_private: bool
) -> tuple[Subject | None, dict[str, Any]]:
    """The model that was given or attacked, if there is one; and the settings that were used.

    Guarantee: without `include_private` no file under a folder called `private` is opened.
    """
    role = ROLES.get(verb, "")
    given = settings.get(role)
    if given is None:
        here = _trained_here(path, settings, include_private) if verb == "invert" else None
        return here, dict(settings)
    place, name = Path(given), brief(given)
    taken = {*TRAINING, *HOW_TO_COMPUTE} - {*OWN[verb]}
    left_out = {*TRAINING, *HOW_TO_COMPUTE} - {*OWN[verb], *ELSEWHERE}
    used = {key: value for key, value in settings.items() if key not in left_out}
    if not (place / "config.json").is_file():
        instead = "not known", f"{name} is no run of sfumato here: nobody knows what it guaranteed."
        return Subject(role=role, model=name, instead=instead), {"model": name, **used}
    if lies_in_private(place) and not include_private:
        instead = "not shown", f"The {role} lies in private/: --include-private shows it."
        return Subject(role=role, model=f"a private {role}", instead=instead), used
    theirs = flags_of(read_json(place / "config.json")["config"])
    own = {key: theirs.get(key) if key in taken else value for key, value in settings.items()}
    return _subject(role, place, str(theirs.get("model"))), own


def _trained_here(path: Path, settings: Mapping[str, Any], include_private: bool) -> Subject:
    model, place = str(settings.get("model")), path / "private" / "stages" / "target"
    if settings.get("sweep"):
        instead = "none", "Targets of several epsilons were attacked."
    elif settings.get("mode") == "non-private":
        instead = PLAIN
    elif not include_private:
        instead = "not shown", "The target lies in private/: --include-private shows its guarantee."
    else:
        return _subject("target", place, model)
    return Subject(role="target", model=model, instead=instead)


def _subject(role: str, place: Path, model: str) -> Subject:
    try:
        ledger = ledger_of(place)
    except RunError:
        instead = "not known", f"The ledger of the {role} cannot be trusted."
        return Subject(role=role, model=model, instead=instead)
    if ledger is None:
        instead = "not known", f"The {role} has no ledger: nobody knows what it guaranteed."
        return Subject(role=role, model=model, instead=instead)
    guarantee = guarantee_of(ledger)
    if problems := damage(place, ledger, guarantee.epsilon):
        instead = "not known", f"The ledger of the {role} is damaged: {'; '.join(problems)}."
        return Subject(role=role, model=model, instead=instead)
    if math.isinf(guarantee.epsilon):
        return Subject(role=role, model=model, instead=PLAIN)
    return Subject(role=role, model=model, guarantee=guarantee)


PLAIN = "none", "The target was trained without noise, and guaranteed nothing."


def lies_in_private(path: Path) -> bool:
    """Whether a directory is inside the `private/` of a run."""
    real = path.resolve()
    folders = (real, *real.parents)
    return any(f.name == "private" and (f.parent / "config.json").exists() for f in folders)


def brief(value: Any) -> Any:
    """What a page shows that leaves this machine: whole paths by their last two names."""
    if isinstance(value, list):
        return [brief(one) for one in value]
    if not isinstance(value, str) or not value.startswith("/"):
        return value
    return "/".join(Path(value).parts[1:][-2:])


def flags_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without nests: a flag is called by its last name alone."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= flags_of(value) if isinstance(value, dict) else {name: value}
    return found
