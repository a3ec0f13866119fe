"""Digests of records, prices and answers: two states of the code that print the same lines behave alike.

    python tests/benchmarks/same.py [records] [prices] [answers] > before.txt      (then change the code, and compare)

Records: every architecture, under loads that reach the corners: one request, full batches, full KV caches, every
controller, lanes on several GPUs, hosts that poll, priorities. Prices: forwards of every model by name, on every card
and engine. Answers: small questions of every kind. Floats are compared to the last bit, so on one machine only; the
stages of a request are sums, whose order is free: they are compared to the nanosecond.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import numpy as np

import pdvsim
from pdvsim.bench.output import dumps
from pdvsim.sim.assembly import card_profile, covered
from pdvsim.sim.config import Experiment, Hardware, Server
from pdvsim.sim.models.presets import PRESETS
from pdvsim.sim.policies import ARCHS
from pdvsim.sim.prices.cards import GPUS

os.environ["PDVSIM_CACHE"] = ""  # answers are made, not remembered
STAGES = ("draft_s", "wait_s", "verify_s")
LOADS: dict[str, dict[str, Any]] = {
    "one": {"max_concurrency": 1, "num_prompts": 30},
    "eight": {"max_concurrency": 8, "num_prompts": 80},
    "sixty-four": {"max_concurrency": 64, "num_prompts": 200},
    "poisson": {"request_rate": 12, "num_prompts": 300},
    "bursts": {"request_rate": 20, "burstiness": 0.3, "num_prompts": 200, "input_len": 1200, "output_len": 100},
    "full cache": {"max_concurrency": 48, "num_prompts": 120, "kv_capacity_tokens": 6000, "kv_cache": "paged"},
    "sharegpt": {"dataset_name": "sharegpt", "request_rate": 10, "num_prompts": 150},
    "no profile of power": {"gpu": "A100-80GB", "request_rate": 6, "num_prompts": 150},
    "two servers": {"request_rate": 30, "num_prompts": 300, "replicas": 2, "router": "least-loaded"},
    "plain": {"max_concurrency": 16, "num_prompts": 80, "num_speculative_tokens": 0},
    "goodput": {"request_rate": 25, "num_prompts": 250, "controller": "goodput"},
    "feedback": {"request_rate": 25, "num_prompts": 250, "controller": "feedback"},
    "polling host": {"request_rate": 12, "num_prompts": 100, "host": "polling"},
    "notified host": {"request_rate": 12, "num_prompts": 100, "host": "python-threads"},
    "dynamic": {"request_rate": 30, "num_prompts": 250, "priority": "dynamic"},
    "preemptive": {"request_rate": 30, "num_prompts": 250, "priority": "preemptive"},
    "serial": {"request_rate": 20, "num_prompts": 150, "contention": "serial"},
    "max": {"request_rate": 20, "num_prompts": 150, "contention": "max"},
    "small batches": {"request_rate": 30, "num_prompts": 200, "max_num_seqs": 12, "max_num_batched_tokens": 256},
    "two gpus": {"request_rate": 12, "num_prompts": 150, "place": "verify=1"},
}


def digest(result: Any) -> str:
    """Of all rows of a run, column by column."""
    digested = sha256()
    for table in (result.requests, result.launches, result.deliveries):
        for name in sorted(table):
            column = np.ascontiguousarray(table[name])
            if name in STAGES:
                column = np.rint(1e9 * column).astype("i8")
            digested.update(f"{name} {column.dtype} {len(column)}".encode())
            digested.update(column.tobytes())
    return digested.hexdigest()[:16]


ENGINES = ("pdvsim", "vllm", "sglang", "trtllm")
SHAPES: tuple[dict[str, Any], ...] = (
    {"rows": 1}, {"rows": 7, "tokens": 4}, {"rows": 64, "tokens": 3}, {"rows": 256}, {"rows": 8, "steps": 4},
    {"rows": 0, "prompts": ((0, 512),), "first_tokens": 1}, {"rows": 16, "prompts": ((1024, 700), (0, 90))},
    {"rows": 12, "tokens": 5, "packed": 31},
)  # fmt: skip
CONTEXT = 3000.0  # cached tokens per row
TP = 4  # of models that do not fit one GPU
ONE = {"num_prompts": 60, "num_runs": 2}
CHAT = {"request_rate": 8, "goodput": ["ttft:500", "tpot:50"]}
TWO = {"arch": ["colocated", "autoregressive"]}
VLLM = {"model": "llama-3.1-8b", "gpu": "h100"}
QUESTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "advice": ("advise", ONE | CHAT | {"num_runs": 5, "budget": 60}),
    "advice, vllm": ("advise", ONE | VLLM | CHAT | TWO | {"budget": 40}),
    "advice, tight": ("advise", ONE | VLLM | TWO | {
        "request_rate": 12, "goodput": ["p99_ttft:200", "tpot:20"], "budget": 40,
    }),
    "advice, sglang": ("advise", ONE | VLLM | TWO | {"engine": "sglang", "concurrency": 16, "budget": 40}),
    "advice, trtllm": ("advise", ONE | VLLM | TWO | {"engine": "trtllm", "concurrency": 4, "budget": 40}),
    "advice, throughput": ("advise", ONE | TWO | {"concurrency": 32, "objective": "throughput", "budget": 40}),
    "advice, batch": ("advise", TWO | {"num_prompts": 100, "num_runs": 2, "budget": 30}),
    "advice, experts": ("advise", ONE | TWO | {
        "model": "qwen3-30b-a3b-fp8", "drafter": "eagle3", "concurrency": 32, "budget": 30,
    }),
    "advice, two gpus": ("advise", ONE | TWO | {"gpus": 2, "concurrency": 8, "budget": 40}),
    "fleet": ("advise", ONE | VLLM | TWO | {
        "request_rate": 60, "goodput": ["p99_ttft:200", "tpot:20"], "budget": 60,
    }),
    "fleet, cost": ("advise", ONE | TWO | {
        "request_rate": 40, "goodput": ["tpot:12"], "gpu_hour_usd": 3.0, "budget": 60,
    }),
    "capacity": ("capacity", ONE | TWO | {"goodput": ["ttft:500", "tpot:20"]}),
    "capacity, pdv": ("capacity", ONE | {"arch": ["pdv"], "goodput": ["ttft:500", "tpot:50"]}),
    "capacity, vllm": ("capacity", ONE | VLLM | {"arch": ["colocated"], "goodput": ["ttft:500", "tpot:20"]}),
    "map": ("winner_map", ONE | TWO | {"concurrency": [1, 16], "num_runs": 2}),
    "map, pairs": ("winner_map", ONE | {
        "y": "size", "pairs": ["gemma-2b:gemma-7b"], "concurrency": [4], "against": "pd", "arch": ["pd", "pdv"],
    }),
    "draft table": ("draft_table", ONE | {"max_num_seqs": 32, "max_k": 4}),
    "draft table, vllm": ("draft_table", ONE | VLLM | {"drafter": "eagle3", "max_num_seqs": 32, "max_k": 4}),
    "draft table, sglang": ("draft_table", ONE | VLLM | {
        "engine": "sglang", "drafter": "eagle3", "max_num_seqs": 16, "max_k": 3,
    }),
    "draft table, trtllm": ("draft_table", ONE | VLLM | {
        "engine": "tensorrt-llm", "drafter": "eagle3", "max_num_seqs": 16, "max_k": 3,
    }),
}  # fmt: skip
PASSING = ("seconds", "spent_s", "date")  # of an answer, what differs from one time to the next


def records() -> Iterator[tuple[str, str]]:
    for name, load in LOADS.items():
        for arch in ARCHS:
            try:
                run = pdvsim.run(arch=arch, engine="pdvsim", pair="tinyllama-1.1b:llama-2-7b", **load)
                yield f"{name}, {arch}", digest(run.result)
            except ValueError as refusal:
                yield f"{name}, {arch}", f"refused: {refusal}"


def prices() -> Iterator[tuple[str, str]]:
    for card in GPUS:
        for engine in ENGINES:
            for model in PRESETS:
                for size in (1, TP):
                    name = f"{card} {engine} {model} tp{size}"
                    try:
                        yield name, _priced(card, engine, model, size)
                    except (KeyError, ValueError) as refusal:
                        yield name, f"refused: {refusal}"


def _priced(card: str, engine: str, model: str, size: int) -> str:
    hardware = Hardware(gpu=card, engine=engine, tensor_parallel_size=size)
    experiment = Experiment("autoregressive", server=Server(pair=f"none:{model}"), hardware=hardware)
    cost = covered(card_profile(hardware, card), experiment).cost_model(experiment.pair.target)
    rows = [cost.price(context=shape["rows"] * CONTEXT, **shape).at(shape["rows"] * CONTEXT) for shape in SHAPES]
    return sha256(repr([tuple(row) for row in rows]).encode()).hexdigest()[:16]


def answers() -> Iterator[tuple[str, str]]:
    for name, (kind, question) in QUESTIONS.items():
        try:
            document = json.loads(dumps(getattr(pdvsim, kind)(**question).report().document))
            yield name, sha256(json.dumps(_lasting(document), sort_keys=True).encode()).hexdigest()[:16]
        except ValueError as refusal:
            yield name, f"refused: {refusal}"


def _lasting(part: Any) -> Any:
    if isinstance(part, dict):
        return {name: _lasting(value) for name, value in part.items() if name not in PASSING}
    return [_lasting(value) for value in part] if isinstance(part, list) else part


def main() -> None:
    warnings.simplefilter("ignore")
    parts = {"records": records, "prices": prices, "answers": answers}
    for part in sys.argv[1:] or parts:
        for name, line in parts[part]():
            print(f"{part:>8} {name:<50} {line}", flush=True)


if __name__ == "__main__":
    main()
