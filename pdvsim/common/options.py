"""Options: one set of dataclasses defines the command line, the --config file, Python keywords and the help.

An option is a field: `request_rate` is `--request-rate` (or `--request_rate`) on the command line, and request_rate in
TOML and in Python. A field that is a dataclass is a group of options, an outer option replaces an inner one of the
same name, and a field marked `Internal` or named in the class attribute `without` is not an option. The text below a
field is its help.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import math
import os
import sys
import textwrap
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache, partial
from numbers import Integral, Real
from shutil import get_terminal_size
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from pdvsim.common.presets import preset_settings
from pdvsim.sim.config import INTERNAL
from pdvsim.sim.policies import file_of, named
from pdvsim.sim.reading import read_toml, said

T = TypeVar("T")
PLACED = "placed"
Placed = Annotated[T, PLACED]  # a positional argument
PATHS = "paths"
Paths = Annotated[tuple[str, ...], PATHS]  # each an argument of its own: a path may contain spaces and commas
MOST_USED = (
    "arch", "pair", "pairs", "drafter", "gpu", "gpus", "tensor_parallel_size", "replicas", "request_rate",
    "concurrency", "max_concurrency", "num_prompts", "goodput", "dataset_path", "input_len", "output_len",
    "num_speculative_tokens", "acceptance_rate", "acceptance_model", "acceptance_from", "num_runs", "preset",
    "output", "json",
)  # fmt: skip
MEANT = {  # names of options in other programs
    "request_rate": ("rate", "qps", "rps", "arrival_rate", "req_rate"),
    "max_concurrency": ("users", "clients", "num_users"),
    "num_prompts": ("requests", "num_requests", "prompts", "n"),
    "num_runs": ("runs", "seeds", "repeats", "replications", "num_seeds"),
    "tensor_parallel_size": ("tp", "tp_size", "tensor_parallel"),
    "replicas": ("dp", "dp_size", "data_parallel_size"),
    "max_num_seqs": ("batch_size", "max_batch_size", "batch", "max_running_requests"),
    "max_num_batched_tokens": ("chunk", "chunk_size", "chunked_prefill_size", "prefill_chunk"),
    "num_speculative_tokens": ("k", "gamma", "draft_length", "spec_tokens", "speculative_num_draft_tokens"),
    "acceptance_rate": ("acceptance", "alpha", "accept_rate"),
    "goodput": ("slo", "slos", "sla"),
    "gpu": ("card", "device", "gpu_type"),
    "gpus": ("num_gpus", "n_gpus"),
    "dataset_path": ("trace", "data", "dataset"),
    "input_len": ("prompt_len", "isl", "random_input_len"),
    "output_len": ("osl", "max_tokens", "random_output_len"),
    "drafter": ("speculative_algorithm", "spec_method", "method"),
    "output": ("out", "out_dir", "output_dir", "save_dir"),
    "arch": ("architecture", "policy", "policies", "architectures"),
    "pair": ("models", "draft_model", "speculative_model"),
    "jobs": ("workers", "processes", "threads"),
}  # fmt: skip
OTHER_SPELLINGS = {
    "model": "pair",
    "random_prefix_len": "prefix_len",
    "prefix_repetition_prefix_len": "prefix_len",
    "prefix_repetition_suffix_len": "input_len",
    "prefix_repetition_num_prefixes": "num_prefixes",
    "prefix_repetition_output_len": "output_len",
}
MISSING_OPTIONS = {
    **dict.fromkeys(
        ("enable_expert_parallel", "expert_parallel_size", "ep", "ep_size", "moe_ep_size"),
        "expert parallelism is not modelled; --tensor-parallel-size divides every expert",
    ),
    "dtype": "models are simulated in the precision of their configuration, or bf16 if it names none",
    "overwrite": "results are never overwritten: name another folder with -o, or continue with --resume",
    "force": "results are never overwritten: name another folder with -o, or continue with --resume",
}
WIDEST = 100
HELP_COLUMN = 30


@dataclass(frozen=True)
class Option:
    """One option of a dataclass; `hint` is the field's type."""

    owner: type
    name: str
    hint: Any
    default: Any
    placed: bool
    paths: bool

    @property
    def flag(self) -> str:
        """The flag on the command line; fields named like Python keywords end with an underscore."""
        return f"--{self.name.rstrip('_').replace('_', '-')}"

    @property
    def flags(self) -> list[str]:
        return ["-o", self.flag] if self.name == "output" else [self.flag]

    @property
    def is_list(self) -> bool:
        return get_origin(self.hint) is tuple

    @property
    def one(self) -> Any:
        """The type of one value: of list items, or without None."""
        if get_origin(self.hint) in (Union, types.UnionType):
            return next(part for part in get_args(self.hint) if part is not type(None))
        return get_args(self.hint)[0] if self.is_list else self.hint

    @property
    def values(self) -> tuple[str, ...]:
        """The allowed values, if they can be listed."""
        return tuple(map(str, get_args(self.one))) if get_origin(self.one) is Literal else ()

    @property
    def text(self) -> str:
        """The text below the field."""
        texts = (_texts(cls.__module__).get((cls.__name__, self.name)) for cls in self.owner.__mro__)
        return next(filter(None, texts), "")


