"""A command's options from Python values: the keywords of the API, checked one by one, without a command line."""

from __future__ import annotations

import os
import types
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pdvsim.cli.args import flags, nearest
from pdvsim.sim.policies import named

T = TypeVar("T")


def build(command: type[T], options: Mapping[str, Any]) -> T:
    """The command with these options; a ValueError of one line that names what is wrong. None is the default."""
    known = {flag.replace("-", "_"): hint for flag, hint in flags(command).items()}
    for name in options:
        if name not in known:
            guess = nearest(name.replace("_", "-"), (flag.replace("_", "-") for flag in known))
            raise ValueError(f"unknown option {name}{guess.replace('--', '').replace('-', '_')}")
    values = {name: _checked(name, known[name], value) for name, value in options.items() if value is not None}
    return _filled(command, values)


def _filled(command: type[T], values: Mapping[str, Any]) -> T:
    """Each value to the field of its name, an outer one before an inner one."""
    hints, inner = get_type_hints(command), []
    given: dict[str, Any] = {}
    for field in fields(command):  # type: ignore[arg-type]
        if is_dataclass(hints[field.name]):
            inner.append(field.name)
        elif field.name in values:
            given[field.name] = values[field.name]
    rest = {name: value for name, value in values.items() if name not in given}
    for name in inner:
        given[name] = _filled(hints[name], rest)
    return command(**given)


def _checked(name: str, hint: Any, value: Any) -> Any:
    """One value as its field keeps it."""
    flag, many = f"--{name.replace('_', '-')}", not isinstance(value, str) and isinstance(value, Iterable)
    origin, inside = get_origin(hint), get_args(hint)
    if name == "arch" and not many:
        value = named(value)
    if name == "vary" and isinstance(value, Mapping):
        return tuple(token for axis, values in value.items() for token in _axis(axis, _listed(values)))
    if origin is tuple:
        return tuple(_checked(name, inside[0], item) for item in _listed(value))
    if many:
        raise ValueError(f"{name} takes one value, got {value}")
    if origin in (Union, types.UnionType):
        return _checked(name, next(part for part in inside if part is not type(None)), value)
    if origin is Literal:
        if value not in inside:
            raise ValueError(f"{flag}: invalid choice {value!r}; one of {', '.join(map(str, inside))}")
        return value
    if hint is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {value!r}")
        return value
    number = isinstance(value, Real) and not isinstance(value, bool)
    if hint is int:
        if not (number and isinstance(value, Integral)):
            raise ValueError(f"{flag} must be a whole number, got {value!r}")
        return int(value)
    if hint is float:
        if not number:
            raise ValueError(f"{flag} must be a number, got {value!r}")
        return float(value)
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"{name} must be text, got {value!r}")
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _listed(value: Any) -> list[Any]:
    return list(value) if not isinstance(value, str) and isinstance(value, Iterable) else [value]


def _axis(name: str, values: list[Any]) -> list[str]:
    """A varied flag as `args.axes` reads it: its name with the first value, then the others; a list as 0.8+0.6."""
    first, *others = ["+".join(map(str, _listed(value))) for value in values] or [""]
    return [f"{name}={first}", *others]
