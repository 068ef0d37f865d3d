import csv
import hashlib
import json
import os
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sfumato.data.images import Images
from sfumato.data.load import load_images
from sfumato.errors import ConfigError, DataError, PrivacyError, RunError
from sfumato.privacy.events import Event
from sfumato.privacy.ledger import Header, Ledger
from sfumato.synth.bundle import read_bundle, verify_bundle, write_bundle

COPIES = {"share": 0.01, "threshold": 12.0, "standard_error": 0.004}
FORMATS = ("npz", "png")


def images(count=7, channels=3, seed=0, **changes):
    generator = torch.Generator().manual_seed(seed)
    made = Images(
        pixels=torch.randint(0, 256, (count, channels, 4, 5), generator=generator).byte(),
        labels=torch.arange(count) % 3,
        classes=("ant", 'b"e,e', "naïve\r\ncat"),
        name="flowers",
        private=False,
    )
    return replace(made, **changes)


def paid(*stages, rate=1.0, moments_noise=6.0, **header):
    """A ledger with three steps of training and one event for each further stage."""
    ledger = Ledger(Header(**{"data": "faces", "delta": 1e-5, "noise": "chacha20", **header}))
    for step in range(3 if "train" in stages else 0):
        ledger.charge(Event(stage="train", step=step, rate=rate, noise_multiplier=3.0))
    noises = {"moments": moments_noise, "card": 20.0}
    for stage in stages:
        if stage != "train":
            ledger.charge(Event(stage=stage, noise_multiplier=noises[stage]))
    return ledger


def write(folder, *, made=None, ledger=None, logits=None, **changes):
    made = images() if made is None else made
    values = {
        "format": "npz",
        "k": 10,
        "model": "wrn16-4",
        "public": "flowers",
        "temperature": 4.0,
        "moved": {"mean": 3.25, "largest": 41.0},
        "near_copies": COPIES,
        **changes,
    }
    logits = torch.randn(len(made), len(made.classes)) if logits is None else logits
    return write_bundle(folder, made, logits, ledger or paid("train", "moments", "card"), **values)


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def edit(folder, *, words=True, **changes):
    """Change the card as a forger would: words and hashes fit again afterwards."""
    from sfumato.config import from_json
    from sfumato.synth.card import Card
    from sfumato.synth.card_words import markdown

    path = folder / "card.json"
    card = {**json.loads(path.read_text()), **changes}
    if words:
        (folder / "card.md").write_text(markdown(from_json(Card, card)))
    card["files"] = {name: digest(folder / name) for name in card["files"]}
    path.write_text(json.dumps(card))


def rewrite_ledger(folder, change):
    path = folder / "ledger.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(change(lines)))


def rewrite_arrays(path, change):
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    change(arrays)
    np.savez_compressed(path, **arrays)


def the_problem(folder, *words):
    """The one problem that holds all these words; every problem ends in a remedy."""
    verdict = verify_bundle(folder)
    assert not verdict.ok
    assert all(problem.endswith(".") and ". " in problem for problem in verdict.problems)
    found = [p for p in verdict.problems if all(word in p for word in words)]
    assert len(found) == 1, verdict.problems
    return found[0]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("channels", [1, 3])
def test_a_good_bundle_verifies_and_comes_back_as_it_was(tmp_path, format, channels):
    made, logits = images(channels=channels), torch.randn(7, 3)
    people = replace(made, people=torch.arange(7))
    written = write(tmp_path / "b", made=people, logits=logits, format=format)
    verdict = verify_bundle(tmp_path / "b")
    assert (verdict.problems, verdict.remarks) == ([], [])
    assert verdict.ok
    again, soft, temperature, card = read_bundle(tmp_path / "b")
    assert card == written == verdict.card
    assert torch.equal(again.pixels, made.pixels)
    assert torch.equal(again.labels, made.labels)
    assert (again.classes, again.private, again.people) == (made.classes, False, None)
    assert torch.equal(soft, logits)
    assert temperature == 4.0


def test_the_images_are_in_the_layout_that_load_images_reads(tmp_path):
    write(tmp_path)
    assert torch.equal(load_images(tmp_path / "images.npz").pixels, images().pixels)


