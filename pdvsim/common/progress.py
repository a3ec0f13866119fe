"""How far a run is, on standard error: a bar on a terminal, now and then a line elsewhere, nothing when quiet."""

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
    """Call `update(done)`; the bar appears once the work has taken `after_s`, so a short run shows none."""

    def __init__(self, total: int, unit: str, quiet: bool = False, after_s: float = 0.5) -> None:
        self.total = total
        self.unit = unit
        self.quiet = quiet
        self._terminal = sys.stderr.isatty()
        self._started_s = time.monotonic()
        self._due_s = self._started_s + (after_s if self._terminal else max(after_s, 2.0))
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

    def update(self, done: int) -> None:
        """`done` of the total are done."""
        if self.quiet or time.monotonic() < self._due_s:
            return
        if not self._terminal:
            elapsed_s = time.monotonic() - self._started_s
            print(f"pdvsim: {done} of {self.total} {self.unit} after {elapsed_s:.0f} s", file=sys.stderr, flush=True)
            self._due_s = time.monotonic() + LINE_EVERY_S
            return
        if self._bar is None:
            self._show()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done)

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
        self._task = self._bar.add_task(self.unit, total=self.total)
        self._bar.start()
