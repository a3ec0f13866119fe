"""What lies outside the measurements is counted right, alike on every path, and reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pdvsim
from pdvsim.calibration.fit import build
from pdvsim.sim.config import Arch, Experiment, Scoring, Server, Traffic
from pdvsim.sim.core import KINDS
from pdvsim.sim.machine.batch import Launch
from pdvsim.sim.machine.ledger import Ledger
from pdvsim.sim.metrics import summary
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.policies import ARCHS
from pdvsim.sim.prices.profile import builtin
from pdvsim.sim.prices.reach import Outside, Reach, Reaches, _sizes
from pdvsim.sim.records import LANES, LAUNCH_DTYPES, Columns
from pdvsim.sim.run import simulate

H200 = Path(str(pdvsim.__file__)).parent / "calibration" / "data" / "h200"
LARGE = Server(max_num_seqs=256, verify_gather="never", max_prompts_per_forward=64, max_num_batched_tokens=8192)
CROWD = Traffic("random", num_prompts=220, input_len=600, output_len=24, max_concurrency=200)


def launches(*rows: dict[str, Any]) -> Columns:
    """Launches of the target on one GPU; lanes and kinds by name, one row of one token by default."""
    usual = {"role": 1, "rows": 1, "tokens": 1, "steps": 1, "width": 1, "lane": "main", "kind": "decode"}
    full = [usual | row for row in rows]
    coded = [row | {"lane": LANES.index(row["lane"]), "kind": KINDS.index(row["kind"])} for row in full]
    return {name: np.array([row.get(name, 0) for row in coded], dtype) for name, dtype in LAUNCH_DTYPES.items()}


def outside(reaches: Reaches, *rows: dict[str, Any]) -> dict[str, Any]:
    counted = Outside(reaches)
    counted.add(launches(*rows))
    return counted.metrics()["outside_measured"]  # type: ignore[no-any-return]


def test_a_launch_beyond_its_own_model_counts_whole() -> None:
    """8 s in all: 3 s with too many rows, 1 s of a draft that is too long for the drafter, not for the target."""
    reaches = Reaches(Reach(rows=64, k=4), Reach(rows=64, k=8, context=100), None)
    shares = outside(
        reaches,
        {"start_s": 0.0, "end_s": 3.0, "rows": 65, "tokens": 65, "context": 6500},
        {"start_s": 3.0, "end_s": 4.0, "role": 0, "kind": "draft", "steps": 6, "tokens": 6, "context": 1000},
        {"start_s": 4.0, "end_s": 8.0, "kind": "verify", "width": 7, "rows": 2, "tokens": 14, "context": 200},
    )
    assert shares == {"share": 0.5, "rows": 65, "rows_limit": 64, "k": 6, "k_limit": 4}


def test_works_side_by_side_count_while_they_are() -> None:
    """A verify of 20 rows runs from 0 to 10, a draft from 6 to 12, another verify alone from 12 to 20.

    Co-running, 16 rows were measured: 4 s of the verify and 4 s of the concurrent draft, of 24 s.
    """
    work = {"kind": "verify", "lane": "verify", "rows": 20, "tokens": 20}
    works = [
        work | {"start_s": 0.0, "end_s": 10.0},
        {"start_s": 6.0, "end_s": 12.0, "kind": "draft", "role": 0, "lane": "decode"},
        work | {"start_s": 12.0, "end_s": 20.0},
    ]
    alone = Reach(rows=64)
    shares = outside(Reaches(alone, alone, Reach(rows=16)), *works)
    assert shares == pytest.approx({"share": 8 / 24, "together_rows": 20, "together_rows_limit": 16})
    assert outside(Reaches(alone, alone, Reach(rows=20)), *works) == {"share": 0.0}
    elsewhere = [works[0], works[1] | {"gpu": 1}, works[2]]
    assert outside(Reaches(alone, alone, Reach(rows=16)), *elsewhere) == {"share": 0.0}


@pytest.mark.parametrize("arch", ARCHS)
def test_sizes_are_those_of_the_launches(arch: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launch record gives back is what was launched: rows, new tokens, cached ones, and those of prompts."""
    seen: list[tuple[float, ...]] = []
    note = Ledger.note

    def noted(ledger: Ledger, launch: Launch, start_s: float, end_s: float, *price: Any) -> None:
        rows = len(launch.rows)
        width = min(launch.tokens, 2) if launch.role == "draft" else launch.tokens
        k = (launch.steps if launch.kind == "draft" else width - 1) if rows else 0
        context = sum(row.state.context for row in launch.rows) / max(rows, 1)
        prompt = sum(chunk.tokens for chunk in launch.chunks)
        start = max((chunk.start for chunk in launch.chunks), default=0)
        if launch.role == "draft" and launch.tokens > 2:
            prompt = min(rows * (launch.tokens - 2), 4 * (launch.tokens - 1))
        seen.append((end_s, rows, k, context, prompt, start, rows * width + prompt))
        note(ledger, launch, start_s, end_s, *price)

    monkeypatch.setattr(Ledger, "note", noted)
    traffic = Traffic("random", num_prompts=12, input_len=300, output_len=40, random_range_ratio=0.5, request_rate=60.0)
    result = simulate(Experiment(arch, traffic, server=Server(max_num_batched_tokens=128)), blocks=False)
    recorded = np.stack([result.launches["end_s"], *_sizes(result.launches, 2).values()], axis=1)
    assert sorted(map(tuple, recorded.tolist())) == sorted(seen)


@pytest.mark.parametrize("arch", ["colocated", "pd", "pdv", "pdv-hybrid"])
def test_every_path_counts_alike(arch: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    """By either way to the last bit; streamed to rounding, also where co-running launches are counted apart."""
    server = LARGE if arch in ("pdv", "pdv-hybrid") else replace(LARGE, verify_gather="auto")
    experiment = Experiment(arch, CROWD, server=server)
    queued, in_blocks = (summarise(simulate(experiment, blocks=blocks)) for blocks in (False, True))
    assert queued["outside_measured"] == in_blocks["outside_measured"]
    assert queued["outside_measured"]["share"] > 0.1
    for blocks, requests in ((False, 4096), (True, 4096), (False, 3), (True, 3)):
        monkeypatch.setattr(summary, "REQUESTS", requests)
        streamed = summarise(simulate(replace(experiment, scoring=Scoring(detailed=False)), blocks=blocks))
        assert streamed["outside_measured"] == pytest.approx(queued["outside_measured"], rel=1e-9)


# where the ranges come from ----------------------------------------------------------------------------------------


def test_the_shipped_ranges_are_those_of_the_shipped_samples() -> None:
    ranges, profile = build.ranges(build.read(H200).frame), builtin("h200")
    assert profile.measured == ranges["measured"]
    assert profile.measured_together == ranges["measured_together"]
    assert set(profile.measured) == set(profile.models)
    assert profile.measured["llama-2-7b"] == Reach(256, 8, 8000, 2048, 7700, 2048)
    assert profile.measured_together == Reach(64, 4, 6000, 2048, 6000, 2048)
