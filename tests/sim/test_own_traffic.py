"""Traffic of one's own: columns by any name, units, what is left out, what is refused, and what a run makes of it."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdvsim.cli import main
from pdvsim.sim.config import Acceptance, Experiment, Server, Traffic
from pdvsim.sim.relevance import vet
from pdvsim.sim.workload.columns import NAMES
from pdvsim.sim.workload.own import kind_of, read_own
from pdvsim.sim.workload.requests import make_requests

ROWS = [(0.5, 10, 3, 0.9, "a"), (0.0, 20, 4, 0.1, "b"), (2.0, 30, 5, 0.5, "a")]
HEADER = ("arrival_s", "prompt_tokens", "output_tokens", "acceptance", "session")


def csv_file(folder: Path, header: tuple[str, ...] = HEADER, rows: Any = ROWS, delimiter: str = ",") -> str:
    path = folder / "mine.csv"
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([header, *rows])
    return str(path)


def json_file(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv_and_json_lines_hold_the_same(tmp_path: Path, delimiter: str) -> None:
    as_csv = read_own(csv_file(tmp_path, delimiter=delimiter))
    as_json = read_own(json_file(tmp_path, *(dict(zip(HEADER, row, strict=True)) for row in ROWS)))
    for trace in (as_csv, as_json):
        assert trace.arrival_s.tolist() == [0.5, 0.0, 2.0]
        assert trace.lengths.tolist() == [[10, 3], [20, 4], [30, 5]]
        assert trace.acceptance.tolist() == pytest.approx([0.9, 0.1, 0.5])
        assert trace.sessions.tolist() == [0, 1, 0]
        assert trace.notes == ()  # the documented names are not worth a word


def test_every_other_name_is_known_and_noted(tmp_path: Path) -> None:
    for role, names in NAMES.items():
        for name in names:
            if role in ("prompt_tokens", "output_tokens", "acceptance", "session"):
                header = tuple(name if own == role else own for own in HEADER)
                trace = read_own(csv_file(tmp_path, header))
                assert trace.lengths.tolist() == [[10, 3], [20, 4], [30, 5]]
                assert bool(trace.notes) is (name != role)
    trace = read_own(csv_file(tmp_path, ("Arrival Time", "Input Tokens", "Output-Length", "x", "y")))
    [note] = trace.notes
    assert "arrival_s is 'Arrival Time' (seconds), prompt_tokens is 'Input Tokens'" in note
    assert trace.acceptance is None


@pytest.mark.parametrize(("name", "times", "unit"), [
    ("timestamp_ms", (500, 0, 2000), "milliseconds"),
    ("arrival_time", (0.5, 0, 2), "seconds"),
    ("created", (1.7e9 + 0.5, 1.7e9, 1.7e9 + 2), "seconds"),
    ("created", (1.7e12 + 500, 1.7e12, 1.7e12 + 2000), "milliseconds"),
    ("ts", (1.7e18 + 5e8, 1.7e18, 1.7e18 + 2e9), "nanoseconds"),
    ("time", ("2024-05-01 10:00:00.5", "2024-05-01T10:00:00", "2024-05-01 10:00:02"), "dates"),
    ("time", ("2024-05-01T10:00:00.5Z", "2024-05-01T12:00:00+02:00", "2024-05-01T10:00:02Z"), "dates"),
])  # fmt: skip
def test_times_in_any_unit(tmp_path: Path, name: str, times: tuple[Any, ...], unit: str) -> None:
    rows = [(time, *row[1:]) for time, row in zip(times, ROWS, strict=True)]
    trace = read_own(csv_file(tmp_path, (name, *HEADER[1:]), rows))
    assert (trace.arrival_s - trace.arrival_s.min()).tolist() == pytest.approx([0.5, 0, 2], abs=1e-3)
    assert f"arrival_s is '{name}' ({unit})" in trace.notes[0]


@pytest.mark.parametrize(("header", "row", "says"), [
    (HEADER, (0, 10, 2.5, 0.5, "a"), "line 2: output_tokens is '2.5'"),
    (HEADER, (0, 10, 3, 1.5, "a"), "line 2: acceptance is '1.5'; accepted: a share"),
    (("when", "how_long"), (0, 1), "no prompt-length column found (columns: when, how_long). Name it with --columns"),
    (
        ("prompt_tokens",),
        (5,),
        "no output-length column found (columns: prompt_tokens). Name it with --columns",
    ),
])  # fmt: skip
def test_bad_files_are_one_line(tmp_path: Path, header: tuple[str, ...], row: tuple[Any, ...], says: str) -> None:
    with pytest.raises(ValueError, match=rf"^.*{re.escape(says)}.*$"):  # a dot is no line break
        read_own(csv_file(tmp_path, header, [row]))


def test_a_published_trace_is_known_by_its_columns(tmp_path: Path) -> None:
    path = json_file(tmp_path, {"timestamp": 2500, "input_length": 5, "output_length": 6, "hash_ids": [1]})
    assert kind_of(path) == "mooncake"
    trace = read_own(path)
    assert trace.arrival_s.tolist() == [2.5]  # its times are milliseconds
    assert "the mooncake trace" in trace.notes[0]
    assert kind_of(csv_file(tmp_path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens"))) == "azure"
    assert kind_of(csv_file(tmp_path)) == "custom"


def test_a_replay_takes_all_rows_by_default(tmp_path: Path) -> None:
    path = csv_file(tmp_path)
    traffic = Traffic("custom", path, use_trace_timestamps=True)
    assert traffic.num_prompts == 3
    requests = make_requests(traffic, Acceptance())
    assert [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in requests] == [(0, 20, 4), (0.5, 10, 3), (2, 30, 5)]
    assert Traffic("custom", path, use_trace_timestamps=True, num_prompts=2).num_prompts == 2
    assert Traffic("custom", path).num_prompts == 1000
    timeless = csv_file(tmp_path, HEADER[1:], [row[1:] for row in ROWS])
    with pytest.raises(ValueError, match="has no column of arrival times"):
        make_requests(Traffic("custom", timeless, use_trace_timestamps=True), Acceptance())


def test_each_request_has_the_acceptance_of_its_row(tmp_path: Path) -> None:
    """Rates of 0 and 1 leave no doubt: drafts of the one are never accepted, of the other always."""
    path = csv_file(tmp_path, HEADER[1:], [(10, 50, 0.0, "a"), (20, 50, 1.0, "a")])
    for request in make_requests(Traffic("custom", path, num_prompts=20), Acceptance()):
        runs = set(request.accept_runs[1:40])
        assert runs == ({0} if request.prompt_tokens == 10 else runs - {0})
    given = make_requests(Traffic("custom", path, num_prompts=2), Acceptance(acceptance_rate=0.0))
    assert all(set(request.accept_runs) == {0} for request in given)  # an option overrides the column


def test_vllms_custom_prompts_are_counted(tmp_path: Path) -> None:
    """Checked against the tokenizer itself; an answer is as long as its line says, or 256 tokens as in vLLM."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=plain).save_pretrained(tmp_path / "tokenizer")
    folder = str(tmp_path / "tokenizer")
    lines = [{"prompt": "a b c a"}, {"prompt": "a b"}]
    assert read_own(json_file(tmp_path, *lines), folder).lengths.tolist() == [[4, 256], [2, 256]]
    lines = [{"prompt": "a b c a", "output_tokens": 7}]
    assert read_own(json_file(tmp_path, *lines), folder).lengths.tolist() == [[4, 7]]
    with pytest.raises(ValueError, match="--tokenizer has no effect here"):
        read_own(csv_file(tmp_path), folder)


