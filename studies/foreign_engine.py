"""An engine that is not ours, corrected for by one benchmark: `python studies/foreign_engine.py FOLDER [GPU]`.

FOLDER has results of closed loops as `vllm bench serve --save-result --save-detailed` writes them, `c4.json` for
concurrency 4: by default those of transformers' continuous batching, calibration/data/h200/foreign-engine. A correction
is fitted to each load alone (`pdvsim calibrate --from-bench`) and predicts the others (`pdvsim validate --bench
--machine`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from pdvsim.calibration.fit.bench import fit_bench
from pdvsim.calibration.validate.bench import read_load
from pdvsim.sim.config import Acceptance, Hardware, Server

SHIPPED = Path(__file__).parents[1] / "calibration/data/h200/foreign-engine"
BATCH_TOKENS = 2048


def main(folder: Path, gpu: str) -> None:
    """Fit each load alone, and predict the others."""
    loads = {path.stem: read_load(str(path)) for path in sorted(folder.glob("c*.json"), key=lambda p: int(p.stem[1:]))}
    server = Server("llama-3.1-8b", max_num_batched_tokens=BATCH_TOKENS)
    errors: list[float] = []
    with TemporaryDirectory() as scratch:
        machine = Path(scratch) / "machine.json"
        for fitted_to, mine in [("", None), *loads.items()]:
            hardware = Hardware(gpu, band=False)
            if mine is not None:
                fit = fit_bench([(mine, mine.experiment("colocated", Acceptance(), server, hardware, None))])
                machine.write_text(json.dumps(fit.document()))
                hardware = Hardware(gpu, band=False, machine=str(machine))
                print(
                    f"fitted to {fitted_to}: speed {fit.speed:.2f}, step {fit.step_s * 1e3:.1f} ms, "
                    f"row {fit.row_s * 1e6:.0f} µs; not determined: {', '.join(fit.undetermined) or 'nothing'}"
                )
            for name, load in loads.items():
                experiment = load.experiment("colocated", Acceptance(), server, hardware, None)
                off = load.predicted(experiment).errors
                both, first = [off["output_throughput"], off["mean_tpot_ms"]], off["mean_ttft_ms"]
                label = "not corrected" if mine is None else "fitted" if name == fitted_to else "predicted"
                print(f"  {name:4} {label:13} throughput {both[0]:+7.1%}  TPOT {both[1]:+7.1%}  TTFT {first:+7.1%}")
                if label == "predicted":
                    errors += map(abs, both)
    within = sum(error <= 0.1 for error in errors)
    print(f"predicted throughput and TPOT: {within} of {len(errors)} within 10%, worst {max(errors):.1%}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else SHIPPED, sys.argv[2] if len(sys.argv) > 2 else "h200")
