"""Sweeps: points and their rows, finished points survive Ctrl-C, intervals over replications."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest

from pdvsim.bench.pool import Backend
from pdvsim.bench.run import PointFailed, run
from pdvsim.bench.stats import interval, over_replications, paired_differences, varied
from pdvsim.bench.sweep import Sweep, frame_of
from pdvsim.cli import main
from pdvsim.cli.sweep import axes
from pdvsim.sim.config import Experiment, Traffic
from pdvsim.view.comparison import comparison_table

SMALL = Experiment(traffic=Traffic("random", num_prompts=6, input_len=32, output_len=8))


def test_points_are_the_product_with_common_seeds() -> None:
    points = Sweep(("pdv", "pd"), concurrency=(2, 4), num_runs=3).points()
    assert len(points) == 2 * 2 * 3
    first = [(p.load, p.experiment.arch, p.run) for p in points[:4]]
    assert first == [(2, "pdv", 0), (2, "pdv", 1), (2, "pdv", 2), (2, "pd", 0)]
    assert {(p.run, p.experiment.traffic.seed) for p in points} == {(0, 0), (1, 1), (2, 2)}
    assert all(p.experiment.traffic.max_concurrency == p.load for p in points)
    assert all(math.isinf(p.experiment.traffic.request_rate) for p in points)


def test_every_architecture_serves_the_same_requests_and_progress_is_reported() -> None:
    points = Sweep(("pdv", "colocated"), request_rate=(2.0, 20.0), base=SMALL).points()
    progress: list[int] = []
    one = frame_of(run(points, Backend(1), progress.append))
    assert progress == [0, 1, 2, 3, 4]
    assert one["load"].tolist() == [2.0, 2.0, 20.0, 20.0]
    assert one["total_input_tokens"].nunique() == one["total_output_tokens"].nunique() == 1


def test_a_varied_flag_is_an_axis_with_a_column_of_its_own() -> None:
    sweep = Sweep(
        ("pdv", "pd"), concurrency=(2,), base=SMALL,
        vary={"num_speculative_tokens": (2, 4), "pair": ("tinyllama-1.1b:llama-2-7b", "qwen2-1.5b:qwen2-7b")},
    )  # fmt: skip
    points = sweep.points()
    assert [(p.experiment.server.num_speculative_tokens, p.experiment.server.pair[:5]) for p in points] == [
        (k, draft) for k in (2, 4) for draft in ("tinyl", "qwen2") for _ in ("pdv", "pd")
    ]
    rows = frame_of(run(points, Backend(1)))
    assert rows["point"].tolist() == list(range(8))
    before, after = list(rows.columns[:10]), ["profile", "foundation", "gpu", "gpus"]
    assert before == ["point", "arch", "pair", "load_kind", "load", "run", "seed", "num_speculative_tokens", *after[:2]]
    assert varied(rows) == ["pair", "num_speculative_tokens"]
    # what was varied is never averaged away, nor taken for a pair
    assert [e["num_speculative_tokens"] for e in over_replications(rows)] == rows["num_speculative_tokens"].tolist()
    differences = paired_differences(rows, "output_throughput", "pdv")
    assert [(d["num_speculative_tokens"], d["pair"][:5]) for d in differences] == [
        (k, draft) for k in (2, 4) for draft in ("tinyl", "qwen2")
    ]
    mine = rows.set_index("point")["output_throughput"]
    assert differences[3]["difference"].mean == mine[7] - mine[6]


def test_varied_values_have_the_type_of_their_flag() -> None:
    tokens = "synthetic-acceptance-rates=0.5+0.3+0.2 use-trace-timestamps=false kv-capacity-tokens=100"
    assert axes([*tokens.split(), "acceptance-rate=0,1"]) == {
        "synthetic_acceptance_rates": ((0.5, 0.3, 0.2),),
        "use_trace_timestamps": (False,),
        "kv_capacity_tokens": (100,),
        "acceptance_rate": (0.0, 1.0),
    }


def test_a_failing_point_is_named_with_its_reason() -> None:
    points = Sweep(concurrency=(2,), base=SMALL, vary={"kv_capacity_tokens": (1000, 10)}).points()
    for jobs in (1, 2):
        with pytest.raises(PointFailed, match=r"KV.* \(point 1: .*kv_capacity_tokens 10\)"):
            run(points, Backend(jobs))


def test_an_interval_needs_two_replications() -> None:
    assert math.isnan(interval([3.0]).half_width)
    assert interval([3.0]).mean == 3.0
    assert interval([]).n == 0
    two = interval([1.0, 3.0, math.nan])
    assert (two.mean, two.n) == (2.0, 2)
    assert two.half_width == pytest.approx(12.7062, rel=1e-5)  # t table, one degree of freedom, sd / sqrt(n) = 1
    assert interval([1, 2, 3, 4, 5]).half_width == pytest.approx(2.7764 * math.sqrt(2.5 / 5), rel=1e-4)


def made_up() -> pd.DataFrame:
    """Two architectures, three seeds: the second is faster by exactly 10, under noise of 100 that both share."""
    rows = [
        {"arch": arch, "load_kind": "concurrency", "load": 1.0, "run": seed, "seed": seed, "stability": "stable"}
        | {"output_throughput": 1000.0 + 100 * seed + gain, "places": [0.5, 0.25 * seed]}
        for arch, gain in (("pd", 0), ("pdv", 10))
        for seed in (0, 1, 2)
    ]
    return pd.DataFrame(rows)


def test_pairs_cancel_the_noise_they_share() -> None:
    [difference] = paired_differences(made_up(), "output_throughput", "pd")
    assert (difference["arch"], difference["difference"].mean) == ("pdv", 10.0)
    assert difference["difference"].half_width == pytest.approx(0.0, abs=1e-9)
    entries = over_replications(made_up())
    assert entries[0]["output_throughput"].half_width > 200
    assert [place.mean for place in entries[0]["places"]] == [0.5, 0.25]
    assert entries[0]["stability"] == "stable"
    rows = made_up()
    rows.loc[1, "stability"] = "overloaded"  # replications that differ say so
    assert over_replications(rows)[0]["stability"] == "stable/overloaded"


@pytest.mark.parametrize(("prompts", "noted"), [(10, True), (400, False)])
def test_a_table_says_when_a_closed_loop_was_mostly_on_its_way_down(prompts: int, noted: bool) -> None:
    """Ten requests at concurrency 8: most of the time fewer are there."""
    base = Experiment(traffic=Traffic(num_prompts=prompts, input_len=16, output_len=32, dataset_name="random"))
    entries = over_replications(frame_of(run(Sweep(concurrency=(8,), base=base).points(), Backend(1))))
    there = entries[0]["request_throughput"].mean * entries[0]["mean_e2el_ms"].mean / 1e3
    assert (there < 0.8 * 8) is noted
    assert ("fills and drains" in str(comparison_table(entries))) is noted
    assert "no interval" in str(comparison_table(entries))


@pytest.mark.usefixtures("quick_plots")
@pytest.mark.parametrize(("load", "headline"), [
    (["--concurrency", "2"], "gain %"),
    (["--request-rate", "inf"], "gain %"),
    (["--request-rate", "20"], "E2EL %"),
    (["--request-rate", "inf,20"], "E2EL %"),
])  # fmt: skip
def test_where_arrivals_set_the_throughput_architectures_differ_by_latency(
    load: list[str], headline: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--dataset-name", "random", "--num-prompts", "20", "--input-len", "32", "--output-len", "32"]
    small += ["--jobs", "1"]
    folder = str(tmp_path / "sweep")
    assert main(["sweep", "--arch", "autoregressive,colocated", *small, *load, "--num-runs", "2", "-o", folder]) == 0
    table = capsys.readouterr().out
    assert [name for name in ("gain %", "E2EL %") if name in table.partition("---")[0]] == [headline]
    metric = "output_throughput" if headline == "gain %" else "mean_e2el_ms"
    differences = paired_differences(pd.read_parquet(tmp_path / "sweep" / "summary.parquet"), metric, "autoregressive")
    assert all(f"{100 * d['relative'].mean:+.2f} ±" in table for d in differences)