@cache
def _texts(module: str) -> dict[tuple[str, str], str]:
    """The text below each field of each class of a module."""
    texts = {}
    classes = ast.parse(inspect.getsource(sys.modules[module])).body if module != "builtins" else []
    for cls in (node for node in classes if isinstance(node, ast.ClassDef)):
        for line, below in zip(cls.body, cls.body[1:], strict=False):
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and isinstance(below, ast.Expr):
                text = ast.literal_eval(below.value)
                texts[cls.name, line.target.id] = " ".join(text.split("\n\n")[0].split())
    return texts


@cache
def _hints(command: type) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """The type and annotations of every field."""
    plain, marked = get_type_hints(command), get_type_hints(command, include_extras=True)
    return {f.name: (plain[f.name], getattr(marked[f.name], "__metadata__", ())) for f in fields(command)}


@cache
def options(command: type) -> dict[str, Option]:
    """The options of a dataclass and of its groups, by name."""
    hints = _hints(command)
    own: dict[str, Option] = {}
    inner: dict[str, Option] = {}
    for field in fields(command):
        hint, marks = hints[field.name]
        if is_dataclass(hint):
            inner |= options(hint)  # type: ignore[arg-type]
        elif INTERNAL not in marks:
            own[field.name] = Option(command, field.name, hint, field.default, PLACED in marks, PATHS in marks)
    left_out = {*_own(hints), *getattr(command, "without", ())}
    return own | {name: option for name, option in inner.items() if name not in left_out}


def _own(hints: Mapping[str, tuple[Any, Any]]) -> set[str]:
    """The fields that are not groups; a group and an option may have the same name."""
    return {name for name, (hint, _) in hints.items() if not is_dataclass(hint)}


# from values ----------------------------------------------------------------------------------------------------------


def build(command: type[T], given: Mapping[str, Any]) -> T:
    """The dataclass with these options, as texts or as values; a ValueError of one line names what is wrong."""
    known = options(command)  # type: ignore[arg-type]
    chosen = _known(given, known, "unknown option")
    values = {name: converted(known[name], value) for name, value in chosen.items() if value is not None}
    if preset := values.get("preset"):
        values |= preset_settings(preset, values, known)
    return _filled(command, values)


