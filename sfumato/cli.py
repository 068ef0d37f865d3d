"""`sfumato COMMAND ...`: from words to settings to a command. Only this file knows the CLI library.

`sfumato --help` reads this table and nothing else, so it answers at once; a command is imported
when it is called. Every command takes `--preset`, `--out` and `--json`.
"""

import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field, fields, make_dataclass, replace
from difflib import get_close_matches
from errno import EDQUOT, ENOSPC, EROFS
from inspect import cleandoc
from io import StringIO, TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, Generic, NoReturn, TypeVar

from sfumato import __version__
from sfumato.commands import (
    Command,
    command_settings,
    load_command,
    names_of,
    settings_of_run,
    subcommands_of,
)
from sfumato.config import dumps, read_record, withdrawn_settings
from sfumato.errors import ConfigError, SfumatoError, SfumatoWarning
from sfumato.files import read_json
from sfumato.processes import leads, num_processes
from sfumato.runs import open_run
from sfumato.setting_groups import Settings, default_of, defaults, leaves, types_of
from sfumato.trusted_code import is_own_code, require_trust, trusting

COMMANDS = {
    "demo": "the whole story on embedded digits: protect, attack, audit, share; one page",
    "train": "private (or plain) training and fine-tuning of any vision model",
    "warmup": "a little public data, a diffusion model of it, a warm start, and then DP training",
    "release": "public images that carry a private task, with their ledger and a data card",
    "invert": "what a model thinks a class looks like, from its answers alone",
    "reconstruct": "training images back from a model's weights, and how sure one can be",
    "audit": "does a model keep its guarantee? What attacks reach and prove, beside the ledger",
    "account": "budget arithmetic: epsilon of a plan, noise for an epsilon",
    "report": "one page on a run, or on several side by side",
}
"""Command -> what it does. Settings are in sfumato.settings, code in sfumato.commands."""

CODE = ("model", "denoiser", "student", "base", "trainer", "target", "judges", "extractor")
"""Settings that may name code of the user's own, as module:function."""

Config = TypeVar("Config")
Presets = Mapping[str, Callable[[], Any]]


