"""A profile from the log of the user's own engine: whole steps, by tokens, rows, cached tokens and draft length.

A step takes `layers(tokens) + kv * cached tokens`, a little more where rows and a prompt share it, and with drafts of k
tokens `k * (fixed + slope * rows)` more; the drafter also reads prompts. Prompts may be padded to sizes that the log
shows. All coefficients are fitted together, none negative, so logs of two draft lengths, one of them 0, separate draft
from verify. What outputs are apart beyond a step is the host's.

Not known from a log: what parts of a step would take side by side. So the profile serves colocated architectures only.

Read are vLLM's line per step, as 0.27.1 writes it with --enable-logging-iteration-details (earlier ones lack the KV
cache's usage), and results of `vllm bench serve`. The elapsed time of a line is what the engine waited for the step, so
it is the step's only without asynchronous scheduling.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdvsim.bench.join import middle
from pdvsim.calibration.fit.points import Floats
from pdvsim.calibration.validate.bench import drafts_of
from pdvsim.sim.limits import MAX_DATA_BYTES
from pdvsim.sim.models.specs import GpuSpec, Pair
from pdvsim.sim.prices.forward import ForwardTerms
from pdvsim.sim.prices.profile import SCHEMA, HostCost, Profile
from pdvsim.sim.prices.reach import Reach
from pdvsim.sim.reading import error_text, quoted, read_bytes
from pdvsim.sim.workload.own import bench_document

STEP = re.compile(
    r"Iteration\(\d+\): (?P<prompts>\d+) context requests, (?P<prompt>\d+) context tokens, "
    r"(?P<rows>\d+) generation requests, (?P<tokens>\d+) generation tokens, "
    r"iteration elapsed time: (?P<ms>\d+(?:\.\d+)?) ms(?:, GPU KV cache usage: (?P<usage>\d+(?:\.\d+)?)%)?(?P<rest>.*)"
)
ENGINE = re.compile(r"Initializing an? (?P<name>.+?) (?:LLM )?engine \(v(?P<version>[^)\s]+)\)")
CACHE = re.compile(r"GPU KV cache size: (?P<tokens>[\d,]+) tokens")
LEAST_LOG_STEPS = 50
SHORTEST_DECODE_MS = 0.2  # a shorter median is one of waits, not of steps
LEAST_STEPS_BETWEEN_KNOTS = 8
OUTLIER = 6.0  # in median errors: steps beyond it (a compilation, a pause) do not count
DRAFTER_LINE_ROWS = 1024
LEAST_FORWARD_S = 1e-7
LEAST_GROUP = 20  # steps of a batch size that is left out, and with prompts to see their padding
PADDINGS = tuple(sorted(half << power for power in range(3, 15) for half in (2, 3)))
LONGER = 0.05  # share of a step by which one above a size that prompts are padded to is longer
CLEARLY = 0.75  # of the error without padding: it is there if the error with it is less


# the log --------------------------------------------------------------------------------------------------------------


class LoggedSteps(NamedTuple):
    """The steps of logs, as columns."""

    prompts: Floats  # requests whose prompts were read
    prompt: Floats  # their tokens
    rows: Floats  # requests that decoded
    tokens: Floats  # their new tokens: drafts and one per row
    k: Floats  # draft length of the server, whether or not a row decoded
    kv: Floats  # tokens in the KV cache; nan where not reported
    seconds: Floats

    def only(self, rows: NDArray[np.bool_]) -> LoggedSteps:
        """Return the steps that `rows` selects."""
        return LoggedSteps(*(column[rows] for column in self))


class StepLog(NamedTuple):
    """The steps of an engine's logs."""

    engine: str  # with its version
    cache_tokens: int | None  # that the KV cache holds; None: not reported
    steps: LoggedSteps


class BenchRun(NamedTuple):
    """One benchmark: its load, its draft length, and the median gap between outputs, which is a step and the host's."""

    path: str
    concurrency: int
    k: int
    gap_s: float


