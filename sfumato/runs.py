"""The run directory: what a command leaves, how it is resumed, and how commands hand on work.

    config.json  plan.json  ledger.jsonl  metrics.jsonl  log.txt
    start.json    what is known of the weights that it began with (`lineage`)
    model.safetensors | images.npz | ...      artefacts; never a pickle
    private/      what was computed from private images without a mechanism, and the run's secret;
                  findings.json is what of it a report shows (`results`)
    stages/NAME/  sub-runs, each with its own done.json
    report.html  report.md  card.json         what `sfumato report` makes of all this
    done.json     the summary; written last

Everything outside `private/` is covered by the ledger and may be shared. The same command goes on
where it was cut: files appear whole or not at all, lines are on disk before anything relies on
them, and what was logged after the last checkpoint is forgotten before it is logged again.
"""

import os
import re
import shutil
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfumato.checkpoints import read_checkpoint, write_checkpoint
from sfumato.config import VERSION, dumps, to_json
from sfumato.errors import RunError
from sfumato.files import append_line, atomic, lock, naming, read_json, read_lines
from sfumato.lineage import DESCRIPTION, NOTE, digest_of, origin_in_place
from sfumato.resume_check import REPORT as REPORT
from sfumato.resume_check import changes, contents, has_begun, needs_config

if TYPE_CHECKING:
    from torch import Tensor


CHECKPOINT = "checkpoint.safetensors"
UNTIL_FINISHED = ("secret.key", CHECKPOINT, "sums.safetensors", "count.json")
"""What `private/` holds only until a run or stage is finished: its secret, where it is, and exact
numbers that it releases with noise."""
HERE = "{run}"
"""How a summary names the folder of its run: where that lies may say who made it."""


