"""Draft tables: against simulations at every edge, few ranges, and what each engine does with a draft length."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pdvsim
from pdvsim.bench.output import dumps
from pdvsim.cli import main
from pdvsim.decide.draft_lengths import Speeds, _merged, error_of, find_table
from pdvsim.decide.draft_table import PLAIN, TABLED, DraftQuestion, DraftTable, EngineName
from pdvsim.decide.formula import Formula
from pdvsim.decide.runs import Bench, replications
from pdvsim.sim.config import Acceptance, Experiment, Hardware, Server, Traffic
from pdvsim.sim.engines.vllm import VLLM
from pdvsim.sim.metrics.steady import FILL, LEAST_LOOP
from pdvsim.sim.prices.cards import gpu
from pdvsim.sim.prices.profile import builtin, roofline
from pdvsim.sim.run import simulate

PAIRS = ("tinyllama-1.1b:llama-2-7b", "llama-3.2-1b:llama-3.1-8b", "gemma-2b:gemma-7b")
PROMPT, OUTPUT, MOST = 32, 48, 96


def question(pair: str = PAIRS[0], rate: float = 0.6, engine: EngineName = "vllm", **other: object) -> DraftQuestion:
    traffic = Traffic("random", input_len=PROMPT, output_len=OUTPUT, random_range_ratio=0.3, num_prompts=12)
    server = Server(pair=pair, max_num_seqs=MOST)
    base = Experiment("colocated", traffic, Acceptance(acceptance_rate=rate), server)
    return replace(DraftQuestion(base, 4, engine=engine, num_runs=2), **other)  # type: ignore[arg-type]


@cache
def by_formula(pair: str = PAIRS[0], rate: float = 0.6, engine: EngineName = "vllm", least: float = 0.02) -> DraftTable:
    """By formula alone, which takes a tenth of the time."""
    return find_table(question(pair, rate, engine, indifference=least))


@pytest.fixture
def simulated(once: Callable[..., Any]) -> DraftTable:
    """A table by simulations, made once for all tests: of several lengths, and borders between them."""
    asked = question(PAIRS[1], 0.65, indifference=0.01)
    table: DraftTable = once("draft-table", lambda: find_table(asked, Bench(1)))
    return table


def speed(experiment: Experiment) -> float:
    return float(pdvsim.Run(simulate(experiment)).metrics["output_throughput"])


def k_at(table: DraftTable, rows: int) -> int:
    return next(tier.k for tier in table.tiers if tier.last >= rows)


def test_simulations_agree_at_every_edge(simulated: DraftTable) -> None:
    """On seeds that the table has not seen: its gain over plain decoding, and that no neighbour is ahead.

    Three percent of room: two pairs of runs, whose gains scatter by one percent.
    """
    table = simulated
    asked = table.question
    fresh = replace(asked, base=replace(asked.base, traffic=replace(asked.base.traffic, seed=500)))
    for at, tier in enumerate(table.tiers):
        for rows, over_plain in zip((tier.first, tier.last), tier.over_plain, strict=True):
            lengths = {tier.k, PLAIN, *(other.k for other in table.tiers[max(0, at - 1) : at + 2])}
            speeds = {k: np.mean([speed(run) for run in fresh.loops(rows, k)]) for k in lengths}
            assert speeds[tier.k] / speeds[PLAIN] - 1 == pytest.approx(over_plain, abs=0.03), (rows, tier)
            rivals = [speeds[k] / speeds[tier.k] - 1 for k in lengths - {PLAIN, tier.k}]
            assert max(rivals, default=0.0) < asked.indifference + 0.03, (rows, tier)


def test_plain_decoding_wins_where_simulations_say_so(simulated: DraftTable) -> None:
    """Beyond and well before the size from which the table says that a drafter no longer pays, on fresh seeds."""
    table = simulated
    asked, first = table.question, table.plain_from
    fresh = replace(asked, base=replace(asked.base, traffic=replace(asked.base.traffic, seed=500)))
    assert first > 1
    for rows, wins in ((min(round(1.2 * first), MOST), True), (round(0.8 * first), False)):
        plain, drafted = (np.mean([speed(run) for run in fresh.loops(rows, k)]) for k in (PLAIN, k_at(table, rows)))
        assert bool(plain > drafted) == wins


@pytest.mark.parametrize(("pair", "rate"), [*product(PAIRS, (0.3, 0.6, 0.8, 1.0))])
def test_ranges_are_a_partition(pair: str, rate: float) -> None:
    table = by_formula(pair, rate)
    ranges = table.ranges()
    assert (ranges[0][0], ranges[-1][1]) == (1, MOST)
    for (_, last, k), (first, _, other) in pairwise(ranges):
        assert first == last + 1
        assert other != k
    assert all(0 <= k <= 4 for *_, k in ranges)
    assert [k_at(table, rows) for rows in range(1, MOST + 1)] == [k for a, b, k in ranges for _ in range(a, b + 1)]


@pytest.mark.parametrize(("pair", "engine"), [*product(PAIRS, get_args(EngineName))])
def test_more_acceptance_never_shortens_a_draft(pair: str, engine: EngineName) -> None:
    sizes = [1, 2, 5, 12, 30, 64, 96]
    lengths = [Speeds(question(pair, rate, engine)).logs(sizes).argmax(axis=1) for rate in (0.1, 0.5, 0.9)]
    for less, more in pairwise(lengths):
        assert (less <= more).all()


# ---- engines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", PAIRS)
def test_what_no_drafts_cost(pair: str) -> None:
    """The drafters of vLLM and SGLang still run at k=0, which costs time; TensorRT-LLM has no k=0."""
    sizes = [1, 8, 64, 96]
    columns = {engine: Speeds(question(pair, engine=engine)) for engine in get_args(EngineName)}
    for engine in ("vllm", "sglang"):
        assert (columns[engine].logs(sizes)[:, 0] < columns[engine].plain(sizes) - 0.05).all()
    assert np.isneginf(columns["tensorrt-llm"].logs(sizes)[:, 0]).all()


@pytest.mark.parametrize("pair", PAIRS)
def test_the_lowest_k_is_the_engines(pair: str) -> None:
    """Where next to nothing is accepted, TensorRT-LLM's table ends at 1."""
    low = by_formula(pair, 0.05, "tensorrt-llm")
    assert set(low.best) == {1}
    assert low.plain_from == 1
    with pytest.raises(ValueError, match="tensorrt-llm"):
        question(pair, engine="tensorrt-llm", against=0)


