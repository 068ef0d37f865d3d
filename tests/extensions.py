"""Small networks, private and public images for them, and extenders between the two.

As a script: a compiled step of a kind of extender, against the same step uncompiled.
"""

import sys
from dataclasses import replace

import torch
import torch.nn.functional as F
from teachers import PUBLIC, faces, inputs_of
from torch import nn

from sfumato.clipping.clip import GradientClipper
from sfumato.clipping.factors import Clipping
from sfumato.models.wrn import WideResNet
from sfumato.privacy.budget import Plan
from sfumato.privacy.ledger import Ledger, LedgerHeader
from sfumato.privacy.sampling import Batch, Chunk
from sfumato.privacy.session_key import SessionKey
from sfumato.training.extenders import Dope, Mirror, PublicGradient, WeightMultiplicity


class Tied(nn.Module):
    """A token, and one matrix there and back: every way a parameter can be used."""

    def __init__(self):
        super().__init__()
        self.token, self.turn = nn.Parameter(torch.randn(1, 1, 12)), nn.Linear(12, 12, bias=False)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 3)

    def forward(self, x):
        rows = torch.cat([self.token.expand(len(x), -1, -1), x.squeeze(1)], dim=1)
        rows = F.linear(self.turn(rows).tanh(), self.turn.weight.t())
        return self.head(self.norm(rows).mean(dim=1))


NETS = {
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Conv2d(4, 6, 3, 2),
        nn.Tanh(), nn.Flatten(), nn.Linear(96, 3),
    ),
    "standardised": lambda: WideResNet(3, 1, depth=10, width=1, groups=4),
    "tied": Tied,
}  # fmt: skip


def net(name="convolutions"):
    torch.manual_seed(0)
    return NETS[name]()


PRIVATE = inputs_of(faces(12, seed=3), seed=4)


def public(model, size=8):
    return PublicGradient(model, PUBLIC, size)


KINDS = {
    "dope": lambda model, views: Dope(public(model)),
    "mirror": lambda model, views: Mirror(public(model), 5),
    "weight-multiplicity": lambda model, views: WeightMultiplicity(public(model), views, 0.3),
}


def batch_of(places, step=0, padding=0):
    """A batch in one chunk; padding is image 0, which looks like any other."""
    indices = torch.tensor([*places, *[0] * padding], dtype=torch.int64)
    mask = torch.arange(len(indices)) < len(places)
    return Batch(step, (Chunk(indices, mask),) if len(places) else ())


def book(noise=0.0, steps=5, max_norm=1.0):
    """Plan, ledger and secret."""
    secret = SessionKey.from_seed(0)
    header = LedgerHeader(data="faces", delta=1e-3, fixed_seed=True, secret=secret.commitment)
    plan = Plan(noise_multiplier=noise, expected_batch=4.0, steps=steps, max_norm=max_norm)
    return plan, Ledger(header), secret


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def main(kind):
    model = net()
    extender = KINDS[kind](model, 2)
    extender.begin(0)
    inputs = replace(PRIVATE, views=2, wrap_loss=extender.wrap_loss)
    clipper = GradientClipper(model, clipping=Clipping(max_norm=0.3))
    tensors = inputs.tensors(batch_of(range(12)).chunks[0], 0)
    before = clipper.clip(inputs.losses, tensors, 12)
    torch._dynamo.config.trace_autograd_ops = True
    compiled = torch.compile(clipper.clip, fullgraph=True, backend="aot_eager")
    compiled(inputs.losses, tensors, 12)
    extender.begin(1)
    eager, found = (clip(inputs.losses, tensors, 12) for clip in (clipper.clip, compiled))
    torch.testing.assert_close(found.norms, eager.norms)
    assert not torch.allclose(eager.norms, before.norms, rtol=1e-3)
    for name, total in eager.total.items():
        torch.testing.assert_close(found.total[name], total, msg=name)


if __name__ == "__main__":
    main(sys.argv[1])
