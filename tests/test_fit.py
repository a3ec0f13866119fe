"""The fit gives back what made the samples, and predicts what it has not seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from pdvsim.calibration.build import gpu_spec, nimble_tokens
from pdvsim.calibration.corun import Member, errors, members_of
from pdvsim.calibration.fit import Model, fit_solo, medians, points_of
from pdvsim.profiler import grid
from pdvsim.profiler.samples import Samples, load
from pdvsim.realrun.buckets import CHUNK_BUCKETS, ROW_BUCKETS
from pdvsim.sim.contention import Sharing
from pdvsim.sim.core import Chunk, Request
from pdvsim.sim.latency import ForwardFit, Latency
from pdvsim.sim.models import GPUS, MODELS
from pdvsim.sim.profile import ContentionFit, builtin, shipped_profile
from pdvsim.sim.profile import load as load_profile

H200 = GPUS["h200"]
DATA = Path(__file__).parents[1] / "calibration" / "data"


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
    fit = ContentionFit(
        stream_weight=1.5,
        turn_exponent=0.8,
        nimble_weight=2.0,
        nimble_first_rate=0.65,
        nimble_together=1.2,
        together=1.1,
    )
    groups = []
    for ordered, nimble in ((True, True), (False, True), (True, False), (False, False)):
        pair = [
            Member("draft", "decode", int(ordered), 0.3, 0.6, 60e-6, nimble, 1.0),
            Member("prefill", "prefill", 0, 0.6, 0.3, 380e-6, False, 1.0),
        ]
        Sharing("fluid", "stream" if ordered else "none", fit).solve(pair)
        for member in pair:
            member.measured = member.rate
        groups.append(pair)
    assert np.abs(errors(groups, fit)).max() < 1e-9
    assert np.abs(errors(groups, ContentionFit())).max() > 0.05
    shares = [[member.measured for member in pair] for pair in groups]
    assert shares[0][0] == pytest.approx(0.65)  # nimble and first in line: its rate, whatever else runs
    assert sum(shares[0]) == pytest.approx(1.2)
    assert sum(shares[3]) == pytest.approx(1.1)
    assert shares[3][0] / shares[3][1] == pytest.approx((60 / 380) ** 0.8)  # turns, by the length of the kernels


@pytest.fixture(scope="module")
def shipped() -> Samples:
    return load(DATA / "h200")


def test_the_shipped_profile_is_the_default_and_stands_the_strict_reader() -> None:
    path = shipped_profile("h200")
    assert path is not None
    assert builtin("h200") == load_profile(DATA / "h200.json")
    assert builtin("h200").foundation.startswith("measured on NVIDIA H200")
    assert set(builtin("h200").models) == set(MODELS)


def test_the_shipped_profile_comes_from_the_shipped_samples(shipped: Samples) -> None:
    """One model fitted again gives the coefficients that are shipped, and holds on points it has not seen."""
    name = "llama-3.2-1b"
    spec, gpu = shipped.header.specs()[name], gpu_spec(shipped.header, "h200")
    rows = shipped.frame[(shipped.frame["section"] == "solo") & (shipped.frame["model"] == name)]
    solo = fit_solo(medians(rows), spec, gpu, ROW_BUCKETS, CHUNK_BUCKETS, nimble_tokens(spec))
    again, kept = Latency(spec, solo.fit), Latency(spec, builtin("h200").models[name])
    for shape in ((1, 1, 1), (8, 5, 1), (64, 5, 1), (32, 1, 4)):
        assert again.shape(*shape).solo_0 == pytest.approx(kept.shape(*shape).solo_0, rel=0.01)
    assert solo.median_error < 0.025
    assert solo.p95_error < 0.10


def test_co_runs_are_explained(shipped: Samples) -> None:
    """Medians of the slowdowns' errors on the shipped co-runs, against ideal sharing as other simulators have it."""
    models = {name: Latency(MODELS[name], fit) for name, fit in builtin("h200").models.items()}
    groups = members_of(shipped.frame, builtin("h200").gpu, models)
    ours = np.abs(errors(groups, builtin("h200").contention))
    ideal = np.abs(errors(groups, ContentionFit()))
    assert np.median(ours) < 0.08
    assert np.median(ideal) > 2 * np.median(ours)
