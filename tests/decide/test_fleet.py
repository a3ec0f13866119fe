"""Contenders other than architectures: the same number of GPUs used otherwise, and who drafts for a model."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pdvsim
from pdvsim.bench.run import run as run_points
from pdvsim.bench.sweep import Point
from pdvsim.cli.advise import AdviseCommand
from pdvsim.cli.map import MapCommand
from pdvsim.cli.run import RunCommand
from pdvsim.common.commandline import parse
from pdvsim.common.options import build
from pdvsim.decide.advice import Advice
from pdvsim.decide.advise import advise
from pdvsim.decide.error import lead_error
from pdvsim.decide.figures import flips_figure
from pdvsim.decide.fleet import ARCHS, SPLITS, drafters, fleet_name, fleets
from pdvsim.decide.runs import Bench, keeps_up, mean_output_tokens, without_band
from pdvsim.decide.surroundings import equivalent_rate
from pdvsim.decide.winners import WinnerMap, draw_map
from pdvsim.sim.config import Acceptance, Arch, Experiment, Hardware, Server, Traffic
from pdvsim.sim.engines.served import Block, served_as, unknown_head
from pdvsim.sim.engines.vllm import VLLM
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.models.presets import PRESETS, can_load
from pdvsim.sim.relevance import applicable
from pdvsim.sim.run import simulate
from pdvsim.sim.workload.usual import drafter_name
from pdvsim.view.setting import acceptance_source

SETTLED = {"num_speculative_tokens": 4, "max_num_seqs": 128, "max_num_batched_tokens": 2048}
SHORT = {"dataset_name": "random", "input_len": 64, "output_len": 32}
PRICED = {"request_rate": 2.0, "gpus": 2, "gpu_hour_usd": 4.0, "num_prompts": 24, "jobs": 1}


LARGE, MIXTURE = Server("llama-3.2-1b:llama-3.1-70b"), Server("none:qwen3-235b-a22b-fp8")
HEAD = Server("llama-3.1-8b", drafter="eagle3")
FLEETS = [  # of a server's architectures on so many GPUs
    (Server(), ARCHS, 2, "2x autoregressive, autoregressive tp2, 2x colocated, colocated tp2, 2x pd, pd 1p1d, 2x pdv, "
                         "pdv on 1+1, pdv-ahead on 1+1"),
    (Server(), ARCHS, 3, "3x autoregressive, 3x colocated, 3x pd, pd 1p2d, pd 1p1d tp1+2, pd 2p1d, pd 1p1d tp2+1, "
                         "3x pdv, pdv on 1+2, pdv-ahead on 1+2"),
    # 236 GB, so that two H200s hold it; a rank has a copy of all but the experts
    (MIXTURE, ("autoregressive",), 4, "2x autoregressive tp2, 2x autoregressive tp2 ep, 2x autoregressive dp2 ep, "
                                      "autoregressive tp4, autoregressive tp4 ep, autoregressive dp4 ep"),
    # no H200 holds 70B of 2 bytes alone: two GPUs are one group, and four are two groups or one
    (LARGE, ("colocated", "pdv-ahead"), 4, "2x colocated tp2, colocated tp4, pdv-ahead on 2+2"),
    (Server("qwen2-1.5b:qwen2.5-72b"), ("colocated",), 8, "4x colocated tp2, 2x colocated tp4, colocated tp8"),
    # a head stays with its target
    (HEAD, ("colocated", "pd", "pdv", "pdv-ahead"), 2, "2x colocated, colocated tp2, 2x pd, pd 1p1d, 2x pdv"),
]  # fmt: skip


@pytest.mark.parametrize(("server", "archs", "gpus", "names"), FLEETS)
def test_every_fleet_has_as_many_gpus(server: Server, archs: tuple[Arch, ...], gpus: int, names: str) -> None:
    base = Experiment("colocated", server=server)
    ways = fleets(base, archs, gpus)
    assert ", ".join(fleet.name for fleet in ways) == names
    for fleet in ways:
        experiment = fleet.of(base)
        assert fleet.gpus(base) == gpus
        assert bool(experiment.hardware.place) == (experiment.placement.gpus > 1)
        assert fleet_name(experiment) == fleet.name


@pytest.mark.parametrize(("prompt", "output", "prefill"), [(8000, 50, (5, 7)), (100, 1000, (1, 2))])
def test_the_splits_compared_follow_the_load(prompt: int, output: int, prefill: tuple[int, int]) -> None:
    """Eight GPUs near their limit: long prompts need most of them to prefill, long answers few.

    The best of the splits compared is as good as the best of all, simulated with one GPU per engine.
    """
    traffic = Traffic("random", num_prompts=160, input_len=prompt, output_len=output, max_concurrency=160)
    base = Experiment("pd", traffic, server=Server("none:llama-3.1-8b"), hardware=Hardware(band=False))
    chosen = [way.of(base) for way in fleets(base, ("autoregressive", "pd"), 8) if way.of(base).hardware.disaggregate]
    assert len(chosen) == SPLITS
    gpus = [way.hardware.groups()[0] * way.sides.prefill.gpus for way in chosen if way.sides is not None]
    assert prefill[0] <= gpus[0] <= prefill[1]

    def speed(candidate: Experiment) -> float:
        return float(summarise(simulate(applicable(candidate)))["output_throughput"])

    every = [replace(base, hardware=replace(base.hardware, disaggregate=f"{x}p{8 - x}d")) for x in range(1, 8)]
    assert max(map(speed, chosen)) >= 0.95 * max(map(speed, every))


def test_shards_of_a_drafter_divide_its_heads() -> None:
    """Of twelve, which eight GPUs do not."""
    ways = fleets(Experiment(server=Server("qwen2-1.5b:qwen2.5-72b")), ("colocated",), 8)
    assert [way.hardware.draft_tensor_parallel_size for way in ways] == [None, None, 1]


@pytest.mark.parametrize(
    ("server", "hardware", "archs", "refusal"),
    [
        (Server(), Hardware(), ("pdv-unified",), "two ways"),
        (Server(), Hardware(replicas=2), ARCHS, "leave out --place"),
        (Server(), Hardware(tensor_parallel_size=2), ARCHS, "leave out --place"),
        (LARGE, Hardware(gpu="l4"), ARCHS, "2 GPUs"),
        (LARGE, Hardware(), ("autoregressive", "pdv-ahead"), "two ways"),
    ],
)
def test_what_no_fleet_can_be_made_of(
    server: Server, hardware: Hardware, archs: tuple[Arch, ...], refusal: str
) -> None:
    with pytest.raises(ValueError, match=refusal):
        fleets(Experiment(server=server, hardware=hardware), archs, 2)


@pytest.fixture(scope="module")
def drawn() -> WinnerMap:
    loads = {"concurrency": (1, 32), "acceptances": (0.9,), "num_prompts": 32}
    given = {"arch": ("pdv", "pdv-ahead"), "gpus": 2, "num_runs": 2, "jobs": 1, **loads}
    options = build(MapCommand, given | SHORT | SETTLED)
    return draw_map(options.question(), Bench(1, prompts=32))


def test_drafting_ahead_leads_for_few_and_replicas_for_many(drawn: WinnerMap) -> None:
    """At one request at a time a second server is idle; at many it doubles what is served."""
    assert drawn.grid.archs == ("2x pdv", "pdv on 1+1", "pdv-ahead on 1+1")
    assert [cell.winner for cell in drawn.cells] == ["pdv-ahead on 1+1", "2x pdv"]
    assert set(drawn.points["fleet"]) == set(drawn.grid.archs)


@pytest.fixture(scope="module")
def advice() -> Advice:
    given = {"arch": ("colocated", "pdv-ahead"), "num_runs": 5, "budget": 400, "acceptance_rate": 0.8}
    options = build(AdviseCommand, given | PRICED | SHORT | SETTLED)
    return advise(options.question(), Bench(1, prompts=24))


def test_advice_on_two_gpus_is_by_latency_and_by_cost(advice: Advice) -> None:
    ask, best = advice.question, advice.recommended
    assert ask.name(best) in ("colocated tp2", "pdv-ahead on 1+1")  # no significant difference between these two
    assert advice.cheapest == "1x colocated"
    document = advice.report().document
    assert document["recommendation"]["name"] == ask.name(best)
    for finalist in (one for one in document["candidates"] if "hourly" in one):
        rows = advice.finals.rows[finalist["name"]]
        assert all(map(keeps_up, rows))  # so that all requests that are sent are delivered
        traffic = (replace(ask.base.traffic, num_prompts=24, seed=row["seed"]) for row in rows)
        sampled = [mean_output_tokens(one) for one in traffic]
        hours = [1e6 / 3600 / (2.0 * tokens) for tokens in sampled]
        cost = finalist["per_million_output_tokens"]
        assert finalist["hourly"] == 4.0 * finalist["gpus"]
        assert cost.mean == pytest.approx(finalist["hourly"] * sum(hours) / len(hours))
    simulate(replace(advice.finalists["pdv-ahead on 1+1"], scoring=ask.base.scoring))  # no option of it does nothing


def test_fleets_have_a_price_per_conversation() -> None:
    given = {"arch": ("colocated",), "num_runs": 2, "budget": 12, "random_range_ratio": 0.0, "num_turns": 3}
    options = build(AdviseCommand, PRICED | SHORT | SETTLED | given | {"input_len": 20})
    advice = advise(options.question(), Bench(1))
    for finalist in (one for one in advice.candidates if "hourly" in one):
        million, talk = finalist["per_million_output_tokens"], finalist["per_conversation"]
        assert talk.mean == pytest.approx(million.mean * 3 * 32 / 1e6)


def test_advice_on_two_gpus_has_the_parts_of_that_on_one(advice: Advice) -> None:
    """Commands, expected figures, where it flips and what could go wrong, of the fleet recommended."""
    best, text = advice.recommended, str(advice)
    parts = ("Recommendation", "Asked", "Candidates", "Why", "Expected", "Where that changes", "To run it")
    assert all(f"\n{part}" in f"\n{text}" for part in parts)
    flips = advice.flips[-1]
    assert flips.axis == "load"
    assert advice.best in flips.probes[flips.here].values
    assert flips.sides == (-1, 1)
    assert len(flips_figure(advice).axes) == len(advice.flips)
    vllm, sglang, ours, real = advice.deployment
    assert "--tensor-parallel-size 2" in vllm.text
    assert "--tensor-parallel-size 2" in sglang.text
    assert parse(RunCommand, shlex.split(ours.text)[2:]).experiment == best
    assert "one GPU" in real.notes[0]


def test_a_fleet_of_one_card_is_judged_by_its_own_error() -> None:
    """What is not known of the L4 is no reason to doubt a lead between two fleets of H200s."""
    ways = {way.name: way.of(Experiment()) for way in fleets(Experiment(), ("colocated", "pdv-ahead"), 2)}
    split = ways["pdv-ahead on 1+1"]
    ways["pdv-ahead on l4+1"] = replace(split, hardware=replace(split.hardware, cards=("l4", "h200")))
    off = {name: lead_error(mine, "output_throughput") for name, mine in ways.items()}
    assert off["2x colocated"] == off["pdv-ahead on 1+1"] < off["colocated tp2"] < off["pdv-ahead on l4+1"]


MTP = {  # presets with MTP layers, by their makers' config.json
    "deepseek-v3", "deepseek-v3.2", "deepseek-v4-flash", "deepseek-v4-pro", "glm-4.5-air", "glm-4.6", "glm-5",
    "glm-5.2", "mimo-7b", "mimo-v2-flash", "nemotron-3-super-120b-a12b", "nemotron-3-ultra-550b-a55b",
    "qwen3-next-80b-a3b", "qwen3.5-9b", "qwen3.5-27b", "qwen3.5-35b-a3b", "qwen3.5-122b-a10b", "qwen3.5-397b-a17b",
}  # fmt: skip
THREE = ("autoregressive", "colocated", "pdv")
FIGURES = ("output_throughput", "mean_ttft_ms", "mean_e2el_ms", "foundation", "total_output_tokens")


@pytest.mark.parametrize(
    ("target", "pair"),
    [
        ("llama-3.1-8b", "llama-3.2-1b:llama-3.1-8b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.2-1b:llama-3.3-70b"),
        ("gemma-7b", "gemma-2b:gemma-7b"),
        ("qwen3-8b", "qwen3-0.6b:qwen3-8b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-0.6b:qwen3-30b-a3b"),
        ("qwen3-30b-a3b-fp8", "qwen3-0.6b:qwen3-30b-a3b-fp8"),
        ("gpt-oss-120b", "eagle3-gpt-oss-120b:gpt-oss-120b"),  # the 20b takes as many weights per token, but for 30%
        ("mixtral-8x7b", "eagle3-mixtral-8x7b:mixtral-8x7b"),  # no smaller one of its tokens is known
        ("tinyllama-1.1b", "eagle3-tinyllama-1.1b:tinyllama-1.1b"),
    ],
)
def test_a_target_alone_has_its_natural_drafter(target: str, pair: str) -> None:
    assert Server(target).pair == pair


def test_a_draft_model_that_is_not_known_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"mixtral-8x7b.*--pair"):
        Server("mixtral-8x7b", drafter="model")


def command(experiment: Experiment) -> Block:
    """The vLLM server of an experiment that it can serve."""
    return VLLM.commands(served_as(experiment))[0]


def test_a_mixture_on_many_gpus_may_spread_its_experts_over_several_nodes() -> None:
    """Ranks of 16 and more compete where they divide the GPUs; the deploy lines say that they need machines."""
    base = Experiment("colocated", Traffic(), server=Server("none:deepseek-v3"), hardware=Hardware(engine="sglang"))
    ways = {way.name: way.of(base) for way in fleets(base, ("autoregressive",), 32)}
    assert {"2x autoregressive dp16 ep", "autoregressive dp32 ep", "4x autoregressive dp8 ep"} <= set(ways)
    noted = {name: "on several machines" in " ".join(command(one).notes) for name, one in ways.items()}
    assert noted["autoregressive dp32 ep"]
    assert not noted["4x autoregressive dp8 ep"]
    dense = replace(base, server=Server("none:llama-3.1-70b"))
    assert not any("dp" in way.name for way in fleets(dense, ("autoregressive",), 32))


def test_everyone_competes_once_in_each_architecture() -> None:
    base = Experiment("colocated", Traffic(), server=Server("llama-3.1-8b"))
    ways = drafters(base, "llama-3.1-8b", THREE, None)
    drafting = [f"{arch} with {who}" for who in ("llama-3.2-1b", "eagle3", "ngram") for arch in THREE[1:]]
    assert {way.name for way in ways} == {"autoregressive", *drafting}
    assert len(ways) == 7
    for way in ways:
        assert way.named(way.of(base)) == way.name


@pytest.mark.parametrize("target", [*PRESETS, "llama-3.1-8b-fp8", "Qwen/Qwen3-8B"])
def test_everyone_who_competes_can_be_deployed(target: str) -> None:
    base = Experiment("colocated", Traffic(), server=Server(target))
    ways = [way for way in drafters(base, target, ("colocated",), None) if way.pair is not None]
    assert {unknown_head(way.of(base)) for way in ways} == {""}
    for way in ways:
        block = command(way.of(base))
        assert "--speculative-config" in block.text
    assert ("colocated with mtp" in {way.name for way in ways}) == (target in MTP)
    assert any(way.name == "colocated with ngram" for way in ways)


def test_a_models_own_mtp_layers_are_known_by_its_configuration(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": False,
    }  # fmt: skip
    path = tmp_path / "config.json"
    for layers, drafts in ((None, False), (0, False), (1, True)):
        path.write_text(json.dumps(config | ({} if layers is None else {"num_nextn_predict_layers": layers})))
        for name in (str(path), str(tmp_path)):
            assert can_load("mtp", name) is drafts
            assert not can_load("eagle3", name)
    assert Server(str(tmp_path)).pair == f"mtp-{tmp_path}:{tmp_path}"
    assert Server("deepseek-v3").pair == "mtp-deepseek-v3:deepseek-v3"


@pytest.mark.parametrize(
    ("named", "note"),
    [
        (
            {"model": "mixtral-8x7b", "drafter": "eagle3", "tensor_parallel_size": 2, "acceptance_rate": 0.9},
            "hypothetical: no EAGLE-3 head of mixtral-8x7b is known",
        ),
        (
            {"model": "qwen3-8b", "drafter": "eagle3"},
            r"recorded with Llama-3.1-8B \(not with qwen3-8b\): sharegpt-eagle3",
        ),
        ({"model": "mimo-7b", "drafter": "mtp"}, "note: .*mtp.* published: .*25136"),
        ({"model": "mimo-7b", "drafter": "mtp", "acceptance_rate": 0.8}, None),
        ({"model": "llama-3.1-8b", "drafter": "eagle3"}, None),
    ],
)
def test_an_acceptance_that_was_not_measured_is_named_in_the_verdict(named: dict[str, Any], note: str | None) -> None:
    load = {"concurrency": 1, "num_prompts": 8, "num_runs": 2, "budget": 9, "jobs": 1, "num_speculative_tokens": 1}
    verdict = str(pdvsim.advise(**named, arch=["autoregressive", "colocated"], **load)).partition("Asked\n")[0]
    assert re.search(note, verdict) if note else "note:" not in verdict


@pytest.mark.parametrize(("rate", "k"), [(0.3, 1), (0.6, 3), (0.8, 5)])
def test_the_rate_that_stands_for_a_recording_is_that_of_its_rounds(rate: float, k: int) -> None:
    """Leviathan's law the other way round: runs with a rate give it back."""
    traffic = Traffic("random", num_prompts=60, input_len=32, output_len=200, max_concurrency=8)
    server = Server("eagle3-llama-3.1-8b:llama-3.1-8b", num_speculative_tokens=k)
    rows = Bench(1).rows([Experiment("colocated", traffic, Acceptance(rate), server)])
    assert equivalent_rate(rows) == pytest.approx(rate, abs=0.02)


