"""Laws of a real run, on the CPU with tiny models: the same policies, requests and coins as in the simulator."""

from __future__ import annotations

import itertools
import json
import math
from copy import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from tiny_engines import CPU, SLOTS_OF_FOUR

from pdvsim.realrun.device import ServingRig
from pdvsim.realrun.engine.arch import from_config
from pdvsim.realrun.engine.cache import PAGE, Sequences
from pdvsim.realrun.engine.engine import Engine
from pdvsim.realrun.engine.graphs import GraphLane
from pdvsim.realrun.engine.model import Transformer
from pdvsim.realrun.engine.weights import random_weights
from pdvsim.realrun.machine import Machine, as_served
from pdvsim.realrun.memory import Needs
from pdvsim.realrun.site import TINY, prepare, serve, warm_up
from pdvsim.realrun.texts import prompts
from pdvsim.sim.config import Acceptance, Arch, Experiment, KvPolicy, Server, Traffic
from pdvsim.sim.core import KINDS, Request, Role
from pdvsim.sim.policies import ARCHS
from pdvsim.sim.policies.hybrid import Adaptive
from pdvsim.sim.records import Result
from pdvsim.sim.relevance import applicable
from pdvsim.sim.run import simulate
from pdvsim.sim.workload.requests import make_requests
from studies.engine_check import generate

JUDGED = tuple(arch for arch in ARCHS if arch != "pdv-ahead")  # whose verdicts may be the models' own
MACHINE = Machine(device="cpu", tiny=True)
SAME = TemporaryDirectory()  # holds the configuration of a drafter as large as its target
OWN = Machine(device="cpu", draft_path=SAME.name, target_path=SAME.name)
ROUNDS = ("id", "prompt_tokens", "output_tokens", "rounds", "drafts", "drafted", "accepted")
DECODE, DRAFT = KINDS.index("decode"), KINDS.index("draft")


def experiment(arch: Arch, rate: float = 200.0, **server: Any) -> Experiment:
    """Few slots, prompts of several chunks, and outputs from one token on."""
    traffic = Traffic("random", num_prompts=9, request_rate=rate, input_len=30, output_len=10, random_range_ratio=0.9)
    return applicable(Experiment(arch, traffic, server=Server(**SLOTS_OF_FOUR | server)))


def same_rounds(chosen: Experiment, *more: str) -> tuple[Result, Result]:
    """A real and a simulated run, whose requests went through the same rounds: verdicts are pinned."""
    real, simulated = serve(chosen, MACHINE), simulate(applicable(as_served(chosen)))
    for name in (*ROUNDS, *more):
        np.testing.assert_array_equal(real.requests[name], simulated.requests[name], name)
    return real, simulated


