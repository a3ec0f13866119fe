"""How the commands speak and end: one line on standard error, exit code 2 for bad input and 130 for Ctrl-C."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pdvsim.sim.doubts import Doubt


def say(program: str, text: str) -> None:
    """One line on standard error."""
    print(f"{program}: {text}", file=sys.stderr, flush=True)


def guarded(program: str, command: Callable[[], int]) -> int:
    """Run a command; whatever goes wrong becomes one line and an exit code, and whatever looks wrong one line."""
    try:
        with _doubts_said(program):
            code = command()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        say(program, "interrupted")
        return 130
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        return _refused(program, f"{where}{error.strerror or error}")
    except ValueError as error:
        return _refused(program, str(error))


@contextmanager
def _doubts_said(program: str) -> Iterator[None]:
    """Doubts as lines on standard error; other warnings as Python shows them."""
    with warnings.catch_warnings():
        as_usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, Doubt):
                say(program, f"warning: {message}")
            else:
                as_usual(message, category, *where, **more)

        warnings.showwarning = show
        yield


def _refused(program: str, reason: str) -> int:
    say(program, f"error: {' '.join(reason.split())}")
    return 2
