"""`sfumato train --canaries`, and what its canaries prove, on small digits."""

import json
import multiprocessing
import stat
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from canary_runs import SMALL, digits, ledger_of, run_small, unpriced
from cuts import cut_in
from safetensors.torch import load_file

from sfumato.cli import parse
from sfumato.commands import command_settings
from sfumato.commands.audit.canaries import examine_canaries, score_canaries
from sfumato.commands.train import command as train
from sfumato.commands.train.canaries import read_canaries
from sfumato.errors import ConfigError, RunError
from sfumato.files import read_json
from sfumato.privacy.sampling import Batch, Chunk
from sfumato.runs import open_run
from sfumato.setting_groups import leaves
from sfumato.training.canaries import CanaryInclusion, Observations, draw_canaries, with_coordinates
from sfumato.training.process_group import ProcessGroup


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Epsilon is priced where it is asked for."""
    unpriced(monkeypatch)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A run with enough canaries to prove much of its epsilon, and no chance in it."""
    out = tmp_path_factory.mktemp("sound") / "run"
    tossed = np.random.default_rng(0).random(4000) < 0.5
    coins = CanaryInclusion(
        kind="gradient", places=tuple(range(1000, 5000)), labels=(0,) * 4000,
        included=tuple(tossed.tolist()),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        unpriced(patch)
        run_small(
            out, images=1000, canaries=4000, epsilon=3.0, noise_multiplier=None, batch_size=1000,
            steps=60, physical_batch_size=1500, noise_seed=0, coins=coins,
        )  # fmt: skip
    return out


def rows_of(out, canaries):
    return Observations.read(out / "private" / "canary_steps.bin", canaries)


def test_a_sound_run_proves_half_of_its_epsilon_and_no_more_than_all_of_it(sound):
    epsilon = ledger_of(sound).epsilon()
    found = examine_canaries(sound, confidence=0.95)
    names = [bound.name for bound in found.bounds]
    assert names[:2] == ["gradient canaries, one run", "many canaries"]
    assert min(bound.epsilon for bound in found.bounds) > 0.1
    assert found.bounds[2].epsilon > epsilon / 2
    assert found.bounds[3].epsilon > 0.95 * epsilon
    assert max(bound.epsilon for bound in found.bounds) <= epsilon
    assert [check.name for check in found.checks if check.passed is False] == []
    (pair,) = found.attacks.values()
    assert sum(map(len, pair)) == 4000


def test_canaries_leave_the_guarantee_and_what_is_shared_alone(sound):
    plan = read_json(sound / "plan.json")
    assert (plan["size"], plan["rate"]) == (5000, 0.2)
    assert set(load_file(sound / "model.safetensors")) == {"1.weight", "1.bias"}
    left = {path.name for path in (sound / "private").iterdir()}
    names = {"canaries.json", "canary_start.json", "canary_end.json", "canary_steps.bin"}
    assert left == names | {"data.json", "metrics.jsonl", "scores.json", "findings.json"}
    for path in sound.iterdir():
        if path.suffix in (".json", ".jsonl", ".txt"):
            assert "included" not in path.read_text()


def test_what_was_seen_of_canaries_is_for_its_owner_alone(sound):
    for path, mode in ((sound / "private", 0o700), (sound / "private/canary_steps.bin", 0o600)):
        assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_run_that_was_cut_keeps_its_coins_and_has_every_row_once(tmp_path):
    settings: Any = {"noise_seed": 1, "steps": 6, "canaries": 40}
    with cut_in("sfumato.training.noisy_gradient:privatize", 4):
        run_small(tmp_path / "cut", **settings)
    coins = read_json(tmp_path / "cut" / "private" / "canaries.json")
    before = rows_of(tmp_path / "cut", 40)
    assert np.isnan(before["seen"][4:]).all()
    run_small(tmp_path / "cut", **settings)
    assert read_json(tmp_path / "cut" / "private" / "canaries.json") == coins
    run_small(tmp_path / "whole", coins=coins, **settings)
    whole = rows_of(tmp_path / "whole", 40)
    assert len(whole) == 6
    assert not np.isnan(whole["seen"]).any()
    assert (rows_of(tmp_path / "cut", 40) == whole).all()
    assert (before[:4] == whole[:4]).all()


def test_a_run_that_has_begun_and_lost_its_coins_tosses_no_others(tmp_path):
    settings: Any = {"steps": 3, "canaries": 40}
    with cut_in("sfumato.training.noisy_gradient:privatize", 2):
        run_small(tmp_path / "run", **settings)
    (tmp_path / "run/private/canaries.json").unlink()
    with pytest.raises(RunError, match=r"canaries\.json is gone"):
        run_small(tmp_path / "run", **settings)
    assert not (tmp_path / "run/private/canaries.json").exists()


def take_part(rank, out, coins, changes):
    """One of two processes."""
    torch.set_num_threads(1)
    meeting = f"file://{out.parent / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    config, processes = replace(SMALL, **changes), ProcessGroup(rank, 2)
    if not processes.leads:
        train.run_on(config, *digits(), None, processes)
        return
    with open_run(config, verb="train", out=out) as run:
        run.write_json("private/canaries.json", coins)
        train.run_on(config, *digits(), run, processes)


def test_two_processes_see_of_canaries_what_one_does(tmp_path):
    settings: Any = {"noise_seed": 1, "steps": 3, "canaries": 50, "physical_batch_size": 20}
    run_small(tmp_path / "one", **settings)
    coins = read_canaries(tmp_path / "one")
    # Not forked: autograd refuses that once a test before this one has let it begin threads.
    context = multiprocessing.get_context("spawn")
    parts = [
        context.Process(
            target=take_part, args=(rank, tmp_path / "two", coins, settings), daemon=True
        )
        for rank in (0, 1)
    ]
    for part in parts:
        part.start()
    for part in parts:
        part.join(timeout=100)
    assert [part.exitcode for part in parts] == [0, 0]
    one, two = (rows_of(tmp_path / name, 50) for name in ("one", "two"))
    assert one["present"].any()
    assert (two["present"] == one["present"]).all()
    assert (two["size"] == one["size"]).all()
    np.testing.assert_allclose(two["seen"], one["seen"], atol=1e-4)


def test_the_log_tells_images_from_canaries(tmp_path):
    run_small(tmp_path / "run", steps=1, canaries=40)
    assert "300 images of digits-train and 40 canaries, 1 steps" in log_of(tmp_path / "run")
    run_small(tmp_path / "natural", steps=1, canaries=40, canary_kind="natural")
    assert "300 images of digits-train, 1 steps" in log_of(tmp_path / "natural")
    run_small(tmp_path / "head", steps=1, canaries=40, model="canary_runs:wide", train_only="head")
    assert "features of each image are found once" in log_of(tmp_path / "head")


def log_of(out):
    return (out / "log.txt").read_text()


def seen_exactly(out, **changes):
    """Rows of a run with next to no noise: what each step added, plain to see."""
    settings = {"noise_multiplier": 0.02, "noise_seed": 1, "steps": 2, "canaries": 50}
    run_small(out, **{**settings, **changes})
    rows = rows_of(out, 50)
    assert rows["present"].any()
    assert np.abs(rows["seen"] - rows["present"]).max() < 6 * 0.02
    included = np.array(read_canaries(out).included)
    assert not rows["present"][:, ~included].any()
    return rows


@pytest.mark.parametrize(
    "changes",
    [
        {"physical_batch_size": 7},
        {"augmult": 3, "crop": 1, "model": "canary_runs:wide"},
        {"train_only": "head", "ema": 0.9, "secure": True, "noise_seed": None},
        {"model": "canary_runs:wide", "sharpness": 0.1, "clip_decay": 0.3},
        {"mode": "non-ghost", "precision": "bf16", "clip": "automatic", "max_grad_norm": 0.03},
        {"model": "canary_runs:wide", "optimizer": "adam", "weight_decay": 0.1},
    ],
)
def test_a_canary_adds_the_norm_bound_however_it_is_trained(tmp_path, changes):
    seen_exactly(tmp_path / "run", **changes)


def test_without_noise_to_hide_it_the_score_tells_every_coin(tmp_path):
    seen_exactly(tmp_path / "run", batch_size=350)
    canaries = read_canaries(tmp_path / "run")
    scores = score_canaries(tmp_path / "run", canaries)
    assert ((scores > 0) == np.array(canaries.included)).all()


def test_wrong_labels_that_were_learnt_by_heart_are_proved_to_be(tmp_path):
    run_small(
        tmp_path / "run", mode="non-private", noise_multiplier=None, canaries=200, lr=0.5,
        canary_kind="mislabelled", model="canary_runs:wide", steps=250, physical_batch_size=400,
    )  # fmt: skip
    found = examine_canaries(tmp_path / "run", confidence=0.95)
    (bound,) = found.bounds
    assert bound.epsilon > 0.7
    assert bound.relation == "add-or-remove"
    assert [check.passed for check in found.checks] == [True]
    start, end = (read_json(tmp_path / f"run/private/canary_{w}.json") for w in ("start", "end"))
    assert len(start["losses"]) == len(end["losses"]) == 200


def test_natural_canaries_of_a_private_run_prove_little(tmp_path):
    run_small(tmp_path / "run", canaries=200, canary_kind="natural", steps=4)
    (bound,) = examine_canaries(tmp_path / "run", confidence=0.9999).bounds
    assert bound.epsilon <= ledger_of(tmp_path / "run").epsilon()
    assert read_json(tmp_path / "run/plan.json")["size"] == 300


def test_canaries_are_drawn_once_each_and_relabelled():
    images = digits()[0]
    coins = draw_canaries("gradient", 4000, images).included
    assert abs(np.mean(coins) - 0.5) < 5 * 0.5 / 4000**0.5
    wrong = draw_canaries("mislabelled", 300, images)
    assert sorted(wrong.places) == list(range(300))
    changed = wrong.place_in(images)
    assert (changed.labels != images.labels).all()
    natural = draw_canaries("natural", 30, images)
    assert torch.equal(natural.place_in(images).labels, images.labels)
    assert draw_canaries("natural", 30, images) != natural
    with pytest.raises(ConfigError, match="has 300 images to choose from"):
        draw_canaries("natural", 301, images)


def test_what_a_coin_left_out_is_in_no_batch():
    canaries = CanaryInclusion(kind="natural", places=(4, 7), labels=(0, 0), included=(True, False))
    chunk = Chunk(torch.tensor([4, 5, 7, 0]), torch.tensor([True, True, True, False]))
    (batch,) = canaries.keep_out([Batch(0, (chunk,))])
    assert batch.indices.tolist() == [4, 5]


def test_the_model_is_left_as_it_was():
    model = torch.nn.Linear(3, 2)
    twin = with_coordinates(model, 5)
    assert {name for name, _ in model.named_parameters()} == {"weight", "bias"}
    assert dict(twin.named_parameters())["weight"] is model.weight
    with pytest.raises(ConfigError, match="rename it"):
        with_coordinates(twin, 5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"canaries": -1}, "must be 0"),
        ({"unit": "person"}, "--unit person"),
        ({"relation": "replace"}, "--relation"),
        ({"mode": "non-private", "noise_multiplier": None}, "mislabelled"),
        ({"clip": "global"}, "--clip global"),
        ({"per_layer": True}, "--per-layer"),
        ({"extender": "dope", "extender_images": "digits"}, "--extender"),
    ],
)
def test_what_does_not_go_with_canaries_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        replace(SMALL, **changes)


@pytest.mark.parametrize("verb", ["release", "invert", "warmup"])
def test_other_verbs_have_no_canaries(verb):
    assert "canaries" not in leaves(command_settings(verb)[0])
    with pytest.raises(ConfigError, match="for sfumato train"):
        parse(verb, ["--canaries", "50"])


def test_a_run_without_canaries_or_end_has_nothing_to_say(tmp_path):
    with pytest.raises(RunError, match="has no canaries"):
        examine_canaries(tmp_path, confidence=0.95)
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "canaries.json").write_text(json.dumps({}))
    with pytest.raises(RunError, match="not finished"):
        examine_canaries(tmp_path, confidence=0.95)
