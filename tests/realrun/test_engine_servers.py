"""An experiment on another engine's server: a small one that speaks vLLM's protocol at times that are known."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pdvsim.calibration.validate.served import ServedRun, read_runs, write_runs
from pdvsim.cli import main
from pdvsim.cli.realrun import main as realrun
from pdvsim.realrun.engines import StreamedAnswer, pinned_rates
from pdvsim.sim.config import Acceptance, Experiment, Server, Traffic
from pdvsim.sim.core import Request
from pdvsim.sim.run import simulate
from pdvsim.sim.workload.requests import make_requests

FIRST_S, STEP_S, GAIN = 0.06, 0.02, 2  # to the first token; a round, and its tokens
SERVER = f"""
import json, os, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
print("GPU KV cache size: 123,456 tokens", json.dumps(sys.argv[1:]), flush=True)
served = 0
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *_): pass
    def do_GET(self):
        body = f'vllm:generation_tokens_total{{{{model="a b"}}}} {{served}}.0\\n'.encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def chunk(self, event):
        line = b"data: " + event + b"\\n\\n"
        for part in (line[:7], line[7:]):  # events are cut anywhere
            self.wfile.write(b"%x\\r\\n%s\\r\\n" % (len(part), part)); self.wfile.flush()
    def do_POST(self):
        global served
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if len(asked["prompt"]) == 66: os._exit(3)
        self.send_response(200); self.send_header("Transfer-Encoding", "chunked"); self.end_headers()
        done, wait_s = 0, {FIRST_S}
        while done < asked["max_tokens"]:
            time.sleep(wait_s)
            new = min({GAIN} if done else 1, asked["max_tokens"] - done)
            done, wait_s, served = done + new, {STEP_S}, served + new
            choice = {{"text": "x", "token_ids": [7] * new}}
            usage = {{"completion_tokens": done, "prompt_tokens_details": {{"cached_tokens": 3}}}}
            self.chunk(json.dumps({{"choices": [choice], "usage": usage}}).encode())
        self.chunk(b"[DONE]"); self.wfile.write(b"0\\r\\n\\r\\n"); self.close_connection = True
port = int(sys.argv[sys.argv.index("--port") + 1])
class Server(ThreadingHTTPServer):
    request_queue_size = 64
