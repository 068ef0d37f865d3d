"""`sfumato VERB ...`: from words to recipes. The only file that knows the CLI library.

`sfumato --help` reads this table and nothing else, so it answers at once; a verb's command is
imported when the verb is called. Every verb takes `--preset`, `--out` and `--json`.
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field, fields, make_dataclass, replace
from difflib import get_close_matches
from errno import EDQUOT, ENOSPC, EROFS
from inspect import cleandoc
from io import StringIO, TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, Generic, NoReturn, TypeVar

from sfumato import __version__
from sfumato.commands import Command, command_settings, recipe_of, settings_of_run, ways_of
from sfumato.config import REMOVED, dumps, read_record, withdrawn_settings
from sfumato.errors import ConfigError, SfumatoError, SfumatoWarning
from sfumato.files import read_json
from sfumato.processes import leads, num_processes
from sfumato.runs import open_run
from sfumato.setting_groups import Settings, default_of, defaults, leaves, types_of
from sfumato.trusted_code import is_own_code, require_trust, trusting

VERBS = {
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
    """What was asked for: the command's own settings, and those that every verb has."""

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


def read_order(verb: str, words: Sequence[str]) -> Invocation[Any]:
    """What the words after a verb ask for; a `ConfigError` says what is wrong with them."""
    import tyro

    called, plain, known_presets, words = _way(verb, _without_removed(words))
    _refuse_others(verb, called, plain, words)
    presets = ", ".join(known_presets)
    kind, default = _as_typed(plain, tyro.conf), None
    shorthand = plain.first_words()
    if words and words[0] in shorthand:
        words = [*shorthand[words[0]], *words[1:]]
    elif words and (known := [*shorthand, *ways_of(verb)]) and not words[0].startswith("-"):
        near = get_close_matches(words[0], known, n=1)
        hint = f' Did you mean "{near[0]}"?' if near else f" There are: {', '.join(known)}."
        raise ConfigError(f'sfumato {verb} has no "{words[0]}".{hint}')
    name = _value(words, "--preset")
    if name is not None:
        if name not in known_presets:
            there = f" There are: {presets}." if presets else " Leave it out."
            raise ConfigError(f'sfumato {called} has no preset "{name}".{there}')
        preset = known_presets[name]()
        default = Invocation(config=kind(**vars(preset)), preset=name)
        words = [*_displacing(plain, words), *words]
    elif (known := _remembered(plain, verb, _value(words, "--out"))) is not None:
        default = Invocation(config=kind(**vars(known)))
        words = [*_passing(plain, words), *words]
    about = cleandoc(plain.__doc__ or "")
    told = StringIO()
    try:
        with redirect_stderr(told):
            order: Any = tyro.cli(
                Invocation[Annotated[tyro.conf.OmitArgPrefixes[kind], tyro.conf.arg(name="")]],
                args=words,
                default=default,
                prog=f"sfumato {called}",
                description=about + (f"\n\nPresets: {presets}." if presets else ""),
            )
    except SystemExit as end:
        if (problem := _of_ours(end)) is not None:
            raise problem from None  # the library's box would wrap the sentence
        sys.stderr.write(told.getvalue())
        raise
    return replace(order, config=plain(**vars(order.config)))