@pytest.mark.parametrize("pair", PAIRS[1:])
def test_an_idle_drafter_costs_a_step_per_token(pair: str) -> None:
    """Simulated: a step is longer by the drafter's own, by hand; and by formula it is near that."""
    idle = question(pair)
    speeds = Speeds(idle)
    [run, _], [plain, _] = idle.loops(1, 0), idle.loops(1, PLAIN)
    drafter = builtin("h200").padded(VLLM.graphs).cost_model(idle.drafting(1).pair.draft).price(1, 1)
    more_s = drafter.seconds_0 + drafter.seconds_1 * (PROMPT + OUTPUT / 2)
    tpot_s = [pdvsim.Run(simulate(one)).metrics["mean_tpot_ms"] / 1e3 for one in (run, plain)]
    assert tpot_s[0] - tpot_s[1] == pytest.approx(more_s, rel=0.05)
    for rows in (1, 32, 96):
        bench = Bench(1)
        bench.rows([*idle.loops(rows, PLAIN), *idle.loops(rows, 0)])
        speeds.learn([(rows, PLAIN)], bench)
        by_formula = speeds.logs([rows])[0, 0]
        speeds.learn([(rows, 0)], bench)
        assert speeds.logs([rows])[0, 0] == pytest.approx(by_formula, abs=0.1)
        assert math.exp(speeds.logs([rows])[0, 0]) == pytest.approx(speeds.simulated[rows, 0].mean)


def test_each_engine_is_simulated_as_it_pads() -> None:
    for engine in get_args(EngineName):
        asked = question(engine=engine)
        assert {run.hardware.padding for k in (PLAIN, 1) for run in asked.loops(8, k)} == {engine}
        assert TABLED[engine].pads in str(by_formula(engine=engine))


def test_tensorrt_llm_takes_the_table_by_its_last_sizes() -> None:
    table = by_formula(engine="tensorrt-llm")
    [block] = table.report().document["deployment"]
    schedule = {str(last): k for _, last, k in table.ranges()}
    assert json.loads(block["text"]) == {"max_draft_len": max(schedule.values()), "draft_len_schedule": schedule}


# ---- few ranges ------------------------------------------------------------------------------------------------------

SPEEDS = st.integers(2, 4).flatmap(
    lambda lengths: st.lists(st.lists(st.integers(90, 110), min_size=lengths, max_size=lengths), min_size=1, max_size=7)
)


