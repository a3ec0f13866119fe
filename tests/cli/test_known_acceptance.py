"""`pdvsim acceptance`: the acceptance that runs use by default, with its source."""

from __future__ import annotations

import json

import pytest

import pdvsim
from pdvsim.cli import main


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


def test_one_drafter_or_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert {drafter for drafter, _ in rows(capsys, "--drafter", "ngram")} == {"ngram"}
    assert main(["acceptance", "--drafter", "none"]) == 2
    assert "no acceptance is known" in capsys.readouterr().err
    assert main(["acceptance"]) == 0
    assert "--acceptance-from" in capsys.readouterr().out
