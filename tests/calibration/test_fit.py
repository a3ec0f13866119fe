"""The fit gives back what made the samples, and predicts what it has not seen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from pdvsim.bench.join import middle
from pdvsim.calibration.fit.corun import Group, Member, errors, fit_groups, held_out, slowdowns
from pdvsim.calibration.fit.corun import measured as measured_slowdowns
from pdvsim.calibration.fit.forward import Kernels, Model, fit_solo
from pdvsim.calibration.fit.points import medians, price_s, tokens_of
from pdvsim.profiler import grid
from pdvsim.realrun.engine.buckets import CHUNK_BUCKETS, ROW_BUCKETS
from pdvsim.sim.models.presets import MODELS, model
from pdvsim.sim.prices.cards import GPUS
from pdvsim.sim.prices.costs import CostModel
from pdvsim.sim.prices.forward import ForwardTerms
from pdvsim.sim.prices.profile import ContentionFit
from pdvsim.sim.prices.transfer import shipped

H200 = GPUS["h200"]
SMS = 132
KERNELS = Kernels(ROW_BUCKETS, CHUNK_BUCKETS, programs=264)


def truth(name: str) -> ForwardTerms:
    """A card that misses its roofline by a different factor everywhere, with a jump between two kernels."""
    spec = MODELS[name]
    terms = ForwardTerms.roofline(spec, H200)
    roof = terms.figures()
    at = (1, 8, 32, 33, 64, 128, 256, 512, 1024, 2048, 2304)
    knots = tuple((n, 1.35 * max(roof["weights_s"], roof["token_s"] * n) * (1.12 if n > 32 else 1.0)) for n in at)
    stretch_s, kv_s = 2.5 * roof["kv_s"] * KERNELS.programs / spec.kv_heads, 1.25 * roof["kv_s"]
    return replace(
        terms, layer_knots=knots, head_weights_s=1.2 * terms.head_weights_s, head_token_s=1.2 * terms.head_token_s,
        kv_knots=((1, kv_s), (10, kv_s)), span_knots=((1, stretch_s), (10, stretch_s)), programs=KERNELS.programs,
        split_s=2e-5, width_knots=((1, 1e-5), (10, 1e-5)), row_s=1e-7, prompt_sms=SMS,
        prompt_wave_s=300 * roof["pair_s"] * SMS / spec.heads, mixed_s=5e-5, draft_ratio=0.97,
        row_buckets=ROW_BUCKETS, chunk_buckets=CHUNK_BUCKETS,
    )  # fmt: skip


def measured(latency: CostModel, design: list[grid.GridPoint], noise: float = 0.0) -> pd.DataFrame:
    """Medians of samples of the profiler's own design, timed by the latency model with noise."""
    rng, rows = np.random.default_rng(0), []
    for point in design:
        sizes = {
            "bucket_rows": min((b for b in ROW_BUCKETS if b >= point.rows), default=0) if point.rows else 0,
            "bucket_chunk": min(b for b in CHUNK_BUCKETS if b >= point.chunk_tokens) if point.chunks else 0,
            "context_total": point.rows * point.context,
        }
        seconds = price_s(latency, point.as_dict() | sizes) * np.exp(noise * rng.standard_normal(5))
        rows += [point.as_dict() | sizes | {"seconds": float(one)} for one in seconds]
    return medians(pd.DataFrame(rows))


DESIGN = grid.ordered(grid.design(drafts=True), 0)


def test_held_out_points_are_predicted_and_more_rows_are_as_fast_as_the_most() -> None:
    spec = MODELS["llama-2-7b"]
    solo = fit_solo(measured(CostModel(spec, truth(spec.name)), DESIGN, 0.005), spec, H200, KERNELS)
    assert middle(solo.errors)["median"] < 0.02
    assert middle(solo.errors)["p95"] < 0.06
    latency = CostModel(spec, replace(solo.fit, row_buckets=()))
    assert latency.price(2000, 1).seconds_1 == pytest.approx(latency.price(128, 1).seconds_1, rel=0.02)