def _way(verb: str, words: list[str]) -> tuple[str, type[Settings], Presets, list[str]]:
    """How a verb is called with its way, the settings and presets of that, and the other words.

    The way is the first word. Without one it is that of a flag of the last version, of the preset,
    or of the run that goes on.
    """
    ways, (plain, presets) = ways_of(verb), command_settings(verb)
    flags = {word.partition("=")[0] for word in words if word.startswith("-")}
    found = [name for name, way in ways.items() if flags.intersection(way.former)]
    preset, out = _value(words, "--preset"), _value(words, "--out")
    kind = plain
    if words and words[0] in ways:
        kind = ways[words[0]].kind
        words = _with_word(kind, words[1:])
    elif found:
        kind, former = ways[found[0]].kind, ways[found[0]].former
        if not words[0].startswith("-") and words[0] not in former:
            raise ConfigError(
                f"{former[0]} is for sfumato {verb} {found[0]}, not for sfumato {verb} {words[0]}."
            )
        words = words[1:] if words[0] in former and not words[0].startswith("-") else words
        words = [word for word in words if word not in former or word[2:] in leaves(kind)]
    elif ways and preset is not None and preset in presets:
        kind = type(presets[preset]())
    elif ways and (stored := _record(verb, out)) is not None:
        kind = settings_of_run(verb, stored["config"])
    words = words if ways else _with_word(kind, words)
    called = next((f"{verb} {name}" for name, way in ways.items() if way.kind is kind), verb)
    fitting = {name: make for name, make in presets.items() if type(make()) is kind}
    return called, kind, fitting, words


def _with_word(kind: type[Settings], words: list[str]) -> list[str]:
    """The words; a first one without a flag gets that of `WORD`."""
    given = kind.WORD is not None and words and not words[0].startswith("-")
    return [f"--{kind.WORD}", *words] if given else words


def _of_ours(problem: BaseException | None) -> SfumatoError | None:
    """The error of ours that another one comes from."""
    while problem is not None and not isinstance(problem, SfumatoError):
        problem = problem.__context__
    return problem


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


def _call(verb: str, words: list[str]) -> int:
    if verb not in VERBS:
        near = get_close_matches(verb, VERBS, n=1)
        hint = f' Did you mean "{near[0]}"?' if near else f" There are: {', '.join(VERBS)}."
        raise SfumatoError(f'there is no verb "{verb}".{hint}')
    order, command = read_order(verb, words), recipe_of(verb)
    with trusting(order.trust_code):
        _require_own_words(command, order, words)
        summary = _execute(command, verb, order)
    if not leads():
        return 0
    print(dumps(summary, indent=2) if order.json else command.show(summary))
    alarm = command.alarm(summary)
    if alarm is not None:
        _say(alarm)
    return 0 if alarm is None else 3


def _require_own_words(command: Command, order: "Invocation[Any]", words: list[str]) -> None:
    """In a run that goes on, code that the command does not name comes from the folder."""
    if order.out is None or not (order.out / "config.json").exists():
        return
    if (order.out / "done.json").exists() and not command.asks_more(order.config):
        return
    typed = {part for word in words for part in (word, word.partition("=")[2])}
    for name in CODE:
        value = getattr(order.config, name, None)
        for code in value if isinstance(value, tuple) else (value,):
            if isinstance(code, str) and is_own_code(code) and code not in typed:
                require_trust(code, order.out / "config.json")


def _execute(command: Command, verb: str, order: "Invocation[Any]") -> dict[str, Any]:
    if command.write_file is not None and command.writes_file(order.config):
        return command.write_file(order.config, order.out, _say if leads() else lambda _: None)
    if not (command.needs_run(order.config) or order.out) or not leads():
        return command.run(order.config, None)
    label = command.label(order.config)
    with open_run(order.config, verb=verb, label=label, out=order.out, say=_say) as run:
        more = command.asks_more(order.config)
        if run.finished and not more and num_processes() == 1:
            _say(f"{run.path} is finished already; this is what it found.")
            if command.again is not None:
                _say(f"(sfumato {verb} {command.again} --out {run.path} looks again.)")
            return {**run.summary, "run": str(run.path)}
        flag = order.config.without_noise
        if flag:
            run.log(
                f"NO PRIVACY: {flag} adds no noise, so what this run makes may give its images "
                "away. Give an epsilon, 3 say, or --mode non-private if that is what you want."
            )
        try:
            return command.run(order.config, run)
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


