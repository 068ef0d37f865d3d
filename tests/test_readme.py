"""What the README and docs/ show works as it is shown.

Commands in fenced blocks are understood, with flags that are there; links lead somewhere; code
runs; every verb has a page.
"""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from sfumato import cli
from sfumato.commands import command_settings, subcommands_of
from sfumato.commands.train import command as train
from sfumato.data.load import load_images
from sfumato.errors import PrivacyError, UnsupportedLayer
from sfumato.runs import open_run
from sfumato.setting_groups import leaves

ROOT = Path(__file__).parents[1]
PAGES = {
    str(page.relative_to(ROOT)): page for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
}


def blocks(page, language=""):
    """The fenced blocks of one language; of none: those that show commands and what they print."""
    found = re.findall(r"^```([a-z]*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def commands():
    """Each command of each page, from the word after sfumato on."""
    for name, page in PAGES.items():
        lines = [line.removeprefix("$ ") for b in blocks(page) for line in b.splitlines()]
        for line in lines:
            if line.startswith(("sfumato ", "torchrun ")):
                words = shlex.split(line, comments=True)
                words = words[words.index("sfumato") + 1 :]
                yield pytest.param(words, id=f"{name}: {' '.join(words)}")


def flags_of(verb):
    """The flags of a verb."""
    kinds = [command_settings(verb)[0], *(way.kind for way in subcommands_of(verb).values())]
    names = [*(name for kind in kinds for name in leaves(kind)), "preset", "out", "json"]
    return {f"--{prefix}{name.replace('_', '-')}" for name in names for prefix in ("", "no-")}


@pytest.mark.parametrize("words", commands())
def test_every_command_is_understood(words):
    verb, *rest = words
    assert verb in cli.COMMANDS
    order = cli.parse(verb, rest)
    assert order.config is not None


def test_pages_show_many_commands():
    assert len(list(commands())) > 40


def test_pages_are_short_enough_to_read():
    pages = [p for p in (ROOT / "docs").rglob("*.md") if p.parent.name != "dev"]
    assert sum(len(p.read_text(encoding="utf-8").split()) for p in pages) < 14_000
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
    for page in [*pages, ROOT / "README.md"]:
        prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        assert not [n for n in prose.splitlines() if len(n) > 120 and n[0] != "|"], page


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[page].read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        there = PAGES[page].parent / path if path else PAGES[page]
        assert there.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
            assert anchor in map(anchor_of, headings), target


def anchor_of(heading):
    """How code hosts turn a heading into an anchor."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("verb", cli.COMMANDS)
def test_every_verb_has_a_page_with_all_its_parts(verb):
    text = (ROOT / f"docs/{verb}.md").read_text()
    for part in ("hat is guaranteed", "## Flags", "## What it costs", "imits"):
        assert part in text, part
    for index in ("README.md", "docs/README.md"):
        assert f"{verb}.md)" in (ROOT / index).read_text(), index


@pytest.mark.parametrize("verb", cli.COMMANDS)
def test_the_flags_that_a_page_explains_are_there(verb):
    table = (ROOT / f"docs/{verb}.md").read_text().split("## Flags")[1].split("\n## ")[0]
    explained = {
        flag
        for row in re.findall(r"^\| (.*?) \|", table, re.MULTILINE)
        for flag in re.findall(r"--[a-z][\w-]*", row)
    }
    assert explained
    assert not explained - flags_of(verb)


@pytest.mark.parametrize(
    ("verb", "way"),
    [(verb, way) for verb in cli.COMMANDS for way in (None, *subcommands_of(verb))],
)
def test_every_setting_is_in_the_help(verb, way, capsys):
    kind, words = (
        (command_settings(verb)[0], []) if way is None else (subcommands_of(verb)[way].kind, [way])
    )
    with pytest.raises(SystemExit):
        cli.parse(verb, [*words, "--help"])
    text = capsys.readouterr().out
    for name in leaves(kind):
        flag = f"--{name.replace('_', '-')}"
        assert name == kind.WORDS or re.search(rf"{flag}(?![\w-])", text), flag


@pytest.mark.parametrize("shown", [b for b in blocks(PAGES["docs/account.md"]) if b[0] == "$"])
def test_account_prints_what_its_page_says(shown, capsys):
    command, _, answer = shown.partition("\n")
    with pytest.raises(SystemExit):
        cli.main(command.split()[2:])
    assert capsys.readouterr().out.strip() == answer.strip()


@pytest.mark.parametrize(
    ("page", "number", "epsilon"),
    [
        ("README.md", 1, 2),
        ("docs/library.md", 0, 3),
        ("docs/library.md", 1, 3),
        ("docs/library.md", 2, 2),
    ],
)
def test_the_examples_in_python_run_and_keep_their_budget(page, number, epsilon, capsys):
    exec(blocks(PAGES[page], "python")[number], {})
    assert epsilon - 0.01 < float(capsys.readouterr().out) <= epsilon


def test_the_loop_over_an_ordinary_loader_runs_and_says_what_it_costs(capsys):
    with pytest.warns(UserWarning, match="not Poisson samples"):
        exec(blocks(PAGES["docs/library.md"], "python")[3], {})
    assert 1.69 < float(capsys.readouterr().out) < 1.7


def test_the_loop_of_plain_functions_learns(capsys):
    context = {}
    exec(blocks(PAGES["docs/library.md"], "python")[0], context)
    test = load_images("digits", "test")
    found = context["model"](test.pixels.float() / 255).argmax(dim=1)
    assert (found == test.labels).float().mean() > 0.7


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory):
    """A folder with runs/digits in it, a short run of what the pages show."""
    folder = tmp_path_factory.mktemp("shown")
    config = replace(train.PRESETS["digits-cpu"](), epochs=None, steps=4, device="cpu")
    with open_run(config, verb="train", out=folder / "runs/digits") as run:
        train.run(config, run)
    return folder


@pytest.mark.parametrize(("page", "number"), [("docs/train.md", 0), ("docs/library.md", 4)])
def test_a_trained_model_is_used_as_the_pages_show(page, number, digits_run, monkeypatch, capsys):
    monkeypatch.chdir(digits_run)
    code = blocks(PAGES[page], "python")[number]
    exec(code, {})
    printed = capsys.readouterr().out.splitlines()
    after = PAGES[page].read_text().partition(code)[2]
    shown = after.split("```")[2].strip().splitlines()
    without_numbers = [
        [re.sub(r"[\d.e-]+", "", line) for line in lines] for lines in (printed, shown)
    ]
    assert without_numbers[0] == without_numbers[1]


@pytest.fixture
def rules():
    """The table of rules, put back as it was."""
    from sfumato.clipping.rules.registry import RULES

    before = dict(RULES)
    yield RULES
    RULES.clear()
    RULES.update(before)


RULE_PAGE = PAGES["docs/extend/layer-rule.md"]


def test_the_rule_that_the_page_writes_is_exact_and_explained_as_shown(rules, capsys):
    exec("\n".join(blocks(RULE_PAGE, "python")), {})
    printed = capsys.readouterr().out.splitlines()
    tables = [b for b in blocks(RULE_PAGE) if b.startswith("parameter")]
    shown = [line.split() for table in tables for line in table.splitlines()[1:]]
    found = [line.split() for line in printed if line[:1].isdigit() and "keep" in line]
    found += [line.split() for line in printed if "ghost" in line]
    short = [[*words[:3], *words[-2:]] for words in found]
    assert len(shown) == 8
    assert sorted(shown) == sorted(short)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("tape.derive(Tensor.t, mat2)", "mat2"),
        ("linear(tape, mat1, weight, input)", "linear(tape, mat1, weight, input.detach())"),
    ],
    ids=["without the transpose", "without the bias"],
)
def test_a_wrong_rule_does_not_get_past_the_page_s_proof(right, wrong, rules):
    code = "\n".join(blocks(RULE_PAGE, "python"))
    assert right in code
    code = code.replace(
        "RowsByWeight(256, 512), nn.GELU(), RowsByWeight(512, 10)", "RowsByWeight(256, 256)"
    )
    with pytest.raises(UnsupportedLayer, match=r"not those of autograd"):
        exec(code.replace(right, wrong), {})


STYLE_PAGE = PAGES["docs/extend/clip-style.md"]


@pytest.fixture
def styles():
    """The table of clip styles, put back as it was."""
    from sfumato.clipping.factors import CLIP_STYLES

    before = dict(CLIP_STYLES)
    yield
    CLIP_STYLES.clear()
    CLIP_STYLES.update(before)


def test_the_clip_style_that_the_page_writes_is_admitted_and_used_by_the_engine(styles, capsys):
    context = {}
    exec("\n".join(blocks(STYLE_PAGE, "python")), context)
    assert "tensor" in capsys.readouterr().out
    options = {"batch_size": 4, "sample_size": 8, "steps": 1, "max_grad_norm": 1.0}
    engine = context["sfumato"].PrivacyEngine(
        context["model"], noise_multiplier=1, clip_function="adaptive", **options
    )
    assert engine.clipper.clipping.style == "adaptive"


@pytest.mark.parametrize(
    ("wrong", "error"), [("norms.mean()", PrivacyError), ("2 * norms", AssertionError)]
)
def test_a_wrong_clip_style_does_not_get_past_the_page_s_proof(wrong, error, styles):
    code = "\n".join(blocks(STYLE_PAGE, "python"))
    assert "bound / (norms +" in code
    with pytest.raises(error):
        exec(code.replace("bound / (norms +", f"bound / ({wrong} +"), {})


SOURCE_PAGE = PAGES["docs/extend/data-source.md"]


@pytest.fixture
def named_sets(monkeypatch, tmp_path):
    """An empty folder to work in; the table of named sets is put back as it was."""
    from sfumato.data.load import EMBEDDED

    monkeypatch.chdir(tmp_path)
    before = dict(EMBEDDED)
    yield EMBEDDED
    EMBEDDED.clear()
    EMBEDDED.update(before)


def test_the_data_source_that_the_page_writes_loads_as_shown_and_trains(named_sets, capsys):
    exec("\n".join(blocks(SOURCE_PAGE, "python")), {})
    assert capsys.readouterr().out.strip() == blocks(SOURCE_PAGE)[0].strip()
    (command,) = [b for b in blocks(SOURCE_PAGE) if b.startswith("sfumato")]
    with pytest.raises(SystemExit) as stopped:
        cli.main([*command.split()[1:], "--steps", "2", "--device", "cpu"])
    assert stopped.value.code == 0


def test_a_data_source_with_an_image_in_both_splits_does_not_get_past_the_page_s_test(named_sets):
    code = "\n".join(blocks(SOURCE_PAGE, "python"))
    assert code.count('np.load(f"scans/{split}') == 2
    with pytest.raises(AssertionError):
        exec(code.replace('np.load(f"scans/{split}', 'np.load(f"scans/train'), {})


COMMAND_PAGE = PAGES["docs/extend/command.md"]


@pytest.fixture
def command_room(monkeypatch, tmp_path):
    """Folders for modules of sfumato.settings and sfumato.commands that are not in the package."""
    import sys

    from sfumato import commands, settings

    for package in (settings, commands):
        place = tmp_path / package.__name__.partition(".")[2]
        place.mkdir()
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(place)])
    monkeypatch.setattr(cli, "COMMANDS", dict(cli.COMMANDS))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for package in (settings, commands):
        sys.modules.pop(f"{package.__name__}.copies", None)
        vars(package).pop("copies", None)


def test_the_command_that_the_page_writes_runs_resumes_and_reports_as_shown(command_room, capsys):
    asked, does, named, tested = blocks(COMMAND_PAGE, "python")
    (command_room / "settings/copies.py").write_text(asked)
    (command_room / "commands/copies.py").write_text(does)
    exec(named, {})
    (shown,) = blocks(COMMAND_PAGE, "text")
    words, _, printed = shown.removeprefix("$ sfumato ").partition("\n")

    def call(*words):
        with pytest.raises(SystemExit) as stopped:
            cli.main(words)
        assert stopped.value.code == 0
        return capsys.readouterr()

    first = call("copies", "digest", *words.split()[1:])
    assert first.err.strip() == "stage digest"
    second = call(*words.split())
    assert (second.err.strip(), second.out) == ("stage compare", printed)
    assert "finished already" in call(*words.split()).err
    call("report", "runs/copies", "--include-private")
    assert (
        "no test image of digits was trained on"
        in Path("runs/copies/private/report.md").read_text()
    )
    assert "digits-cpu" in call("copies", "--help").out
    written = {}
    exec(tested, written)
    test = written["test_copies_are_found_after_a_cut"]
    for first, found in test.pytestmark[0].args[1]:
        (place := command_room / str(first)).mkdir()
        test(first, found, place, capsys)
