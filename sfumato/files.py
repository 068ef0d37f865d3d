"""Files that survive a power cut: whole or not at all, lines on disk before they are relied on."""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from sfumato.config import dumps
from sfumato.errors import DamagedRun, RunError


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the system within this, such as a full disk, say which file they are about."""
    try:
        yield
    except OSError as problem:
        if problem.errno is not None and problem.filename is None:
            problem.filename = str(path)
        raise


@contextmanager
def atomic(path: Path, mode: int = 0o644) -> Iterator[IO[bytes]]:
    """A file that appears under its name whole, or not at all, whatever happens in between."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        with (
            naming(path),
            open(draft, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file,
        ):
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        _sync_folder(path.parent)
    finally:
        draft.unlink(missing_ok=True)


def append_line(path: Path, record: Mapping[str, Any], *, durable: bool) -> None:
    """Append a JSON line; with `durable` it is on disk when this returns."""
    is_new = not path.exists()
    with naming(path), path.open("ab") as file:
        file.write((dumps(dict(record)) + "\n").encode())
        file.flush()
        if durable:
            os.fsync(file.fileno())
    if durable and is_new:
        _sync_folder(path.parent)


def read_lines(path: Path, *, repair: bool = False) -> list[dict[str, Any]]:
    """The JSON lines of a file; none if it is not there.

    A last line cut short by a crash was never relied on: it does not count, and `repair` removes
    it.
    """
    if not path.exists():
        return []
    whole, newline, torn = path.read_bytes().rpartition(b"\n")
    if torn and repair:
        os.truncate(path, len(whole) + len(newline))
    try:
        return [json.loads(line) for line in whole.splitlines()]
    except ValueError as problem:
        raise DamagedRun(f"{path} is damaged: {problem}. Never edit it by hand.") from problem


def sha256(path: Path) -> str:
    """A hash of all that a file holds."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_file(path: Path) -> int:
    """Bring a file to the disk; returns how long it is."""
    if not path.exists():
        return 0
    with naming(path), path.open("ab") as file:
        os.fsync(file.fileno())
        return file.tell()


def read_json(path: Path) -> Any:
    """What a JSON file holds, or a `DamagedRun` that names it."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as problem:
        raise DamagedRun(f"{path} is damaged: {problem}.") from problem


def lock(path: Path) -> int:
    """A lock that the operating system releases when the process ends, however it ends."""
    descriptor = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        os.close(descriptor)
        if isinstance(problem, BlockingIOError):
            says = f"{path} is in use by another process. Wait for it, or choose another --out."
        else:
            says = (
                f"{path} lies on a filesystem that cannot lock files ({problem.strerror}). Choose "
                "an --out on another one: two processes in one run would spoil it."
            )
        raise RunError(says) from problem
    return descriptor


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
