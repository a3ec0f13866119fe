"""What an engine writes by itself: vLLM's line a step, and the results of `vllm bench serve`.

Lines as vLLM 0.27.1 writes them with --enable-logging-iteration-details (earlier ones lack the KV cache's usage). Their
elapsed time is what the engine waited for the step, so it is the step's only without asynchronous scheduling.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim.reading import check_file, quoted, said
from pdvsim.sim.workload.own import bench_document

Floats = NDArray[np.float64]

STEP = re.compile(
    r"Iteration\(\d+\): (?P<prompts>\d+) context requests, (?P<prompt>\d+) context tokens, "
    r"(?P<rows>\d+) generation requests, (?P<tokens>\d+) generation tokens, "
    r"iteration elapsed time: (?P<ms>\d+(?:\.\d+)?) ms(?:, GPU KV cache usage: (?P<usage>\d+(?:\.\d+)?)%)?(?P<rest>.*)"
)
ENGINE = re.compile(r"Initializing an? (?P<name>.+?) (?:LLM )?engine \(v(?P<version>[^)\s]+)\)")
CACHE = re.compile(r"GPU KV cache size: (?P<tokens>[\d,]+) tokens")
LEAST_STEPS = 50  # of a log
SHORTEST_MS = 0.2  # median of decode steps below which they were waits, not steps


@dataclass(frozen=True)
class StepLog:
    """The steps of logs, as columns."""

    engine: str  # with its version
    cache_tokens: int | None  # that the KV cache holds; None: not told
    prompts: Floats  # requests whose prompts were read
    prompt: Floats  # their tokens
    rows: Floats  # requests that decoded
    tokens: Floats  # their new tokens: drafts and one a row
    k: Floats  # draft length of the server, whether or not a row decoded
    kv: Floats  # tokens in the KV cache; nan where not told
    seconds: Floats

    def __len__(self) -> int:
        return len(self.seconds)

    def only(self, rows: NDArray[np.bool_]) -> StepLog:
        """Some of the steps."""
        columns = ("prompts", "prompt", "rows", "tokens", "k", "kv", "seconds")
        return StepLog(self.engine, self.cache_tokens, *(getattr(self, name)[rows] for name in columns))


@dataclass(frozen=True)
class BenchRun:
    """One benchmark: its load, its draft length, and the median gap between outputs, which is a step and the host's."""

    path: str
    concurrency: int
    k: int
    gap_s: float


def read_logs(paths: tuple[str, ...]) -> StepLog:
    """The steps of all logs; each is of one server, so of one draft length. A ValueError where one holds too few."""
    engines: set[str] = set()
    caches: set[int] = set()
    parts = []
    for path in paths:
        steps, engine, cache = _steps(path)
        engines.add(engine)
        if cache is not None:
            caches.add(cache)
        parts.append(steps)
    if len(engines) > 1:
        raise ValueError(f"logs of different engines ({' and '.join(sorted(engines))}): fit each engine separately")
    columns = np.concatenate(parts).T
    return StepLog(engines.pop(), min(caches) if caches else None, *columns)


def _steps(path: str) -> tuple[Floats, str, int | None]:
    try:
        check_file(path)
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; expected the log of a server") from None
    except ValueError as error:
        raise ValueError(f"{path}: {said(error)}") from None
    engine, cache = "an engine of unknown version", None
    if made := ENGINE.search(text):
        name = "vLLM" if made["name"] == "V1" else made["name"]
        engine = f"{name} {made['version']}"
    if held := CACHE.search(text):
        cache = int(held["tokens"].replace(",", ""))
    rows = []
    for step in STEP.finditer(text):
        if "dummy" in step["rest"]:
            continue
        usage = float(step["usage"]) / 100 * cache if step["usage"] and cache else np.nan
        sizes = [float(step[name]) for name in ("prompts", "prompt", "rows", "tokens")]
        rows.append([*sizes, 0.0, usage, float(step["ms"]) / 1e3])
    if len(rows) < LEAST_STEPS:
        raise ValueError(
            f"{path}: {len(rows)} steps, and a fit needs {LEAST_STEPS}; the server writes them with "
            "--enable-logging-iteration-details"
        )
    steps = np.array(rows)
    decode = (steps[:, 2] > 0) & (steps[:, 1] == 0)
    if decode.any():
        steps[:, 4] = np.round(np.median(steps[decode, 3] / steps[decode, 2])) - 1
        if np.median(steps[decode, 6]) < SHORTEST_MS / 1e3:
            raise ValueError(
                f"{path}: steps of {np.median(steps[decode, 6]) * 1e3:.2f} ms are waiting times, not steps: "
                "start the server with --no-async-scheduling for the log"
            )
    return steps, engine, cache


def read_bench(path: str) -> BenchRun:
    """A result of `vllm bench serve`, or of `realrun`; a ValueError of one line if it is not one."""
    document = bench_document(path)
    concurrency = document.get("max_concurrency")
    if type(concurrency) is not int or concurrency < 1:
        raise ValueError(f"{path}: max_concurrency is {quoted(concurrency)}; bench with --max-concurrency")
    gaps = _gaps(document)
    if gaps is None:
        raise ValueError(f"{path}: neither itls nor median_itl_ms; bench with --save-detailed")
    rounds, drafted = document.get("spec_decode_num_drafts") or 0, document.get("spec_decode_draft_tokens") or 0
    return BenchRun(path, concurrency, round(drafted / rounds) if rounds else 0, gaps)


def _gaps(document: dict[str, Any]) -> float | None:
    """Median seconds between outputs."""
    itls = document.get("itls")
    if isinstance(itls, list) and itls:
        flat = [
            gap for one in itls if isinstance(one, list) for gap in one if isinstance(gap, (int, float)) and gap > 0
        ]
        if flat:
            return float(np.median(flat))
    median = document.get("median_itl_ms")
    return median / 1e3 if isinstance(median, (int, float)) and median > 0 else None
