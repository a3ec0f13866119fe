"""Cached prefixes on the real engine: pages are shared, and no token changes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_serving import MACHINE, OWN, continued, let_adaptive_switch, rig_for
from tiny_engines import CPU, SLOTS_OF_FOUR

from pdvsim.realrun.engine.cache import PAGE, SCRATCH_PAGES, Sequences
from pdvsim.realrun.machine import as_served
from pdvsim.realrun.memory import PagedKv
from pdvsim.realrun.site import TINY, serve
from pdvsim.realrun.texts import next_turns, prompts, repeated
from pdvsim.sim.config import Arch, Experiment, Hardware, Server, Traffic
from pdvsim.sim.core import ENDLESS, Request
from pdvsim.sim.machine.prefix import Reuse
from pdvsim.sim.records import Result
from pdvsim.sim.relevance import applicable
from pdvsim.sim.run import simulate
from pdvsim.sim.workload.requests import make_requests

TALKS = Traffic("random", num_prompts=9, num_turns=3, input_len=20, output_len=12, random_range_ratio=0.5)
BOTH = replace(TALKS, prefix_len=35, num_prefixes=2)  # turns share their conversation's text, and prefixes with others


def sharing(arch: Arch, traffic: Traffic, rate: float = 200.0, room: int | None = None, **server: Any) -> Experiment:
    """Few slots, and prompts of several chunks."""
    chosen = Experiment(arch, replace(traffic, request_rate=rate), server=Server(**SLOTS_OF_FOUR | server))
    return applicable(replace(chosen, hardware=Hardware(kv_capacity_tokens=room)))


def uncached(chosen: Experiment) -> Experiment:
    return replace(chosen, server=replace(chosen.server, enable_prefix_caching=False))


def tokens_of(chosen: Experiment, noise: float = 0.2) -> tuple[dict[int, list[int]], Result]:
    requests, outputs = make_requests(chosen.traffic, chosen.acceptance), dict[int, list[int]]()
    rig = rig_for(chosen, requests, noise)
    return outputs, serve(chosen, OWN, requests=requests, rig=rig, outputs=outputs)


def one_after_the_other(chosen: Experiment) -> dict[int, list[int]]:
    """Each request's tokens alone and without any cache; a conversation's next prompt begins with the last answer."""
    requests = make_requests(chosen.traffic, chosen.acceptance)
    texts_drawn = prompts(requests, TINY["target"].spec.vocab, chosen.traffic.seed)
    texts = {number: text.tolist() for number, text in texts_drawn.items()}
    outputs: dict[int, list[int]] = {}
    following = next_turns(requests)
    for request in requests:
        outputs[request.id] = continued(tuple(texts[request.id]), request.output_tokens)
        if (turn := following.get(request.id)) is not None:
            conversation = [*texts[request.id], *outputs[request.id]]
            texts[turn.id][: len(conversation)] = conversation
    return outputs


@pytest.fixture(autouse=True)
def _pages_are_free_cached_or_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    release = PagedKv.release_slot

    def watched(self: PagedKv, request: Request) -> None:
        release(self, request)
        self.check_integrity()

    monkeypatch.setattr(PagedKv, "release_slot", watched)


@pytest.mark.parametrize("arch", ["autoregressive", "colocated", "pd", "pdv-hybrid", "adaptive"])
def test_caching_changes_no_token(arch: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    let_adaptive_switch(monkeypatch, "plain", "atomic", "lanes")
    chosen = sharing(arch, BOTH)
    cached, result = tokens_of(chosen)
    assert cached == one_after_the_other(chosen)
    assert result.requests["num_cached_tokens"].sum() > 100
    if arch == "colocated":  # that others change no token without a cache is test_serving's
        computed, without = tokens_of(uncached(chosen))
        assert computed == cached
        assert result.launches["tokens"].sum() < without.launches["tokens"].sum()
        assert (without.requests["num_cached_tokens"] == -1).all()


@pytest.mark.parametrize("arch", ["colocated", "pdv"])
def test_evicted_and_preempted_tokens_are_computed_again(arch: Arch) -> None:
    """Over a cache that holds two of the longest requests."""
    chosen = sharing(arch, replace(BOTH, num_prompts=15), math.inf, room=16 * PAGE)
    cached, result = tokens_of(chosen)
    assert cached == one_after_the_other(chosen)
    assert result.meta["prefix_cache_evictions"] > 0
    assert result.requests["num_cached_tokens"].max() > 0


@pytest.mark.parametrize("arch", ["colocated", "pd"])
def test_early_drafts_leave_cached_pages_as_they_are(arch: Arch) -> None:
    for room in (None, 16 * PAGE):
        chosen = sharing(arch, BOTH, math.inf, room, async_scheduling=True)
        assert tokens_of(chosen)[0] == one_after_the_other(chosen)


@pytest.mark.parametrize("arch", ["colocated", "adaptive"])
def test_the_drafter_has_no_hole_in_what_is_cached(arch: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter equal to its target is always right, if it has read what it does not find cached."""
    let_adaptive_switch(monkeypatch, "plain", "plain", "atomic")
    for traffic in (TALKS, replace(TALKS, random_range_ratio=0.0, input_len=16, output_len=17)):
        _, result = tokens_of(sharing(arch, traffic), noise=0.0)
        assert result.requests["accepted"].sum() == result.requests["drafted"].sum() > 0
        assert result.requests["num_cached_tokens"].sum() > 100


