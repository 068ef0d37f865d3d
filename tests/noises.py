"""Releases of sums for tests: a plan, a ledger, and both ways in which noise is made."""

import pytest
from interpreted import interpret_kernels
from samples import sampled

from sfumato.privacy.budget import Plan
from sfumato.privacy.ledger import Ledger, LedgerHeader
from sfumato.privacy.noise import privatize
from sfumato.privacy.session_key import SessionKey

PLAN = Plan(noise_multiplier=1.5, max_norm=4.0, expected_batch=20, rate=0.1, steps=50)
SOURCES = ["philox", "chacha20"]
SEED = SessionKey.from_seed(0)


WAYS = ["torch", "kernels"]
BOTH = pytest.mark.parametrize("way", WAYS, indirect=True)
"""For tests that go both ways in `make test` too."""
EACH = sampled(noise=SOURCES, way=WAYS, indirect=["way"])


@pytest.fixture(
    name="way", autouse=True, params=["torch", pytest.param("kernels", marks=pytest.mark.full)]
)
def both_ways(request, monkeypatch):
    """Noise and tags as a CPU makes them; and as a GPU does, in Triton's interpreter."""
    if request.param == "kernels":
        interpret_kernels(monkeypatch)
    return request.param


def ledger(noise="philox", secret=SEED, **changes):
    settings = {"fixed_seed": secret.fixed, "secret": secret.commitment, **changes}
    return Ledger(LedgerHeader(data="faces", delta=1e-5, noise=noise, **settings))


def release(total, *, plan=PLAN, book=None, secret=SEED, step=0, noise="philox"):
    book = ledger(noise, secret) if book is None else book
    return privatize({"x": total}, plan, book, secret, step=step, stage="train")["x"]
