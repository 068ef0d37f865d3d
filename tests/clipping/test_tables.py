"""Tables that are read by a constant index before they meet the batch: relative positions."""

import pytest
import torch
import torch.nn.functional as F
from oracle import compare
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sfumato.clipping.clip import GradientClipper
from sfumato.clipping.rules.embedding import Rows

PLACES = torch.arange(5)
OFFSETS = PLACES[:, None] - PLACES[None, :]
"""From -4 to 4, so that the same rows come again, and some are counted from the end."""
READINGS = {
    "a flat index, then a view": lambda t: t[OFFSETS.reshape(-1) + 4].view(5, 5, 2),
    "an index of two axes": lambda t: t[OFFSETS + 4],
    "negative numbers": lambda t: t[OFFSETS],
    "small integers": lambda t: t[(OFFSETS + 4).int()],
    "an index in a tuple": lambda t: t[(OFFSETS + 4,)],
    "index_select": lambda t: torch.index_select(t, 0, (OFFSETS + 4).flatten()).view(5, 5, 2),
    "index_select along columns": lambda t: t.t().index_select(1, (OFFSETS + 4).flatten())
    .t().view(5, 5, 2),
    "embedding": lambda t: F.embedding(OFFSETS + 4, t),
    "embedding with padding": lambda t: F.embedding(OFFSETS + 4, t, padding_idx=0),
    "an index for each axis": lambda t: t[OFFSETS + 4, :],
    "after a function": lambda t: t.tanh()[OFFSETS + 4] * t.exp()[OFFSETS],
    "one row": lambda t: t[torch.tensor(3)].expand(5, 5, 2),
    "a mask": lambda t: t[torch.arange(9) % 2 == 0].repeat(5, 1).view(5, 5, 2),
}  # fmt: skip


class Attending(nn.Module):
    """Attention with a bias that is read from a table by relative position."""

    def __init__(self, reading):
        super().__init__()
        self.reading, self.qkv = reading, nn.Linear(8, 12)
        self.table = nn.Parameter(torch.randn(9, 2))

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        bias = READINGS[self.reading](self.table).permute(2, 0, 1).contiguous().unsqueeze(0)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


@pytest.mark.parametrize("reading", READINGS)
def test_a_table_read_by_constants_matches_autograd(reading):
    torch.manual_seed(0)
    x = torch.randn(4, 5, 8, dtype=torch.float64)
    compare(Attending(reading).double(), x, 4)


class Counted(TorchDispatchMode):
    """How often each operation is made."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(func.overloadpacket)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("reading", ["an index of two axes", "index_select", "embedding"])
def test_all_examples_are_pulled_back_at_once(reading):
    model, counts = Attending(reading), {}
    clipper = GradientClipper(model)
    for n in (3, 12):
        x = torch.randn(n, 5, 8)
        clipper.clip(lambda model, x: model(x).square().sum(dim=(1, 2, 3)), (x,), n)
        with Counted() as seen:
            clipper.clip(lambda model, x: model(x).square().sum(dim=(1, 2, 3)), (x,), n)
        counts[n] = len(seen.calls)
        assert seen.calls.count(torch.ops.aten.index_add) == 1
        assert torch.ops.aten.index_put not in seen.calls
    assert counts[3] == counts[12]


def test_rows_in_low_precision_add_up_in_float32():
    # In bf16 a sum of ones stops growing at 256.
    table = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    read = Rows.apply(table, torch.zeros(1000, dtype=torch.long))
    (gradient,) = torch.autograd.grad(read.sum(), table)
    assert gradient.dtype == torch.bfloat16
    assert gradient.tolist() == [1000.0, 0.0]
