"""Draft tables: the best length at every batch size, computed once more by hand; few ranges; what simulations say."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pdvsim
from pdvsim.cli import main
from pdvsim.decide.draft_lengths import _merged, confirm, error_of, find_table, simulations
from pdvsim.decide.draft_table import DraftQuestion, DraftTable, IdleDrafter, Simulated, draft_document, draft_text
from pdvsim.decide.formula import Formula
from pdvsim.decide.runs import Bench
from pdvsim.sim.config import Acceptance, Experiment, Hardware, Server, Traffic
from pdvsim.sim.hardware.latency import Latency
from pdvsim.sim.hardware.models import MODELS, gpu
from pdvsim.sim.hardware.profile import builtin, roofline
from pdvsim.sim.run import simulate
from pdvsim.study.output import dumps
from pdvsim.study.stats import Interval

PAIRS = ("tinyllama-1.1b:llama-2-7b", "llama-3.2-1b:llama-3.1-8b", "tinyllama-1.1b:codellama-34b")
PROMPT, OUTPUT, MOST = 256, 128, 160


def question(pair: str = PAIRS[0], rate: float = 0.6, idle: IdleDrafter | None = None, **other: float) -> DraftQuestion:
    traffic = Traffic("random", input_len=PROMPT, output_len=OUTPUT, num_prompts=12)
    server = Server(pair=pair, max_num_seqs=MOST)
    base = Experiment("colocated", traffic, Acceptance(acceptance_rate=rate), server)
    return replace(DraftQuestion(base, idle_drafter=idle), **other)  # type: ignore[arg-type]


@cache
def table(pair: str = PAIRS[0], rate: float = 0.6, idle: IdleDrafter | None = None, least: float = 0.02) -> DraftTable:
    return find_table(question(pair, rate, idle, indifference=least))


def by_hand(pair: str, rate: float, idle: IdleDrafter, rows: int, k: int) -> float:
    """Tokens per second of a batch, from the profile's latencies alone."""
    profile = builtin("h200")
    draft, target = (Latency(MODELS[name], profile.models[name]) for name in pair.split(":"))
    cached = int(rows * (PROMPT + OUTPUT / 2))

    def seconds(model: Latency, tokens: int, steps: int = 1) -> float:
        shape = model.shape(rows, tokens, steps)
        return shape.solo_0 + shape.solo_1 * cached

    spent_s = seconds(target, k + 1) + profile.host.launch_s + profile.host.completion_s
    if k:
        someone_whole = 1 - (1 - rate**k) ** rows  # whose drafts were all accepted, so that the drafter reads two
        spent_s += seconds(draft, 1, k) + someone_whole * (seconds(draft, 2, k) - seconds(draft, 1, k))
    elif idle == "follows":
        spent_s += seconds(draft, 1)
    return rows * (1 - rate ** (k + 1)) / (1 - rate) / spent_s


@pytest.mark.parametrize(("pair", "idle"), [*product(PAIRS, ("follows", "rests"))])
def test_each_length_is_the_best(pair: str, idle: IdleDrafter) -> None:
    found = table(pair, 0.7, idle, least=0.0)
    best = [max(range(9), key=lambda k: by_hand(pair, 0.7, idle, rows, k)) for rows in range(1, MOST + 1)]
    assert list(found.best) == best
    assert [k for first, last, k in found.ranges() for _ in range(first, last + 1)] == best
    assert found.lost == 0
    for tier in found.tiers:
        assert tier.tokens_per_s[0] == pytest.approx(by_hand(pair, 0.7, idle, tier.first, tier.k))
        assert tier.over_next >= 0


@pytest.mark.parametrize(("pair", "rate"), [*product(PAIRS, (0.3, 0.6, 0.8, 1.0))])
def test_ranges_are_a_partition(pair: str, rate: float) -> None:
    found = table(pair, rate)
    ranges = found.ranges()
    assert (ranges[0][0], ranges[-1][1]) == (1, MOST)
    for (_, last, k), (first, _, other) in pairwise(ranges):
        assert first == last + 1
        assert other != k
    assert all(0 <= k <= 8 for *_, k in ranges)
    assert found.ranges(30) == [[a, min(b, 30), k] for a, b, k in ranges if a <= 30]


