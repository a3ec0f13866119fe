"""Adaptive verification against fixed draft lengths: `python studies/adaptive_verification.py [FILE.json | FILE.png]`.

60 closed loops: two targets, five contexts, three loads up to what the KV cache of one server holds, two acceptance
rates. Each cell has tokens per second of plain decoding, of fixed draft lengths, of the goodput controller and of
adaptive verification with step costs at 8,192 tokens, at 256, at the served context, and at each step's own requests
and context. Contexts are a cached prefix, so that decoding and not prefill decides. Finished cells are kept in
FILE.json (default: the committed ones); FILE.png draws them.
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pdvsim.common.files import write_whole
from pdvsim.sim.config import Acceptance, Experiment, Hardware, Server, Traffic
from pdvsim.sim.run import simulate

DATA = Path(__file__).parent / "data" / "adaptive_verification.json"
TARGETS: dict[str, tuple[Server, Hardware]] = {
    "llama-3.1-8b": (Server("llama-3.1-8b", drafter="eagle3", max_num_seqs=256), Hardware()),
    "deepseek-v3": (
        Server("deepseek-v3", drafter="mtp", max_num_seqs=256),
        Hardware(gpu="b200", tensor_parallel_size=8, engine="vllm"),
    ),
}
LOADS = {512: (4, 32, 256), 2048: (4, 32, 256), 8192: (4, 20, 96), 32768: (4, 10, 24), 65536: (4, 7, 12)}
RATES = (0.55, 0.75)
SPREAD = 4.0  # concentration of acceptance over requests
K, LENGTHS = 7, (1, 2, 3, 5, 7)
NOISE = 0.5  # of a confidence signal: accepted and refused tokens differ by two standard deviations
QUESTION, ANSWER = 192, 224  # tokens after the prefix
PROFILED, SHORT = 8192, 256  # vLLM's default, and a low setting
CELLS = [f"{t} {c} {n} {r}" for t in TARGETS for c in LOADS for n in LOADS[c] for r in RATES]


def cell(name: str) -> dict[str, float]:
    """Tokens per second of every way to serve one load."""
    target, context, concurrency, rate = name.split()
    server, hardware = TARGETS[target]
    traffic = Traffic(
        "random", num_prompts=max(30, 3 * int(concurrency)), max_concurrency=int(concurrency), input_len=QUESTION,
        output_len=ANSWER, prefix_len=max(0, int(context) - QUESTION - ANSWER // 2), num_prefixes=1,
        random_range_ratio=0.3,
    )  # fmt: skip
    acceptance = Acceptance(acceptance_rate=float(rate), acceptance_concentration=SPREAD)

    def speed(**changed: Any) -> float:
        result = simulate(Experiment("colocated", traffic, acceptance, replace(server, **changed), hardware))
        times, tokens = result.deliveries["time_s"], result.deliveries["tokens"]
        first, last = 0.2 * float(times.max()), 0.7 * float(times.max())  # without start and drain
        return float(tokens[(times > first) & (times <= last)].sum() / (last - first))

    def adaptive(context_len: int, noise: float | None = None) -> float:
        return speed(
            num_speculative_tokens=K, controller="adaptive-verification", confidence_noise=noise,
            adaptive_verification_profile_context_len=context_len,
        )  # fmt: skip

    speeds = {f"k={k}": speed(num_speculative_tokens=k) for k in (0, *LENGTHS)}
    speeds["goodput"] = speed(num_speculative_tokens=3, controller="goodput", max_speculative_tokens=K)
    for label, context_len in (("8192", PROFILED), ("256", SHORT), ("served", int(context)), ("step", 0)):
        speeds[f"adaptive {label}"] = adaptive(context_len)
        speeds[f"confident {label}"] = adaptive(context_len, NOISE)
    return speeds


def grid(out: Path) -> dict[str, dict[str, float]]:
    """Compute every missing cell, and write each when it is done."""
    cells: dict[str, dict[str, float]] = json.loads(out.read_text()) if out.exists() else {}
    for name in CELLS:
        if name not in cells:
            cells[name] = cell(name)
            write_whole(out, json.dumps(cells, indent=1).encode(), replace=True)
            print(f"{len(cells)} of {len(CELLS)}: {name}", flush=True)
    return cells


def best_fixed(speeds: dict[str, float]) -> float:
    """The best length that a table by batch size would have at this load, none included."""
    return max(speeds[f"k={k}"] for k in (0, *LENGTHS))


def gains(cells: dict[str, dict[str, float]], over: str, way: str, **where: str) -> list[float]:
    """Relative gains of one way over another, in the cells where target, context, concurrency or rate are these."""
    ratios = []
    for name, speeds in cells.items():
        parts = dict(zip(("target", "context", "concurrency", "rate"), name.split(), strict=True))
        if all(parts[key] == value for key, value in where.items()):
            base = best_fixed(speeds) if over == "best fixed" else speeds[over]
            ratios.append(speeds[way] / base - 1)
    return ratios


def summary(cells: dict[str, dict[str, float]]) -> str:
    """Mean gains by target and context, and the range over all cells."""
    ways = [f"{kind} {costs}" for kind in ("adaptive", "confident") for costs in ("8192", "served", "256", "step")]
    pairs = itertools.product((*ways, "goodput"), ("k=7", "adaptive 8192", "best fixed"))
    lines = []
    for way, over in pairs:
        every = gains(cells, over, way)
        lines.append(f"{way} over {over}: mean {np.mean(every):+.1%}, {min(every):+.1%} to {max(every):+.1%}")
        for target, context in itertools.product(TARGETS, LOADS):
            some = gains(cells, over, way, target=target, context=str(context))
            if some:
                lines.append(f"    {target} {context:>6}: {', '.join(f'{one:+.1%}' for one in some)}")
    return "\n".join(lines)


def picture(cells: dict[str, dict[str, float]], path: Path) -> None:
    """Speed relative to the best fixed length, by context and load; one panel per target."""
    from pdvsim.view.figure import DPI, new_figure, styled
    from pdvsim.view.style import BLUE, GREY, ORANGE

    curves = {"k=7": ("all verified, k=7", GREY, ":"), "goodput": ("goodput", GREY, "--"),
             "adaptive 8192": ("adaptive, costs at 8,192 tokens", ORANGE, "-"),
             "adaptive step": ("adaptive, costs of each step", BLUE, "-")}  # fmt: skip
    caption = f"Closed loops, vLLM's rule, max_num_seqs 256, acceptance {RATES[0]} and {RATES[1]} averaged, k={K}."
    places = [(context, load) for context, loads in LOADS.items() for load in loads]
    with styled():
        figure = new_figure(9, 6, caption)
        for axes, target in zip(figure.subplots(2, 1, sharex=True), TARGETS, strict=True):
            axes.axhline(0, color=GREY, linewidth=0.8)
            for way, (label, colour, line) in curves.items():
                for at, (context, loads) in enumerate(LOADS.items()):
                    where = {"target": target, "context": str(context)}
                    means = [100 * np.mean(gains(cells, "best fixed", way, concurrency=str(n), **where)) for n in loads]
                    xs = [at * len(loads) + i for i in range(len(loads))]
                    named = label if not at else None
                    axes.plot(xs, means, line, marker="o", markersize=4, color=colour, label=named)
            server, hardware = TARGETS[target]
            axes.set_title(f"{server.pair} on {hardware.tensor_parallel_size} × {hardware.gpu}", loc="left")
            axes.set_ylabel("Over best fixed k (%)")
        axes.set_xticks(range(len(places)), [f"{n}\n{c // 1024 or '½'}k" for c, n in places])
        axes.set_xlabel("Concurrency, context")
        figure.axes[0].legend(loc="lower right", ncols=2)
        figure.savefig(path, dpi=DPI)


if __name__ == "__main__":
    chosen = Path(sys.argv[1]) if len(sys.argv) > 1 else DATA
    if chosen.suffix == ".png":
        picture(json.loads(DATA.read_text()), chosen)
    else:
        print(summary(grid(chosen)))
