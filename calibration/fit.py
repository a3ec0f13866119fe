"""From measured samples to a profile: the latency model's coefficients, by least squares on relative errors.

A forward of N tokens takes `layers(N) + head + attention`. The layers' time is free at knots and straight between,
since kernels change with N; so is attention's time per cached token over the number of queries a row; the head keeps
the roofline's shape with one efficiency. Nothing is fitted on whole serving runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim.core import GpuSpec, ModelSpec
from pdvsim.sim.latency import ForwardFit

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]

WIDTHS = (1, 2, 3, 5, 7, 9)  # queries a row at which attention is free
KNOTS = (
    1,
    2,
    4,
    8,
    16,
    24,
    32,
    33,
    40,
    48,
    64,
    96,
    128,
    192,
    256,
    320,
    384,
    512,
    640,
    768,
    1024,
    1280,
    1536,
    2048,
    2560,
)
SMOOTHNESS = 0.02  # weight of bends between knots: decides only where no point lies
FOLDS = 5


@dataclass(frozen=True)
class Points:
    """The measured medians of one model, as the columns that the latency model works with."""

    seconds: Array
    tokens: Array  # through the layers in the first forward, padded as the engine pads
    logits: Array  # through the head in the first forward
    rows: Array  # padded
    steps: Array
    width: Array  # new tokens a row in the first forward
    context: Array  # cached tokens over all rows
    prompt_read: Array
    prompt_pairs: Array

    def __len__(self) -> int:
        return len(self.seconds)

    def at(self, chosen: NDArray[Any]) -> Points:
        return Points(**{name: getattr(self, name)[chosen] for name in self.__dataclass_fields__})


def medians(samples: pd.DataFrame) -> pd.DataFrame:
    """One row a measured point: its median time and mean context, with the number and spread of its samples."""
    by = ["kind", "rows", "bucket_rows", "tokens", "steps", "catch_up", "context", "chunk_tokens", "bucket_chunk"]
    groups = samples.groupby([*by, "chunk_start", "chunks", "emits"], sort=False, observed=True)
    frame = groups.agg(
        seconds=("seconds", "median"), context_total=("context_total", "mean"), samples=("seconds", "size"),
        low=("seconds", lambda s: s.quantile(0.1)), high=("seconds", lambda s: s.quantile(0.9)),
    )  # fmt: skip
    return frame.reset_index()


def points_of(frame: pd.DataFrame) -> Points:
    """The columns of `medians` in the latency model's terms."""
    rows = frame["bucket_rows"].to_numpy(float)
    width = frame["tokens"].to_numpy(float)
    each = frame["chunk_tokens"].to_numpy(float) / np.maximum(frame["chunks"].to_numpy(float), 1)
    start, chunks = frame["chunk_start"].to_numpy(float), frame["chunks"].to_numpy(float)
    return Points(
        seconds=frame["seconds"].to_numpy(float),
        tokens=rows * width + frame["bucket_chunk"].to_numpy(float),
        logits=rows * width + chunks * frame["emits"].to_numpy(float),
        rows=rows,
        steps=np.maximum(frame["steps"].to_numpy(float), 1),
        width=width,
        context=frame["context_total"].to_numpy(float),
        prompt_read=chunks * (start + each),
        prompt_pairs=chunks * (each * start + each * (each + 1) / 2),
    )


def predicted(fit: ForwardFit, points: Points) -> Array:
    """Seconds of every point by coefficients with knots: what `Latency` says, for many points at once."""
    rows = points.rows
    at, layers = np.array(fit.layer_knots).T
    widths, kv = np.array(fit.kv_knots).T
    _, fixed = np.array(fit.width_knots).T

    def forward(tokens: Array, logits: Array) -> Array:
        top = np.maximum(fit.head_weights_s, fit.head_token_s * logits)
        return np.asarray(np.interp(tokens, at, layers) + np.where(logits > 0, top, 0.0))

    def attention(width: Array, context: Array) -> Array:
        reads = (context + rows * width) * np.interp(width, widths, kv) + rows * fit.row_s
        return np.asarray(reads + np.where(rows > 0, np.interp(width, widths, fixed), 0.0))

    later = points.steps - 1
    total = forward(points.tokens, points.logits) + attention(points.width, points.context)
    total += points.prompt_read * kv[0] + points.prompt_pairs * (fit.prompt_pair_s or 0.0)
    total += np.where((rows > 0) & (points.prompt_read > 0), fit.mixed_s, 0.0)
    grown = points.context + rows * (points.width + (later - 1) / 2)  # mean over the later steps
    total += later * (forward(np.maximum(rows, 1), rows) + attention(np.ones_like(rows), grown))
    return np.asarray(total * np.where(points.steps > 1, fit.draft_ratio, 1.0))


