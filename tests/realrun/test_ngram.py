"""N-gram drafts: a search of bytes finds what a plain one over tokens finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_serving import MACHINE, experiment, same_rounds

from pdvsim.realrun.machine import as_served
from pdvsim.realrun.ngram import LEAST, MOST, History
from pdvsim.realrun.site import serve
from pdvsim.sim.config import Acceptance, Arch, Experiment
from pdvsim.sim.core import KINDS
from pdvsim.sim.run import simulate


def plain(tokens: Sequence[int], k: int) -> list[int]:
    """Longest agreement first, then the earliest place, token by token."""
    for size in range(MOST, LEAST - 1, -1):
        for at in range(len(tokens) - size):
            if list(tokens[at : at + size]) == list(tokens[-size:]):
                return list(tokens[at + size : at + size + k])
    return []


few = st.lists(st.integers(0, 3), max_size=60)
alike = st.lists(st.sampled_from([0, 1, 256, 65536, 16777216, 257]), max_size=40)  # bytes match across tokens


@settings(max_examples=50)
@given(few | alike, st.integers(1, 8), st.integers(0, 60))
def test_it_finds_what_a_plain_search_finds(tokens: list[int], k: int, cut: int) -> None:
    history = History(tokens[:cut])
    history.extend(tokens[cut:])  # what is delivered later
    assert len(history) == len(tokens)
    assert history.drafts(k) == plain(tokens, k)


# served --------------------------------------------------------------------------------------------------------------

OWN = replace(MACHINE, verdict="own")
SERVED: tuple[Arch, ...] = ("baseline", "colocated", "pd", "pdv", "pdv-unified", "pdv-hybrid")


def served(arch: Arch, output: int = 12) -> Experiment:
    chosen = experiment(arch, drafter="ngram")
    return replace(chosen, traffic=replace(chosen.traffic, output_len=output))


@cache
def undrafted() -> dict[int, list[int]]:
    """Each request's tokens where nothing is drafted."""
    outputs: dict[int, list[int]] = {}
    serve(served("autoregressive", 40), OWN, outputs=outputs)
    return outputs


@pytest.mark.parametrize("arch", SERVED)
def test_a_pinned_run_goes_through_the_simulators_rounds(arch: Arch) -> None:
    """Who has a draft is drawn as the verdicts are: under both clocks the same rows have the same."""
    chosen = replace(served(arch), acceptance=Acceptance(acceptance_model="instructcoder-ngram"))
    real, _ = same_rounds(chosen, "refused")
    assert 0 < real.requests["drafts"].sum() < real.requests["rounds"].sum()
    assert not np.any(real.launches["role"] == 0)
    assert np.all(real.requests["draft_s"][real.requests["rounds"] > 0] > 0)
    assert real.experiment.server.pair == "ngram:tiny"


@pytest.mark.parametrize("arch", ["baseline", "colocated", "pdv-hybrid"])
def test_drafts_found_by_the_host_change_no_token(arch: Arch) -> None:
    """The target's own verdicts on what was found: each request reads as if nothing had been drafted."""
    outputs: dict[int, list[int]] = {}
    result = serve(served(arch, 40), OWN, outputs=outputs)
    assert outputs == undrafted()
    assert result.requests["accepted"].sum() > 10  # a tiny model repeats itself, and that is found
    assert result.requests["drafts"].sum() < result.requests["rounds"].sum()


def test_the_engine_pads_rows_and_the_simulator_packs_them_by_default() -> None:
    """Simulated as it is served, a verify has as many tokens as its longest row times its rows."""
    chosen = replace(served("colocated", 40), acceptance=Acceptance(acceptance_model="instructcoder-ngram"))
    for run, exact in ((chosen, False), (as_served(chosen), True)):
        launches = simulate(run).launches
        alone = (launches["kind"] == KINDS.index("verify")) & (launches["rows"] > 1)
        padded = launches["rows"] * launches["width"]
        assert np.any(launches["tokens"][alone] < padded[alone]) != exact
