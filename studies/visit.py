"""One visit to a GPU, in parts with a time limit each: `python studies/visit.py FOLDER [PART ...]`.

- `groups` adds to the shipped samples the groups of concurrent launches that they lack: prompts of chats next to drafts
  and verifies of 2 to 64 rows, drafts whose first forward has two tokens per row.
- `rows` adds the points that they lack: batches of 192 and 256 rows.
- `layers` measures the layers without attention at all numbers of tokens, into the parts of FOLDER/parts.
- `probe` times `realrun --probe` and keeps what it says of this machine.
- `runs` serves `lanes.plan.jsonl`, `runs=NAME` another plan of `calibration/data/h200`: the kinds of load with the
  largest errors.
- `report` compares what there is with the present profile; the other parts end with it.

FOLDER gets `samples.parquet`, `header.json`, `parts`, `probe.json`, `runs.jsonl`, `launches.parquet` (without pandas
its parts) and `log.txt`. What a part has when its time is up is kept. Without a GPU, `report` works on a FOLDER of
samples or runs that were made before. Plans name files from the folder next to theirs: a FOLDER in `calibration/data`.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

DATA = ROOT / "calibration" / "data" / "h200"
SAMPLES, PLAN = ("samples.parquet", "header.json"), "lanes.plan.jsonl"
MODELS = ("tinyllama-1.1b", "llama-2-7b", "llama-3.2-1b", "llama-3.1-8b", "qwen2-1.5b", "qwen2-7b")
PAIRS = (
    "qwen2-1.5b:qwen2-7b", "tinyllama-1.1b:codellama-34b", "llama-3.2-1b:llama-3.1-8b", "tinyllama-1.1b:llama-2-7b",
    "gemma-2b:gemma-7b",
)  # fmt: skip
PROBED = "llama-3.2-1b:llama-3.1-8b"
LAYERED = (
    "tinyllama-1.1b", "llama-3.1-8b-fp8", "llama-3.1-8b", "qwen2-7b", "gemma-7b", "codellama-34b", "llama-2-7b",
    "llama-3.2-1b", "qwen2-1.5b", "gemma-2b",
)  # fmt: skip
LIMITS_S = {"groups": 500, "rows": 150, "layers": 110, "probe": 50, "runs": 480}
STOPPING_S = 25  # for what a command does after its interruption
FIRST_NEW_GROUP = 117


def command(limit_s: float, log: Path, *words: str) -> float:
    """Run a command of pdvsim, interrupted as by Ctrl-C at its limit; returns the seconds it took."""
    begin = monotonic()
    with log.open("a") as file:
        print("$", *words, file=file, flush=True)
        process = subprocess.Popen([sys.executable, "-m", *words], stdout=file, stderr=subprocess.STDOUT)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOPPING_S)
            except subprocess.TimeoutExpired:
                process.kill()
    took_s = monotonic() - begin
    print(f"{words[0]} {words[1]}: exit {process.wait()} after {took_s:.0f} s", flush=True)
    return took_s


def groups(folder: Path, log: Path) -> None:
    """Concurrent launches that the shipped samples lack."""
    _profile("groups", folder, log, "--pairs", ",".join(PAIRS), "--pair-budget-s", "85")


def rows(folder: Path, log: Path) -> None:
    """Points that the shipped samples lack."""
    _profile("rows", folder, log, "--models", ",".join(MODELS), "--budget-s", "40")


def layers(folder: Path, log: Path) -> None:
    """The layers of dense models without attention."""
    from pdvsim.profiler.measure import Profiler
    from pdvsim.profiler.options import Options
    from pdvsim.realrun.engine.arch import preset

    end = monotonic() + LIMITS_S["layers"]
    said = f"python studies/visit.py {folder.name} layers"
    profiler = Profiler(Options((), (), folder / "parts", budget_s=15.0, command=said), preset, print)
    for name in LAYERED:
        if monotonic() < end:
            profiler.layers(name)


def _profile(part: str, folder: Path, log: Path, *options: str) -> None:
    """Continue the shipped samples, or those of this visit; their many parts are made elsewhere."""
    with tempfile.TemporaryDirectory() as name:
        for file in SAMPLES:
            shutil.copy(folder / file if (folder / file).exists() else DATA / file, name)
        command(LIMITS_S[part], log, "pdvsim.cli", "profile", *options, "-o", name, "--jobs", "16")
        for file in SAMPLES:
            shutil.copy(Path(name) / file, folder)


def probe(folder: Path, log: Path) -> None:
    """How long a probe takes from start to end, and what it says."""
    out = folder / "probe.json"
    options = ["--arch", "pdv", "--pair", PROBED, "--acceptance-rate", "0.7", "--num-speculative-tokens", "3"]
    took_s = command(
        LIMITS_S["probe"], log, "pdvsim.cli.realrun", *options, "--max-num-seqs", "64", "--probe", "-o", str(out),
        "--overwrite",
    )  # fmt: skip
    if out.exists():
        out.write_text(json.dumps(json.loads(out.read_text()) | {"probe_s": took_s}))


def serve(folder: Path, log: Path, plan: str) -> None:
    """Serve the plan, then put the launches into one table."""
    from pdvsim.calibration.validate.launches import gather

    out, limit_s = folder / "runs.jsonl", LIMITS_S["runs"]
    words = ["validate", "--serve", str(DATA / plan), "-o", str(out), "--minutes", str(limit_s / 60 - 0.5)]
    command(limit_s, log, "pdvsim.cli", *words)
    with suppress(ImportError):
        gather(folder)


# report --------------------------------------------------------------------------------------------------------------


def report(folder: Path) -> None:
    """What was measured against the present profile, part by part."""
    if (folder / SAMPLES[0]).exists():
        _report_samples(folder)
    if (folder / "runs.jsonl").exists():
        _report_runs(folder)
    if (folder / "probe.json").exists():
        _report_probe(folder)


def _report_samples(folder: Path) -> None:
    """Errors of points beyond 128 rows, and of the pairs and groups that the shipped samples lack."""
    from pdvsim.calibration.fit import corun
    from pdvsim.calibration.fit.build import read
    from pdvsim.calibration.fit.points import medians, price
    from pdvsim.sim.hardware.costs import CostModel
    from pdvsim.sim.hardware.profile import builtin

    samples, known = read(folder), builtin("h200")
    specs, frame = samples.header.specs(), samples.frame
    alone = {name: fit.scaled(1 / known.in_service.get(name, 1.0)) for name, fit in known.models.items()}
    models = {name: CostModel(specs[name], fit) for name, fit in alone.items() if name in specs}
    print("\nlaunches of 192 and 256 rows, predicted over measured")
    large = frame[(frame["section"] == "solo") & (frame["rows"] > 128)]
    for model, rows in large.groupby("model", observed=True):
        for _, point in medians(rows).iterrows():
            ratio = price(models[str(model)], point).seconds(point["context_total"]) / point["seconds"]
            chunk = f" + {point['chunk_tokens']}" if point["chunk_tokens"] else ""
            print(f"  {model:16s} {point['kind']:7s} {point['rows']}x{point['tokens']}{chunk:6s} {ratio:6.3f}")
    new = frame[(frame["section"] == "corun") & ((frame["group"] >= FIRST_NEW_GROUP) | (frame["members"] == 1))]
    fp8 = frame[frame["pair"].astype(str).str.contains("fp8")]
    for title, part in (("groups of chats beside rows", new), ("8-bit weights beside others", fp8)):
        groups = corun.groups_of(part, known.gpu, models, known.power)
        if groups:
            errors = np.abs(corun.errors(groups, known.contention))
            print(f"{title}: {len(groups)} groups, error {np.median(errors):.1%} / {np.quantile(errors, 0.95):.1%}")
            _by_shapes(groups, corun.slowdowns(groups, known.contention))


def _by_shapes(found: Sequence[object], predicted: np.typing.NDArray[np.float64]) -> None:
    """Measured and predicted slowdown of each member, the mean over pairs."""
    rows: dict[tuple[str, bool], list[tuple[float, ...]]] = {}
    at = 0
    for group in found:
        count = len(group.members)  # type: ignore[attr-defined]
        both = (*group.measured, *predicted[at : at + count])  # type: ignore[attr-defined]
        rows.setdefault((group.shapes, group.ordered), []).append(both)  # type: ignore[attr-defined]
        at += count
    for (shapes, ordered), values in rows.items():
        mean = np.exp(np.mean(np.log(values), axis=0))
        half = len(mean) // 2
        kind = "ordered" if ordered else "equal"
        real, told = (" ".join(f"{value:5.2f}" for value in part) for part in (mean[:half], mean[half:]))
        print(f"  {kind:7s} {shapes:72s} measured {real}  predicted {told}")


def _report_runs(folder: Path) -> None:
    """Errors of the runs that are not held out, for any machine and with their own pace."""
    from pdvsim.calibration.validate.compare import validate
    from pdvsim.calibration.validate.served import read_runs

    runs = [run for run in read_runs(folder / "runs.jsonl") if not run.held_out]
    print("\nruns: error of throughput, mean TTFT, mean TPOT, p95 ITL; with pace the same")
    metrics = ("output_throughput", "mean_ttft_ms", "mean_tpot_ms", "p95_itl_ms")
    for one in validate(runs).checked["fluid"]:
        figures = [one.predicted[name] / one.run.metrics[name] - 1 for name in metrics]
        paced = [one.paced[name] / one.run.metrics[name] - 1 for name in metrics] if one.paced else []
        text = " ".join(f"{figure:+6.1%}" for figure in (*figures, *paced))
        print(f"  {one.run.experiment.arch:14s} {one.run.experiment.server.pair:38s} {text}")


def _report_probe(folder: Path) -> None:
    """What the probe says, next to the warm-up of a run of the same pair."""
    from pdvsim.calibration.validate.served import read_runs
    from pdvsim.sim.hardware.models import pair
    from pdvsim.sim.hardware.pace import Pace, pace_in
    from pdvsim.sim.hardware.profile import builtin

    record, known = json.loads((folder / "probe.json").read_text()), builtin("h200")
    told: dict[str, Pace | None] = {f"probe of {record['probe_s']:.0f} s": pace_in(record)}
    if (folder / "runs.jsonl").exists():
        runs = [run for run in read_runs(folder / "runs.jsonl") if run.experiment.server.pair == PROBED]
        told |= {f"warm-up of {run.experiment.arch}": pace_in(run.meta) for run in runs}
    print("\npace")
    for name, pace in told.items():
        if pace is not None:
            ratios = ", ".join(f"{model} {ratio:.3f}" for model, ratio in pace.ratios(known, pair(PROBED)).items())
            print(f"  {name:22s} {ratios}; host {1e6 * (pace.host_s or 0):.0f} us, row {1e6 * pace.row_s:.1f} us")


def main(argv: Sequence[str]) -> int:
    """Run the parts that are named, all by default, then the report."""
    if not argv or argv[0].startswith("-"):
        print(__doc__)
        return 2
    folder, parts = Path(argv[0]), argv[1:] or [*LIMITS_S]
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.txt"
    for part, run in (("groups", groups), ("rows", rows), ("layers", layers), ("probe", probe)):
        if part in parts:
            run(folder, log)
    for plan in [part.partition("=")[2] or PLAN for part in parts if part.partition("=")[0] == "runs"]:
        serve(folder, log, plan)
    report(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
