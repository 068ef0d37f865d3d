"""The stages of sfumato reconstruct, on digits and with tiny networks."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from contents import summaries
from reconstructions import TINY, attack
from safetensors.torch import load_file, save_file

from sfumato.attacks.heads import HeadRecipe
from sfumato.cli import main
from sfumato.commands.reconstruct import command as reconstruct
from sfumato.commands.reconstruct.evaluate import epsilon_bounds
from sfumato.errors import ConfigError, RunError
from sfumato.metrics.reconstruction_trials import Trials
from sfumato.reporting.words import round_up
from sfumato.runs import open_run
from sfumato.settings.reconstruct import Reconstruct

STAGES = Reconstruct.stage_names()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "tiny"
    attack(TINY, out)
    return out


def test_a_whole_attack_leaves_pictures_and_scores_in_private(finished):
    assert {p.name for p in (finished / "private").iterdir()} == {
        "gallery.png", "roc.png", "findings.json", "scores.json",
    }  # fmt: skip
    scores = json.loads((finished / "private" / "scores.json").read_text())
    assert scores["trials"] == 600
    assert 0 <= scores["tpr_at_1_percent_fpr"] <= 1
    assert scores["privacy"]["epsilon_proved"] >= 0
    assert "epsilon" not in scores["privacy"]
    done = json.loads((finished / "done.json").read_text())
    assert "trained without privacy from train images" in done["text"]
    assert not {"auc", "accuracy_of_heads", "tpr_at_1_percent_fpr"} & set(done)
    assert str(finished) not in summaries(finished)
    targets = finished / "stages" / "features" / "private" / "features.safetensors"
    assert targets.exists()  # what comes from secret images stays in private


def test_a_run_that_was_cut_goes_on_stage_by_stage_to_the_same_networks(
    finished, tmp_path, monkeypatch
):
    from sfumato.training import fit

    advance, count = fit.TrainState.advance, []

    def stop(self):
        count.append(1)
        if len(count) == 4:  # two steps of the base, and the second of four of the network
            raise KeyboardInterrupt
        advance(self)

    monkeypatch.setattr(fit.TrainState, "advance", stop)
    with pytest.raises(KeyboardInterrupt):
        attack(TINY, tmp_path / "run")
    monkeypatch.setattr(fit.TrainState, "advance", advance)
    for stage in STAGES:
        assert attack(replace(TINY, stage=stage), tmp_path / "run")["stage"] == stage
    for name in ("stages/train/model.safetensors", "stages/base/model.safetensors"):
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
    assert re.search(r"the attack \(private\): AUC 0\.\d{3}, TPR 0\.\d{3} \(", said[-1])
    assert not (tmp_path / "run/log.txt").exists()  # which may be shared
    privacy = json.loads((tmp_path / "run/private/scores.json").read_text())["privacy"]
    assert privacy["tpr_bound_at_1_percent_fpr"] == pytest.approx(0.1, abs=2e-3)
    assert privacy["epsilon_proved"] <= privacy["epsilon"]
    assert "no attack has a TPR above 0.1" in text
    assert f"epsilon {round_up(privacy['epsilon'])} at delta 1e-05, one image replaced" in text
    assert privacy["delta"] == 1e-5  # far below one in ten images
    published = privacy["at_published_delta"]
    assert published["epsilon_add_or_remove"] < published["epsilon"] < privacy["epsilon"]
    added, replaced = round_up(published["epsilon_add_or_remove"]), round_up(published["epsilon"])
    assert f"{replaced}; one image added or removed, as published: {added}" in text


def test_the_published_epsilon_is_that_of_one_image_added_or_removed():
    head = HeadRecipe(rate=0.5, max_norm=4.0, noise_multiplier=1.82)
    pictures = torch.rand(8, 1, 1, 2, 2)
    images, partner = torch.zeros(8, 1, dtype=torch.int64), torch.arange(8).roll(1)
    trials = Trials(pictures, pictures[:, :, None], images, partner, torch.ones(1, 2), 1.0)
    published = epsilon_bounds(head, trials, 0.95, 0.5)["at_published_delta"]
    assert published["epsilon_add_or_remove"] == pytest.approx(5.0, rel=0.02)
    assert published["epsilon"] == pytest.approx(14.1, rel=0.01)


def dumps_config(config):
    from sfumato.config import dumps, to_json

    return dumps(to_json(config))


def test_a_head_that_somebody_brings(finished, tmp_path):
    head = {"head.weight": 0.01 * torch.randn(10, 256), "head.bias": torch.zeros(10)}
    save_file(head, tmp_path / "mine.safetensors")
    found = attack(replace(TINY, target=tmp_path / "mine.safetensors"), finished)
    (picture,) = finished.glob("private/target-mine-*.png")
    assert found["distance"] > 0
    assert "trained on" not in found["text"]
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
    assert "It was trained on 100 examples, and heads of this recipe 10" in found["text"]
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


def test_statistics_of_other_shadow_heads_are_refused(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "stages" / "evaluate")
    (tmp_path / "run" / "done.json").unlink()
    other = replace(TINY, head=replace(TINY.head, lr=0.2))
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["config"]["lr"] = 0.2
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    with pytest.raises(RunError, match="other shadow heads"):
        attack(other, tmp_path / "run")


def test_the_command_line_takes_a_stage_as_its_first_word(tmp_path, capsys):
    words = ["reconstruct", "features", "--base-epochs", "0.2", "--decoder", "published"]
    words += ["--no-conditional", "--feature-norm", "10"]
    with pytest.raises(SystemExit) as end:
        main([*words, "--out", str(tmp_path / "run"), "--class-size", "2"])
    assert end.value.code == 0
    assert "stage features" in capsys.readouterr().out
    config = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert config["class_size"] == 2
    repeated = [*words, "--out", str(tmp_path / "run"), "--class-size", "2"]
    for again in (["reconstruct", "shadow", "--out", str(tmp_path / "run")], repeated):
        with pytest.raises(SystemExit) as end:  # the directory remembers its settings
            main(again)
        assert end.value.code == 0
    with pytest.raises(SystemExit) as end:
        main(["reconstruct", "shadow", "--out", str(tmp_path / "run"), "--class-size", "3"])
    assert end.value.code == 2
    assert "class_size" in capsys.readouterr().err
