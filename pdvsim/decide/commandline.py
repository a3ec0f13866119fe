"""An experiment as the command line that runs it: only what differs from the defaults."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from pdvsim.sim.config import Experiment


def command_line(program: str, experiment: Experiment) -> str:
    """`program` with the flags that make it run just this experiment."""
    return shlex.join([*program.split(), "--arch", experiment.arch, *_flags(experiment, Experiment())])


def _flags(given: Any, default: Any) -> Iterator[str]:
    for part in fields(given):
        value, usual = getattr(given, part.name), getattr(default, part.name)
        if is_dataclass(value):
            yield from _flags(value, usual)
        elif part.name != "arch" and value != usual:
            yield "--" + part.name.replace("_", "-") if value is not False else "--no-" + part.name.replace("_", "-")
            if isinstance(value, tuple):
                yield from map(_text, value)
            elif not isinstance(value, bool):
                yield _text(value)


def _text(value: Any) -> str:
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)
