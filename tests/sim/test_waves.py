"""Attention over prompts in waves of programs, worked by hand on a card of 132 multiprocessors."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdvsim.sim.models.presets import MODELS
from pdvsim.sim.prices.cards import GPUS
from pdvsim.sim.prices.costs import CostModel, Load
from pdvsim.sim.prices.forward import UNSHARED, ForwardTerms, in_waves

SMS = 132


@pytest.mark.parametrize(("chunks", "heads", "head_dim", "context"), [
    ([(4000, 256)], 32, 128, 4256),  # 64 programs side by side: the longer block's context
    ([(3000, 512)], 32, 128, 3512),  # 128 still are
    # 256 programs: the first 132 are of blocks that end at 4024 to 3640, and four of 3512, which begins the second
    ([(3000, 1024)], 32, 128, 4024 + 3512),
    ([(3000, 1024)], 12, 128, 4024),  # 96 with fewer heads
    ([(3000, 512)], 16, 256, 3512),  # wide heads take blocks of 64 queries: 128 programs
    ([(3000, 1024)], 16, 256, 4024 + 3512),  # and 256, the second wave from the ninth of 16 blocks on
    ([(4000, 256)], 32, 64, UNSHARED * 4256),  # small heads: 64 programs have their multiprocessors to themselves
    ([(3000, 512)], 32, 64, 3512),  # 128 do not
    ([(3000, 1024)], 32, 64, 4024),  # 256 run concurrently, ...
    ([(4000, 2048)], 32, 64, 6048 + 5024),  # ... 512 do not: 264 are the eight longest blocks and some of the ninth
    ([(3000, 512), (0, 64)], 32, 128, 3512 + 64),  # 128 long programs, 32 short ones, four of which co-run
    ([(0, 64), (3000, 512)], 32, 128, 3512 + 64),
    ([(2000, 256)] * 3, 32, 128, 2256 + 2128),  # 96 programs of each context
    ([], 32, 128, 0),
])  # fmt: skip
def test_waves_by_hand(chunks: list[tuple[int, int]], heads: int, head_dim: int, context: float) -> None:
    assert in_waves(chunks, heads, head_dim, SMS) == pytest.approx(context)


def test_the_room_that_attention_leaves() -> None:
    """Of a second, half of it attention: 64 programs fill 64 of 132 multiprocessors, 256 in two waves 256 of 264.

    Without prompts, or on a card whose attention has no waves, there is no note.
    """
    spec = MODELS["llama-2-7b"]  # 32 heads of 128

    def empty(wave_s: float, prompts: list[tuple[int, int]], sms: int = SMS) -> float:
        load = Load(solo_s=1.0)
        terms = ForwardTerms(pair_s=1e-12, prompt_sms=sms, prompt_wave_s=wave_s)
        CostModel(spec, terms).demand(load, (1.0, 1.0), 1.0, 1.0, 0, 1, 1, prompts)
        return load.empty

    assert empty(0.5 / 4256, [(4000, 256)]) == pytest.approx(0.5 * 68 / 132)
    assert empty(0.5 / (4024 + 3512), [(3000, 1024)]) == pytest.approx(0.5 * 8 / 264)
    assert empty(0.5 / 4256, []) == empty(0.0, [(4000, 256)], sms=0) == 0.0


several = st.lists(st.tuples(st.integers(0, 8000), st.integers(1, 2500)), min_size=1, max_size=5)
sizes = st.tuples(st.sampled_from([1, 8, 12, 32, 64]), st.sampled_from([64, 128, 256]), st.integers(1, 200))


@given(several, sizes, st.integers(0, 3000), st.integers(0, 600), st.tuples(st.integers(0, 8000), st.integers(1, 2500)))
def test_more_to_read_is_never_faster(
    chunks: list[tuple[int, int]], size: tuple[int, int, int], back: int, more: int, decoding: tuple[int, int]
) -> None:
    least, (start, tokens) = in_waves(chunks, *size), chunks[0]
    assert in_waves([(start + back, tokens + more), *chunks[1:]], *size) >= least
    assert in_waves([*chunks, decoding], *size) >= least


@given(several, sizes)
def test_waves_are_no_faster_than_without_gaps_and_waste_less_than_one(
    chunks: list[tuple[int, int]], size: tuple[int, int, int]
) -> None:
    """No wave's longest program is longer than the mean of the full wave before it."""
    heads, head_dim, sms = size
    block, at_once = 64 if head_dim > 128 else 128, 2 * sms if head_dim == 64 else sms
    ends = [start + min(end, n) for start, n in chunks for end in range(block, n + block, block)]
    context, without_gaps = in_waves(chunks, *size), heads * sum(ends) / at_once
    assert UNSHARED * max(max(ends), without_gaps) <= context <= max(ends) + without_gaps


def test_a_forward_goes_through_its_waves() -> None:
    """A prompt that begins later takes the waves' figure for each context token more, and nothing else."""
    spec = MODELS["llama-3.1-8b"]
    fit = replace(ForwardTerms.roofline(spec, GPUS["h200"]), prompt_sms=SMS, prompt_wave_s=6e-7)
    latency = CostModel(spec, fit)

    def seconds(start: int) -> float:
        return latency.price(0, prompts=[(start, 1024)]).seconds_0

    assert seconds(3000) - seconds(0) == pytest.approx(6e-7 * 2 * 3000)
    slower = CostModel(spec, fit.scaled(2.0)).price(0, prompts=[(0, 1024)])
    assert slower.seconds_0 == pytest.approx(2 * seconds(0))
