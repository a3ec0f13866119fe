"""The fit gives back what made the samples, and predicts what it has not seen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from pdvsim.calibration.corun import PAIRS, Member, errors
from pdvsim.calibration.fit import Model, fit_solo, medians, points_of
from pdvsim.profiler import grid
from pdvsim.realrun.buckets import CHUNK_BUCKETS, ROW_BUCKETS
from pdvsim.sim.contention import Sharing
from pdvsim.sim.core import Chunk, Request
from pdvsim.sim.latency import ForwardFit, Latency
from pdvsim.sim.models import GPUS, MODELS
from pdvsim.sim.profile import ContentionFit

H200 = GPUS["h200"]


def truth(name: str) -> ForwardFit:
    """A card that misses its roofline by a different factor everywhere, with a jump between two kernels."""
    roof = ForwardFit.roofline(MODELS[name], H200)
    at = (1, 8, 32, 33, 64, 128, 256, 512, 1024, 2048, 2304)
    knots = tuple((n, 1.35 * max(roof.weights_s, roof.token_s * n) * (1.12 if n > 32 else 1.0)) for n in at)
    return replace(
        roof, layer_knots=knots, head_weights_s=1.2 * roof.head_weights_s, head_token_s=1.2 * roof.head_token_s,
        kv_s=1.25 * roof.kv_s, pair_s=2.0 * roof.pair_s, prompt_pair_s=1.6 * roof.pair_s, draft_ratio=0.97,
        row_buckets=ROW_BUCKETS, chunk_buckets=CHUNK_BUCKETS,
    )  # fmt: skip


def measured(name: str, noise: float, seed: int = 0) -> pd.DataFrame:
    """Samples of the profiler's own design, timed by the latency model with noise."""
    latency, rng = Latency(MODELS[name], truth(name)), np.random.default_rng(seed)
    rows = []
    for point in grid.ordered(grid.design(drafts=True), 0):
        context = point.rows * point.context
        each = point.chunk_tokens // max(1, point.chunks)
        ends = 0 if point.emits else 1  # a prompt that goes on yields no token
        request = Request(0, 0.0, point.chunk_start + each + ends, 9, b"")
        chunks = [Chunk(request, point.chunk_start, each)] * point.chunks
        if chunks:
            shape = latency.carrying(point.rows, max(1, point.tokens), point.steps, chunks, True)
        else:
            shape = latency.shape(point.rows, point.tokens, point.steps)
        seconds = shape.solo_0 + shape.solo_1 * context
        bucket = min((b for b in ROW_BUCKETS if b >= point.rows), default=0) if point.rows else 0
        chunk = min(b for b in CHUNK_BUCKETS if b >= point.chunk_tokens) if point.chunks else 0
        rows += [
            point.as_dict() | {"bucket_rows": bucket, "bucket_chunk": chunk, "context_total": context,
                               "seconds": seconds * float(np.exp(noise * rng.standard_normal()))}
            for _ in range(5)
        ]  # fmt: skip
    return pd.DataFrame(rows)


@pytest.mark.parametrize("name", ["tinyllama-1.1b", "llama-2-7b"])
def test_held_out_points_are_predicted(name: str) -> None:
    solo = fit_solo(medians(measured(name, 0.005)), MODELS[name], H200, ROW_BUCKETS, CHUNK_BUCKETS)
    assert solo.median_error < 0.02
    assert solo.p95_error < 0.06


def test_the_profile_prices_as_the_fit_does() -> None:
    """The fit has its own vectorised formula; the simulator must read its coefficients the same way."""
    frame = medians(measured("llama-2-7b", 0.0))
    points = points_of(frame)
    model = Model(MODELS["llama-2-7b"], H200, points)
    parameters = model.fit(points)
    latency = Latency(MODELS["llama-2-7b"], model.result(parameters, ROW_BUCKETS, CHUNK_BUCKETS))
    predicted = model.predict(parameters, points)
    for i, row in enumerate(frame.itertuples()):
        if row.rows == row.bucket_rows and not row.chunks:
            shape = latency.shape(int(row.rows), int(row.tokens), int(row.steps))
            assert shape.solo_0 + shape.solo_1 * row.context_total == pytest.approx(predicted[i], rel=5e-3)


def test_the_sharing_model_explains_slowdowns_it_made() -> None:
    fit = ContentionFit(stream_weight=2.5, efficiency=dict(zip(PAIRS, (0.8, 0.9, 0.7), strict=True)))
    groups = []
    for a, b, ordered in (("draft", "verify", True), ("draft", "prefill", False), ("prefill", "verify", True)):
        pair = [Member(a, "decode", 1 if ordered else 0, 0.3, 0.8, 1.0), Member(b, "verify", 0, 0.6, 0.7, 1.0)]
        Sharing("fluid", "stream" if ordered else "none", fit).solve(pair)
        for member in pair:
            member.slowdown = 1 / member.rate
        groups.append(pair)
    assert np.abs(errors(groups, fit)).max() < 1e-9
    assert np.abs(errors(groups, ContentionFit())).max() > 0.05
