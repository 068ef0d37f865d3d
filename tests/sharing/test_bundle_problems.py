"""Whatever is planted in a bundle is found, and named with a remedy."""

import json
import os

import numpy as np
import pytest
from bundles import FORMATS, edit, images, paid, rewrite_arrays, rewrite_ledger, the_problem, write
from PIL import Image

from sfumato.errors import RunError
from sfumato.privacy.ledger import Ledger
from sfumato.sharing.bundle import read_bundle, verify_bundle


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
    the_problem(tmp_path, name, "damaged")


def test_an_array_that_would_run_code_is_not_opened(tmp_path):
    write(tmp_path)
    objects = np.empty(7, dtype=object)
    rewrite_arrays(tmp_path / "images.npz", lambda arrays: arrays.update(y_train=objects))
    edit(tmp_path)
    the_problem(tmp_path, "images.npz", "run code")


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
def test_a_card_that_guarantees_more_than_was_paid_for_is_named(tmp_path, name, factor, passes):
    card = write(tmp_path)
    edit(tmp_path, **{name: factor * getattr(card, name)})
    assert verify_bundle(tmp_path).ok is passes
    if not passes:
        the_problem(tmp_path, f"card.json states {name}=", "guarantees more")


def test_an_epsilon_that_is_no_number_guarantees_nothing(tmp_path):
    write(tmp_path)
    edit(tmp_path, epsilon="nan")
    the_problem(tmp_path, "epsilon=nan")


@pytest.mark.parametrize(
    ("name", "value"),
    [("delta", 1e-7), ("relation", "replace"), ("unit", "person"), ("private", "cats"),
     ("noise", "philox"), ("neighbours", "training parts")],
)  # fmt: skip
def test_a_card_about_another_guarantee_is_named(tmp_path, name, value):
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
    write(tmp_path, ledger=ledger)
    edit(tmp_path, made_by="sfumato 0.0.1", scores={"accuracy": 0.91})
    verdict = verify_bundle(tmp_path)
    assert verdict.ok
    for words in ("accuracy: measured", "not cryptographic", "above 10", "sfumato 0.0.1"):
        assert sum(words in remark for remark in verdict.remarks) == 1
