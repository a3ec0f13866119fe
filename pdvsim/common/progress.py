"""Progress on standard error: a bar on a terminal, occasional lines elsewhere, nothing if quiet.

If progress was shown, the last line reports the total.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

LINE_EVERY_S = 10.0


class Progress:
    """Call `update(done)`; the bar appears once the work has taken `after_s`, so a short run shows none.

    With `about` the total is an estimate.
    """

    def __init__(self, total: int, unit: str, quiet: bool = False, after_s: float = 0.5, about: bool = False) -> None:
        self.total = total
        self.unit = unit
        self.about = about
        self._done = 0
        self._first: tuple[float, int] | None = None  # when some had finished, and how many
        self.quiet = quiet
        self._terminal = sys.stderr.isatty()
        self._started_s = time.monotonic()
        self._due_s = self._started_s + (after_s if self._terminal else max(after_s, 2.0))
        self._shown = False
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Progress:
        self.update(0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._shown and error is None:
            self._say(f"{self._done} {self.unit} in {self._elapsed_s:.0f} s")

    def update(self, done: int) -> None:
        """Report that `done` of the total have finished."""
        self._done = done
        if done and self._first is None:
            self._first = time.monotonic(), done
        if self.quiet or time.monotonic() < self._due_s:
            return
        self._shown = True
        if not self._terminal:
            of = f"of {'about ' if self.about else ''}{self.total} {self.unit}"
            if done > self.total:  # it was an estimate
                of = self.unit
            self._say(f"{done} {of} after {self._elapsed_s:.0f} s{self._left()}")
            self._due_s = time.monotonic() + LINE_EVERY_S
            return
        if self._bar is None:
            self._show()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done)

    def _left(self) -> str:
        """The time left, by the pace since the first has finished: before that, workers start."""
        since_s, first = self._first or (0.0, self._done)
        if not first < self._done <= self.total:
            return ""
        left_s = (time.monotonic() - since_s) * (self.total - self._done) / (self._done - first)
        return f", about {left_s:.0f} s left" if left_s < 120 else f", about {left_s / 60:.0f} minutes left"

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def _say(self, text: str) -> None:
        print(f"pdvsim: {text}", file=sys.stderr, flush=True)

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task(f"{self.unit}, about" if self.about else self.unit, total=self.total)
        self._bar.start()
