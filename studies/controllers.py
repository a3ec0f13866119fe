"""Draft-length controllers against the best fixed length: `python studies/controllers.py FILE`.

With FILE.json it runs a grid of closed loops from several starting lengths. Each cell has the output tokens per second
from `FROM_S` to `TO_S` of simulated time, relative to the best fixed length (0 included), as means over seeds. Finished
cells are kept in the file; the whole grid takes about two hours of one core. With FILE.png it draws the draft length
after a step of load and after a step of acceptance. Request lengths vary by 30%, because requests of equal length
finish together if nothing is drafted.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pdvsim.sim.config import Acceptance, Arch, ControllerName, Experiment, Server, Traffic
from pdvsim.sim.core import KINDS, Request
from pdvsim.sim.records import Result
from pdvsim.sim.run import simulate
from pdvsim.sim.workload.requests import make_requests

PAIRS = ("tinyllama-1.1b:llama-2-7b", "qwen2-1.5b:qwen2-7b", "gemma-2b:gemma-7b", "llama-3.2-1b:llama-3.1-8b")
RATES = (0.3, 0.5, 0.6, 0.8, 0.9)
CONCURRENCY = {1: 45, 8: 250, 32: 700, 128: 1500}  # concurrency: number of requests
ARCHS: tuple[Arch, ...] = ("colocated", "pd", "pdv")
LENGTHS, STARTS = range(9), (0, 1, 4, 8)
TOKENS = 128  # mean length of prompts and outputs
FROM_S, TO_S = 2.0, 12.0
BAR, SEEDS = 0.97, 3


def speed(result: Result, from_s: float = FROM_S, to_s: float = TO_S) -> float:
    """Output tokens per second in a stretch of time that ends before the last request arrives."""
    to_s = min(to_s, float(result.requests["arrival_s"].max()))
    times, tokens = result.deliveries["time_s"], result.deliveries["tokens"]
    return float(tokens[(times > from_s) & (times <= to_s)].sum() / (to_s - from_s))


def cell(name: str) -> tuple[str, dict[str, Any]]:
    """Speeds of the fixed lengths, and those of goodput from each start over the best of them."""
    arch, pair, rate, concurrency = name.split()
    traffic = Traffic(
        "random", num_prompts=CONCURRENCY[int(concurrency)], input_len=TOKENS, output_len=TOKENS,
        random_range_ratio=0.3, max_concurrency=int(concurrency),
    )  # fmt: skip

    def mean_speed(controller: ControllerName, k: int) -> float:
        server = Server(pair, num_speculative_tokens=k, controller=controller)
        loads = [replace(traffic, seed=seed) for seed in range(SEEDS)]
        runs = (simulate(Experiment(arch, load, Acceptance(acceptance_rate=float(rate)), server)) for load in loads)
        return float(np.mean([speed(run) for run in runs]))

    speeds: dict[str, Any] = {"fixed": [mean_speed("fixed", k) for k in LENGTHS]}
    speeds["goodput"] = [mean_speed("goodput", k) / max(speeds["fixed"]) for k in STARTS]
    return name, speeds


def grid(out: Path) -> dict[str, Any]:
    """Compute every missing cell, and write each when it is done."""
    from joblib import Parallel, delayed

    cells: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    every = [" ".join(map(str, one)) for one in itertools.product(ARCHS, PAIRS, RATES, reversed(CONCURRENCY))]
    every.sort(key=lambda name: -int(name.split()[-1]))  # the longest first
    run = Parallel(n_jobs=-1, return_as="generator_unordered")
    for name, speeds in run(delayed(cell)(name) for name in every if name not in cells):
        cells[name] = speeds
        out.write_text(json.dumps(cells, indent=1))
        print(f"{len(cells)} of {len(every)}: {name}: {min(speeds['goodput']):.3f}", flush=True)
    return cells


def summary(cells: dict[str, Any]) -> str:
    """Throughput of goodput relative to the best fixed length, and the cells below the target."""
    ratios = {(cell, k): r for cell, by in cells.items() for k, r in zip(STARTS, by["goodput"], strict=True)}
    values = np.array(list(ratios.values()))
    below = sorted((r, cell, k) for (cell, k), r in ratios.items() if r < BAR)
    head = f"goodput: lowest {values.min():.3f}, median {np.median(values):.3f}"
    head += (
        f", {len(below)} of {len(values)} below {BAR}, in {len({cell for _, cell, _ in below})} of {len(cells)} cells"
    )
    return "\n".join([head, *(f"  {r:.3f}  {cell} from {k}" for r, cell, k in below)])


# steps --------------------------------------------------------------------------------------------------------------

STAGES: dict[str, list[tuple[int, float, float]]] = {  # requests, request rate, acceptance rate
    "Acceptance 0.8, 0.3, 0.8": [(400, 1e9, 0.8), (300, 1e9, 0.3), (400, 1e9, 0.8)],
    "Load 4, 100, 4 req/s": [(24, 4.0, 0.7), (560, 100.0, 0.7), (24, 4.0, 0.7)],
}


def staged(stages: Sequence[tuple[int, float, float]]) -> list[Request]:
    """The requests of several stages, one stage after another."""
    requests: list[Request] = []
    for seed, (count, per_s, rate) in enumerate(stages):
        traffic = Traffic(
            "random", num_prompts=count, request_rate=per_s, input_len=TOKENS, output_len=TOKENS, seed=seed
        )
        begins_s = requests[-1].arrival_s if requests else 0.0
        for request in make_requests(traffic, Acceptance(acceptance_rate=rate)):
            requests.append(Request(len(requests), begins_s + request.arrival_s, TOKENS, TOKENS, request.accept_runs))
    return requests


def served(stages: Sequence[tuple[int, float, float]], controller: ControllerName, k: int) -> Result:
    """The stages one after the other, in a closed loop of 32 whose requests all arrive at the start."""
    closed = stages[0][1] > 1e6
    count = sum(stage[0] for stage in stages)
    traffic = Traffic("random", num_prompts=count, max_concurrency=32 if closed else None)
    server = Server(PAIRS[0], num_speculative_tokens=k, controller=controller)
    return simulate(Experiment("pdv", traffic, server=server), requests=staged(stages))


def stage_of(stages: Sequence[tuple[int, float, float]]) -> np.ndarray[Any, Any]:
    return np.repeat(np.arange(len(stages)), [stage[0] for stage in stages])


def best_lengths(stages: Sequence[tuple[int, float, float]]) -> list[int]:
    """For each stage the fixed length with the least mean time per output token."""
    times = []
    for k in LENGTHS:
        requests = served(stages, "fixed", k).requests
        per_token = (requests["finish_s"] - requests["first_token_s"]) / (requests["output_tokens"] - 1)
        times.append([per_token[stage_of(stages) == stage].mean() for stage in range(len(stages))])
    return [int(k) for k in np.argmin(times, axis=0)]


def lengths_over_time(result: Result) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """End times of rounds and their draft lengths, the new tokens per row of a verify minus one."""
    launches = result.launches
    rounds = np.isin(launches["kind"], [KINDS.index("verify"), KINDS.index("decode")])
    order = np.argsort(launches["end_s"][rounds])
    lengths = launches["tokens"][rounds] // np.maximum(1, launches["rows"][rounds]) - 1
    return launches["end_s"][rounds][order], lengths[order]


def picture(path: Path) -> None:
    """The draft length over time for both steps, with each stage's best fixed length."""
    from pdvsim.view.figure import DPI, new_figure, styled
    from pdvsim.view.style import BLUE, GREY, ORANGE

    colours: dict[ControllerName, str] = {"feedback": ORANGE, "goodput": BLUE}
    caption = (
        f"pdv, {PAIRS[0]}, H200, {TOKENS} in, {TOKENS} out. Above: concurrency 32. Below: acceptance 0.7. From k = 8."
    )
    with styled():
        figure = new_figure(9, 6, caption)
        for axes, (name, stages) in zip(figure.subplots(2, 1), STAGES.items(), strict=True):
            best = best_lengths(stages)
            for controller, colour in colours.items():
                result = served(stages, controller, 8)
                times, lengths = lengths_over_time(result)
                bins = np.floor(times / 0.2)
                at = np.unique(bins)
                medians = [np.median(lengths[bins == one]) for one in at]
                axes.step(0.2 * at, medians, where="post", color=colour, label=controller)
            arrivals = result.requests["arrival_s"]
            first = [float(arrivals[stage_of(stages) == stage].min()) for stage in range(len(stages))]
            edges = [*first, float(result.requests["finish_s"].max())]
            axes.step(edges, [*best, best[-1]], where="post", color=GREY, linestyle="--", label="best fixed")
            axes.set_title(name, loc="left")
            axes.set_ylabel("Draft length")
            axes.set_ylim(-0.3, 8.3)
        axes.set_xlabel("Time (s)")
        figure.axes[0].legend(loc="upper right", ncols=3)
        figure.savefig(path, dpi=DPI)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    if target.suffix == ".png":
        picture(target)
    else:
        print(summary(grid(target)))