def _known(given: Mapping[str, Any], known: Collection[str], unknown: str) -> dict[str, Any]:
    """Values by option name; a ValueError that starts with `unknown` and suggests the nearest name."""
    spelt = {name.replace("-", "_"): value for name, value in given.items()}
    for other, name in OTHER_SPELLINGS.items():
        if other in spelt and other not in known and name in known:
            if name in spelt:
                both = f"--{other} and --{name}".replace("_", "-")
                raise ValueError(f"{both} are the same: give one of them")
            spelt[name] = spelt.pop(other)
    for name in spelt:
        if name not in known:
            raise ValueError(f"{unknown} {name}{nearest(name, known)}")
    return spelt


def nearest(name: str, known: Iterable[str]) -> str:
    """A suggestion of the known name with the same meaning as `name`, or the most similar; empty if none."""
    known, dashes = list(known), "--" if name.startswith("--") else ""
    word = name.removeprefix("--").replace("-", "_")
    if word in MISSING_OPTIONS:
        return f": {MISSING_OPTIONS[word]}"
    meant = [meaning if not dashes else f"--{meaning.replace('_', '-')}" for meaning in MEANT if word in MEANT[meaning]]
    close = [one for one in meant if one in known] or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _filled(command: type[T], values: Mapping[str, Any]) -> T:
    """Assign each value to the field of its name, outer fields first."""
    hints = _hints(command)  # type: ignore[arg-type]
    given = {name: value for name, value in values.items() if name in _own(hints)}
    rest = {name: value for name, value in values.items() if name not in given}
    for name, (hint, _) in hints.items():
        if is_dataclass(hint):
            given[name] = _filled(hint, {n: value for n, value in rest.items() if n in options(hint)})  # type: ignore[arg-type]
    return command(**given)


def converted(option: Option, value: Any) -> Any:
    """A text or value converted to the option's type; a ValueError of one line if invalid."""
    if not option.is_list:
        return _item(option, value)
    if isinstance(value, Mapping):
        value = [f"{name}={','.join(map(_joined, _listed(items)))}" for name, items in value.items()]
    parts: list[Any] = []
    for item in _listed(value):
        parts += item.replace(",", " ").split() if isinstance(item, str) and not option.paths else [item]
    return tuple(_item(option, part) for part in parts)


def _joined(value: Any) -> str:
    """A value as text; a list is written 0.8+0.6."""
    return "+".join(map(str, _listed(value)))


def _listed(value: Any) -> list[Any]:
    return list(value) if not isinstance(value, str) and isinstance(value, Iterable) else [value]


def _item(option: Option, value: Any) -> Any:
    kind, choices = option.one, option.values
    if isinstance(value, type):
        value = named(value)
    if not isinstance(value, str) and isinstance(value, Iterable):
        raise ValueError(f"{option.flag} takes one value, got {value}")
    if kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{option.flag} must be true or false, got {value!r}")
        return value
    if kind in (int, float):
        whole, wanted = kind is int, Integral if kind is int else Real
        try:
            if isinstance(value, bool) or not isinstance(value, str | wanted):
                raise ValueError
            return kind(value)
        except ValueError:
            what = "a whole number" if whole else "a number"
            raise ValueError(f"{option.flag} must be {what}, got {value!r:.100}") from None
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"{option.flag} must be text, got {value!r}")
    if choices and value not in choices:
        raise ValueError(f"{option.flag}: invalid choice {value!r}; one of {', '.join(choices)}")
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def plain(cls: type[T], given: T) -> T:
    """An instance of a command's subclass as its base dataclass."""
    return cls(**{f.name: getattr(given, f.name) for f in fields(cls)})  # type: ignore[arg-type]


# from a command line, and back ----------------------------------------------------------------------------------------


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
    return _known(vars(given), options(command), "unknown option")


