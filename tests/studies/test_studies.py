"""The studies still run: each is read, and those that need no GPU and little time make part of their figure again."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from pdvsim.calibration.fit.corun import SHAPE
from pdvsim.sim.models.presets import model
from pdvsim.sim.models.presets import pair as named_pair
from pdvsim.sim.prices.profile import builtin
from studies import (
    corun_gains,
    drafting_apart,
    original,
    published_steps,
    truth,
)

ROOT = Path(__file__).parents[2]
H200 = ROOT / "calibration" / "data" / "h200"
STUDIES = sorted(path.stem for path in (ROOT / "studies").glob("*.py"))


def source(name: str) -> str:
    return (ROOT / "studies" / f"{name}.py").read_text(encoding="utf-8")


def test_the_readme_names_each_study() -> None:
    text = (ROOT / "studies" / "README.md").read_text(encoding="utf-8")
    assert sorted(set(re.findall(r"`python studies/(\w+)\.py", text))) == STUDIES


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_can_be_imported_and_says_how_it_is_run(name: str) -> None:
    if name.startswith("engine_"):
        pytest.importorskip("triton")
    assert f"studies/{name}.py" in str(import_module(f"studies.{name}").__doc__)


def test_studies_that_use_others_run_from_any_folder(tmp_path: Path) -> None:
    """Each with the path that Python gives to a script, and nothing that the one before it has imported of studies."""
    names = [name for name in STUDIES if "from studies" in source(name)]
    assert names
    program = (
        "import runpy, sys\n"
        "path = list(sys.path)\n"
        f"for name in {names!r}:\n"
        "    sys.path[:] = path\n"
        "    for module in [m for m in sys.modules if m.partition('.')[0] == 'studies']: del sys.modules[module]\n"
        f"    runpy.run_path({str(ROOT / 'studies')!r} + f'/{{name}}.py')\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=300)


def test_systems_that_draft_apart() -> None:
    """nano-PEARL at batch 1 is predicted from its plain decoding alone; two alternating batches read weights twice."""
    models = named_pair(f"{drafting_apart.shipped('qwen3-0.6b')}:{drafting_apart.shipped('qwen3-32b')}")
    assert models.target.params == pytest.approx(32.8e9, rel=0.005)
    [first] = drafting_apart.nano_pearl(lengths=(14,), batches=(1,)).cells
    assert float(first.published.removesuffix("x")) == pytest.approx(first.most, rel=0.1)
    turns = drafting_apart.minedraft(rates=(0.7,), lengths=(3,))
    half, whole = turns.cells
    assert half.most > 1 > whole.most
    assert turns.title in drafting_apart.overlap_text([turns])


@pytest.mark.usefixtures("quick_plots")
def test_the_original_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(original, "PAIRS", dict(list(original.PAIRS.items())[1:2]))
    original.main(tmp_path, (1, 4), jobs=1)
    printed = capsys.readouterr().out
    assert all(arch in printed for arch in original.ARCHS)
    assert (tmp_path / "original.html").read_text(encoding="utf-8").count("<img") == 5
    rows = pd.read_parquet(tmp_path / "points.parquet")
    assert len(rows) == len(original.PAIRS) * 2 * 2 * len(original.ARCHS)
    assert rows["gpu_busy"].between(0, 1).all()
    same = rows.groupby(["pair", "load_kind", "load"])["completed"].nunique()
    assert (same == 1).all()
    [pair] = original.PAIRS.values()
    changes = original.changes(rows, "output_throughput")
    assert (changes[pair, "concurrency", original.AGAINST] == 0).all()


def test_the_regret_of_the_advice() -> None:
    document = truth.report(H200 / "truth.json", H200 / "truth.jsonl")
    trials = document["trials"]
    assert len(trials) >= 5  # of the twelve, those whose rivals were served too
    assert all(0 <= trial["regret"] < 0.1 and trial["pairs_in_order"] <= trial["pairs_apart"] for trial in trials)
    assert all(trial["name"] in truth.table(document) for trial in trials)


def test_co_running_launches() -> None:
    """Two launches that each take twice as long gain nothing; as fast as alone, they take half the time."""
    blank: dict[str, object] = dict.fromkeys([*corun_gains.WORK, *SHAPE, "emits", "priority", "context_total"], 0)
    blank |= {
        "model": "tinyllama-1.1b",
        "pair": "a:b",
        "what": "gpu",
        "group": 0,
        "steps": 1,
        "bucket_rows": 1,
        "bucket_chunk": 0,
    }
    blank |= {"section": "corun", "members": 1, "member": 0}
    alone = [blank | {"kind": kind, "seconds": seconds} for kind, seconds in (("draft", 1.0), ("verify", 3.0))]
    for slower in (1.0, 2.0):
        both = [
            {"kind": kind, "seconds": s, "members": 2, "member": i, "group": 1, "start_s": at, "end_s": at + s}
            for i, (kind, s) in enumerate([("draft", slower), ("verify", 3 * slower)])
            for at in np.arange(0, 12, s)
        ]
        samples = pd.DataFrame([*alone, *(blank | row for row in both)])
        [share] = corun_gains.concurrent(samples, replace(builtin("h200"), power=None))["share"]
        assert share == pytest.approx(slower / 2)


def test_published_steps() -> None:
    """gpt-fast captures graphs as this engine does: within 10%. DistServe's fit is worked out by hand."""
    rows = published_steps.compare("a100-80gb")
    ours = [row.error for row in rows if row.source == published_steps.GPT_FAST]
    assert len(ours) == 2
    assert max(map(abs, ours)) < 0.10
    assert {row.what: row for row in rows}["decode, batch 16 at 512"].published == pytest.approx(29.284, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "tokens", "rows", "floor_ms"),
    [("tinyllama-1.1b", 1, 32, 0.57), ("llama-2-7b", 5, 1, 3.14), ("llama-2-7b", 5, 64, 9.35)],
)
def test_the_floor_of_a_forward_by_hand(name: str, tokens: int, rows: int, floor_ms: float) -> None:
    pytest.importorskip("triton")
    from studies.engine_floors import floor_s

    card = {"bandwidth_bytes_per_s": 4.27e12, "flops_per_s": 790e12}
    known = rows * 512
    floor = floor_s(model(name), card, rows * tokens, rows * tokens, known * tokens, known)
    assert 1000 * floor == pytest.approx(floor_ms, rel=0.02)


def test_no_architecture_exceeds_its_ceiling() -> None:
    from studies import peers

    document = json.loads((H200 / "peers.json").read_text(encoding="utf-8"))
    pd_row = next(row for row in document["rows"] if row["name"] == "pd")
    measured, predicted, ceiling = map(float, peers.table({**document, "rows": [pd_row]}).split("\n")[1].split()[1:4])
    assert max(measured, predicted) < ceiling
