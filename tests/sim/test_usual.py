"""Acceptance that a command is asked for: read from the user's own server, recorded of the drafter, or assumed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pdvsim
from pdvsim.cli import main
from pdvsim.cli.run import RunOptions
from pdvsim.common.options import build
from pdvsim.sim.config import Acceptance, Experiment, Server, Traffic
from pdvsim.sim.models.names import Note
from pdvsim.sim.models.presets import can_load
from pdvsim.sim.run import simulate
from pdvsim.sim.workload.acceptance import expected_tokens, mean_tokens
from pdvsim.sim.workload.counters import read_acceptance
from pdvsim.sim.workload.usual import usual_acceptance
from pdvsim.view.setting import acceptance_notes

PAIR = "llama-3.2-1b:llama-3.1-8b"
EAGLE3 = "eagle3-llama-3.1-8b:llama-3.1-8b"
LABELS = 'engine="{}",model_name="meta-llama/Llama-3.1-8B"'
SMALL = {"dataset_name": "random", "input_len": 32, "output_len": 200, "num_prompts": 60, "max_concurrency": 8}


def metrics(drafts: int, tokens: int, by_position: list[int], engines: int = 1) -> str:
    """vLLM's /metrics with these drafts of each engine, among other lines."""
    lines = ["# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts."]
    for engine in range(engines):
        labels = LABELS.format(engine)
        lines += [
            f"vllm:num_requests_running{{{labels}}} 3.0",
            f"vllm:spec_decode_num_drafts_total{{{labels}}} {float(drafts)}",
            f"vllm:spec_decode_num_drafts_created{{{labels}}} 1.7e+09",
            f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {float(tokens)}",
            f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {float(sum(by_position))}",
        ]
        lines += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{at}"}} {float(count)}'
            for at, count in enumerate(by_position)
        ]
    return "\n".join(lines) + "\n"


def written(folder: Path, text: str, name: str = "metrics.txt") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("engines", [1, 2])
def test_counters_by_position_are_shares_of_the_drafts(tmp_path: Path, engines: int) -> None:
    path = written(tmp_path, metrics(1000, 3000, [800, 600, 300], engines))
    with pytest.warns(Note, match=r"accepted by position 0.80, 0.60, 0.30; further positions: 0.50 times"):
        acceptance = read_acceptance(path)
    assert acceptance.synthetic_acceptance_rates[:3] == (0.8, 0.6, 0.3)
    assert acceptance.synthetic_acceptance_rates[3:] == pytest.approx([0.3 * 0.5**n for n in range(1, 6)], abs=1e-4)
    with pytest.warns(Note, match="draft lengths varied, and positions that were not drafted count as rejected"):
        assert read_acceptance(written(tmp_path, metrics(1000, 1900, [800, 600, 300], engines))) == acceptance


def test_a_result_of_vllm_and_its_counters_say_the_same(tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "num_drafts": 1000, "draft_tokens": 3000, "accepted_tokens": 1700, "acceptance_rate": 56.67,
        "per_position_acceptance_rates": [0.8, 0.6, 0.3],
    }  # fmt: skip
    result = json.dumps({f"spec_decode_{name}": value for name, value in keys.items()} | {"ttfts": [0.1]}, indent=1)
    with pytest.warns(Note):
        of_result = read_acceptance(written(tmp_path, result, "bench.json"))
    with pytest.warns(Note):
        assert of_result == read_acceptance(written(tmp_path, metrics(1000, 3000, [800, 600, 300])))


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.85, 1.0])
def test_totals_alone_are_the_rate_that_accepts_as_many(tmp_path: Path, rate: float) -> None:
    totals = {"num_drafts": 10**6, "draft_tokens": 4 * 10**6, "accepted_tokens": 10**6 * (expected_tokens(rate, 4) - 1)}
    text = json.dumps({f"spec_decode_{name}": value for name, value in totals.items()})
    with pytest.warns(Note, match="1,000,000 drafts of up to 4 tokens"):
        assert read_acceptance(written(tmp_path, text)).acceptance_rate == pytest.approx(rate, abs=1e-4)


def test_recorded_rounds_are_replayed(tmp_path: Path) -> None:
    lists = written(tmp_path, "[4, 0, 2]\n[1]\n", "lists.jsonl")
    response = {"metrics": {"speculative_decoding": {"per_step_accepted": [4, 0, 2]}}}
    one = written(tmp_path, json.dumps(response) + "\n", "one.jsonl")
    two = written(tmp_path, (json.dumps(response) + "\n") * 2, "two.jsonl")
    for path in (lists, one, two):
        assert read_acceptance(path) == Acceptance(acceptance_trace=path)
        pdvsim.run(arch="colocated", acceptance_from=path, **SMALL)


def test_a_run_repeats_what_another_run_says_of_its_drafts(tmp_path: Path) -> None:
    """Through the file of `pdvsim run`, which has vLLM's keys: as many tokens per round, at each position."""
    path = tmp_path / "run.json"
    argv = ["run", "--arch", "colocated", "--pair", EAGLE3, "--num-speculative-tokens", "4", "-o", str(path)]
    flags = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main([*argv, *flags]) == 0
    recorded = json.loads(path.read_text())
    with pytest.warns(Note, match="accepted by position"):
        again = pdvsim.run(
            arch="colocated", pair=EAGLE3, num_speculative_tokens=4, acceptance_from=str(path), seed=7, **SMALL
        )
    rates = recorded["spec_decode_per_position_acceptance_rates"]
    assert again.metrics["spec_decode_per_position_acceptance_rates"] == pytest.approx(rates, abs=0.03)


