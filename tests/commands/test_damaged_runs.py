"""Every way to tamper with a finished run, and every command that reads one: nobody believes it."""

import json
import shutil
import zlib
from base64 import b85decode, b85encode

import pytest
import torch
from finished import COMMANDS
from finished import runs as runs
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from samples import sampled

import sfumato
from sfumato.errors import DataError, RunError, SfumatoWarning
from sfumato.files import read_json
from sfumato.integrity import require_whole
from sfumato.lineage import LARGEST, read_tensor_note
from sfumato.runs import Run

REFUSE = ("load_model", "audit", "release", "invert", "weights")


def lines_of(run):
    return (run / "ledger.jsonl").read_text().splitlines(keepends=True)


def ledger(change):
    """A change of the ledger's lines, header first."""

    def tamper(run):
        (run / "ledger.jsonl").write_text("".join(change(lines_of(run))))

    return tamper


def releases(change, which=slice(1, None)):
    """A change of the events in some lines."""

    def tamper(lines):
        for place in range(len(lines))[which]:
            record = json.loads(lines[place])
            if "event" in record:
                record["event"] = change(record["event"])
                lines[place] = json.dumps(record) + "\n"
        return lines

    return ledger(tamper)


def header(**changes):
    def tamper(lines):
        first = json.loads(lines[0])
        assert set(changes) <= set(first["header"])
        return [json.dumps({"header": first["header"] | changes}) + "\n", *lines[1:]]

    return ledger(tamper)


def edit(name, **changes):
    def tamper(run):
        (run / name).write_text(json.dumps(read_json(run / name) | changes))

    return tamper


def weights(change=torch.clone, notes=lambda notes: notes):
    """Other tensors or notes in the same file."""

    def tamper(run):
        file = run / "model.safetensors"
        with safe_open(file, framework="pt") as opened:
            kept = notes(opened.metadata())
        made = {name: change(value.clone()) for name, value in load_file(file).items()}
        save_file(made, file, metadata=kept)

    return tamper


def without(*names):
    """Notes less these."""
    return lambda notes: {name: value for name, value in notes.items() if name not in names}


def digest(value=None):
    """Notes with another digest, or none."""

    def change(notes):
        note = without("tensors")(json.loads(notes["sfumato"]))
        note |= {} if value is None else {"tensors": value}
        return notes | {"sfumato": json.dumps(note)}

    return change


def no_neighbours(run):
    """Ledger, its copy and the summary as they were before they said between what they hold."""

    def older(text):
        first, *rest = text.splitlines(keepends=True)
        header = without("neighbours")(json.loads(first)["header"])
        return "".join([json.dumps({"header": header}) + "\n", *rest])

    def noted(notes):
        note = json.loads(notes["sfumato"])
        copy = older(zlib.decompress(b85decode(note["ledger"])).decode())
        note["ledger"] = b85encode(zlib.compress(copy.encode())).decode()
        return notes | {"sfumato": json.dumps(note)}

    (run / "ledger.jsonl").write_text(older((run / "ledger.jsonl").read_text()))
    weights(notes=noted)(run)
    summary = without("neighbours")(read_json(run / "done.json"))
    (run / "done.json").write_text(json.dumps(summary))


def both(*changes):
    def tamper(run):
        for change in changes:
            change(run)

    return tamper


def spoil(value):
    value.view(-1)[0] = torch.nan
    return value


def diverge(run):
    """NaN from the start: the note is about these very weights."""
    spoilt = {n: spoil(value) for n, value in load_file(run / "model.safetensors").items()}
    Run(run).save_tensors("model.safetensors", spoilt, made=read_json(run / "model.json"))


def cut(name, share=0.5):
    def tamper(run):
        whole = (run / name).read_bytes()
        (run / name).write_bytes(whole[: int(share * len(whole))])

    return tamper


