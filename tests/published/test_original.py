"""`make original`: its runs, what it makes of them, and its page."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from pdvsim.cli.original import main
from pdvsim.published.original import AGAINST, ARCHS, KINDS, PAIRS, best, changes, levels, points, tallies
from pdvsim.published.tables import load_published
from pdvsim.sim.metrics.works import busy_share
from pdvsim.study.output import check_folder
from pdvsim.study.resultfiles import read_frame


def made_up() -> pd.DataFrame:
    """Two levels; each architecture 10% faster than the one before it at level 8, all alike at level 1."""
    return pd.DataFrame(
        [
            {"pair": pair, "load_kind": kind, "arch": arch, "load": float(level), "p99_e2el_ms": 10.0,
             "output_throughput": 100.0 * (1.1**rank if level == 8 else 1.0)}
            for pair in PAIRS.values() for kind in KINDS for level in (1, 8) for rank, arch in enumerate(ARCHS)
        ]
    )  # fmt: skip


def test_every_pair_load_level_and_architecture_with_the_same_requests() -> None:
    published = load_published()
    asked = list(points(published, levels(published)))
    assert len(levels(published)) == 14
    assert len(asked) == len(PAIRS) * 2 * 14 * len(ARCHS)
    named = {(p.experiment.server.pair, p.load_kind, p.load, p.experiment.arch) for p in asked}
    assert len(named) == len(asked)
    for point in asked:
        traffic = point.experiment.traffic
        if point.load_kind == "concurrency":
            assert (traffic.max_concurrency, traffic.request_rate) == (point.load, np.inf)
        else:
            assert traffic.request_rate == pytest.approx(0.05 * point.load)
    by_place = {(p.experiment.server.pair, p.load_kind, p.load, p.experiment.traffic) for p in asked}
    assert len(by_place) == len(asked) / len(ARCHS)


def test_changes_are_over_the_same_cell() -> None:
    found = changes(made_up(), "output_throughput")
    pair = PAIRS["TinyLlama-Llama7B"]
    assert found[pair, "concurrency", "pdv"].tolist() == pytest.approx([0.0, 0.1])
    assert found[pair, "concurrency", "baseline"].tolist() == pytest.approx([0.0, 1.1**-2 - 1])
    assert all((found[pair, kind, AGAINST] == 0).all() for kind in KINDS)


def test_success_and_failure_are_leads_that_count() -> None:
    found = {(t.pair, t.kind, t.arch): t for t in tallies(made_up())}
    pair = PAIRS["TinyLlama-Llama7B"]
    assert found[pair, "concurrency", "pdv"].ahead == (8,)
    assert found[pair, "concurrency", "colocated"].behind == (8,)
    assert found[pair, "concurrency", "colocated"].ahead == ()
    assert best(made_up(), pair, "concurrency") == {1: ARCHS[0], 8: ARCHS[-1]}


def test_time_in_which_a_work_runs_is_counted_once() -> None:
    """0 to 2 and 1 to 3 overlap, 5 to 6 stands alone, 5.2 to 5.5 is inside: 4 of 6."""
    starts, ends = np.array([5.0, 0.0, 1.0, 5.2]), np.array([6.0, 2.0, 3.0, 5.5])
    assert busy_share({"start_s": starts, "end_s": ends}) == pytest.approx(4 / 6)
    assert np.isnan(busy_share({"start_s": starts[:0], "end_s": ends[:0]}))


def test_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = check_folder(tmp_path / "original")
    assert main(["--levels", "1,4", "--jobs", "1", "-o", str(folder)]) == 0
    said = capsys.readouterr().out
    page = (folder / "original.html").read_text(encoding="utf-8")
    assert page.count("<img") == 5
    assert all(heading in page for heading in ("Throughput", "Latency", "GPU utilisation", "Acceptance", "Improvement"))
    assert all(arch in said for arch in ARCHS)
    rows = read_frame(folder / "points.parquet")
    assert len(rows) == len(PAIRS) * 2 * 2 * len(ARCHS)
    assert rows["gpu_busy"].between(0, 1).all()