def test_acceptance_is_recorded_or_reported_as_assumed() -> None:
    base = Experiment("colocated", Traffic("random", input_len=128), server=Server("llama-3.1-8b"))
    ways = [way.of(base) for way in drafters(base, "llama-3.1-8b", THREE, None)]
    texts = {f"{drafter_name(way.server.pair)}: {acceptance_source(way.acceptance)}" for way in ways}
    assert texts == {
        "llama-3.2-1b: 0.6, assumed",
        "eagle3: recorded with Llama-3.1-8B, sharegpt-eagle3",
        "ngram: recorded with Llama-3.1-8B, sharegpt-ngram",
    }
    mine = drafters(base, "llama-3.1-8b", THREE, Acceptance(0.7))
    assert {acceptance_source(way.acceptance) for way in mine} == {"0.7, as given"}


def test_what_drafts_nothing_is_simulated_once_for_all_drafters() -> None:
    """Each row is the one of a bench of its own, under the name of its own pair."""
    traffic = Traffic("random", num_prompts=8, input_len=32, output_len=8, request_rate=20.0)
    pairs = ("llama-3.2-1b:llama-3.1-8b", "eagle3-llama-3.1-8b:llama-3.1-8b")
    servers = [Server(pair, num_speculative_tokens=k) for pair in pairs for k in (0, 2)]
    runs = [Experiment("colocated", traffic, server=server) for server in servers]
    bench = Bench(1)
    rows = bench.rows(runs)
    assert bench.runs == 3
    assert [row["pair"] for row in rows] == [run.server.pair for run in runs]
    for run, row in zip(runs, rows, strict=True):
        alone = run_points([Point("request_rate", 20.0, 0, without_band(run))])[0]
        assert {name: row[name] for name in FIGURES} == {name: alone[name] for name in FIGURES}