class Model:
    """The latency model as a function of its free parameters, all of them logarithms."""

    OTHERS = 5  # head efficiency, prompt pair, row, mixed forward, draft ratio

    def __init__(self, spec: ModelSpec, gpu: GpuSpec, points: Points) -> None:
        self.roof = ForwardFit.roofline(spec, gpu)
        most = max(float(points.tokens.max()), 2.0)
        self.knots = np.array([n for n in KNOTS if n < most] + [most])
        layers = np.maximum(self.roof.weights_s, self.roof.token_s * self.knots)
        attention = self.roof.kv_s * (1 + 0.05 * np.array(WIDTHS))
        others = [1.0, self.roof.pair_s, 1e-7, 1e-5, 1.0]
        fixed = np.full(len(WIDTHS), 1e-5)
        self.start = np.log(np.concatenate([layers * 1.3, attention, fixed, others]))

    def split(self, parameters: Array) -> tuple[Array, Array, Array, list[float]]:
        """Seconds at the layers' knots, per cached token and per forward at the widths, and the other figures."""
        values = np.exp(parameters)
        n, m = len(self.knots), len(self.knots) + len(WIDTHS)
        return values[:n], values[n:m], values[m : -self.OTHERS], values[-self.OTHERS :].tolist()

    def predict(self, parameters: Array, points: Points) -> Array:
        return predicted(self.result(parameters, (), ()), points)

    def fit(self, points: Points) -> Array:
        """Parameters with the least relative errors; a few points far off do not pull."""
        from scipy.optimize import least_squares

        log_knots = np.log(self.knots)

        def residuals(parameters: Array) -> Array:
            errors = np.log(self.predict(parameters, points) / points.seconds)
            slopes = np.diff(parameters[: len(log_knots)]) / np.diff(log_knots)
            others = slice(len(log_knots), None)
            prior = 0.003 * (parameters[others] - self.start[others])  # holds what no point tells
            return np.concatenate([errors, SMOOTHNESS * np.diff(slopes), prior])

        found = least_squares(residuals, self.start, loss="soft_l1", f_scale=0.03, max_nfev=400)
        return np.asarray(found.x)

    def result(
        self, parameters: Array, row_buckets: tuple[int, ...], chunk_buckets: tuple[int, ...], nimble_tokens: int = 0
    ) -> ForwardFit:
        layers, kv, fixed, (head, pair_s, row_s, mixed_s, draft_ratio) = self.split(parameters)
        return ForwardFit(
            fixed_s=0.0,
            weights_s=0.0,
            token_s=0.0,
            head_weights_s=head * self.roof.head_weights_s,
            head_token_s=head * self.roof.head_token_s,
            kv_s=float(kv[0]),
            pair_s=0.0,
            prompt_pair_s=pair_s,
            layer_knots=tuple((int(n), float(s)) for n, s in zip(self.knots, layers, strict=True)),
            kv_knots=tuple((int(n), float(s)) for n, s in zip(WIDTHS, kv, strict=True)),
            width_knots=tuple((int(n), float(s)) for n, s in zip(WIDTHS, fixed, strict=True)),
            row_s=row_s,
            mixed_s=mixed_s,
            nimble_tokens=nimble_tokens,
            draft_ratio=draft_ratio,
            row_buckets=row_buckets,
            chunk_buckets=chunk_buckets,
        )


@dataclass(frozen=True)
class Solo:
    """One model's fit, and the relative errors of points that it was not fitted on."""

    fit: ForwardFit
    points: int
    held_out: Array

    @property
    def median_error(self) -> float:
        return float(np.median(np.abs(self.held_out)))

    @property
    def p95_error(self) -> float:
        return float(np.percentile(np.abs(self.held_out), 95))


def fit_solo(
    frame: pd.DataFrame,
    spec: ModelSpec,
    gpu: GpuSpec,
    row_buckets: tuple[int, ...],
    chunk_buckets: tuple[int, ...],
    nimble_tokens: int = 0,
) -> Solo:
    """Fit one model's medians; errors by cross-validation over points."""
    points = points_of(frame)
    model = Model(spec, gpu, points)
    errors = np.empty(len(points))
    fold = np.random.default_rng(0).permutation(len(points)) % FOLDS
    for number in range(FOLDS):
        rest = model.fit(points.at(fold != number))
        out = points.at(fold == number)
        errors[fold == number] = model.predict(rest, out) / out.seconds - 1
    fit = model.result(model.fit(points), row_buckets, chunk_buckets, nimble_tokens)
    return Solo(fit, len(points), errors)
