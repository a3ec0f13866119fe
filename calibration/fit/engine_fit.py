"""A profile from the log of the user's own engine: whole steps, by tokens, rows, cached tokens and draft length.

A step takes `layers(tokens) + kv * cached tokens`, and with drafts of k tokens `k * (fixed + slope * rows)` more; the
drafter also reads prompts. All coefficients are found together and none is negative, so logs of two draft lengths, one
of them 0, tell draft from verify. What outputs are apart beyond a step is the host's.

Not known from a log: what parts of a step would take side by side. So the profile serves colocated architectures only.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdvsim.calibration.fit.engine_log import BenchRun, Floats, StepLog
from pdvsim.calibration.fit.errors import middle
from pdvsim.sim.core import GpuSpec, Pair
from pdvsim.sim.hardware.latency import ForwardFit
from pdvsim.sim.hardware.profile import SCHEMA, HostCost, Profile
from pdvsim.sim.hardware.reach import Reach

KNOT_STEPS = 8  # steps that must lie between two knots
OUTLIER = 6.0  # steps further off than so many median errors (a compilation, a pause) do not count
WIDEST_ROWS = 1024  # where the drafter's straight line is written down
LEAST_S = 1e-7  # of a forward, in a profile
LEAST_GROUP = 20  # steps of a batch size that is left out


@dataclass(frozen=True)
class EngineSteps:
    """Coefficients of a step, and the token counts between which its layers are straight."""

    knots: tuple[int, ...]
    coefficients: Floats

    def seconds(self, log: StepLog) -> Floats:
        """What the steps of a log take."""
        found: Floats = _columns(log, self.knots) @ self.coefficients
        return found


@dataclass(frozen=True)
class EngineCalibration:
    """A profile from an engine's log, and how far it is off batch sizes that were left out."""

    profile: Profile
    errors: dict[int, dict[str, float]]  # by batch size left out, to the next power of two
    steps: int
    host_s: float
    benches: tuple[BenchRun, ...]

    def document(self) -> dict[str, Any]:
        """All of it, as one document."""
        return {
            "name": self.profile.name,
            "foundation": self.profile.foundation,
            "steps": self.steps,
            "held_out": self.errors,
            "host_s": self.host_s,
            "provenance": self.profile.provenance,
        }


def _knots(log: StepLog) -> tuple[int, ...]:
    """Powers of two with enough steps between them, from the fewest tokens to the most."""
    tokens = np.sort(log.tokens + log.prompt)
    kept = [int(tokens[0])]
    size = 1
    while size < tokens[-1]:
        size *= 2
        between = np.searchsorted(tokens, [kept[-1], size], side="right")
        if size > kept[-1] and between[1] - between[0] >= KNOT_STEPS:
            kept.append(size)
    kept[-1] = max(kept[-1], kept[0] + 1)
    return tuple(kept) if len(kept) > 1 else (kept[0], kept[0] + 1)


def _columns(log: StepLog, knots: tuple[int, ...]) -> Floats:
    """What coefficients are multiplied by: a fixed part, ramps between knots, cached tokens; three of the drafter."""
    tokens = log.tokens + log.prompt
    ramps = []
    for at, (low, high) in enumerate(pairwise(knots)):
        ramp = (tokens - low) / (high - low)
        ramps.append(np.clip(ramp, 0, None if at == len(knots) - 2 else 1))
    kv = np.nan_to_num(log.kv)
    forwards = np.where(log.k > 0, np.where(log.rows > 0, log.k, 0) + (log.prompt > 0), 0)
    drafted = np.where(log.k > 0, log.k * log.rows + log.prompt, 0)
    return np.stack([np.ones(len(log)), *ramps, kv, forwards, drafted, log.k * (log.rows > 0) * kv], axis=1)


def fit_steps(log: StepLog) -> EngineSteps:
    """Non-negative least squares of shares, twice: the second time without outliers."""
    from scipy.optimize import nnls

    knots = _knots(log)
    columns, weight = _columns(log, knots), 1 / log.seconds
    kept: NDArray[np.bool_] = np.ones(len(log), dtype=bool)
    for _ in range(2):
        # a share of each column's size, or those of tokens and of seconds would not be found to the same precision
        shares = columns[kept] * weight[kept, None]
        size = np.maximum(np.abs(shares).max(axis=0), 1e-300)
        found = nnls(shares / size, np.ones(int(kept.sum())))[0] / size
        off = np.abs(columns @ found * weight - 1)
        kept = off <= max(OUTLIER * float(np.median(off)), 0.02)
    return EngineSteps(knots, found)