def test_text_without_a_tokenizer_is_estimated_with_a_note(tmp_path: Path) -> None:
    trace = read_own(json_file(tmp_path, {"prompt": "a" * 41}, {"prompt": ""}))
    assert trace.lengths.tolist() == [[11, 256], [1, 256]]  # 4 characters per token
    assert trace.notes == (f"{tmp_path}/mine.jsonl: no --tokenizer: lengths are estimated at 4 characters per token",)
    talks = [{"conversations": [{"from": "human", "value": "b" * 400}, {"from": "gpt", "value": "c" * 80}]}]
    path = tmp_path / "talks.json"
    path.write_text(json.dumps(talks))
    [request] = make_requests(Traffic(dataset_path=str(path), num_prompts=1), Acceptance())
    assert (request.prompt_tokens, request.output_tokens) == (100, 20)
    with pytest.warns(match=r"talks\.json: no --tokenizer: lengths are estimated"):
        vet([Experiment(traffic=Traffic(dataset_path=str(path), num_prompts=1))])


def response(created: int, prompt: int, output: int) -> dict[str, Any]:
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    return {"id": "chatcmpl-1", "object": "chat.completion", "created": created, "model": "m", "usage": usage}


def test_responses_of_openais_api_are_traffic(tmp_path: Path) -> None:
    answers = [response(1_700_000_000, 10, 3), response(1_700_000_001, 20, 4), response(1_700_000_003, 30, 5)]
    batch = [{"custom_id": "r", "response": {"status_code": 200, "body": one}, "error": None} for one in answers]
    for lines in (answers, batch, [{"level": "info", "response": one} for one in answers]):
        trace = read_own(json_file(tmp_path, *lines))
        assert (trace.arrival_s - 1_700_000_000).tolist() == [0, 1, 3]
        assert trace.lengths.tolist() == [[10, 3], [20, 4], [30, 5]]
    failed = {**response(1_700_000_009, 1, 1), "usage": None}
    assert "1 of 4 rows have no prompt or no output" in read_own(json_file(tmp_path, *answers, failed)).notes[-1]


