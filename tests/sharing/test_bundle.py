import csv
import json
import os
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from bundles import FORMATS, edit, images, paid, write
from PIL import Image

from sfumato.data.load import load_images
from sfumato.errors import ConfigError, DataError, PrivacyError, RunError
from sfumato.privacy.ledger import Ledger, LedgerHeader
from sfumato.privacy.releases import Release
from sfumato.sharing.bundle import read_bundle, verify_bundle


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


def test_the_card_derives_its_guarantee_from_the_ledger(tmp_path):
    ledger = paid("train", "moments", "card", rate=0.1, unit="person")
    card = write(tmp_path, ledger=ledger)
    assert card.epsilon == ledger.epsilon()
    assert card.epsilon_by_rdp == ledger.epsilon(accountant="rdp")
    assert (card.private, card.delta, card.unit) == ("faces", 1e-5, "person")
    assert {name: spent.events for name, spent in card.stages.items()} == {
        "train": 3, "moments": 1, "card": 1,
    }  # fmt: skip


def test_a_student_of_another_ledger_needs_no_training_of_its_own(tmp_path):
    ledger, teacher = paid("moments", "card"), Ledger(LedgerHeader(data="faces", delta=1e-5))
    teacher.charge(Release(stage="fine-tune", noise_multiplier=3.0))
    ledger.inherit(teacher)
    card = write(tmp_path, ledger=ledger)
    assert "fine-tune" in card.stages
    assert verify_bundle(tmp_path).ok


def test_a_guarantee_without_a_renyi_bound_still_verifies(tmp_path):
    ledger = paid("train", "moments", "card", relation="replace")
    card = write(tmp_path, ledger=ledger)
    assert np.isnan(card.epsilon_by_rdp)
    assert verify_bundle(tmp_path).ok
    assert "no formula" in (tmp_path / "card.md").read_text()


# The card for people.


def test_the_card_says_what_people_must_know(tmp_path):
    card = write(tmp_path)
    text = (tmp_path / "card.md").read_text()
    shown = next(line for line in text.splitlines() if line.startswith("| epsilon (PLD"))
    assert 0 <= float(shown.split("|")[2]) - card.epsilon < 1e-3
    for words in (
        "| delta | 1e-05 |", "k = 10 steps", "made from flowers", "wrn16-4", "3.25 grey levels",
        "1.00 %", "closer than 12", "add-or-remove",
    ):  # fmt: skip
        assert words in text
    assert "NOT FOR RELEASE" not in text


def test_a_card_of_an_earlier_version_that_has_scores_says_who_vouches_for_them(tmp_path):
    write(tmp_path)
    edit(tmp_path, scores={"accuracy": 0.91})
    verdict = verify_bundle(tmp_path)
    assert verdict.ok
    assert any("measured on private images without noise" in said for said in verdict.remarks)
    text = (tmp_path / "card.md").read_text()
    assert "| accuracy | 0.91 |" in text
    assert "does not speak of them" in text


@pytest.mark.parametrize(
    ("unit", "whose"),
    [("example", "private images have"), ("person", "people on private images have")],
)
def test_near_copies_are_of_images_or_of_people(tmp_path, unit, whose):
    write(tmp_path, ledger=paid("train", "moments", "card", unit=unit))
    assert f"% of the {whose} a released image" in (tmp_path / "card.md").read_text()


@pytest.mark.parametrize(("share", "said"), [(0.01, True), (0.03, False)])
def test_a_count_that_noise_alone_would_give_says_so(tmp_path, share, said):
    copies = {"share": share, "threshold": 12.0, "standard_error": 0.01}
    write(tmp_path, near_copies=copies)
    assert ("No more than the noise can explain" in (tmp_path / "card.md").read_text()) == said


def test_the_card_says_that_neighbours_are_training_parts_only_where_they_are(tmp_path):
    parts = paid("train", "moments", "card", neighbours="training parts")
    for folder, ledger in ((tmp_path / "split", parts), (tmp_path / "given", None)):
        write(folder, ledger=ledger)
        assert verify_bundle(folder).ok
        text = (folder / "card.md").read_text()
        for words in ("neighbouring training parts", "split by sfumato"):
            assert (words in text) is (ledger is parts)
    edit(tmp_path / "split", neighbours="data sets")
    assert not verify_bundle(tmp_path / "split").ok


def test_cards_of_earlier_versions_that_do_not_name_neighbours_verify(tmp_path):
    write(tmp_path)
    card = json.loads((tmp_path / "card.json").read_text())
    assert card.pop("neighbours") == "data sets"
    (tmp_path / "card.json").write_text(json.dumps(card))
    assert verify_bundle(tmp_path).ok


def test_the_card_says_when_it_must_not_be_released(tmp_path):
    write(tmp_path, ledger=paid("train", "moments", "card", fixed_seed=True))
    assert "**NOT FOR RELEASE**" in (tmp_path / "card.md").read_text()


def test_names_do_not_break_the_card(tmp_path):
    nasty = "a|b <script>alert(1)</script>\n# *x* [y](z) `q` \\|"
    ledger = paid("train", "moments", "card", data=nasty)
    ledger.charge(Release(stage=nasty, noise_multiplier=50.0))
    write(tmp_path, ledger=ledger, model=nasty, public=nasty)
    edit(tmp_path, scores={nasty: 1.0})
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
    run = tmp_path / "run"
    (run / "bundle").mkdir(parents=True)
    (run / "bundle" / "card.json").write_text("{}")
    cases = {
        tmp_path: r"no bundle.* Give the folder",
        tmp_path / "nowhere": "there is no folder",
        run: "its bundle is .*bundle: give that",
    }
    for folder, words in cases.items():
        with pytest.raises(RunError, match=words):
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
