"""N-gram drafts: a search of bytes finds what a plain one over tokens finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdvsim.realrun.machine import Machine, as_served
from pdvsim.realrun.ngram import LEAST, MOST, History
from pdvsim.realrun.site import serve
from pdvsim.sim.config import Acceptance, Arch, Experiment, Hardware, Server, Traffic
from pdvsim.sim.core import KINDS
from pdvsim.sim.relevance import suited
from pdvsim.sim.run import simulate


def plain(tokens: Sequence[int], k: int) -> list[int]:
    """Longest agreement first, then the earliest place, token by token."""
    for size in range(MOST, LEAST - 1, -1):
        for at in range(len(tokens) - size):
            if list(tokens[at : at + size]) == list(tokens[-size:]):
                return list(tokens[at + size : at + size + k])
    return []


def test_the_example_of_vllm() -> None:
    """[2, 3] would match with two tokens; of three there is no earlier place."""
    assert History([1, 2, 3, 4, 2, 3]).drafts(4) == []
    assert History([1, 2, 3, 4, 9, 1, 2, 3]).drafts(4) == [4, 9, 1, 2]


def test_the_longest_agreement_goes_before_the_earliest() -> None:
    assert History([2, 3, 4, 7, 1, 2, 3, 4, 8, 1, 2, 3, 4]).drafts(1) == [8]
    assert History([2, 3, 4, 7, 2, 3, 4, 8, 2, 3, 4]).drafts(1) == [7]


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 8))
def test_it_finds_what_a_plain_search_finds(tokens: list[int], k: int) -> None:
    assert History(tokens).drafts(k) == plain(tokens, k)


@given(st.lists(st.sampled_from([0, 1, 256, 65536, 16777216, 257]), max_size=40))
def test_bytes_that_match_across_tokens_are_no_match(tokens: list[int]) -> None:
    assert History(tokens).drafts(4) == plain(tokens, 4)


@pytest.mark.parametrize("cut", [0, 3, 7])
def test_tokens_may_come_in_parts(cut: int) -> None:
    tokens = [5, 6, 7, 8, 5, 6, 7]
    history = History(tokens[:cut])
    history.extend(tokens[cut:])
    assert len(history) == 7
    assert history.drafts(2) == [8, 5]


# served --------------------------------------------------------------------------------------------------------------

MACHINE = Machine(device="cpu", tiny=True)
SERVED: tuple[Arch, ...] = ("baseline", "colocated", "pd", "pdv", "pdv-unified", "pdv-hybrid")


def served(arch: Arch, output: int = 12, **server: object) -> Experiment:
    """Few slots, prompts of several chunks, and outputs from one token on."""
    traffic = Traffic(
        "random", num_prompts=9, request_rate=200.0, input_len=30, output_len=output, random_range_ratio=0.9
    )
    small: dict[str, object] = {
        "drafter": "ngram", "num_speculative_tokens": 3, "max_num_seqs": 4, "max_num_batched_tokens": 32,
        "num_workers": 2, "hybrid_threshold": 2,
    }  # fmt: skip
    return suited(Experiment(arch, traffic, server=Server(**(small | server))))  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", SERVED)
def test_a_pinned_run_goes_through_the_simulators_rounds(arch: Arch) -> None:
    """Who has a draft is drawn as the verdicts are: under both clocks the same rows have the same."""
    chosen = replace(served(arch), acceptance=Acceptance(acceptance_model="instructcoder-ngram"))
    real, simulated = serve(chosen, MACHINE), simulate(suited(as_served(chosen)))
    for name in ("rounds", "drafts", "drafted", "accepted", "refused"):
        np.testing.assert_array_equal(real.requests[name], simulated.requests[name], name)
    assert 0 < real.requests["drafts"].sum() < real.requests["rounds"].sum()
    assert not np.any(real.launches["role"] == 0)
    assert np.all(real.requests["draft_s"][real.requests["rounds"] > 0] > 0)
    assert real.experiment.server.pair == "ngram:tiny"


@pytest.mark.parametrize("arch", SERVED)
def test_drafts_found_by_the_host_change_no_token(arch: Arch) -> None:
    """The target's own verdicts on what was found: each request reads as if nothing had been drafted."""
    outputs: list[dict[int, list[int]]] = [{}, {}]
    own = replace(MACHINE, verdict="own")
    result = serve(served(arch, 40), own, outputs=outputs[0])
    serve(served("autoregressive", 40), own, outputs=outputs[1])
    assert outputs[0] == outputs[1]
    assert result.requests["accepted"].sum() > 10  # a tiny model repeats itself, and that is found
    assert result.requests["drafts"].sum() < result.requests["rounds"].sum()


def test_a_request_that_was_preempted_is_looked_up_as_before() -> None:
    chosen = served("colocated", 40)
    outputs: list[dict[int, list[int]]] = [{}, {}]
    own = replace(MACHINE, verdict="own")
    tight = replace(
        chosen, hardware=Hardware(kv_capacity_tokens=128), traffic=replace(chosen.traffic, request_rate=1e6)
    )
    result = serve(tight, own, outputs=outputs[0])
    serve(chosen, own, outputs=outputs[1])
    assert result.requests["preemptions"].sum() > 0
    assert outputs[0] == outputs[1]


def test_the_engine_pads_rows_and_the_simulator_packs_them_unless_told() -> None:
    """Simulated as it is served, a verify has as many tokens as its longest row times its rows."""
    chosen = replace(served("colocated", 40), acceptance=Acceptance(acceptance_model="instructcoder-ngram"))
    for experiment, exact in ((chosen, False), (as_served(chosen), True)):
        launches = simulate(experiment).launches
        alone = (launches["kind"] == KINDS.index("verify")) & (launches["rows"] > 1)
        padded = launches["rows"] * launches["width"]
        assert np.any(launches["tokens"][alone] < padded[alone]) != exact
