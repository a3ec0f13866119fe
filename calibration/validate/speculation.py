"""Measured pairs of servers, without and with speculation, against simulations of both.

`data/speculation/pairs.csv` has published pairs with their sources; `data/h200/vllm` and
`data/h200/sglang` benches of our own. Both sides
are simulated as closed loops of the stated concurrency with the pair's engine, version and card. Where a source
states no acceptance by position, every position is accepted alike, so that the stated tokens per round result. EAGLE-1
heads are simulated as MTP layers: one layer that joins state and embedding, and the target's output projection.

A tree is simulated as a chain of as many steps with the tree's acceptance length, whose forwards are priced as the
tree's: the verify over `verified_tokens` per row, and each step of the drafter after the first over `topk` rows per
request.

Rows marked held_out are a test: no constant may be fitted to them.

Not modelled: answers that are much longer than others. Qwen3-30B-A3B's runs at 32 and 64 requests had few requests
running most of the time: their plain throughput is a sixth of what the engine reaches with all.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from scipy.optimize import brentq

from pdvsim.bench.join import Joined, grouped
from pdvsim.calibration.validate.table import cell, error_table
from pdvsim.sim.config import Acceptance, Experiment, Hardware, Server, Traffic
from pdvsim.sim.core import ServingEngine
from pdvsim.sim.engines.profiles import engine_profile, serving
from pdvsim.sim.limits import MAX_DRAFT
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.models.presets import HEADS
from pdvsim.sim.models.specs import Pair
from pdvsim.sim.prices.profile import Profile
from pdvsim.sim.relevance import applicable
from pdvsim.sim.run import simulate

DATA = Path(str(files("pdvsim.calibration"))) / "data"
ACCEPTED = 0.75  # share accepted at every position where no acceptance is published: DeepSeek-R1's MTP layer
SPREAD = 0.6  # of lengths, on both sides of their mean
SIDES, FIGURES = ("plain", "drafted"), ("tpot_ms", "throughput")
LEAST_REQUESTS, TURNS = 8, 4  # of a run: at least so many, and so many per client
CONCURRENCIES = (1, 8, 32, 128)  # up to which a group of rows reaches
BenchedEngine = Literal["vllm", "sglang"]  # whose servers were measured here
METHODS = {"draft_model": "model", "STANDALONE": "model", "EAGLE3": "eagle3"}  # the engines' names of drafters


class PairSide(NamedTuple):
    """One server and its load."""

    experiment: Experiment
    version: str
    topk: int = 0  # rows per request of a drafter's steps after the first: a tree; 0: a chain
    verified_tokens: int = 0

    @property
    def without(self) -> PairSide:
        """The same server without a drafter."""
        server = self.experiment.server
        server = replace(server, pair=f"none:{server.pair.partition(':')[2]}", num_speculative_tokens=0)
        plain = replace(self.experiment, server=server, acceptance=Acceptance())
        return PairSide(applicable(plain), self.version)


class MeasuredPair(NamedTuple):
    """One pair of servers, and what they reached."""

    method: str
    drafted: PairSide
    measured: dict[str, float]  # the speed-up, and the figures of both sides
    of_tpot: bool  # the speed-up is one of TPOT, else of throughput
    held_out: bool
    source: str
    setting: str  # what pairs that differ only in their draft length share

    @property
    def target(self) -> str:
        """Name of the target."""
        return self.drafted.experiment.server.pair.partition(":")[2]

    @property
    def hardware(self) -> Hardware:
        return self.drafted.experiment.hardware

    @property
    def k(self) -> int:
        """The draft length."""
        return self.drafted.experiment.longest_draft

    @property
    def clients(self) -> int:
        """Concurrent requests."""
        return self.drafted.experiment.traffic.max_concurrency or 1

    @property
    def method_class(self) -> str:
        """The method, with trees told from chains."""
        return f"{self.method} tree" if self.drafted.topk else self.method


PredictedPair = Joined[MeasuredPair]


def read_pairs() -> list[MeasuredPair]:
    """The published pairs, and those of our own benches."""
    with (DATA / "speculation" / "pairs.csv").open(encoding="utf-8", newline="") as file:
        published = [_published(row) for row in csv.DictReader(file)]
    return published + [pair for engine in get_args(BenchedEngine) for pair in _benched(engine)]


def _drafting(
    server: Server, engine: ServingEngine, card: str, rates: Sequence[float], load: dict[str, int], spread: float,
    **layout: Any,
) -> Experiment:  # fmt: skip
    """A server that drafts, in a closed loop of a load with lengths around their means."""
    traffic = Traffic(
        "random", num_prompts=load["n"], max_concurrency=load["c"], input_len=load["in"], output_len=load["out"],
        random_range_ratio=spread,
    )  # fmt: skip
    hardware = Hardware(card, engine=engine, band=False, gpu_memory_utilization=0.95, **layout)
    server = replace(server, max_num_seqs=256, max_num_batched_tokens=8192)
    return applicable(
        Experiment("colocated", traffic, Acceptance(synthetic_acceptance_rates=tuple(rates)), server, hardware)
    )


def _published(row: dict[str, str]) -> MeasuredPair:
    k, clients, drafter = int(row["k"]), int(row["concurrency"]), row["drafter"]
    length, layout = row["acceptance_length"], row["layout"]
    head = f"{drafter}-{row['target']}" if drafter in HEADS else drafter
    gpus = {"data_parallel_size" if layout.startswith("dp") else "tensor_parallel_size": int(layout[2:].split()[0])}
    experiment = _drafting(
        Server(f"{head}:{row['target']}", num_speculative_tokens=k), row["engine"], row["card"],  # type: ignore[arg-type]
        rates_of(float(length), k) if length else [ACCEPTED ** n for n in range(1, k + 1)],
        {"n": max(LEAST_REQUESTS, TURNS * clients), "c": clients, "in": int(row["input_len"]),
         "out": int(row["output_len"])},
        SPREAD, enable_expert_parallel=layout.endswith("ep"), **gpus,
    )  # fmt: skip
    of_tpot, known = row["unit"] == "TPOT ms", row["unit"] in ("TPOT ms", "tok/s")
    sides = [float(row[side] or "nan") if known else math.nan for side in SIDES]
    named = ("source", "version", "card", "layout", "target", "drafter", "concurrency", "topk", "dataset", "note")
    return MeasuredPair(
        "model" if drafter not in (*HEADS, "ngram") else drafter,
        PairSide(experiment, row["version"], int(row["topk"] or 0), int(row["verified_tokens"] or 0)),
        figures(float(row["speedup"]), *((side, math.nan) if of_tpot else (math.nan, side) for side in sides)),
        of_tpot, bool(row["held_out"]), row["source"], " ".join(row[name] for name in named),
    )  # fmt: skip


def _benched(engine: BenchedEngine) -> Iterator[MeasuredPair]:
    """Pairs of an engine's benches of one load; a pair is held out if one of the two is."""
    lines = (DATA / "h200" / engine / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "c" in row["load"] and "prefix" not in row["load"]]
    usual = [row for row in rows if not re.search("eager|max-num-batched|no-async|disable-overlap", row["serve"])]
    bits = {row["serve"]: "-fp8" if "--quantization fp8" in row["serve"] else "" for row in usual}
    usual = [row | {"model": row["model"] + bits[row["serve"]]} for row in usual]
    alone = [row for row in reversed(usual) if row["speculation"] is None]
    plain = {(row["model"], row["bench"]): row for row in alone}  # of several servers the first
    for row in usual:
        base, asked = plain.get((row["model"], row["bench"])), row["speculation"]
        if asked is None or base is None:
            continue
        method = METHODS.get(asked["method"], asked["method"])
        drafter = {"model": asked.get("model"), "ngram": "ngram"}.get(method, f"{method}-{row['model']}")
        server = Server(f"{drafter}:{row['model']}", num_speculative_tokens=asked["num_speculative_tokens"])
        experiment = _drafting(server, engine, "h200", asked["synthetic_acceptance_rates"], row["load"], 0.5)
        sides = [(one["mean_tpot_ms"], one["output_throughput"]) for one in (base, row)]
        yield MeasuredPair(
            method, PairSide(experiment, row["version"]), figures(sides[0][0] / sides[1][0], *sides), True,
            row["held_out"] or base["held_out"], f"calibration/data/h200/{engine}",
            f"{row['model']} {method} {row['bench']}",
        )  # fmt: skip


