"""The table of rules: what to do where a parameter meets the batch in a given torch operation.

To add a rule, write a function that takes the tape and the operation's own arguments, and put
`@norm_rule(operation)` above it, in one of the files that `dispatch` imports. docs/rules.md walks
through an example. `RULES` is also the test matrix: see tests/clipping/test_rules.py.
"""

from collections.abc import Callable
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """What is done in an operation where a parameter meets the batch."""

    follow: Callable[..., Any]
    """A function of the tape and of the operation's own arguments."""
    finds_examples: bool = False
    """Whether it looks at `tape.here.axes` itself, wherever the examples are."""
    last_axes: Callable[..., int] | None = None
    """Of an operation that treats leading axes alike: how many of the last ones it does not."""


RULES: dict[Callable[..., Any], Rule] = {}


def norm_rule(
    *operations: Callable[..., Any], finds_examples: bool = False,
    last_axes: Callable[..., int] | None = None,
) -> Callable[[Callable[..., Any]], Any]:  # fmt: skip
    """Register a rule for these torch operations.

    It is followed where the examples are on the first axis of the first argument, and no other
    argument has any; elsewhere the operation runs one example at a time. Two kinds of rules serve
    more often. With `last_axes`, a function of the operation's own arguments, examples on any axis
    before those are moved to the first one and back. A rule that `finds_examples` is followed
    wherever they are.
    """

    def register(follow: Callable[..., Any]) -> Callable[..., Any]:
        RULES.update(dict.fromkeys(operations, Rule(follow, finds_examples, last_axes)))
        return follow

    return register
