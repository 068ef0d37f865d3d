"""Work that is cut in the middle, as a machine that fails would cut it."""

from contextlib import contextmanager
from pkgutil import resolve_name

import pytest
from planted import replace_everywhere


class Cut(Exception):
    """Somebody pulled the plug."""


@contextmanager
def cut_in(name, after):
    """What is done inside is cut in the call of module:function after that many of them."""
    original, calls = resolve_name(name), []

    def cut(*arguments, **options):
        calls.append(name)
        if len(calls) == after + 1:
            raise Cut
        return original(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        where, _, function = name.partition(":")
        *inner, last = function.split(".")
        replace_everywhere(patch, resolve_name(":".join([where, ".".join(inner)])), last, cut)
        with pytest.raises(Cut):
            yield
