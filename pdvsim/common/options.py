"""Options: one set of dataclasses defines the command line, the --config file, Python keywords and the help.

An option is a field: `request_rate` is `--request-rate` (or `--request_rate`) on the command line, and request_rate in
TOML and in Python. Its annotation has the type and the range (`sim.limits`), its value is the default, and the text
below it is the help; of a switch that is on by default, the help of --no-NAME. A field that is a dataclass is a group
of options. An outer option replaces an inner one of the same name; if it is `Redefined`, it only has another default
and help here, and sets the inner one too. A field that is `Internal`, or named in the class attribute `without`, is no
option. An annotation also states the choice that an option, or all of a group, belongs to (`limits.of`): `build`
refuses it elsewhere. Those of an experiment are left to `sim.relevance`, as a command may run several.

A command may be a sum type: its `kinds` are classes with options of their own. The option that is the `key` of a kind
chooses it; the last kind has none and is the usual one.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import os
import sys
import types
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from pdvsim.common.presets import preset_settings
from pdvsim.sim.config import GROUPS
from pdvsim.sim.limits import Of, flag_of, hints_of, no_effect, of
from pdvsim.sim.policies import named

T = TypeVar("T")

MEANT = {  # names of options in other programs
    "request_rate": ("rate", "qps", "rps", "arrival_rate", "req_rate"),
    "max_concurrency": ("users", "clients", "num_users"),
    "num_prompts": ("requests", "num_requests", "prompts", "n"),
    "num_runs": ("runs", "seeds", "repeats", "replications", "num_seeds"),
    "tensor_parallel_size": ("tp", "tp_size", "tensor_parallel"),
    "data_parallel_size": ("dp", "dp_size", "enable_dp_attention", "enable_attention_dp"),
    "enable_expert_parallel": ("ep", "ep_size", "expert_parallel_size", "moe_ep_size", "moe_expert_parallel_size"),
    "all2all_backend": ("moe_a2a_backend", "deepep_mode"),
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
    "gpus": "--replicas copies the server, --tensor-parallel-size divides the model; pdvsim advise --gpus chooses",
    "dtype": "models are simulated in the precision of their configuration, or bf16 if it names none",
    "overwrite": "results are never overwritten: name another folder with -o, or continue with --resume",
    "force": "results are never overwritten: name another folder with -o, or continue with --resume",
}


@dataclass(frozen=True)
class Option:
    """One option: a field of `owner`, listed in the help of `group`; `hint` is its type."""

    owner: type
    name: str
    hint: Any
    default: Any
    marks: tuple[Any, ...]
    group: type

    @property
    def placed(self) -> bool:
        """Whether it is a positional argument."""
        return "placed" in self.marks

    @property
    def paths(self) -> bool:
        return "paths" in self.marks

    @property
    def flag(self) -> str:
        return flag_of(self.name)

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
        """The text below the field; if it is redefined without one, that of its group."""
        classes = (*self.owner.__mro__, *self.group.__mro__)
        texts = (_texts(cls.__module__).get((cls.__name__, self.name)) for cls in classes)
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
def groups_of(command: type) -> dict[str, type]:
    """The fields that are groups of options, with their dataclasses."""
    hints = {name: hint for name, (hint, _) in hints_of(command).items()}
    return {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}


def kinds_of(command: type) -> tuple[Any, ...]:
    """The kinds of work that a command is a choice of; none of most commands."""
    return tuple(getattr(command, "kinds", ()))


@cache
def options(command: type) -> dict[str, Option]:
    """The options of a dataclass and of its groups, by name."""
    own: dict[str, Option] = {}
    inner: dict[str, Option] = {}
    for field in fields(command):
        hint, marks = hints_of(command)[field.name]
        if field.name in groups_of(command):
            of_group = options(groups_of(command)[field.name]).items()
            inner |= {name: replace(option, marks=(*option.marks, *marks)) for name, option in of_group}
        elif "internal" not in marks:
            own[field.name] = Option(command, field.name, hint, field.default, marks, command)
    for kind in kinds_of(command):
        for name, option in options(kind).items():
            inner[name] = replace(option, group=command) if name in inner else option
    for name in own.keys() & inner.keys():
        if "redefined" in own[name].marks:
            inner[name] = replace(own.pop(name), group=inner[name].group)
    left_out = getattr(command, "without", ())
    return {name: option for name, option in (own | inner | own).items() if name not in left_out}


def build(command: type[T], given: Mapping[str, Any]) -> T:
    """The dataclass with these options, as texts or as values; a ValueError of one line names what is wrong."""
    kind: type = command
    known = options(kind)
    chosen = by_name(given, known, "unknown option")
    values = {name: converted(known[name], value) for name, value in chosen.items() if value is not None}
    if preset := values.get("preset"):
        values |= preset_settings(preset, values, known)
    every = {name: option.default for name, option in known.items()} | values
    changed = [name for name, option in known.items() if every[name] != option.default]
    for name in changed:
        belongs = [mark for mark in known[name].marks if isinstance(mark, Of)]
        of_command = belongs and known[name].owner not in GROUPS.values()
        if of_command and not any(choice.chosen(changed.__contains__, every.__getitem__) for choice in belongs):
            raise ValueError(no_effect(name, belongs))
    chosen_kind: Any = _kind_of(command, changed)
    return _filled(chosen_kind, values)  # type: ignore[no-any-return]


def _kind_of(command: type, given: Collection[str]) -> type:
    """The kind that these options ask for, else the command itself; a ValueError names an option of another kind."""
    *keyed, usual = kinds_of(command) or (command,)
    chosen: Any = next((kind for kind in keyed if kind.key in given), usual)
    for name in (name for name in given if name not in options(chosen)):
        if chosen is usual:
            raise ValueError(no_effect(name, [of(kind.key) for kind in keyed if name in options(kind)]))
        raise ValueError(f"{flag_of(name)} cannot be combined with {flag_of(chosen.key)}")
    return chosen  # type: ignore[no-any-return]


def by_name(given: Mapping[str, Any], known: Collection[str], unknown: str) -> dict[str, Any]:
    """Values by option name; a ValueError that starts with `unknown` and suggests the nearest name."""
    spelt = {name.replace("-", "_"): value for name, value in given.items()}
    for other, name in other_spellings(known):
        if other in spelt:
            if name in spelt:
                raise ValueError(f"{flag_of(other)} and {flag_of(name)} are the same: give one of them")
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


def other_spellings(known: Collection[str]) -> list[tuple[str, str]]:
    """Other names of these options, each with the name that it has here."""
    return [(other, name) for other, name in OTHER_SPELLINGS.items() if name in known and other not in known]


def _filled(command: type[T], values: Mapping[str, Any]) -> T:
    """Assign each value to the field of its name, outer fields first; what is redefined also to its group."""
    kind: type = command
    own = (part.name for part in fields(kind) if part.name not in groups_of(kind))  # a group may be named as an option
    given = {name: values[name] for name in own if name in values}
    inner = {name: value for name, value in values.items() if name not in given}
    for part in fields(kind):
        value = given.get(part.name, part.default)
        if "redefined" in hints_of(kind)[part.name][1] and value is not None:
            inner[part.name] = value
    for name, group in groups_of(kind).items():
        given[name] = _filled(group, {n: value for n, value in inner.items() if n in options(group)})
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
        if isinstance(value, bool):
            return value
        raise ValueError(f"{option.flag} must be true or false, got {value!r}")
    if kind in (int, float):
        wanted, what = (Integral, "a whole number") if kind is int else (Real, "a number")
        with suppress(ValueError):
            written = isinstance(value, str) and value.isascii() and "_" not in value  # as 1_0 is not
            if written or (isinstance(value, wanted) and not isinstance(value, bool)):
                return kind(value)
        raise ValueError(f"{option.flag} must be {what}, got {value!r:.100}")
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"{option.flag} must be text, got {value!r}")
    if choices and value not in choices:
        raise ValueError(f"{option.flag}: invalid choice {value!r}; one of {', '.join(choices)}")
    return os.fspath(value)
