"""Write the frozen numbers again: PYTHONPATH=.:tests python -m golden.freeze clipping epsilon ...

Only for a change that is meant to change them: the commit says which, and why.
"""

import sys
import tempfile
from pathlib import Path

from golden import clipping, digests, stored, streams
from golden.adapter import epsilon_of
from golden.files import write
from golden.machine import machine
from golden.networks import NETWORKS
from golden.plans import PLANS


def freeze_clipping() -> None:
    networks = {name: clipping.freeze(name) for name in NETWORKS}
    write("clipping.json.gz", {"machine": machine(), "networks": networks})


def freeze_epsilon() -> None:
    write("epsilon.json", {name: epsilon_of(plan) for name, plan in PLANS.items()})


def freeze_streams() -> None:
    write("streams.json", streams.compute())


def freeze_stored() -> None:
    write("stored.json", {"v1": stored.compute("v1")})


def freeze_commands() -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = digests.compute(Path(folder))
    write("commands.json.gz", {"machine": machine(), "runs": runs})


PARTS = {
    "clipping": freeze_clipping, "epsilon": freeze_epsilon, "streams": freeze_streams,
    "stored": freeze_stored, "commands": freeze_commands,
}  # fmt: skip

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
