"""The command line as people and programs use it."""

import json
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from urllib.error import URLError

import pytest

from sfumato.cli import COMMANDS, main, parse
from sfumato.commands import command_settings, load_command
from sfumato.errors import SfumatoWarning
from sfumato.files import append_line
from sfumato.privacy.ledger import Ledger, LedgerHeader


def call(capsys, *words):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    streams = capsys.readouterr()
    return stopped.value.code, streams.out, streams.err


def test_help_loads_no_library_of_tensors_or_of_accounting():
    script = (
        "import sys; from sfumato.cli import COMMANDS, main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert 'tyro' not in sys.modules\n"
        "for verb in COMMANDS:\n"
        "    try: main([verb, '--help'])\n"
        "    except SystemExit: pass\n"
        "    for name in ('torch', 'scipy', 'dp_accounting', 'numpy'):\n"
        "        assert name not in sys.modules, (verb, name)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(verb in done.stdout for verb in COMMANDS)


def test_importing_sfumato_and_pricing_a_plan_needs_no_torch():
    script = (
        "import sys, sfumato\n"
        "plan = sfumato.make_plan(size=1000, batch_size=100, epochs=1, noise_multiplier=1.0)\n"
        "assert plan.epsilon(1e-5) > 0 and 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_python_minus_m_works():
    done = subprocess.run([sys.executable, "-m", "sfumato", "--version"], capture_output=True)
    assert done.stdout.startswith(b"sfumato ")


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_verb_explains_itself_and_has_the_preset_for_cpus(capsys, verb):
    code, out, _ = call(capsys, verb, "--help")
    assert code == 0
    assert "--preset" in out
    assert "--out" in out
    assert "digits-cpu" in out


@pytest.mark.parametrize("verb", ["train", "release", "warmup", "invert"])
def test_the_boxes_of_a_help_are_titled_in_plain_words(capsys, verb):
    _, out, _ = call(capsys, verb, "--help")
    titles = set(re.findall(r"([\w.]+) options\b", out))
    assert {"privacy", "optim"} < titles
    assert not [title for title in titles if "." in title]


@pytest.mark.parametrize("verb", COMMANDS)
def test_runs_are_named_after_what_they_are_about(verb):
    command, (kind, presets) = load_command(verb), command_settings(verb)
    for preset in presets.values():
        assert re.fullmatch(r"[\w.-]*", command.label(preset()))
    if verb == "train":
        about = kind(data="my/cifar10.npz", model="torchvision:resnet18", epsilon=2.0)
        assert command.label(about) == "cifar10-torchvision-resnet18-eps2"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["acount"], 'Did you mean "account"?'),
        (["account", "--preset", "x"], 'no preset "x"'),
        (["account"], "--size is missing"),
        (["account", "--size", "100"], "give --epsilon"),
        (["account", "--size", "100", "--epsilon", "-1"], "epsilon=-1"),
        (["account", "--size", "100", "--epsilon", "1", "--delta", "0.5"], "not below 1/100"),
        (["account", "--size", "9", "--noise-multiplier", "1", "--delta", "0.5"], "not below 1/9"),
        (
            ["account", "--size", "100", "--epsilon", "1", "--batch-size", "101", "--steps", "2"],
            "at most 100",
        ),
        (
            ["account", "--size", "100", "--epsilon", "1", "--epochs", "1", "--steps", "2"],
            "give one",
        ),
        (["account", "--ledger", "nowhere"], "no ledger at nowhere"),
        (["account", "nowhere"], "no ledger at nowhere"),
        (["train", "--shadows", "4"], "--shadows is for sfumato audit run, not for sfumato train"),
        (["report", "x", "--no-explain"], "--no-explain is for sfumato train, not for"),
        (["account", "--run=x"], "--run is for sfumato audit run or report or warmup draw"),
        (["audit", "run", "x", "--trials", "9"], "--trials is for sfumato audit heads, not for"),
        (["account", "--ledger", "a", "--relation", "replace"], "--relation has no meaning"),
        (["account", "--size", "0", "--epsilon", "1"], "at least one example"),
        (["account", "--size", "-5", "--epsilon", "1"], "at least one example"),
        (["account", "--size", "100", "--epsilon", "1", "--batch-size", "10"], "how long?"),
        (["account", "--size", "9", "--epsilon", "1", "--plot", "no/x.png"], "no folder no"),
        (["account", "--size", "9", "--noise-multiplier", "1e-5"], "too small to be priced"),
        (["demo", "--epsilon", "inf"], "releases what it makes"),
        (["demo", "--out", "/proc/sfumato"], "/proc/sfumato"),
        (["report", "nowhere"], "nowhere does not exist"),
        (["report"], "no run in runs"),
        (["report", "--serve"], "--serve was removed: give the runs"),
        (["report", "--run", "nowhere"], "nowhere does not exist"),
        (["train", "--epsilon", "3", "--mode", "non-private"], "leave --epsilon out"),
        (["train", "--model", "resnet18"], "neither of --epsilon"),
        (["train", "--epsilon", "3", "--model", "resnet81"], "Did you mean"),
        (
            ["train", "--epsilon", "3", "--model", "./my/net.py:make"],
            "found in this folder or on PYTHONPATH",
        ),
        (["train", "--epsilon", "3", "--device", "cuda:7"], "no GPU"),
        (["train", "--epsilon", "3", "--batch-size", "9000"], "at most 4000"),
        *(
            (
                f"{words} --epsilon 3 --batch-size 9000 --model unknown".split(),
                "be above 0 and at most",
            )
            for words in ("train --pretrained", "invert --data digits@0-4 --public digits@5-9")
        ),
        *(
            (["train", "--data", "nowhere", "--epsilon", "3", *words.split()], message)
            for words, message in [
                ("--batch-size 0", "batch_size=0 must be above 0"),
                ("--batch-size nan", "batch_size=nan must be above 0"),
                ("--epochs 0", "epochs=0 must be above 0"),
                ("--steps 0", "steps=0 must be above 0"),
                ("--max-grad-norm -1", "max_grad_norm=-1 must be above 0"),
                ("--lr inf", "lr=inf must be above 0 and finite"),
                ("--epsilon -3", "epsilon=-3 must be above 0"),
                ("--epsilon None --noise-multiplier -1", "noise_multiplier=-1 must be finite"),
                ("--epsilon None --noise-multiplier 1e-9", "too small to be priced"),
            ]
        ),
        (["train", "--epsilon", "3", "--delta", "0.1"], "not below 1/4000"),
        (["train", "--epsilon", "3", "--model", "resnet18", "--norm", "keep"], "norm=group"),
        (["account", "--ledger", "a", "--size", "3"], "--size has no meaning"),
        (["train", "--epsilon", "3", "--data", "digit"], 'Did you mean "digits"'),
        (["train", "--epsilon", "3", "--canaries", "1"], "canaries=1 must be 0"),
        (["account", "--epslon", "1"], "--epsilon"),
        (["account", "--size", "many"], "--size"),
    ],
)
def test_mistakes_are_answered_with_what_to_do(capsys, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, *words)
    assert code == 2
    assert message in err
    assert "Traceback" not in out + err


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (URLError("no route to host"), "OSError: <urlopen error no route to host>\n"),
        (TimeoutError(), "OSError: TimeoutError\n"),
        (OSError(28, "No space left"), "OSError: No space left\n"),
        (OSError(2, "No such file", "a.png"), "OSError: No such file: a.png\n"),
        (
            OSError(28, "No space left", "out/.done.json.7.draft"),
            "OSError: out could not be written (No space left). Make room: a run goes on where it "
            "was when you repeat the command.\n",
        ),
        (
            PermissionError(13, "Permission denied", "out/.config.json.7.draft"),
            "OSError: out cannot be written to or read (Permission denied). Give another place, "
            "with --out say, or the right to use this one.\n",
        ),
    ],
)
def test_what_the_system_refused_is_said_as_far_as_it_is_known(
    capsys, monkeypatch, problem, message
):
    def fails(*_):
        raise problem

    monkeypatch.setattr("sfumato.cli._call", fails)
    assert call(capsys, "train") == (2, "", message)


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(
    ("verb", "remedy"),
    [
        ("invert", "--target RUN"),
        ("reconstruct", "--target RUN"),
        ("release", "--teacher RUN"),
        ("audit", "sfumato train a model"),
        ("demo", "sfumato train a model"),
    ],
)
def test_several_processes_are_refused_and_told_what_to_do(
    verb, remedy, rank, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    code, _, told = call(capsys, verb, "--preset", "digits-cpu")
    assert code == 2
    assert f"sfumato {verb} is for one process" in told
    assert remedy in told
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("train --epsilon inf", "--epsilon inf"),
        ("train --noise-multiplier 0", "--noise-multiplier 0"),
        ("release --public patches --epsilon inf", "--epsilon inf"),
        ("warmup --public-share 0.1 --epsilon inf", "--epsilon inf"),
        ("train --epsilon 3", ""),
        ("train --mode non-private", ""),
    ],
)
def test_a_private_run_without_noise_says_so_in_capitals_before_it_begins(
    words, flag, tmp_path, monkeypatch, capsys
):
    verb = words.split()[0]
    begun = []
    command = replace(load_command(verb), run=lambda config, run: begun.append(run) or {}, show=str)
    monkeypatch.setattr("sfumato.cli.load_command", lambda _: command)
    code, _, told = call(capsys, *words.split(), "--out", str(tmp_path / "run"))
    assert (code, len(begun)) == (0, 1)
    expected = f"NO PRIVACY: {flag} adds no noise" if flag else ""
    assert told.startswith(expected)
    assert ("NO PRIVACY" in told) == bool(flag)
    if flag:
        assert expected in (tmp_path / "run/log.txt").read_text()


