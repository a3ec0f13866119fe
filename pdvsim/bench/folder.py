"""A sweep on disk: a folder that stays consistent whenever the sweep is stopped.

    sweep.json        the resolved configuration, the keys of its points in order, digests of what is made of the rows
    rows.jsonl        the row of each finished point, or why it failed (`rows`)
    details/          00007.requests.parquet (launches, deliveries): records, if requested; digests are in the row
    summary.parquet   all rows in the order of the points
    sweep.png         its plot
    .lock             locked by the writing process; a crash releases it

A folder may be continued with other flags: rows of other settings stay in rows.jsonl, and the other files are of the
sweep that ran last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdvsim.bench.output import SWEEP_SCHEMA, damaged_records, dumps, parquet, plain, setting, settings
from pdvsim.bench.pool import Row
from pdvsim.bench.rows import ROWS, Rows, locked
from pdvsim.bench.run import finished_points, keys_of
from pdvsim.bench.sweep import Sweep, frame_of
from pdvsim.common.files import TEMPORARY, digest, sealed, sha256, unbroken, write_all, write_whole
from pdvsim.common.version import __version__
from pdvsim.sim.reading import error_text, quoted, read_json

if TYPE_CHECKING:
    import pandas as pd

SHOWN_NAMES = 5
REPAIR = "--resume with the sweep's flags repairs it"


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
    def details(self) -> Path | None:
        """Folder of the records, if they are saved."""
        return self.path / "details" if self.save_detailed else None

    @cached_property
    def config(self) -> dict[str, Any]:
        """The sweep as it is run: defaults filled in, loads named, and a digest of every file it reads."""
        points = self.sweep.points()
        loads = dict.fromkeys((p.load_kind, p.load) for p in points)
        resolved = settings(self.sweep) | {"loads": [{"kind": k, "load": setting(v)} for k, v in loads]}
        files = sorted({path for point in points for path in point.experiment.files})
        return {
            "schema_version": SWEEP_SCHEMA,
            "pdvsim_version": __version__,
            "num_points": len(points),
            "save_detailed": self.save_detailed,
            "inputs": {path: digest(path) or "not a file" for path in files},
            "sweep": resolved,
            "keys": " ".join(keys_of(points, Rows(), self.details)),
        }

    def check(self, resume: bool) -> None:
        """Reject a folder that holds a sweep, unless `resume` is set, or whatever this version cannot continue."""
        if not self.config_file.exists():
            return
        stored = read_config(self.path)
        if not resume and stored is None:
            raise ValueError(f"{self.config_file}: is damaged; {REPAIR}")
        if not resume and stored is not None:
            raise ValueError(
                f"{self.path} holds a sweep ({len(Rows(self.path / ROWS))} of {stored.get('num_points')} points done): "
                "continue it with --resume, or name another folder with -o"
            )

    @contextmanager
    def opened(self, date: str, resume: bool) -> Iterator[Rows]:
        """Make and lock the folder; its rows. A ValueError if that fails."""
        self.check(resume)
        with locked(self.path):
            self.check(resume)  # another process may have written meanwhile
            if self.details is not None:
                self.details.mkdir(exist_ok=True)
            stored = read_config(self.path) if self.config_file.exists() else None
            if stored is None or any(stored.get(name) != value for name, value in plain(self.config).items()):
                write_whole(self.config_file, self._config_bytes(date), replace=True)
            try:
                yield Rows(self.path / ROWS)
            finally:
                for left_over in self.path.rglob(TEMPORARY):  # of killed workers
                    left_over.unlink(missing_ok=True)

    def _config_bytes(self, date: str, **more: Any) -> bytes:
        return (dumps(sealed({"date": date, **plain(self.config), **more})) + "\n").encode()

    def done(self) -> dict[int, Row]:
        """The rows of the finished points."""
        return finished_points(self.sweep.points(), Rows(self.path / ROWS), self.details)[0]

    def summarise(
        self, rows: Sequence[Row], date: str, draw: Callable[[pd.DataFrame], bytes] | None
    ) -> tuple[pd.DataFrame, list[Path]]:
        """All rows in the order of the points, and the files made of them.

        Without `draw`, as after an interruption, the plot is skipped, which takes longest.
        """
        frame = frame_of(rows)
        table, plot = self.path / "summary.parquet", self.path / "sweep.png"
        if not rows:
            return frame, [self.config_file]
        content = {table: parquet(frame)} | ({plot: draw(frame)} if draw else {})
        made = {path.name: sha256(data) for path, data in content.items()}
        stored = read_config(self.path) or {}
        config = {self.config_file: self._config_bytes(str(stored.get("date", date)), made=made)}
        write_all({plot: None, **content, **config}, replace=True)
        return frame, [*content, self.config_file]


def read_config(folder: Path) -> dict[str, Any] | None:
    """The sweep.json of a folder; None if it is damaged, a ValueError of one line if this version did not write it."""
    file = folder / "sweep.json"
    try:
        document = read_json(file)
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error_text(error)})") from None
    except ValueError:
        return None
    if not isinstance(document, dict):
        return None
    schema = document.get("schema_version")
    if schema != SWEEP_SCHEMA:
        raise ValueError(
            f"{file}: schema_version is {quoted(schema)}, this version reads {SWEEP_SCHEMA}; name another folder"
        )
    typed = isinstance(document.get("keys"), str) and isinstance(document.get("made", {}), dict)
    return document if typed and unbroken(document) else None


@dataclass(frozen=True)
class ResultCheck:
    """Whether a result is complete, and its problems."""

    whole: bool
    lines: list[str]


def check_sweep(folder: Path) -> ResultCheck:
    """The state of a sweep's folder; a ValueError if it is not one."""
    config = read_config(folder)
    if config is None:
        return ResultCheck(False, [f"damaged: sweep.json; {REPAIR}"])
    rows, keys = Rows(folder / ROWS), config["keys"].split()
    entries = [rows.get(key) for key in keys]
    missing = [f"{index:05}" for index, entry in enumerate(entries) if entry is None]
    damaged = [f"{ROWS} ({rows.damaged} lines)"] if rows.damaged else []
    damaged += [name for name, is_now in config.get("made", {}).items() if digest(folder / name) != is_now]
    if config.get("save_detailed"):
        for index, entry in enumerate(entries):
            files = [] if entry is None else damaged_records(folder / "details", index, entry.details)
            damaged += [f"details/{name}" for name in files]
    failed = f", {len(rows.failed & set(keys))} failed" if rows.failed & set(keys) else ""
    lines = [f"{len(keys) - len(missing)} of {len(keys)} points are complete{failed}"]
    lines += [f"damaged: {some(damaged)}; {REPAIR}"] if damaged else []
    lines += [f"missing or unusable: {some(missing)}"] if missing else []
    if (other := len(rows) - len(set(keys)) + len(missing)) > 0:
        lines += [f"{other} rows of other settings"]
    return ResultCheck(not missing and not damaged, lines)


def some(names: Sequence[str]) -> str:
    """The first few names, printable, and how many more there are."""
    shown = ", ".join("".join(c if c.isprintable() else "?" for c in name) for name in names[:SHOWN_NAMES])
    return shown + (f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else "")


def check_run(path: Path) -> ResultCheck:
    """The state of a run's document and its records; a ValueError if it is not one."""
    try:
        document = read_json(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}: neither a sweep's folder nor a run's JSON file") from None
    except ValueError:
        return ResultCheck(False, ["damaged: not JSON, or truncated"])
    if not isinstance(document, dict) or "pdvsim_version" not in document:
        raise ValueError(f"{path}: neither a sweep's folder nor a run's JSON file")
    if not unbroken(document) or "records_sha256" not in document:
        return ResultCheck(False, ["damaged: the document was changed"])
    records = document["records_sha256"]
    bad = [name for name, was in records.items() if digest(path.with_name(name)) != was]
    lines = [f"the document is complete, and {len(records) - len(bad)} of {len(records)} record files"]
    return ResultCheck(not bad, lines + ([f"damaged or missing: {some(bad)}"] if bad else []))
