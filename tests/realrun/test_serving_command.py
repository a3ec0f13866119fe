"""The `realrun` command on the CPU: what it prints and saves, what it refuses, and what Ctrl-C leaves."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch

from pdvsim.calibration.fit.engine import STEP
from pdvsim.cli.realrun import main
from pdvsim.realrun import site
from pdvsim.sim.core import Request
from pdvsim.sim.prices.pace import pace_in
from pdvsim.sim.records import DELIVERY_DTYPES, LAUNCH_DTYPES, REQUEST_DTYPES, ROLES
from pdvsim.sim.run import Client

CPU = ["--device", "cpu", "--tiny"]
SMALL = ["--num-prompts", "8", "--dataset-name", "random", "--input-len", "20", "--output-len", "8"]


def test_one_run_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, trace = tmp_path / "run.json", tmp_path / "trace.json"
    files = ["-o", str(out), "--save-detailed", "--trace-out", str(trace)]
    assert main([*CPU, *SMALL, "--arch", "pdv", "--request-rate", "200", *files]) == 0
    captured = capsys.readouterr()
    assert "Foundation:                              measured run" in captured.out
    assert "tiny-draft:tiny" in captured.out
    document = json.loads(out.read_text())
    assert (document["completed"], document["clock"], document["verdict"]) == (8, "wall", "pinned")
    assert document["total_output_tokens"] == 64
    assert 0 <= document["host_idle_share"] <= 1
    for name, columns in (("requests", REQUEST_DTYPES), ("launches", LAUNCH_DTYPES), ("deliveries", DELIVERY_DTYPES)):
        assert list(pd.read_parquet(tmp_path / f"run.{name}.parquet").columns) == list(columns)
    assert "power_w" in pd.read_parquet(tmp_path / "run.telemetry.parquet").columns
    assert {event["ph"] for event in json.loads(trace.read_text())["traceEvents"]} == {"M", "X", "C", "s", "t", "f"}


def test_steps_are_logged_as_vllm_logs_them(tmp_path: Path) -> None:
    """Every prompt and every token is in a line of the log."""
    log = tmp_path / "steps.log"
    small = [*CPU, *SMALL, "--max-concurrency", "2"]
    assert main([*small, "--arch", "colocated", "--num-speculative-tokens", "2", "--iteration-log", str(log)]) == 0
    steps = [step.groupdict() for step in STEP.finditer(log.read_text(encoding="utf-8"))]
    assert sum(int(step["prompt"]) for step in steps) == 8 * 20
    assert all(int(step["tokens"]) == 3 * int(step["rows"]) for step in steps)
    assert all(float(step["ms"]) > 0 for step in steps)
    assert main([*small, "--arch", "pd", "--iteration-log", str(log)]) == 2


def test_a_probe_tells_the_pace_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its record has launches of both models with what they took, as that of a run on a GPU has."""
    out = tmp_path / "machine.json"
    small = [*CPU, "--arch", "pdv", "--max-num-seqs", "4", "--acceptance-rate", "0.7", "--probe", "-o", str(out)]
    assert main(small) == 0
    document = json.loads(out.read_text())
    assert document == json.loads(capsys.readouterr().out)
    assert document["pair"] == "tiny-draft:tiny"
    pace = pace_in(document)
    assert {ROLES[timed.role] for timed in pace.launches} == {"draft", "target"}
    assert max(timed.rows for timed in pace.launches) == 4
    assert pace.host_s is not None
    assert main([*small, "--overwrite", "--trace-out", str(tmp_path / "trace.json")]) == 2