def read_logs(paths: tuple[str, ...]) -> StepLog:
    """The steps of all logs; each is of one server, so of one draft length. A ValueError where one holds too few."""
    parts, engines, caches = zip(*map(_steps, paths), strict=True)
    if len(set(engines)) > 1:
        raise ValueError(
            f"logs of different engines ({' and '.join(sorted(set(engines)))}): fit each engine separately"
        )
    sizes = [cache for cache in caches if cache is not None]
    return StepLog(engines[0], min(sizes, default=None), LoggedSteps(*np.concatenate(parts).T))


def _steps(path: str) -> tuple[Floats, str, int | None]:
    try:
        text = read_bytes(path, MAX_DATA_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; expected the log of a server") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error_text(error)}") from None
    engine, cache = "an engine of unknown version", None
    if engine_match := ENGINE.search(text):
        name = "vLLM" if engine_match["name"] == "V1" else engine_match["name"]
        engine = f"{name} {engine_match['version']}"
    if held := CACHE.search(text):
        cache = int(held["tokens"].replace(",", ""))
    rows = []
    for step in STEP.finditer(text):
        if "dummy" in step["rest"]:
            continue
        usage = float(step["usage"]) / 100 * cache if step["usage"] and cache else np.nan
        sizes = [float(step[name]) for name in ("prompts", "prompt", "rows", "tokens")]
        rows.append([*sizes, 0.0, usage, float(step["ms"]) / 1e3])
    if len(rows) < LEAST_LOG_STEPS:
        raise ValueError(
            f"{path}: {len(rows)} steps, and a fit needs {LEAST_LOG_STEPS}; the server writes them with "
            "--enable-logging-iteration-details"
        )
    steps = np.array(rows)
    decode = (steps[:, 2] > 0) & (steps[:, 1] == 0)
    if decode.any():
        steps[:, 4] = np.round(np.median(steps[decode, 3] / steps[decode, 2])) - 1
        if np.median(steps[decode, 6]) < SHORTEST_DECODE_MS / 1e3:
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
    return BenchRun(path, concurrency, drafts_of(path, document)[0], gaps)


def _gaps(document: dict[str, Any]) -> float | None:
    """Median seconds between outputs."""
    itls = document.get("itls")
    lists = [one for one in itls if isinstance(one, list)] if isinstance(itls, list) else []
    if seconds := [gap for one in lists for gap in one if isinstance(gap, (int, float)) and gap > 0]:
        return float(np.median(seconds))
    median = document.get("median_itl_ms")
    return median / 1e3 if isinstance(median, (int, float)) and median > 0 else None


# the fit --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineSteps:
    """Coefficients of a step, sizes that prompts are padded to, and token counts between which layers are straight."""

    padded_to: tuple[int, ...]
    knots: tuple[int, ...]
    coefficients: Floats

    def seconds(self, log: LoggedSteps) -> Floats:
        """Return the seconds of logged steps."""
        return np.asarray(_columns(_padded(log, self.padded_to), self.knots) @ self.coefficients)


@dataclass(frozen=True)
class EngineCalibration:
    """A profile from an engine's log, and how far it is off batch sizes that were left out."""

    profile: Profile
    errors: dict[int, dict[str, float]]  # by batch size left out, to the next power of two
    steps: int
    host_s: float
    benches: tuple[BenchRun, ...]

    def document(self) -> dict[str, Any]:
        """The fit as one document."""
        return {
            "name": self.profile.name,
            "foundation": self.profile.foundation,
            "steps": self.steps,
            "held_out": self.errors,
            "host_s": self.host_s,
            "provenance": self.profile.provenance,
        }


def _knots(log: LoggedSteps) -> tuple[int, ...]:
    """Token counts of the log, the last before each power of two, with enough steps between them."""
    tokens = np.sort(log.tokens + log.prompt)
    knots, below, size = [int(tokens[0])], 0, 1
    while size < tokens[-1]:
        size *= 2
        upto = int(np.searchsorted(tokens, size, side="right"))
        if tokens[upto - 1] > knots[-1] and upto - below >= LEAST_STEPS_BETWEEN_KNOTS:
            knots.append(int(tokens[upto - 1]))
            below = upto
    return tuple(knots) if len(knots) > 1 else (knots[0], knots[0] + 1)


