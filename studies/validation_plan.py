"""The plan of the validation runs, drawn before the first run: `python studies/validation_plan.py FOLDER`.

A balanced random draw of common settings and loads, with a fixed seed, written to FOLDER as plan.jsonl. Mixtures of
experts and 8-bit weights follow in experts.plan.jsonl, shared prefixes and conversations in prefixes.plan.jsonl.

Four blocks, each with every architecture once, so that a cut leaves a balanced set. A group (an architecture on one
pair, with its draft lengths and its prompt chunk) has four runs that differ in data set, load and acceptance and share
everything that takes time to prepare. Values of a factor are dealt from a shuffled deck that holds each equally often.
Request rates are shares of the simulated capacity. The number of requests is chosen so that a run takes some five
seconds in simulation.

A run is held out if its seed is a multiple of three.

Every second server that supports it uses `--async-scheduling`.

Drafters other than a model follow: eight servers of four runs, ShareGPT and chat at two closed loops and two rates,
with acceptance as it was measured for them.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pdvsim.calibration.validate.compare import capacity
from pdvsim.calibration.validate.served import ServedRun, write_runs
from pdvsim.common.commandline import command_line
from pdvsim.sim.assembly import models_of
from pdvsim.sim.config import Acceptance, ControllerName, Experiment, Hardware, Scoring, Server, Traffic
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.relevance import applicable
from pdvsim.sim.run import simulate
from pdvsim.sim.workload.requests import Workload

SEED = 22
FIRST_SEED = 5000  # of the first run
HELD_OUT = 3  # runs whose seed is a multiple of it
BLOCKS, RUNS, REPEATS = 4, 4, 12  # groups of an architecture, runs of a group, runs that are made twice
SECONDS = 5.0  # that a run is to take
ABOUT = (4.0, 7.0)  # which is near enough
LONGEST = 9.0  # that a closed loop may take
FEWEST, SLOWEST, MOST = 12, 6, 2000  # requests: at least, and of a server with few concurrent requests; at most
TRIES = 4  # to find how many take that long
KV_BYTES = 80e9  # that the longest requests of a full server may take
ARCHS = ("autoregressive", "baseline", "colocated", "pd", "pdv", "pdv-unified", "pdv-hybrid", "adaptive")
PAIRS = ("tinyllama-1.1b:llama-2-7b", "qwen2-1.5b:qwen2-7b", "llama-3.2-1b:llama-3.1-8b", "gemma-2b:gemma-7b",
         "tinyllama-1.1b:codellama-34b")  # fmt: skip
SCORING = Scoring(metric_percentiles=(90.0, 95.0, 99.0))
DATASETS = {"sharegpt": 4, "azure-conv": 3, "azure-code": 2, "long": 2, "longest": 2, "chat": 3}  # cards of the deck
LOADS: dict[str, int] = {"closed": 6, "0.5": 3, "0.8": 3, "0.95": 3, "bursty": 1, "batch": 1, "trace": 1}
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128)
ACCEPTANCES = (0.3, 0.45, 0.6, 0.75, 0.9, "recorded", "by position")
CONTROLLERS = {"fixed": 18, "feedback": 5, "goodput": 5}
DRAFTS = (0, 1, 2, 3, 4, 5, 6, 7, 8)
CHUNKS = (256, 512, 1024, 2048)
TRAFFIC = "../traffic"  # from the folder of the plan
BY_POSITION = (0.66, 0.43, 0.27, 0.18, 0.11, 0.07, 0.05, 0.04)  # EAGLE-3 on GSM8K, arXiv 2601.11580


ACCEPTANCE = Acceptance(acceptance_rate=0.7)  # where none is recorded
CHAT = Traffic("random", input_len=128, output_len=128, random_range_ratio=0.5)
DRAFTER_SEED, EXPERT_SEED, PREFIX_SEED = 7000, 8000, 9000  # of the first run of each list
SEATS = 64
DRAFTERS: tuple[tuple[str, Server], ...] = (
    ("colocated", Server("llama-3.1-8b", 3, "eagle3")), ("pdv", Server("llama-3.1-8b", 3, "eagle3")),
    ("colocated", Server("qwen2-7b", 2, "eagle3")), ("pd", Server("qwen2-7b", 3, "eagle3")),
    ("colocated", Server("llama-3.1-8b", 2, "mtp")), ("pd", Server("llama-3.1-8b", 1, "mtp")),
    ("colocated", Server("llama-3.1-8b", 4, "ngram")), ("pdv", Server("llama-3.1-8b", 4, "ngram")),
)  # fmt: skip
EXPERTS: tuple[tuple[str, Server], ...] = (
    ("colocated", Server("qwen3-30b-a3b", 3, "eagle3")), ("pdv", Server("qwen3-30b-a3b", 2, "eagle3")),
    ("colocated", Server("qwen3-30b-a3b", 0, "none")), ("pd", Server("qwen3-30b-a3b", 4, "ngram")),
    ("colocated", Server("qwen3-30b-a3b-fp8", 1, "eagle3")), ("pd", Server("qwen3-30b-a3b-fp8", 0, "none")),
    ("colocated", Server("llama-3.1-8b-fp8", 5, "eagle3")),
    ("pdv", Server("llama-3.2-1b:llama-3.1-8b-fp8", 3, kv_cache_dtype="fp8")),
    ("colocated", Server("mixtral-8x7b", 3, "ngram")),
)  # fmt: skip
USERS, RATES = ((1, 8, 16), (24, 32, 48)), (0.5, 0.8)

LLAMA, QWEN = "llama-3.2-1b:llama-3.1-8b", "qwen2-1.5b:qwen2-7b"
SMALL = 24_000  # tokens of a KV cache that does not hold all conversations
TALK = Traffic("random", input_len=128, output_len=96, random_range_ratio=0.5, num_turns=6, think_time_s=0.3)
AGENT = replace(TALK, prefix_len=1500, input_len=200, output_len=32, num_turns=8, think_time_s=0.1)
HALF = Traffic("prefix_repetition", input_len=256, output_len=96, prefix_len=256, num_prefixes=8)
MOSTLY = Traffic("prefix_repetition", input_len=128, output_len=64, prefix_len=1536, num_prefixes=4)
MANY = Traffic("prefix_repetition", input_len=128, output_len=64, prefix_len=1024, num_prefixes=24)
ALONE = Traffic("random", input_len=640, output_len=96)
PREFIXES: tuple[tuple[str, Server, int | None, tuple[tuple[Traffic, float], ...]], ...] = (
    # architecture, server, KV tokens, and traffic with its load: users of a closed loop, or a share of the capacity
    ("colocated", Server(LLAMA, 3), None, ((HALF, 16), (TALK, 24), (MOSTLY, 0.8))),
    ("colocated", Server(LLAMA, 0), None, ((MOSTLY, 32), (AGENT, 16), (ALONE, 16))),
    ("pdv", Server(LLAMA, 3), None, ((TALK, 16), (MOSTLY, 24))),
    ("colocated", Server(LLAMA, 3), SMALL, ((TALK, 48), (MANY, 12))),
    ("colocated", Server("llama-3.1-8b", 3, "eagle3"), None, ((AGENT, 16), (HALF, 0.8))),
    ("colocated", Server(QWEN, 2), None, ((MOSTLY, 16), (TALK, 32))),
    ("pd", Server(QWEN, 0), None, ((AGENT, 8), (HALF, 24))),
    ("pdv", Server(QWEN, 2), SMALL, ((TALK, 40), (MANY, 16))),
)


class Deck:
    """Deals values equally often, in a random order; shuffled again when it is empty."""

    def __init__(self, values: Sequence[Any], rng: random.Random) -> None:
        self._values, self._rng = list(values), rng
        self._left: list[Any] = []

    def deal(self, fits: Callable[[Any], bool] = lambda value: True) -> Any:
        """The next value that fits; skipped values stay in the deck."""
        while True:
            for value in self._left:
                if fits(value):
                    self._left.remove(value)
                    return value
            more = list(self._values)
            self._rng.shuffle(more)
            self._left += more


@dataclass
class Decks:
    """One deck for each factor."""

    datasets: Deck
    loads: Deck
    concurrencies: Deck
    acceptances: Deck
    controllers: Deck
    drafts: Deck
    chunks: Deck

    @classmethod
    def shuffled(cls, rng: random.Random) -> Decks:
        """All of them."""
        counted = [[value for value, n in cards.items() for _ in range(n)] for cards in (DATASETS, LOADS, CONTROLLERS)]
        return cls(
            Deck(counted[0], rng), Deck(counted[1], rng), Deck(CONCURRENCIES, rng), Deck(ACCEPTANCES, rng),
            Deck(counted[2], rng), Deck(DRAFTS, rng), Deck(CHUNKS, rng),
        )  # fmt: skip


def planned(folder: Path, say: Callable[[str], None] = lambda text: None) -> list[ServedRun]:
    """The whole plan, for a file in `folder`; each run is simulated a few times to find its rate and its length."""
    rng = random.Random(SEED)
    decks = Decks.shuffled(rng)
    archs, pairs = list(ARCHS), list(PAIRS)
    rng.shuffle(archs)
    rng.shuffle(pairs)
    seed, groups = FIRST_SEED, []
    for block in range(BLOCKS):
        chosen = [(pairs[(at + 2 * block) % len(pairs)], arch) for at, arch in enumerate(archs)]
        for pair, arch in sorted(chosen, key=lambda of: pairs.index(of[0])):  # models are created once per block
            group = _group(arch, pair, seed, decks, folder, early=block % 2 == 0)
            seed += RUNS
            groups.append(group)
            say(f"{len(groups)} of {BLOCKS * len(ARCHS)} groups: {arch}, {pair}")
    every = [run for group in groups for run in group]
    again = {rng.choice(every[part * len(every) // REPEATS : (part + 1) * len(every) // REPEATS]).id
             for part in range(REPEATS)}  # fmt: skip
    return [run for group in groups for run in (*group, *(replace(r, repeat=1) for r in group if r.id in again))]


def planned_servers(
    servers: Sequence[tuple[str, Server]],
    rates: Sequence[float],
    first_seed: int,
    folder: Path,
    say: Callable[[str], None] = lambda text: None,
) -> list[ServedRun]:
    """Chat and ShareGPT on each server, for a file in `folder`: two closed loops, then rates."""
    runs: list[ServedRun] = []
    for at, (arch, server) in enumerate(servers):
        server = replace(server, max_num_seqs=SEATS, max_num_batched_tokens=CHUNKS[at % 2 + 1])
        recorded = "ngram" if server.drafter == "ngram" else "eagle3"
        few, many = (users[at % 3] for users in USERS)
        loads = (few, many, *rates)
        turn = at % 3 if len(loads) == HELD_OUT else 0  # another load of each server is held out
        for load in (*loads[turn:], *loads[:turn]):
            seed = first_seed + len(runs)
            traffic, data = (Traffic(), "sharegpt") if (seed + at) % 2 else (CHAT, "gsm8k")
            known = server.drafter in ("eagle3", "mtp", "ngram")
            acceptance = Acceptance(acceptance_model=f"{data}-{recorded}") if known else ACCEPTANCE
            experiment = Experiment(arch, replace(traffic, seed=seed), acceptance, server, scoring=SCORING)
            runs.append(_run(experiment, load, folder))
        say(f"{len(runs)} runs: {server.drafter}, {server.pair}, {arch}")
    return runs


def planned_prefixes(folder: Path, say: Callable[[str], None] = lambda text: None) -> list[ServedRun]:
    """The plan of shared prefixes and conversations, for a file in `folder`."""
    runs: list[ServedRun] = []
    for arch, server, kv_tokens, loads in PREFIXES:
        server = replace(server, max_num_seqs=SEATS)
        for traffic, load in loads:
            traffic = replace(traffic, seed=PREFIX_SEED + len(runs))
            hardware = Hardware(kv_capacity_tokens=kv_tokens)
            runs.append(_run(Experiment(arch, traffic, ACCEPTANCE, server, hardware, scoring=SCORING), load, folder))
        say(f"{len(runs)} runs: {server.pair}, {arch}")
    return runs


def _run(experiment: Experiment, load: float, folder: Path) -> ServedRun:
    """A run of about five seconds under a load: users of a closed loop, or a share of the capacity."""
    if load < 1:
        rate = float(f"{load * capacity(_placed(experiment, folder)):.3g}")
        sized = _sized(experiment, folder, round(rate * SECONDS), round(rate * ABOUT[0]), request_rate=rate)
    else:
        turns = experiment.traffic.num_turns
        least = math.ceil(1.5 * load) * turns
        sized = _sized(experiment, folder, max(FEWEST, least), least, max_concurrency=int(load))
    held_out = experiment.traffic.seed % HELD_OUT == 0
    return ServedRun(command_line("realrun", sized), 0, held_out, {}, {}, folder)


def _group(arch: str, pair: str, seed: int, decks: Decks, folder: Path, early: bool) -> list[ServedRun]:
    """Runs of one server, with asynchronous scheduling if `early` is set and the server supports it."""
    drafts = arch != "autoregressive"
    controller: ControllerName = "fixed"
    if drafts:
        controller = decks.controllers.deal(lambda name: (arch, name) != ("baseline", "feedback"))
    server = Server(
        pair=pair,
        controller=controller,
        num_speculative_tokens=decks.drafts.deal() if drafts and controller == "fixed" else 4,
        max_speculative_tokens=5 if controller != "fixed" else Server.max_speculative_tokens,  # graphs of each length
        max_num_batched_tokens=decks.chunks.deal(),
        async_scheduling=early,  # `applicable` drops it where it does nothing
    )
    context = min(model.max_position_embeddings or 0 for model in models_of(Experiment(arch, server=server)))
    traffics = [_traffic(decks, context) for _ in range(RUNS)]
    unsized = [Experiment(arch, traffic, server=server, scoring=SCORING) for traffic in traffics]
    token_bytes = sum(model.kv_bytes_per_token for model in models_of(unsized[0]))
    runs = []
    for at, experiment in enumerate(unsized):
        kv_bytes = token_bytes * _longest(experiment, folder)
        seats = replace(server, max_num_seqs=max(n for n in CONCURRENCIES if n == 1 or n * kv_bytes <= KV_BYTES))
        traffic = replace(experiment.traffic, seed=seed + at)
        experiment = applicable(
            replace(experiment, server=seats, traffic=traffic, acceptance=_acceptance(decks, server))
        )
        experiment = _loaded(experiment, decks, folder)
        command = command_line("realrun", experiment)
        runs.append(ServedRun(command, 0, (seed + at) % HELD_OUT == 0, {}, {}, folder))
    return runs


def _traffic(decks: Decks, context: int) -> Traffic:
    """Lengths that fit into a pair's context, without arrivals."""
    short = context < 8000
    name = decks.datasets.deal(lambda name: name != "longest" or not short)
    if name == "sharegpt":
        return Traffic()
    if name == "chat":
        return CHAT
    if name in ("long", "longest"):
        most = 8000 if name == "longest" else 1900 if short else 2000
        return Traffic("random", input_len=most, output_len=100)
    return Traffic("azure", dataset_path=f"{TRAFFIC}/{name}{'.2k' if context < 8192 else ''}.csv")