def rates_of(length: float, k: int) -> tuple[float, ...]:
    """Shares of drafts accepted at each position, if each is as likely to be accepted, that give a mean length."""
    if length >= k + 1:
        return (1.0,) * k
    rate = float(brentq(lambda p: sum(p**n for n in range(1, k + 1)) - (length - 1), 0.0, 1.0))
    return tuple(rate**n for n in range(1, k + 1))


def predicted(pair: MeasuredPair) -> PredictedPair:
    """Simulate both sides of a pair."""
    return joined(pair, (figures_of(pair.drafted.without), figures_of(pair.drafted)))


def joined(pair: MeasuredPair, sides: Sequence[Sequence[float]]) -> PredictedPair:
    """A pair with the TPOT and the throughput that are predicted for both sides."""
    plain, drafted = sides
    speedup = plain[0] / drafted[0] if pair.of_tpot else drafted[1] / plain[1]
    return Joined(pair, pair.measured, figures(speedup, *sides))


def figures(speedup: float, *sides: Sequence[float]) -> dict[str, float]:
    """The speed-up, and the figures of both sides under names of their own."""
    named = {f"{name}_{side}": value for side, those in zip(SIDES, sides, strict=True)
             for name, value in zip(FIGURES, those, strict=True)}  # fmt: skip
    return {"speedup": speedup} | named


def cost(pair: MeasuredPair) -> float:
    """What the simulation of a pair takes, roughly: its output tokens, those of ranks and of prompts step by step."""
    traffic, ranks = pair.drafted.experiment.traffic, pair.drafted.experiment.hardware.data_parallel_size
    return traffic.num_prompts * ((traffic.output_len or 0) + (traffic.input_len or 0) / 100) * (10 if ranks > 1 else 1)


