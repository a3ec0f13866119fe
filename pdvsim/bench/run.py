"""Run many experiments, each once: those whose rows are kept are not run again.

A sweep's folder stays consistent whenever the sweep is stopped. Its only store is rows.jsonl.

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
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdvsim.bench import output
from pdvsim.bench.band import ends, spanned
from pdvsim.bench.length import long_enough
from pdvsim.bench.output import damaged_records, record_files, write_records
from pdvsim.bench.pool import HERE, Backend, Outcome, Row, finished
from pdvsim.bench.rows import KEY_LENGTH, ROWS, KeptRun, Rows, locked
from pdvsim.bench.sweep import Point, Sweep, flatten, frame_of
from pdvsim.common.files import digest, sha256, write_all
from pdvsim.common.version import __version__
from pdvsim.sim.assembly import covering_profile
from pdvsim.sim.config import Experiment
from pdvsim.sim.policies import ARCHITECTURES
from pdvsim.sim.reading import quoted
from pdvsim.sim.records import Result
from pdvsim.sim.run import simulate

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 3  # of the SWEEP line
SWEEP = "sweep".ljust(KEY_LENGTH, "-")
REPAIR = "--resume with the sweep's flags repairs it"
KNOWN = (  # what a row has of a run besides its metrics
    "profile", "foundation", "forward_error_bar", "gpu", "gpus", "kv_capacity_tokens", "kv_peak_tokens",
    "kv_peak_shared_tokens", "prefix_cache_evictions", "kv_gpu_hit_tokens", "kv_host_hit_tokens",
    "kv_ssd_hit_tokens", "kv_host_slower_tokens", "kv_ssd_slower_tokens",
)  # fmt: skip


class PointFailed(ValueError):
    """Why a point failed."""

    def __init__(self, point: Point, outcome: Outcome) -> None:
        super().__init__(f"{outcome.reason} (point {outcome.index}: {point})")


class SweepInterrupted(KeyboardInterrupt):
    """Ctrl-C during runs; `rows` are those of the finished points."""

    def __init__(self, rows: list[Row]) -> None:
        super().__init__("interrupted")
        self.rows = rows


def run(
    points: Sequence[Point],
    backend: Backend = HERE,
    progress: Callable[[int], None] = lambda done: None,
    rows: Rows | None = None,
    records: Path | None = None,
    keep_going: bool = False,
) -> list[Row]:
    """The rows of these points, in order. One that fails is PointFailed, or with `keep_going` has none.

    What `rows` has is not run again, and what is run is kept there at once. Ctrl-C raises SweepInterrupted. `progress`
    is called with the number of finished points. Records of runs go to the folder `records`.
    """
    kept = Rows() if rows is None else rows
    done, missing = finished_points(points, kept, records)
    progress(len(done))
    todo = [(indices[0], points[indices[0]]) for indices in missing.values()]  # equal points run once
    names = dict(zip((index for index, _ in todo), missing, strict=True))
    try:
        with closing(finished(partial(simulated, records and records.absolute()), todo, backend)) as outcomes:
            for outcome in outcomes:
                point, key = points[outcome.index], names[outcome.index]
                # what a user's policy does is not in its key: only its own sweep finds its row
                kept.add(key, outcome, write=not kept.shared or point.experiment.arch in ARCHITECTURES)
                if outcome.row is None and not keep_going:
                    raise PointFailed(point, outcome)
                if (entry := kept.get(key)) is not None:
                    done |= {index: labelled(index, points[index], entry.row) for index in missing[key]}
                progress(len(done))
    except KeyboardInterrupt:
        done, _ = finished_points(points, kept, records)  # it may have come between a row and its count
        raise SweepInterrupted([done[index] for index in sorted(done)]) from None
    return [done[index] for index in sorted(done)]


def finished_points(
    points: Sequence[Point], rows: Rows, records: Path | None = None
) -> tuple[dict[int, Row], dict[str, list[int]]]:
    """The rows of the points that are finished, with whole records, and the numbers of the others by their key."""
    done, missing = dict[int, Row](), dict[str, list[int]]()
    for index, (point, key) in enumerate(zip(points, keys_of(points, rows, records), strict=True)):
        entry = rows.get(key)
        if entry is None or (records is not None and damaged_records(records / f"{index:05}", entry.details)):
            missing.setdefault(key, []).append(index)
        else:
            done[index] = labelled(index, point, entry.row)
    return done, missing


def keys_of(points: Sequence[Point], rows: Rows, records: Path | None = None) -> list[str]:
    """The key of each point; one with records has a key of its own, as its records are files of its number."""
    keys = [rows.key(point.experiment) for point in points]
    if records is None:
        return keys
    return [sha256(f"{index} {key}".encode())[:KEY_LENGTH] for index, key in enumerate(keys)]


def labelled(index: int, point: Point, row: Row) -> Row:
    """The row with the labels of its point first."""
    first = {"point": index} | point.labels
    return first | {name: value for name, value in row.items() if name not in first}


def simulated(records: Path | None, index: int, point: Point) -> Row:
    """Simulate one point: its row, and the digests of its records, which go to a folder."""
    experiment = long_enough(point.experiment)
    result = simulate(experiment)
    details: dict[str, Any] = {}
    if records is not None:
        files = record_files(records / f"{index:05}")
        facts = {"bandwidths_bytes_per_s": result.meta["bandwidths_bytes_per_s"]}
        details = {**write_records(files, result, replace=True), "facts": facts}
    return {"row": row_of(experiment, result), "details": details}


def row_of(experiment: Experiment, result: Result) -> Row:
    """The row of a run: what produced it, and its metrics with their error range."""
    known = {name: result.meta[name] for name in KNOWN if name in result.meta}
    return known | flatten(spanned(result, ends(experiment)))


# a sweep on disk -----------------------------------------------------------------------------------------------------


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
        each = dict.fromkeys((point.load_kind, point.load) for point in points)
        loads = [{"kind": kind, "load": output.plain(load, "inf")} for kind, load in each]
        files = sorted({path for point in points for path in point.experiment.files})
        return {
            "schema_version": SCHEMA,
            "pdvsim_version": __version__,
            "num_points": len(points),
            "save_detailed": self.save_detailed,
            "inputs": {path: digest(path) or "not a file" for path in files},
            "sweep": output.settings(self.sweep) | {"loads": loads},
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
            output.remove_temporary(folder)

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
            content[self.path / "summary.parquet"] = output.parquet(frame)
            if draw is not None:
                content[plot] = draw(frame)
        content[self.path / "sweep.json"] = (output.dumps({"date": date} | self.config) + "\n").encode()
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
