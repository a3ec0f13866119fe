"""Progress on standard error: a bar on a terminal, occasional lines elsewhere, nothing if quiet.

If progress was shown, the last line reports the total.
"""

from __future__ import annotations

import sys
import time
from typing import Any, Self

LINE_EVERY_S = 10.0


class Progress:
    """Call `update(done)`; the bar appears once the work has taken `after_s`, so a short run shows none.

    With `about` the total is an estimate.
    """

    def __init__(self, total: int, unit: str, quiet: bool = False, after_s: float = 0.5, about: bool = False) -> None:
        self.total, self.unit, self.quiet, self.about = total, unit, quiet, about
        self._done = 0
        self._first: tuple[float, int] | None = None  # when some had finished, and how many
        self._terminal = sys.stderr.isatty()
        self._started_s = time.monotonic()
        self._due_s = self._started_s + (after_s if self._terminal else max(after_s, 2.0))
        self._shown = False
        self._bar: Any = None  # of Rich, with its one task

    def __enter__(self) -> Self:
        self.update(0)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
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
        if self._terminal:
            self._bar = self._bar or self._started()
            self._bar.update(self._bar.task_ids[0], completed=done)
            return
        of = f"of {'about ' if self.about else ''}{self.total} {self.unit}"
        if done > self.total:  # it was an estimate
            of = self.unit
        self._say(f"{done} {of} after {self._elapsed_s:.0f} s{self._left()}")
        self._due_s = time.monotonic() + LINE_EVERY_S

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

    def _started(self) -> Any:
        from rich import progress
        from rich.console import Console

        columns = progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn()
        times = progress.TimeElapsedColumn(), progress.TimeRemainingColumn()
        bar = progress.Progress(*columns, *times, console=Console(stderr=True), transient=True)
        bar.add_task(f"{self.unit}, about" if self.about else self.unit, total=self.total)
        bar.start()
        return bar