def test_warnings_of_ours_are_a_sentence(capsys, monkeypatch):
    def warns(*_):
        warnings.simplefilter("default")
        warnings.warn("your images are dark.", SfumatoWarning, stacklevel=1)
        return 0

    monkeypatch.setattr("sfumato.cli._call", warns)
    assert call(capsys, "train") == (0, "", "Warning: your images are dark.\n")


def test_an_order_that_is_refused_leaves_no_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    orders = (["--data", "nope/"], ["--data", "nope/", "--out", "mine"], ["--model", "resnet1888"])
    for words in orders:
        with pytest.raises(SystemExit) as stopped:
            main(["train", "--epsilon", "3", *words])
        assert stopped.value.code == 2
    assert not any(tmp_path.glob("runs/*"))
    assert not (tmp_path / "mine").exists()


def test_what_was_there_before_a_refused_order_stays(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    with pytest.raises(SystemExit):
        main(["train", "--epsilon", "3", "--data", "nope/", "--out", str(tmp_path / "mine")])
    assert (tmp_path / "mine").exists()


def test_account_rounds_its_upper_bounds_up():
    from sfumato.commands.account import show

    told = {2.0: "2", 1.65401: "1.655", 0.000123401: "0.0001235", "inf": "inf", "nan": "no formula"}
    for epsilon, words in told.items():
        prices = dict.fromkeys(("epsilon", "rdp_epsilon", "shuffled_epsilon"), epsilon)
        lines = show({**prices, "delta": 1e-5, "relation": "replace"}).splitlines()[:3]
        assert [line[18:].partition("   (")[0] for line in lines] == [words] * 3


def test_account_finds_the_noise_for_an_epsilon(capsys):
    plan = ["--size", "50000", "--batch-size", "1000", "--epochs", "3", "--delta", "1e-5"]
    code, out, _ = call(capsys, "account", "--epsilon", "1", *plan, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["noise_multiplier"] == pytest.approx(1.269, rel=0.002)
    assert found["steps"] == 150
    assert found["rate"] == 0.02
    assert found["epsilon"] <= 1 < found["rdp_epsilon"] < found["shuffled_epsilon"]
    noise = str(found["noise_multiplier"])
    _, again, _ = call(capsys, "account", "--noise-multiplier", noise, *plan, "--json")
    assert json.loads(again)["epsilon"] == found["epsilon"]


def test_account_counts_the_steps_that_fit(capsys):
    words = ["--epsilon", "2", "--noise-multiplier", "1", "--size", "50000", "--batch-size", "1000"]
    _, out, _ = call(capsys, "account", *words, "--json")
    found = json.loads(out)
    assert found["epsilon"] <= 2
    assert found["steps"] > 100


def test_account_says_whom_a_ledger_is_about_and_where_one_lies(capsys, tmp_path):
    place = tmp_path / "run/private/stages/target"
    place.mkdir(parents=True)
    header = LedgerHeader(data="faces", delta=1e-5, unit="person")
    Ledger(header, lambda line: append_line(place / "ledger.jsonl", line, durable=False))
    code, _, err = call(capsys, "account", "--ledger", str(tmp_path / "run"))
    assert code == 2
    assert f"Its stages have: --ledger {place}." in err
    code, out, _ = call(capsys, "account", "--ledger", str(place))
    assert code == 0
    assert re.search("^unit +person$", out, re.MULTILINE)


def test_account_draws_and_speaks(capsys, tmp_path):
    plot = tmp_path / "epsilon.png"
    _, out, _ = call(capsys, "account", "--preset", "digits-cpu", "--plot", str(plot))
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "if shuffled" in out
    assert str(plot) in out


def test_account_keeps_a_run_when_asked(capsys, tmp_path):
    out = tmp_path / "run"
    call(capsys, "account", "--preset", "digits-cpu", "--out", str(out))
    assert {"config.json", "plan.json", "done.json", "epsilon.png"} <= {
        p.name for p in out.iterdir()
    }
    _, again, err = call(capsys, "account", "--preset", "digits-cpu", "--out", str(out))
    assert "finished already" in err
    assert "noise multiplier" in again
    code, _, err = call(
        capsys, "account", "--preset", "digits-cpu", "--epsilon", "4", "--out", str(out)
    )
    assert code == 2
    assert "config.epsilon: 3.0 -> 4.0" in err


def test_replace_one_has_no_renyi_price_and_says_so(capsys):
    words = ["--preset", "digits-cpu", "--relation", "replace"]
    _, out, _ = call(capsys, "account", *words)
    assert "no formula" in out
    _, out, _ = call(capsys, "account", *words, "--json")
    assert json.loads(out)["rdp_epsilon"] == "nan"


def test_a_preset_of_a_verb_with_words_is_read_without_a_warning(recwarn):
    order = parse("report", ["runs/one", "--preset", "digits-cpu"])
    assert order.config.runs == (Path("runs/one"),)
    assert not recwarn.list
