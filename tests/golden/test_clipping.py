"""Norms, factors and sums of small networks are those of the version before."""

import pytest

from golden import clipping
from golden.files import read
from golden.machine import machine
from golden.networks import NETWORKS

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

FROZEN = read("clipping.json.gz")
RTOL = 1e-5
"""Sums of some hundred float32 products in another order differ by up to 1e-6; what a mistake
changes (a factor, a term left out, a margin) is larger. Gram norms carry a margin of up to 5e-6."""
LOOSE = 2e-2
"""bf16 keeps eight bits, and another kind of CPU rounds at other places."""


@pytest.mark.parametrize("name", NETWORKS)
def test_clipping_gives_the_frozen_norms_factors_and_sums(name):
    same = not NETWORKS[name].autocast or FROZEN["machine"] == machine()
    clipping.compare(name, FROZEN["networks"][name], RTOL if same else LOOSE)


def test_every_network_is_frozen_in_every_way():
    assert set(FROZEN["networks"]) == set(NETWORKS)
    assert len(NETWORKS) >= 25
