"""Messages and exit codes of the commands: every error is one line on standard error.

Exit codes: 0 success, 1 if some points of a sweep failed, 2 bad input, 70 an internal error (the line names a file with
its traceback), 130 Ctrl-C, 141 closed output.
"""

from __future__ import annotations

import contextlib
import io
import os
import platform
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from pdvsim.common.files import write_whole
from pdvsim.common.version import __version__
from pdvsim.sim.models.names import Doubt, Note
from pdvsim.sim.reading import printable, shortened

INTERNAL = 70  # EX_SOFTWARE of sysexits.h
LONGEST = 2000  # letters of an error


def say(program: str, text: str) -> None:
    """Print one line on standard error, whatever names the text holds."""
    print(f"{program}: {printable(text)}", file=sys.stderr, flush=True)


def guarded(program: str, command: Callable[[], int], last: bool = False) -> int:
    """Run a command; errors become one line and an exit code, warnings one line.

    If it is the `last` of its process, it ends by SIGTERM as by Ctrl-C, and Ctrl-C has no effect after it: all is
    written, and Python only ends its threads.
    """
    _open_streams()
    if last:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with _notes_printed(program):
            code = command()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of the output ended, as `| head` does
        _drop_output()
        return 141
    except KeyboardInterrupt:
        say(program, "interrupted")
        return 130
    except OSError as error:
        _drop_output()  # otherwise Python would try to write again at exit
        where = f"{error.filename}: " if error.filename is not None else ""
        return _refused(program, f"{where}{error.strerror or error}")
    except ValueError as error:
        return _refused(program, str(error))
    except MemoryError:
        return _refused(program, "out of memory: try a smaller --num-prompts, or --no-detailed")
    except Exception as error:
        return _crashed(program, error)
    finally:
        if last:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _notes_printed(program: str) -> Iterator[None]:
    """Notes and doubts as lines on standard error, each once; other warnings as Python shows them."""
    shown: set[str] = set()
    with warnings.catch_warnings():
        as_usual = warnings.showwarning
        warnings.simplefilter("always", Note)

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, Note):
                if str(message) not in shown:
                    shown.add(str(message))
                    say(program, f"{'warning: ' if issubclass(category, Doubt) else ''}{message}")
            else:
                as_usual(message, category, *where, **more)

        warnings.showwarning = show
        yield


def _refused(program: str, reason: str) -> int:
    say(program, f"error: {shortened(printable(reason), LONGEST)}")
    return 2


def _crashed(program: str, error: Exception) -> int:
    """Unexpected errors: one line, and a file to report."""
    what = printable(f"{type(error).__name__}: {error}")[:200]
    about = f"pdvsim {__version__}, Python {platform.python_version()}, {platform.platform()}"
    command = f"{program} {' '.join(map(repr, sys.argv[1:]))}"[:20_000]
    intro = "An error of pdvsim itself. Please report it with this file and the input files that the command names."
    report = "\n".join((intro, "", about, command, "", "".join(traceback.format_exception(error))[-200_000:]))
    name = f"pdvsim-crash-{datetime.now():%Y%m%d-%H%M%S-%f}.txt"
    for folder in (Path.cwd(), Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            path = folder / name
            write_whole(path, report.encode("utf-8", "backslashreplace"))
            say(program, f"internal error: {what}; please report it with {path}")
            return INTERNAL
    say(program, f"internal error: {what}; its traceback could not be written")
    return INTERNAL


def _open_streams() -> None:
    """Standard streams that accept any text: closed ones discard it, unencodable characters are replaced."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:  # closed by the parent: the next opened file would get its number
            with contextlib.suppress(OSError):
                if (nowhere := os.open(os.devnull, os.O_WRONLY)) != number:
                    os.dup2(nowhere, number)
                    os.close(nowhere)
            stream = os.fdopen(number, "w", encoding="utf-8", closefd=False)
            setattr(sys, name, stream)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _drop_output() -> None:
    """If standard output cannot be written, discard it."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
