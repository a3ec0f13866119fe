"""Measured forwards over their floor: `python studies/sample_floors.py [MODEL ...]`, from the H200 samples included.

The floor is the roofline of the measured card: bytes at its copy speed or arithmetic at its speed of matrix products,
whichever takes longer, in each part of a forward. A mixture reads the expected number of distinct experts; 8-bit
products have twice the speed.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from pdvsim.calibration.fit.build import gpu_spec, read
from pdvsim.calibration.fit.points import medians
from pdvsim.sim.hardware.costs import CostModel
from pdvsim.sim.hardware.forward import ForwardTerms
from pdvsim.view.table import grid

SAMPLES = Path(__file__).parents[1] / "calibration/data/h200"
VERIFIES = ((1, 1), (8, 1), (32, 1), (1, 5), (8, 5), (32, 5), (64, 5))  # rows, tokens per row
PROMPTS = (256, 1024, 2048)
CONTEXT = 512


def main(names: list[str]) -> None:
    samples = read(SAMPLES)
    gpu, specs, frame = gpu_spec(samples.header, "h200"), samples.header.specs(), samples.frame
    alone = frame[frame["section"] == "solo"]
    rows = []
    for name in names or sorted(set(alone["model"])):
        points = medians(alone[alone["model"] == name])
        floor = CostModel(specs[name], ForwardTerms.roofline(specs[name], gpu))
        decoded = points[(points["chunk_tokens"] == 0) & (points["steps"] == 1) & (points["lengths"] == "even")]
        read_alone = points[(points["rows"] == 0) & (points["chunks"] == 1) & (points["chunk_start"] == 0)]
        cells = []
        for count, tokens in VERIFIES:
            near = decoded[(decoded["rows"] == count) & (decoded["tokens"] == tokens)]
            near = near.iloc[(near["context"] - CONTEXT).abs().argsort()[:1]]
            cost = floor.price(count, tokens)
            ratios = near["seconds"] / (cost.seconds_0 + cost.seconds_1 * near["context_total"])
            cells.append(f"{ratios.iloc[0]:.2f}" if len(ratios) else "-")
        for prompt in PROMPTS:
            floor_s = floor.price(0, prompts=[(0, prompt)], first_tokens=1).seconds_0
            ratios = read_alone[read_alone["chunk_tokens"] == prompt]["seconds"] / floor_s
            cells.append(f"{ratios.iloc[0]:.2f}" if len(ratios) else "-")
        rows.append([name, *cells])
    print(grid(["times its floor", *(f"{r} x {t}" for r, t in VERIFIES), *(f"prompt {p}" for p in PROMPTS)], rows))


if __name__ == "__main__":
    main(sys.argv[1:])