def _remembered(kind: type[Settings], verb: str, out: str | None) -> Any:
    """The settings that the run in this directory was made with, or None: it remembers them."""
    found = _record(verb, out)
    if found is None:
        return None
    return read_record(kind, found, finished=(Path(out or "") / "done.json").exists())


def _record(verb: str, out: str | None) -> dict[str, Any] | None:
    """The config.json of a run of this verb in this directory, or None."""
    record = Path(out or "") / "config.json"
    if not out or not record.is_file():
        return None
    found = read_json(record)
    return found if found.get("verb") == verb else None


def _passing(kind: type[Settings], words: list[str]) -> list[str]:
    """Flags for settings that a run does not remember, apart from those that are given.

    Only with all flags can a config be judged: without an epsilon a run may have one stage and not
    all of them.
    """
    usual = defaults(kind)
    flags = {f"--{n.replace('_', '-')}": str(usual[n]) for n in kind.NOT_REMEMBERED}
    missing = [pair for pair in flags.items() if _value(words, pair[0]) is None]
    return [word for pair in missing for word in pair]


def _without_removed(words: Sequence[str]) -> list[str]:
    """The words without flags that were removed: they are ignored for one version, with a word."""
    kept, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        flag, given, _ = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_").removeprefix("no_")
        if not flag.startswith("--") or name not in REMOVED:
            kept.append(word)
            continue
        if not given and rest and rest[0].lstrip("-").isdigit():
            rest.pop(0)
        warnings.warn(
            f"{flag} was removed and has no effect: {REMOVED[name]}.", SfumatoWarning, stacklevel=2
        )
    return kept


def _refuse_others(verb: str, called: str, kind: type[Settings], words: list[str]) -> None:
    """Refuse flags that were removed, in words on what to do instead, or that others have."""
    for word in words:
        flag = word.partition("=")[0]
        name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
        if not flag.startswith("--") or name in leaves(kind):
            continue
        homes = _homes(name, [verb])
        if not homes and name in withdrawn_settings(kind):
            raise ConfigError(f"{flag} was removed: {withdrawn_settings(kind)[name].instead}.")
        if homes := homes or _homes(name, VERBS):
            raise ConfigError(
                f"{flag} is for sfumato {' or '.join(homes)}, not for sfumato {called}."
            )


def _homes(name: str, verbs: Iterable[str]) -> list[str]:
    """The commands, with their ways, that have a setting."""
    called = {command_settings(verb)[0]: verb for verb in verbs}
    called |= {way.kind: f"{verb} {word}" for verb in verbs for word, way in ways_of(verb).items()}
    return [home for kind, home in called.items() if name in leaves(kind)]


def _show_warning(usual: Callable[..., object]) -> Callable[..., object]:
    """How warnings are shown: ours as a sentence, others as they usually are."""

    def show(message: Warning | str, category: type[Warning], *where: Any) -> object:
        if issubclass(category, SfumatoWarning):
            return _say(f"Warning: {message}")
        return usual(message, category, *where)

    return show


def _displacing(kind: type[Settings], words: list[str]) -> list[str]:
    """Flags that take away what a preset says otherwise than the words do: steps beside epochs."""
    given = {word.partition("=")[0].replace("_", "-") for word in words}
    added = []
    for pair in kind.ONE_OF:
        flags = [f"--{name.replace('_', '-')}" for name in pair]
        if len(given.intersection(flags)) == 1:
            added += [word for flag in flags if flag not in given for word in (flag, "None")]
    return added


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _help() -> str:
    verbs = "\n".join(f"  {verb:<12} {text}" for verb, text in VERBS.items())
    return (
        "usage: sfumato COMMAND [OPTIONS]\n\n"
        "Train vision models on images you must not leak, share what carries the task,\n"
        "and measure what a model gives away.\n\n"
        f"commands:\n{verbs}\n\n"
        "All take --preset NAME, --out DIR (the run directory; the same command resumes it) and\n"
        "--json (the summary on standard output). sfumato COMMAND --help lists its settings."
    )
