"""How much drafting ahead depends on the assumed accuracy of its guesses: `python studies/ahead.py PICTURE.png`.

A drafter with a GPU of its own against two servers of colocated batches, over the concurrency, for a chain and for
several values of `Server.ahead_exponent`. Each at the draft length that is best for it, of 2, 3 and 4. Takes a minute.
"""

from __future__ import annotations

import sys
from typing import Any

from pdvsim.decide.options import SPREAD
from pdvsim.sim.config import Acceptance, Arch, Experiment, Hardware, Server, Traffic
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.relevance import applicable
from pdvsim.sim.run import simulate
from pdvsim.view.figure import DPI, new_figure, styled
from pdvsim.view.style import GREY, paler

PAIR, RATE, TOKENS = "tinyllama-1.1b:llama-2-7b", 0.8, 128
CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (2, 3, 4)
WAYS: dict[str, dict[str, Any]] = {
    "chain": {"ahead_fan": 0},
    **{f"r = {r:g}": {"ahead_exponent": r} for r in (0.25, 0.5, 1.0, 2.0)},
}
COLOUR = "#7a5195"
SHADES = (0.75, 0.55, 0.0, 0.35)  # darkest: what is assumed


def speed(arch: Arch, concurrency: int, hardware: Hardware, **server: Any) -> float:
    """Output tokens per second at the best of the draft lengths."""
    traffic = Traffic("random", num_prompts=max(40, 3 * concurrency), input_len=TOKENS, output_len=TOKENS,
                      random_range_ratio=SPREAD, max_concurrency=concurrency)  # fmt: skip
    runs = (Experiment(arch, traffic, Acceptance(RATE), Server(PAIR, k, **server), hardware) for k in LENGTHS)
    return max(float(summarise(simulate(applicable(run)))["output_throughput"]) for run in runs)


def main(picture: str) -> None:
    """Print the gains and draw them."""
    two = {n: speed("colocated", n, Hardware(replicas=2, router="least-loaded", band=False)) for n in CONCURRENCY}
    caption = (
        f"{PAIR}, two H200s, {TOKENS} in, {TOKENS} out ±{SPREAD:.0%}, acceptance {RATE}, "
        f"best k of {LENGTHS[0]} to {LENGTHS[-1]}. r: the exponent, of which 1 is assumed. One seed. Simulated."
    )
    with styled():
        figure = new_figure(8, 4.6, caption)
        axes = figure.subplots()
        for (name, way), shade in zip(WAYS.items(), (None, *SHADES), strict=True):
            apart = Hardware(place=("prefill=1", "verify=1"), band=False)
            gains = [speed("pdv-ahead", n, apart, **way) / two[n] for n in CONCURRENCY]
            print(name, " ".join(f"{gain:.2f}" for gain in gains))
            colour = GREY if shade is None else paler(COLOUR, shade)
            axes.plot(
                CONCURRENCY, gains, color=colour, marker="o", linestyle="--" if shade is None else "-", label=name
            )
        axes.axhline(1, color="0.3", linewidth=1.2)
        axes.set_xscale("log", base=2)
        axes.set_xticks(CONCURRENCY, list(map(str, CONCURRENCY)))
        axes.minorticks_off()
        axes.set_xlabel("Concurrent requests")
        axes.set_ylabel("Output throughput over that of two servers")
        axes.set_title("Drafting ahead on a second GPU, by how well it guesses", loc="left", fontweight="bold")
        axes.legend(frameon=False, ncols=2)
        figure.savefig(picture, dpi=DPI)


if __name__ == "__main__":
    main(sys.argv[1])