@lru_cache(maxsize=4096)
def figures_of(side: PairSide) -> tuple[float, float]:
    """Simulate one side: its TPOT and its throughput."""
    metrics = summarise(simulate(side.experiment, profile=_profile(side)))
    return metrics["mean_tpot_ms"], metrics["output_throughput"]


def _profile(side: PairSide) -> Profile:
    """The profile of a side's engine and version, with a tree's forwards if it drafts one."""
    one = side.experiment
    profile = engine_profile(one.hardware.predicted_engine, one.hardware.gpu, side.version)
    profile = serving(profile, one.server.drafted_by if one.speculates else "none", None)
    covering = profile.covering(one.pair if one.speculates else Pair(one.pair.target, one.pair.target))
    return _as_tree(covering, side) if side.topk else covering


def _as_tree(profile: Profile, side: PairSide) -> Profile:
    """Return the same with a tree's forwards in place of a chain's, at the side's concurrency."""
    pair, traffic, steps = side.experiment.pair, side.experiment.traffic, side.experiment.longest_draft
    requests = traffic.max_concurrency or 1
    context = requests * ((traffic.input_len or 0) + (traffic.output_len or 0))
    target, drafter = profile.cost_model(pair.target), profile.cost_model(pair.draft)
    tokens = side.verified_tokens
    parts = -(-tokens // MAX_DRAFT)  # attention wider than was measured reads the cache once for each part
    chain, tree = target.price(requests, steps + 1), target.price(parts * requests, -(-tokens // parts))
    wider_s = tree.seconds(parts * context) - chain.seconds(context)
    one_s, many_s = (drafter.price(requests * rows_each).seconds_0 for rows_each in (1, side.topk))
    more_s = wider_s + (steps - 1) * (many_s - one_s)
    fit = profile.models[pair.target.name]
    knots = tuple((width, seconds + more_s * (width > 1)) for width, seconds in fit.width_knots)
    wider = replace(fit, width_knots=knots)
    return replace(profile, models=profile.models | {pair.target.name: wider})


def best_lengths(predictions: Iterable[PredictedPair], least: int = 3) -> list[dict[str, Any]]:
    """The best draft length of settings for which at least three were measured, 0 among them, and the predicted one.

    `loss` is the share of the speed of the measured best that the predicted one loses.
    """
    choices = []
    settings = grouped(predictions, lambda one: one.of.setting.replace(one.of.source, "", 1).strip())
    for setting, group in settings.items():
        measured, foreseen = (
            {0: 1.0} | {one.of.k: side["speedup"] for one, side in sides}
            for sides in ([(one, one.measured) for one in group], [(one, one.predicted) for one in group])
        )
        if len(measured) > least:
            best, chosen = max(measured, key=measured.__getitem__), max(foreseen, key=foreseen.__getitem__)
            loss = 1 - measured[chosen] / measured[best]
            choices.append({"setting": setting, "measured": best, "predicted": chosen, "loss": loss})
    return choices


def _concurrency(one: PredictedPair) -> str:
    groups = (f"up to {most}" for most in CONCURRENCIES if one.of.clients <= most)
    return next(groups, f"above {CONCURRENCIES[-1]}")


LABELS: dict[str, Callable[[PredictedPair], str]] = {
    "engine and method": lambda one: f"{one.of.hardware.engine} {one.of.method_class}",
    "draft length": lambda one: f"k={one.of.k}",
    "concurrency": _concurrency,
    "all": lambda one: "all",
}


def document(
    pairs: Sequence[MeasuredPair],
    sides: Mapping[int, Sequence[Sequence[float]]],
    failures: Mapping[int, str],
    held_out: bool,
) -> dict[str, Any]:
    """Errors of the speed-up, its sign, and of the figures of both sides, by group; the best draft lengths.

    `sides` are the figures that are predicted of pairs, by their number.
    """
    predictions = [joined(pairs[at], those) for at, those in sorted(sides.items())]
    metrics = ["speedup", *(f"{name}_{side}" for name in FIGURES for side in SIDES)]

    def cells(part: Sequence[PredictedPair]) -> dict[str, Any]:
        return {name: cell(part, name) for name in metrics} | {"signs": sum(map(has_sign, part))}

    return {
        "held_out": held_out,
        "pairs": [
            {
                "engine": one.of.hardware.engine, "version": one.of.drafted.version, "card": one.of.hardware.gpu,
                "pair": one.of.drafted.experiment.server.pair, "method": one.of.method_class, "k": one.of.k,
                "concurrency": one.of.clients, "measured": one.measured["speedup"],
                "predicted": one.predicted["speedup"], "source": one.of.source,
            }
            for one in predictions
        ],
        "by": error_table(predictions, LABELS, cells),
        "lengths": best_lengths(predictions),
        "failures": {pairs[at].setting: reason for at, reason in failures.items()},
    }  # fmt: skip


def has_sign(one: PredictedPair) -> bool:
    """Whether both say that speculation pays, or both that it does not."""
    return bool((one.predicted["speedup"] >= 1) == (one.measured["speedup"] >= 1))