def _acceptance(decks: Decks, server: Server) -> Acceptance:
    form = decks.acceptances.deal()
    if form == "recorded":
        return Acceptance(acceptance_trace=f"{TRAFFIC}/eagle3-sharegpt.jsonl")
    if form == "by position":
        return Acceptance(synthetic_acceptance_rates=BY_POSITION[: server.longest_draft])
    return Acceptance(acceptance_rate=form)


def _loaded(experiment: Experiment, decks: Decks, folder: Path) -> Experiment:
    """The experiment under a load, with enough requests for some five seconds."""
    azure = experiment.traffic.dataset_name == "azure"
    slow = experiment.base_arch == "baseline"  # few concurrent requests: bursts would be gaps
    load = decks.loads.deal(lambda name: (name != "trace" or azure) and (name != "bursty" or not slow))
    if load == "closed":
        return _closed(experiment, decks, folder)
    if load == "trace":
        return _sized(experiment, folder, 30, FEWEST, use_trace_timestamps=True)
    if load == "batch":
        places = experiment.server.max_num_seqs
        return _sized(experiment, folder, places, max(FEWEST, places // 4))
    most = capacity(_placed(experiment, folder))
    rate = float(f"{most * (0.7 if load == 'bursty' else float(load)):.3g}")
    more = {"burstiness": 0.25} if load == "bursty" else {}
    least = max(SLOWEST if slow else FEWEST, round(rate * ABOUT[0]))  # fewer would finish before the load builds up
    return _sized(experiment, folder, round(rate * SECONDS), least, request_rate=rate, **more)


def _closed(experiment: Experiment, decks: Decks, folder: Path) -> Experiment:
    """A closed loop, with fewer users if one and a half requests per user would take too long."""
    most = 8 if experiment.base_arch == "baseline" else experiment.server.max_num_seqs
    users = decks.concurrencies.deal(lambda users: users <= most)
    while True:
        least = math.ceil(1.5 * users)
        closed = _sized(experiment, folder, least, least, max_concurrency=users)
        if users == 1 or _duration_s(closed, folder) <= LONGEST:
            return closed
        users //= 2


def _sized(experiment: Experiment, folder: Path, first: int, least: int, **traffic: Any) -> Experiment:
    """The experiment with as many requests as fit into the time of a run, starting from `first`; at least `least`."""
    most = 300 if traffic.get("use_trace_timestamps") else MOST
    count = max(least, first)
    for _ in range(TRIES):
        tried = _with(experiment, num_prompts=count, **traffic)
        took_s = _duration_s(tried, folder)
        count = min(most, max(least, round(count * SECONDS / took_s)))
        if ABOUT[0] <= took_s <= ABOUT[1]:
            break
    return tried


def _with(experiment: Experiment, **traffic: Any) -> Experiment:
    return replace(experiment, traffic=replace(experiment.traffic, **traffic))


def _placed(experiment: Experiment, folder: Path) -> Experiment:
    """The experiment with paths relative to the plan's folder."""
    return applicable(ServedRun(command_line("realrun", experiment), 0, False, {}, {}, folder).experiment)


def _duration_s(experiment: Experiment, folder: Path) -> float:
    return float(summarise(simulate(_placed(experiment, folder)))["duration"])


def _longest(experiment: Experiment, folder: Path) -> int:
    """Tokens of the longest possible request."""
    traffic = _placed(_with(experiment, num_prompts=600), folder).traffic
    largest = Workload(traffic, Acceptance()).largest()
    return largest.prompt_tokens + largest.output_tokens


if __name__ == "__main__":
    plans = Path(sys.argv[1])
    drafters = planned_servers(DRAFTERS, RATES, DRAFTER_SEED, plans, print)
    write_runs(plans / "plan.jsonl", [*planned(plans, print), *drafters])
    write_runs(plans / "experts.plan.jsonl", planned_servers(EXPERTS, RATES[1:], EXPERT_SEED, plans, print))
    write_runs(plans / "prefixes.plan.jsonl", planned_prefixes(plans, print))
