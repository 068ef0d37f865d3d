"""Images in pieces: the same for every process, none drawn twice, and never all in memory."""

import gc
import weakref
from dataclasses import dataclass, field

import torch
from hypothesis import given
from hypothesis import strategies as st

from sfumato.data.arrays import load_npz, read_npz_note, save_npz_pieces
from sfumato.diffusion.image_shards import ImageShards, image_seeds
from sfumato.training.process_group import ProcessGroup


def numbered(first, last):
    """Images that show their number."""
    return torch.arange(first, last).to(torch.uint8)[:, None, None, None].repeat(1, 3, 2, 2)


def silent(_):
    pass


def test_pieces_are_all_images_in_their_order(tmp_path):
    pieces = ImageShards(tmp_path, 11, 4)
    told = []
    pieces.draw(numbered, ProcessGroup(), told.append)
    assert [len(piece) for piece in pieces] == [4, 4, 3]
    assert torch.cat(list(pieces))[:, 0, 0, 0].tolist() == list(range(11))
    assert pieces.first(6)[:, 0, 0, 0].tolist() == list(range(6))
    assert len(pieces.first(99)) == 11
    assert told == ["11 images drawn"]
    pieces.remove()
    assert not list(tmp_path.iterdir())


def test_a_piece_that_is_there_is_not_drawn_again(tmp_path):
    pieces = ImageShards(tmp_path, 11, 4)
    pieces.draw(numbered, ProcessGroup(), silent)
    (tmp_path / "piece-0000004-0000008.npy").unlink()
    asked, told = [], []
    pieces.draw(lambda *ends: asked.append(ends) or numbered(*ends), ProcessGroup(), told.append)
    assert asked == [(4, 8)]
    assert told == ["going on after 7 images", "11 images drawn"]


def test_all_pieces_are_drawn_in_one_shape_and_other_sizes_do_not_mix(tmp_path):
    asked = []
    for size in (5, 4):
        ImageShards(tmp_path, 11, size).draw(
            lambda *ends: asked.append(ends) or numbered(*ends), ProcessGroup(), silent
        )
    assert asked == [(0, 5), (5, 10), (6, 11), (0, 4), (4, 8), (7, 11)]
    for size in (5, 4):
        pieces = ImageShards(tmp_path, 11, size)
        assert torch.cat(list(pieces))[:, 0, 0, 0].tolist() == list(range(11))
    pieces.remove()
    assert not list(tmp_path.iterdir())


@dataclass(frozen=True)
class Stand(ProcessGroup):
    """One of several processes, when the leader is the last to have its turn."""

    missing: tuple[int, ...] = ()
    handed: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def agree(self, value):
        return self.missing if value is None else value

    def collect(self, tensor):
        self.handed.setdefault(self.rank, []).append(tensor)
        turn = len(self.handed[self.rank]) - 1
        return [self.handed[rank][turn] for rank in range(self.size)] if self.leads else []


def test_several_processes_make_the_files_of_one(tmp_path):
    for name in ("one", "three"):
        (tmp_path / name).mkdir()
    ImageShards(tmp_path / "one", 14, 4).draw(numbered, ProcessGroup(), silent)
    handed = {}
    for rank in (1, 2, 0):
        place = None if rank else tmp_path / "three"
        ImageShards(place, 14, 4).draw(numbered, Stand(rank, 3, (0, 4, 8, 12), handed), silent)
    for path in (tmp_path / "one").iterdir():
        assert (tmp_path / "three" / path.name).read_bytes() == path.read_bytes()
    assert [len(drawn) for drawn in handed.values()] == [2, 2, 2]


@given(st.integers(0, 999), st.integers(0, 999))
def test_drawings_of_different_seeds_share_no_seed(one, other):
    ends = torch.tensor([0, 999_999])
    if one != other:
        a, b = (int(image_seeds(seed, ends)[0]) for seed in (one, other))
        assert 999_999 < (b - a) % 2**32 < 2**32 - 999_999
    assert image_seeds(0, ends).tolist() == [0, 999_999]


def test_a_file_is_written_with_one_piece_in_memory(tmp_path):
    alive = []

    def pieces():
        for start in range(0, 12, 4):
            gc.collect()
            assert sum(piece() is not None for piece in alive) <= 1
            piece = numbered(start, start + 4)
            alive.append(weakref.ref(piece))
            yield piece
            del piece

    labels = torch.arange(12) % 2
    path = tmp_path / "images.npz"
    save_npz_pieces(
        path, {"train": (labels, pieces())}, classes=("a", "b"), shape=(3, 2, 2), note="mine"
    )
    found = load_npz(path, "train", private=False)
    assert found.pixels.equal(numbered(0, 12))
    assert found.labels.equal(labels)
    assert found.classes == ("a", "b")
    assert len(load_npz(path, "test", private=False)) == 0
    assert read_npz_note(path) == "mine"
    assert len(alive) == 3
