"""Suffix decoding: the look-up against plain counting, and what its drafts cost and gain in runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdvsim.sim.config import Acceptance, Experiment, Server, Traffic
from pdvsim.sim.core import KINDS
from pdvsim.sim.models.presets import pair
from pdvsim.sim.prices.costs import LookupCosts
from pdvsim.sim.prices.host import SUFFIX_ROW_S
from pdvsim.sim.run import simulate
from pdvsim.sim.workload.acceptance import measured
from pdvsim.sim.workload.suffix import SuffixCache, SuffixOptions
from studies.suffix_gains import gain

# the look-up ---------------------------------------------------------------------------------------------------------

Texts = Sequence[Sequence[int]]


def followers(texts: Texts, stretch: Sequence[int]) -> Iterator[int | None]:
    """What follows a stretch wherever it stands, in the order in which it came; None at the end of a text."""
    for text in texts:
        for at in range(len(text) - len(stretch) + 1):
            if list(text[at : at + len(stretch)]) == list(stretch):
                end = at + len(stretch)
                yield text[end] if end < len(text) else None


def plain(texts: Texts, context: Sequence[int], k: int, options: SuffixOptions) -> tuple[float, list[int]]:
    """The best draft by counting anew for every stretch."""
    best: tuple[float, list[int]] = 0.0, []
    for match in range(1, min(len(context), options.suffix_decoding_max_tree_depth)):
        stretch = list(context[-match:])
        if not list(followers(texts, stretch)):
            break
        draft, chance, expected = list[int](), 1.0, 0.0
        while len(draft) < min(k, int(match * options.suffix_decoding_max_spec_factor + 1e-6)):
            seen = list(followers(texts, stretch + draft))
            counts: dict[int, int] = {}
            likeliest = None
            for token in seen:
                if token is not None:
                    counts[token] = counts.get(token, 0) + 1
                    if likeliest is None or counts[token] > counts[likeliest]:
                        likeliest = token
            if likeliest is None or match + len(draft) >= options.suffix_decoding_max_tree_depth:
                break
            chance *= counts[likeliest] / len(seen)
            if chance < options.suffix_decoding_min_token_prob:
                break
            draft.append(likeliest)
            expected += chance
        if expected >= best[0]:
            best = expected, draft
    return best


tokens = st.lists(st.integers(0, 3), max_size=30)


@given(
    prompt=tokens, answers=st.lists(tokens, max_size=3), own=tokens, k=st.integers(1, 9),
    options=st.builds(
        SuffixOptions, suffix_decoding_max_tree_depth=st.sampled_from([2, 5, 24]),
        suffix_decoding_max_cached_requests=st.sampled_from([0, 10_000]),
        suffix_decoding_max_spec_factor=st.sampled_from([0.5, 1.0, 2.0]),
        suffix_decoding_min_token_prob=st.sampled_from([0.0, 0.1, 0.4]),
    ),
)  # fmt: skip
def test_it_drafts_what_plain_counting_does(
    prompt: list[int], answers: list[list[int]], own: list[int], k: int, options: SuffixOptions
) -> None:
    cache = SuffixCache(options)
    for number, answer in enumerate(answers):
        cache.start(number, [9])  # other prompts are not in the cache
        cache.extend(number, answer)
        cache.stop(number)
    cache.start(99, prompt)
    for token in own:
        cache.extend(99, [token])
    context = [*prompt, *own][-options.suffix_decoding_max_tree_depth :]
    mine = plain([[*prompt, *own]], context, k, options)
    others = plain([*answers, own] if options.suffix_decoding_max_cached_requests else [], context, k, options)
    assert cache.drafts(99, k) == (mine[1] if mine[0] >= others[0] else others[1])


def test_a_draft_is_as_long_as_its_match() -> None:
    """Four tokens agree, so four are drafted, though more followed; from another answer where the own text has none."""
    cache = SuffixCache()
    cache.start(0, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    cache.extend(0, [1, 2, 3, 4])
    assert cache.drafts(0, 32) == [5, 6, 7, 8]
    assert cache.drafts(0, 2) == [5, 6]
    cache.start(1, [0])
    cache.extend(1, [1, 2])
    assert cache.drafts(1, 32) == [3, 4]


# runs ----------------------------------------------------------------------------------------------------------------


def served(k: int, clients: int = 8, data: str = "sharegpt", drafter: str = "suffix") -> Experiment:
    traffic = Traffic("random", num_prompts=4 * clients + 8, max_concurrency=clients, input_len=200, output_len=200)
    return Experiment(
        "colocated", traffic, Acceptance(acceptance_model=f"{data}-{drafter}"),
        Server(f"{drafter}:llama-3.1-8b", num_speculative_tokens=k, max_num_seqs=256),
    )  # fmt: skip


def test_a_draft_takes_one_look_up_per_row_on_the_host_whatever_its_length() -> None:
    """It would fail if k draft tokens cost k forwards, or anything on the GPU."""
    costs = LookupCosts(pair("suffix:llama-3.1-8b").draft)
    for k in (1, 5, 12):
        price = costs.price(7, 1, k, 3000).at(3000)
        assert price.seconds == pytest.approx(7 * SUFFIX_ROW_S)
        assert (price.bytes, price.flops) == (0, 0)
        result = simulate(served(k, clients=1))
        assert not np.any(result.launches["role"] == 0)
        np.testing.assert_allclose(result.requests["draft_s"], result.requests["rounds"] * SUFFIX_ROW_S)


@pytest.mark.parametrize("data", ["gsm8k", "instructcoder"])
def test_rounds_draft_and_gain_what_the_look_up_did(data: str) -> None:
    """Widths of a verify differ from row to row, and their mean is the recorded one."""
    counts, k = measured(f"{data}-suffix").drafted, 12
    rounds, lengths = counts.sum(), np.arange(counts.shape[1])
    result = simulate(served(k, clients=16, data=data))
    done = result.requests
    drafted, accepted = (done[name].sum() / done["rounds"].sum() for name in ("drafted", "accepted"))
    assert drafted == pytest.approx(float((counts @ lengths).sum() / rounds), rel=0.05)
    assert accepted == pytest.approx(float(counts.sum(axis=1) @ np.arange(len(counts)) / rounds), rel=0.05)
    launches = result.launches
    verify = (launches["kind"] == KINDS.index("verify")) & (launches["rows"] == 16)
    assert np.all(launches["tokens"][verify] < (16 * launches["width"])[verify])
    assert len(set(launches["width"][verify].tolist())) > 3


@pytest.mark.parametrize(("data", "pays"), [("gsm8k", False), ("sharegpt", False), ("instructcoder", True)])
def test_it_gains_alone_and_with_chat_it_loses_in_a_large_batch(data: str, pays: bool) -> None:
    """The direction of ArcticInference's issue 185 on vLLM: refused drafts fill a large batch; edits of code gain."""
    gains = {clients: gain(data, clients) for clients in (1, 128)}
    assert gains[1] > 1.2
    assert gains[1] > 1.2 * gains[128]
    assert (gains[128] > 1) == pays
