"""Traffic of one's own: columns by any name, units, what is left out, what is refused, and what a run makes of it."""

from __future__ import annotations

import csv
import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdvsim.cli import main
from pdvsim.sim.config import Acceptance, Experiment, Traffic
from pdvsim.sim.doubts import vet
from pdvsim.sim.workload.datasets import Trace
from pdvsim.sim.workload.own import NAMES, kind_of, read_own, read_requests
from pdvsim.sim.workload.requests import make_requests
from pdvsim.study.traffic import account

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
        assert trace.acceptance is not None
        assert trace.acceptance.tolist() == pytest.approx([0.9, 0.1, 0.5])
        assert trace.sessions == ("a", "b", "a")
        assert trace.notes == ()  # the documented names are not worth a word


def test_every_other_name_is_known_and_said(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("name", "times", "unit"),
    [
        ("timestamp_ms", (500, 0, 2000), "milliseconds"),
        ("arrival_time", (0.5, 0, 2), "seconds"),
        ("created", (1.7e9 + 0.5, 1.7e9, 1.7e9 + 2), "seconds"),
        ("created", (1.7e12 + 500, 1.7e12, 1.7e12 + 2000), "milliseconds"),
        ("ts", (1.7e18 + 5e8, 1.7e18, 1.7e18 + 2e9), "nanoseconds"),
        ("time", ("2024-05-01 10:00:00.5", "2024-05-01T10:00:00", "2024-05-01 10:00:02"), "dates"),
        ("time", ("2024-05-01T10:00:00.5Z", "2024-05-01T12:00:00+02:00", "2024-05-01T10:00:02Z"), "dates"),
    ],
)
def test_times_in_any_unit(tmp_path: Path, name: str, times: tuple[Any, ...], unit: str) -> None:
    rows = [(time, *row[1:]) for time, row in zip(times, ROWS, strict=True)]
    trace = read_own(csv_file(tmp_path, (name, *HEADER[1:]), rows))
    assert (trace.arrival_s - trace.arrival_s.min()).tolist() == pytest.approx([0.5, 0, 2], abs=1e-3)
    assert f"arrival_s is '{name}' ({unit})" in trace.notes[0]


def test_rows_of_requests_that_failed_are_left_out_and_counted(tmp_path: Path) -> None:
    trace = read_own(csv_file(tmp_path, rows=[*ROWS, (3.0, 10, 0, 0.5, "c")]))
    assert len(trace.lengths) == 3
    assert "1 of 4 rows have no prompt or no output" in trace.notes[0]


@pytest.mark.parametrize(
    ("header", "row", "says"),
    [
        (HEADER, (0, "ten", 3, 0.5, "a"), "line 2: prompt_tokens is 'ten'; accepted: a whole number"),
        (HEADER, (0, 10, 2.5, 0.5, "a"), "line 2: output_tokens is '2.5'"),
        (HEADER, (0, 10, 3, 1.5, "a"), "line 2: acceptance is '1.5'; accepted: a share"),
        (HEADER, ("soon", 10, 3, 0.5, "a"), "line 2: arrival_s is 'soon'"),
        (HEADER, (0, 10, 3), "line 2: 3 fields, the header has 5"),
        (("when", "how_long"), (0, 1), "no column is known as prompt tokens, of 'when, how_long'"),
        (("prompt_tokens",), (5,), "no column is known as output tokens"),
        (("prompt", "output_tokens"), ("hello", 4), "--tokenizer, a local folder, counts their tokens"),
    ],
)
def test_bad_files_are_one_line(tmp_path: Path, header: tuple[str, ...], row: tuple[Any, ...], says: str) -> None:
    with pytest.raises(ValueError, match=rf"^.*{re.escape(says)}.*$"):  # a dot is no line break
        read_own(csv_file(tmp_path, header, [row]))


def one_line_or_rows(path: str) -> bool:
    try:
        return bool((read_own(path).lengths >= 1).all())
    except ValueError as error:
        return "\n" not in str(error)


@given(content=st.binary(max_size=200), known=st.booleans())
def test_any_bytes_are_read_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, known: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes.csv"
    path.write_bytes((b"arrival_s,prompt_tokens,output_tokens\n" if known else b"") + content)
    assert one_line_or_rows(str(path))