def test_the_layers_go_as_measured_without_attention_between_the_points() -> None:
    """A kernel is slow from 548 to 560 tokens, which no point has: known from the layers alone, at another speed."""
    spec = MODELS["llama-3.1-8b"]
    smooth = truth(spec.name)
    line = dict(smooth.layer_knots)
    at = sorted({*line, *range(40, 2048, 4)})
    straight = np.interp(at, list(line), list(line.values()))
    jagged = {n: float(s) * (1.25 if 548 <= n <= 560 else 1.0) for n, s in zip(at, straight, strict=True)}
    true = CostModel(spec, replace(smooth, layer_knots=tuple(jagged.items())))
    frame, course = measured(true, DESIGN), {n: 0.9 * s for n, s in jagged.items() if n > 32}
    assert not set(tokens_of(frame)) & set(range(545, 575))
    errors = {}
    for known in (None, course):
        latency = CostModel(spec, fit_solo(frame, spec, H200, KERNELS, known).fit)
        errors[known is None] = [
            latency.price(rows, 9, prompts=[(0, 512)]).seconds_0 / true.price(rows, 9, prompts=[(0, 512)]).seconds_0 - 1
            for rows in (2, 4, 8)
        ]
    assert errors[False] == pytest.approx([0, 0, 0], abs=0.02)
    assert errors[True][1] < -0.12  # 4 x 9 + 512 = 548 tokens


@pytest.mark.parametrize("slow", [1.0, 1.08])
def test_the_coefficients_that_made_the_samples_come_back(slow: float) -> None:
    """Where the truth has the fit's own form, reading at the card's speed and by one program are separated.

    Attention over 16 and 32 rows may take 8% longer than over others, whatever they read.
    """
    spec = MODELS["llama-2-7b"]
    rows = ((1, 1.0), (8, 1.0), (16, slow), (32, slow), (48, 1.0), (49, 1.0))
    terms = ForwardTerms.read(truth(spec.name).figures() | {"row_factors": rows})
    frame = measured(CostModel(spec, terms), DESIGN)
    fitted = Model(spec, H200, KERNELS, max(tokens_of(frame)))
    best = fitted.fit(fitted.times(frame), frame["seconds"].to_numpy())
    fit = fitted.result(np.exp(best).tolist())
    figures, true = fit.figures(), terms.figures()
    factors = dict(figures["row_factors"])
    for count, factor in ((8, 1.0), (16, slow), (32, slow), (48, 1.0), (128, 1.0)):
        assert factors[count] / factors[64] == pytest.approx(factor, abs=0.02)
    if slow == 1:
        assert figures["kv_knots"][0][1] == pytest.approx(true["kv_knots"][0][1], rel=0.02)
        assert figures["span_knots"][0][1] == pytest.approx(true["span_knots"][0][1], rel=0.05)
        assert figures["draft_ratio"] == pytest.approx(true["draft_ratio"], rel=0.01)
        assert figures["prompt_wave_s"] == pytest.approx(true["prompt_wave_s"], rel=0.02)
        for tokens in (1, 16, 64, 256, 1024, 2048):  # the time of a forward, however it is split
            again, once = (
                CostModel(spec, of).price(0, prompts=[(0, tokens)], first_tokens=1).seconds_0 for of in (fit, terms)
            )
            assert again == pytest.approx(once, rel=0.03)


def test_traced_times_are_the_simulators_and_their_slopes_finite_differences() -> None:
    spec = MODELS["llama-3.1-8b"]
    frame = measured(CostModel(spec, truth(spec.name)), DESIGN)
    fitted = Model(spec, H200, KERNELS, max(tokens_of(frame)))
    times, at = fitted.times(frame), fitted.start + 0.1 * np.random.default_rng(0).standard_normal(len(fitted.start))
    seconds, slopes = times.predict(at)
    latency = CostModel(spec, fitted.result(np.exp(at).tolist()))
    assert seconds == pytest.approx([price_s(latency, point) for point in frame.to_dict("records")], rel=1e-12)
    for i, step in enumerate(1e-6 * np.eye(len(at))):
        change = (times.predict(at + step)[0] - times.predict(at - step)[0]) / 2e-6
        assert slopes[:, i] == pytest.approx(change, rel=1e-5, abs=1e-10)


