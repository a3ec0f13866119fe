"""Advice: the command it gives reproduces its figures, what flips is flipped, and the simpler of equals is taken."""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pdvsim
from pdvsim.bench.run import SweepInterrupted
from pdvsim.cli import main
from pdvsim.cli.run import RunCommand
from pdvsim.common.commandline import command_line, parse
from pdvsim.decide import runs as runs_module
from pdvsim.decide.advice import FLIPS, Advice
from pdvsim.decide.advise import usual_runs
from pdvsim.decide.error import lead_error
from pdvsim.decide.figures import advice_pictures
from pdvsim.decide.formula import Formula
from pdvsim.decide.goal import Goal
from pdvsim.decide.race import contest
from pdvsim.decide.runs import Bench, at_acceptance, at_rate
from pdvsim.decide.space import Space, complexity
from pdvsim.decide.surroundings import RUN_SHARE, Rivalry
from pdvsim.decide.tune import Search
from pdvsim.sim.config import Acceptance, Experiment, Hardware, Host, Scoring, Server, Traffic
from pdvsim.sim.policies import ARCHS
from pdvsim.sim.relevance import applicable
from pdvsim.sim.run import simulate
from pdvsim.view.report.sheet import Sheet

if TYPE_CHECKING:
    from playwright.sync_api import Browser

OPTIONS = {"dataset_name": "random", "num_prompts": 40, "input_len": 64, "output_len": 24, "num_runs": 5, "jobs": 1}
LEVELS = ("ttft:200", "tpot:20")


@cache
def whole_advice() -> Advice:
    """Four architectures, a few settings, and budget enough for all."""
    return pdvsim.advise(
        arch=["autoregressive", "colocated", "pd", "pdv"],
        request_rate=20,
        goodput=LEVELS,
        controller="fixed",
        max_num_seqs=128,
        max_num_batched_tokens=2048,
        **OPTIONS,
    )


def test_the_command_reproduces_the_figures_exactly() -> None:
    document = whole_advice().report().document
    command = shlex.split(document["recommendation"]["command"])
    assert command[:2] == ["pdvsim", "run"]
    experiment = parse(RunCommand, command[2:]).experiment
    assert experiment == whole_advice().recommended
    metrics = pdvsim.Run(simulate(experiment)).metrics
    quoted = document["first_replication"]
    for key in ("request_goodput", "output_throughput", "mean_ttft_ms", "p90_ttft_ms", "p99_tpot_ms", "mean_e2el_ms"):
        assert metrics[key] == quoted[key]
    for key, mean in document["expected"].items():
        if key != "attainment" and not math.isnan(mean.mean):
            assert mean.mean == pytest.approx(sum(row[key] for row in whole_advice().rows) / len(whole_advice().rows))


def test_the_runs_that_an_answer_takes_are_foreseen() -> None:
    advice = whole_advice()
    assert advice.runs / 1.5 < usual_runs(advice.question) < 1.5 * advice.runs


def test_the_recommendation_is_the_best_or_the_simplest_of_those_alike() -> None:
    advice = whole_advice()
    goal = advice.question.goal
    figures = {name: list(map(goal.value, rows)) for name, rows in advice.finals.rows.items() if goal.met(rows)}
    held, decided = contest(figures, goal.sign, None, 0.01), advice.finals.contest
    assert (held.best, held.leads, held.alike) == (decided.best, decided.leads, decided.alike)
    assert set(decided.alike) <= set(decided.unsure)
    tied = {held.best, *held.alike}
    assert advice.recommended.arch == min(tied, key=lambda arch: ARCHS.index(arch))  # type: ignore[arg-type]
    assert advice.met


def test_the_text_says_what_the_document_says() -> None:
    text, document = str(whole_advice()), whole_advice().report().document
    assert document["recommendation"]["described"] in text
    assert document["recommendation"]["command"] in text.replace(" \\\n   ", "")
    assert document["first_replication"]["foundation"] in text
    for section in ("Recommendation", "Asked", "Candidates", "Why", "Expected", "Where that changes", "Method"):
        assert f"{section}\n{'-' * len(section)}" in text
    assert document["search"]["left_out"] == []
    assert f" {20 / whole_advice().holds(whole_advice().best).mean:.0%} of the rate that it holds (limited by " in text


BASE = Experiment(
    arch="colocated",
    traffic=Traffic("random", num_prompts=30, request_rate=20.0, input_len=64, output_len=32),
)
GOAL = Goal("e2el")
DRAFTING = GOAL.prepared(BASE)
PLAIN = replace(DRAFTING, arch="autoregressive")