def test_an_assumed_acceptance_is_noted_for_its_drafter_and_only_where_it_decides() -> None:
    load = {"request_rate": 8, "num_prompts": 40, "num_runs": 2, "budget": 9, "jobs": 1}
    fixed = {"num_speculative_tokens": 2, "max_num_seqs": 32, "max_num_batched_tokens": 2048}
    advice = pdvsim.advise(model="llama-3.1-8b", arch=["autoregressive", "colocated"], **fixed, **load)
    note = "note: acceptance 0.6 is assumed for llama-3.2-1b:"
    finalists, noted = advice.finalists, {}
    for name in finalists:
        contest = replace(advice.finals.contest, best=name, alike=())
        alone = replace(advice, best=name, finals=advice.finals._replace(contest=contest))
        noted[name] = note in str(alone).partition("Asked\n")[0]
    assert noted == {name: "eagle3" not in name and "ngram" not in name for name in finalists}
    assert {"autoregressive", "colocated with eagle3"} <= set(noted)
    eagle3 = "colocated with eagle3"
    tie = replace(advice.finals.contest, best=eagle3, alike=("colocated with llama-3.2-1b",))
    assert note in str(replace(advice, best=eagle3, finals=advice.finals._replace(contest=tie))).partition("Asked\n")[0]
