"""Guarantees about people: sampled, clipped and accounted as one, with all of their images."""

import codecs
import csv
import json
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from people import portraits
from PIL import Image
from torch import nn

from sfumato.clipping.admit import one_at_a_time
from sfumato.clipping.clip import GradientClipper
from sfumato.clipping.factors import Clipping
from sfumato.commands.train import command as train
from sfumato.data.example_rng import ExampleRng
from sfumato.data.load import load_images
from sfumato.data.people import People
from sfumato.errors import ConfigError, DataError
from sfumato.files import read_lines
from sfumato.privacy.sampling import Chunk
from sfumato.runs import open_run
from sfumato.training.inputs import Inputs


def inputs_of(images, most=3, views=1):
    people = People(images.people, most)
    return Inputs(images, torch.device("cpu"), (0.5,), (0.5,), views=views, people=people)


def pick_one_by_one(people, wanted, seed, step):
    """What `People.pick` guarantees, person by person."""
    picked = [torch.empty(0, dtype=torch.int64)]
    for person in wanted.tolist():
        own = torch.nonzero(people.ids == person).flatten()
        keys = ExampleRng.of(seed, step, torch.arange(len(own))).throw(1)[0]
        order = own[keys.argsort(stable=True)]
        picked.append(order[torch.arange(people.most) % len(order)])
    return torch.cat(picked)


@pytest.mark.parametrize("case", range(12))
def test_picking_all_people_at_once_is_equal_to_picking_them_one_by_one(case):
    generator = torch.Generator().manual_seed(case)
    count, extra, most = (
        int(torch.randint(1, high, (), generator=generator)) for high in (40, 300, 6)
    )
    ids = torch.cat([torch.arange(count), torch.randint(count, (extra,), generator=generator)])
    people = People(ids[torch.randperm(len(ids), generator=generator)], most)
    some = torch.randint(count, (case,), generator=generator)  # some twice, as padding is; or none
    for wanted in (some, torch.arange(count)):
        found = people.pick(wanted, seed=case, step=3)
        assert torch.equal(found, pick_one_by_one(people, wanted, case, 3))


def test_picking_images_of_thousands_of_people_takes_no_time():
    ids = torch.randint(20_000, (80_000,)).unique(return_inverse=True)[1]
    people = People(ids, 2)
    people.pick(torch.arange(2), 0, 0)
    start = time.process_time()
    people.pick(torch.arange(4096), 0, 1)
    assert time.process_time() - start < 0.5  # one by one: seconds


def test_up_to_k_different_images_of_a_person_are_taken():
    ids = torch.tensor([1, 0, 1, 1, 1, 0])
    picked = People(ids, 3).pick(torch.tensor([0, 1]), 0, 0)
    first, second = picked[:3].tolist(), picked[3:].tolist()
    assert set(first) == {1, 5}  # a person with two images gives one of them twice
    assert set(second) < {0, 2, 3, 4}
    assert len(set(second)) == 3


def test_the_images_taken_of_a_person_stay_the_same_when_another_leaves():
    images = portraits()
    for step in range(4):
        before = images.pixels[People(images.people, 3).pick(torch.arange(1, 12), 0, step)]
        rest = images.select(torch.nonzero(images.people != 0).flatten())
        after = rest.pixels[People(rest.people, 3).pick(torch.arange(11), 0, step)]
        assert torch.equal(before, after)


def test_what_is_clipped_is_all_that_a_person_adds():
    images = portraits()
    inputs = inputs_of(images, most=3, views=2)
    chunk = Chunk(torch.tensor([0, 4, 7]), torch.ones(3, dtype=torch.bool))
    x, y = inputs.tensors(chunk, 0)
    assert len(x) == 3 * 3 * 2
    assert len(y) == 3 * 3
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(400, 3))
    rows = one_at_a_time(model, inputs.losses, (x, y))
    norms = torch.stack([sum(g.square().sum() for g in row.values()) for row in rows]).sqrt()
    bound = float(norms.median())
    found = GradientClipper(model, clipping=Clipping(max_norm=bound)).clip(inputs.losses, (x, y), 3)
    torch.testing.assert_close(found.norms, norms, rtol=1e-4, atol=0)
    for name in rows[0]:
        wanted = sum(min(1, bound / n) * row[name] for n, row in zip(norms, rows, strict=True))
        torch.testing.assert_close(found.total[name], wanted, rtol=1e-3, atol=1e-5)


def test_changing_all_images_of_a_person_moves_the_sum_by_at_most_twice_the_bound():
    images = portraits()
    changed = images.pixels.clone()
    changed[images.people == 4] = 255 - changed[images.people == 4]
    chunk = Chunk(torch.arange(12), torch.ones(12, dtype=torch.bool))
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 3))
    clipper = GradientClipper(model, clipping=Clipping(max_norm=0.05))
    sums = []
    for pixels in (images.pixels, changed):
        inputs = inputs_of(replace(images, pixels=pixels), most=50)
        tensors = inputs.tensors(chunk, 0)
        sums.append(clipper.clip(inputs.losses, tensors, 12).total)
    moved = sum((sums[0][n] - sums[1][n]).square().sum() for n in sums[0]).sqrt()
    assert 0.01 < float(moved) <= 0.1