@cache
def models(noise: float = 0.2) -> dict[Role, Transformer]:
    """A target, and a drafter that often agrees with it."""
    spec = TINY["target"].spec
    config = {
        "model_type": "llama", "num_hidden_layers": spec.layers, "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate, "num_attention_heads": spec.heads, "head_dim": spec.head_dim,
        "num_key_value_heads": spec.kv_heads, "vocab_size": spec.vocab, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (Path(SAME.name) / "config.json").write_text(json.dumps(config))
    arch = from_config(SAME.name)
    ours, theirs = (random_weights(arch, CPU, torch.float32, 1) for _ in range(2))
    generator = torch.Generator().manual_seed(2)
    theirs.head.add_(torch.randn(theirs.head.shape, generator=generator) * noise * theirs.head.std())
    return {"draft": Transformer(arch, theirs, 64), "target": Transformer(arch, ours, 64)}


def rig_for(chosen: Experiment, requests: list[Request], noise: float = 0.2) -> ServingRig:
    networks = models(noise)
    if chosen.arch == "autoregressive":
        networks = {"target": networks["target"]}
    return prepare(chosen, OWN, requests, models=networks)


def plain_greedy(requests: list[Request], rig: ServingRig, seed: int) -> dict[int, list[int]]:
    """Each request's tokens, one request and one token at a time."""
    vocab = rig.models["target"].arch.spec.vocab
    texts = {i: tuple(text.tolist()) for i, text in prompts(requests, vocab, seed).items()}
    return {r.id: continued(texts[r.id], r.output_tokens) for r in requests}


@cache
def continued(text: tuple[int, ...], tokens: int) -> list[int]:
    """Output tokens after a prompt; the same prompts are served by every architecture."""
    return generate(alone(), [list(text)], tokens)[0]


@cache
def alone() -> GraphLane:
    """The target with room for one sequence."""
    target, capacity = models()["target"], 256
    return GraphLane(Engine(Transformer(target.arch, target.weights, capacity), Sequences(1, capacity, CPU)))


def serve_and_compare(chosen: Experiment, noise: float = 0.2, output_len: int | None = None) -> Result:
    """Serve an experiment with the models' own verdicts; each request must read as if it had been alone."""
    traffic = chosen.traffic if output_len is None else replace(chosen.traffic, output_len=output_len)
    requests, outputs = make_requests(traffic, chosen.acceptance), dict[int, list[int]]()
    rig = rig_for(chosen, requests, noise)
    result = serve(chosen, OWN, requests=requests, rig=rig, outputs=outputs)
    assert outputs == plain_greedy(requests, rig, chosen.traffic.seed)
    return result


def let_adaptive_switch(monkeypatch: pytest.MonkeyPatch, *modes: str) -> None:
    turns = itertools.cycle(modes)
    monkeypatch.setattr(Adaptive, "best_mode", lambda self, rows, decoding, context, k: next(turns))


@pytest.mark.parametrize("arch", ARCHS)
def test_a_run_is_the_simulators_but_for_its_times(arch: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Acceptance is pinned: every request goes through the same rounds under both clocks, into the same columns."""
    let_adaptive_switch(monkeypatch, "atomic", "lanes", "lanes")
    real, simulated = same_rounds(experiment(arch))
    for table in ("requests", "launches", "deliveries"):
        mine, theirs = getattr(real, table), getattr(simulated, table)
        assert {name: c.dtype for name, c in mine.items()} == {name: c.dtype for name, c in theirs.items()}
    req, got = real.requests, real.deliveries
    received = np.bincount(got["request"], weights=got["tokens"], minlength=len(req["id"]))
    np.testing.assert_array_equal(received, req["output_tokens"])
    assert np.all(req["arrival_s"] <= req["admitted_s"])
    assert np.all(req["admitted_s"] < req["first_token_s"])
    assert np.all(req["first_token_s"] <= req["finish_s"])
    assert np.all(np.diff(got["time_s"]) >= 0)
    assert np.all(real.launches["start_s"] < real.launches["end_s"])
    assert (real.meta["clock"], real.meta["foundation"]) == ("wall", "measured run")
    assert 0 <= real.meta["host_idle_share"] <= 1


@pytest.mark.parametrize(("arch", "noise"), [*((arch, 0.2) for arch in JUDGED), ("colocated", 0.0), ("pdv", 0.0)])
def test_served_speculation_equals_plain_greedy(arch: Arch, noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the policy batches, splits, overlaps or switches, each request reads as if it had been alone."""
    let_adaptive_switch(monkeypatch, "plain", "plain", "plain", "atomic", "plain", "lanes")
    result = serve_and_compare(experiment(arch), noise)
    share = result.requests["accepted"].sum() / max(1, result.requests["drafted"].sum())
    if arch == "adaptive":
        assert {DECODE, DRAFT} <= set(result.launches["kind"].tolist())
    if arch not in ("autoregressive", "adaptive"):
        assert share == 1 if noise == 0 else 0.1 < share < 1


@pytest.mark.parametrize("arch", ["pdv", "adaptive"])
def test_moving_draft_lengths_change_no_token(arch: Arch) -> None:
    """Rows of one verify may then have drafts of different lengths."""
    serve_and_compare(experiment(arch, controller="feedback", max_speculative_tokens=4), output_len=25)


@pytest.mark.parametrize(("arch", "noise"), [("colocated", 0.0), ("pd", 0.2)])
def test_early_drafts_change_no_token(arch: Arch, noise: float) -> None:
    """A draft that is launched before the verdict is known begins where the verdict ends, whatever it says."""
    moving = experiment(arch, async_scheduling=True, controller="feedback", max_speculative_tokens=4)
    for chosen in (experiment(arch, async_scheduling=True), moving, early(tight(arch, "paged"))):
        result = serve_and_compare(chosen, noise, output_len=25)
        share = result.requests["accepted"].sum() / result.requests["drafted"].sum()
        assert share == 1 if noise == 0 else 0.1 < share < 1
        assert result.meta["graphs_captured_late"] == 0


@pytest.mark.parametrize("arch", ["colocated", "pd"])
def test_early_drafts_are_as_simulated(arch: Arch) -> None:
    """They are as many in both clocks, and leave each request's rounds as they were."""
    chosen = experiment(arch, rate=math.inf, async_scheduling=True)
    late = simulate(replace(chosen, server=replace(chosen.server, async_scheduling=False)))
    _, simulated = same_rounds(chosen)
    for name in ROUNDS:
        np.testing.assert_array_equal(late.requests[name], simulated.requests[name], name)
    drafts = [int((result.launches["kind"] == DRAFT).sum()) for result in (late, simulated)]
    assert drafts[1] >= drafts[0]  # some in vain


def early(chosen: Experiment) -> Experiment:
    return replace(chosen, server=replace(chosen.server, async_scheduling=True))


def launched_shapes(chosen: Experiment) -> dict[Any, tuple[set[Any], set[Any]]]:
    """The shapes that a run launched and those whose graphs had been prepared, by lane."""
    requests = make_requests(chosen.traffic, chosen.acceptance)
    rig = prepare(chosen, MACHINE, requests)
    launched = {place: set[Any]() for place in rig.lanes}
    for place, lane in rig.lanes.items():

        def watched(shape, inputs, run=lane.engine.run, place=place):  # type: ignore[no-untyped-def]
            launched[place].add(shape)
            return run(shape, inputs)

        lane.engine = copy(lane.engine)  # one for each lane, so that it is known who launched
        lane.engine.run = watched  # type: ignore[method-assign]
    serve(chosen, MACHINE, requests=requests, rig=rig)
    return {place: (shapes, set(rig.needs.shapes(place))) for place, shapes in launched.items()}


AHEAD = [("pdv-ahead", {"ahead_fan": fan, "ahead_miss": miss}) for fan, miss in ((0, "draft"), (3, "plain"))]


@pytest.mark.parametrize(("arch", "more"), [*((arch, {}) for arch in ARCHS), *AHEAD])
def test_every_launch_finds_its_graph_prepared(
    arch: Arch, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Capturing during a run would stall it."""
    let_adaptive_switch(monkeypatch, "plain", "atomic", "lanes")
    moving = "fixed" if arch == "autoregressive" else "goodput"
    chosen = experiment(arch, controller=moving, max_speculative_tokens=4, max_num_batched_tokens=150, **more)
    traffic = replace(chosen.traffic, input_len=150, output_len=6, num_prompts=12)
    chosen = replace(chosen, traffic=traffic)
    for shapes, prepared in launched_shapes(chosen).values():
        assert shapes <= prepared


@pytest.mark.parametrize("fan", [0, 2])
def test_drafts_ahead_are_made_and_used_as_simulated(fan: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A miss is drafted for anew, so rounds do not depend on times; every branch is a row of a launch on its lane."""
    chosen = experiment("pdv-ahead", ahead_fan=fan, ahead_miss="draft")
    chosen = replace(chosen, traffic=replace(chosen.traffic, output_len=40), acceptance=Acceptance(0.8))
    real, _ = same_rounds(chosen, "undrafted_rounds")
    launches, requests = real.launches, real.requests
    of_kind = {kind: launches["kind"] == KINDS.index(kind) for kind in ("draft", "ahead", "verify")}
    tokens = {kind: (launches["rows"] * launches["steps"])[which].sum() for kind, which in of_kind.items()}
    assert tokens["ahead"] == requests["ahead_tokens"].sum() > 0
    assert tokens["draft"] + requests["ahead_used"].sum() == requests["drafted"].sum()
    assert requests["ahead_used"].sum() > 0
    rows = launches["rows"][of_kind["ahead"]]
    assert rows.max() <= 4 * max(1, 4 * fan)  # four requests, of three drafts each


def test_a_warm_up_leaves_no_state() -> None:
    """A run after it is the run without it, token for token."""
    chosen = experiment("pdv")
    outputs: list[dict[int, list[int]]] = [{}, {}]
    for warmed, got in zip((False, True), outputs, strict=True):
        requests = make_requests(chosen.traffic, chosen.acceptance)
        rig = rig_for(chosen, requests)
        if warmed:
            warm_up(rig, chosen, OWN, requests)
        serve(chosen, OWN, requests=requests, rig=rig, outputs=got)
    assert outputs[0] == outputs[1]


def test_a_rig_serves_smaller_runs_and_refuses_larger_ones() -> None:
    chosen = experiment("pd")
    requests = make_requests(chosen.traffic, chosen.acceptance)
    rig = prepare(chosen, MACHINE, requests)
    smaller = replace(chosen, traffic=replace(chosen.traffic, max_concurrency=2))
    for again in (chosen, smaller, chosen):
        result = serve(again, MACHINE, rig=rig)
        assert len(result.requests["id"]) == 9
    longer = replace(chosen, traffic=replace(chosen.traffic, output_len=500))
    with pytest.raises(ValueError, match="more memory than the rig"):
        serve(longer, MACHINE, rig=rig)
    assert Needs.of(chosen, requests).covers(Needs.of(smaller, requests))


def tight(arch: Arch, kv_cache: KvPolicy, output_len: int = 10) -> Experiment:
    """All requests together, over a KV cache that holds two of the longest."""
    chosen = experiment(arch, rate=float("inf"), num_workers=4, kv_cache=kv_cache)
    chosen = replace(chosen, traffic=replace(chosen.traffic, output_len=output_len))
    requests = make_requests(chosen.traffic, chosen.acceptance)
    longest = max(r.prompt_tokens + r.output_tokens for r in requests)
    room = 2 * PAGE * -(-(longest + chosen.longest_draft) // PAGE)
    return replace(chosen, hardware=replace(chosen.hardware, kv_capacity_tokens=room))


@pytest.mark.parametrize(("arch", "kv_cache"), [
    *((arch, "paged") for arch in ("autoregressive", "colocated", "pdv", "pdv-unified", "adaptive")),
    ("colocated", "reserved"),
])  # fmt: skip
def test_a_preempted_request_reads_as_if_it_had_been_alone(
    arch: Arch, kv_cache: KvPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages go to others; read again, prompt and output, it goes on where it was."""
    let_adaptive_switch(monkeypatch, "plain", "atomic", "lanes")
    chosen = tight(arch, kv_cache, output_len=20)
    result = serve_and_compare(chosen)
    assert (result.requests["preemptions"].sum() > 0) == (kv_cache == "paged")
    assert result.meta["kv_peak_tokens"] <= chosen.hardware.kv_capacity_tokens < result.meta["kv_wanted_tokens"]
    assert result.meta["graphs_captured_late"] == 0