@dataclass(frozen=True, kw_only=True)
class Invocation(Generic[Config]):
    """What was asked for: the command's own settings, and those that every command has."""

    config: Config
    preset: str | None = None
    """Name of the preset to start from; further flags change its settings."""
    out: Path | None = None
    """Run directory, or the file of a command that writes one; a run that is there is resumed."""
    json: bool = False
    """Print the summary as JSON on standard output."""
    trust_code: bool = False
    """Import and run code that a given run names as module:function: only for runs you trust."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    0 done, 2 an error to fix, 3 an audit found the guarantee broken or a run is damaged,
    130 interrupted.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # for terminals that lack a letter
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        raise SystemExit(0)
    if words[0] in ("-V", "--version"):
        print(f"sfumato {__version__}")
        raise SystemExit(0)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning(warnings.showwarning)
            raise SystemExit(_call(words[0], words[1:]))
    except SfumatoError as problem:
        print(f"{type(problem).__name__}: {problem}", file=sys.stderr)
        raise SystemExit(problem.code) from None
    except BrokenPipeError:
        raise SystemExit(0) from None
    except OSError as problem:
        print(f"OSError: {_reason(problem)}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print(
            "\nInterrupted. A run goes on where it was when you repeat the command.",
            file=sys.stderr,
        )
        raise SystemExit(130) from None


def parse(name: str, words: Sequence[str]) -> Invocation[Any]:
    """What the words after a command ask for; a `ConfigError` says what is wrong with them."""
    import tyro

    kind, words = _choose_settings(name, list(words))
    called = names_of([name])[kind]
    words = _check_flags(name, kind, words)
    shorthand = kind.first_words()
    if words and words[0] in shorthand:
        words = [*shorthand[words[0]], *words[1:]]
    elif words and (known := [*shorthand, *subcommands_of(name)]) and not words[0].startswith("-"):
        raise ConfigError(f'sfumato {name} has no "{words[0]}".{_hint(words[0], known)}')
    presets = _presets_of(name, kind)
    listed, typed, default = ", ".join(presets), _as_typed(kind, tyro.conf), None
    preset, out = _value(words, "--preset"), _value(words, "--out")
    if preset is not None:
        if preset not in presets:
            there = f" There are: {listed}." if listed else " Leave it out."
            raise ConfigError(f'sfumato {called} has no preset "{preset}".{there}')
        default = Invocation(config=typed(**vars(presets[preset]())), preset=preset)
        words = [*_flags_that_clear_a_preset(kind, words), *words]
    elif (record := _record(name, out)) is not None:
        finished = (Path(out or "") / "done.json").exists()
        config = read_record(kind, record, finished=finished)
        default = Invocation(config=typed(**vars(config)))
        words = [*_flags_not_remembered(kind, words), *words]
    about = cleandoc(kind.__doc__ or "")
    printed = StringIO()
    try:
        with redirect_stderr(printed):
            asked: Any = tyro.cli(
                Invocation[Annotated[tyro.conf.OmitArgPrefixes[typed], tyro.conf.arg(name="")]],
                args=words,
                default=default,
                prog=f"sfumato {called}",
                description=about + (f"\n\nPresets: {listed}." if listed else ""),
            )
    except SystemExit as end:
        problem = end.__context__
        while problem is not None and not isinstance(problem, SfumatoError):
            problem = problem.__context__
        if problem is not None:
            raise problem from None  # the library's box would wrap the sentence
        sys.stderr.write(printed.getvalue())
        raise
    return replace(asked, config=kind(**vars(asked.config)))


def _choose_settings(name: str, words: list[str]) -> tuple[type[Settings], list[str]]:
    """The class of settings that words after a command are read as, and the words without its name.

    The first word names a subcommand, or else a flag of the last version does, the preset, or the
    run that goes on.
    """
    usual, presets = command_settings(name)
    subcommands = subcommands_of(name)
    if not subcommands:
        return usual, _name_first_word(usual, words)
    if words and words[0] in subcommands:
        kind = subcommands[words[0]].kind
        return kind, _name_first_word(kind, words[1:])
    flags = {word.partition("=")[0] for word in words if word.startswith("-")}
    for called, subcommand in subcommands.items():
        former, kind = subcommand.former, subcommand.kind
        if not flags.intersection(former):
            continue
        if not words[0].startswith("-") and words[0] not in former:
            raise ConfigError(
                f"{former[0]} is for sfumato {name} {called}, not for sfumato {name} {words[0]}."
            )
        return kind, [word for word in words if word not in former or word[2:] in leaves(kind)]
    preset = _value(words, "--preset")
    if preset is not None and preset in presets:
        return type(presets[preset]()), words
    if (record := _record(name, _value(words, "--out"))) is not None:
        return settings_of_run(name, record["config"]), words
    return usual, words


def _presets_of(name: str, kind: type[Settings]) -> Presets:
    """The presets of a command, or of one of its subcommands."""
    _, presets = command_settings(name)
    return {preset: make for preset, make in presets.items() if type(make()) is kind}


def _name_first_word(kind: type[Settings], words: list[str]) -> list[str]:
    """The words; a first one without a flag gets that of `WORD`."""
    given = kind.WORD is not None and words and not words[0].startswith("-")
    return [f"--{kind.WORD}", *words] if given else words


def _hint(word: str, known: Collection[str]) -> str:
    """What was meant by a word that is not known, or all that could be."""
    near = get_close_matches(word, known, n=1)
    return f' Did you mean "{near[0]}"?' if near else f" There are: {', '.join(known)}."


def _reason(problem: OSError) -> str:
    """What failed, and on which file where there is one; those of the network have no number."""
    if problem.strerror is None:
        return str(problem) or type(problem).__name__
    if problem.filename is None:
        return problem.strerror
    place = Path(problem.filename)
    place = place.parent if place.suffix == ".draft" else place
    if problem.errno in (ENOSPC, EDQUOT):
        return (
            f"{place} could not be written ({problem.strerror}). Make room: a run goes on where it "
            "was when you repeat the command."
        )
    if isinstance(problem, PermissionError) or problem.errno == EROFS:
        return (
            f"{place} cannot be written to or read ({problem.strerror}). Give another place, with "
            "--out say, or the right to use this one."
        )
    return f"{problem.strerror}: {place}"


def _call(name: str, words: list[str]) -> int:
    if name not in COMMANDS:
        raise SfumatoError(f'there is no command "{name}".{_hint(name, COMMANDS)}')
    asked, command = parse(name, words), load_command(name)
    with trusting(asked.trust_code):
        _require_trust_of_stored_code(command, asked, words)
        summary = _execute(command, name, asked)
    if not leads():
        return 0
    print(dumps(summary, indent=2) if asked.json else command.show(summary))
    alarm = command.alarm(summary)
    if alarm is not None:
        _say(alarm)
    return 0 if alarm is None else 3


def _require_trust_of_stored_code(
    command: Command, asked: Invocation[Any], words: list[str]
) -> None:
    """In a run that goes on, code that the user has not named comes from the folder."""
    if asked.out is None or not (asked.out / "config.json").exists():
        return
    if (asked.out / "done.json").exists() and not command.asks_more(asked.config):
        return
    typed = {part for word in words for part in (word, word.partition("=")[2])}
    for name in CODE:
        value = getattr(asked.config, name, None)
        for code in value if isinstance(value, tuple) else (value,):
            if isinstance(code, str) and is_own_code(code) and code not in typed:
                require_trust(code, asked.out / "config.json")


def _execute(command: Command, name: str, asked: Invocation[Any]) -> dict[str, Any]:
    if command.write_file is not None and command.writes_file(asked.config):
        return command.write_file(asked.config, asked.out, _say if leads() else lambda _: None)
    if not (command.needs_run(asked.config) or asked.out) or not leads():
        return command.run(asked.config, None)
    label = command.label(asked.config)
    with open_run(asked.config, verb=name, label=label, out=asked.out, say=_say) as run:
        more = command.asks_more(asked.config)
        if run.finished and not more and num_processes() == 1:
            _say(f"{run.path} is finished already; this is what it found.")
            if command.again is not None:
                _say(f"(sfumato {name} {command.again} --out {run.path} looks again.)")
            return {**run.summary, "run": str(run.path)}
        flag = asked.config.without_noise
        if flag:
            run.log(
                f"NO PRIVACY: {flag} adds no noise, so what this run makes may give its images "
                "away. Give an epsilon, 3 say, or --mode non-private if that is what you want."
            )
        try:
            return command.run(asked.config, run)
        except SfumatoError:
            run.forget()
            raise


def _as_typed(kind: type[Settings], conf: Any) -> Any:
    """The same settings for tyro. The one that is named by `WORDS` is given without a flag, and
    groups within settings within these are titled as if they were in these."""
    hints = {
        name: Annotated[hint, conf.arg(name="")]
        for name, hint in types_of(kind).items()
        if isinstance(hint, type) and issubclass(hint, Settings)
    }
    if kind.WORDS is not None:
        hints[kind.WORDS] = conf.Positional[leaves(kind)[kind.WORDS]]
    all_fields = fields(kind)  # pyright: ignore[reportArgumentType]
    usual = {entry.name: default_of(entry) for entry in all_fields if entry.name in hints}
    typed = [(name, hint, field(default=usual[name])) for name, hint in hints.items()]
    return make_dataclass("Config", typed, bases=(kind,), frozen=True, init=False)


def _value(words: list[str], flag: str) -> str | None:
    """A flag's value that is needed before the flags can be read, since it sets their defaults."""
    for place, word in enumerate(words):
        if word == flag:
            return "".join(words[place + 1 : place + 2])
        if word.startswith(f"{flag}="):
            return word.removeprefix(f"{flag}=")
    return None