def _columns(log: LoggedSteps, knots: tuple[int, ...]) -> Floats:
    """Return the columns of the coefficients: a fixed part, ramps between knots, and five rates."""
    tokens = log.tokens + log.prompt
    ramps = []
    for at, (low, high) in enumerate(pairwise(knots)):
        ramp = (tokens - low) / (high - low)
        ramps.append(np.clip(ramp, 0, None if at == len(knots) - 2 else 1))
    kv, decodes, reads = np.nan_to_num(log.kv), log.rows > 0, log.prompt > 0
    forwards = np.where(log.k > 0, np.where(decodes, log.k, 0) + reads, 0)
    drafted = np.where(log.k > 0, log.k * log.rows + log.prompt, 0)
    rates = (kv, decodes & reads, forwards, drafted, log.k * decodes * kv)
    return np.stack([np.ones(len(tokens)), *ramps, *rates], axis=1)


def _padded(log: LoggedSteps, sizes: tuple[int, ...]) -> LoggedSteps:
    """The steps with the tokens that were computed for its prompts."""
    if not sizes:
        return log
    at = np.minimum(np.searchsorted(sizes, log.prompt), len(sizes) - 1)
    return log._replace(prompt=np.where(log.prompt > 0, np.maximum(log.prompt, np.array(sizes)[at]), 0))


def fit_steps(log: LoggedSteps) -> EngineSteps:
    """The steps' law, with the padding of prompts that the log shows."""
    return _solved(log, padding(log))[0]