@given(SPEEDS, st.sampled_from([0.0, 0.03, 0.1]))
@settings(max_examples=200, deadline=None)
def test_the_fewest_ranges(speeds: list[list[int]], indifference: float) -> None:
    """Against every choice of a length for every run of sizes with one best length."""
    logs = np.log(np.array(speeds, float))
    best = logs.argmax(axis=1).tolist()
    runs: list[list[int]] = []
    for size, k in enumerate(best):
        if size and best[size - 1] == k:
            runs[-1].append(size)
        else:
            runs.append([size])
    losses = logs.max(axis=1, keepdims=True) - logs
    lost_by = [losses[run].sum(axis=0).tolist() for run in runs]
    allowed = [np.flatnonzero(np.expm1(losses[run].max(axis=0)) <= indifference).tolist() for run in runs]
    ways = [
        (1 + sum(a != b for a, b in pairwise(chosen)), sum(by[k] for by, k in zip(lost_by, chosen, strict=True)))
        for chosen in product(*allowed)
    ]
    ranges = _merged(logs, best, indifference)
    lost = sum(losses[first - 1 : last, k].sum() for first, last, k in ranges)
    assert (len(ranges), lost) == pytest.approx(min(ways))


def test_no_batch_of_a_range_gains_less_than_its_worst(simulated: DraftTable) -> None:
    """Of all that were simulated with the range's length, within its ends too."""
    table = simulated
    for tier in table.tiers:
        inside = [rows for rows, k in table.simulated if k == tier.k and tier.first <= rows <= tier.last]
        gains = [table.simulated[rows, tier.k].mean / table.simulated[rows, PLAIN].mean - 1 for rows in inside]
        assert tier.first <= tier.worst <= tier.last
        assert tier.worst_over_plain <= min(gains) + 1e-9
        assert tier.worst_over_plain <= min(tier.over_plain) + 1e-9


def test_small_gains_get_no_range_of_their_own() -> None:
    every, few = by_formula(PAIRS[1], 0.7, least=0.0), by_formula(PAIRS[1], 0.7)
    assert len(few.tiers) < len(every.tiers)
    assert every.lost == 0
    assert 0 < few.lost <= few.question.indifference == 0.02


@pytest.mark.parametrize("pair", PAIRS)
def test_a_length_stays_the_best_between_its_acceptance_rates(pair: str) -> None:
    table = by_formula(pair)
    for tier in table.tiers:
        low, high = tier.acceptance
        assert low <= 0.6 <= high
        sizes = np.unique(np.linspace(tier.first, tier.last, min(16, tier.last - tier.first + 1)).astype(int)).tolist()
        for rate, stays in ((low, True), (high, True), (low - 0.02, False), (high + 0.02, False)):
            if 0 <= rate < 1:
                means = Speeds(question(pair, rate)).logs(sizes).mean(axis=0)
                assert (math.expm1(means.max() - means[tier.k]) <= 0.02) == stays, (tier, rate)


def test_tokens_of_a_round() -> None:
    def tokens(given: Acceptance) -> list[float]:
        formula = Formula(replace(question().drafting(4), acceptance=given))
        return [formula.tokens_per_round(k) for k in range(3)]

    assert tokens(Acceptance(acceptance_rate=0.5)) == pytest.approx([1, 1.5, 1.75])
    assert tokens(Acceptance(acceptance_rate=1.0)) == [1, 2, 3]
    assert tokens(Acceptance(synthetic_acceptance_rates=(0.9, 0.5))) == pytest.approx([1, 1.9, 2.4])


def test_requests_of_unlike_rates_are_counted_by_their_rounds() -> None:
    """Tokens over rounds of many requests of one length, drawn one by one."""
    given = Acceptance(acceptance_rate=0.6, acceptance_concentration=3.0)
    rates = np.random.default_rng(0).beta(1.8, 1.2, 200_000)
    formula = Formula(replace(question().drafting(4), acceptance=given))
    for k in range(5):
        each = sum(rates**i for i in range(k + 1))
        assert formula.tokens_per_round(k) == pytest.approx(1 / np.mean(1 / each), rel=0.005)