def rivalry(best: Experiment, rival: Experiment, goal: Goal, num_runs: int, *lengths: int) -> Rivalry:
    """Two of which nothing but the draft length is tuned."""
    space = Space(("colocated",), lengths, ("fixed",), (128,), (2048,), own=False)
    return Rivalry({str(c.arch): c for c in (best, rival)}, Search(goal, space, 0.0), num_runs, Bench(1))


def test_drafts_that_pay_in_a_batch_job_are_above_their_break_even() -> None:
    """The formula prefers plain decoding at this concurrency; the runs, whose batches drain, do not."""
    drafting = Experiment(
        "colocated", Traffic(num_prompts=200), server=Server(num_speculative_tokens=1, max_num_seqs=256)
    )
    plain = replace(drafting, arch="autoregressive")
    assert Formula(drafting).ranked((0, 1, 2))[0].k == 0
    who = rivalry(drafting, plain, Goal("throughput"), 1, 1, 2)
    here = drafting.acceptance.acceptance_rate
    flips = who.flips("acceptance", here, [0.0], at_acceptance, {-1: 0.3})
    falls, stands = flips.falls(-1), flips.stands(-1)
    assert falls.challenger == "autoregressive"
    assert stands - falls.at == pytest.approx(here / 16)

    def speed(experiment: Experiment) -> float:
        return float(Bench(1).rows([applicable(experiment)])[0]["output_throughput"])

    better, worse = (speed(who.placed(at_acceptance(drafting, at))) for at in (stands, falls.at))
    assert better >= speed(plain) > worse


def test_a_flip_has_another_winner_beyond_its_edge_and_none_before() -> None:
    """Drafting against plain decoding, along an axis with one flip: as acceptance falls, plain decoding takes over."""
    who = rivalry(at_acceptance(DRAFTING, 0.9), PLAIN, GOAL, 5, 4)
    flips = who.flips("load", 0.9, (0.1, 0.95), at_acceptance)
    assert flips.falls(1) is None
    assert flips.stands(1) == pytest.approx(0.95)
    falls, stands = flips.falls(-1), flips.stands(-1)
    assert falls.challenger == "autoregressive"
    assert falls.at < stands < 0.9
    assert not flips.spent

    def pair(rate: float) -> dict[str, list[float]]:
        """On all seeds, in runs as long as those of the search."""
        placed = {name: who.placed(at_acceptance(c, rate)) for name, c in who.finalists.items()}
        rows = who.bench.replicated(who.bench.lengthened(placed, RUN_SHARE), 5)
        return {name: [row["mean_e2el_ms"] for row in mine] for name, mine in rows.items()}

    error = lead_error(Experiment(), "mean_e2el_ms")
    beyond, before = (contest(pair(rate), -1, None, error) for rate in (falls.at, stands))
    assert (beyond.best, beyond.sure) == ("autoregressive", True)
    assert (before.best, before.sure) != ("autoregressive", True)


def test_beyond_what_anyone_holds_nobody_wins() -> None:
    slow = replace(DRAFTING, server=Server(max_num_seqs=1), traffic=replace(DRAFTING.traffic, num_prompts=100))
    who = rivalry(at_rate(slow, 2.0), replace(slow, arch="autoregressive"), GOAL, 2, 4)
    flips = who.flips("load", 2.0, (64.0,), at_rate)
    assert flips.probes[64.0].able == ()
    assert flips.falls(1).at <= 64


def test_simpler_is_the_plainer_architecture_then_fewer_changes() -> None:
    base = Experiment()
    order = [complexity(replace(base, arch=arch), base) for arch in ARCHS]
    assert all(simpler < next for simpler, next in pairwise(order))
    moved = replace(base, server=Server(max_num_seqs=64))
    assert complexity(base, base) < complexity(moved, base)
    assert complexity(moved, base) < complexity(replace(base, server=Server(controller="goodput")), base)


experiments = st.builds(
    Experiment,
    arch=st.sampled_from([arch for arch in ARCHS if arch != "autoregressive"]),
    traffic=st.builds(
        Traffic,
        num_prompts=st.integers(1, 10**6),
        request_rate=st.floats(1e-3, 1e6) | st.just(math.inf),
        max_concurrency=st.none() | st.integers(1, 100),
        seed=st.integers(0, 2**32),
    ),
    acceptance=st.builds(Acceptance, acceptance_rate=st.floats(0, 1)),
    server=st.builds(Server, num_speculative_tokens=st.integers(1, 32), admission_factor=st.floats(0.1, 10)),
    hardware=st.builds(Hardware, gpu_memory_utilization=st.floats(0.1, 1), replicas=st.integers(1, 9)),
    host=st.builds(Host, launch_s=st.none() | st.floats(0, 1)),
    scoring=st.builds(
        Scoring,
        goodput=st.just(LEVELS) | st.just(()),
        metric_percentiles=st.lists(st.floats(0, 100), min_size=1, max_size=3).map(tuple),
    ),
)


