"""Lane priorities compared with the fixed order: `python studies/priorities.py`.

Every setting runs the same requests as `--priority stream`, seed by seed, and the table has the paired differences: a
figure is bold where its 95% interval excludes no difference. Takes about a minute of one core.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdvsim.bench.stats import interval
from pdvsim.sim.config import Arch, Experiment, Scoring, Server, Traffic
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.run import simulate

ARCHS: tuple[Arch, ...] = ("pd", "pdv", "pdv-unified")
LOADS = {
    "concurrency 64, 512 and 128 tokens": Traffic("random", num_prompts=256, input_len=512, output_len=128,
                                                  max_concurrency=64),
    "ShareGPT, 15 a second": Traffic(num_prompts=240, request_rate=15.0),
    "ShareGPT, 25 a second": Traffic(num_prompts=400, request_rate=25.0),
    "bursts of long prompts (1,500 and 64), 10 a second": Traffic("random", num_prompts=200, input_len=1500,
                                                                  output_len=64, request_rate=10.0, burstiness=0.2),
}  # fmt: skip
PAIR = "tinyllama-1.1b:llama-2-7b"
SETTINGS = {
    "stream": Server(PAIR),
    "none": Server(PAIR, priority="none"),
    "dynamic": Server(PAIR, priority="dynamic"),
}
SEEDS = 6
METRICS = ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "output_throughput")


def figures(arch: Arch, traffic: Traffic, server: Server) -> list[dict[str, float]]:
    """The metrics of every seed."""
    by_seed = []
    for seed in range(SEEDS):
        load = Traffic(**{**vars(traffic), "seed": seed})
        metrics = summarise(simulate(Experiment(arch, load, server=server, scoring=Scoring(detailed=False))))
        by_seed.append({name: metrics[name] for name in METRICS})
    return by_seed


def change(ours: Sequence[dict[str, float]], theirs: Sequence[dict[str, float]], metric: str) -> str:
    """Change by a setting in percent, with its interval."""
    difference = interval([own[metric] / other[metric] - 1 for own, other in zip(ours, theirs, strict=True)])
    text = f"{difference.mean:+.1%} ± {difference.half_width:.1%}"
    return f"**{text}**" if abs(difference.mean) > difference.half_width else text


def main() -> None:
    """Print the table."""
    print("| load | arch | setting | " + " | ".join(METRICS) + " |\n|" + "---|" * (3 + len(METRICS)))
    for load, traffic in LOADS.items():
        for arch in ARCHS:
            fixed = figures(arch, traffic, SETTINGS["stream"])
            for name, server in SETTINGS.items():
                if name != "stream":
                    ours = figures(arch, traffic, server)
                    changes = " | ".join(change(ours, fixed, metric) for metric in METRICS)
                    print(f"| {load} | `{arch}` | `{name}` | {changes} |", flush=True)


if __name__ == "__main__":
    main()