def test_pictures_are_ordinary_png_files_named_by_a_table(tmp_path):
    write(tmp_path, format="png")
    with open(tmp_path / "labels.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["class"] for row in rows] == [images().classes[i % 3] for i in range(7)]
    with Image.open(tmp_path / rows[4]["file"]) as picture:
        assert np.array_equal(np.asarray(picture), images().pixels[4].permute(1, 2, 0))


def test_the_card_derives_its_promise_from_the_ledger(tmp_path):
    ledger = paid("train", "moments", "card", rate=0.1, unit="person")
    card = write(tmp_path, ledger=ledger)
    assert card.epsilon == ledger.epsilon()
    assert card.epsilon_by_rdp == ledger.epsilon(accountant="rdp")
    assert (card.private, card.delta, card.unit) == ("faces", 1e-5, "person")
    assert {name: spent.events for name, spent in card.stages.items()} == {
        "train": 3, "moments": 1, "card": 1,
    }  # fmt: skip


def test_a_student_of_another_ledger_needs_no_training_of_its_own(tmp_path):
    ledger, teacher = paid("moments", "card"), Ledger(Header(data="faces", delta=1e-5))
    teacher.charge(Event(stage="fine-tune", noise_multiplier=3.0))
    ledger.inherit(teacher)
    card = write(tmp_path, ledger=ledger)
    assert "fine-tune" in card.stages
    assert verify_bundle(tmp_path).ok


def test_a_promise_without_a_renyi_bound_still_verifies(tmp_path):
    ledger = paid("train", "moments", "card", relation="replace")
    card = write(tmp_path, ledger=ledger)
    assert np.isnan(card.epsilon_by_rdp)
    assert verify_bundle(tmp_path).ok
    assert "no formula" in (tmp_path / "card.md").read_text()


# What is planted, and how it must be named.


@pytest.mark.parametrize("name", ["images.npz", "soft_labels.npz", "ledger.jsonl", "card.md"])
def test_a_lost_a_changed_and_a_linked_file_are_named(tmp_path, name):
    write(tmp_path / "b")
    path = tmp_path / "b" / name
    path.rename(tmp_path / "elsewhere")
    the_problem(tmp_path / "b", f"{name} is missing.")
    path.symlink_to(tmp_path / "elsewhere")
    the_problem(tmp_path / "b", f"{name} has changed")
    path.unlink()
    path.write_bytes((tmp_path / "elsewhere").read_bytes() + b"\n")
    the_problem(tmp_path / "b", f"{name} has changed")
    with pytest.raises(RunError, match=f"{name} has changed"):
        read_bundle(tmp_path / "b")


@pytest.mark.parametrize("name", ["notes.txt", ".DS_Store", "images/000099.png", "private/a.npz"])
@pytest.mark.parametrize("listed", [False, True])
def test_a_file_too_many_is_named_even_if_the_card_lists_it(tmp_path, name, listed):
    write(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("x")
    if listed:
        edit(
            tmp_path, files={**json.loads((tmp_path / "card.json").read_text())["files"], name: ""}
        )
    the_problem(tmp_path, name, "nothing speaks for it")


def test_two_swapped_pictures_are_named(tmp_path):
    write(tmp_path, format="png")
    first, second = (tmp_path / f"images/00000{i}.png" for i in (0, 1))
    pictures = first.read_bytes(), second.read_bytes()
    second.write_bytes(pictures[0])
    first.write_bytes(pictures[1])
    the_problem(tmp_path, "images/000000.png has changed")
    the_problem(tmp_path, "images/000001.png has changed")


def test_two_swapped_rows_of_the_table_are_named_even_with_fresh_hashes(tmp_path):
    write(tmp_path, format="png")
    head, first, second, *rest = (tmp_path / "labels.csv").read_text().splitlines(keepends=True)
    (tmp_path / "labels.csv").write_text("".join([head, second, first, *rest]))
    edit(tmp_path)
    the_problem(tmp_path, "labels.csv", "in their order")


@pytest.mark.parametrize("name", ["images.npz", "soft_labels.npz"])
@pytest.mark.parametrize("rehash", [False, True])
def test_a_truncated_file_is_named(tmp_path, name, rehash):
    write(tmp_path)
    os.truncate(tmp_path / name, (tmp_path / name).stat().st_size // 2)
    if rehash:
        edit(tmp_path)
    the_problem(tmp_path, name, "cannot be read")


def test_an_array_that_would_run_code_is_not_opened(tmp_path):
    write(tmp_path)
    objects = np.empty(7, dtype=object)
    rewrite_arrays(tmp_path / "images.npz", lambda arrays: arrays.update(y_train=objects))
    edit(tmp_path)
    the_problem(tmp_path, "images.npz", "cannot be read")


def test_what_else_lies_in_an_archive_is_named(tmp_path):
    write(tmp_path)
    originals = np.zeros((2, 4, 5, 3), np.uint8)
    rewrite_arrays(tmp_path / "images.npz", lambda arrays: arrays.update(originals=originals))
    edit(tmp_path)
    the_problem(tmp_path, "images.npz holds classes, originals")


def test_test_images_are_no_part_of_a_release(tmp_path):
    write(tmp_path)
    images().save_npz(tmp_path / "images.npz", images(2))
    edit(tmp_path)
    the_problem(tmp_path, "holds test images too")


@pytest.mark.parametrize("damage", ["text", "size", "palette", "grey"])
def test_a_picture_that_is_none_or_another_shape_is_named(tmp_path, damage):
    write(tmp_path, format="png")
    path = tmp_path / "images/000003.png"
    with Image.open(path) as picture:
        picture.load()
    if damage == "text":
        path.write_bytes(path.read_bytes()[:40])
    elif damage == "size":
        picture.resize((9, 9)).save(path)
    else:
        picture.convert("P" if damage == "palette" else "L").save(path)
    edit(tmp_path)
    the_problem(tmp_path, "000003.png", "cannot be read" if damage == "text" else "picture of")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("field", "value"), [("images", 6), ("classes", ["a", "b"]), ("shape", [3, 5, 4])]
)
def test_a_card_that_counts_otherwise_than_its_files_is_named(tmp_path, format, field, value):
    write(tmp_path, format=format)
    edit(tmp_path, **{field: value})
    assert not verify_bundle(tmp_path).ok
    if format == "npz":
        the_problem(tmp_path, f"card.json says {field}=")


def test_labels_and_logits_for_other_images_are_named(tmp_path):
    write(tmp_path)
    rewrite_arrays(
        tmp_path / "soft_labels.npz", lambda arrays: arrays.update(logits=arrays["logits"][:5])
    )
    rewrite_arrays(
        tmp_path / "images.npz", lambda arrays: arrays.update(y_train=arrays["y_train"][:4])
    )
    edit(tmp_path)
    the_problem(tmp_path, "7 images in 3 classes, and logits for 5 images")
    the_problem(tmp_path, "x_train has 7 images and y_train 4 labels")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_named(tmp_path, bad):
    def spoil(arrays):
        arrays["logits"][2, 1] = bad

    write(tmp_path)
    rewrite_arrays(tmp_path / "soft_labels.npz", spoil)
    edit(tmp_path)
    the_problem(tmp_path, "logits are not finite")


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda card: card.pop("epsilon"), '"epsilon" is missing'),
        (lambda card: card.update(colour="red"), '"colour"'),
        (lambda card: card.update(k="ten"), '"k"'),
        (lambda card: card["stages"]["train"].pop("what"), '"stages.train.what" is missing'),
        (lambda card: card["moved"].pop("mean"), "moved"),
    ],
)
def test_a_card_with_other_fields_is_no_card(tmp_path, spoil, word):
    write(tmp_path)
    card = json.loads((tmp_path / "card.json").read_text())
    spoil(card)
    (tmp_path / "card.json").write_text(json.dumps(card))
    assert verify_bundle(tmp_path).card is None
    the_problem(tmp_path, word, "no card")
    with pytest.raises(RunError, match="no card"):
        read_bundle(tmp_path)


