"""A sweep on disk: a folder that stays consistent whenever the sweep is stopped. Its only store is rows.jsonl.

    rows.jsonl        the row of each finished point, or why it failed (`rows`); under SWEEP, the settings and points
    details/          00007.requests.parquet (launches, deliveries): records, if requested; digests are in the row
    .lock             locked by the writing process; a crash releases it
    sweep.json, summary.parquet, sweep.png: settings, rows and plot, written at the end and never read

A folder may be continued with other flags: rows of other settings stay in rows.jsonl, and its last SWEEP line says
which of them are of the sweep that ran last.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdvsim.bench.output import dumps, parquet, plain, remove_temporary, settings
from pdvsim.bench.pool import Outcome, Row
from pdvsim.bench.rows import KEY_LENGTH, ROWS, KeptRun, Rows, locked
from pdvsim.bench.run import finished_points, keys_of
from pdvsim.bench.sweep import Sweep, frame_of
from pdvsim.common.files import digest, write_all
from pdvsim.common.version import __version__
from pdvsim.sim.assembly import covering_profile
from pdvsim.sim.reading import quoted

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 3  # of the SWEEP line
SWEEP = "sweep".ljust(KEY_LENGTH, "-")
REPAIR = "--resume with the sweep's flags repairs it"


@dataclass(frozen=True)
class SweepDir:
    """The folder of one sweep."""

    path: Path
    sweep: Sweep
    save_detailed: bool = False

    @property
    def details(self) -> Path | None:
        """Folder of the records, if they are saved."""
        return self.path / "details" if self.save_detailed else None

    @cached_property
    def config(self) -> dict[str, Any]:
        """The sweep as it is run: defaults filled in, loads named, and a digest of every file it reads."""
        points = self.sweep.points()
        loads = dict.fromkeys((p.load_kind, p.load) for p in points)
        resolved = settings(self.sweep) | {"loads": [{"kind": k, "load": plain(v, "inf")} for k, v in loads]}
        files = sorted({path for point in points for path in point.experiment.files})
        return {
            "schema_version": SCHEMA,
            "pdvsim_version": __version__,
            "num_points": len(points),
            "save_detailed": self.save_detailed,
            "inputs": {path: digest(path) or "not a file" for path in files},
            "sweep": resolved,
        }

    def check(self, resume: bool) -> None:
        """Reject a folder that holds a sweep, unless `resume` is set."""
        path = self.path / ROWS
        if not resume and path.is_file() and not path.is_symlink() and path.stat().st_size:
            try:
                stored = stored_sweep(self.path)
            except ValueError as error:
                raise ValueError(f"{error}; {REPAIR}") from None
            raise ValueError(
                f"{self.path} holds a sweep ({len(stored.done)} of {len(stored.points)} points done): "
                "continue it with --resume, or name another folder with -o"
            )

    @contextmanager
    def opened(self, resume: bool) -> Iterator[Rows]:
        """Make and lock the folder; its rows. A ValueError if that fails."""
        self.check(resume)
        with locked(self.path):
            self.check(resume)  # another process may have written meanwhile
            self._clear()
            if self.details is not None:
                self.details.mkdir(exist_ok=True)
            rows, points = Rows(self.path / ROWS), self.sweep.points()
            keys = zip(keys_of(points, rows, self.details), points, strict=True)
            header = {**self.config, "points": [{"key": key} | point.labels for key, point in keys]}
            header["provenance"] = covering_profile(points[0].experiment).provenance
            known = rows.get(SWEEP)
            if known is None or json.dumps(known.row) != json.dumps(header):
                rows.add(SWEEP, Outcome(0, {"row": header, "details": {}}))
            try:
                yield rows
            finally:
                self._clear()

    def _clear(self) -> None:
        """Remove what killed processes left."""
        for folder in (self.path, self.path / "details"):
            remove_temporary(folder)

    def done(self) -> dict[int, Row]:
        """The rows of the finished points."""
        return finished_points(self.sweep.points(), Rows(self.path / ROWS), self.details)[0]

    def export(
        self, rows: Sequence[Row], date: str, draw: Callable[[pd.DataFrame], bytes] | None
    ) -> tuple[pd.DataFrame, list[Path]]:
        """All rows in the order of the points, and the files made of them.

        Without `draw`, as after an interruption, the plot is skipped, which takes longest.
        """
        frame, plot = frame_of(rows), self.path / "sweep.png"
        content: dict[Path, bytes] = {}
        if rows:
            content[self.path / "summary.parquet"] = parquet(frame)
            if draw is not None:
                content[plot] = draw(frame)
        content[self.path / "sweep.json"] = (dumps({"date": date} | self.config) + "\n").encode()
        write_all({plot: None, **content}, replace=True)
        return frame, list(content)


@dataclass(frozen=True)
class StoredSweep:
    """What the folder of a sweep has: its settings, and the points in order, each with its labels and its row."""

    header: dict[str, Any]
    points: list[tuple[Row, KeptRun | None]]
    failed: int  # points
    damaged: int  # lines, as long as a point is missing
    others: int  # rows of other settings

    @property
    def done(self) -> list[tuple[int, Row, KeptRun]]:
        """Number, labels and row of each finished point."""
        return [(at, labels, kept) for at, (labels, kept) in enumerate(self.points) if kept is not None]


def stored_sweep(folder: Path) -> StoredSweep:
    """What a folder has; a ValueError of one line if it holds no sweep of this version."""
    path = folder / ROWS
    if not path.is_file():
        raise ValueError(f"{path}: No such file: not a sweep's folder")
    rows = Rows(path)
    kept = rows.get(SWEEP)
    if kept is None:
        raise ValueError(f"{path}: does not say which sweep it is of, or that line is damaged")
    if (version := kept.row.get("schema_version")) != SCHEMA:
        raise ValueError(f"{path}: schema_version is {quoted(version)}, this version reads {SCHEMA}")
    labels = [{name: value for name, value in point.items() if name != "key"} for point in kept.row["points"]]
    keys = [point["key"] for point in kept.row["points"]]
    entries = list(map(rows.get, keys))
    missing = {key for key, entry in zip(keys, entries, strict=True) if entry is None}
    others = len(rows) - 1 - len(set(keys) - missing)
    points, damaged = list(zip(labels, entries, strict=True)), rows.damaged if missing else 0
    return StoredSweep(kept.row, points, len(rows.failed & missing), damaged, others)
