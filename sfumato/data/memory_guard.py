"""Whether images have room in memory: asked before they are unpacked, decoded or enlarged."""

import os
import resource
from pathlib import Path

from sfumato.errors import DataError

GROUP = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Bytes that this process may still take: of the machine, its container and `ulimit -v`."""
    found = (_free_on_machine(), _free_in_container(), _free_addresses())
    return max(0, min(free for free in found if free is not None))


def require_memory(needed: int, what: str, remedy: str) -> None:
    """Refuse what would not fit, before any work; `what` it is, in words."""
    free = free_memory()
    if needed > free:
        raise DataError(
            f"{what} need {needed / 1e9:,.1f} GB of memory, and {free / 1e9:,.1f} GB are free. "
            f"{remedy}"
        )


def _free_on_machine() -> int:
    try:
        found = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(found["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 5 // 8


def _free_in_container() -> int | None:
    try:
        limit, used = (int((GROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (GROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return limit - used + int(stat["inactive_file"]) + int(stat["active_file"])  # cached files


def _free_addresses() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError):
        return None
    return limit - pages * os.sysconf("SC_PAGE_SIZE")