def test_a_head_is_fitted_with_what_it_fuses() -> None:
    """Its drafts and prompts, timed as they are predicted for it: held-out points come back, and so does what the first
    forward of a draft has more than the others."""
    spec = model("eagle3-llama-3.1-8b")
    terms = replace(shipped().fit(spec, H200), draft_ratio=1.0)
    design = [p for p in grid.ordered(grid.design(drafts=True, heads=True), 0) if p.kind in ("draft", "prefill")]
    solo = fit_solo(measured(CostModel(spec, terms), design, 0.005), spec, H200, KERNELS)
    assert middle(solo.errors)["median"] < 0.02
    for count, width in ((1, 1), (8, 5), (64, 5)):
        again, once = (
            [CostModel(spec, fit).price(count, width, k).seconds_0 for k in (1, 4)] for fit in (solo.fit, terms)
        )
        assert again == pytest.approx(once, rel=0.04)


def test_experts_are_fitted_apart_from_what_every_token_takes() -> None:
    """The time to read an expert comes back: a token of each of eight requests reads more than eight tokens of one."""
    spec = model("qwen3-30b-a3b")
    terms = shipped().fit(spec, H200)
    solo = fit_solo(
        measured(CostModel(spec, terms), grid.ordered(grid.design(drafts=False), 0), 0.005), spec, H200, KERNELS
    )
    assert middle(solo.errors)["median"] < 0.02
    assert solo.fit.expert_s == pytest.approx(terms.expert_s, rel=0.1)


HELD = ContentionFit(
    stream_weight=1.0, crowd_weight=1.5, crowd_hold=0.9, turn_exponent=0.8, small_kernel_weight=2.0, yielding=0.4,
    hold=0.7, hold_compute=0.2, hold_layer_s=4e-4, hold_8bit=0.85, weight_8bit=1.2,
)  # fmt: skip


def group(
    ordered: bool, small: float, triple: bool = False, long_us: float = 380.0, eight_bits: bool = False,
    wait_ratio: float = 1.0, room_ratio: float = 1.0,
) -> Group:  # fmt: skip
    """Concurrent launches, as fast as the figures above make them; the ratios are those of the prompt."""

    def member(kind: str, priority: int, *asked: float) -> Member:
        names = ("compute", "bandwidth", "layer_s", "small_kernel_share", "empty")
        demand = dict(zip(names, asked, strict=True))
        return Member(kind=kind, model="a", priority=priority, measured=1.0, solo_s=1e-3, **demand)

    members = [
        member("draft", 2 * ordered, 0.3, 0.6, 60e-6, small, 0.0),
        member("prefill", 0, 0.6, 0.3, long_us * 1e-6, 0.0, 0.1),
    ]
    if triple:
        members.insert(1, member("verify", 1 * ordered, 0.2, 0.7, 150e-6, 0.0, 0.0))
    for target in members[1:]:
        target.eight_bits, target.model = eight_bits, "a-fp8" if eight_bits else "a"
    members[-1].prompt, members[-1].wait_ratio, members[-1].room_ratio = round(long_us), wait_ratio, room_ratio
    pair = Group("a:b", f"{small} {triple} {long_us}", members)
    for member, slowdown in zip(members, slowdowns([pair], HELD), strict=True):
        member.measured = 1 / slowdown
    return pair


def test_the_sharing_model_explains_slowdowns_it_made() -> None:
    groups = [group(o, n) for o, n in ((True, True), (False, True), (True, False), (False, False))]
    assert np.abs(errors(groups, HELD)).max() < 1e-9
    assert np.abs(errors(groups, ContentionFit())).max() > 0.05
    first, small, _, equal = ([member.measured for member in g.members] for g in groups)
    # longer kernels hold more of it; a tenth of the GPU is left empty
    held = [1 - 0.3 / (1 + 60 / 400) + 0.2 * 0.3, (1 - 0.3 / (1 + 380 / 400) + 0.2 * 0.6) * 0.9]
    assert np.dot(first, held) == pytest.approx(1.0)
    assert np.dot(equal, held) == pytest.approx(1.0)
    turns = (60 / 380) ** 0.8 / 0.9  # by the length of the kernels, of what is not empty
    assert equal[0] / equal[1] == pytest.approx(turns)
    assert small[0] / small[1] == pytest.approx(2 * turns)
    assert first[0] / first[1] == pytest.approx(2 * turns * (380 / 60) ** 0.4)  # and first in line
    assert measured_slowdowns(groups[-1:]) == pytest.approx([1 / rate for rate in equal])