def test_requests_of_one_second_are_spread_over_it(tmp_path: Path) -> None:
    start = 1_700_000_000
    trace = read_own(json_file(tmp_path, *(response(start + second, 9, 9) for second in (2, 0, 2, 2, 0))))
    assert (trace.arrival_s - start).tolist() == pytest.approx([2, 0, 2 + 1 / 3, 2 + 2 / 3, 0.5])
    assert "times are whole seconds" in trace.notes[-1]
    bursts = read_own(csv_file(tmp_path, HEADER[:3], [(0, 1, 1), (0, 1, 1), (5, 1, 1)]))
    assert bursts.arrival_s.tolist() == [0, 0, 5]  # seconds since a start are what they say


def bench_file(folder: Path, **more: Any) -> str:
    """A result of vllm bench serve with --save-detailed, in its own words (vllm/benchmarks/serve.py)."""
    document = {
        "date": "20260801-120000", "backend": "openai", "model_id": "m", "num_prompts": 3, "request_rate": 2.0,
        "burstiness": 1.0, "max_concurrency": None, "duration": 2.0, "completed": 2, "failed": 1,
        "request_throughput": 1.0, "output_throughput": 4.0, "input_lens": [10, 20, 30], "output_lens": [3, 0, 5],
        "ttfts": [0.1, 0.0, 0.1], "itls": [[0.1, 0.1], [], [0.1]], "start_times": [100.5, 101.0, 102.25],
        "generated_texts": ["a", "", "b"], "errors": ["", "timeout", ""],
    }  # fmt: skip
    path = folder / "bench.json"
    path.write_text(json.dumps({**document, **more}))
    return str(path)


def test_a_result_of_vllm_is_traffic(tmp_path: Path) -> None:
    path = bench_file(tmp_path)
    trace = read_own(path)
    assert trace.arrival_s.tolist() == [100.5, 102.25]
    assert trace.lengths.tolist() == [[10, 3], [30, 5]]
    assert trace.notes == (f"{path}: 1 of 3 rows have no prompt or no output and are excluded",)
    assert Traffic(dataset_path=path, use_trace_timestamps=True).num_prompts == 2
    queued = read_own(bench_file(tmp_path, queue_times=[0.5, 0.0, 1.0]))
    assert queued.arrival_s.tolist() == [100.0, 101.25]  # when they were due, not when they were let through
    with pytest.raises(ValueError, match=r"no list of prompt_tokens for each request; accepted: .*--save-detailed"):
        read_own(bench_file(tmp_path, input_lens=None))
    with pytest.raises(ValueError, match="no list of output_tokens"):
        read_own(bench_file(tmp_path, output_lens=[3]))
    with pytest.raises(ValueError, match="arrival_s is 'soon'; accepted: a date"):
        read_own(bench_file(tmp_path, start_times=["soon"] * 3, queue_times=[0, 0, 0]))


def test_requests_beyond_the_context_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """TinyLlama's context ends at 2048, whether or not it drafts: all architectures get the same requests."""
    path = csv_file(tmp_path, HEADER[:3], [(0, 2000, 48), (1, 2000, 49), (2, 10, 5), (3, 9000, 1)])
    flags = ["--pair", "tinyllama-1.1b:llama-2-7b", "--dataset-path", path, "--use-trace-timestamps", "--json"]
    for arch in ("autoregressive", "pdv"):
        for more in ([], ["--num-prompts", "4"]):
            assert main(["run", "--arch", arch, *flags, *more]) == 0
            captured = capsys.readouterr()
            assert json.loads(captured.out)["completed"] == 2
            assert f"{path}: 2 of 4 requests have more than 2048 tokens and are excluded" in captured.err
    traffic = Traffic("custom", path, num_prompts=50)
    longer = Experiment(traffic=traffic, server=Server("llama-3.2-1b:llama-3.1-8b")).traffic
    lengths = {request.prompt_tokens for request in make_requests(longer, Acceptance())}
    assert lengths == {2000, 10, 9000}
    short = replace(longer, max_model_len=100)
    assert {request.prompt_tokens for request in make_requests(short, Acceptance())} == {10}
    assert main(["run", "--dataset-path", path, "--max-model-len", "9"]) == 2
    assert "all 4 requests have more than 9 tokens" in capsys.readouterr().err


def test_the_traffic_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, picture = csv_file(tmp_path), tmp_path / "t.png"
    assert main(["traffic", path, "-o", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "mine.csv: 3 requests" in out
    assert "2 sessions of 1.5 requests" in out
    replay = next(line for line in out.splitlines() if line.startswith("replay it: pdvsim "))
    assert main(replay.removeprefix("replay it: pdvsim ").split()) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert main(["traffic", path, "-o", str(picture)]) == 2
    assert "exists already; use --overwrite to replace it" in capsys.readouterr().err
    assert main(["traffic", path, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["prompt_tokens"]["mean"] == 20
    assert document["sessions"]["count"] == 2
    assert main(["traffic", csv_file(tmp_path, HEADER[1:], [row[1:] for row in ROWS])]) == 0
    assert "no arrival times" in capsys.readouterr().out