def test_a_trace_says_what_it_recorded(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text("[2, 2, 2]\n", encoding="utf-8")
    given = Acceptance(acceptance_trace=str(tmp_path / "trace.jsonl"))
    table = find_table(DraftQuestion(replace(question().base, acceptance=given), max_k=2))
    assert set(table.best) == {2}
    assert all(tier.acceptance is None for tier in table.tiers)


def test_the_error_is_the_profiles_own() -> None:
    asked = question().drafting(4)
    measured = builtin("h200")
    medians = [measured.provenance["held_out_error"][name]["median"] for name in PAIRS[0].split(":")]
    assert error_of(measured, asked) == pytest.approx(math.sqrt(2) * max(medians))
    predicted = builtin("h100-sxm")
    assert error_of(predicted, asked) == predicted.uncertainty["llama-2-7b"]
    assert math.isnan(error_of(roofline(gpu("h200")), asked))


def test_gains_within_the_error_are_marked() -> None:
    table = find_table(replace(question(), base=replace(question().base, hardware=Hardware(gpu="h100-sxm"))))
    assert table.tiers[0].over_next < table.error
    assert not table.significant(table.tiers[0])
    assert f"(±{table.error:.1%})" in str(table).splitlines()[3]
    unknown = find_table(replace(question(), base=replace(question().base, hardware=Hardware(profile="roofline"))))
    assert "states no error" in str(unknown)
    assert json.loads(dumps(unknown.report().document))["error"] is None


def test_what_memory_does_not_hold_is_not_simulated() -> None:
    """Batches stop growing there, and so does the table."""
    hardware = Hardware(kv_capacity_tokens=1500)
    asked = replace(question(), base=replace(question().base, hardware=hardware))
    table = find_table(asked, Bench(1))
    assert table.fits == 1500 // table.context
    assert max(rows for rows, _ in table.simulated) == table.fits
    assert k_at(table, table.fits) == k_at(table, MOST)


def test_runs_are_paired_by_seed_and_measured_after_the_first_batch() -> None:
    for k in (PLAIN, 2):
        runs = question().loops(8, k)
        assert [run.traffic.seed for run in runs] == [0, 1]
        assert runs == replications(runs[0], 2)
        assert all((run.traffic.max_concurrency, run.scoring.warmup_requests) == (8, FILL * 8) for run in runs)
        assert all(run.traffic.num_prompts == FILL * 8 + LEAST_LOOP for run in runs)
        assert all(run.server.num_speculative_tokens == max(k, 0) for run in runs)


COMMAND = ["draft-table", "--dataset-name", "random", "--input-len", "64", "--output-len", "16", "--max-num-seqs", "8"]
QUICK = ["--num-prompts", "8", "--num-runs", "2", "--jobs", "1"]


def test_the_document_the_file_and_python_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "table.json"
    assert main([*COMMAND, *QUICK, "--json", "-o", str(path)]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert json.loads(path.read_text(encoding="utf-8")) == document
    assert str(path) in captured.err
    table = pdvsim.draft_table(
        dataset_name="random", input_len=64, output_len=16, max_num_seqs=8, num_prompts=8, num_runs=2, jobs=1
    )
    again = json.loads(dumps(table.report().document))
    assert {key for key in document if document[key] != again[key]} <= {"spent_s"}
    assert document["num_speculative_tokens_per_batch_size"] == [list(span) for span in table.ranges()]
    assert len(document["best"]) == 8
    command, *options = document["deployment"][0]["text"].split(" --")
    assert command.startswith("vllm serve ")
    assert "max-num-seqs 8" in options
    assert document["question"]["base"]["server"]["pair"] == Server.pair
    assert {point["k"] for point in document["simulated"]} >= {"plain", 1}
    assert table.runs == 2 * (len(table.simulated) + 2 * len(table.borders))


def test_an_interrupt_keeps_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pdvsim.decide.runs.Bench.rows", stop)
    assert main([*COMMAND, "--jobs", "1"]) == 130
    captured = capsys.readouterr()
    assert "vllm serve" in captured.out
    assert captured.err.count("\n") == 1
    assert "interrupted" in captured.err


def test_it_does_not_overwrite_what_it_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("[2, 2, 2]\n", encoding="utf-8")
    given = ["--acceptance-trace", str(trace), "--max-k", "4"]
    assert main([*COMMAND, *given, "-o", str(trace)]) == 2
    assert str(trace) in capsys.readouterr().err
    assert trace.read_text(encoding="utf-8") == "[2, 2, 2]\n"


def test_a_border_costs_what_the_table_loses_when_it_is_served_there(simulated: DraftTable) -> None:
    """Against the better of both lengths in the same closed loop."""
    table = simulated
    assert [border.first for border in table.borders] == [first for first, *_ in table.ranges()[1:]]
    assert table.borders
    for border in table.borders:
        assert border.at == pytest.approx(border.first, rel=0.12)
        better = max(table.simulated[border.at, k].mean for k in (border.before, border.after))
        tiers = tuple(f"{begin}:{k}" for begin, _, k in table.ranges())
        loops = table.question.loops(border.at, Server.num_speculative_tokens)
        server = replace(loops[0].server, controller="table", num_speculative_tokens_per_batch_size=tiers)
        speeds = [speed(replace(loop, server=server)) for loop in loops]
        assert border.lost == pytest.approx(1 - sum(speeds) / len(speeds) / better)
