"""Conversations: the arithmetic of their turns by hand, when each is sent, and files that hold them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pdvsim
from pdvsim.cli import main
from pdvsim.sim.config import Acceptance, Arch, Experiment, Server, Traffic
from pdvsim.sim.core import ENDLESS
from pdvsim.sim.policies import ARCHS
from pdvsim.sim.run import simulate
from pdvsim.sim.workload.conversations import origins_of
from pdvsim.sim.workload.own import read_own
from pdvsim.sim.workload.requests import make_requests
from pdvsim.view.traffic import repeated_share

SHORT = "tinyllama-1.1b:llama-2-7b"  # contexts of 2,048 tokens

TALK = Traffic("random", num_prompts=9, input_len=20, output_len=12, num_turns=3, max_concurrency=1)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_conversation_by_hand(arch: Arch) -> None:
    """Prompts of 20 new tokens, answers of 12, of which the last token is in no cache: 20, 52 and 84 tokens.

    After the first turn 31 tokens are cached, one full block; after the second 63, three full blocks.
    """
    requests = simulate(Experiment(arch, TALK)).requests
    assert requests["prompt_tokens"].tolist() == [20, 52, 84] * 3
    assert requests["num_cached_tokens"].tolist() == [0, 16, 48] * 3
    assert requests["session"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert requests["turn"].tolist() == [0, 1, 2] * 3
    assert requests["arrival_s"][1:].tolist() == requests["finish_s"][:-1].tolist()  # one conversation at a time


def test_the_next_turn_is_sent_a_think_time_after_the_answer() -> None:
    traffic = Traffic("random", num_prompts=200, input_len=20, output_len=12, num_turns=4, think_time_s=3.0)
    requests = {request.id: request for request in make_requests(traffic, Acceptance())}
    rows = pdvsim.run(
        arch="pd", dataset_name="random", num_prompts=200, input_len=20, output_len=12, num_turns=4, think_time_s=3.0
    ).requests.sort_values(["session", "turn"])
    later = rows[rows.turn > 0]
    before = rows.shift(1)[rows.turn > 0]
    waited = (later.arrival_s - before.finish_s).to_numpy()
    think_times = [request.think_s for request in requests.values() if request.turn]
    assert waited == pytest.approx(think_times)  # all are in the order of conversations and turns
    many = make_requests(replace(traffic, num_prompts=20_000), Acceptance())
    assert np.mean([request.think_s for request in many if request.turn]) == pytest.approx(3.0, rel=0.03)
    assert len(rows) == 200
    assert (rows.groupby("session").turn.max() == 3).all()


def test_a_limit_is_on_conversations() -> None:
    traffic = replace(TALK, num_prompts=60, max_concurrency=4)
    requests = simulate(Experiment("colocated", traffic)).requests
    begins = [requests["arrival_s"][requests["session"] == session].min() for session in range(20)]
    ends = [requests["finish_s"][requests["session"] == session].max() for session in range(20)]
    for at in begins:
        assert sum(begin <= at < end for begin, end in zip(begins, ends, strict=True)) <= 4
    thinking = simulate(Experiment("colocated", replace(traffic, think_time_s=1.0))).requests
    assert thinking["finish_s"].max() > 5 * requests["finish_s"].max()  # nobody else is let in meanwhile


def test_a_conversation_ends_before_it_is_too_long() -> None:
    """TinyLlama's context has 2,048 tokens: five turns of 300 and 100 fit, and then another begins."""
    traffic = Traffic("random", num_prompts=12, input_len=300, output_len=100, num_turns=50)
    requests = simulate(Experiment("pd", traffic, server=Server(SHORT))).requests
    longest = requests["prompt_tokens"] + requests["output_tokens"]
    assert longest.max() == 2000
    assert np.bincount(requests["session"]).tolist() == [5, 5, 2]


def test_a_system_prompt_is_shared_by_all_conversations() -> None:
    requests = simulate(Experiment("pd", replace(TALK, prefix_len=160))).requests
    assert requests["prompt_tokens"].tolist() == [180, 212, 244] * 3
    assert requests["num_cached_tokens"].tolist() == [0, 176, 208, 160, 176, 208, 160, 176, 208]


def test_an_agent_computes_little_of_what_it_sends() -> None:
    """Tool calls: short outputs, a long shared prefix, many turns."""
    run = pdvsim.run(
        arch="colocated", dataset_name="random", prefix_len=800, input_len=40, output_len=20, num_turns=15,
        num_prompts=300, max_concurrency=8,
    )  # fmt: skip
    assert run.metrics["prefix_cache_hit_rate"] > 93
    assert run.metrics["conversations"] == 20
    seconds = run.metrics["duration"] / 20
    assert run.metrics["gpu_s_per_conversation"] == pytest.approx(seconds)
    assert "GPU-seconds per conversation:" in run.table()
    two = pdvsim.run(arch="pd", num_turns=2, num_prompts=20, max_concurrency=2, place=["prefill=1"])
    assert two.metrics["gpu_s_per_conversation"] == pytest.approx(2 * two.metrics["duration"] / 10)


