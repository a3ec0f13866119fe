"""Sweep folders with records, as `pdvsim sweep --save-detailed` lays them out, made of real runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from pdvsim import Run, __version__
from pdvsim.bench.output import DETAILS, dumps, settings
from pdvsim.bench.sweep import flatten
from pdvsim.common.files import SEAL, sealed
from pdvsim.sim.config import Arch, Experiment, Hardware, Scoring, Traffic
from pdvsim.sim.run import simulate

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
    **header: Any,
) -> Path:
    """A finished sweep in `folder`; `header` replaces fields of its sweep.json."""
    (folder / "details").mkdir(parents=True)
    rows = []
    for rate in rates:
        for arch in archs:
            for seed in range(seeds):
                run = Run(simulate(experiment(arch, rate, seed)))
                point = {"point": len(rows), "arch": arch, "pair": BASE.server.pair, "load_kind": "request_rate"}
                point |= {"load": rate, "run": seed, "seed": seed}
                point |= {name: run.result.meta[name] for name in ("profile", "foundation", "gpu", "gpus")}
                if detailed:
                    for name in DETAILS:
                        path = folder / "details" / f"{len(rows):05d}.{name}.parquet"
                        getattr(run, name).to_parquet(path, index=False)
                rows.append(point | flatten(run.metrics))
    pd.DataFrame(rows).to_parquet(folder / "summary.parquet", index=False)
    document = {"date": "20260101-000000", "pdvsim_version": __version__, "schema_version": 2}
    document |= {"sweep": {"archs": archs, "base": settings(BASE)}}
    (folder / "sweep.json").write_text(dumps(document | header))
    return folder


def lines(path: Path) -> bytes:
    """The content of a file; the lines of rows are in the order of completion, and one may be repeated."""
    data = path.read_bytes()
    return b"".join(sorted(set(data.splitlines()))) if path.suffix == ".jsonl" else data


def content(folder: Path) -> dict[str, bytes]:
    """Every file that has to be the same however the sweep came about; the date and the lock are not."""
    paths = [*folder.rglob("*.parquet"), *folder.glob("rows.jsonl")]
    return {str(path.relative_to(folder)): lines(path) for path in paths}


def edited(path: Path, **changes: Any) -> None:
    """Change fields of a JSON file, sealed again if it was; None removes one."""
    document = json.loads(path.read_text()) | changes
    document = {k: v for k, v in document.items() if v is not None}
    path.write_text(json.dumps(sealed(document) if SEAL in document else document))