TINY, ON_CPU = "--device cpu --tiny", "--device cpu"
MIXTURE = "--pair none:qwen3-30b-a3b --arch autoregressive"
REFUSED = [  # what the line must say
    ("--tiny", "no CUDA device here; --device cpu --tiny"),
    (f"{TINY} --priority preemptive", "no GPU supports --priority preemptive"),
    (f"{TINY} --priority partition", "partition needs a GPU"),
    (f"{TINY} --replicas 2", "--replicas: realrun has one GPU"),
    ("--arch pd --disaggregate 1p1d", "--disaggregate: realrun has one GPU, which prefills and decodes"),
    (f"{MIXTURE} --data-parallel-size 2", "--data-parallel-size: realrun has one GPU, and no data-parallel"),
    (f"{MIXTURE} --tensor-parallel-size 2 --enable-expert-parallel", "--enable-expert-parallel: realrun has"),
    ("--arch colocated --kv-offload-gb 5", "realrun keeps its KV cache on the GPU; pdvsim run simulates it"),
    (f"{TINY} --arch pdv --place prefill=1 verify=1", "one GPU"),
    (f"{TINY} --contention max", "are options of a simulated GPU"),
    (f"{TINY} --launch-s 1e-5", "host costs are real here"),
    (f"{TINY} --num-speculative-tokens 16", "a draft length of at most 15, got 16"),
    (f"{ON_CPU} --pair tinyllama-1.1b:llama-2-7b --input-len 2048", "request 0 has 20"),
    (f"{TINY} --verdict own --acceptance-rate 0.9", "need --verdict pinned"),
    (f"{TINY} --target-path x", "without --tiny"),
    (f"{ON_CPU} --draft-path x", "--draft-path has no effect here: it belongs to --target-path"),
    (f"{ON_CPU} --target-path x", "colocated needs both --draft-path"),
    (f"{ON_CPU} --pair tiny", "unknown model 'tiny'"),
    (f"{ON_CPU} --draft-path /no/such --target-path /no/such", "/no/such"),
    (f"{TINY} --devise cpu", "unknown option --devise; did you mean --device?"),
    (f"{TINY} --request-rate 0", "request-rate must be 1e-06 to 1e+09, or inf, got 0"),
    (f"{TINY} -o /proc/no/such.json", "/proc/no"),
]


@pytest.mark.parametrize(("line", "says"), REFUSED)
def test_what_no_gpu_can_serve_is_refused(
    line: str, says: str, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert says in refused(["realrun", *SMALL, *line.split()])


def test_out_of_memory_while_preparing_is_one_line(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore lines")

    monkeypatch.setattr(site, "make_models", exhausted)
    assert "lower --max-num-seqs" in refused(["realrun", *CPU, *SMALL])


def ctrl_c_after(finished: int, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0
    counted = Client.finished

    def watched(self: Client, request: Request) -> None:
        nonlocal count
        counted(self, request)
        count += 1
        if count == finished:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Client, "finished", watched)


@pytest.mark.parametrize("arch", ["pdv", "colocated"])
def test_ctrl_c_saves_the_finished_requests(
    arch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ctrl_c_after(5, monkeypatch)
    out = tmp_path / "run.json"
    argv = [*CPU, *SMALL, "--arch", arch, "--num-prompts", "500", "--max-num-seqs", "2", "-o", str(out)]
    assert main([*argv, "--save-detailed"]) == 130
    document = json.loads(out.read_text())
    assert 5 <= document["completed"] < 500
    assert document["interrupted"] is True
    assert document["requests_asked"] == 500
    requests = pd.read_parquet(tmp_path / "run.requests.parquet")
    tokens = pd.read_parquet(tmp_path / "run.deliveries.parquet").groupby("request")["tokens"].sum()
    assert tokens.to_dict() == dict(zip(requests["id"], requests["output_tokens"], strict=True))
    assert "of 500 requests had finished" in capsys.readouterr().err


def test_ctrl_c_before_anything_has_finished_saves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = Client.send

    def stopping(self: Client, request: Request) -> None:
        sent(self, request)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Client, "send", stopping)
    assert main([*CPU, *SMALL, "--max-concurrency", "1", "-o", str(tmp_path / "run.json")]) == 130
    assert not (tmp_path / "run.json").exists()
    assert capsys.readouterr().err == "realrun: interrupted\n"
