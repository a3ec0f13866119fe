"""Outcome of a point: its row, or the reason why it failed."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pdvsim.common.version import __version__
from pdvsim.sim.policies import PolicyError

Row = dict[str, Any]
Task = Callable[[int, Any], Row]
Item = tuple[int, Any]  # a point's number, and the point
Notice = Callable[[str], None]  # reports messages while waiting

DIED = "its worker process died twice: it was killed or ran out of memory"


@dataclass(frozen=True)
class Outcome:
    """Outcome of a point: its row, or the reason why it failed, with a traceback for internal errors."""

    index: int
    row: Row | None
    reason: str = ""
    traceback: str = ""


def attempt(task: Task, index: int, point: Any, version: str) -> Outcome:
    """Run a point; errors become outcomes and do not end the sweep."""
    if version != __version__:
        return Outcome(index, None, f"the worker runs pdvsim {__version__}, the sweep was started by {version}")
    try:
        return Outcome(index, task(index, point))
    except ValueError as error:
        failed = traceback.format_exc() if isinstance(error, PolicyError) else ""
        return Outcome(index, None, " ".join(str(error).split()), failed)
    except Exception as error:
        return failure(index, error, traceback.format_exc())


def failure(index: int, error: BaseException, details: str = "") -> Outcome:
    """The outcome of a point that failed with an unexpected error."""
    return Outcome(index, None, f"{type(error).__name__}: {' '.join(str(error).split())}", details)
