"""How the commands speak and end: one line on standard error, exit code 2 for bad input and 130 for Ctrl-C."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


def say(program: str, text: str) -> None:
    """One line on standard error."""
    print(f"{program}: {text}", file=sys.stderr, flush=True)


def guarded(program: str, command: Callable[[], int]) -> int:
    """Run a command; whatever goes wrong becomes one line and an exit code."""
    try:
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


def _refused(program: str, reason: str) -> int:
    say(program, f"error: {' '.join(reason.split())}")
    return 2
