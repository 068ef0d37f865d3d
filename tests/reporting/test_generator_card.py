"""What a report says of the generator of sfumato warmup, and which of its pictures it shows."""

import base64
import json

import pytest
from pages import PNG, ledger_of, make_run, write

from sfumato.commands import report
from sfumato.reporting import words
from sfumato.reporting.card import read_card
from sfumato.reporting.render import caption, render_page

LOOKS = (100, 200, 300)
KEPT = {
    "images_seen": 300, "images_at_best": 100, "held_out_loss": 0.4951, "copies": 0.05,
    "held_out_copies": 0.01,
}  # fmt: skip
DRAWN = {"drawn": 200, "copies": 0.02, "copies_among_held_out": 0.0}


def make_generator(path, *, trained_on=KEPT, drawn=None, **settings):
    """A run of `sfumato warmup` whose first stages are there: each picture is another file."""
    path.mkdir(exist_ok=True)
    config = {"data": "digits", "model": "group-cnn-small", "public_share": 0.008, **settings}
    write(path / "config.json", {"verb": "warmup", "config": config})
    for stage, seen in (("generator", LOOKS), ("sample", () if drawn is None else (200,))):
        for number in seen:
            picture = path / f"stages/{stage}/samples/{number:09d}.png"
            picture.parent.mkdir(parents=True, exist_ok=True)
            picture.write_bytes(PNG + f"{stage} {number}".encode())
    (path / "stages/split").mkdir()
    for stage, done in (("split", {"public": 32}), ("generator", trained_on), ("sample", drawn)):
        if done is not None:
            write(path / f"stages/{stage}/done.json", done)
    return path


def add_guarantee(path, tmp_path):
    """As if a classifier were trained on the private rest after it."""
    place = path / "stages/train"
    place.mkdir()
    whole = make_run(tmp_path / "dp")
    (place / "ledger.jsonl").write_text((whole / "ledger.jsonl").read_text())
    write(path / "done.json", {"model": "group-cnn-small", "public_images": 32, "drawn": 200})
    assert ledger_of(place).epsilon() < float("inf")


def shown_in(path):
    """Which of the pictures the page has, in the words that end each file."""
    found = report.write_report([path], path)
    page = (path / "report.html").read_text()
    assert found["report"] == str(path / "report.html")
    sources = page.split("data:image/png;base64,")[1:]
    return [base64.b64decode(source.split('"')[0])[len(PNG) :].decode() for source in sources]


def test_the_picture_is_of_the_weights_that_were_kept_and_not_of_a_rejected_look(tmp_path):
    path = make_generator(tmp_path / "run")
    assert shown_in(path) == ["generator 100"]
    assert "draws after about 100 images" in caption(read_card(path).pictures[0])
    (path / "stages/generator/samples/000000100.png").unlink()
    assert shown_in(path) == [], "no picture is better than one of other weights"


def test_what_was_drawn_is_shown_where_it_is_there(tmp_path):
    path = make_generator(tmp_path / "run", drawn=DRAWN)
    assert shown_in(path) == ["sample 200"]
    assert "were drawn" in (path / "report.html").read_text()


def test_while_a_generator_learns_its_last_look_is_shown(tmp_path):
    assert shown_in(make_generator(tmp_path / "run", trained_on=None)) == ["generator 300"]


def test_what_the_kept_look_found_is_in_all_three_files(tmp_path):
    path = make_generator(tmp_path / "run", drawn=DRAWN)
    report.write_report([path], path)
    for name in ("report.html", "report.md"):
        text = (path / name).read_text()
        assert (
            "images seen 300; images at best 100; held out loss 0.4951; copies 0.05; held out "
            "copies 0.01"
        ) in text
        assert "drawn 200; copies 0.02; copies among held out 0" in text
    (card,) = json.loads((path / "card.json").read_text())["runs"]
    assert card["stages"]["generator"] == KEPT
    assert card["stages"]["sample"] == DRAWN


@pytest.mark.parametrize("guaranteed", [False, True])
def test_pictures_of_public_images_are_not_said_to_be_for_sharing(tmp_path, guaranteed):
    path = make_generator(tmp_path / "run", drawn=DRAWN)
    if guaranteed:
        add_guarantee(path, tmp_path)
    assert (read_card(path).guarantee is not None) == guaranteed
    page = render_page([read_card(path)], [path])
    assert "Pictures made from public images</h2>" in page
    assert "nothing private went in" in page
    assert "may be shared" not in page
    account = tmp_path / "account"
    account.mkdir()
    write(account / "config.json", {"verb": "account", "config": {}})
    (account / "epsilon.png").write_bytes(PNG)
    assert "Pictures that may be shared</h2>" in render_page([read_card(account)], [account])
    both = [account, path]
    assert "Pictures</h2>" in render_page([read_card(one) for one in both], both)


def test_nothing_is_said_twice_of_a_finished_run(tmp_path):
    path = make_generator(tmp_path / "run", drawn=DRAWN)
    add_guarantee(path, tmp_path)
    names = [name for name, _ in words.facts(read_card(path))]
    assert len(names) == len(set(names))
    assert {"public images", "stage generator", "stage sample"} <= set(names)


def test_a_picture_that_leads_into_private_is_not_shown(tmp_path):
    path = make_generator(tmp_path / "run")
    (path / "private").mkdir()
    (path / "private/secret.png").write_bytes(PNG)
    picture = path / "stages/generator/samples/000000100.png"
    picture.unlink()
    picture.symlink_to(path / "private/secret.png")
    assert read_card(path).pictures == ()
