"""What happens where a parameter meets the batch: one file for each family of operations.

`RULES` is the table. docs/extend/layer-rule.md shows how to add a rule.
"""

from sfumato.clipping.rules import attention, conv, elementwise, embedding, linear, norm
from sfumato.clipping.rules.registry import RULES, Rule, layer_rule

__all__ = [
    "RULES",
    "Rule",
    "attention",
    "conv",
    "elementwise",
    "embedding",
    "layer_rule",
    "linear",
    "norm",
]