@pytest.mark.parametrize(("pair", "idle"), [*product(PAIRS, ("follows", "rests"))])
def test_more_acceptance_never_shortens_a_draft(pair: str, idle: IdleDrafter) -> None:
    lengths = [table(pair, rate, idle, least=0.0).best for rate in (0.1, 0.3, 0.5, 0.7, 0.9)]
    for less, more in pairwise(lengths):
        assert all(a <= b for a, b in zip(less, more, strict=True))


@pytest.mark.parametrize("pair", PAIRS)
def test_a_drafter_that_reads_along_leaves_less_to_no_drafts(pair: str) -> None:
    """At k=0 it costs a step for nothing, so that 0 is best at fewer sizes, and plain serving is better than 0."""
    follows, rests = (table(pair, 0.6, idle, least=0.0) for idle in ("follows", "rests"))  # type: ignore[arg-type]
    for mine, theirs in zip(follows.best, rests.best, strict=True):
        assert mine == theirs or (theirs == 0 and mine > 0)
    assert rests.plain_from is None
    if 0 in rests.best:
        assert follows.plain_from == rests.best.index(0) + 1


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
    behind = logs.max(axis=1, keepdims=True) - logs
    ways = []
    for chosen in product(range(logs.shape[1]), repeat=len(runs)):
        lost = [behind[run, k].sum() for run, k in zip(runs, chosen, strict=True)]
        if all(math.expm1(cost / len(run)) <= indifference for cost, run in zip(lost, runs, strict=True)):
            ways.append((1 + sum(a != b for a, b in pairwise(chosen)), sum(lost)))
    found = _merged(logs, best, indifference)
    lost = sum(behind[first - 1 : last, k].sum() for first, last, k in found)
    assert (len(found), lost) == pytest.approx(min(ways))


def test_small_gains_get_no_range_of_their_own() -> None:
    every, few = table(rate=0.8, least=0.0), table(rate=0.8)
    assert len(few.tiers) < len(every.tiers)
    assert 0 < few.lost < 0.05
    assert f"at most {few.lost:.1%} faster" in draft_text(few)


@pytest.mark.parametrize("pair", PAIRS)
def test_a_length_stays_the_best_between_its_acceptance_rates(pair: str) -> None:
    found = table(pair)
    for tier in found.tiers:
        assert tier.acceptance is not None
        low, high = tier.acceptance
        assert low <= 0.6 <= high
        sizes = np.unique(np.linspace(tier.first, tier.last, min(16, tier.last - tier.first + 1)).astype(int))
        for rate, stays in ((low, True), (high, True), (low - 0.02, False), (high + 0.02, False)):
            if not 0 <= rate < 1:
                continue
            means = [sum(math.log(by_hand(pair, rate, "follows", n, k)) for n in sizes) / len(sizes) for k in range(9)]
            assert (math.expm1(max(means) - means[tier.k]) <= 0.02) == stays, (tier, rate)


def test_tokens_of_a_round() -> None:
    formula = Formula(question().drafting(4))

    def tokens(given: Acceptance) -> list[float]:
        return [formula.tokens_a_round(k, given) for k in range(3)]

    assert tokens(Acceptance(acceptance_rate=0.5)) == pytest.approx([1, 1.5, 1.75])
    assert tokens(Acceptance(acceptance_rate=1.0)) == [1, 2, 3]
    assert tokens(Acceptance(synthetic_acceptance_rates=(0.9, 0.5))) == pytest.approx([1, 1.9, 2.4])


def test_requests_of_unlike_rates_are_counted_by_their_rounds() -> None:
    """Tokens over rounds of many requests of one length, drawn one by one."""
    given = Acceptance(acceptance_rate=0.6, acceptance_concentration=3.0)
    rates = np.random.default_rng(0).beta(1.8, 1.2, 200_000)
    formula = Formula(question().drafting(4))
    for k in range(5):
        each = sum(rates**i for i in range(k + 1))
        assert formula.tokens_a_round(k, given) == pytest.approx(1 / np.mean(1 / each), rel=0.005)


