"""An experiment as the command line that runs it, with only what differs from the defaults, and back from its texts."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from pdvsim.sim.config import Experiment
from pdvsim.sim.policies import file_of, policy_of

T = TypeVar("T")


def command_line(program: str, experiment: Experiment) -> str:
    """`program` with the flags that make it run just this experiment."""
    return shlex.join([*program.split(), "--arch", experiment.arch, *flags_of(experiment)])


def flags_of(experiment: Experiment, leave_out: Collection[str] = ()) -> list[str]:
    """The flags that give an experiment's settings but its architecture."""
    return list(_flags(experiment, Experiment(), ("arch", *leave_out)))


def experiment_of(command: str, own_policies: bool = False) -> Experiment:
    """The experiment that a command line as above runs; a ValueError of one line if it is none.

    The command line comes from a file: it names no policy file, which would be run, unless `own_policies` are trusted.
    """
    words: dict[str, list[str]] = {}
    given: list[str] | None = None
    for token in shlex.split(command):
        if token.startswith("--"):
            given = words[token[2:].replace("-", "_")] = []
        elif given is not None:
            given.append(token)
    for arch in words.get("arch", ()):
        check_trusted(arch, own_policies)
    found = _filled(Experiment, words)
    if words:
        raise ValueError(f"unknown option --{next(iter(words)).replace('_', '-')} in {command!r}")
    return found


def experiment_from(settings: Mapping[str, Any], own_policies: bool = False) -> Experiment:
    """The experiment whose settings a result or a message holds, on the same terms; what they lack is as usual."""
    check_trusted(settings["arch"], own_policies)
    if settings["server"].get("kv_cache", "") is None:  # an older result: the mode was left to the architecture
        mode = "paged" if policy_of(settings["arch"]).in_steps() else "reserved"
        settings = {**settings, "server": {**settings["server"], "kv_cache": mode}}
    groups = {name: kind for name, kind in get_type_hints(Experiment).items() if is_dataclass(kind)}
    return Experiment(settings["arch"], **{name: _configured(kind, settings[name]) for name, kind in groups.items()})


def check_trusted(arch: str, own_policies: bool) -> None:
    """Refuse an architecture that a file names and that is a policy file, unless those are trusted."""
    if not own_policies and file_of(arch) is not None:
        raise ValueError(f"arch {arch} is a policy file, which would be run: give --own-policies if you trust it")


def _configured(kind: Any, values: Mapping[str, Any]) -> Any:
    given = {part.name: values[part.name] for part in fields(kind) if part.name in values}
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return kind(**{name: math.inf if value == "inf" else value for name, value in plain.items()})


def _flags(given: Any, default: Any, leave_out: Collection[str]) -> Iterator[str]:
    for part in fields(given):
        value, usual = getattr(given, part.name), getattr(default, part.name)
        if is_dataclass(value):
            yield from _flags(value, usual, leave_out)
        elif part.name not in leave_out and value != usual:
            yield "--" + part.name.replace("_", "-") if value is not False else "--no-" + part.name.replace("_", "-")
            if isinstance(value, tuple):
                yield from map(_text, value)
            elif not isinstance(value, bool):
                yield _text(value)


def _text(value: Any) -> str:
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def _filled(config: type[T], words: dict[str, list[str]]) -> T:
    """A configuration of its flags, which are taken out of `words`."""
    values: dict[str, Any] = {}
    for name, hint in get_type_hints(config).items():
        if is_dataclass(hint):
            values[name] = _filled(hint, words)  # type: ignore[arg-type]
        elif name in words:
            values[name] = _value(name, hint, words.pop(name))
        elif f"no_{name}" in words and hint is bool and not words.pop(f"no_{name}"):
            values[name] = False
    return config(**values)


def _value(name: str, hint: Any, given: list[str]) -> Any:
    """What a flag's words stand for."""
    kinds = [kind for kind in get_args(hint) if isinstance(kind, type) and kind is not type(None)] or [hint]
    kind = next((kind for kind in kinds if kind in (int, float)), str)
    flag = f"--{name.replace('_', '-')}"
    try:
        if get_origin(hint) is tuple:
            return tuple(map(kind, given))
        if hint is bool and not given:
            return True
        [word] = given
        value = kind(word)
    except ValueError:
        raise ValueError(f"{flag} cannot be {' '.join(given)!r}") from None
    choices = [choice for part in (hint, *get_args(hint)) for choice in get_args(part) if isinstance(choice, str)]
    if choices and value not in choices:
        raise ValueError(f"{flag}: {value!r} is none of {', '.join(choices)}")
    return value
