"""sfumato: train vision models on images you must not leak.

Names are loaded when they are first used, so `import sfumato` takes no time:

    images = sfumato.load_images("digits", "train")
    plan = sfumato.make_plan(sfumato.Budget(epsilon=3, delta=1e-5), size=len(images), ...)

The list of public names is `__init__.pyi`, which type checkers read too.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any
from warnings import warn

__version__ = "0.1.0"

RENAMED: dict[str, str] = {
    "Event": "Release",
    "Ghost": "GradientClipper",
    "Header": "LedgerHeader",
    "Secret": "SessionKey",
}
"""Public names of the last version, each with today's. The old work for one version, and warn."""


def _modules() -> dict[str, str]:
    """Where each public name is defined."""
    listed = ast.parse(Path(__file__).with_suffix(".pyi").read_bytes()).body
    imports = (line for line in listed if isinstance(line, ast.ImportFrom))
    return {name.name: line.module or "" for line in imports for name in line.names}


_MODULES = _modules()


def __getattr__(name: str) -> Any:
    if name in RENAMED:
        new = RENAMED[name]
        warn(f"sfumato.{name} is now sfumato.{new}", DeprecationWarning, stacklevel=2)
        name = new
    if name not in _MODULES:
        raise AttributeError(f"module 'sfumato' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*_MODULES, "__version__"])
