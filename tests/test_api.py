"""The Python API: three lines in a notebook."""

from __future__ import annotations

import inspect
import io
import subprocess
import sys
from pathlib import Path
from shutil import copy
from typing import Any

import pandas as pd
import pytest
import stubfile

import pdvsim
from pdvsim.cli.advise import AdviseCommand
from pdvsim.common.options import options

SMALL = {"dataset_name": "random", "input_len": 32, "output_len": 8, "num_prompts": 6}


def test_run() -> None:
    run = pdvsim.run(arch="pd", request_rate=8, goodput=["ttft:500", "tpot:50"], **SMALL)
    assert run.metrics["completed"] == len(run.requests) == 6
    assert run.metrics["total_output_tokens"] == run.deliveries["tokens"].sum() == 48
    assert set(run.launches["lane"]) <= {"prefill", "decode", "verify", "main"}
    assert run.table().startswith("============ Serving Benchmark Result")
    assert run.result.meta["foundation"] in run.table()
    assert "<table>" in run._repr_html_()
    assert "pd, 6 requests" in repr(run)


def test_a_sweep_is_a_frame_that_shows_its_summary_and_draws_itself() -> None:
    points = pdvsim.sweep(arch=["pdv", "pd"], concurrency=[1, 4], jobs=1, **SMALL)
    assert points[["arch", "load"]].to_numpy().tolist() == [["pdv", 1.0], ["pd", 1.0], ["pdv", 4.0], ["pd", 4.0]]
    assert (points["completed"] == 6).all()
    assert type(points[points["load"] == 1.0]) is pd.DataFrame
    shown = repr(points)
    assert shown.splitlines()[0].split()[:2] == ["concurrency", "arch"]
    assert "profile h200-measured" in shown
    assert points._repr_html_().count("<tr>") == 1 + 4
    figure = points.plot()
    assert "Output token throughput" in [axes.get_title(loc="left") for axes in figure.axes]
    assert "acceptance 0.6 (assumed), 1 to 4" in figure.get_supxlabel().replace("\n", " ")
    assert points.plot.scatter("load", "mean_ttft_ms").get_xlabel() == "load"  # pandas' own
    again = pd.read_csv(io.StringIO(points.to_csv(index=False)))
    assert again["output_throughput"].tolist() == pytest.approx(points["output_throughput"].tolist())
    assert not [name for name in points if isinstance(points[name].iloc[0], list | dict)]  # tidy: one value a cell
    del points["arch"]
    assert "..." in repr(points)  # no sweep any more: as pandas shows it


def test_what_a_sweep_varies_is_a_dictionary() -> None:
    vary = {"max_num_seqs": [2, 3], "synthetic_acceptance_rates": [[0.9, 0.8, 0.7], [0.5, 0.4, 0.3]]}
    points = pdvsim.sweep(arch="pdv", vary=vary, num_speculative_tokens=3, concurrency=1, jobs=1, **SMALL)
    values = points[list(vary)].to_numpy().tolist()
    assert values == [[rows, rates] for rows in (2, 3) for rates in ("0.9+0.8+0.7", "0.5+0.4+0.3")]
    one = pdvsim.sweep(arch="pdv", vary={"acceptance_rate": 0.5}, concurrency=1, jobs=1, **SMALL)
    assert one["acceptance_rate"].tolist() == [0.5]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"request_rat": 8}, "request_rate?"),
        ({"request_rate": [1, 2]}, "takes one value"),
        ({"use_trace_timestamps": "yes"}, "--use-trace-timestamps"),
        ({"num_prompts": 8.5}, "--num-prompts"),
        ({"arch": dict}, "class derived from Policy"),
        ({"gpu": 200}, "--gpu"),
    ],
)
def test_a_bad_option_is_a_value_error(options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("?", r"\?")):
        pdvsim.run(**options)


def test_functions_have_the_options_of_their_commands_as_keywords() -> None:
    given = inspect.signature(pdvsim.advise).parameters
    assert set(options(AdviseCommand)) - set(given) == {"config", "html", "json", "output"}
    assert given["gpu"].default == "h200"
    assert all(one.kind is inspect.Parameter.KEYWORD_ONLY for one in given.values())
    assert f"request_rate: {options(AdviseCommand)['request_rate'].text}" in (inspect.getdoc(pdvsim.advise) or "")
    assert dir(pdvsim) == sorted(pdvsim.__all__)


def test_the_stub_is_what_the_options_say() -> None:
    written = stubfile.FILE.read_text(encoding="utf-8")
    assert written == stubfile.text(), "write it again: python tests/stubfile.py"


def test_type_checkers_know_the_keywords(tmp_path: Path) -> None:
    """With the stub mypy passes a user's script, and finds a wrong name and a wrong type."""
    package, script = tmp_path / "pdvsim", tmp_path / "mine.py"
    package.mkdir()
    copy(stubfile.FILE, package)
    script.write_text(
        "import pdvsim\n"
        "pdvsim.run(arch='pdv', request_rate=8, goodput=['ttft:500'])\n"
        "pdvsim.advise(model='llama-3.1-8b', request_rate=8, drafter='eagle3')\n"
        "pdvsim.run(request_rat=8)\n"
        "pdvsim.run(num_prompts='many')\n"
    )
    command = [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--no-site-packages"]
    # not what is installed or on the path: it would check all of pdvsim, which takes a minute
    checked = subprocess.run([*command, str(script)], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    errors = [
        line.split(":")[1] for line in checked.stdout.splitlines() if line.startswith("mine.py") and "error" in line
    ]
    assert errors == ["4", "5"], checked.stdout


@pytest.mark.parametrize("more", [{"arch": "pd"}, {"max_num_batched_tokens": 2048}, {"engine": "pdvsim"}])
def test_an_experiment_prints_as_the_keywords_that_run_it(more: dict[str, Any]) -> None:
    run = pdvsim.run(request_rate=8, num_speculative_tokens=2, gpu="h100-sxm", **SMALL, **more)
    again = eval(f"pdvsim.run({run.result.experiment})")
    assert again.result.experiment == run.result.experiment
    assert repr(run.result.experiment) == f"<Experiment {run.result.experiment}>"
    assert "\n" not in str(run.result.experiment)


def test_a_trace_describes_itself(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{at},{100 + at},20\n" for at in range(50)))
    trace = pdvsim.traffic(path)
    assert trace.summary()["requests"] == 50
    assert repr(trace).startswith("requests.csv: 50 requests\nover 49 s: 1 req/s")
    assert len(trace.plot().axes) == 4
    with pytest.raises(ValueError, match="columns"):
        pdvsim.traffic(path, column="prompt=x")
