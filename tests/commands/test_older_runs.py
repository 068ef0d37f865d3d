"""A finished run of an earlier version, whose settings were others, is read by every command."""

import json
import shutil
from dataclasses import dataclass

import pytest
from finished import COMMANDS
from finished import runs as runs
from golden.store import RUNS

from sfumato import config as config_module
from sfumato.cli import parse
from sfumato.commands import command_settings, subcommands_of
from sfumato.commands.train import command as train
from sfumato.errors import ConfigError, RunError
from sfumato.files import read_json
from sfumato.runs import open_run
from sfumato.setting_groups import defaults

NEWER = ("canary_kind", "extender", "norm", "clip", "sharpness", "noise_decay")
"""Settings that an earlier version did not have, say."""


def edit(path, **changes):
    """Change the settings in a config.json; None takes one out."""
    record = read_json(path)
    settings = {**record["config"], **changes}
    kept = {name: value for name, value in settings.items() if value is not None}
    path.write_text(json.dumps({**record, "config": kept}))


def older(run):
    """As an earlier version left it: some settings were not there, one has been removed since."""
    before = read_json(run / "config.json")["config"]
    edit(run / "config.json", **dict.fromkeys(NEWER), two_pass=True, check_every=7)
    assert len(read_json(run / "config.json")["config"]) < len(before)
    return run


@pytest.fixture
def run(runs, tmp_path):
    return older(runs.copy("train", tmp_path / "older"))


@pytest.mark.parametrize("reader", COMMANDS)
def test_a_new_setting_and_a_removed_one_leave_every_finished_run_readable(
    reader, run, runs, tmp_path
):
    code, words = COMMANDS[reader](run, runs.public, tmp_path / "out")
    assert code == 0, words


@pytest.mark.parametrize("reader", ["audit", "release", "invert"])
def test_a_setting_that_never_was_is_refused(reader, run, runs, tmp_path):
    edit(run / "config.json", epsilom=3)
    code, words = COMMANDS[reader](run, runs.public, tmp_path / "out")
    assert (code, "epsilom" in words) == (2, True)


def test_a_finished_run_of_an_earlier_version_is_not_done_again(run, runs):
    config = runs.settings.train.alone
    with open_run(config, verb="train", out=run) as opened:
        assert opened.finished
    with (
        pytest.raises(RunError, match="lr"),
        open_run(train.Config(**{**vars(config), "lr": 9.0}), verb="train", out=run),
    ):
        pass


def test_an_unfinished_run_goes_on_with_all_of_its_settings_alone(run, runs):
    (run / "done.json").unlink()
    with (
        pytest.raises(RunError, match="extender"),
        open_run(runs.settings.train.alone, verb="train", out=run),
    ):
        pass


@pytest.mark.parametrize("before", [False, True])
def test_an_unfinished_run_goes_on_without_a_setting_that_only_said_how(before, tmp_path):
    config = train.Config(noise_multiplier=1.0, steps=3, batch_size=50)
    with open_run(config, verb="train", out=tmp_path) as opened:
        opened.measure(0, lr=0.1)  # something was made
    record = read_json(tmp_path / "config.json")
    record["config"]["two_pass"] = before
    (tmp_path / "config.json").write_text(json.dumps(record))
    with open_run(config, verb="train", out=tmp_path) as opened:
        assert not opened.finished
    words = ["--noise-multiplier", "1", "--out", str(tmp_path)]
    assert parse("train", words).config == config
    record["config"]["lr"] = 3.0
    (tmp_path / "config.json").write_text(json.dumps(record))
    with pytest.raises(RunError, match="lr"), open_run(config, verb="train", out=tmp_path):
        pass


def test_model_json_of_an_earlier_version_is_read_with_what_it_says(runs, tmp_path):
    """Only what has a default may be missing: the classes have none."""
    run = shutil.copytree(runs.made("train"), tmp_path / "run")
    known = read_json(run / "model.json")
    (run / "model.json").write_text(json.dumps({k: v for k, v in known.items() if k != "classes"}))
    code, words = COMMANDS["load_model"](run, None, None)
    assert (code, "classes" in words) == (2, True)


@pytest.mark.parametrize("name", ["train", "plain", "canaries"])
def test_a_setting_that_train_gets_tomorrow_orphans_no_finished_run(name):
    @dataclass(frozen=True, kw_only=True)
    class Novelty:
        novelty: float = 0.0

    @dataclass(frozen=True, kw_only=True, init=False)
    class Tomorrow(train.Config):
        news: Novelty = Novelty()

    stored = read_json(RUNS / "v1" / name / "config.json")
    config = config_module.read_record(Tomorrow, stored, finished=True)
    assert (config.novelty, config.model) == (0.0, "group-cnn-small")
    with pytest.raises(ConfigError, match="novelty"):
        config_module.read_record(Tomorrow, stored, finished=False)
    with pytest.raises(ConfigError, match="newer"):
        config_module.read_record(Tomorrow, {**stored, "version": 3}, finished=True)


