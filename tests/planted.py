"""A function of the package that is replaced wherever a module imported it."""

import sys


def replace_everywhere(monkeypatch, where, name, new):
    """Put `new` in the place of a function of a module or class, and wherever it is imported."""
    old = getattr(where, name)
    monkeypatch.setattr(where, name, new)
    for module in [found for known, found in sys.modules.items() if known.startswith("sfumato")]:
        for known, value in list(vars(module).items()):
            if value is old:
                monkeypatch.setattr(module, known, new)
