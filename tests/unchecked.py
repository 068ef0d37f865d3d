"""Calls as users make them: without the checks of types that tests run with."""

from contextlib import contextmanager

from jaxtyping import config


@contextmanager
def unchecked():
    """What is called in here takes arguments of any type."""
    config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        config.update("jaxtyping_disable", False)