def held_out(log: StepLog) -> dict[int, dict[str, float]]:
    """Errors on the decode steps of each batch size that the fit has not seen, where there are others."""
    group = np.where(log.rows > 0, 2 ** np.ceil(np.log2(np.maximum(log.rows, 1))), 0).astype(int)
    found = {}
    for size in np.unique(group[group > 0]).tolist():
        mine = group == size
        if mine.sum() >= LEAST_GROUP and (group[~mine] > 0).sum() >= LEAST_GROUP:
            unseen = log.only(mine & (log.prompt == 0)) if (mine & (log.prompt == 0)).any() else log.only(mine)
            found[size] = middle(fit_steps(log.only(~mine)).seconds(unseen) / unseen.seconds - 1)
    return found


def host_of(log: StepLog, benches: tuple[BenchRun, ...]) -> float:
    """What lies between two steps: the median over benchmarks of their outputs' gap less the same step in the log."""
    beyond = []
    for bench in benches:
        same = (log.k == bench.k) & (log.prompt == 0) & (log.rows == bench.concurrency)
        if not same.any():
            raise ValueError(
                f"{bench.path}: no step of {bench.concurrency} requests with drafts of {bench.k} tokens in the logs; "
                "bench the server whose log it is"
            )
        step_s = float(np.median(log.seconds[same]))
        if step_s < bench.gap_s / 3:
            raise ValueError(
                f"{bench.path}: outputs are {bench.gap_s * 1e3:.2f} ms apart and the log's steps take "
                f"{step_s * 1e3:.2f} ms: start the server with --no-async-scheduling for the log"
            )
        beyond.append(max(0.0, bench.gap_s - step_s))
    return float(np.median(beyond)) if beyond else 0.0


def calibrate_engine(
    log: StepLog, benches: tuple[BenchRun, ...], pair: Pair, gpu: GpuSpec, name: str
) -> EngineCalibration:
    """The profile of an engine's steps; without drafts in the logs it knows the target alone."""
    drafts = sorted({int(k) for k in log.k})
    if drafts[0] > 0:
        raise ValueError(
            f"the logs are all of drafts ({', '.join(map(str, drafts))} tokens): one without speculation tells draft "
            "from verify"
        )
    found, errors = fit_steps(log), held_out(log)
    layers, (kv_s, fixed_s, row_s, draft_kv_s) = found.coefficients[:-4], found.coefficients[-4:]
    seconds = np.maximum(np.cumsum(layers), LEAST_S).tolist()
    plain: dict[str, Any] = dict.fromkeys(
        (
            "fixed_s",
            "weights_s",
            "token_s",
            "head_weights_s",
            "head_token_s",
            "pair_s",
            "prompt_pair_s",
            "prompt_read_s",
        ),
        0.0,
    )
    models = {
        pair.target.name: ForwardFit(**plain, kv_s=kv_s, layer_knots=tuple(zip(found.knots, seconds, strict=True)))
    }
    if drafts[-1] > 0:
        ends = tuple((n, max(fixed_s + row_s * n, LEAST_S)) for n in (1, WIDEST_ROWS))
        models[pair.draft.name] = ForwardFit(**plain, kv_s=draft_kv_s, layer_knots=ends)
    all_errors = [value["median"] for value in errors.values()], [value["p95"] for value in errors.values()]
    error = {"median": float(np.median(all_errors[0])), "p95": float(np.max(all_errors[1]))} if errors else None
    reach = Reach(
        rows=int(log.rows.max()), k=drafts[-1], prompt_tokens=int(log.prompt.max()),
        tokens=int((log.prompt + log.tokens).max()),
    )  # fmt: skip
    host_s = host_of(log, benches)
    profile = Profile(
        schema_version=SCHEMA,
        name=name,
        foundation=f"whole steps of {log.engine}",
        gpu=gpu,
        models=models,
        host=HostCost(launch_s=0.0, completion_s=host_s, handoff_s=0.0),
        provenance={
            "engine": log.engine,
            "steps": len(log),
            "draft_lengths": drafts,
            "kv_cache_tokens": log.cache_tokens,
            "benches": [bench.path for bench in benches],
            **({"held_out_error": dict.fromkeys(models, error)} if error else {}),
        },
        measured=dict.fromkeys(models, reach),
        whole_steps=True,
    )
    return EngineCalibration(profile, errors, len(log), host_s, benches)