def test_the_figures_of_sharing_come_back() -> None:
    """Pairs and triples made by known figures give figures that predict like them, and the one of triples itself."""
    groups = [group(o, n, t, us) for o in (True, False) for n in (True, False) for t in (True, False)
              for us in (150.0, 380.0, 800.0)]  # fmt: skip
    fit, ratios = fit_groups(groups)
    assert [*ratios["wait"].values(), *ratios["room"].values()] == pytest.approx([1.0] * 6, abs=0.02)
    assert np.median(np.abs(errors(groups, fit))) < 0.02
    assert fit.crowd_weight == pytest.approx(1.5, rel=0.1)
    assert fit.crowd_hold == pytest.approx(0.9, abs=0.02)
    assert fit.small_kernel_weight == pytest.approx(2.0, rel=0.05)
    assert fit.yielding == pytest.approx(0.4, rel=0.1)
    assert fit_groups([g for g in groups if len(g.members) == 3]) is None  # nothing to start from


def test_held_out_groups_are_predicted_by_fits_without_them() -> None:
    """Each part by the others; one without which no pairs are left is not predicted."""
    groups = [group(o, n, long_us=us) for o in (True, False) for n in (True, False) for us in (150.0, 380.0)]
    parts = [at % 2 for at in range(len(groups))]
    predicted = held_out(groups, parts, lambda: None)
    for part in (0, 1):
        mine, others = (
            [one for one, other in zip(groups, parts, strict=True) if (other == part) is own] for own in (True, False)
        )
        members = np.repeat(parts, 2) == part
        assert predicted[members] == pytest.approx(slowdowns(mine, *fit_groups(others)))
    assert np.isnan(held_out(groups, [0] * len(groups), lambda: None)).all()


def test_what_is_measured_of_a_prompt_comes_back() -> None:
    """One whose kernels keep others waiting twice as long as its time per layer predicts, one that leaves room."""
    groups = [group(o, n, t, us, wait_ratio=2.0 if us == 380.0 else 1.0, room_ratio=0.7 if us == 600.0 else 1.0)
              for o in (True, False) for n in (True, False) for t in (True, False)
              for us in (150.0, 250.0, 380.0, 600.0, 800.0)]  # fmt: skip
    _, ratios = fit_groups(groups)
    for measured, prompt, ratio in ((ratios["wait"], 380, 2.0), (ratios["room"], 600, 0.7)):
        others = np.median([factor for (_, tokens), factor in measured.items() if tokens != prompt])
        assert measured["a", prompt] / others == pytest.approx(ratio, rel=0.15)


@pytest.mark.parametrize(
    "figures", [{"hold_8bit": 0.85, "weight_8bit": 1.2}, {"small_expert_weight": 1.3, "small_expert_hold": 1.1}]
)
def test_what_8_bits_and_small_kernels_between_experts_share_is_fitted_apart(figures: dict[str, float]) -> None:
    """It comes back, and what dense launches have stays as it was."""
    bits = "hold_8bit" in figures
    dense, others = (
        [group(o, n, t, us, eight_bits) for o in (True, False) for n in (True, False) for t in (True, False)
         for us in (150.0, 380.0, 800.0)]
        for eight_bits in (False, bits)
    )  # fmt: skip
    for each in others if not bits else ():
        draft, *targets = each.members
        draft.experts_read, draft.small_kernel_share = 0.8, 0.1
        for target in targets:
            target.model = "mixture"
        for member, slowdown in zip(each.members, slowdowns([each], replace(HELD, **figures)), strict=True):
            member.measured = 1 / slowdown
    (alone, _), (both, _) = fit_groups(dense), fit_groups(dense + others)
    for name, value in figures.items():
        assert getattr(alone, name) == 1
        assert getattr(both, name) == pytest.approx(value, rel=0.02 if "hold" in name else 0.05)
    assert replace(both, expert_weight=1.0, **dict.fromkeys(figures, 1.0)) == alone
    assert np.abs(errors(others, alone)).mean() > 5 * np.abs(errors(others, both)).mean()