def _record(name: str, out: str | None) -> dict[str, Any] | None:
    """The config.json of a run of this command in this directory, or None."""
    record = Path(out or "") / "config.json"
    if not out or not record.is_file():
        return None
    found = read_json(record)
    return found if found.get("verb") == name else None


def _flags_not_remembered(kind: type[Settings], words: list[str]) -> list[str]:
    """Flags for settings that a run does not remember, apart from those that are given.

    Only with all flags can a config be judged: without an epsilon a run may have one stage and not
    all of them.
    """
    usual = defaults(kind)
    flags = {f"--{n.replace('_', '-')}": str(usual[n]) for n in kind.NOT_REMEMBERED}
    missing = [pair for pair in flags.items() if _value(words, pair[0]) is None]
    return [word for pair in missing for word in pair]


def _flags_that_clear_a_preset(kind: type[Settings], words: list[str]) -> list[str]:
    """Flags that take away what a preset says otherwise than the words do: steps beside epochs."""
    given = {word.partition("=")[0].replace("_", "-") for word in words}
    added = []
    for pair in kind.ONE_OF:
        flags = [f"--{name.replace('_', '-')}" for name in pair]
        if len(given.intersection(flags)) == 1:
            added += [word for flag in flags if flag not in given for word in (flag, "None")]
    return added


