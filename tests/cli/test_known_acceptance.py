"""`pdvsim acceptance`: the acceptance that runs use by default, with its source."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import pdvsim
from pdvsim.cli import main
from pdvsim.sim.config import Experiment, Server, Traffic
from pdvsim.sim.run import simulate
from pdvsim.sim.workload.counters import read_acceptance


def rows(capsys: pytest.CaptureFixture[str], *words: str) -> dict[tuple[str, str], dict[str, str]]:
    assert main(["acceptance", "--json", *words]) == 0
    listed = json.loads(capsys.readouterr().out)["tokens_per_round"]
    return {(row["drafter"], row["task"]): row for row in listed}


@pytest.mark.parametrize(("drafter", "task"), [("eagle3", "sharegpt"), ("pard", "-"), ("dflash", "-")])
def test_tokens_per_round_are_those_of_runs(capsys: pytest.CaptureFixture[str], drafter: str, task: str) -> None:
    listed = rows(capsys)[drafter, task]
    for k in (1, 4):
        run = pdvsim.run(
            model="llama-3.1-8b", drafter=drafter, arch="colocated", num_speculative_tokens=k, num_prompts=300
        )
        assert run.metrics["spec_decode_acceptance_length"] == pytest.approx(float(listed[f"k={k}"]), rel=0.04)


def test_one_drafter_or_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert {drafter for drafter, _ in rows(capsys, "--drafter", "ngram")} == {"ngram"}
    assert main(["acceptance"]) == 0
    assert "--acceptance-from" in capsys.readouterr().out


# The second answer repeats the first: a look-up in other answers finds it, one in its own tokens does not.
TOLD = [1, 2, 3, 4, 5, 6, 7, 8]
TEXTS = [{"prompt_token_ids": [9], "generated_token_ids": TOLD}, {"prompt_token_ids": [0], "generated_token_ids": TOLD}]


def test_drafts_are_looked_up_in_the_users_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: the first answer takes a round per token. A draft for the second is as long as its match.

    Its rounds start after 0 tokens (no draft), 1 (draft 2: two tokens), 3 (draft 4, 5, 6: four tokens) and 7 (draft 8):
    4 rounds. With k=1 they start after 0, 1, 3, 5 and 7: 5 rounds.
    """
    path, out = tmp_path / "texts.jsonl", tmp_path / "rounds.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in TEXTS))
    listed = rows(capsys, "--drafter", "suffix", "--texts", str(path), "--output", str(out))["suffix", "your texts"]
    assert (listed["k=1"], listed["k=7"]) == (f"{16 / 13:.2f}", f"{16 / 12:.2f}")
    assert re.search(r"25% .* 1\.7 tokens", listed["source"])
    assert [json.loads(line) for line in out.read_text().splitlines()] == [[0] * 8, [0, 1, 3, 1]]
    traffic = Traffic("random", num_prompts=4, input_len=10, output_len=9)  # the first token is the prefill's
    server = Server("suffix:llama-3.1-8b", num_speculative_tokens=3)
    replayed = simulate(Experiment("colocated", traffic, read_acceptance(str(out)), server))
    assert replayed.requests["rounds"].tolist() == [8, 4, 8, 4]
    own = ("--suffix-decoding-max-cached-requests", "0")
    alone = rows(capsys, "--drafter", "suffix", "--texts", str(path), *own)["suffix", "your texts"]
    assert alone["k=7"] == "1.00"


def test_texts_need_a_tokenizer(refused: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"prompt": "a", "output": "b"}\n')
    assert "--tokenizer" in refused(["acceptance", "--texts", str(path), "--drafter", "ngram"])
