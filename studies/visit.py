"""One visit to a GPU, in parts with a time limit each: `python studies/visit.py FOLDER [PART ...] [out=FOLDER]`.

- `groups` measures the groups of concurrent launches that the shipped samples lack: a mixture of experts in 16 bits
  that decodes or verifies next to its own prompts. They are parts in FOLDER/parts.
- `kernels` lists the kernels of a prompt's layers by number of tokens, with their blocks and times.
- `layers` measures the layers without attention at all numbers of tokens, into the same parts.
- `probe` times `realrun --probe` and keeps its figures of this machine.
- `runs=NAME` serves a plan of `calibration/data/h200`.
- `report` compares what there is with the present profile; it needs pandas, as does `merge`, which adds FOLDER/parts to
  the shipped samples, into FOLDER.

FOLDER gets `parts`, `kernels.json`, `probe.json`, `runs.jsonl`, `launches` and `log.txt`. What a part has when its time
is up is kept, and after each part all of it is packed into the folder named by `out`. Plans name files from the folder
next to theirs: a FOLDER in `calibration/data`.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

DATA = ROOT / "calibration" / "data" / "h200"
DEVICE = "cuda"
MIXTURE = "qwen3-0.6b:qwen3-30b-a3b"
PAIR_BUDGETS_S = {MIXTURE: 90}  # the most important first
PROBED = "llama-3.2-1b:llama-3.1-8b"
LAYERED = (
    "tinyllama-1.1b", "llama-3.1-8b-fp8", "llama-3.1-8b", "qwen2-7b", "gemma-7b", "codellama-34b", "llama-2-7b",
    "llama-3.2-1b", "qwen2-1.5b", "gemma-2b",
)  # fmt: skip
TRACED = ("qwen2-7b", "llama-3.1-8b", "llama-2-7b", "gemma-7b", "codellama-34b", "llama-3.1-8b-fp8")
LIMITS_S = {"groups": 125, "kernels": 30, "layers": 110, "probe": 50, "runs": 280}
COMPILING_S = 50  # of the limit of the groups
STOPPING_S = 15  # for what a command does after its interruption
FIRST_NEW_GROUP = 184
FIRST_OF_MIXTURE = 101  # which were measured up to there


def command(limit_s: float, log: Path, *words: str) -> float:
    """Run Python with these words, interrupted as by Ctrl-C at its limit; returns the seconds it took."""
    begin = monotonic()
    with log.open("a") as file:
        print("$", *words, file=file, flush=True)
        process = subprocess.Popen([sys.executable, *words], stdout=file, stderr=subprocess.STDOUT)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOPPING_S)
            except subprocess.TimeoutExpired:
                process.kill()
    took_s = monotonic() - begin
    print(f"{' '.join(words[-2:])}: exit {process.wait()} after {took_s:.0f} s", flush=True)
    return took_s


def _say(text: str) -> None:
    print(text, flush=True)


def _profiler(folder: Path, part: str) -> Any:
    from pdvsim.profiler.measure import Profiler
    from pdvsim.profiler.options import Options
    from pdvsim.realrun.engine.arch import preset

    command = f"python studies/visit.py {folder.name} {part}"
    options = Options((), (), folder / "parts", budget_s=15.0, device=DEVICE, command=command)
    profiler = Profiler(options, preset, _say)
    profiler.look_around()
    return profiler


def plan_of(pair: str) -> list[Any]:
    """The new groups; of the mixture first those of a lane that decodes next to prompts."""
    from pdvsim.profiler.corun import groups

    plan = groups()
    if pair != MIXTURE:
        return plan[FIRST_NEW_GROUP:]
    lacking = [entry for entry in plan[FIRST_OF_MIXTURE:FIRST_NEW_GROUP] if len(entry[2]) == 2]
    decoding = [entry for entry in lacking if {point.kind for point in entry[2]} == {"decode", "prefill"}]
    verifying = [entry for entry in lacking if {point.kind for point in entry[2]} == {"verify", "prefill"}]
    return [*decoding, *verifying, *plan[FIRST_NEW_GROUP:]]


def groups(folder: Path) -> None:
    """Concurrent launches that the shipped samples lack."""
    import gc

    import torch

    from pdvsim.profiler.precompile import compile_ahead, shares

    begin, device = monotonic(), torch.device(DEVICE)
    points_of: dict[tuple[str, bool], dict[Any, None]] = {}
    for pair in PAIR_BUDGETS_S:
        draft, _, target = pair.partition(":")
        for point in (point for _, _, members in plan_of(pair) for point in members):
            drafts = point.kind in ("draft", "read")
            points_of.setdefault((draft if drafts else target, drafts), {})[point] = None
    tasks = [
        (name, share) for (name, drafts), points in points_of.items() for share in shares([*points], 1 if drafts else 2)
    ]
    if device.type == "cuda":
        failed = compile_ahead(tasks, len(tasks), COMPILING_S)
        _say(f"compiled after {monotonic() - begin:.0f} s; {len(failed)} of {len(tasks)} failed: {failed[:2]}")
    profiler = _profiler(folder, "groups")
    for pair, budget_s in PAIR_BUDGETS_S.items():
        left_s = begin + LIMITS_S["groups"] - 5 - monotonic()
        if left_s < 10:
            break
        try:
            _measure(pair, profiler, folder, device, min(budget_s, left_s))
        except Exception as error:  # the card may still do for the others
            _say(f"{pair}: failed: {error!r}")
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measure(pair: str, profiler: Any, folder: Path, device: Any, budget_s: float) -> None:
    """The new groups of one pair, models included in the budget."""
    from pdvsim.profiler.corun import Duo
    from pdvsim.profiler.parts import Part, part_file
    from pdvsim.realrun.engine import arch

    begin, (draft, target) = monotonic(), (arch.preset(name) for name in pair.split(":"))
    part = Part(folder / "parts" / part_file(pair), profiler.header(pair, [draft, target]))
    duo = Duo(pair, draft, target, device, 0)
    _say(f"{pair}: ready after {monotonic() - begin:.0f} s")
    duo.measure(part, plan_of(pair), budget_s - (monotonic() - begin), _say)
    part.header["seconds"] += monotonic() - begin
    part.save()
    _say(f"{pair}: {len(part.rows)} samples, {monotonic() - begin:.0f} s")


def kernels(folder: Path) -> None:
    """The kernels of two layers without attention, by model and tokens, with blocks and microseconds."""
    import torch

    from pdvsim.common.files import write_whole
    from pdvsim.profiler.layers import Stack
    from pdvsim.realrun.engine.arch import preset
    from pdvsim.realrun.engine.buckets import CHUNK_BUCKETS

    device, kinds = torch.device(DEVICE), torch.profiler.ProfilerActivity
    traced: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for name in TRACED:
        stack = Stack(preset(name), device, 0)
        for tokens in CHUNK_BUCKETS:
            x, attended = stack.inputs(tokens)
            for _ in range(2):
                stack.run(x, attended)
            with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as trace:
                stack.run(x, attended)
                if device.type == "cuda":
                    torch.cuda.synchronize()
            with tempfile.TemporaryDirectory() as scratch:
                trace.export_chrome_trace(f"{scratch}/trace.json")
                events = json.loads(Path(scratch, "trace.json").read_text())["traceEvents"]
            traced.setdefault(name, {})[tokens] = [
                {
                    "name": event["name"][:120], "us": event["dur"], "grid": event["args"]["grid"],
                    "block": event["args"]["block"], "shared": event["args"].get("shared memory"),
                    "registers": event["args"].get("registers per thread"),
                }
                for event in events
                if event.get("cat") == "kernel"
            ]  # fmt: skip
        write_whole(folder / "kernels.json", (json.dumps(traced) + "\n").encode())
        del stack
        _say(f"{name}: {[len(each) for each in traced[name].values()]} kernels")


def layers(folder: Path) -> None:
    """The layers of dense models without attention."""
    end, profiler = monotonic() + LIMITS_S["layers"], _profiler(folder, "layers")
    for name in LAYERED:
        if monotonic() < end:
            profiler.layers(name)


def probe(folder: Path, log: Path) -> None:
    """Time a probe from start to end, and record its figures."""
    out = folder / "probe.json"
    options = ["--arch", "pdv", "--pair", PROBED, "--acceptance-rate", "0.7", "--num-speculative-tokens", "3"]
    took_s = command(
        LIMITS_S["probe"], log, "-m", "pdvsim.cli.realrun", *options, "--max-num-seqs", "64", "--probe", "-o", str(out),
        "--overwrite",
    )  # fmt: skip
    if out.exists():
        out.write_text(json.dumps(json.loads(out.read_text()) | {"probe_s": took_s}))


def serve(folder: Path, log: Path, plan: str) -> None:
    """Serve the plan, then put the launches into one table."""
    from pdvsim.calibration.validate.launches import gather

    out, limit_s = folder / "runs.jsonl", LIMITS_S["runs"]
    words = ["validate", "--serve", str(DATA / plan), "-o", str(out), "--minutes", str(limit_s / 60 - 0.25)]
    command(limit_s, log, "-m", "pdvsim.cli", *words)
    with suppress(ImportError):
        gather(folder)


def merge(folder: Path) -> None:
    """Add the new parts to the shipped samples."""
    from pdvsim.profiler.parts import Part, part_file
    from pdvsim.profiler.parts import read as read_part
    from pdvsim.profiler.samples import load, split
    from pdvsim.profiler.samples import merge as merge_parts

    with tempfile.TemporaryDirectory() as name:
        older = Path(name)
        split(load(DATA), older)
        for path in sorted((folder / "parts").glob("*.npz")):
            header = read_part(path)[1]
            added = Part.resume(path, header)
            part = Part.resume(older / part_file(header["name"]), header)
            part.rows += added.rows
            part.header["seconds"] += header["seconds"]
            part.save()
        merge_parts(older.glob("*.npz"), folder)


def pack(folder: Path, out: Path) -> None:
    """Copy what there is to `out`, as few files."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("kernels.json", "probe.json", "runs.jsonl", "launches.parquet", "log.txt"):
        if (folder / name).exists():
            shutil.copy(folder / name, out)
    for name in ("parts", "launches"):
        if (folder / name).is_dir():
            with tarfile.open(out / f"{name}.tar", "w") as archive:
                archive.add(folder / name, name)