def test_a_split_keeps_people_whole():
    first, rest = portraits().split(0.25)
    images = portraits()
    pairs = zip(images.pixels, images.people, strict=True)
    seen = {tuple(p.flatten().tolist()): int(i) for p, i in pairs}
    who = [{seen[tuple(p.flatten().tolist())] for p in part.pixels} for part in (first, rest)]
    assert who[0].isdisjoint(who[1])
    assert len(who[0]) == 3
    assert sorted(first.people.unique().tolist()) == [0, 1, 2]


def test_an_npz_file_says_who_is_on_each_image(tmp_path):
    images = portraits()
    path = images.save_npz(tmp_path / "p.npz", test=images.select(range(9)))
    torch.testing.assert_close(load_images(path, "train").people, images.people)
    np.savez(tmp_path / "short.npz", **{**np.load(path), "people_train": np.arange(3)})
    with pytest.raises(DataError, match="names people for 3"):
        load_images(tmp_path / "short.npz", "train")


def write_folder(root, images):
    for i, (pixels, label) in enumerate(zip(images.pixels, images.labels, strict=True)):
        folder = root / images.classes[label] / f"person{images.people[i]}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[0].numpy()).save(folder / f"{i}.png")


def test_folders_and_tables_say_who_is_on_each_image(tmp_path):
    images = portraits()
    write_folder(tmp_path / "faces", images)
    by_folder = load_images(tmp_path / "faces", "train", people="folder")
    with open(tmp_path / "who.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["file", "patient"])
        for path in (tmp_path / "faces").rglob("*.png"):
            table.writerow([path.relative_to(tmp_path / "faces"), path.parent.name])
    by_table = load_images(tmp_path / "faces", "train", people=f"{tmp_path}/who.csv:patient")
    torch.testing.assert_close(by_folder.people, by_table.people)
    (tmp_path / "excel.csv").write_bytes(codecs.BOM_UTF8 + (tmp_path / "who.csv").read_bytes())
    by_excel = load_images(tmp_path / "faces", "train", people=f"{tmp_path}/excel.csv:patient")
    torch.testing.assert_close(by_folder.people, by_excel.people)
    test = load_images(tmp_path / "faces", "test", people="folder")
    people = len(by_folder.people.unique()) + len(test.people.unique())
    assert people == 12


def test_what_is_missing_about_people_is_named(tmp_path):
    images = portraits()
    write_folder(tmp_path / "faces", images)
    (tmp_path / "who.csv").write_text("file,person\na/person0/0.png,anna\n")
    with pytest.raises(DataError, match="names no person for"):
        load_images(tmp_path / "faces", "train", people=str(tmp_path / "who.csv"))
    with pytest.raises(DataError, match='needs a column "patient"'):
        load_images(tmp_path / "faces", "train", people=f"{tmp_path / 'who.csv'}:patient")
    with pytest.raises(DataError, match="cannot be read as a table"):
        load_images(tmp_path / "faces", "train", people="nowhere.csv")
    with pytest.raises(ConfigError, match="is for folders"):
        load_images("digits", "train", people="folder")
    with pytest.raises(ConfigError, match="--unit person"):
        train.Config(epsilon=1.0, people="folder")
    config = train.Config(epsilon=1.0, unit="person")
    out = tmp_path / "run"
    with (
        open_run(config, verb="train", out=out) as run,
        pytest.raises(ConfigError, match="nobody knows who is on"),
    ):
        train.run(config, run)


def test_the_ledger_of_a_run_on_people_says_so(tmp_path):
    images = portraits(n=400, people=80)
    path = images.save_npz(tmp_path / "p.npz", test=images.select(range(30)))
    config = train.Config(
        data=str(path), epsilon=8.0, delta=1e-3, unit="person", images_per_person=3, batch_size=16,
        steps=4, model="sfumato.models.wrn:tanh_cnn", image_size=28,
    )  # fmt: skip
    with open_run(config, verb="train", out=tmp_path / "run") as run:
        summary = train.run(config, run)
    header = read_lines(tmp_path / "run" / "ledger.jsonl")[0]["header"]
    assert header["unit"] == "person"
    assert "up to 3 images of each" in header["public"]
    assert summary["rate"] == 16 / 80
    assert "for each person" in train.show(summary)
    batches = read_lines(tmp_path / "run" / "private" / "metrics.jsonl")
    assert sum(line["batch"] for line in batches) < 4 * 40  # people, not images
    assert json.loads((tmp_path / "run/plan.json").read_text())["size"] == 80