def test_a_damaged_card_is_named(tmp_path):
    write(tmp_path)
    (tmp_path / "card.json").write_text("{")
    the_problem(tmp_path, "card.json is damaged")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda lines: ["{}\n", *lines[1:]], "does not begin with a header"),
        (lambda lines: [*lines[:-1], "{\n"], "is damaged"),
        (lambda lines: [*lines, lines[-1]], "holds this line twice"),
        (lambda lines: [*lines[:-1], lines[-1][:-9]], "cut short"),
        (lambda lines: [], "cut short"),
    ],
)
def test_an_unreadable_ledger_is_named_even_with_fresh_hashes(tmp_path, change, words):
    write(tmp_path)
    rewrite_ledger(tmp_path, change)
    edit(tmp_path)
    the_problem(tmp_path, words)


def test_a_dropped_line_of_the_ledger_is_named_even_with_fresh_hashes(tmp_path):
    write(tmp_path)
    rewrite_ledger(tmp_path, lambda lines: [*lines[:2], *lines[3:]])
    edit(tmp_path)
    assert '3 of stage "train"' in the_problem(tmp_path, "lines were lost", '2 of stage "train"')


@pytest.mark.parametrize("name", ["epsilon", "epsilon_by_rdp"])
@pytest.mark.parametrize(("factor", "passes"), [(0.5, False), (0.9999, False), (1 - 1e-8, True)])
def test_a_card_that_promises_more_than_was_paid_for_is_named(tmp_path, name, factor, passes):
    card = write(tmp_path)
    edit(tmp_path, **{name: factor * getattr(card, name)})
    assert verify_bundle(tmp_path).ok is passes
    if not passes:
        the_problem(tmp_path, f"card.json states {name}=", "promises more")