def _check_flags(name: str, kind: type[Settings], words: list[str]) -> list[str]:
    """The words, without flags that have no effect any more: these are warned of.

    Flags that were removed otherwise are refused with what to do instead, and those of other
    commands with the name of such a command.
    """
    kept, rest, withdrawn = [], list(words), withdrawn_settings(kind)
    while rest:
        word = rest.pop(0)
        flag, has_value, _ = word.partition("=")
        setting = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
        if not flag.startswith("--") or setting in leaves(kind):
            kept.append(word)
            continue
        homes, gone = _names_with(setting, [name]), withdrawn.get(setting)
        if gone is not None and gone.ignored:
            warnings.warn(
                f"{flag} was removed and has no effect: {gone.instead}.",
                SfumatoWarning,
                stacklevel=2,
            )
            if not has_value and rest and rest[0].lstrip("-").isdigit():
                rest.pop(0)
            continue
        if gone is not None and not homes:
            raise ConfigError(f"{flag} was removed: {gone.instead}.")
        if homes := homes or _names_with(setting, COMMANDS):
            raise ConfigError(
                f"{flag} is for sfumato {' or '.join(homes)}, not for "
                f"sfumato {names_of([name])[kind]}."
            )
        kept.append(word)
    return kept


def _names_with(setting: str, commands: Collection[str]) -> list[str]:
    """The commands and subcommands that have a setting."""
    return [called for kind, called in names_of(commands).items() if setting in leaves(kind)]


def _show_warning(usual: Callable[..., object]) -> Callable[..., object]:
    """How warnings are shown: ours as a sentence, others as they usually are."""

    def show(message: Warning | str, category: type[Warning], *where: Any) -> object:
        if issubclass(category, SfumatoWarning):
            return _say(f"Warning: {message}")
        return usual(message, category, *where)

    return show


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _help() -> str:
    commands = "\n".join(f"  {name:<12} {text}" for name, text in COMMANDS.items())
    return (
        "usage: sfumato COMMAND [OPTIONS]\n\n"
        "Train vision models on images you must not leak, share what carries the task,\n"
        "and measure what a model gives away.\n\n"
        f"commands:\n{commands}\n\n"
        "All take --preset NAME, --out DIR (the run directory; the same command resumes it) and\n"
        "--json (the summary on standard output). sfumato COMMAND --help lists its settings."
    )