def _of_file(path: str, command: type, given: Collection[str]) -> dict[str, Any]:
    """Options of a file that the command line lacks; it cannot name another file or a policy file."""
    try:
        settings = read_toml(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {said(error)}") from None
    known = options(command)
    if "arch" in settings and "arch" in known and "arch" not in given:
        for arch in converted(replace(known["arch"], hint=tuple[str, ...]), settings["arch"]):
            if file_of(arch) is not None:
                raise ValueError(f"{path}: arch {arch} is a policy file: name it on the command line, with --arch")
    return _known(settings, set(known) - {"config"}, f"{path}: unknown key")


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
    for other, name in OTHER_SPELLINGS.items():
        if name in options(command) and other not in options(command):
            many = "+" if options(command)[name].is_list else None
            parser.add_argument(f"--{other.replace('_', '-')}", dest=other, nargs=many)
    return parser


def flags_of(config: Any, default: Any, leave_out: Collection[str] = ()) -> Iterator[str]:
    """The flags by which two configurations differ; fields without an option are ignored."""
    for name, (_, marks) in _hints(type(config)).items():  # type: ignore[arg-type]
        value, usual = getattr(config, name), getattr(default, name)
        if is_dataclass(value):
            yield from flags_of(value, usual, leave_out)
        elif name not in leave_out and value != usual and INTERNAL not in marks:
            yield f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
            if not isinstance(value, bool):
                yield from map(_text, value if isinstance(value, tuple) else (value,))


def _text(value: Any) -> str:
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


# help -----------------------------------------------------------------------------------------------------------------


def _help(command: type, prog: str, everything: bool) -> str:
    """The help of a command: the main and its own options, or all by group."""
    known = options(command)
    placed = [option for option in known.values() if option.placed]
    places = "".join(f" {option.name.upper()}{' ...' if option.is_list else ''}" for option in placed)
    width = min(WIDEST, get_terminal_size().columns)
    layout = partial(_Layout, max_help_position=HELP_COLUMN, width=width)
    about = (inspect.getdoc(command) or "").replace("\n\n", "\n").replace("\n", " ")
    usage = f"{prog} [OPTIONS]{places}"
    parser = argparse.ArgumentParser(prog, usage, about, formatter_class=layout, add_help=False)
    several = {"tensor_parallel_size", "replicas"} if "gpus" in known else set()  # which --gpus chooses
    usual = [known[name] for name in MOST_USED if name in known and name not in several]
    groups = {"Arguments": placed} if everything else {"Arguments": placed, "Most used": usual}
    for option in known.values():
        own = any(is_dataclass(hint) for hint, _ in _hints(option.owner).values()) or option.owner is command
        if not option.placed and (everything or (own and option not in usual)):
            title = "Options of this command" if own else _sentence(option.owner)
            groups.setdefault(title, []).append(option)
    for title, group in groups.items():
        section = parser.add_argument_group(title)
        for option in group:
            text = _described(option).replace("%", "%%")
            if option.placed:
                section.add_argument(option.name, metavar=option.name.upper(), help=text)
            elif option.one is bool:  # the form that changes the default
                section.add_argument(
                    f"--{'no-' * bool(option.default)}{option.flag[2:]}", action="store_true", help=text
                )
            else:
                section.add_argument(*option.flags, metavar=_takes(option), help=text)
    left = len(known) - sum(map(len, groups.values()))
    return parser.format_help() + (f"\n{left} more options: {prog} --help-all\n" if left else "")


class _Layout(argparse.HelpFormatter):
    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


def _sentence(command: type) -> str:
    """The first sentence of a docstring."""
    return (inspect.getdoc(command) or "").split("\n")[0].rstrip(".")


def _takes(option: Option) -> str:
    if option.values:
        return f"{{{','.join(option.values)}}}"
    return {int: "N", float: "X"}.get(option.one, "TEXT") + (" ..." if option.paths else ",..." * option.is_list)


def _described(option: Option) -> str:
    """Its text with the default, unless the text states it."""
    value, text = option.default, option.text
    if "default" in text or value in (MISSING, None, ()) or isinstance(value, bool):
        return text
    return f"{text} (default: {','.join(map(_plain, value)) if isinstance(value, tuple) else _plain(value)})"


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) and math.isfinite(value) else str(value)
