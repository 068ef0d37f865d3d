"""Ranges of settings, by name: each check refuses what is not in one."""

import math
from typing import Any

from sfumato.errors import ConfigError


def check_counts_above_0(group: Any, *names: str) -> None:
    """Refuse numbers below 1; None and words are for those that are left out."""
    for name in names:
        value = getattr(group, name)
        if isinstance(value, int | float) and value < 1:
            raise ConfigError(f"{name}={value} must be at least 1.")


def check_above_0(group: Any, *names: str) -> None:
    """Refuse numbers that are not above 0 and finite; None is for those that are left out."""
    for name in names:
        value = getattr(group, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name}={value:g} must be above 0 and finite.")


def check_not_negative(group: Any, *names: str) -> None:
    """Refuse numbers that are below 0 or infinite; None is for those that are left out."""
    for name in names:
        value = getattr(group, name)
        if value is not None and not 0 <= value < math.inf:
            raise ConfigError(f"{name}={value:g} must be at least 0, and finite.")


def check_share(group: Any, *names: str) -> None:
    """Refuse numbers that are not between 0 and 1; None is for those that are left out."""
    for name in names:
        value = getattr(group, name)
        if value is not None and not 0 < value < 1:
            raise ConfigError(f"{name}={value:g} must lie between 0 and 1.")


def check_0_to_1(group: Any, *names: str) -> None:
    """Refuse numbers that are not from 0 to 1."""
    for name in names:
        if not 0 <= getattr(group, name) <= 1:
            raise ConfigError(f"{name}={getattr(group, name):g} must be between 0 and 1.")
