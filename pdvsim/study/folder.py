"""A sweep on disk: a folder that stays consistent whenever the sweep is stopped.

    sweep.json          the resolved configuration, its fingerprint (`identity`), digests of what is made from the parts
    parts/00007.json    the row of point 7, once it is finished, with the identity of its sweep
    failed/00007.json   why point 7 has none
    details/            00007.requests.parquet (launches, deliveries): records, if requested; digests are in the part
    summary.parquet     all rows in the order of the points, made from the parts
    .lock               locked by the writing process; a crash releases it

The identity covers every setting, the version and the content of every input file; parts of another identity are
ignored. Every document has a digest, so a changed part is detected and run again (`sweepcheck`). Not supported: file
systems without file locks or atomic rename.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from pdvsim.common.files import TEMPORARY, digest, fingerprint, sealed, sha256, unbroken, write_all, write_whole
from pdvsim.common.outcomes import Outcome, Row
from pdvsim.common.version import __version__
from pdvsim.common.workers import ctrl_c_deferred
from pdvsim.sim.run import simulate
from pdvsim.study.backends import Backend, finished
from pdvsim.study.output import DETAILS, SCHEMA, dumps, parquet, plain, records, setting, settings
from pdvsim.study.sweep import Point, PointFailed, Sweep, flatten, frame_of, row_of, run_point
from pdvsim.study.sweepcheck import DamagedConfig, Survey, detail_file, failure_file, part_file, read_config, survey

if TYPE_CHECKING:
    import pandas as pd

SHOWN_DIFFERENCES = 5
NOT_COMPARED = ("date", "sha256", "identity", "made")


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

    @property
    def plot_file(self) -> Path:
        return self.path / "sweep.png"

    @cached_property
    def config(self) -> dict[str, Any]:
        """The sweep as it is run: defaults filled in, loads named, and a digest of every file it reads."""
        points = self.sweep.points()
        loads = dict.fromkeys((p.load_kind, p.load) for p in points)
        reading = {  # each once: thousands of points read the same files
            (e.traffic.dataset_path, e.traffic.tokenizer, e.acceptance.acceptance_trace, e.server.pair, e.hardware): e
            for e in (p.experiment for p in points)
        }
        files = sorted({path for experiment in reading.values() for path in experiment.files})
        resolved = settings(self.sweep) | {"loads": [{"kind": k, "load": setting(v)} for k, v in loads]}
        document = {
            "schema_version": SCHEMA,
            "pdvsim_version": __version__,
            "num_points": len(points),
            "save_detailed": self.save_detailed,
            "inputs": {path: digest(path) or "not a file" for path in files},
            "sweep": resolved,
        }
        return plain(document)  # type: ignore[no-any-return]

    @cached_property
    def identity(self) -> str:
        """Identity that marks the parts of this sweep."""
        return fingerprint(self.config)

    def check(self, resume: bool) -> None:
        """Reject a folder that holds a sweep, unless it is this one and `resume` is set. Writes nothing."""
        if not self.config_file.exists():
            return
        try:
            stored = read_config(self.path)
        except DamagedConfig:
            if not resume:
                raise
            self._check_parts()
            return
        if not resume:
            done = sum(1 for _ in self.path.glob("parts/[0-9]*"))
            raise ValueError(
                f"{self.path} holds a sweep ({done} of {stored['num_points']} points done): "
                "continue it with --resume, or name another folder with -o"
            )
        changed = _differences(stored, self.config)
        if changed:
            more = f" and {len(changed) - SHOWN_DIFFERENCES} more" if len(changed) > SHOWN_DIFFERENCES else ""
            shown = "".join(c if c.isprintable() else "?" for c in "; ".join(changed[:SHOWN_DIFFERENCES]))
            raise ValueError(
                f"{self.config_file}: it belongs to another sweep: {shown}{more}; name another folder with -o"
            )

    def _check_parts(self) -> None:
        """Reject a folder without a readable sweep.json whose points are all of another sweep."""
        state = self.survey()
        if state.other and not state.rows:
            raise ValueError(
                f"{self.config_file}: is damaged, and the points are of another sweep: "
                "give the flags of that sweep, or name another folder with -o"
            )

    @contextmanager
    def opened(self, date: str, resume: bool) -> Iterator[None]:
        """Make the folder and lock it; a ValueError if that fails."""
        self.check(resume)
        (self.path / "parts").mkdir(parents=True, exist_ok=True)
        with _locked(self.path):
            self.check(resume)  # another process may have written meanwhile
            self._remove_left_over()
            self._take_over(date)
            try:
                yield
            finally:
                self._remove_left_over()  # Ctrl-C kills the workers

    def _remove_left_over(self) -> None:
        """Remove the temporary files of killed processes."""
        for folder in (self.path, *(self.path / name for name in ("parts", "failed", "details"))):
            for left_over in folder.glob(TEMPORARY):
                left_over.unlink(missing_ok=True)

    def _take_over(self, date: str) -> None:
        """Write sweep.json unless it exists."""
        with contextlib.suppress(DamagedConfig):
            stored = read_config(self.path) if self.config_file.exists() else {}
            if unbroken(stored) and stored["identity"] == self.identity:
                return
        for stale in self.path.glob("failed/*.json"):
            stale.unlink()
        write_whole(self.config_file, self._config_bytes(date), replace=True)

    def _config_bytes(self, date: str, **more: Any) -> bytes:
        document = {"date": date, **self.config, "identity": self.identity, **more}
        return (dumps(sealed(document)) + "\n").encode()

    def survey(self) -> Survey:
        """Finished and failed points in the folder."""
        details = DETAILS if self.save_detailed else ()
        return survey(self.path, self.identity, len(self.sweep.points()), details)

    def run(
        self,
        backend: Backend,
        continue_on_error: bool,
        progress: Callable[[int], None],
        rows: dict[int, Row],
        notice: Callable[[str], None],
    ) -> int:
        """Run the missing points, writing each as it finishes; adds to `rows`.

        Returns the number of failures; without `continue_on_error` the first one is raised.
        """
        points = self.sweep.points()
        done = len(rows)
        missing = [(index, point) for index, point in enumerate(points) if index not in rows]
        failures = 0
        progress(done)
        folder = self.path.absolute() if self.save_detailed else None  # a worker may have another working directory
        outcomes = finished(partial(run_and_save, folder), missing, backend, notice)
        with contextlib.closing(outcomes):
            for count, outcome in enumerate(outcomes, done + 1):
                import pandas as pd  # noqa: F401  the summary needs them: now, while workers work, not after Ctrl-C
                import pyarrow.parquet as pq  # noqa: F401

                with ctrl_c_deferred():  # or the point's file would be there without its row
                    row = self.keep(outcome, points[outcome.index])
                    if row is not None:
                        rows[outcome.index] = row
                if row is None and not continue_on_error:
                    raise PointFailed(points[outcome.index], outcome)
                failures += row is None
                progress(count)
        return failures

    def keep(self, outcome: Outcome, point: Point) -> Row | None:
        """Write the outcome of a point; returns its row as it will be read back."""
        failure, identity = failure_file(self.path, outcome.index), {"identity": self.identity, "point": outcome.index}
        if outcome.row is None:
            reason = {**identity, **point.labels, "reason": outcome.reason, "traceback": outcome.traceback}
            failure.parent.mkdir(exist_ok=True)
            write_whole(failure, (dumps(sealed(plain(reason))) + "\n").encode(), replace=True)
            return None
        part = json.loads(json.dumps({**identity, **outcome.row}, default=lambda value: value.item()))  # numpy's
        write_whole(part_file(self.path, outcome.index), (json.dumps(sealed(part)) + "\n").encode(), replace=True)
        failure.unlink(missing_ok=True)
        row: Row = part["row"]
        return row

    def summarise(
        self, rows: dict[int, Row], draw: Callable[[pd.DataFrame], bytes] | None
    ) -> tuple[pd.DataFrame, list[Path]]:
        """All rows in the order of the points, and the files; files made from the same rows are kept.

        Without `draw`, as after an interruption, the plot is skipped, which takes longest.
        """
        frame = frame_of(rows[index] for index in sorted(rows))
        if not len(frame):
            return frame, [self.config_file]
        stored = read_config(self.path)
        saved = [self.summary_file, self.config_file, self.plot_file]
        of = fingerprint({"rows": [rows[index] for index in sorted(rows)]})
        files = {path.name: digest(path) for path in (self.summary_file, self.plot_file)}
        if stored.get("made") == {"of": of, "files": files}:
            return frame, saved
        content = {self.summary_file: parquet(frame)} | ({self.plot_file: draw(frame)} if draw else {})
        made_of = {"of": of, "files": {path.name: sha256(data) for path, data in content.items()}}
        config = {self.config_file: self._config_bytes(stored["date"], made=made_of)}
        write_all({self.plot_file: None, **content, **config}, replace=True)
        return frame, [path for path in saved if path in content or path in config]


def run_and_save(folder: Path | None, index: int, point: Point) -> Row:
    """Simulate one point: its row, and the digests of its records, which the worker writes to `folder`."""
    if folder is None:
        return {"row": run_point(index, point), "details": {}}
    result = simulate(point.experiment)
    (folder / "details").mkdir(exist_ok=True)
    digests: dict[str, str] = {}
    content = {detail_file(folder, index, name): write for name, write in records(result, digests).items()}
    write_all(content, replace=True)
    return {"row": row_of(index, point, result), "details": digests}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock the folder until the end of the block or of the process."""
    file = path / ".lock"
    if file.is_symlink():
        raise ValueError(f"{file}: is a link instead of the sweep's lock file; remove it")
    # an error without file locks: a marker file would outlive a crash
    lock = FileLock(file, blocking=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"{path}: another sweep is writing here; wait, or name another folder with -o") from None
    try:
        yield
    finally:
        lock.release()


def _differences(stored: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Differences between two configurations: "traffic.seed was 0, is 1"."""
    known = {key: value for key, value in stored.items() if key not in NOT_COMPARED}
    old, new = flatten(known, joint="."), flatten(now, joint=".")
    names = dict.fromkeys([*old, *new])
    return [
        f"{name.removeprefix('sweep.').removeprefix('base.')} was {_value_text(old, name)}, is {_value_text(new, name)}"
        for name in names
        if name not in old or name not in new or old[name] != new[name]
    ]


def _value_text(flat: dict[str, Any], name: str) -> str:
    return json.dumps(flat[name]) if name in flat else "not given"


def listed(points: Sequence[Point], done: set[int]) -> list[Row]:
    """The points of a sweep as a table, with their state."""
    return [{"point": i} | p.labels | {"state": "done" if i in done else "to do"} for i, p in enumerate(points)]