def by_turn(result: Result, name: str) -> dict[tuple[int, int], int]:
    """A column by conversation and turn, or by number where there are none: turns are numbered as they are sent."""
    columns = [result.requests[column].tolist() for column in ("session", "turn", "id", name)]
    return {
        (turn, session) if session >= 0 else (-1, id): value for session, turn, id, value in zip(*columns, strict=True)
    }


@pytest.mark.parametrize("arch", ["autoregressive", "colocated", "pdv", "pdv-ahead", "adaptive"])
def test_conversations_hit_as_simulated(arch: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    let_adaptive_switch(monkeypatch, "atomic", "lanes", "lanes")
    chosen = sharing(arch, TALKS, room=4096)
    real, simulated = serve(chosen, MACHINE), simulate(chosen)
    for name in ("prompt_tokens", "rounds", "drafted", "accepted", "num_cached_tokens"):
        assert by_turn(real, name) == by_turn(simulated, name), name
    assert real.requests["num_cached_tokens"].sum() > 100


@pytest.mark.parametrize("drafter", ["model", "ngram", "eagle3"])
@pytest.mark.parametrize("room", [4096, 20 * PAGE])
def test_the_same_flags_give_the_same_hits(drafter: str, room: int) -> None:
    """Where all requests are there from the start, one lane's decisions depend on no clock, evictions included."""
    chosen = sharing("colocated", replace(BOTH, num_prompts=24), math.inf, room, drafter=drafter)
    real, simulated = serve(chosen, MACHINE), simulate(as_served(chosen))
    assert by_turn(real, "num_cached_tokens") == by_turn(simulated, "num_cached_tokens")
    if drafter == "model":
        for name in ("kind", "role", "rows", "tokens", "context", "prompt_start"):
            np.testing.assert_array_equal(real.launches[name], simulated.launches[name], name)
    for name in ("kv_peak_tokens", "kv_peak_shared_tokens", "kv_cached_tokens", "prefix_cache_evictions"):
        assert real.meta[name] == simulated.meta[name], name
    assert (real.meta["prefix_cache_evictions"] > 0) == (room < 4096)


def test_prompts_are_equal_as_far_as_their_texts() -> None:
    first = Request(0, 0.0, 100, 9, b"", ((40, 2), (ENDLESS, 3)), session=0)
    other = Request(1, 0.0, 60, 9, b"", ((40, 2), (ENDLESS, 5)), session=1)
    turn = Request(2, 0.0, 150, 9, b"", ((40, 2), (ENDLESS, 3)), session=0, turn=1)
    again = Request(3, 0.0, 90, 9, b"", ((40, 2), (70, 3), (ENDLESS, 7)), session=0, turn=2)
    texts = prompts([first, other, turn, again], 1000, 0)
    assert np.array_equal(texts[0][:40], texts[1][:40])
    assert not np.array_equal(texts[0][40:60], texts[1][40:])
    assert np.array_equal(texts[0], texts[2][:100])
    assert np.array_equal(texts[0][:70], texts[3][:70])
    assert not np.array_equal(texts[0][70:90], texts[3][70:])
    assert next_turns([first, other, turn, again]) == {0: turn, 2: again}
    assert (repeated(first, turn), repeated(turn, again)) == (109, 70)


def test_two_slots_have_the_pages_of_a_prefix_and_the_oldest_are_used_again() -> None:
    """Six pages, worked by hand: a prompt of three blocks, one that shares two of them, and one that needs five."""
    kv = PagedKv(6 * PAGE, 0, True, Sequences(3, 96, CPU, SCRATCH_PAGES + 6), Reuse())
    tables: dict[int, list[int]] = {}

    def read(request: Request) -> None:
        assert kv.admit(request, request.prompt_tokens)
        slot = kv.take_slot(request)
        _, cached = kv.shared(request)
        tables[request.id] = cached + [page for _, page in kv.grown([slot], [request.prompt_tokens])]
        kv.number(request)
        kv.check_integrity()

    def leave(request: Request) -> None:
        request.state.context = request.prompt_tokens
        kv.release(request)
        kv.release_slot(request)
        kv.check_integrity()

    a = Request(0, 0.0, 48, 1, b"", ((32, 0), (ENDLESS, 1)))
    b = Request(1, 0.0, 50, 1, b"", ((32, 0), (ENDLESS, 3)))
    c = Request(2, 0.0, 80, 1, b"", ((32, 0), (ENDLESS, 5)))
    read(a)
    read(b)
    assert (tables[0], tables[1]) == ([4, 5, 6], [4, 5, 7, 8])
    leave(a)
    leave(b)
    read(c)  # two pages are free, and the third block of the first prompt is the oldest
    assert tables[2] == [4, 5, 9, 8, 6]
    leave(c)