def test_an_epsilon_that_is_no_number_promises_nothing(tmp_path):
    write(tmp_path)
    edit(tmp_path, epsilon="nan")
    the_problem(tmp_path, "epsilon=nan")


@pytest.mark.parametrize(
    ("name", "value"),
    [("delta", 1e-7), ("relation", "replace"), ("unit", "person"), ("private", "cats"),
     ("noise", "philox")],
)  # fmt: skip
def test_a_card_about_another_promise_is_named(tmp_path, name, value):
    write(tmp_path)
    edit(tmp_path, **{name: value})
    the_problem(tmp_path, f"card.json says {name}={value!r}")


def test_an_exact_release_is_infinite_and_its_stage_is_named(tmp_path):
    card = write(tmp_path, ledger=paid("train", "moments", "card", moments_noise=0.0))
    assert card.epsilon == np.inf
    the_problem(tmp_path, "epsilon is infinite", "moments")
    the_problem(tmp_path, 'not for release: stage "moments" released exact values')
    assert "| infinite |" in (tmp_path / "card.md").read_text()


def test_a_fixed_seed_forbids_the_release_even_if_the_card_forgets_it(tmp_path):
    write(tmp_path, ledger=paid("train", "moments", "card", fixed_seed=True))
    the_problem(tmp_path, "not for release", "fixed seed")
    edit(tmp_path, not_for_release=["we asked nobody"])
    the_problem(tmp_path, "not for release", "fixed seed")
    the_problem(tmp_path, "not for release: we asked nobody")


@pytest.mark.parametrize(
    ("stages", "k", "unpaid"),
    [
        (("moments", "card"), 10, "train"),
        (("card",), 0, "train"),
        (("train", "card"), 10, "moments"),
        (("train", "moments"), 10, "card"),
    ],
)
def test_what_nobody_paid_for_is_named(tmp_path, stages, k, unpaid):
    card = write(tmp_path, ledger=paid(*stages), k=k)
    assert len(card.not_for_release) == 1
    the_problem(tmp_path, "not for release", f'no event of stage "{unpaid}"')


def test_images_that_were_not_matched_need_no_statistics(tmp_path):
    write(tmp_path, ledger=paid("train"), k=0, near_copies=None)
    assert verify_bundle(tmp_path).ok
    assert "as they were" in (tmp_path / "card.md").read_text()


def test_accountants_that_contradict_each_other_are_named(tmp_path, monkeypatch):
    write(tmp_path)
    real = Ledger.epsilon

    def epsilon(ledger, delta=None, accountant="pld"):
        return real(ledger) * (0.98 if accountant == "rdp" else 1)

    monkeypatch.setattr(Ledger, "epsilon", epsilon)
    the_problem(tmp_path, "accountants contradict each other")


def test_noise_too_small_to_be_priced_is_named(tmp_path):
    write(tmp_path)
    rewrite_ledger(
        tmp_path,
        lambda lines: [line.replace('_multiplier": 6.0', '_multiplier": 0.001') for line in lines],
    )
    edit(tmp_path)
    the_problem(tmp_path, "cannot be priced")


def test_a_card_for_people_that_says_something_else_is_named(tmp_path):
    write(tmp_path)
    text = (tmp_path / "card.md").read_text()
    (tmp_path / "card.md").write_text(text.replace("| delta | 1e-05 |", "| delta | 1e-09 |"))
    assert (tmp_path / "card.md").read_text() != text
    edit(tmp_path, words=False)
    the_problem(tmp_path, "card.md does not say what card.json says")


def test_remarks_are_no_problems(tmp_path):
    ledger = paid("train", "moments", "card", noise="philox", fixed_seed=False, moments_noise=0.4)
    write(tmp_path, ledger=ledger, scores={"accuracy": 0.91})
    edit(tmp_path, made_by="sfumato 0.0.1")
    verdict = verify_bundle(tmp_path)
    assert verdict.ok
    for words in ("accuracy: measured", "not cryptographic", "above 10", "sfumato 0.0.1"):
        assert sum(words in remark for remark in verdict.remarks) == 1


# The card for people.