def padding(log: LoggedSteps) -> tuple[int, ...]:
    """Sizes that prompts are padded to, as CUDA graphs are: steps are alike up to one and longer above; none if not so.

    Looked for among powers of two and sizes halfway between, in the steps without drafts. Shorter and longer prompts
    than the log's are taken to be padded as in its nearest octave.
    """
    alone = log.only((log.prompt > 0) & (log.k == 0))
    if alone.seconds.size < LEAST_GROUP:
        return ()
    seen, group = np.unique(np.searchsorted(PADDINGS, alone.prompt), return_inverse=True)
    if seen[-1] == len(PADDINGS):
        return ()
    levels = np.eye(len(seen))[group]
    columns = np.column_stack([levels, alone.rows > 0, alone.tokens, np.nan_to_num(alone.kv)])
    level = np.linalg.lstsq(columns / alone.seconds[:, None], np.ones(alone.seconds.size))[0][: len(seen)]
    usual = np.array([np.median(alone.seconds[group == at]) for at in range(len(seen))])
    longer = np.diff(level) > LONGER * usual[:-1]
    sizes = [size for at in np.flatnonzero(longer) for size in PADDINGS[seen[at] : seen[at + 1]]] + [PADDINGS[seen[-1]]]
    reading = log.only(log.prompt > 0)
    if _solved(reading, tuple(sizes))[1] >= CLEARLY * _solved(reading, ())[1]:
        return ()
    while sizes[0] > PADDINGS[0]:
        sizes = [size // 2 for size in sizes if size < 2 * sizes[0]] + sizes
    while sizes[-1] < PADDINGS[-1]:
        sizes = sizes + [2 * size for size in sizes if 2 * size > sizes[-1]]
    return tuple(sizes)


def _solved(log: LoggedSteps, sizes: tuple[int, ...]) -> tuple[EngineSteps, float]:
    """Non-negative least squares of shares, twice: the second time without outliers. And their mean error."""
    from scipy.optimize import nnls

    log = _padded(log, sizes)
    knots = _knots(log)
    shares = _columns(log, knots) / log.seconds[:, None]
    # a share of each column's size, or those of tokens and of seconds would not be found to the same precision
    size = np.maximum(np.abs(shares).max(axis=0), 1e-300)
    shares /= size
    usual: NDArray[np.bool_] = np.ones(log.seconds.size, dtype=bool)
    for _ in range(2):
        across, triangle = np.linalg.qr(shares[usual])  # the same squares, of few rows
        solution = nnls(triangle, across.sum(axis=0))[0]
        off = np.abs(shares @ solution - 1)
        usual = off <= max(OUTLIER * float(np.median(off)), 0.02)
    return EngineSteps(sizes, knots, solution / size), float(off.mean())


def held_out(log: LoggedSteps) -> dict[int, dict[str, float]]:
    """Errors on the steps of each batch size that the fit has not seen, where there are others."""
    group = np.where(log.rows > 0, 2 ** np.ceil(np.log2(np.maximum(log.rows, 1))), 0).astype(int)
    errors = {}
    for size in np.unique(group[group > 0]).tolist():
        held = group == size
        if held.sum() >= LEAST_GROUP and (group[~held] > 0).sum() >= LEAST_GROUP:
            unseen = log.only(held)
            errors[size] = middle(fit_steps(log.only(~held)).seconds(unseen) / unseen.seconds - 1)
    return errors


def host_of(log: LoggedSteps, benches: tuple[BenchRun, ...]) -> float:
    """Median time between two steps: over benchmarks, the outputs' gap less the same step in the log."""
    beyond = []
    for bench in benches:
        same = (log.k == bench.k) & (log.prompt == 0) & (log.rows == bench.concurrency)
        if not same.any():
            raise ValueError(
                f"{bench.path}: no step of {bench.concurrency} requests with draft length {bench.k} in the logs; "
                "benchmark the server that wrote the log"
            )
        step_s = float(np.median(log.seconds[same]))
        if step_s < bench.gap_s / 3:
            raise ValueError(
                f"{bench.path}: outputs are {bench.gap_s * 1e3:.2f} ms apart but the log's steps take "
                f"{step_s * 1e3:.2f} ms: start the server with --no-async-scheduling for the log"
            )
        beyond.append(max(0.0, bench.gap_s - step_s))
    return float(np.median(beyond)) if beyond else 0.0


def calibrate_engine(
    log: StepLog, benches: tuple[BenchRun, ...], pair: Pair, gpu: GpuSpec, name: str
) -> EngineCalibration:
    """The profile of an engine's steps; without drafts in the logs it knows the target alone."""
    engine, cache_tokens, logged = log
    drafts = sorted({int(k) for k in logged.k})
    if drafts[0] > 0:
        raise ValueError(
            f"the logs are all of drafts ({', '.join(map(str, drafts))} tokens): one without speculation tells draft "
            "from verify"
        )
    steps, errors = fit_steps(logged), held_out(logged)
    layers, (kv_s, mixed_s, fixed_s, row_s, draft_kv_s) = steps.coefficients[:-5], steps.coefficients[-5:]
    seconds = np.maximum(np.cumsum(layers), LEAST_FORWARD_S).tolist()
    plain: dict[str, Any] = {"chunk_buckets": steps.padded_to}
    knots = tuple(zip(steps.knots, seconds, strict=True))
    models = {pair.target.name: ForwardTerms.read(plain | {"kv_s": kv_s, "mixed_s": mixed_s, "layer_knots": knots})}
    if drafts[-1] > 0:
        ends = tuple((n, max(fixed_s + row_s * n, LEAST_FORWARD_S)) for n in (1, DRAFTER_LINE_ROWS))
        models[pair.draft.name] = ForwardTerms.read(plain | {"kv_s": draft_kv_s, "layer_knots": ends})
    all_errors = [value["median"] for value in errors.values()], [value["p95"] for value in errors.values()]
    error = {"median": float(np.median(all_errors[0])), "p95": float(np.max(all_errors[1]))} if errors else None
    reach = Reach(
        rows=int(logged.rows.max()), k=drafts[-1], prompt_tokens=int(logged.prompt.max()),
        tokens=int((logged.prompt + logged.tokens).max()),
    )  # fmt: skip
    host_s = host_of(logged, benches)
    profile = Profile(
        schema_version=SCHEMA,
        name=name,
        foundation=f"whole steps of {engine}",
        gpu=gpu,
        models=models,
        host=HostCost(launch_s=0.0, completion_s=host_s, handoff_s=0.0),
        provenance={
            "engine": engine,
            "steps": logged.seconds.size,
            "draft_lengths": drafts,
            "kv_cache_tokens": cache_tokens,
            "benches": [bench.path for bench in benches],
            **({"held_out_error": dict.fromkeys(models, error)} if error else {}),
        },
        measured=dict.fromkeys(models, reach),
        whole_steps=True,
    )
    return EngineCalibration(profile, errors, logged.seconds.size, host_s, benches)