def test_settings_in_the_groups_of_version_1_are_read():
    stored = read_json(RUNS / "v1" / "warmup" / "config.json")
    assert stored["config"]["diffusion"]["gen_width"] == 8
    kind, _ = command_settings("warmup")
    config = config_module.read_record(kind, stored, finished=True)
    assert config.diffusion.gen_width == 8
    assert config_module.to_json(config)["gen_width"] == 8
    again = {"version": 2, "config": config_module.to_json(config)}
    assert config_module.read_record(kind, again, finished=False) == config


def test_what_is_not_finished_is_read_strictly():
    whole = config_module.to_json(train.Config(noise_multiplier=1.0))
    del whole["lr"]
    assert config_module.read_finished(train.Config, whole).lr == defaults(train.Config)["lr"]
    with pytest.raises(ConfigError, match="lr"):
        config_module.from_json(train.Config, whole)


ONLY_TRAIN = {"canaries": 50, "canary_kind": "natural", "explain": True}
WITHDRAWN = {
    "reconstruct": {"save": 62, "shards": 2, "shard": "1/2"},
    "invert": {"force": True, **ONLY_TRAIN},
    "release": {
        "soft_labels": "live",
        "extractor": "real",
        "card_scores": True,
        "repeats": 3,
        "student_shift": 2,
        "verify": "bundle",
        **ONLY_TRAIN,
    },
    "warmup": {"control_widths": [8], "run": "run", **ONLY_TRAIN},
}
"""Settings that no longer exist, by command, with another value than the usual one."""
EACH = [(verb, name) for verb, names in WITHDRAWN.items() for name in names]


def begun(verb, place, **changes):
    """A run that began with the settings of a stored one, and what came later at its default."""
    kind, stored = command_settings(verb)[0], read_json(RUNS / "v1" / verb / "config.json")
    withdrawn = {name: stored["config"][name] for name in kind.WITHDRAWN}
    settings = {**config_module.complete_config(kind, stored["config"]), **withdrawn, **changes}
    place.mkdir()
    (place / "config.json").write_text(json.dumps({**stored, "config": settings}))
    (place / "metrics.jsonl").write_text('{"step": 0}\n')  # something was made
    return place


def test_every_withdrawn_setting_is_tried():
    for verb, names in WITHDRAWN.items():
        assert set(names) == set(command_settings(verb)[0].WITHDRAWN)
        stored = read_json(RUNS / "v1" / verb / "config.json")["config"]
        for name, gone in command_settings(verb)[0].WITHDRAWN.items():
            assert gone.usual in (config_module.ANY, stored[name])


@pytest.mark.parametrize(("verb", "name"), EACH)
def test_a_finished_run_with_a_withdrawn_setting_is_read_without_it(verb, name, tmp_path):
    out = begun(verb, tmp_path / "run", **{name: WITHDRAWN[verb][name]})
    (out / "done.json").write_text("{}")
    config = parse(verb, ["--out", str(out)]).config
    assert not hasattr(config, name)
    with open_run(config, verb=verb, out=out) as opened:
        assert opened.finished


@pytest.mark.parametrize(("verb", "name"), EACH)
def test_an_unfinished_run_goes_on_without_a_withdrawn_setting_that_changes_nothing(
    verb, name, tmp_path
):
    usual = begun(verb, tmp_path / "usual")
    config = parse(verb, ["--out", str(usual)]).config
    open_run(config, verb=verb, out=usual).close()
    other = begun(verb, tmp_path / "other", **{name: WITHDRAWN[verb][name]})
    if command_settings(verb)[0].WITHDRAWN[name].usual is config_module.ANY:
        open_run(config, verb=verb, out=other).close()
        assert parse(verb, ["--out", str(other)]).config == config
        return
    with pytest.raises(RunError, match=name):
        open_run(config, verb=verb, out=other)
    with pytest.raises(ConfigError, match=f'"{name}" is .* was removed'):
        parse(verb, ["--out", str(other)])


@pytest.mark.parametrize(("verb", "name"), EACH)
def test_a_withdrawn_flag_is_refused_with_what_to_do(verb, name):
    flag = f"--{name.replace('_', '-')}"
    if any(flag in way.former for way in subcommands_of(verb).values()):
        return  # it still names the way
    for words in ([flag, "1"], [f"{flag}=1"], [f"--no-{flag[2:]}"]):
        with pytest.raises(ConfigError, match=rf"{words[0][:5]}.* was removed: \w+"):
            parse(verb, words)