@dataclass
class Run:
    """An open run directory. Make one with `open_run`; stages come from `stage`."""

    path: Path
    say: Callable[[str], None] = lambda _: None
    """Where messages go besides log.txt: the command line sets it."""
    _release: Callable[[], object] = field(default=lambda: None, repr=False)
    _is_new: bool = False
    """Whether the directory was made for this order."""
    _before: tuple[bytes, set[str]] | None = field(default=None, repr=False)
    """The config that this order has replaced, and the stages that had begun then."""

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let other processes have the directory. Happens by itself when the run goes away."""
        self._release()

    def forget(self) -> None:
        """Leave things as they were before an order that was refused before it began.

        A directory that was made for it goes; a config that it has changed comes back.
        """
        if self._is_new and not self.has_begun:
            shutil.rmtree(self.path)
        elif self._before is not None and self._before[1] == self.begun_stages:
            with atomic(self.path / "config.json") as file:
                file.write(self._before[0])

    @property
    def private(self) -> Path:
        """The folder for what must not be shared; made on first use, readable by its owner."""
        folder = self.path / "private"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    @property
    def has_begun(self) -> bool:
        """Whether anything was made in it with its settings."""
        return has_begun(self.path)

    @property
    def begun_stages(self) -> set[str]:
        """The stages in which something was made."""
        return {place.name for place in (self.path / "stages").glob("*") if has_begun(place)}

    def has_begun_stage(self, name: str) -> bool:
        """The same of a stage, which need not be there."""
        return has_begun(self.path / "stages" / name)

    @property
    def finished(self) -> bool:
        """Whether the run has its summary."""
        return (self.path / "done.json").exists()

    @property
    def summary(self) -> dict[str, Any]:
        """What `finish` wrote, with the run where it is now."""
        return _renamed(read_json(self.path / "done.json"), HERE, str(self._home))

    def stage(self, name: str) -> "Run":
        """The sub-run of that name: a directory of its own, skipped when it is finished."""
        folder = self.path / "stages" / name
        folder.mkdir(parents=True, exist_ok=True)
        stage = Run(folder, self.say)
        stage._tidy()
        return stage

    def log(self, message: str) -> None:
        """A line for people, on the screen and in log.txt."""
        path = self.path / "log.txt"
        with naming(path), path.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {message}\n")
        self.say(message)

    def measure(self, step: int, *, private: bool = False, **numbers: float) -> None:
        """A line for programs, in metrics.jsonl.

        Numbers computed from private images without noise (losses, clip rates) must be marked
        `private`: they go to private/metrics.jsonl.
        """
        folder = self.private if private else self.path
        append_line(folder / "metrics.jsonl", {"step": step, **numbers}, durable=False)

    def write_json(self, name: str, value: Any) -> Path:
        """A JSON file in the run; `private/scores.json` and the like too."""
        path = self.path / name
        if path.parent == self.path / "private":
            path = self.private / path.name
        with atomic(path) as file:
            file.write((dumps(value, indent=2) + "\n").encode())
        return path

    def ledger_records(self) -> list[dict[str, Any]]:
        """The lines of ledger.jsonl, ready to be added to; empty when there is none yet."""
        return read_lines(self.path / "ledger.jsonl", repair=True)

    def write_ledger(self, record: Mapping[str, Any]) -> None:
        """Append a line to ledger.jsonl; it is on disk when this returns.

        A tag that was told later may come to the disk later: without it a step costs no less.
        """
        append_line(self.path / "ledger.jsonl", record, durable="tag" not in record)

    def secret(self, make: Callable[[], bytes]) -> bytes:
        """The run's secret key, made once and kept in `private/` until the run is finished.

        A run that has charged its ledger and lost its secret cannot go on: the step it would repeat
        would be another release, with other noise, and nobody would have paid for it.
        """
        path = self.private / "secret.key"
        if not path.exists():
            if len(self.ledger_records()) > 1:
                raise RunError(
                    f"{self.path} has charged its ledger, and {path.name} is gone: it cannot go on "
                    "without a second, unpaid release. Start a new run with another --out."
                )
            with atomic(path, mode=0o600) as file:
                file.write(make())
        return path.read_bytes()

    def save_tensors(
        self,
        name: str,
        tensors: "Mapping[str, Tensor]",
        guarantee: Mapping[str, Any] | None = None,
        made: Any = None,
    ) -> Path:
        """An artefact in the safetensors format, with a note of where it comes from.

        `made` describes the network that the tensors are weights of, as model.json does: a program
        that reads both sees whether one of them was exchanged.
        """
        from safetensors.torch import save

        path = self.path / name
        plain = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        origin = origin_in_place(path.resolve())
        notes = {}
        if origin is not None:
            notes[NOTE] = replace(origin, tensors=digest_of(plain)).note
        notes |= {} if guarantee is None else {"promise": dumps(guarantee)}
        notes |= {} if made is None else {DESCRIPTION: dumps(made)}
        with atomic(path) as file:
            file.write(save(plain, metadata=notes or None))
        return path

    def save_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Keep a nested state of tensors and plain values, replacing the last one in one move.

        It stays in `private/`: how far a generator has come tells how large the batches were.
        Generators go in by `generator.get_state()`, modules and optimizers by `state_dict()`.
        """
        write_checkpoint(self.private / CHECKPOINT, self.path, state)

    def load_checkpoint(self) -> dict[str, Any] | None:
        """The last state saved, or None. Metrics logged after it are dropped: they come again."""
        return read_checkpoint(self.path / "private" / CHECKPOINT, self.path)

    def finish(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Write the summary, then clear away what only an unfinished run needs.

        The summary may be shared, so the path of the run does not stand in the file.
        """
        self.write_json("done.json", _renamed(to_json(dict(summary)), str(self._home), HERE))
        self._tidy()
        return self.summary

    @property
    def _home(self) -> Path:
        """The run itself, or the one that it is a stage of."""
        places = (self.path, *self.path.parents)
        return next((place for place in places if (place / "config.json").exists()), self.path)

    def _tidy(self) -> None:
        """Remove drafts that a crash left, and of a finished run what only a running one needs."""
        for draft in list(self.path.glob("**/.*.draft")):
            if draft.is_dir():
                shutil.rmtree(draft)
            else:
                draft.unlink(missing_ok=True)
        if self.finished:
            for name in UNTIL_FINISHED:
                (self.path / "private" / name).unlink(missing_ok=True)
            for stage in (self.path / "stages").glob("*"):
                Run(stage)._tidy()


def open_run(
    config: Any,
    *,
    verb: str,
    out: Path | None = None,
    root: Path = Path("runs"),
    label: str = "",
    say: Callable[[str], None] = lambda _: None,
) -> Run:
    """Open the run of `config`: a new one, or the one that an earlier, equal command left.

    With `out` that is the directory; a different config in it is refused, field by field, except
    for what may change (`sfumato.resume_check`), and is then what the directory says. Without it,
    an unfinished run of the same command and config under `root` goes on, else a new directory is
    named after command, label and time. Another process in the same directory is refused.
    """
    wanted = {"version": VERSION, "verb": verb, "config": to_json(config)}
    free = getattr(config, "MAY_CHANGE", ())
    stem = "-".join(filter(None, (verb, label)))
    path = out or _unfinished(root, wanted, free, type(config)) or _fresh(root, stem)
    if path.exists() and not path.is_dir():
        raise RunError(f"{path} is a file. Give a directory with --out.")
    if path.exists() and not (path / "config.json").exists() and contents(path):
        raise RunError(f"{path} is not empty and holds no run. Choose another --out.")
    is_new = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    run = Run(path, say, _is_new=is_new)
    run._release = weakref.finalize(run, os.close, lock(path))
    try:
        run._tidy()
        if needs_config(path, wanted, free, getattr(config, "read_first", {}), type(config)):
            if run.has_begun:
                run._before = (path / "config.json").read_bytes(), run.begun_stages
            run.write_json("config.json", wanted)
    except BaseException:
        run.close()
        raise
    return run


def _unfinished(root: Path, wanted: Any, free: Sequence[str], kind: type) -> Path | None:
    """The newest unfinished run of this very config that nobody is working on."""
    records = sorted(root.glob(f"{wanted['verb']}*/config.json"), key=lambda p: p.stat().st_mtime)
    for record in reversed(records):
        try:
            if (record.parent / "done.json").exists():
                continue
            if changes(record.parent, wanted, free, kind):
                continue
            os.close(lock(record.parent))
        except RunError:
            continue
        return record.parent
    return None


def _renamed(value: Any, path: str, to: str) -> Any:
    """JSON in whose texts this path, wherever it stands by itself, has another name."""
    if isinstance(value, dict):
        return {key: _renamed(item, path, to) for key, item in value.items()}
    if isinstance(value, list):
        return [_renamed(item, path, to) for item in value]
    # A path of one word may be any word, and gives nothing away.
    if not isinstance(value, str) or not (os.sep in path or path == HERE):
        return value
    return re.sub(rf"(?<!\S){re.escape(path)}(?![^\s/:.,])", lambda _: to, value)


def _fresh(root: Path, stem: str) -> Path:
    stem = f"{stem}-{time.strftime('%Y%m%d-%H%M')}"
    names = [stem, *(f"{stem}-{i}" for i in range(2, 1000))]
    return next(root / name for name in names if not (root / name).exists())
