"""The command line as torchrun starts it: several processes on one machine."""

import os
import subprocess
import sys


def command(processes, *words):
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    # After -- torchrun leaves words alone: it would take --run for one of its own flags, cut short.
    start = ["-m"] if processes == 1 else [*several, "-m", "--"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, *start, "sfumato", *map(str, words)]
    return subprocess.run(words, capture_output=True, text=True, env=environment, timeout=300)
