"""Compile the kernels of many points ahead, in parallel: half of a model's time would otherwise go there, one by one.

A model of one layer has the same kernels as the whole one. Worker processes launch every shape on such a model once,
which leaves the kernels in Triton's cache on disk; nothing is measured here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import deque
from dataclasses import replace
from time import monotonic, sleep
from typing import IO

from pdvsim.profiler.grid import GridPoint, design
from pdvsim.profiler.options import Options, Say
from pdvsim.sim.hardware.models import HEADS

SHARES = 3  # workers a model
LIMIT_S = 120.0  # for all of them; kernels missing then are compiled when first measured


def shares(points: list[GridPoint], count: int) -> list[list[GridPoint]]:
    """Points dealt to workers so that those with kernels in common go to the same one."""
    alike = sorted(points, key=lambda p: (p.chunks > 0, p.tokens, p.catch_up, p.rows, p.chunk_tokens))
    size = -(-len(alike) // count)
    return [alike[i : i + size] for i in range(0, len(alike), size)]


def precompile(options: Options, say: Say) -> None:
    """Compile what the options' models need, `options.jobs` processes at a time. Failures are left to the measuring."""
    begin = monotonic()
    core, *others = design(drafts=True, heads=any(name.startswith(HEADS) for name in options.models))
    whole = core if options.quick else [*core, *(p for points in others for p in points)]
    in_pairs = dict.fromkeys(name for pair in options.pairs for name in pair.split(":"))
    tasks = [(name, share) for name in options.models for share in shares(whole, SHARES)]
    tasks += [(name, core) for name in in_pairs if name not in options.models]
    failed = _work_off(tasks, options.jobs, begin + LIMIT_S)
    say(f"compiled in advance in {monotonic() - begin:.0f} s; {len(failed)} of {len(tasks)} workers failed")
    for reason in failed[:3]:
        say(f"compiling in advance: {reason}")


def _work_off(tasks: list[tuple[str, list[GridPoint]]], jobs: int, until_s: float) -> list[str]:
    """Run the tasks, `jobs` at a time; what is not finished in time is ended, never left behind on the card."""
    waiting = deque(tasks)
    running: list[tuple[str, subprocess.Popen[bytes], IO[bytes]]] = []
    failed: list[str] = []
    try:
        while (waiting or running) and monotonic() < until_s:
            while waiting and len(running) < jobs:
                running.append(_start(*waiting.popleft()))
            sleep(0.05)
            for entry in [entry for entry in running if entry[1].poll() is not None]:
                running.remove(entry)
                if entry[1].returncode:
                    entry[2].seek(0)
                    lines = entry[2].read().decode(errors="replace").strip().splitlines()
                    failed.append(f"{entry[0]}: {lines[-1] if lines else 'no reason given'}")
    finally:
        for name, process, _ in running:
            process.kill()
            process.wait()
            failed.append(f"{name}: not finished in time")
    return failed + [f"{name}: not started in time" for name, _ in waiting]


def _start(name: str, points: list[GridPoint]) -> tuple[str, subprocess.Popen[bytes], IO[bytes]]:
    errors = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the worker)
    command = [sys.executable, "-m", "pdvsim.profiler.precompile", name]
    with tempfile.TemporaryFile() as given:  # no pipe: writing to one waits for a worker that may never read
        given.write(json.dumps([p.as_dict() for p in points]).encode())
        given.seek(0)
        process = subprocess.Popen(command, stdin=given, stdout=subprocess.DEVNULL, stderr=errors)
    return name, process, errors


def main() -> int:
    """A worker: the model's name as argument, points as JSON on standard input."""
    import torch

    from pdvsim.profiler.rig import Rig, free
    from pdvsim.realrun.engine.arch import preset

    arch = preset(sys.argv[1])
    points = [GridPoint(**entry) for entry in json.load(sys.stdin)]
    shallow = replace(arch, spec=replace(arch.spec, layers=1))
    rig = Rig(shallow, torch.device("cuda"), 0, pages_of=arch.spec)
    for point in points:
        if rig.fits(point):
            launch = rig.launcher(point)
            launch()
            free(launch.lane)
    return 0


if __name__ == "__main__":
    sys.exit(main())