@pytest.mark.parametrize(("text", "says"), [
    ("", "has no count of drafts"),
    (metrics(10, 20, [15, 1]), "more tokens accepted than drafted"),
    ('{"completed": 3}', "spec_decode_num_drafts: is None"),
    ('{"spec_decode_num_drafts": 0, "spec_decode_draft_tokens": 0, "spec_decode_accepted_tokens": 0}', "drafted"),
    ('{"spec_decode_num_drafts": 1', "is not JSON"),
    ("[1, 2, -3]", "item 2 is -3"),
])  # fmt: skip
def test_what_tells_no_acceptance_is_one_line(
    tmp_path: Path, refused: Callable[..., str], text: str, says: str
) -> None:
    path = written(tmp_path, text)
    error = refused(["run", "--num-prompts", "2", "--acceptance-from", path])
    assert says in error
    assert path in error


@pytest.mark.parametrize(("flags", "says"), [
    ("run --acceptance-from {} --acceptance-rate 0.5", "mutually exclusive"),
    ("run --acceptance-from {} --acceptance-model sharegpt-eagle3", "mutually exclusive"),
    ("run --acceptance-from {} --pair suffix:llama-3.1-8b", "acceptance of suffix drafts"),
    ("advise --model llama-3.1-8b --request-rate 2 --acceptance-from {}", "name it with --drafter"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, says: str
) -> None:
    path = written(tmp_path, metrics(1000, 3000, [800, 600, 300]))
    assert main(flags.format(path).split()) == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


def asked(options: dict[str, Any]) -> Experiment:
    given = build(RunOptions, options)
    return given.experiment(given.arch)


def test_the_default_is_what_was_recorded_of_the_drafter() -> None:
    assert asked({"pair": EAGLE3}).acceptance.acceptance_model == "sharegpt-eagle3"
    assert asked({"pair": PAIR}).acceptance == Acceptance()
    assert asked({"pair": EAGLE3, "acceptance_rate": 0.6}).acceptance == Acceptance()
    spread = {"pair": PAIR, "acceptance_concentration": 5.0}
    assert asked(spread).acceptance == Acceptance(0.6, 5.0)
    assert usual_acceptance("ngram:llama-3.1-8b", Traffic("random")).acceptance_model == "sharegpt-ngram"
    assert usual_acceptance("mtp-llama-3.1-8b:llama-3.1-8b", Traffic()) == Acceptance()


# tokens per round at k=7, as printed
MTP = {"deepseek-v3": 3.18, "glm-4.5-air": 1.84, "glm-4.6": 1.84, "mimo-7b": 2.06}


@pytest.mark.parametrize("target", MTP)
def test_the_acceptance_of_a_models_own_mtp_is_the_published_one_and_its_source_is_named(target: str) -> None:
    for name in (target, f"{target}-fp8") if target != "deepseek-v3" else (target,):
        experiment = asked({"model": name, "drafter": "mtp"})
        assert experiment.server.pair == f"mtp-{name}:{name}"
        assert mean_tokens(experiment.acceptance, 7) == pytest.approx(MTP[target], abs=0.03)
        assert can_load("mtp", name)
        [note] = acceptance_notes([replace(experiment, arch="colocated")])
        assert note.startswith("acceptance of mtp as published: ")
        assert re.search("issue 109|pull request", note)


def test_a_column_of_the_requests_file_comes_before_a_recording(tmp_path: Path) -> None:
    path = written(tmp_path, "prompt_tokens,output_tokens,acceptance\n10,20,0.9\n", "own.csv")
    own = Traffic("custom", path, num_prompts=1)
    assert usual_acceptance(EAGLE3, own) == Acceptance()
    without = written(tmp_path, "prompt_tokens,output_tokens\n10,20\n", "plain.csv")
    assert usual_acceptance(EAGLE3, Traffic("custom", without, num_prompts=1)).acceptance_model == "sharegpt-eagle3"


# pdvsim acceptance ---------------------------------------------------------------------------------------------------


def rows(capsys: pytest.CaptureFixture[str], *words: str) -> dict[tuple[str, str], dict[str, str]]:
    assert main(["acceptance", "--json", *words]) == 0
    listed = json.loads(capsys.readouterr().out)["tokens_per_round"]
    return {(row["drafter"], row["task"]): row for row in listed}


def test_tokens_per_round_are_those_of_runs(capsys: pytest.CaptureFixture[str]) -> None:
    listed = rows(capsys)["eagle3", "sharegpt"]
    run = pdvsim.run(model="llama-3.1-8b", drafter="eagle3", num_speculative_tokens=4, num_prompts=300)
    assert run.metrics["spec_decode_acceptance_length"] == pytest.approx(float(listed["k=4"]), rel=0.04)


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
