import json
import shutil

import numpy as np
import pytest
import torch

from sfumato.attack import shards
from sfumato.attack.fleet import Fleet
from sfumato.attack.heads import HeadRecipe
from sfumato.attack.shards import merge, open_shards, write_shard
from sfumato.errors import ConfigError, RunError

RECIPE = HeadRecipe(classes=3, epochs=2)
HEADS, SHARDS = 50, 4


def fleet(seed=0, recipe=RECIPE):
    generator = torch.Generator().manual_seed(3)
    return Fleet(torch.randn(60, 5, generator=generator), torch.arange(60) % 3, recipe, seed)


@pytest.fixture
def folder(tmp_path):
    """A whole fleet of four shards, not merged."""
    for index in range(SHARDS):
        write_shard(tmp_path, fleet(), index, SHARDS, HEADS)
    return tmp_path


def snapshot(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_shards_together_are_the_fleet(folder):
    merge(folder)
    saved = open_shards(folder)
    assert [len(heads) for heads in saved] == [12, 13, 12, 13]
    whole = fleet().heads(0, HEADS)
    assert torch.equal(torch.cat([heads.weights for heads in saved]), whole.weights)
    assert torch.equal(torch.cat([heads.members for heads in saved]).long(), whole.members)
    assert {heads.kind for heads in saved} == {whole.kind}
    assert saved.record.recipe == RECIPE
    assert torch.equal(saved[-1].weights, saved[SHARDS - 1].weights)


def test_arrays_are_mapped_and_what_is_written_to_them_stays_in_memory(folder):
    merge(folder)
    before = snapshot(folder)
    saved = open_shards(folder)
    saved[0].weights.zero_()
    assert snapshot(folder) == before
    assert saved[0].weights.abs().sum() > 0


def test_training_in_small_batches_writes_the_same_files(folder, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(shards, "BATCH", 5)
    other = tmp_path_factory.mktemp("other")
    place = write_shard(other, fleet(), 1, SHARDS, HEADS)
    for name in ("weights.npy", "members.npy", "shard.json"):
        assert (place / name).read_bytes() == (folder / place.name / name).read_bytes()


def test_a_whole_shard_is_not_trained_again(folder, monkeypatch):
    before = snapshot(folder)
    monkeypatch.setattr(Fleet, "heads", lambda *_: pytest.fail("it was trained again"))
    write_shard(folder, fleet(), 2, SHARDS, HEADS)
    assert snapshot(folder) == before


def test_a_shard_cut_while_it_was_written_is_written_by_the_same_command(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "BATCH", 5)
    whole, calls = Fleet.heads, []

    def cut(self, *arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Fleet, "heads", cut)
        with pytest.raises(KeyboardInterrupt):
            write_shard(tmp_path, fleet(), 0, 1, HEADS)
    assert not list(tmp_path.glob("shard-*"))
    with pytest.raises(RunError, match="no shards"):
        merge(tmp_path)
    write_shard(tmp_path, fleet(), 0, 1, HEADS)
    merge(tmp_path)
    assert torch.equal(open_shards(tmp_path)[0].weights, fleet().heads(0, HEADS).weights)


def lose(place):
    shutil.rmtree(place)


def lose_manifest(place):
    (place / "shard.json").unlink()


def lose_weights(place):
    (place / "weights.npy").unlink()


def truncate(place):
    path = place / "weights.npy"
    path.write_bytes(path.read_bytes()[:-4])


def truncate_header(place):
    path = place / "members.npy"
    path.write_bytes(path.read_bytes()[:20])


def empty(place):
    (place / "weights.npy").write_bytes(b"")


def reshape(place):
    np.save(place / "weights.npy", np.zeros((12, 17), dtype=np.float32))


def break_manifest(place):
    (place / "shard.json").write_text('{"index": 2')


def cut_manifest(place):
    (place / "shard.json").write_text('{"index": 2}')


DAMAGE = {
    lose: "shard-0002-of-0004 is missing",
    lose_manifest: "shard.json is missing",
    lose_weights: "weights.npy is missing or truncated",
    truncate: "weights.npy is missing or truncated",
    truncate_header: "members.npy is missing or truncated",
    empty: "weights.npy is missing or truncated",
    reshape: "weights.npy is not of its fleet's type and shape",
    break_manifest: "shard.json cannot be read",
    cut_manifest: "shard.json cannot be read",
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("merged", [False, True])
def test_a_shard_that_is_not_whole_is_refused_by_name_and_left_alone(folder, damage, merged):
    if merged:
        merge(folder)
    damage(folder / "shard-0002-of-0004")
    before = snapshot(folder)
    with pytest.raises(RunError, match=DAMAGE[damage]) as refusal:
        (open_shards if merged else merge)(folder)
    assert "shard-0002-of-0004" in str(refusal.value)
    assert "rite that shard" in str(refusal.value)
    if damage is not lose:
        with pytest.raises(RunError, match="shard-0002"):
            write_shard(folder, fleet(), 2, SHARDS, HEADS)
    assert snapshot(folder) == before


def test_one_changed_bit_is_found_when_shards_are_merged(folder):
    path = folder / "shard-0001-of-0004" / "weights.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(RunError, match=r"weights\.npy is damaged"):
        merge(folder)
    assert not (folder / "fleet.json").exists()


@pytest.mark.parametrize(
    ("stranger", "change"),
    [
        (fleet(seed=9), "seed: 0 -> 9"),
        (fleet(recipe=HeadRecipe(classes=3, epochs=3)), "recipe.epochs: 2 -> 3"),
    ],
)
def test_a_shard_of_another_fleet_is_refused(folder, tmp_path_factory, stranger, change):
    other = tmp_path_factory.mktemp("other")
    place = write_shard(other, stranger, 2, SHARDS, HEADS)
    shutil.rmtree(folder / place.name)
    shutil.copytree(place, folder / place.name)
    before = snapshot(folder)
    with pytest.raises(RunError, match=rf"shard-0002.*another fleet.*{change}"):
        merge(folder)
    assert snapshot(folder) == before


def test_a_folder_takes_one_fleet_only(folder):
    before = snapshot(folder)
    for arguments in (
        (fleet(1), 0, SHARDS, HEADS),
        (fleet(), 0, 5, HEADS),
        (fleet(), 0, SHARDS, 51),
    ):
        with pytest.raises(RunError, match="another fleet"):
            write_shard(folder, *arguments)
    assert snapshot(folder) == before


def test_a_renamed_shard_is_refused(folder):
    (folder / "shard-0001-of-0004").rename(folder / "aside")
    shutil.copytree(folder / "shard-0002-of-0004", folder / "shard-0001-of-0004")
    with pytest.raises(RunError, match="shard-0001-of-0004 holds shard 2"):
        merge(folder)


def test_merging_twice_changes_nothing_and_a_foreign_record_is_not_overwritten(folder):
    path = merge(folder)
    before = snapshot(folder)
    merge(folder)
    assert snapshot(folder) == before
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "seed": 5}))
    before = snapshot(folder)
    for act in (merge, open_shards):
        with pytest.raises(RunError, match="another fleet"):
            act(folder)
    assert snapshot(folder) == before


def test_shards_are_opened_only_when_merged(folder):
    with pytest.raises(RunError, match="Merge them first"):
        open_shards(folder)


def test_impossible_shards_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no shard 4 of 4"):
        write_shard(tmp_path, fleet(), 4, 4, HEADS)
    with pytest.raises(ConfigError, match="fewer shards"):
        write_shard(tmp_path, fleet(), 0, 4, 3)