@given(experiment=experiments)
@settings(max_examples=25)
def test_a_command_line_says_all_of_an_experiment(experiment: Experiment) -> None:
    command = shlex.split(command_line("pdvsim run", experiment))
    assert parse(RunCommand, command[2:]).experiment == experiment


SMALL_COMMAND = [
    "advise", "--arch", "autoregressive,pd", "--request-rate", "10", "--dataset-name", "random", "--num-prompts", "20",
    "--input-len", "32", "--output-len", "8", "--num-runs", "2", "--num-speculative-tokens", "2",
    "--max-num-seqs", "128", "--max-num-batched-tokens", "2048", "--jobs", "1",
]  # fmt: skip


def test_the_command_saves_and_prints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*SMALL_COMMAND, "--json", "-o", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["objective"] == "e2el"
    assert "load" in [flips["axis"] for flips in document["flips"]]
    assert json.loads((tmp_path / "advice.json").read_text()) == document
    assert (tmp_path / "advice.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert all(
        word in page
        for word in ("<title>Advice</title>", "data:image/png;base64,", "Provenance", "<h2>Recommendation</h2>")
    )


def test_a_notebook_shows_the_answer_and_gets_its_rows() -> None:
    advice = whole_advice()
    shown = advice._repr_html_()
    assert '<p class="headline"><b>Start 1 GPU (h200) as one pdvsim server' in shown
    assert shown.index("Recommendation") < shown.index("Candidates") < shown.index("<details>")
    rows = advice.points
    assert len(rows) == sum(map(len, advice.finals.rows.values()))
    assert set(rows[rows["recommended"]]["finalist"]) == {advice.best}
    assert [axes.get_title(loc="left") for axes in advice.plot().axes] == ["Over the load", "Over the acceptance"]
    assert advice_pictures(replace(advice, flips=[])) == {}


def test_the_page_recommends_first_and_its_commands_are_copied(browser: Browser, tmp_path: Path) -> None:
    advice = whole_advice()
    report = advice.report()
    path = tmp_path / "advice.html"
    path.write_text(Sheet(report.title, report.lead, report.sections, {FLIPS: advice.plot()}).html(), encoding="utf-8")
    page = browser.new_context(permissions=["clipboard-read", "clipboard-write"]).new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.goto(path.as_uri())
    heads = page.locator("h2").all_inner_texts()
    assert heads[:3] == ["Recommendation", "Asked", "Candidates"]
    assert page.locator(".card .headline").inner_text().startswith("Start 1 GPU")
    assert page.locator("section", has_text=FLIPS).locator("img").count() == 1
    assert page.locator("main img").count() == 1
    blocks = [block for block in advice.deployment if block.text]
    assert page.get_by_role("button", name="Copy", exact=True).count() == len(blocks)
    page.get_by_role("button", name="Copy", exact=True).first.click()
    page.get_by_role("button", name="Copied", exact=True).wait_for()
    assert page.evaluate("() => navigator.clipboard.readText()") == blocks[0].text
    assert complaints == []


@pytest.mark.parametrize(("batches", "known"), [(0, "No simulation"), (1, "Not decided"), (3, "Recommendation")])
def test_ctrl_c_tells_what_is_known(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, batches: int, known: str
) -> None:
    real, left = runs_module.run, iter(range(batches))

    def run_sweep(*args: object) -> object:
        if next(left, None) is None:
            raise SweepInterrupted([])
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(runs_module, "run", run_sweep)
    assert main(SMALL_COMMAND) == 130
    out, err = capsys.readouterr()
    assert known in out
    assert "interrupted" in err.splitlines()[-1]


def test_a_load_that_nothing_holds_is_reported_with_what_it_holds() -> None:
    """At batch 1 a token reads 13 GB of weights, 3 ms at the card's bandwidth: 8 of them allow under 42 per second."""
    advice = pdvsim.advise(
        arch=["autoregressive"], request_rate=100, goodput=["ttft:300"], max_num_seqs=1, gpus=1,
        **OPTIONS | {"output_len": 8, "num_runs": 2, "budget": 60},
    )  # fmt: skip
    assert not advice.met
    assert re.match(r"Nothing meets .* 300 ms at 100 req/s", str(advice))
    assert "Recommendation" not in str(advice)
    held = advice.capacity.summary()[0]["rate"].mean
    assert 0 < held < 42
    assert f" holds {held:.1f} req/s" in str(advice)
    assert f" {100 / held:.3g} times the rate that it holds" in str(advice)
