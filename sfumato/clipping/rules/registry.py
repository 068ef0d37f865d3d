"""The table of rules: what to do where a parameter meets the batch in a given torch operation.

To add a rule, write a function that takes the tape and the operation's own arguments, and put
`@layer_rule(operation)` above it, in the file of its family here. docs/extend/layer-rule.md walks
through an example. `RULES` is also the test matrix: see tests/clipping/test_rules.py.
"""

from collections.abc import Callable
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """What is done in an operation where a parameter meets the batch."""

    follow: Callable[..., Any]
    """A function of the tape and of the operation's own arguments."""
    any_axis: bool = False
    """Whether it looks at `tape.here.axes` itself, wherever the examples are."""
    trailing_axes: Callable[..., int] | None = None
    """Of an operation that treats leading axes alike: how many of the last ones it does not."""


RULES: dict[Callable[..., Any], Rule] = {}


def layer_rule(
    *operations: Callable[..., Any],
    any_axis: bool = False,
    trailing_axes: Callable[..., int] | None = None,
) -> Callable[[Callable[..., Any]], Any]:
    """Register a rule for these torch operations.

    It is followed where the examples are on the first axis of the first argument, and no other
    argument has any; elsewhere the operation runs one example at a time. Two kinds of rules serve
    more often. With `trailing_axes`, a function of the operation's own arguments, examples on any
    axis before those are moved to the first one and back. With `any_axis` the rule is followed
    wherever they are, and looks at `tape.here.axes` itself.
    """

    def register(follow: Callable[..., Any]) -> Callable[..., Any]:
        RULES.update(dict.fromkeys(operations, Rule(follow, any_axis, trailing_axes)))
        return follow

    return register