# texts ----------------------------------------------------------------------------------------------------------------


def test_turns_of_a_record_share_what_they_have_room_for() -> None:
    whole = origins_of([(10, 5), (20, 5), (30, 5)])
    assert whole == [((ENDLESS, 0),)] * 3
    without_answers = origins_of([(10, 50), (20, 50), (30, 50)])
    assert without_answers == [((ENDLESS, 0),), ((10, 0), (ENDLESS, 1)), ((10, 0), (20, 1), (ENDLESS, 2))]
    assert origins_of([(50, 5), (20, 5)]) == [((ENDLESS, 0),), ((ENDLESS, 1),)]


# files ----------------------------------------------------------------------------------------------------------------


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


@pytest.fixture
def talks(tmp_path: Path) -> str:
    """Two conversations that take turns; the answers take far longer than the gaps between their records."""
    rows = [
        {"arrival_s": 0.0, "session": "a", "turn": 1, "prompt_tokens": 64, "output_tokens": 65},
        {"arrival_s": 0.1, "session": "b", "turn": 1, "prompt_tokens": 32, "output_tokens": 17},
        {"arrival_s": 0.2, "session": "a", "turn": 2, "prompt_tokens": 160, "output_tokens": 17},
        {"arrival_s": 50.0, "session": "b", "turn": 2, "prompt_tokens": 60, "output_tokens": 9},
    ]
    return write(tmp_path / "talks.jsonl", rows)


def test_a_file_with_sessions_and_turns_is_replayed_answer_by_answer(talks: str) -> None:
    run = pdvsim.run(arch="colocated", dataset_path=talks, use_trace_timestamps=True, max_num_seqs=1)
    rows = run.requests.sort_values(["session", "turn"])
    assert rows.num_cached_tokens.tolist() == [0, 128, 0, 48]
    first, second, _, late = rows.itertuples()
    assert second.arrival_s == first.finish_s > 0.2
    assert late.arrival_s == 50.0


def test_without_its_times_whole_conversations_are_sent_again_as_new_ones(talks: str) -> None:
    rows = pdvsim.run(arch="pd", dataset_path=talks, num_prompts=20, max_concurrency=1).requests
    cached = dict(zip(rows.prompt_tokens, rows.num_cached_tokens, strict=True))
    assert cached == {64: 0, 160: 128, 32: 0, 60: 48}
    assert rows.turn.tolist() == [0, 1] * 10
    assert rows.session.nunique() == 10


@pytest.fixture
def mooncake(tmp_path: Path) -> str:
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]},
        {"timestamp": 9000, "input_length": 1200, "output_length": 5, "hash_ids": [7, 8, 10]},
        {"timestamp": 18000, "input_length": 700, "output_length": 5, "hash_ids": [7, 11]},
    ]
    return write(tmp_path / "mooncake.jsonl", rows)


def test_mooncake_s_hashes_are_prefixes(mooncake: str) -> None:
    run = pdvsim.run(arch="pd", dataset_path=mooncake, use_trace_timestamps=True)
    assert run.requests.num_cached_tokens.tolist() == [0, 1024, 512]
    again = pdvsim.run(arch="pd", dataset_path=mooncake, num_prompts=6, max_concurrency=1).requests
    assert sorted(again.num_cached_tokens[:3])[0] == 0
    assert (again.num_cached_tokens[3:] < 1100).all()  # sent again, it has other texts
    off = pdvsim.run(arch="pd", dataset_path=mooncake, use_trace_timestamps=True, enable_prefix_caching=False)
    assert off.metrics["mean_ttft_ms"] > run.metrics["mean_ttft_ms"]


def test_traffic_says_how_much_repeats(mooncake: str, talks: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert repeated_share(read_own(mooncake, kind="mooncake")) == pytest.approx((1024 + 512) / 3000)
    assert repeated_share(read_own(talks)) == pytest.approx((128 + 48) / 316)
    assert main(["traffic", mooncake]) == 0
    assert "51% of the prompt tokens repeat a prefix that was sent before" in capsys.readouterr().out


def test_sharegpt_has_turns_of_its_own(tmp_path: Path) -> None:
    """Four characters are a token here: prompts of 10 and 5 tokens, answers of 20 and 8."""
    messages = [("human", 40), ("gpt", 80), ("human", 20), ("gpt", 32), ("human", 4)]
    talk = {"conversations": [{"from": who, "value": "x" * length} for who, length in messages]}
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([talk, {"conversations": talk["conversations"][:2]}]), encoding="utf-8")
    one = make_requests(Traffic(dataset_path=str(path), num_prompts=2), Acceptance())
    assert [(r.prompt_tokens, r.output_tokens, r.chain) for r in one] == [(10, 20, ()), (10, 20, ())]
    many = make_requests(Traffic(dataset_path=str(path), num_prompts=3, num_turns=9), Acceptance())
    assert sorted((r.turn, r.prompt_tokens, r.output_tokens) for r in many) == [(0, 10, 20), (0, 10, 20), (1, 35, 8)]
