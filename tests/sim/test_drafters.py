"""Drafters that follow from their target: their sizes, what they cost, who has drafts, and what is chosen with them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pdvsim.sim.assembly import ServerParts
from pdvsim.sim.config import Acceptance, Experiment, Server, Traffic
from pdvsim.sim.core import Request
from pdvsim.sim.engines.profiles import engine_profile
from pdvsim.sim.machine.kv import capacity_tokens
from pdvsim.sim.models.presets import PRESETS, pair
from pdvsim.sim.prices.profile import builtin, roofline
from pdvsim.sim.run import simulate
from pdvsim.sim.workload.acceptance import measured
from pdvsim.sim.workload.lookup import Lookup, lookup_of

CLOSED = Traffic("random", num_prompts=60, input_len=200, output_len=200, max_concurrency=8)


def serving(drafter: str, k: int = 4, **traffic: int) -> Experiment:
    server = Server("llama-3.1-8b", k, drafter)  # type: ignore[arg-type]
    return Experiment("colocated", replace(CLOSED, **traffic), server=server)  # type: ignore[arg-type]


# sizes ---------------------------------------------------------------------------------------------------------------


def test_a_head_reads_the_draft_vocabulary_that_is_asked_for() -> None:
    """Its output projection grows with it, and is predicted where 32,000 tokens were measured."""
    named = "eagle3-llama-3.1-8b:llama-3.1-8b"
    usual, wide = (Server(named, draft_vocab=tokens).models() for tokens in (None, 128_256))
    assert (usual.draft.vocab, wide.draft.vocab, wide.target) == (32_000, 128_256, usual.target)
    profiles = [engine_profile("vllm", "h200").covering(pair) for pair in (usual, wide)]
    bytes_ = [one.cost_model(pair.draft).price(8).bytes_0 for one, pair in zip(profiles, (usual, wide), strict=True)]
    assert bytes_[1] - bytes_[0] == pytest.approx(2 * 4096 * (128_256 - 32_000))
    assert "transferred: eagle3" in builtin("h200").covering(wide).foundation
    assert Server(named, draft_vocab=32_000).models() == usual
    assert Server("mtp-llama-3.1-8b:llama-3.1-8b", draft_vocab=9_000).models().draft.vocab == 128_256


def test_an_eagle3_head_has_the_published_matrices() -> None:
    """AngelSlim/Qwen3-8B_eagle3 as listed: fc (4096, 12288), q_proj (4096, 8192), an output of 32,000: about 750 MB."""
    head = pair("eagle3-qwen3-8b:qwen3-8b").draft
    assert head.is_head
    assert head.fused_params == 4096 * 12288
    assert head.products[0] == (8192, 4096 + 2 * 1024)
    assert head.head_params == 32_000 * 4096
    by_hand = 4096 * 12288 + 8192 * 6144 + 4096 * 4096 + 3 * 4096 * 12288 + 32_000 * 4096
    assert head.params == by_hand
    assert head.weight_bytes == pytest.approx(800e6, rel=0.02)
    assert head.kv_bytes_per_token * 36 == PRESETS["qwen3-8b"].kv_bytes_per_token  # one layer of 36


def test_an_mtp_layer_shares_embedding_and_output_with_its_target() -> None:
    head, model = pair("mtp-llama-3.1-8b:llama-3.1-8b").draft, PRESETS["llama-3.1-8b"]
    assert head.params == model.layer_params // 32 + 2 * 4096 * 4096
    assert head.head_params == model.head_params  # read in every step, held once
    assert head.fused_params == 0


def test_kv_cache_and_weights_of_a_drafter_are_its_own() -> None:
    target, gpu = PRESETS["llama-3.1-8b"], builtin("h200").gpu
    room = {}
    for kind in ("model", "eagle3", "mtp", "ngram", "none"):
        name = "llama-3.2-1b:llama-3.1-8b" if kind == "model" else "llama-3.1-8b"
        experiment = Experiment("colocated", server=Server(name, drafter=kind))  # type: ignore[arg-type]
        room[kind] = ServerParts(experiment).kv_capacity
    assert room["ngram"] == room["none"] == capacity_tokens(0.9 * gpu.memory_bytes, [target])
    assert room["model"] < room["eagle3"] < room["mtp"] < room["none"]


# names ---------------------------------------------------------------------------------------------------------------


def test_a_drafter_takes_the_place_of_a_pairs_draft_model() -> None:
    assert Server("tinyllama-1.1b:llama-2-7b", drafter="eagle3").pair == "eagle3-llama-2-7b:llama-2-7b"
    assert Server("llama-2-7b", drafter="ngram").pair == "ngram:llama-2-7b"
    assert Server("eagle3-llama-3.1-8b:llama-3.1-8b") == replace(Server("llama-3.1-8b", drafter="eagle3"), drafter=None)
    with pytest.warns(UserWarning, match="is read as llama-3.1-8b"):
        named = Server("meta-llama/Llama-3.1-8B-Instruct", drafter="mtp")
    assert named.pair == "mtp-llama-3.1-8b:llama-3.1-8b"
    again = replace(Server("a:b", drafter="eagle3"), pair="c:d")
    assert again.pair == "eagle3-d:d"


# costs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_a_round_is_k_steps_and_a_verify(kind: str) -> None:
    """One request, nothing accepted: fusion once, k forwards of one token, one of the target; and the host."""
    spec = builtin("h200").gpu
    profile = replace(roofline(spec), models={}, host=replace(roofline(spec).host, launch_s=0.0, completion_s=0.0))
    k, context, experiment = 3, 50, serving(kind, 3)
    both = pair(experiment.server.pair)
    profile = profile.covering(both)
    request = Request(0, 0.0, context, 2, bytes(2))
    result = simulate(experiment, requests=[request], profile=profile)
    head, target, bandwidth = both.draft, both.target, spec.bandwidth_bytes_per_s
    step = 2 * (head.layer_params + head.head_params) / bandwidth
    draft = 2 * head.fused_params / bandwidth + k * step
    draft += sum(head.kv_bytes_per_token * (context + 1 + n) for n in range(k)) / bandwidth
    verify = 2 * (target.layer_params + target.head_params) + target.kv_bytes_per_token * (context + k + 1)
    assert result.requests["draft_s"][0] == pytest.approx(draft, rel=1e-3)
    assert result.requests["verify_s"][0] == pytest.approx(verify / bandwidth, rel=1e-3)


# who has drafts ------------------------------------------------------------------------------------------------------


def test_drafts_are_found_where_one_is_accepted_and_at_that_share_of_the_others() -> None:
    runs, lookup = bytes([0, 3] * 20_000), Lookup(0.15)
    drafted = []
    for position in range(len(runs)):
        row = Request(7, 0.0, 10, len(runs), runs)
        row.state.emitted = position
        drafted.append(lookup.length(row, 5))
    assert set(drafted[1::2]) == {5}
    assert set(drafted[::2]) == {0, 5}
    assert np.mean(drafted[::2]) == pytest.approx(5 * 0.15, abs=0.05)
    assert lookup.share(0.2) == pytest.approx(0.2 + 0.8 * 0.15)


@pytest.mark.parametrize("name", ["sharegpt-ngram", "instructcoder-ngram"])
def test_rounds_gain_what_was_recorded_and_most_have_no_drafts(name: str) -> None:
    acceptance = Acceptance(acceptance_model=name)
    experiment = replace(serving("ngram", 3, num_prompts=200, output_len=300), acceptance=acceptance)
    result = simulate(experiment)
    requests = result.requests
    rounds = requests["rounds"].sum()
    assert 1 + requests["accepted"].sum() / rounds == pytest.approx(measured(name).tokens_per_round[2], rel=0.03)
    first = np.sum(result.deliveries["tokens"] > 1) / rounds  # of its drafts, one or more accepted
    share = requests["drafts"].sum() / rounds
    assert first < share < 0.6
    assert share == pytest.approx(lookup_of("ngram", acceptance).share(first), abs=0.01)
