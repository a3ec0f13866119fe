"""Run many experiments, each once: those whose rows are kept are not run again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from pdvsim.bench.band import ends, spanned
from pdvsim.bench.length import long_enough
from pdvsim.bench.output import damaged_records, record_files, write_records
from pdvsim.bench.pool import HERE, Backend, Outcome, Row, finished
from pdvsim.bench.rows import KEY_LENGTH, Rows
from pdvsim.bench.sweep import Point, flatten
from pdvsim.common.files import sha256
from pdvsim.sim.config import Experiment
from pdvsim.sim.policies import ARCHITECTURES
from pdvsim.sim.records import Result
from pdvsim.sim.run import simulate

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
