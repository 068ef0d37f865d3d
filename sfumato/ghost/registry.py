"""The table of rules: what to do where a parameter meets the batch in a given torch operation.

To add a rule, write a function that takes the tape and the operation's own arguments, and put
`@norm_rule(operation)` above it, in one of the files that `dispatch` imports. `RULES` is also the
test matrix: see tests/ghost/test_rules.py.
"""

from collections.abc import Callable
from typing import Any

RULES: dict[Callable[..., Any], Callable[..., Any]] = {}


def norm_rule(*operations: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Register a rule for these torch operations."""

    def register(rule: Callable[..., Any]) -> Callable[..., Any]:
        RULES.update(dict.fromkeys(operations, rule))
        return rule

    return register