threading.Thread(target=time.sleep, args=(600,)).start()  # does not end by itself
Server(("127.0.0.1", port), Handler).serve_forever()
"""
SMALL = ["--dataset-name", "random", "--input-len", "20", "--output-len", "9", "--random-range-ratio", "0"]
VLLM = ["--device", "cpu", "--engine", "vllm", "--arch", "colocated", "--pair", "llama-3.2-1b:llama-3.1-8b"]


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A vLLM that is installed, as far as Python can tell."""
    package = tmp_path / "site" / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for folder in (package, *package.parents[:2]):
        (folder / "__init__.py").touch()
    (package / "main.py").write_text(SERVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr("pdvsim.realrun.engines.WARM_UP", Traffic("random", num_prompts=1, input_len=4, output_len=2))
    return tmp_path


def processes_of(folder: Path) -> list[str]:
    """The processes that run the server of a folder."""
    found = subprocess.run(
        ["pgrep", "-f", "vllm.entrypoints.cli.main.*--port"], capture_output=True, text=True, check=False
    )
    environments = (Path(f"/proc/{pid}/environ") for pid in found.stdout.split())
    return [path.parent.name for path in environments if str(folder).encode() in path.read_bytes()]


def test_known_times_become_rows(vllm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = vllm / "run.json"
    load = ["--num-prompts", "6", "--max-concurrency", "2", "--num-speculative-tokens", "3"]
    pinned = ["--synthetic-acceptance-rates", "0.8,0.5,0.25", "--models", str(vllm / "models")]
    files = ["-o", str(out), "--save-detailed", "--iteration-log", str(vllm / "steps.log")]
    assert realrun([*VLLM, *SMALL, *load, *pinned, *files]) == 0
    document = json.loads(out.read_text())
    assert (document["completed"], document["total_output_tokens"], document["kv_capacity_tokens"]) == (6, 54, 123_456)
    ttft_ms, e2el_ms = document["median_ttft_ms"], document["median_e2el_ms"]  # a busy machine may only add to them
    assert 1e3 * FIRST_S <= ttft_ms < 10e3 * FIRST_S
    assert 1e3 * (FIRST_S + 8 / GAIN * STEP_S) <= e2el_ms < 10e3 * (FIRST_S + 8 / GAIN * STEP_S)
    assert ttft_ms < e2el_ms
    assert document["mean_tpot_ms"] == pytest.approx((document["mean_e2el_ms"] - document["mean_ttft_ms"]) / 8)
    assert document["max_concurrent_requests"] == 2
    assert document["spec_decode_acceptance_length"] == GAIN
    assert document["prefix_cache_hits"] == 6 * 3
    assert document["vllm:generation_tokens_total"] == 54  # without the warm-up
    words = json.loads((vllm / "steps.log").read_text().partition("tokens ")[2])
    assert words[:2] == ["serve", f"{vllm}/models/llama-3.1-8b"]
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config["model"] == f"{vllm}/models/llama-3.2-1b"
    assert config["rejection_sample_method"] == "synthetic"
    assert config["synthetic_acceptance_rates"] == pytest.approx([0.8, 0.5, 0.25], abs=0.005)
    assert {"dummy", "--enable-logging-iteration-details"} <= set(words)
    assert "measured run" in capsys.readouterr().out
    assert not processes_of(vllm)


def test_a_plan_is_served_by_one_server_and_predicted_as_its_engine_s(vllm: Path) -> None:
    command = " ".join(["realrun --arch colocated --pair none:llama-3.1-8b --num-prompts 3", *SMALL])
    plan, output = vllm / "plan.jsonl", vllm / "runs.jsonl"
    write_runs(plan, [ServedRun(f"{command} --seed {seed}", 0, False, {}, {}, vllm) for seed in (1, 2)])
    assert main(["validate", "--serve", str(plan), "-o", str(output), "--engine", "vllm", "--tiny"]) == 0
    runs = read_runs(output)
    assert [run.experiment.hardware.engine for run in runs] == ["vllm", "vllm"]
    assert len({run.meta["command"] for run in runs}) == 1
    assert not processes_of(vllm)


@pytest.mark.parametrize("ends", ["ctrl-c", "server"])
def test_what_ends_early_leaves_no_process(ends: str, vllm: Path) -> None:
    tokens = "66" if ends == "server" else "20"
    load = ["--num-prompts", "400", "--max-concurrency", "2", "--num-speculative-tokens", "0"]
    code = "import sys; from pdvsim.cli.realrun import main; sys.exit(main(sys.argv[1:]))"
    argv = [sys.executable, "-c", code, *VLLM, *SMALL, *load, "--input-len", tokens, "-o", str(vllm / "run.json")]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    guard = threading.Timer(400, process.kill)  # so that nothing below waits for ever
    guard.daemon = True
    guard.start()
    if ends == "ctrl-c":
        while "requests" not in (line := process.stderr.readline()):
            assert line, "it ended before its first request"
        os.kill(process.pid, signal.SIGINT)
    said = process.communicate()[1]
    guard.cancel()
    assert process.returncode == (130 if ends == "ctrl-c" else 2), said
    assert ("had finished" if ends == "ctrl-c" else "its log: ") in said
    assert (vllm / "run.json").exists() == (ends == "ctrl-c")
    assert not processes_of(vllm)


REFUSED = [
    ([], "vllm is not installed"),
    (["--arch", "pdv"], "pdv"),
    (["--drafter", "ngram", "--pair", "llama-3.1-8b"], "finds nothing in random prompts"),
    (["--tiny"], "give --models"),
    (["--replicas", "2"], "one server"),
    (["--probe", "-o", "x.json"], "need launches"),
    (["--engine", "trtllm"], "realrun starts no trtllm"),
]


@pytest.mark.parametrize(("more", "says"), REFUSED)
def test_what_no_server_here_can_serve_is_refused(more: list[str], says: str, refused: Callable[..., str]) -> None:
    assert says in refused(["realrun", *VLLM, *more])


def test_pinned_rates_are_those_of_simulated_rounds() -> None:
    experiment = Experiment(
        "colocated", Traffic("random", num_prompts=300, input_len=16, output_len=200, max_concurrency=8),
        Acceptance(acceptance_model="sharegpt-eagle3"), Server("llama-3.1-8b", 4, "eagle3"),
    )  # fmt: skip
    rates = pinned_rates(experiment, make_requests(experiment.traffic, experiment.acceptance))
    assert list(rates) == sorted(rates, reverse=True)
    requests = simulate(experiment).requests
    assert sum(rates) == pytest.approx(requests["accepted"].sum() / requests["drafts"].sum(), rel=0.03)


def test_an_answer_is_read_however_its_bytes_are_cut() -> None:
    events = b"".join(b"data: " + json.dumps({"n": n}).encode() + b"\n\n" for n in range(3)) + b"data: [DONE]\n\n"
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (events[:11], events[11:12], events[12:]))
    whole = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"
    for step in (1, 7, len(whole)):
        answer = StreamedAnswer(Request(0, 0.0, 1, 1, b""), None)  # type: ignore[arg-type]
        read = [event for at in range(0, len(whole), step) for event in answer.events(whole[at : at + step])]
        np.testing.assert_array_equal([event["n"] for event in read], range(3))
    with pytest.raises(ValueError, match="refused request 0"):
        [*StreamedAnswer(Request(0, 0.0, 1, 1, b""), None).events(b"HTTP/1.1 400 Bad Request\r\n\r\nno")]  # type: ignore[arg-type]
