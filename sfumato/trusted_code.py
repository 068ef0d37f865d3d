"""Code that a folder names runs only if the user says that it is known.

A network of one's own is `module:function`. Typed by the user, that is an order. Read from files of
a folder, which may be a stranger's, it is not: there may be anything in such a module.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from sfumato.errors import RunError

_trusted = ContextVar("_trusted", default=False)


@contextmanager
def trusting(known: bool = True) -> Iterator[None]:
    """Within this, code that folders name may run, if it is `known`: `--trust-code`."""
    before = _trusted.set(known)
    try:
        yield
    finally:
        _trusted.reset(before)


def is_own_code(name: str) -> bool:
    """Whether a model's name is a module:function."""
    module, _, function = name.partition(":")
    return bool(function) and module != "torchvision"


def require_trust(name: str, place: object) -> None:
    """Refuse code of this name, read from files in `place`, unless the user trusts it."""
    if not _trusted.get():
        raise RunError(
            f'{place} names "{name}", code that would be imported and run. If you know it, and '
            "trust it: --trust-code (in Python: load_model(..., trust_code=True))."
        )
