"""What is computed for an example is the same among other examples, and at another place."""

import pytest
import torch
from loops import attached, dataset, losses, repeatable
from torch import nn

from sfumato.clipping.admit import admit, clipped_gradient
from sfumato.clipping.clip import GradientClipper
from sfumato.clipping.method_choice import MODES
from sfumato.clipping.mixing import check_mixing
from sfumato.errors import PrivacyError, UnsupportedLayer


class Placed(nn.Module):
    """Does something with the places of a batch, or with how many there are."""

    def __init__(self, change=lambda _, out: out, more=0):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.change, self.more = nn.Linear(64, 3), change, more
        self.register_buffer("row", torch.randn(64, 3))

    def forward(self, x):
        out = self.body(x.flatten(1))
        return self.change(self, out) if len(out) > self.more else out


CHANGES = {
    "length": lambda _, out: out / len(out),
    "a buffer with a row for each place": lambda self, out: out + self.row[: len(out)],
    "a sign by place": lambda _, out: out * (1 - 2 * (torch.arange(len(out)) % 2))[:, None],
    "only the last": lambda _, out: out * (torch.arange(len(out)) < len(out) - 1)[:, None],
}


@pytest.mark.parametrize("examples", [1, 3, 6])
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_looks_at_places_or_counts_examples_is_not_admitted(change, examples):
    x, y = dataset()[:examples]
    with pytest.raises(UnsupportedLayer, match="place"):
        admit(GradientClipper(Placed(CHANGES[change])), losses, (x, y), examples)
    admit(GradientClipper(Placed()), losses, (x, y), examples)


@pytest.mark.parametrize("mode", MODES)
def test_a_mean_made_by_hand_is_refused(mode):
    def mean(model, x, y):
        return losses(model, x, y) / len(x)

    with pytest.raises(UnsupportedLayer, match=r"len\(batch\)"):
        clipped_gradient(Placed(), mean, dataset()[:4], max_norm=1.0, mode=mode)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_mean_made_in_compiled_code_is_refused():
    divided = torch.compile(lambda out: out / len(out), backend="eager")

    def mean(model, x, y):
        return divided(losses(model, x, y))

    with pytest.raises(UnsupportedLayer, match=r"len\(batch\)"):
        clipped_gradient(Placed(), mean, dataset()[:4], max_norm=1.0)


@pytest.mark.parametrize(
    "drops", [nn.Dropout(0.5), nn.MultiheadAttention(3, 1, 0.5, batch_first=True)]
)
def test_what_dropout_hides_is_noticed(drops):
    class Dropping(Placed):
        def __init__(self, change):
            super().__init__(change)
            self.drops = drops

        def forward(self, x):
            out = super().forward(x)
            if isinstance(self.drops, nn.Dropout):
                return self.drops(out)
            return self.drops(*[out[:, None]] * 3)[0].flatten(1) + out

    admit(GradientClipper(Dropping(lambda _, out: out)), losses, dataset()[:3], 3)
    for change in CHANGES.values():
        with pytest.raises(UnsupportedLayer, match="place"):
            admit(GradientClipper(Dropping(change)), losses, dataset()[:3], 3)


@pytest.mark.parametrize("change", CHANGES)
def test_a_branch_that_only_larger_batches_take_is_noticed_in_the_first_of_them(change):
    model = Placed(CHANGES[change], more=8)
    x, y = dataset()[:12]
    admit(GradientClipper(model), losses, (x[:3], y[:3]), 3)
    with pytest.raises(PrivacyError, match="place"):
        check_mixing(GradientClipper(model), losses, (x, y), 12)
    model, optimizer, engine = attached(model, **repeatable())
    with pytest.raises(PrivacyError, match="place"):
        optimizer.step(loss=losses(model, x, y))
    assert engine.taken == 0


@pytest.mark.parametrize("change", CHANGES)
def test_two_examples_are_enough_to_notice_it(change):
    with pytest.raises(PrivacyError, match="place"):
        check_mixing(GradientClipper(Placed(CHANGES[change])), losses, dataset()[:2], 2)
