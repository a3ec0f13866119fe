"""One visit to a GPU: `python studies/visit.py FOLDER PART ... [limit=SECONDS] [out=FOLDER]`.

- `kernels` lists the kernels of a prompt's layers by number of tokens, with their blocks and times.
- `probe` times `realrun --probe` and keeps its figures of this machine.
- `runs=NAME` serves a plan of `calibration/data/h200`.
- A part that begins with `realrun` or `pdvsim` is that command, e.g. `"pdvsim profile --models llama-3.1-8b --quick"`.

A part is interrupted at its limit, as by Ctrl-C, and keeps what it has. After each part, all of FOLDER is packed into
the folder named by `out`. Plans name files from the folder next to theirs: a FOLDER in `calibration/data`.
"""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

DATA = ROOT / "calibration" / "data" / "h200"
DEVICE = "cuda"
PROBED = "llama-3.2-1b:llama-3.1-8b"
TRACED = ("qwen2-7b", "llama-3.1-8b", "llama-2-7b", "gemma-7b", "codellama-34b", "llama-3.1-8b-fp8")
LIMIT_S = 280.0
STOPPING_S = 15  # for what a command does after its interruption
MODULES = {"realrun": "pdvsim.cli.realrun", "pdvsim": "pdvsim.cli"}


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
        print(f"{name}: {[len(each) for each in traced[name].values()]} kernels", flush=True)


def probe(folder: Path, limit_s: float) -> None:
    """Time a probe from start to end, and record its figures."""
    out = folder / "probe.json"
    options = ["--arch", "pdv", "--pair", PROBED, "--acceptance-rate", "0.7", "--num-speculative-tokens", "3"]
    options += ["--max-num-seqs", "64", "--probe", "-o", str(out), "--overwrite"]
    took_s = command(limit_s, folder / "log.txt", "-m", MODULES["realrun"], *options)
    if out.exists():
        out.write_text(json.dumps(json.loads(out.read_text()) | {"probe_s": took_s}))


def pack(folder: Path, out: Path) -> None:
    """Copy what there is to `out`, as few files."""
    out.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.is_dir():
            with tarfile.open(out / f"{path.name}.tar", "w") as archive:
                archive.add(path, path.name)
        else:
            shutil.copy(path, out)


def main(argv: Sequence[str]) -> int:
    """Run the parts that are named, one after another."""
    if len(argv) < 2 or argv[0].startswith("-"):
        print(__doc__)
        return 2
    folder, log, limit_s = Path(argv[0]), Path(argv[0]) / "log.txt", LIMIT_S
    folder.mkdir(parents=True, exist_ok=True)
    outs = [Path(part.removeprefix("out=")) for part in argv if part.startswith("out=")]
    for part in argv[1:]:
        name, _, value = part.partition("=")
        program, *words = shlex.split(part)
        if part == "kernels":
            kernels(folder)
        elif part == "probe":
            probe(folder, limit_s)
        elif name == "runs":
            minutes = str(limit_s / 60 - 0.25)
            words = ["validate", "--serve", str(DATA / value), "-o", str(folder / "runs.jsonl"), "--minutes", minutes]
            command(limit_s, log, "-m", MODULES["pdvsim"], *words)
        elif program in MODULES:
            command(limit_s, log, "-m", MODULES[program], *words)
        elif name == "limit":
            limit_s = float(value)
        elif name != "out":
            raise SystemExit(f"unknown part {part!r}")
        for out in outs:
            pack(folder, out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
