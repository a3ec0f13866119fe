"""Constants of the engines' steps, from visible rows of measured servers.

    python studies/engine_steps.py [SHARE]

Simulates one visible row in SHARE (default: 4) with the present constants (`sim/engines`) and
prints how each engine's constants would change: TPOT is nearly linear in them, so one robust regression of relative
errors is a step towards the best ones. Repeat with another share until nothing changes much. The shipped ones are after
four such steps on samples of the visible rows, adjusted and rounded by hand in between, so this does not reproduce them
exactly. Held-out rows are never read, nor are those with expert or data parallelism: the constants of the others hold
for them. The two constants of a request's arrival are set by hand, to the TTFT of rows at low concurrency, and
so is the host's time per layer of a forward with prompts. Those of MXFP4 experts stay as they are where an engine has
such.
"""

import sys
import zlib

import numpy as np
from scipy.optimize import lsq_linear

from pdvsim.bench.join import of_metric
from pdvsim.bench.pool import parallel_map
from pdvsim.calibration.validate.servers import PredictedRow, SiliconRow, not_simulated, predict, read_rows
from pdvsim.sim.engines.profiles import engine_profile
from pdvsim.sim.prices.parts import ModelKernels, expert_kind, product_kind
from pdvsim.sim.prices.steps import EngineStep

NAMES = ("step_s", "row_s", "layer_s", "kernels", "prompts", "reduces", "quantised_s", "experts", "expert_prompts")
LEAST = (0.0, 0.0, 0.0, 0.8, 0.7, 0.3, -12e-6, 0.7, 0.6)
MOST = (6e-3, 1e-4, 1e-4, 1.25, 1.6, 2.5, 15e-6, 1.5, 2.5)
DOUBT = (2e-3, 3e-5, 2e-5, 0.2, 0.4, 1.0, 1e-5, 0.2, 0.8)  # how far a constant may plausibly move
RIDGE, ROUNDS, OUTLIER, LEAST_ERROR = 0.25, 40, 0.6, 0.02


def slopes(one: PredictedRow, step: EngineStep) -> list[float]:
    """By how much a row's TPOT changes with each constant: a decode step's parts, and the rest, which is prefill."""
    row, spec = one.of, one.of.experiment.pair.target
    tables = engine_profile(row.engine, row.card).tables
    assert tables is not None
    kernels = ModelKernels(tables, spec)
    rows, fixed, per_token, past_share, _ = kernels.decode()
    count = np.array([float(row.concurrency)])
    context = row.tokens_in + row.tokens_out / 2
    if past_share is not None and spec.reach is not None and context > spec.reach:
        context = spec.reach + past_share * (context - spec.reach)
    attention = np.interp(count, rows, fixed) + np.interp(count, rows, per_token) * count * context
    experts = kernels.experts(count)[0]
    dense = (kernels.products(count) + kernels.small(count) + attention)[0] + kernels.head()[0]
    reduces = (kernels.reduces(count) + kernels.gather(count))[0] if spec.shards > 1 else 0.0
    quantised = sum(number * len(products) for number, products in spec.layer_kinds)
    quantised = quantised if product_kind(spec) in ("fp8", "nvfp4") else 0
    few, _ = step.expert_factors(expert_kind(spec))
    own = 0.0 if step.mxfp4_experts is not None and "mxfp4" in expert_kind(spec) else 1.0  # whether the rest is fitted
    decode = step.kernels * (dense + experts * few) + step.reduces * reduces + step.quantised_s * quantised
    decode += step.step_s + step.row_s * row.concurrency + step.layer_s * spec.layers
    prefill = max(0.0, one.predicted["tpot_ms"] / 1000 - decode)
    many = np.array([4096.0])
    share = kernels.experts(many)[0] / (kernels.experts(many) + kernels.products(many))[0]
    return [
        1.0,
        row.concurrency,
        spec.layers,
        dense + experts * few,
        prefill / step.prompts,
        reduces,
        quantised,
        own * experts * step.kernels,
        own * prefill * share / step.expert_prompts,
    ]


def fitted(group: list[PredictedRow], step: EngineStep) -> np.ndarray:
    """The constants that fit a group best, near the present ones."""
    now = np.array([getattr(step, name) for name in NAMES])
    design = np.array([slopes(one, step) for one in group])
    measured = np.array([one.of.tpot_ms / 1000 for one in group])
    rest = np.array([one.predicted["tpot_ms"] / 1000 for one in group]) - design @ now
    names = [one.of.name for one in group]
    alike = np.array([names.count(name) for name in names])
    weight = np.ones(len(group))
    ridge = RIDGE * np.diag(1 / np.array(DOUBT))
    best = now
    for _ in range(ROUNDS):
        scale = weight / np.sqrt(alike) / measured * np.sqrt(alike.mean())
        matrix = np.vstack([design * scale[:, None], ridge])
        best = lsq_linear(matrix, np.concatenate([(measured - rest) * scale, ridge @ now]), (LEAST, MOST)).x
        error = np.abs((design @ best + rest) / measured - 1)
        weight = 1 / np.sqrt(np.maximum(error, LEAST_ERROR)) * np.where(error > OUTLIER, 0.3, 1.0)
    return np.asarray(best)


def attempted(row: SiliconRow) -> PredictedRow | None:
    """A row's prediction; None where the server could not hold its load."""
    try:
        return predict(row)
    except ValueError:
        return None


def main() -> None:
    share = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    rows = [row for row in read_rows() if not row.held_out and row.kind == "plain"]
    absent = not_simulated(rows)
    rows = [row for row in rows if row.id not in absent]
    rows = [row for row in rows if not row.odd and zlib.crc32(row.id.encode()) // 3 % share == 0]
    predictions = [one for one in parallel_map(attempted, ((row,) for row in rows), lambda: None) if one is not None]
    groups: dict[tuple[str, EngineStep], list[PredictedRow]] = {}
    for one in predictions:
        step = engine_profile(one.of.engine, one.of.card, one.of.image).step
        groups.setdefault((one.of.engine, step), []).append(one)
    for (engine, step), group in groups.items():
        errors = np.abs(of_metric(group, "tpot_ms"))
        print(f"{engine}, {len(group)} rows: TPOT {np.median(errors):.1%} / {np.quantile(errors, 0.95):.1%} now")
        for name, value in zip(NAMES, fitted(group, step), strict=True):
            print(f"  {name}: {getattr(step, name):.3g} -> {value:.3g}")


if __name__ == "__main__":
    main()
