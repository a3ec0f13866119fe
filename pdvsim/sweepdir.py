"""A sweep on disk: a folder that is never half written, whatever stops the sweep.

    sweep.json       the resolved configuration, and the version that wrote it
    parts/00007.parquet   the row of point 7, once it is finished
    failed/00007.json     why point 7 has none
    details/00007.requests.parquet (launches, deliveries)   its records, where asked for
    summary.parquet  all rows in the order of the points, made from the parts
    .lock            locked by whoever writes; the lock ends with its process, so a crash leaves none behind

Every file is written under another name, brought to the disk and then renamed: it is there whole or not at all.
Not covered: folders on a file system without flock or atomic rename, and systems without flock (Windows).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdvsim import Run, __version__
from pdvsim.output import DETAILS, dumps, plain, setting, settings
from pdvsim.sim.backends import Backend, Outcome, Row, finished
from pdvsim.sim.files import write_whole
from pdvsim.sim.reading import quoted, read_json, read_table, said
from pdvsim.sim.run import simulate
from pdvsim.sim.sweep import Point, PointFailed, Sweep, flatten, frame_of, row_of, run_point

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 1
SHOWN = 5  # differences named in a refusal


@dataclass(frozen=True)
class SweepDir:
    """The folder of one sweep."""

    path: Path
    sweep: Sweep
    save_detailed: bool = False

    @property
    def config_file(self) -> Path:
        return self.path / "sweep.json"

    @property
    def summary_file(self) -> Path:
        return self.path / "summary.parquet"

    def part(self, index: int) -> Path:
        """Where a point's row is."""
        return self.path / "parts" / f"{index:05}.parquet"

    def failure(self, index: int) -> Path:
        """Where the reason is why a point has no row."""
        return self.path / "failed" / f"{index:05}.json"

    def detail(self, index: int, name: str) -> Path:
        """Where a point's requests, launches or deliveries are."""
        return self.path / "details" / f"{index:05}.{name}.parquet"

    def config(self, date: str) -> dict[str, Any]:
        """The sweep as it is run: defaults filled in, loads named, and a digest of every file it reads."""
        points = self.sweep.points()
        loads = dict.fromkeys((p.load_kind, p.load) for p in points)
        files = sorted({path for p in points for path in p.experiment.files})
        resolved = settings(self.sweep) | {"loads": [{"kind": k, "load": setting(v)} for k, v in loads]}
        document = {
            "schema_version": SCHEMA,
            "pdvsim_version": __version__,
            "date": date,
            "num_points": len(points),
            "save_detailed": self.save_detailed,
            "inputs": {path: _digest(path) for path in files},
            "sweep": resolved,
        }
        return plain(document)  # type: ignore[no-any-return]

    def check(self, date: str, resume: bool) -> None:
        """Refuse a folder that holds a sweep, unless it is this one and `resume` is asked for. Writes nothing."""
        if not self.config_file.exists():
            return
        stored = read_config(self.path)
        if not resume:
            done = sum(1 for _ in self.path.glob("parts/*.parquet"))
            raise ValueError(
                f"{self.path} holds a sweep ({done} of {stored['num_points']} points done): "
                "give --resume to go on with it, or -o another folder"
            )
        changed = _differences(stored, self.config(date))
        if changed:
            more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
            shown = "".join(c if c.isprintable() else "?" for c in "; ".join(changed[:SHOWN]))
            raise ValueError(
                f"{self.config_file}: the sweep there is another one: {shown}{more}; give -o another folder"
            )

    @contextmanager
    def opened(self, date: str, resume: bool) -> Iterator[None]:
        """Make the folder and hold it against other writers; a ValueError if it cannot be ours."""
        self.check(date, resume)
        (self.path / "parts").mkdir(parents=True, exist_ok=True)
        with _locked(self.path):
            self.check(date, resume)  # another writer may have come in between
            for left_over in self.path.rglob(".*.tmp"):  # of a writer that was killed
                left_over.unlink(missing_ok=True)
            if not self.config_file.exists():
                write_whole(self.config_file, (dumps(self.config(date)) + "\n").encode())
            yield

    def done(self) -> set[int]:
        """The points whose rows are there and right; a part that is neither is removed, to be run again."""
        found = set()
        for index, point in enumerate(self.sweep.points()):
            path = self.part(index)
            if not path.exists():
                continue
            row = _read_row(path)
            # as text: nan is the load of a trace, and not equal to itself
            right = row is not None and str({n: row.get(n) for n in ("point", *point.labels)}) == str(
                {"point": index} | point.labels
            )
            if right and all(self.detail(index, name).exists() for name in DETAILS if self.save_detailed):
                found.add(index)
            else:
                path.unlink()
        return found

    def run(
        self, backend: Backend, continue_on_error: bool, progress: Callable[[int], None], rows: dict[int, Row]
    ) -> int:
        """Run what is missing, each point written and put into `rows` as it finishes.

        Returns how many failed; without `continue_on_error` the first that does is raised.
        """
        points = self.sweep.points()
        done = self.done()
        missing = [(index, point) for index, point in enumerate(points) if index not in done]
        failures = 0
        progress(len(done))
        here = replace(self, path=self.path.absolute())  # a worker may have another folder
        outcomes = finished(partial(run_saved, here) if self.save_detailed else run_point, missing, backend)
        with contextlib.closing(outcomes):
            for count, outcome in enumerate(outcomes, len(done) + 1):
                self.keep(outcome, points[outcome.index])
                if outcome.row is not None:
                    rows[outcome.index] = outcome.row
                elif continue_on_error:
                    failures += 1
                else:
                    raise PointFailed(points[outcome.index], outcome)
                progress(count)
        return failures

    def keep(self, outcome: Outcome, point: Point) -> None:
        """Write what became of a point."""
        failure = self.failure(outcome.index)
        if outcome.row is None:
            reason = {"point": outcome.index, **point.labels, "reason": outcome.reason, "traceback": outcome.traceback}
            failure.parent.mkdir(exist_ok=True)
            write_whole(failure, (dumps(reason) + "\n").encode())
            return
        write_whole(self.part(outcome.index), _row_bytes(outcome.row))
        failure.unlink(missing_ok=True)

    def summarise(self, known: Mapping[int, Row]) -> pd.DataFrame:
        """All rows in the order of the points, from the parts; written as summary.parquet if there is any.

        `known` are those of this process: reading a part takes longer than a row is large.
        """
        rows = (known.get(index) or _read_row(self.part(index)) for index in sorted(self.indices()))
        frame = frame_of(row for row in rows if row is not None)
        if len(frame):
            buffer = io.BytesIO()
            frame.to_parquet(buffer, index=False)
            write_whole(self.summary_file, buffer.getvalue())
        return frame

    def indices(self) -> list[int]:
        """The points that have a part."""
        return [int(path.stem) for path in self.path.glob("parts/*.parquet")]


