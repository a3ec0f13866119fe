"""Documents and files: what a result is called, what is in it, and whether it can be written before a run starts."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from pdvsim import __version__
from pdvsim.sim.config import Experiment
from pdvsim.sim.records import Result
from pdvsim.sim.stats import Interval


def now() -> str:
    """The date as vLLM writes it in results and their names."""
    return datetime.now().strftime("%Y%m%d-%H%M%S")


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: nan and inf become null, intervals and tuples what they consist of."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Interval):
        return plain(asdict(value))
    return plain(value.item()) if hasattr(value, "item") else value  # numpy's scalars


def dumps(document: Any) -> str:
    """One JSON document, strict and readable."""
    return json.dumps(plain(document), indent=2, allow_nan=False)


def settings(config: Any) -> dict[str, Any]:
    """A configuration as nested plain values; an infinite rate is "inf", as vLLM writes it."""
    return {key: setting(value) for key, value in asdict(config).items()}


def setting(value: Any) -> Any:
    """`value` with infinite numbers as "inf"."""
    if isinstance(value, dict):
        return {key: setting(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [setting(item) for item in value]
    return "inf" if value == math.inf else value


def run_document(result: Result, metrics: dict[str, Any], date: str, label: str = "pdvsim") -> dict[str, Any]:
    """The result of one run: vLLM's keys first, then where the figures come from and the whole configuration."""
    experiment: Experiment = result.experiment
    traffic = experiment.traffic
    return {
        "date": date,
        "endpoint_type": "pdvsim",
        "backend": "pdvsim",
        "label": label,
        "model_id": experiment.server.pair.partition(":")[2],
        "tokenizer_id": traffic.tokenizer,
        "num_prompts": len(result.requests["id"]),
        "request_rate": setting(traffic.request_rate),
        "burstiness": traffic.burstiness,
        "max_concurrency": traffic.max_concurrency,
        "arch": experiment.arch,
        "pair": experiment.server.pair,
        "seed": traffic.seed,
        **{key: value for key, value in result.meta.items() if isinstance(value, str | int | float | None)},
        **metrics,
        "pdvsim_version": __version__,
        "config": settings(experiment),
    }


def result_name(experiment: Experiment, label: str, date: str) -> str:
    """The file name vLLM would give, with the architecture for the model."""
    traffic = experiment.traffic
    concurrency = "" if traffic.max_concurrency is None else f"-concurrency{traffic.max_concurrency}"
    return f"{label}-{traffic.request_rate}qps{concurrency}-{experiment.arch}-{date}.json"


def check_file(path: Path) -> Path:
    """`path` if it can be written, its folder made if need be; an OSError otherwise. Leaves no new file behind."""
    if not path.parent.exists():
        path.parent.mkdir(parents=True)
    existed = path.exists()
    with path.open("ab"):
        pass
    if not existed:
        path.unlink()
    return path


def check_folder(path: Path) -> Path:
    """`path` as a folder that can be written to, made if need be; an OSError otherwise."""
    path.mkdir(parents=True, exist_ok=True)
    check_file(path / f".pdvsim-{datetime.now().timestamp()}")
    return path
