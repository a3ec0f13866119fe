"""Speed and step overhead of a server from its benchmarks: `pdvsim calibrate --from-bench`.

A step of n decoding rows and p prompt tokens takes `speed * g + step + row * n + prompt * p`, where g is the step's GPU
time in the profile. A result with --save-detailed gives the time between two tokens of a request, and from all start
times how many rows were then decoding: one observation for each number of rows, of steps in which no prompt was
prefilled, and some of steps with one prompt. Without details there is one observation, the mean TPOT at the mean number
of rows, by Little's law the output throughput times TPOT.

The four figures are found together, none is negative, and what the results do not determine stays near what is expected
of any engine: speed 1 and no time per row and prompt token. How much of each the results determined is part of the
answer.

Not fitted: drafting apart from verifying, and the client, whose time is in the results. A prompt is taken to share its
step with decoding rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdvsim.calibration.validate.bench import BenchedLoad
from pdvsim.sim.assembly import covering_profile
from pdvsim.sim.config import Experiment
from pdvsim.sim.prices.pace import LEAST, MOST, MOST_HOST_S, MOST_STEP_S
from pdvsim.sim.prices.profile import Profile

Floats = NDArray[np.float64]

NOISE = 0.02  # relative error of an observation
SPEED_SPREAD = 0.15  # of engines about the profile's forward times
ROW_SPREAD = 0.01  # of the time per row, as a share of a step
LEAST_STEPS = 3  # of an observation
JITTER = 0.25  # of a step, within which its tokens come
PROMPT_GROUPS = 4  # of steps with a prompt, by its length
SEVERAL_SIZES = 1.5  # batch sizes that differ by this factor determine the cost of a row
DETERMINED = 0.5  # of the expected spread: a figure is determined if less of it is left
PARTS = ("speed", "step", "row", "prompt")


class Observation(NamedTuple):
    """The mean step of a number of decoding rows, with their cached tokens each."""

    rows: float
    context: float
    seconds: float
    prompts: float = 0.0  # prefills per step, ...
    prompt_tokens: int = 0  # ... and the tokens of each

    @property
    def own_prompt(self) -> bool:
        """Whether it is of steps with a prompt each; mean steps have as many prompts as rows, and are inconclusive."""
        return self.prompts == 1.0


@dataclass(frozen=True)
class BenchFit:
    """The figures, what is left uncertain of each, and the observations."""

    speed: float  # forward times over the profile's
    step_s: float
    row_s: float
    prompt_s: float
    spread: tuple[float, ...]  # standard deviations of the four
    undetermined: tuple[str, ...]  # of PARTS
    observations: int
    sizes: tuple[int, int]  # least and most rows

    def document(self) -> dict[str, Any]:
        """Return the document of `--machine`, with how its figures were fitted."""
        return {
            "pace_target": self.speed,
            "pace_draft": self.speed,
            "pace_step_s": self.step_s,
            "pace_row_s": self.row_s,
            "pace_prompt_s": self.prompt_s,
            "spread": dict(zip(PARTS, self.spread, strict=True)),
            "undetermined": list(self.undetermined),
            "observations": self.observations,
            "rows": list(self.sizes),
        }


def fit_bench(loads: Sequence[tuple[BenchedLoad, Experiment]]) -> BenchFit:
    """The figures that explain the benchmarks of one server; a ValueError if there is nothing to see in them."""
    rows: list[tuple[float, ...]] = []  # GPU seconds, rows, prompt tokens, seconds, weight
    for load, experiment in loads:
        profile = covering_profile(experiment)
        seen = _detailed(load, experiment.server.max_num_batched_tokens) or [_mean(load)]
        rows += [
            (_gpu_s(at, experiment, profile), at.rows, at.own_prompt * at.prompt_tokens, at.seconds, len(seen) ** -0.5)
            for at in seen
        ]
    gpu_s, sizes, prompts, seconds, weights = np.array(rows).T
    if not (seconds > 0).all():
        raise ValueError("the results have no time per output token: bench with outputs of several tokens")
    return _solved(gpu_s, sizes, prompts, seconds, weights)


def _solved(gpu_s: Floats, sizes: Floats, prompts: Floats, seconds: Floats, weights: Floats) -> BenchFit:
    """Least squares of relative errors, with what is expected as three more rows."""
    from scipy.optimize import lsq_linear

    scale = weights / (NOISE * seconds)
    usual_row_s = ROW_SPREAD * float(np.median(seconds))
    # a prompt that takes a step twice as long
    usual_prompt_s = float(np.median((seconds / np.maximum(prompts, 1))[prompts > 0])) if prompts.any() else 1e-6
    design = np.stack((gpu_s, np.ones_like(gpu_s), sizes, prompts), axis=1) * scale[:, None]
    expected = np.diag([1 / SPEED_SPREAD, 0.0, 1 / usual_row_s, 1 / usual_prompt_s])[[0, 2, 3]]
    matrix = np.concatenate((design, expected))
    values = np.concatenate((seconds * scale, [1 / SPEED_SPREAD, 0.0, 0.0]))
    units = np.array([1.0, float(np.median(seconds)), usual_row_s, usual_prompt_s])  # alike in size, for the solver
    bounds = np.array([[LEAST, 0.0, 0.0, 0.0], [MOST, MOST_STEP_S, MOST_HOST_S, MOST_HOST_S]]) / units
    try:
        solution = lsq_linear(matrix * units, values, (bounds[0], bounds[1]))
        covariance = np.linalg.inv((matrix * units).T @ (matrix * units))
    except np.linalg.LinAlgError:
        raise ValueError("the results do not determine the time of a step: bench at several concurrencies") from None
    speed, step_s, row_s, prompt_s = (float(x) for x in solution.x * units)
    spread = np.sqrt(np.diag(covariance)) * units
    unknown = []
    if spread[0] > DETERMINED * SPEED_SPREAD:
        unknown.append("speed")
    if spread[1] > DETERMINED * max(step_s, SPEED_SPREAD * float(np.median(seconds))):
        unknown.append("step")
    if sizes.max() < SEVERAL_SIZES * sizes.min() or spread[2] > DETERMINED * usual_row_s:
        unknown.append("row")
    if spread[3] > DETERMINED * usual_prompt_s:
        unknown.append("prompt")
    ends = round(float(sizes.min())), round(float(sizes.max()))
    return BenchFit(speed, step_s, row_s, prompt_s, tuple(map(float, spread)), tuple(unknown), len(seconds), ends)


def _gpu_s(at: Observation, experiment: Experiment, profile: Profile) -> float:
    """GPU time of a step in the profile, and of the prefills in it."""
    rows, k = max(1, round(at.rows)), experiment.longest_draft
    context = rows * at.context
    target = profile.cost_model(experiment.pair.target)
    step = target.price(rows, k + 1, 1, context)
    seconds = step.seconds(context)
    if k and not experiment.pair.draft.on_host:
        seconds += profile.cost_model(experiment.pair.draft).price(rows, 1, k, context).seconds(context)
    if at.prompts:
        with_prompt = target.price(rows, k + 1, 1, context, [(0, at.prompt_tokens)], 1)
        seconds += at.prompts * (with_prompt.seconds_0 - step.seconds_0)
    return float(seconds)


def _mean(load: BenchedLoad) -> Observation:
    """The mean step of a result without details."""
    measured = load.measured
    if "mean_tpot_ms" not in measured:
        raise ValueError("the result has no mean_tpot_ms: bench with --percentile-metrics ttft,tpot,itl")
    tpot_s = measured["mean_tpot_ms"] / 1e3
    step_s = tpot_s * (1 + sum(load.accepted))
    rows = max(1.0, measured["output_throughput"] * tpot_s)
    prompt, output = (float(mean) for mean in load.lengths.mean(axis=0))
    return Observation(rows, prompt + output / 2, step_s, rows / output * step_s / tpot_s, max(1, round(prompt)))


def _detailed(load: BenchedLoad, budget_tokens: int) -> list[Observation]:
    """The median step by number of decoding rows, and by prompts that fit a step; none if it is inconclusive."""
    if load.times is None or load.times.sent_s is None:
        return []
    sent_s, tokens_s = load.times.sent_s, load.times.tokens_s(load.times.sent_s)
    own = [(prompt, times) for (prompt, _), times in zip(load.lengths, tokens_s, strict=True) if len(times) > 1]
    if not own:
        return []
    first_s, last_s = (np.sort([times[at] for _, times in own]) for at in (0, -1))
    starts = np.concatenate([times[:-1] for _, times in own])
    ends = np.concatenate([times[1:] for _, times in own])
    contexts = np.concatenate([prompt + np.arange(1, len(times)) for prompt, times in own])
    middle = (starts + ends) / 2
    rows = np.searchsorted(first_s, middle, "right") - np.searchsorted(last_s, middle, "right")
    order = np.argsort([times[0] for times in tokens_s])
    all_first_s, prompts = np.array([times[0] for times in tokens_s])[order], load.lengths[order, 0]
    # the tokens of one step come one after another: a first token belongs to the step that ends about then
    late_s = JITTER * float(np.median(ends - starts))
    begun, ended = (np.searchsorted(all_first_s, times + late_s, "right") for times in (starts, ends))
    waits = np.searchsorted(np.sort(sent_s), ends, "left") > begun  # some request, for a first token
    decoding = (rows > 0) & (ends > starts) & (ended == begun)

    def observed(group: NDArray[np.bool_], prompt: int = 0) -> Observation:
        seconds = float(np.median((ends - starts)[group]))
        size, context = float(rows[group].mean()), float(contexts[group].mean())
        return Observation(size, context, seconds, float(prompt > 0), prompt)

    for chosen in (decoding & ~waits, decoding):
        groups = [chosen & (rows == count) for count in np.unique(rows[chosen])]
        seen = [observed(group) for group in groups if group.sum() >= LEAST_STEPS * rows[group][0]]
        if seen:
            break
    one = (rows > 0) & (ended == begun + 1)
    read = np.where(one, prompts[np.minimum(begun, len(prompts) - 1)], 0)
    one &= read + rows <= budget_tokens
    if one.any():
        edges = np.unique(np.quantile(read[one], np.linspace(0, 1, PROMPT_GROUPS + 1)))
        parts = [one & (np.searchsorted(edges[1:-1], read, "right") == at) for at in range(max(1, len(edges) - 1))]
        seen += [observed(part, round(float(read[part].mean()))) for part in parts if part.any()]
    return seen


def separation(fit: BenchFit, files: int) -> list[str]:
    """Return notes on what the results determine."""
    low, high = fit.sizes
    batch = f"batches of {low}" if low == high else f"batches of {low} to {high}"
    lines = [f"{fit.observations} observations of steps, {batch} requests, from {files} result{'s' * (files > 1)}"]
    if "speed" in fit.undetermined:
        lines.append(
            "these results do not separate speed from step overhead: forward times are assumed to be near the "
            "profile's, and the rest to be overhead; add a result with longer contexts or prompts"
        )
    if "row" in fit.undetermined:
        lines.append(f"the time per row is not determined by {batch}: add a result at another concurrency")
    if "prompt" in fit.undetermined:
        lines.append("the time per prompt token is not determined: bench with --save-detailed")
    return lines


def described(fit: BenchFit) -> Mapping[str, str]:
    """The figures with their uncertainty, for people."""
    speed, step_s, row_s, prompt_s = fit.spread
    return {
        "forward times over the profile's": f"{fit.speed:.2f} ± {speed:.2f}",
        "overhead per step": f"{fit.step_s * 1e3:.2f} ± {step_s * 1e3:.2f} ms",
        "overhead per row": f"{fit.row_s * 1e6:.0f} ± {row_s * 1e6:.0f} µs",
        "overhead per prompt token": f"{fit.prompt_s * 1e6:.1f} ± {prompt_s * 1e6:.1f} µs",
    }