def test_a_trace_says_what_it_recorded(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text("[2, 2, 2]\n", encoding="utf-8")
    base = question().base
    given = Acceptance(acceptance_trace=str(tmp_path / "trace.jsonl"), acceptance_trace_k=2)
    found = find_table(DraftQuestion(replace(base, acceptance=given), max_k=2))
    assert set(found.best) == {2}
    assert all(tier.acceptance is None for tier in found.tiers)


def test_the_error_is_the_profiles_own() -> None:
    asked = question().drafting(4)
    measured = builtin("h200")
    medians = [measured.provenance["held_out_error"][name]["median"] for name in PAIRS[0].split(":")]
    assert error_of(measured, asked) == pytest.approx(math.sqrt(2) * max(medians))
    predicted = builtin("h100-sxm")
    assert error_of(predicted, asked) == predicted.uncertainty["llama-2-7b"]
    assert math.isnan(error_of(roofline(gpu("h200")), asked))


def test_gains_within_the_error_are_marked() -> None:
    found = find_table(replace(question(), base=replace(question().base, hardware=Hardware(gpu="h100-sxm"))))
    assert found.tiers[0].over_next < found.error
    assert not found.told_apart(found.tiers[0])
    assert "not told apart" in draft_text(found).splitlines()[3]
    unknown = find_table(replace(question(), base=replace(question().base, hardware=Hardware(profile="roofline"))))
    assert "states no error" in draft_text(unknown)
    assert json.loads(dumps(draft_document(unknown)))["error"] is None


def test_simulations_are_of_the_neighbours_seed_by_seed() -> None:
    found = find_table(replace(question(num_runs=2), base=replace(question().base, server=Server(max_num_seqs=6))))
    (tier,) = found.tiers
    asked = simulations(found, tier)
    assert set(asked) == {tier.k - 1, tier.k, tier.k + 1}
    for k, runs in asked.items():
        assert [run.traffic.seed for run in runs] == [0, 1]
        assert all((run.traffic.max_concurrency, run.server.num_speculative_tokens) == (3, k) for run in runs)
    confirm(found, Bench(jobs=1))
    assert (found.runs, found.interrupted) == (6, False)
    seen = found.tiers[0].simulated
    assert seen is not None
    assert seen.rows == 3
    speeds = {k: [pdvsim.Run(simulate(run)).metrics["output_throughput"] for run in runs] for k, runs in asked.items()}
    for k, lead in seen.leads.items():
        shares = [a / b - 1 for a, b in zip(speeds[k], speeds[tier.k], strict=True)]
        assert lead.mean == pytest.approx(sum(shares) / 2)
    assert f"agrees at {seen.rows}" in draft_text(found)


def test_simulation_has_the_last_word() -> None:
    seen = Simulated(8, {1: Interval(-0.02, 0.01, 5), 3: Interval(0.03, 0.01, 5)})
    assert seen.ahead == 3
    assert Simulated(8, {3: Interval(0.03, 0.04, 5)}).ahead is None
    assert Simulated(8, {3: Interval(0.03, math.nan, 1)}).ahead is None
    found = replace(table(), tiers=[replace(tier, simulated=seen) for tier in table().tiers])
    assert "k=3 at 8: +3.0 ±1.0 %" in draft_text(found)
    assert draft_document(found)["tiers"][0]["simulated"]["ahead"] == 3


def test_what_is_not_simulated() -> None:
    """No drafts where the drafter follows, which it does not in a simulation; batches that memory never holds."""
    found = table(PAIRS[1], 0.05)
    nothing = [tier for tier in found.tiers if tier.k == 0]
    assert nothing
    assert all(not simulations(found, tier) for tier in nothing)
    small = find_table(replace(question(), base=replace(question().base, hardware=Hardware(kv_capacity_tokens=2000))))
    assert small.fits == 2000 // (PROMPT + OUTPUT / 2)
    assert all(not simulations(small, tier) for tier in small.tiers if tier.middle > small.fits)
    assert f"holds about {small.fits} requests" in draft_text(small)


COMMAND = ["draft-table", "--dataset-name", "random", "--input-len", "64", "--output-len", "16", "--max-num-seqs", "8"]


def test_the_document_and_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "table.json"
    assert main([*COMMAND, "--no-confirm", "--json", "-o", str(path)]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert json.loads(path.read_text(encoding="utf-8")) == document
    assert f"saved {path}" in captured.err
    assert document["num_speculative_tokens_per_batch_size"] == [
        [t["first"], t["last"], t["k"]] for t in document["tiers"]
    ]
    assert len(document["best_by_formula"]) == 8
    assert document["vllm"]["text"].startswith("vllm serve meta-llama/Llama-2-7b-chat-hf --max-num-seqs 8")
    assert document["question"]["base"]["server"]["pair"] == PAIRS[0]


def test_python_and_the_command_agree(capsys: pytest.CaptureFixture[str]) -> None:
    found = pdvsim.draft_table(
        dataset_name="random", input_len=64, output_len=16, max_num_seqs=8, num_prompts=6, num_runs=2, jobs=1
    )
    assert main([*COMMAND, "--num-prompts", "6", "--num-runs", "2", "--jobs", "1"]) == 0
    printed, mine = capsys.readouterr().out.splitlines(), repr(found).splitlines()
    assert len(printed) == len(mine)
    for line, other in zip(printed, mine, strict=True):
        assert line == other or line.startswith("- profile ")  # which ends with the time it took
    assert found.runs == 6


def test_an_interrupt_keeps_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pdvsim.decide.runs.Bench.rows", stop)
    assert main([*COMMAND, "--jobs", "1"]) == 130
    captured = capsys.readouterr()
    assert "vllm serve" in captured.out
    assert captured.err.count("\n") == 1
    assert "interrupted" in captured.err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--arch", "autoregressive"], "drafts nothing"),
        (["--arch", "baseline"], "batch 1"),
        (["--arch", "pdv", "--idle-drafter", "follows"], "not pdv"),
        (["--arch", "pdv", "--verify-gpu", "1"], "of one GPU"),
        (["--against", "5", "--max-k", "3"], "--against 5 is beyond --max-k 3"),
        (["--max-num-seqs", "5000"], "max-num-seqs must be 1 to 4096, got 5000"),
        (["--max-k", "0"], "max-k must be 1 to 32"),
        (["--synthetic-acceptance-rates", "0.8,0.5"], "gives 2 positions, and drafts have up to 8"),
        (["--num-speculative-tokens", "4"], "--num-speculative-tokens"),
        (["--pair", "tinyllama-1.1b"], "must be written draft:target"),
        (["--gpu", "h9000"], "unknown gpu 'h9000'"),
        (["--input-len", "4000"], "lower --input-len"),
        (["--indifference", "1"], "indifference must be 0 to 0.99"),
        (["--acceptance-trace", "/no/such.jsonl"], "/no/such.jsonl"),
    ],
)
def test_bad_input_is_one_line(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert says in captured.err


def test_an_option_that_the_table_chooses_is_refused() -> None:
    with pytest.raises(ValueError, match="controller is not for a draft table"):
        pdvsim.draft_table(controller="goodput")
    with pytest.raises(ValueError, match="request_rate is not for a draft table"):
        pdvsim.draft_table(request_rate=8.0)


def test_it_does_not_overwrite_what_it_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("[2, 2, 2]\n", encoding="utf-8")
    given = ["--acceptance-trace", str(trace), "--max-k", "4", "--no-confirm"]
    assert main([*COMMAND, *given, "-o", str(trace)]) == 2
    assert "is made from it" in capsys.readouterr().err
    assert trace.read_text(encoding="utf-8") == "[2, 2, 2]\n"
