"""A command line: to the options of a command and back, from an experiment and back, and the help."""

from __future__ import annotations

import argparse
import inspect
import math
import shlex
import sys
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, replace
from functools import cache, partial
from shutil import get_terminal_size
from typing import Any, NoReturn, TypeVar

from pdvsim.common.options import (
    Option,
    build,
    by_name,
    converted,
    groups_of,
    kinds_of,
    nearest,
    options,
    other_spellings,
)
from pdvsim.sim.config import DEFAULTS, GROUPS, Experiment
from pdvsim.sim.limits import Of, flag_of
from pdvsim.sim.policies import file_of
from pdvsim.sim.reading import error_text, read_toml

T = TypeVar("T")
LONG_VALUES = 80  # letters
MOST_USED = (
    "arch", "pair", "pairs", "drafter", "gpu", "gpus", "tensor_parallel_size", "replicas", "request_rate",
    "concurrency", "max_concurrency", "num_prompts", "goodput", "dataset_path", "input_len", "output_len",
    "num_speculative_tokens", "acceptance_rate", "acceptance_model", "acceptance_from", "num_runs", "preset",
    "output", "json",
)  # fmt: skip
WRITING = frozenset({"output", "overwrite", "html", "csv", "trace_out", "result_dir", "write", "iteration_log"})
WIDEST = 100
HELP_COLUMN = 30
EARLIER_PAIR = "tinyllama-1.1b:llama-2-7b"  # of recorded command lines without a pair: it was the default
GONE = ("--acceptance-trace-k", "--percentile-metrics")  # removed flags that recorded runs still have


def parse(command: type[T], argv: Sequence[str], prog: str = "pdvsim") -> T:
    """The command of `argv`; a ValueError of one line if it is invalid. --help exits."""
    if {"-h", "--help", "--help-all"} & set(argv):
        sys.stdout.write(_help(command, prog, "--help-all" in argv))
        raise SystemExit(0)
    given = read(command, argv)
    if path := given.get("config"):
        given = _of_file(path, command, given) | given
    return build(command, given)


def read(command: type, argv: Sequence[str]) -> dict[str, Any]:
    """The texts of a command line, by option name."""
    known = {option.flag: option for option in options(command).values()}
    words: list[str] = []
    for word in argv:
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-") if word.startswith("--") else flag
        split = flag in known and known[flag].is_list and not value.startswith("-")
        words += [flag, value] if equals and split else [flag + equals + value]
    given, unknown = _parser(command).parse_known_intermixed_args(words)
    for word in unknown:
        if not word.startswith("-") or word == "-":
            raise ValueError(f"unexpected argument {word!r}; options start with --")
        flag = word.partition("=")[0]
        raise ValueError(f"unknown option {flag}{nearest(flag, known)}")
    return by_name(vars(given), options(command), "unknown option")


def _of_file(path: str, command: type, given: Collection[str]) -> dict[str, Any]:
    """Options of a file that the command line lacks; it cannot name a policy file, another file, or what to write."""
    try:
        settings = read_toml(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error_text(error)}") from None
    known = options(command)
    if "arch" in settings and "arch" in known and "arch" not in given:
        for arch in converted(replace(known["arch"], hint=tuple[str, ...]), settings["arch"]):
            if file_of(arch) is not None:
                raise ValueError(f"{path}: arch {arch} is a policy file: name it on the command line, with --arch")
    for name in WRITING.intersection(settings, known):
        raise ValueError(f"{path}: {name} may replace files: give it on the command line, with {flag_of(name)}")
    return by_name(settings, set(known) - {"config"}, f"{path}: unknown key")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


@cache
def _parser(command: type) -> _Parser:
    """The parser that splits a command line; `converted` checks the values."""
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for option in options(command).values():
        least_one = option.default is MISSING
        if option.placed:
            many = ("+" if least_one else "*") if option.is_list else (None if least_one else "?")
            parser.add_argument(option.name, nargs=many)
        elif option.one is bool:
            parser.add_argument(option.flag, dest=option.name, action=argparse.BooleanOptionalAction)
        else:
            parser.add_argument(*option.flags, dest=option.name, nargs="+" if option.is_list else None)
    for other, name in other_spellings(options(command)):
        parser.add_argument(flag_of(other), dest=other, nargs="+" if options(command)[name].is_list else None)
    return parser


def flags_of(given: Mapping[str, Any]) -> Iterator[str]:
    """The words of a command line with these options."""
    for name, value in given.items():
        yield flag_of(name if value is not False else f"no_{name}")
        if not isinstance(value, bool):
            yield from map(_text, value if isinstance(value, tuple) else (value,))


def _text(value: Any) -> str:
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def command_line(program: str, experiment: Experiment) -> str:
    """`program` with the flags that run this experiment."""
    given = {"arch": experiment.arch, "pair": experiment.server.pair} | experiment.given(real=program == "realrun")
    return shlex.join([*program.split(), *flags_of(given)])


