"""Which of several processes this is: torchrun says so in the environment."""

import os


def num_processes() -> int:
    """How many processes torchrun started; one without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def leads() -> bool:
    """Whether this one speaks and keeps the run directory."""
    return os.environ.get("RANK", "0") == "0"


def local_rank() -> int:
    """The number of this process on its machine: that of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))