def print_report(folder: Path) -> None:
    """What was measured, in a few lines."""
    for path in sorted((folder / "parts").glob("*.npz")):
        with np.load(path, allow_pickle=False) as file:
            measured = len(np.unique(file["group"][file["members"] > 1]))
        print(f"{path.stem:38s} {measured} groups")
    if (folder / "runs.jsonl").exists():
        for line in (folder / "runs.jsonl").read_text().splitlines():
            run = json.loads(line)
            figures = " ".join(f"{run['metrics'][name]:9.1f}" for name in ("output_throughput", "mean_ttft_ms"))
            print(figures, "held out" if run["held_out"] else "        ", run["command"][8:90])


# report --------------------------------------------------------------------------------------------------------------


def report(folder: Path) -> None:
    """What was measured against the present profile, part by part."""
    if (folder / "samples.parquet").exists():
        _report_samples(folder)
    if (folder / "runs.jsonl").exists():
        _report_runs(folder)
    if (folder / "probe.json").exists():
        _report_probe(folder)


def _report_samples(folder: Path) -> None:
    """Errors of the groups that the shipped samples lacked."""
    from pdvsim.calibration.fit import corun
    from pdvsim.calibration.fit.build import read
    from pdvsim.sim.hardware.costs import CostModel
    from pdvsim.sim.hardware.profile import builtin

    samples, known = read(folder), builtin("h200")
    specs, frame = samples.header.specs(), samples.frame
    alone = {name: fit.scaled(1 / known.in_service.get(name, 1.0)) for name, fit in known.models.items()}
    models = {name: CostModel(specs[name], fit) for name, fit in alone.items() if name in specs}
    new = frame[(frame["section"] == "corun") & ((frame["group"] >= FIRST_NEW_GROUP) | (frame["members"] == 1))]
    fp8 = new["pair"].astype(str).str.contains("fp8")
    for title, part in (("16-bit weights", new[~fp8]), ("8-bit weights", new[fp8])):
        groups = corun.groups_of(part, known.gpu, models, known.power)
        if groups:
            errors = np.abs(corun.errors(groups, known.contention))
            print(f"{title}: {len(groups)} groups, error {np.median(errors):.1%} / {np.quantile(errors, 0.95):.1%}")
            _by_shapes(groups, corun.slowdowns(groups, known.contention))