def experiment_of(command: str, own_policies: bool = False) -> Experiment:
    """The experiment of such a command line; a ValueError of one line if it is invalid.

    The command line is from a file, so it must not name a policy file, which would be executed, unless `own_policies`.
    """
    words, skipped = list[str](), True  # skips the program, and removed flags with their values
    for word in shlex.split(command):
        skipped = word in GONE if word.startswith("--") else skipped
        words += [] if skipped else [word]
    given = read(Experiment, words)
    check_trusted(given.get("arch", ""), own_policies)
    return build(Experiment, {"pair": EARLIER_PAIR} | given)


def experiment_from(settings: Mapping[str, Any], own_policies: bool = False) -> Experiment:
    """The experiment from the settings of a result or message, with the same rule; missing settings are defaults."""
    check_trusted(settings["arch"], own_policies)
    stored = {name: value for group in GROUPS for name, value in settings[group].items() if name in DEFAULTS}
    given = {name: stored_value(value) for name, value in stored.items()}
    return Experiment().with_settings(arch=settings["arch"], **given)


def stored_value(value: Any) -> Any:
    """The value of a setting that was written as JSON."""
    return math.inf if value == "inf" else tuple(value) if isinstance(value, list) else value


def check_trusted(arch: str, own_policies: bool) -> None:
    """Reject a policy file named by a file, unless policy files are trusted."""
    if not own_policies and file_of(arch) is not None:
        raise ValueError(f"arch {arch} is a policy file, which would be executed: add --own-policies if you trust it")


# help -----------------------------------------------------------------------------------------------------------------


def _help(command: type, prog: str, everything: bool) -> str:
    """The help of a command: the main and its own options, or all by group."""
    known = options(command)
    placed = [option for option in known.values() if option.placed]
    places = "".join(f" {option.name.upper()}{' ...' if option.is_list else ''}" for option in placed)
    width = min(WIDEST, get_terminal_size().columns)
    layout = partial(_Layout, max_help_position=HELP_COLUMN, width=width)
    about = (inspect.getdoc(command) or "").replace("\n\n", "\n").replace("\n", " ")
    parser = argparse.ArgumentParser(prog, f"{prog} [OPTIONS]{places}", about, formatter_class=layout, add_help=False)
    several = {"tensor_parallel_size", "replicas"} if "gpus" in known else set()  # which --gpus chooses
    usual = [known[name] for name in MOST_USED if name in known and name not in several]
    groups = {"Arguments": placed} if everything else {"Arguments": placed, "Most used": usual}
    kinds = kinds_of(command)
    for option in known.values():
        own = bool(groups_of(option.group)) or option.group is command
        main = option.name == getattr(option.group, "key", "") if kinds else own  # what chooses a kind
        if not option.placed and (everything or (main and option not in usual)):
            sentence = (inspect.getdoc(option.group) or "").split("\n")[0].rstrip(".")
            title = "Options of this command" if own and option.group not in kinds else sentence
            groups.setdefault(title, []).append(option)
    for title, group in groups.items():
        section = parser.add_argument_group(title)
        for option in group:
            text = described(option).replace("%", "%%")
            if option.placed:
                section.add_argument(option.name, metavar=option.name.upper(), help=text)
            elif option.one is bool:  # the form that changes the default
                flag = flag_of(f"no_{option.name}" if option.default else option.name)
                section.add_argument(flag, action="store_true", help=text)
            else:
                section.add_argument(*option.flags, metavar=_takes(option), help=text)
    left = len(known) - sum(map(len, groups.values()))
    return parser.format_help() + (f"\n{left} more options: {prog} --help-all\n" if left else "")


class _Layout(argparse.HelpFormatter):
    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


def _takes(option: Option) -> str:
    if option.values and not _has_long_values(option):
        return f"{{{','.join(option.values)}}}"
    return {int: "N", float: "X"}.get(option.one, "TEXT") + (" ..." if option.paths else ",..." * option.is_list)


def _has_long_values(option: Option) -> bool:
    """Whether they take more than a line after the flag; its text lists them then."""
    return sum(map(len, option.values)) > LONG_VALUES


def described(option: Option) -> str:
    """The text of an option with the choice of other options that it belongs to, and its default, if not stated."""
    value, text = option.default, option.text
    belongs = [mark for mark in option.marks if isinstance(mark, Of)]
    if belongs and all(mark.named for mark in belongs):
        text = f"{text} Only with {'; or '.join(map(str, belongs))}."
    if _has_long_values(option):
        text = f"{text} One of {', '.join(option.values)}."
    if "default" in text or value in (MISSING, None, ()) or isinstance(value, bool):
        return text
    return f"{text} (default: {','.join(map(_text, value if isinstance(value, tuple) else (value,)))})"
