"""Measured servers of other engines: the rows, their loads, and the errors that the command prints."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from pdvsim.bench.join import middle
from pdvsim.calibration.validate.servers import (
    ROUNDS,
    ServerLayout,
    SiliconRow,
    joined,
    not_simulated,
    over_rounds,
    predict,
    ratios,
    read_estimates,
    read_rows,
)
from pdvsim.cli import main
from pdvsim.sim.relevance import refuse_idle

ROW = SiliconRow(
    "a-row", "vllm", "0.18.0", "meta-llama/Llama-3.1-8B-Instruct", "h200", "inferencex", "bfloat16", 1024, 64, 4,
    1, 1, 1, 1, name="llama-3.1-8b", image="0.18.0", tokens_per_step=8192, ttft_ms=50.0, tpot_ms=5.0,
)  # fmt: skip


def test_the_split_was_made_by_name() -> None:
    rows = read_rows()
    kinds = Counter(row.kind for row in rows)
    assert len(rows) == len({row.id for row in rows}) == 5221
    assert kinds == {"plain": 2867, "expert-parallel": 752, "apart": 1602}
    assert sum(row.held_out for row in rows) == 1697
    assert all(row.held_out == (zlib.crc32(row.id.encode()) % 3 == 0) for row in rows)


def test_rows_that_are_not_simulated_are_counted_with_their_reason() -> None:
    side = ServerLayout(1, 4, 1, 1)
    cases = {
        "it drafts with MTP": replace(ROW, drafts="mtp", prefill=side),
        "whether it drafts": replace(ROW, drafts="unstated", prefill=side),
        "its layout is not known": replace(ROW, workers=0, prefill=side),
        "its concurrency is not known": replace(ROW, concurrency=0),
        "4-bit integers": replace(ROW, weights="int4_wo"),
        "must be one of 1, 2, 4, 8, got 36": replace(ROW, tensor_parallel=36, moe_tp=36),
    }
    for reason, row in cases.items():
        assert reason in not_simulated([row])[row.id]
    assert not_simulated([ROW]) == {}


def test_servers_of_more_gpus_than_a_node_spread_whole_experts() -> None:
    """As DeepSeek is served: 32 ranks with DeepEP, and some with copies of experts. Sharded experts are refused."""
    wide = replace(ROW, name="deepseek-v3", concurrency=64, data_parallel=32, expert_parallel=32)
    wide = replace(wide, exchange="deepep_low_latency")
    assert not_simulated([wide]) == {}
    assert wide.experiment.gpus == 32
    sharded = replace(wide, expert_parallel=1, moe_tp=32, exchange=None)
    assert "more than 8 need --enable-expert-parallel" in not_simulated([sharded])[ROW.id]
    odd = replace(wide, data_parallel=24, expert_parallel=24, slots=288)
    assert not_simulated([odd]) == {}
    experts = odd.experiment.pair.target.experts
    assert experts is not None
    assert (experts.slots, experts.resident) == (288, 12)


def test_every_option_of_a_row_has_an_effect() -> None:
    """Else its simulation would be refused: a sample of those that can be simulated, and all with ranks of one card."""
    rows = read_rows()
    sample = [*rows[::50], *(row for row in rows if row.data_parallel > 1 and row.card == "b300")]
    refused = not_simulated(sample)
    assert len(refused) < len(sample) / 2
    for row in sample:
        if row.id not in refused:
            refuse_idle([row.experiment])


def test_estimates_are_of_held_out_rows() -> None:
    """Of all of them that can be asked for: those of servers whose layout and load are known, and that do not draft."""
    rows = [row for row in read_rows() if row.held_out]
    estimates, refusals = read_estimates()
    asked = set(estimates) | set(refusals)
    assert not set(estimates) & set(refusals)
    assert asked <= {row.id for row in rows}
    assert all(one["tpot_ms"] > 0 for one in estimates.values())
    for row in rows:
        known = row.concurrency and row.workers and row.drafts == "none"
        known = known and (row.prefill.workers if row.prefill else row.tensor_parallel <= 8)
        assert row.id in asked or not known, row.id


def test_a_load_is_as_its_generator_made_it() -> None:
    """Closed loop, lengths between 0.8 and 1 times the stated ones, all of one server's engine and card."""
    traffic, hardware = ROW.experiment.traffic, ROW.experiment.hardware
    low, high = (round(traffic.input_len * (1 + sign * traffic.random_range_ratio)) for sign in (-1, 1))
    assert (low, high) == (pytest.approx(0.8 * 1024, abs=2), pytest.approx(1024, abs=2))
    assert traffic.max_concurrency == 4
    assert traffic.num_prompts == 40
    assert (hardware.engine, hardware.gpu) == ("vllm", "h200")


def test_means_are_over_all_rounds_of_the_benchmark() -> None:
    """Of all rounds it is their mean; of fewer, those between the first and the last stand for the others."""
    rounds = np.random.default_rng(1).uniform(1, 2, (ROUNDS, 4))
    assert over_rounds(rounds.ravel(), 4) == pytest.approx(rounds.mean())
    rounds[1:-1] = rounds[1]
    assert over_rounds(rounds[[0, 1, -1]].ravel(), 4) == pytest.approx(rounds.mean())


def test_a_slower_card_and_more_requests_take_longer() -> None:
    rows = ROW, replace(ROW, concurrency=32), replace(ROW, card="h100-sxm")
    base, crowded, older = (predict(row).predicted for row in rows)
    assert base["tpot_ms"] < crowded["tpot_ms"]
    assert base["tpot_ms"] < older["tpot_ms"]
    assert base["ttft_ms"] < crowded["ttft_ms"]


def test_an_error_that_all_rows_share_is_none_of_their_ratios() -> None:
    rows = [replace(ROW, id=str(c), concurrency=c, tpot_ms=5.0 + c) for c in (4, 8, 16)]
    shared = [joined(row, {"tpot_ms": 1.3 * row.tpot_ms}) for row in rows]
    assert list(ratios(shared).values()) == pytest.approx([0, 0], abs=1e-12)
    one_off = [*shared[:2], joined(rows[2], {"tpot_ms": 2.6 * rows[2].tpot_ms})]
    assert ratios(one_off)["p95"] > 0.5


def test_the_command_reports_the_errors_of_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--silicon", "trtllm", "--rows", "2", "--jobs", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    measured = {row.id: row for row in read_rows()}
    errors = [row["tpot_ms"] / measured[row["id"]].tpot_ms - 1 for row in document["rows"]]
    assert all(not measured[row["id"]].held_out and measured[row["id"]].engine == "trtllm" for row in document["rows"])
    all_rows = document["by"]["all"]["all"]["tpot_ms"]
    assert {name: all_rows[name] for name in ("median", "p95")} == pytest.approx(middle(errors))
    assert np.all(np.isfinite(errors))


def test_servers_with_prefill_apart_have_their_gpus_and_not_dynamos_version() -> None:
    """Workers of both sides, each with its own ranks and shards; of the rows whose layout can be simulated."""
    rows = [row for row in read_rows() if row.prefill is not None and row.workers and row.prefill.workers][::40]
    simulated = 0
    for row in rows:
        side = row.prefill
        assert side is not None
        assert row.engine != "trtllm" or not row.version.startswith("0.")
        try:
            experiment = replace(row, concurrency=row.concurrency or 1).experiment
        except ValueError:
            continue
        simulated += 1
        prefill = side.workers * side.tensor_parallel * side.data_parallel
        assert experiment.gpus == prefill + row.workers * row.tensor_parallel * row.data_parallel
        assert experiment.arch == "pd"
    assert simulated > len(rows) / 3