def test_the_card_says_what_people_must_know(tmp_path):
    card = write(tmp_path, scores={"accuracy": 0.91})
    text = (tmp_path / "card.md").read_text()
    shown = next(line for line in text.splitlines() if line.startswith("| epsilon (PLD"))
    assert 0 <= float(shown.split("|")[2]) - card.epsilon < 1e-3
    for words in (
        "| delta | 1e-05 |", "k = 10 steps", "made from flowers", "wrn16-4", "3.25 grey levels",
        "1.00 %", "closer than 12", "add-or-remove", "| accuracy | 0.91 |", "does not cover",
    ):  # fmt: skip
        assert words in text
    assert "NOT FOR RELEASE" not in text


def test_the_card_says_when_it_must_not_be_released(tmp_path):
    write(tmp_path, ledger=paid("train", "moments", "card", fixed_seed=True))
    assert "**NOT FOR RELEASE**" in (tmp_path / "card.md").read_text()


def test_names_do_not_break_the_card(tmp_path):
    nasty = "a|b <script>alert(1)</script>\n# *x* [y](z) `q` \\|"
    ledger = paid("train", "moments", "card", data=nasty)
    ledger.charge(Event(stage=nasty, noise_multiplier=50.0))
    write(tmp_path, ledger=ledger, model=nasty, public=nasty, scores={nasty: 1.0})
    text = (tmp_path / "card.md").read_text()
    assert verify_bundle(tmp_path).ok
    assert "<script" not in text
    assert [line for line in text.splitlines() if line.startswith("# ")] == [text.splitlines()[0]]
    tables = [line for line in text.splitlines() if line.startswith("|")]
    bars = [line.replace("\\\\", "").replace("\\|", "").count("|") for line in tables]
    assert set(bars) == {3, 4}
    assert "](" not in text.replace("\\](", "")


# Writing.


def test_private_images_are_never_written(tmp_path):
    with pytest.raises(PrivacyError, match="writing a bundle"):
        write(tmp_path / "b", made=images(private=True))
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"logits": torch.zeros(6, 3)}, DataError),
        ({"logits": torch.full((7, 3), torch.nan)}, DataError),
        ({"temperature": 0.0}, DataError),
        ({"temperature": float("nan")}, DataError),
        ({"made": images(count=0)}, DataError),
        ({"made": images(channels=4)}, DataError),
        ({"format": "jpeg"}, (ConfigError, TypeError)),  # the latter where types are checked
        ({"moved": {"mean": 1.0}}, ConfigError),
        ({"near_copies": {"share": 1.0}}, ConfigError),
        ({"k": -1}, ConfigError),
    ],
)
def test_what_makes_no_bundle_is_refused_before_anything_is_written(tmp_path, change, kind):
    with pytest.raises(kind):
        write(tmp_path / "b", **change)
    assert not (tmp_path / "b").exists()


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(RunError, match=r"thesis\.txt"):
        write(tmp_path)
    assert [item.name for item in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(RunError, match="is a file"):
        write(tmp_path / "thesis.txt")


@pytest.mark.parametrize("read", [read_bundle, verify_bundle])
def test_a_folder_that_is_no_bundle_says_what_to_do(tmp_path, read):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(RunError, match=r"no bundle.* Give the folder"):
            read(folder)


@pytest.mark.parametrize("before", FORMATS)
@pytest.mark.parametrize("after", FORMATS)
def test_a_bundle_replaces_another_whole(tmp_path, before, after):
    write(tmp_path, made=images(9), format=before)
    write(tmp_path, made=images(4, seed=1), format=after)
    assert verify_bundle(tmp_path).ok
    assert len(read_bundle(tmp_path)[0]) == 4


@pytest.mark.parametrize("format", FORMATS)
def test_a_killed_writer_never_leaves_what_verifies(tmp_path, format, monkeypatch):
    real = os.replace
    for survives in count():
        write(tmp_path, made=images(9), format=format)
        moves = count()

        def dies(draft, path, moves=moves, survives=survives):
            if next(moves) == survives:
                raise KeyboardInterrupt
            real(draft, path)

        monkeypatch.setattr(os, "replace", dies)
        try:
            write(tmp_path, made=images(8, seed=1), format=format)
            break
        except KeyboardInterrupt:
            with pytest.raises(RunError, match="cut short"):
                verify_bundle(tmp_path)
        finally:
            monkeypatch.undo()
    assert survives == 5
    assert verify_bundle(tmp_path).ok


def test_a_writer_killed_while_it_clears_leaves_no_bundle(tmp_path, monkeypatch):
    write(tmp_path)
    real = Path.unlink

    def dies(path):
        real(path)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "unlink", dies)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path)
    with pytest.raises(RunError, match="cut short"):
        verify_bundle(tmp_path)
