"""The stages of sfumato reconstruct, on digits and with tiny networks."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from reconstructions import TINY, attack
from safetensors.torch import load_file, save_file

from sfumato.attack.fleet import Fleet
from sfumato.cli import main
from sfumato.errors import ConfigError, RunError
from sfumato.recipes import reconstruct
from sfumato.recipes.reconstruct import STAGES
from sfumato.recipes.reconstruct.decoder import heads_by_step
from sfumato.recipes.reconstruct.heads import keep_heads
from sfumato.recipes.reconstruct.scene import fleet_of, set_scene
from sfumato.recipes.reconstruct.stages import take
from sfumato.recipes.reconstruct.together import together
from sfumato.report.words import up
from sfumato.runs import Run, open_run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "tiny"
    attack(TINY, out)
    return out


def test_a_whole_attack_leaves_pictures_and_scores_in_private(finished):
    assert {p.name for p in (finished / "private").iterdir()} == {
        "gallery.png", "roc.png", "scores.json",
    }  # fmt: skip
    scores = json.loads((finished / "private" / "scores.json").read_text())
    assert scores["trials"] == 600
    assert 0 <= scores["tpr_at_1_percent_fpr"] <= 1
    assert scores["privacy"]["epsilon_proved"] >= 0
    assert "epsilon" not in scores["privacy"]
    done = json.loads((finished / "done.json").read_text())
    assert "learnt without privacy from train images" in done["text"]
    assert not {"auc", "accuracy_of_heads", "tpr_at_1_percent_fpr"} & set(done)
    targets = finished / "stages" / "features" / "private" / "features.safetensors"
    assert targets.exists()  # what comes from secret images stays in private


def test_stages_one_by_one_are_the_whole(finished, tmp_path):
    for stage in STAGES:
        found = attack(replace(TINY, stage=stage), tmp_path / "run")
        assert found["stage"] == stage
    for name in ("stages/train/model.safetensors", "stages/base/model.safetensors"):
        one, other = load_file(finished / name), load_file(tmp_path / "run" / name)
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_run_that_was_cut_goes_on_to_the_same_network(finished, tmp_path, monkeypatch):
    from sfumato.train import loop

    advance, count = loop.Learner.advance, []

    def stop(self):
        count.append(1)
        if len(count) == 4:  # two steps of the base, and the second of four of the network
            raise KeyboardInterrupt
        advance(self)

    monkeypatch.setattr(loop.Learner, "advance", stop)
    with pytest.raises(KeyboardInterrupt):
        attack(TINY, tmp_path / "run")
    monkeypatch.setattr(loop.Learner, "advance", advance)
    attack(TINY, tmp_path / "run")
    name = "stages/train/model.safetensors"
    one, other = load_file(finished / name), load_file(tmp_path / "run" / name)
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_noise_is_priced_and_bounded(finished, tmp_path):
    head = replace(TINY.head, rate=0.5, max_norm=4.0)
    shutil.copytree(finished / "stages" / "base", tmp_path / "run" / "stages" / "base")
    shutil.copytree(finished / "stages" / "features", tmp_path / "run" / "stages" / "features")
    config = replace(TINY, head=head, bound=0.1)
    (tmp_path / "run" / "config.json").write_text(
        json.dumps({"verb": "reconstruct", "config": json.loads(dumps_config(config))})
    )
    said = []
    with open_run(config, verb="reconstruct", out=tmp_path / "run", say=said.append) as run:
        text = reconstruct.run(config, run)["text"]
    assert re.search(r"for your eyes: AUC 0\.\d{3}, TPR 0\.\d{3} \(", said[-1])
    assert not (tmp_path / "run/log.txt").exists()  # which may be shared
    privacy = json.loads((tmp_path / "run/private/scores.json").read_text())["privacy"]
    assert privacy["tpr_bound_at_1_percent_fpr"] == pytest.approx(0.1, abs=2e-3)
    assert privacy["epsilon_proved"] <= privacy["epsilon"]
    assert "no attack has a TPR above 0.1" in text
    assert f"epsilon {up(privacy['epsilon'])} at delta 1e-05, one image replaced" in text
    assert privacy["delta"] == 1e-5  # far below one in ten images
    published = privacy["at_published_delta"]
    assert published["epsilon"] < privacy["epsilon"]
    assert f"({up(published['epsilon'])} at 0.079, as published)" in text


def dumps_config(config):
    from sfumato.config import dumps, to_json

    return dumps(to_json(config))


def test_heads_on_disk_in_shards(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(ConfigError, match="reconstruct features"):
        attack(replace(TINY, save=62, shard="1/2"), out)
    attack(replace(TINY, stage="features"), out)
    with pytest.raises(RunError, match="no shards"):
        attack(replace(TINY, stage="merge"), out)
    for number in (1, 2):
        found = attack(replace(TINY, save=62, shard=f"{number}/2"), out)
        assert "merge" in reconstruct.show(found)
        assert not (out / "done.json").exists()
    attack(replace(TINY, save=62, stage="merge"), out)
    with pytest.raises(ConfigError, match="Leave --shard out"):
        attack(replace(TINY, save=62, shard="2/2"), out)
    assert not (out / "done.json").exists()
    attack(replace(TINY, save=62, stage="train", steps=4), out)
    assert (out / "stages" / "train" / "model.safetensors").exists()


def test_heads_are_not_kept_or_parted_when_they_are_made_already(finished, capsys):
    before = (finished / "config.json").read_bytes()
    for words in (["--save", "62"], ["--shards", "2"], ["shadow", "--save", "62"]):
        with pytest.raises(SystemExit) as end:
            main(["reconstruct", *words, "--out", str(finished)])
        assert end.value.code == 2
        assert "the stage shadow has used it" in capsys.readouterr().err
    assert (finished / "config.json").read_bytes() == before


def test_heads_cut_while_they_were_written_are_written_by_the_same_command(
    finished, tmp_path, monkeypatch
):
    config, heads, calls = replace(TINY, stage="shadow", save=62), Fleet.heads, []

    def cut(self, *arguments):
        calls.append(arguments)
        if len(calls) == 2:  # the first is how fast heads can be made
            raise KeyboardInterrupt
        return heads(self, *arguments)

    out = without_heads(finished, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Fleet, "heads", cut)
        with pytest.raises(KeyboardInterrupt):
            attack(config, out)
    assert (out / "stages/shadow/heads/.shard-0000-of-0001.draft").is_dir()
    attack(config, out)
    assert {p.name for p in (out / "stages/shadow/heads").iterdir()} == {
        "fleet.json", "shard-0000-of-0001",
    }  # fmt: skip


def test_a_process_leaves_the_drafts_of_the_others_alone(finished, tmp_path):
    out = without_heads(finished, tmp_path)
    draft = out / "stages/shadow/heads/.shard-0000-of-0002.draft"
    draft.mkdir(parents=True)
    world = SimpleNamespace(
        size=2, rank=1, leads=False, agree=lambda _: str(out), any=lambda _: False
    )
    together(replace(TINY, stage="shadow", save=62, shards=2), None, world)
    assert (out / "stages/shadow/heads/shard-0001-of-0002").is_dir()
    assert draft.is_dir()


def without_heads(finished, folder):
    """A copy of a run that ends with its features."""
    left = shutil.ignore_patterns("private", "shadow", "stats", "train", "evaluate", "done.json")
    shutil.copytree(finished, folder / "run", ignore=left)
    for name in ("base", "features"):
        shutil.rmtree(folder / "run" / "stages" / name)
        shutil.copytree(finished / "stages" / name, folder / "run" / "stages" / name)
    return folder / "run"


def test_batches_from_disk_are_never_empty(finished, tmp_path):
    config = replace(TINY, save=22, shards=4, batch_heads=8)
    with open_run(config, verb="reconstruct", out=tmp_path / "run") as run:
        scene = replace(set_scene(config, run), public=Run(finished))
        take(scene, "stats")
        heads_of = heads_by_step(scene, fleet_of(scene))
        sizes = [len(heads_of(step)) for step in range(30)]
    assert min(sizes) == 5
    assert max(sizes) == 6


def test_two_processes_make_the_heads_of_one(tmp_path):
    flags = [
        "reconstruct", "shadow", "--preset", "digits-cpu", "--base-epochs", "0.2", "--save", "600",
        "--shards", "3", "--device", "cpu", "--out",
    ]  # fmt: skip
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for name, words in (("two", several), ("one", [])):
        command = [sys.executable, *words, "-m", "sfumato", *flags, str(tmp_path / name)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
    for shard in range(3):
        place = f"stages/shadow/heads/shard-{shard:04d}-of-0003/weights.npy"
        assert (tmp_path / "one" / place).read_bytes() == (tmp_path / "two" / place).read_bytes()


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_damaged_shard_is_named(tmp_path, damage):
    config, out = replace(TINY, save=64, stage="shadow"), tmp_path / "run"
    attack(replace(TINY, stage="features"), out)
    for number in (1, 2):
        attack(replace(config, shard=f"{number}/2"), out)
    weights = out / "stages/shadow/heads/shard-0001-of-0002/weights.npy"
    if damage == "missing":
        shutil.rmtree(weights.parent)
    else:
        weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(RunError, match="shard-0001-of-0002"):
        attack(replace(config, stage="merge"), out)


def test_a_head_that_somebody_brings(finished, tmp_path):
    head = {"head.weight": 0.01 * torch.randn(10, 256), "head.bias": torch.zeros(10)}
    save_file(head, tmp_path / "mine.safetensors")
    found = attack(replace(TINY, target=tmp_path / "mine.safetensors"), finished)
    (picture,) = finished.glob("private/target-mine-*.png")
    assert found["distance"] > 0
    assert "learnt" not in found["text"]
    picture.unlink()
    torch.save(head, tmp_path / "mine.pt")
    with pytest.raises(SystemExit):  # a finished run still looks at heads
        main(["reconstruct", "--out", str(finished), "--target", str(tmp_path / "mine.pt")])
    assert picture.exists()
    run = tmp_path / "run" / "mine.safetensors"
    run.mkdir(parents=True)
    save_file({**head, "head.bias": torch.ones(10)}, run / "model.safetensors")
    (run / "plan.json").write_text('{"expected_batch": 20, "rate": 0.2}')
    found = attack(replace(TINY, target=run), finished)
    assert len(list(finished.glob("private/target-mine-*.png"))) == 2  # two heads of one name
    assert "It learnt 100 examples, and heads of this recipe 10" in found["text"]
    save_file(
        {"w.weight": torch.zeros(3, 5), "w.bias": torch.zeros(3)}, tmp_path / "no.safetensors"
    )
    with pytest.raises(ConfigError, match=r"no layer of 10 x 256"):
        attack(replace(TINY, target=tmp_path / "no.safetensors"), finished)
    with pytest.raises(ConfigError, match="no head in"):
        attack(replace(TINY, target=tmp_path / "nothing"), finished)
    (tmp_path / "bad.safetensors").write_bytes(b"rubbish")
    with pytest.raises(ConfigError, match="plain tensors"):
        attack(replace(TINY, target=tmp_path / "bad.safetensors"), finished)
    save_file({**head, "head.bias": torch.full((10,), torch.nan)}, tmp_path / "nan.safetensors")
    with pytest.raises(ConfigError, match="not finite"):
        attack(replace(TINY, target=tmp_path / "nan.safetensors"), finished)


def test_a_shard_that_does_not_exist_is_refused(finished):
    with pytest.raises(ConfigError, match="i from 1 to n"):
        keep_heads(replace(TINY, save=8, shard="3/2"), None, Run(finished))


def test_statistics_of_another_fleet_are_refused(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "stages" / "evaluate")
    (tmp_path / "run" / "done.json").unlink()
    other = replace(TINY, head=replace(TINY.head, lr=0.2))
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["config"]["head"]["lr"] = 0.2
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    with pytest.raises(RunError, match="another fleet"):
        attack(other, tmp_path / "run")


def test_the_command_line_takes_a_stage_as_its_first_word(tmp_path, capsys):
    words = ["reconstruct", "features", "--base-epochs", "0.2", "--decoder", "published"]
    words += ["--no-conditional", "--feature-norm", "10"]
    with pytest.raises(SystemExit) as end:
        main([*words, "--out", str(tmp_path / "run"), "--class-size", "2"])
    assert end.value.code == 0
    assert "stage features" in capsys.readouterr().out
    config = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert config["head"]["class_size"] == 2
    repeated = [*words, "--out", str(tmp_path / "run"), "--class-size", "2"]
    for again in (["reconstruct", "shadow", "--out", str(tmp_path / "run")], repeated):
        with pytest.raises(SystemExit) as end:  # the directory remembers its settings
            main(again)
        assert end.value.code == 0
    with pytest.raises(SystemExit) as end:
        main(["reconstruct", "shadow", "--out", str(tmp_path / "run"), "--class-size", "3"])
    assert end.value.code == 2
    assert "class_size" in capsys.readouterr().err