LEDGER = {
    "last lines cut": ledger(lambda lines: lines[:-2]),
    "torn line": ledger(lambda lines: [*lines[:-1], lines[-1][:-20]]),
    "middle line removed": ledger(lambda lines: [*lines[:3], *lines[4:]]),
    "header alone": ledger(lambda lines: lines[:1]),
    "more noise": releases(lambda e: e | {"noise_multiplier": 10 * e["noise_multiplier"]}),
    "a lower rate": releases(lambda e: e | {"rate": e["rate"] / 10}, slice(2, 3)),
    "a larger delta": header(delta=0.01),
    "another unit": header(unit="person"),
    "another relation": header(relation="replace"),
    "other noise": header(noise="chacha20"),
    "other data": header(data="flowers-train"),
    "more public": header(public="everything"),
    "empty": ledger(lambda lines: []),
}
WEIGHTS = {
    "random weights": weights(torch.randn_like),
    "random weights without a note": weights(torch.randn_like, lambda _: None),
    "random weights, an empty digest": weights(torch.randn_like, digest("")),
    "random weights without a digest": weights(torch.randn_like, digest()),
    "random weights, a list for a digest": weights(torch.randn_like, digest([])),
    "random weights, neither digest nor description": weights(
        torch.randn_like, lambda notes: without("model.json")(digest()(notes))
    ),
    "NaN": weights(spoil),
    "NaN from the start": diverge,
    "truncated weights": cut("model.safetensors"),
    "weights of no bytes": cut("model.safetensors", 0),
    "another norm": edit("model.json", norm="frozen"),
    "other classes": edit("model.json", classes=["one", "two", "zero"]),
    "other classes, which the weights do not say": both(
        edit("model.json", classes=["one", "two", "zero"]), weights(notes=without("model.json"))
    ),
}
ELSEWHERE = {
    "no ledger": lambda run: (run / "ledger.jsonl").unlink(),
    "a lower epsilon": edit("done.json", epsilon=0.1),
    "another delta in the summary": edit("done.json", delta=0.3),
    "random weights without a digest, as if old": both(
        no_neighbours, weights(torch.randn_like, digest())
    ),
    "other classes, as if old": both(
        WEIGHTS["other classes, which the weights do not say"], no_neighbours
    ),
}
UNDESCRIBED = {
    "a note without a digest": lambda notes: without("model.json")(digest()(notes)),
    "no note": lambda _: None,
    "a description without a note": without("sfumato"),
}
"""What is left in random weights whose model.json was taken away."""
SIGNS = {"ledger": "ledger.jsonl", "copy": "model.safetensors", "summary": "done.json"}
"""Files that say, each by itself, that a run is of today."""


@sampled(how=[*LEDGER, *WEIGHTS, *ELSEWHERE], name=list(COMMANDS))
def test_no_command_believes_a_run_that_was_tampered_with(how, name, runs, tmp_path):
    run = runs.copy("train", tmp_path / "run")
    (LEDGER | WEIGHTS | ELSEWHERE)[how](run)
    code, words = COMMANDS[name](run, runs.public, tmp_path / "out")
    assert "Traceback" not in words
    if name == "account" and how in ("empty", "no ledger"):
        assert code == 2, words
    elif name in REFUSE:
        assert (code, "is damaged" in words) == (3, True), words
    else:
        assert (code, "DAMAGED" in words) == (3, True), words
        assert name != "account" or words.startswith("DAMAGED")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_run_as_it_was_made_is_believed_in_whatever_order_its_lines_are(name, runs, tmp_path):
    run = runs.copy("train", tmp_path / "run")
    ledger(lambda lines: [lines[0], *reversed(lines[1:])])(run)
    code, words = COMMANDS[name](run, runs.public, tmp_path / "out")
    assert (code, "DAMAGED" in words) == (0, False), words


def taken_along(runs, folder):
    """The three files that docs say to take along."""
    folder.mkdir()
    for name in ("model.json", "model.safetensors", "ledger.jsonl"):
        shutil.copy(runs.made("train") / name, folder)
    return folder


