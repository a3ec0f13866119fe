"""Sweep folders with records, as `pdvsim sweep --save-detailed` lays them out, made of real runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pdvsim.bench.pool import Backend, Outcome, Row
from pdvsim.bench.rows import ROWS, Rows
from pdvsim.bench.run import SWEEP, SweepDir, run
from pdvsim.bench.sweep import Sweep
from pdvsim.sim.config import Arch, Experiment, Hardware, Scoring, Traffic

WARMUP = 3
BASE = Experiment(
    traffic=Traffic(dataset_name="random", input_len=96, output_len=24, num_prompts=24),
    hardware=Hardware(profile="roofline"),
    scoring=Scoring(warmup_requests=WARMUP),
)


def experiment(arch: Arch, rate: float, seed: int) -> Experiment:
    return replace(BASE, arch=arch, traffic=replace(BASE.traffic, request_rate=rate, seed=seed))


def sweep_folder(
    folder: Path,
    archs: tuple[Arch, ...] = ("pd", "pdv"),
    rates: tuple[float, ...] = (20.0, 400.0),
    seeds: int = 2,
    detailed: bool = True,
    **vary: tuple[Any, ...],
) -> Path:
    """A finished sweep in `folder`."""
    where = SweepDir(folder, Sweep(archs, (), rates, seeds, BASE, vary), detailed)
    with where.opened(resume=False) as rows:
        run(where.sweep.points(), Backend(1), rows=rows, records=where.details)
    return folder


def edited_rows(folder: Path, change: Callable[[Row], Row], key: str | None = None) -> None:
    """Change every row of a sweep, or that of a key."""
    rows = Rows(folder / ROWS)
    keys = [point["key"] for point in asked(folder)["points"]] if key is None else [key]
    for key, entry in [(key, rows.get(key)) for key in keys]:
        rows.add(key, Outcome(0, {"row": change(entry.row), "details": entry.details}))


def edited_sweep(folder: Path, **changes: Any) -> None:
    """Change fields of what was asked of a sweep."""
    edited_rows(folder, lambda asked: asked | changes, SWEEP)


def asked(folder: Path) -> Row:
    """What was asked of a sweep; its points are keys and labels."""
    return dict(Rows(folder / ROWS).get(SWEEP).row)


def lines(path: Path) -> bytes:
    """The content of a file; the lines of rows are in the order of completion, and one may be repeated."""
    data = path.read_bytes()
    return b"".join(sorted(set(data.splitlines()))) if path.suffix == ".jsonl" else data


def content(folder: Path) -> dict[str, bytes]:
    """Every file that has to be the same however the sweep came about; the date, the plot and the lock are not."""
    paths = [*folder.rglob("*.parquet"), *folder.glob("rows.jsonl")]
    return {str(path.relative_to(folder)): lines(path) for path in paths}