def _by_shapes(groups: Sequence[object], predicted: np.typing.NDArray[np.float64]) -> None:
    """Measured and predicted slowdown of each member, the mean over pairs."""
    rows: dict[tuple[str, bool], list[tuple[float, ...]]] = {}
    at = 0
    for group in groups:
        count = len(group.members)  # type: ignore[attr-defined]
        both = (*group.measured, *predicted[at : at + count])  # type: ignore[attr-defined]
        rows.setdefault((group.shapes, group.ordered), []).append(both)  # type: ignore[attr-defined]
        at += count
    for (shapes, ordered), values in rows.items():
        mean = np.exp(np.mean(np.log(values), axis=0))
        half = len(mean) // 2
        kind = "ordered" if ordered else "equal"
        real, forecast = (" ".join(f"{value:5.2f}" for value in part) for part in (mean[:half], mean[half:]))
        print(f"  {kind:7s} {shapes:72s} measured {real}  predicted {forecast}")


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
    """The probe's figures, next to the warm-up of a run of the same pair."""
    from pdvsim.calibration.validate.served import read_runs
    from pdvsim.sim.hardware.models import pair
    from pdvsim.sim.hardware.pace import Pace, pace_in
    from pdvsim.sim.hardware.profile import builtin

    record, known = json.loads((folder / "probe.json").read_text()), builtin("h200")
    paces: dict[str, Pace | None] = {f"probe of {record['probe_s']:.0f} s": pace_in(record)}
    if (folder / "runs.jsonl").exists():
        runs = [run for run in read_runs(folder / "runs.jsonl") if run.experiment.server.pair == PROBED]
        paces |= {f"warm-up of {run.experiment.arch}": pace_in(run.meta) for run in runs}
    print("\npace")
    for name, pace in paces.items():
        if pace is not None:
            ratios = ", ".join(f"{model} {ratio:.3f}" for model, ratio in pace.ratios(known, pair(PROBED)).items())
            print(f"  {name:22s} {ratios}; host {1e6 * (pace.host_s or 0):.0f} us, row {1e6 * pace.row_s:.1f} us")


HERE = {"groups": groups, "kernels": kernels, "layers": layers}  # in a process of their own, whose memory is then free
ALONE = "alone="


def main(argv: Sequence[str]) -> int:
    """Run the parts that are named, one after another, and print what was measured."""
    if len(argv) < 2 or argv[0].startswith("-"):
        print(__doc__)
        return 2
    folder, parts = Path(argv[0]), argv[1:]
    folder.mkdir(parents=True, exist_ok=True)
    if parts[0].startswith(ALONE):
        HERE[parts[0].removeprefix(ALONE)](folder)
        return 0
    log = folder / "log.txt"
    outs = [Path(part.partition("=")[2]) for part in parts if part.startswith("out=")]
    for part in parts:
        name, _, value = part.partition("=")
        if name in HERE:
            command(LIMITS_S[name], log, str(Path(__file__)), str(folder), f"{ALONE}{name}")
        elif name == "probe":
            probe(folder, log)
        elif name == "runs":
            serve(folder, log, value)
        elif name == "merge":
            merge(folder)
        elif name == "report":
            report(folder)
        elif name != "out":
            raise SystemExit(f"unknown part {part!r}")
        for out in outs:
            pack(folder, out)
    print_report(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