def run_saved(folder: SweepDir, index: int, point: Point) -> Row:
    """Simulate one point; its records are written by the worker that has them."""
    run = Run(simulate(point.experiment))
    folder.detail(index, "").parent.mkdir(exist_ok=True)
    for name in DETAILS:
        buffer = io.BytesIO()
        getattr(run, name).to_parquet(buffer, index=False)
        write_whole(folder.detail(index, name), buffer.getvalue())
    return row_of(index, point, run.result)


def read_config(path: Path) -> dict[str, Any]:
    """The sweep.json of a folder; a ValueError of one line if it is not one that this version wrote."""
    file = path / "sweep.json"
    try:
        document = read_json(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read ({said(error)})") from None
    if not isinstance(document, dict):
        raise ValueError(f"{file}: expected a JSON object")
    schema, version = document.get("schema_version"), document.get("pdvsim_version")
    if schema != SCHEMA:
        raise ValueError(
            f"{file}: schema_version is {quoted(schema)}, this version reads {SCHEMA}; give another folder"
        )
    if version != __version__:
        raise ValueError(f"{file}: written by pdvsim {quoted(version)}, this is {__version__}; give another folder")
    for name, kind in (("sweep", dict), ("num_points", int), ("inputs", dict)):
        if not isinstance(document.get(name), kind):
            raise ValueError(f"{file}: {name} is missing or broken; give another folder")
    return document


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the folder until the end of the block, or of the process, however that comes."""
    import fcntl

    with open(path / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{path}: another sweep is writing here; wait for it, or give -o another folder") from None
        yield


def _row_bytes(row: Row) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    # of one row, whatever else a file may hold costs more than it saves
    plainly = {"compression": "none", "use_dictionary": False, "write_statistics": False, "store_schema": False}
    pq.write_table(pa.Table.from_pylist([row]), buffer, **plainly)
    return buffer.getvalue()


def _read_row(path: Path) -> Row | None:
    """The row of a part; None if it holds no single row that can be read."""
    try:
        rows: list[Row] = read_table(path).to_pylist()
    except (OSError, ValueError):
        return None
    return rows[0] if len(rows) == 1 else None


def _digest(path: str) -> str:
    if not Path(path).is_file():
        return "not a file"
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _differences(stored: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between two configurations, the date apart: "traffic.seed was 0, is 1"."""
    old, new = flatten(stored, joint="."), flatten(now, joint=".")
    names = dict.fromkeys([*old, *new])
    return [
        f"{name.removeprefix('sweep.').removeprefix('base.')} was {_said(old, name)}, is {_said(new, name)}"
        for name in names
        if name != "date" and (name not in old or name not in new or old[name] != new[name])
    ]


def _said(flat: dict[str, Any], name: str) -> str:
    return json.dumps(flat[name]) if name in flat else "not given"


def listed(points: Sequence[Point], done: set[int]) -> list[Row]:
    """The points of a sweep as rows of a table, with what is done of them."""
    return [{"point": i} | p.labels | {"state": "done" if i in done else "to do"} for i, p in enumerate(points)]