def test_a_published_trace_is_known_by_its_columns(tmp_path: Path) -> None:
    path = json_file(tmp_path, {"timestamp": 2500, "input_length": 5, "output_length": 6, "hash_ids": [1]})
    assert kind_of(path) == "mooncake"
    trace = read_own(path)
    assert trace.arrival_s.tolist() == [2.5]  # its times are milliseconds
    assert "the mooncake trace" in trace.notes[0]
    assert kind_of(csv_file(tmp_path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens"))) == "azure"
    assert kind_of(csv_file(tmp_path)) == "custom"


def test_a_replay_takes_all_rows_unless_told_otherwise(tmp_path: Path) -> None:
    path = csv_file(tmp_path)
    traffic = Traffic("custom", path, use_trace_timestamps=True)
    assert traffic.num_prompts == 3
    requests = make_requests(traffic, Acceptance())
    assert [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in requests] == [(0, 20, 4), (0.5, 10, 3), (2, 30, 5)]
    assert Traffic("custom", path, use_trace_timestamps=True, num_prompts=2).num_prompts == 2
    assert Traffic("custom", path).num_prompts == 1000


def test_the_command_replays_all_rows_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = csv_file(tmp_path)
    argv = ["run", "--dataset-name", "custom", "--dataset-path", path, "--json"]
    for more, count in ((["--use-trace-timestamps"], 3), (["--use-trace-timestamps", "--num-prompts", "2"], 2)):
        assert main([*argv, *more]) == 0
        assert json.loads(capsys.readouterr().out)["completed"] == count
    path = csv_file(tmp_path, HEADER[1:], [row[1:] for row in ROWS])
    assert main([*argv, "--use-trace-timestamps"]) == 2
    assert "has no column of arrival times" in capsys.readouterr().err


def test_each_request_has_the_acceptance_of_its_row(tmp_path: Path) -> None:
    """Rates of 0 and 1 leave no doubt: drafts of the one are never accepted, of the other always."""
    path = csv_file(tmp_path, HEADER[1:], [(10, 50, 0.0, "a"), (20, 50, 1.0, "a")])
    for request in make_requests(Traffic("custom", path, num_prompts=20), Acceptance()):
        runs = set(request.runs[1:40])
        assert runs == ({0} if request.prompt_tokens == 10 else runs - {0})
    given = make_requests(Traffic("custom", path, num_prompts=2), Acceptance(acceptance_rate=0.0))
    assert all(set(request.runs) == {0} for request in given)  # an option takes the column's place


def test_what_the_columns_were_taken_for_is_said_once(tmp_path: Path) -> None:
    path = csv_file(tmp_path, ("ts", *HEADER[1:]))
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        vet([Experiment(arch, traffic=Traffic("custom", path)) for arch in ("pd", "pdv")])
    assert [str(note.message) for note in notes] == [f"{path}: arrival_s is 'ts' (seconds)"]


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
    with pytest.raises(ValueError, match="--tokenizer does nothing here"):
        read_own(csv_file(tmp_path), folder)


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = csv_file(tmp_path)
    assert read_requests("custom", path) is read_requests("custom", path)
    csv_file(tmp_path, rows=ROWS[:1])
    assert len(read_requests("custom", path).lengths) == 1


def test_burstiness_is_that_of_the_gaps(tmp_path: Path) -> None:
    """Gamma gaps of a known shape give it back, and in the long run the dispersion of counts is 1 over it."""
    rng = np.random.default_rng(0)
    for shape in (0.3, 1.0, 4.0):
        made = [np.cumsum(rng.gamma(shape, 1 / (shape * 5.0), 20_000)) for _ in range(100)]
        lengths = np.full((20_000, 2), 10)
        found = [account("made", Trace(times, lengths)).summary() for times in made]
        for name, expected in (("burstiness", shape), ("request_rate", 5.0), ("index_of_dispersion", 1 / shape)):
            assert np.mean([one[name] for one in found]) == pytest.approx(expected, rel=0.1), name
    even = account("even", read_own(csv_file(tmp_path, HEADER[:3], [(i, 10, 20) for i in range(100)]))).summary()
    assert even["gap_variation"] == 0
    assert even["peak_rate"] == pytest.approx(1.0)
    assert "length_correlation" not in even


def test_the_traffic_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, drawn = csv_file(tmp_path), tmp_path / "t.png"
    assert main(["traffic", path, "-o", str(drawn)]) == 0
    out = capsys.readouterr().out
    assert "mine.csv: 3 requests" in out
    assert "2 sessions of 1.5 requests" in out
    replay = next(line for line in out.splitlines() if line.startswith("replay it: pdvsim "))
    assert main(replay.removeprefix("replay it: pdvsim ").split()) == 0
    assert drawn.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert main(["traffic", path, "-o", str(drawn)]) == 2
    assert "exists already; use --overwrite to replace it" in capsys.readouterr().err
    assert main(["traffic", path, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["prompt_tokens"]["mean"] == 20
    assert document["sessions"]["count"] == 2
    assert main(["traffic", csv_file(tmp_path, HEADER[1:], [row[1:] for row in ROWS])]) == 0
    assert "no arrival times" in capsys.readouterr().out
