"""Predicted speed-ups of EAGLE-3 and n-gram drafts, compared with SpecDecode-Bench's measurements with vLLM.

    python studies/drafters.py

Llama-3.1-8B on an H100, draft length 3, closed loops with ShareGPT's lengths, acceptance as recorded on each data set.
It is predicted with pdvsim's engine: nothing is fitted to vLLM, so the host time of its steps is not included
(`studies/published_speculation.py` predicts with vLLM's profile, `studies/engines.py` fits two figures). The published
speed-ups are read off figure 1 of arXiv 2601.11580 (vLLM 0.10.1, H100), to 0.03.
"""

from __future__ import annotations

from pdvsim.sim.config import Acceptance, Experiment, Hardware, Scoring, Server, Traffic
from pdvsim.sim.core import DrafterKind
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.run import simulate

SIZES = (1, 16, 64, 128)
PUBLISHED: dict[tuple[DrafterKind, str], tuple[float, ...]] = {
    ("eagle3", "sharegpt"): (1.71, 1.67, 1.55, 1.29),
    ("eagle3", "gsm8k"): (1.75, 1.70, 1.49, 1.23),
    ("eagle3", "cnn"): (1.68, 1.58, 1.40, 1.23),
    ("eagle3", "instructcoder"): (2.02, 1.92, 1.57, 1.31),
    ("ngram", "sharegpt"): (1.27, 1.25, 1.19),
}


def speed(kind: DrafterKind, data: str, users: int) -> float:
    """Tokens per second of a closed loop after a warm-up."""
    acceptance = Acceptance() if kind == "none" else Acceptance(acceptance_model=f"{data}-{kind}")
    experiment = Experiment(
        "colocated",
        Traffic(num_prompts=max(24, 4 * users), max_concurrency=users),
        acceptance,
        Server("llama-3.1-8b", 4 if kind == "none" else 3, kind),
        Hardware(gpu="h100-sxm", engine="pdvsim"),
        scoring=Scoring(warmup_requests=users),
    )
    return float(summarise(simulate(experiment))["output_throughput"])


def main() -> None:
    """Print predicted over published, by data set and batch size."""
    plain = {users: speed("none", "", users) for users in SIZES}
    print("drafter data set        " + "".join(f"{users:>16d}" for users in SIZES))
    for (kind, data), figures in PUBLISHED.items():
        cells = []
        for users, published in zip(SIZES, figures, strict=False):
            ours = speed(kind, data, users) / plain[users]
            cells.append(f"{ours:.2f}/{published:.2f} {ours / published - 1:+.0%}")
        print(f"{kind:7s} {data:15s} " + "".join(f"{cell:>16s}" for cell in cells))


if __name__ == "__main__":
    main()