@pytest.mark.parametrize("how", [*LEDGER, *WEIGHTS])
def test_three_files_taken_along_are_checked_by_each_other(how, runs, tmp_path):
    folder = taken_along(runs, tmp_path / "model")
    assert sfumato.load_model(folder).guarantee == sfumato.load_model(runs.made("train")).guarantee
    (LEDGER | WEIGHTS)[how](folder)
    with pytest.raises(RunError):
        sfumato.load_model(folder)
    assert COMMANDS["account"](folder, None, None)[0] == (2 if how == "empty" else 3)


def test_without_a_ledger_beside_it_a_model_loads_and_guarantees_nothing(runs, tmp_path):
    folder = taken_along(runs, tmp_path / "model")
    (folder / "ledger.jsonl").unlink()
    assert sfumato.load_model(folder).guarantee is None


@pytest.mark.parametrize("name", ["load_model", "report", "audit", "invert"])
def test_a_plain_run_is_read_as_it_is(name, runs, tmp_path):
    run = runs.made("plain", mode="non-private", noise_multiplier=None)
    code, words = COMMANDS[name](run, runs.public, tmp_path / "out")
    assert (code, "DAMAGED" in words) == (0, False), words


@pytest.mark.parametrize("left", UNDESCRIBED)
@pytest.mark.parametrize("name", ["account", "report", "audit", "weights"])
def test_a_run_of_today_is_not_taken_for_an_old_one(name, left, runs, tmp_path):
    run = runs.copy("train", tmp_path / "run")
    weights(torch.randn_like, UNDESCRIBED[left])(run)
    (run / "model.json").unlink()
    code, words = COMMANDS[name](run, runs.public, tmp_path / "out")
    assert code == 3, words


@pytest.mark.parametrize("name", ["config.json", "done.json", "ledger.jsonl"])
def test_a_file_that_is_cut_short_is_damage_too(name, runs, tmp_path):
    run = runs.copy("train", tmp_path / "run")
    (run / name).write_text('{"cut":\n')
    code, words = COMMANDS["report"](run, runs.public, tmp_path / "out")
    assert code == 3, words


@pytest.mark.parametrize("place", ["ledger", "copy", "summary"])
def test_every_sign_of_today_must_be_gone_before_a_digest_may_be_missing(place, runs, tmp_path):
    run, old = (runs.copy("train", tmp_path / name) for name in ("run", "old"))
    for folder in (run, old):
        weights(notes=UNDESCRIBED["a note without a digest"])(folder)
    no_neighbours(old)
    for name in {"ledger.jsonl", "model.safetensors", "done.json"} - {SIGNS[place]}:
        shutil.copy(old / name, run)
    with pytest.raises(RunError, match="no digest"):
        sfumato.load_model(run)


@pytest.mark.parametrize("note", [True, False])
def test_weights_of_an_earlier_version_are_used_and_it_is_said_that_nobody_can_check_them(
    note, runs, tmp_path
):
    run = runs.copy("train", tmp_path / "run")
    no_neighbours(run)
    weights(notes=UNDESCRIBED["a note without a digest" if note else "no note"])(run)
    if not note:
        (run / "model.json").unlink()
    with pytest.warns(SfumatoWarning, match="cannot be checked"):
        require_whole(run)
    ledger(lambda lines: lines[:-2])(run)  # its ledger can be
    with pytest.raises(RunError), pytest.warns(SfumatoWarning):
        require_whole(run)


def test_a_note_that_unpacks_to_gigabytes_is_refused_before_it_fills_the_memory(runs, tmp_path):
    import tracemalloc

    file = tmp_path / "bomb.safetensors"
    note = read_tensor_note(runs.made("train") / "model.safetensors")
    packer = zlib.compressobj()
    packed = b"".join(packer.compress(bytes(LARGEST // 8)) for _ in range(10)) + packer.flush()
    made = json.loads(note.note) | {"ledger": b85encode(packed).decode()}
    save_file({"w": torch.zeros(1)}, file, metadata={"sfumato": json.dumps(made)})
    tracemalloc.start()
    with pytest.raises(DataError, match="note"):
        read_tensor_note(file)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 3 * LARGEST
