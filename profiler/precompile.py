"""Compile the kernels of many points ahead, in parallel: half of a model's time would otherwise go there, one by one.

A model of one layer has the same kernels as the whole one. Worker processes launch every shape on such a model once,
which leaves the kernels in Triton's cache on disk; nothing is measured here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from time import monotonic

from pdvsim.profiler.grid import GridPoint, design
from pdvsim.profiler.options import Options
from pdvsim.sim.models.presets import HEADS

WORKERS_PER_MODEL = 3
LIMIT_S = 120.0  # for all of them; kernels missing then are compiled when first measured


def shares(points: list[GridPoint], count: int) -> list[list[GridPoint]]:
    """Points dealt to workers so that those with kernels in common go to the same one."""
    alike = sorted(points, key=lambda p: (p.chunks > 0, p.tokens, p.catch_up, p.rows, p.chunk_tokens))
    size = -(-len(alike) // count)
    return [alike[i : i + size] for i in range(0, len(alike), size)]


def precompile(options: Options) -> None:
    """Compile what the options' models need, `options.jobs` processes at a time. Failures are left to the measuring."""
    core, *others = design(drafts=True, heads=any(name.startswith(HEADS) for name in options.models))
    whole = core if options.quick else [*core, *(p for points in others for p in points)]
    in_pairs = dict.fromkeys(name for pair in options.pairs for name in pair.split(":"))
    tasks = [(name, share) for name in options.models for share in shares(whole, WORKERS_PER_MODEL)]
    tasks += [(name, core) for name in in_pairs if name not in options.models]
    until_s = monotonic() + LIMIT_S
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda task: _compile(task[0], task[1], until_s), tasks))


def _compile(name: str, points: list[GridPoint], until_s: float) -> None:
    """Compile in a process of its own, which is ended when the time is up."""
    command = [sys.executable, "-P", "-m", "pdvsim.profiler.precompile", name]
    given = json.dumps([p.as_dict() for p in points]).encode()
    if (left_s := until_s - monotonic()) > 0:
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(command, input=given, capture_output=True, timeout=left_s, check=False)


def main() -> int:
    """A worker: the model's name as argument, points as JSON on standard input."""
    import torch

    from pdvsim.profiler.rig import Rig, free
    from pdvsim.realrun.engine.arch import preset

    arch = preset(sys.argv[1])
    points = [GridPoint(**entry) for entry in json.load(sys.stdin)]
    shallow = replace(arch, spec=replace(arch.spec, layers=1))
    rig = Rig([shallow], torch.device("cuda"), 0, pages_of=arch.spec)
    for point in points:
        if rig.fits(point):
            launch = rig.launcher(point)
            launch()
            free(launch.lane)
    return 0


if __name__ == "__main__":
    sys.exit(main())
