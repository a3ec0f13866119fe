"""Tiny models for the profiler's tests, and parts of samples as a card would have given them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from pdvsim.profiler.grid import labelled
from pdvsim.profiler.header import PartHeader
from pdvsim.profiler.options import Options
from pdvsim.profiler.samples import Part, Recorder
from pdvsim.realrun.engine.arch import ModelArchitecture
from pdvsim.sim.models.presets import model
from pdvsim.sim.models.specs import ModelSpec

CARD = {
    "name": "NVIDIA H200",
    "multiprocessors": 132,
    "memory_bytes": 150_000_000_000,
    "bandwidth_bytes_per_s": 4.27e12,
    "flops_per_s": 790e12,
}
SOLO = ("verify 8x5@512", "prefill 1x512 after 0", "decode 1x1@512")
SOFTWARE = {"pdvsim": "0.1.0", "python": "3.12", "torch": "2.11", "triton": "3.6", "cuda": "13.0", "driver": None}


def tiny(name: str) -> ModelArchitecture:
    """A model of one layer; any name will do."""
    return ModelArchitecture(ModelSpec(name, "llama", 1, 32, 48, 2, 1, 16, 61), 1e4, 1e-5)


def options(folder: Path, **changes: Any) -> Options:
    """Of a tiny model, with time enough on any machine."""
    given = {"models": ("tiny-a",), "pairs": (), "output": str(folder), "quick": True, "device": "cpu"}
    given |= {"budget_s": 1e6, "pair_budget_s": 1e6}
    return Options(**{**given, **changes})


def part_header(name: str, **changes: Any) -> PartHeader:
    given: dict[str, Any] = {
        "name": name, "date": "2026-01-01T00:00:00Z", "command": "", "seed": 0, "budget_s": 100.0, "quick": False,
        "device": CARD, "software": SOFTWARE, "models": {n: asdict(model(n)) for n in name.split(":")},
        "dtype": "bfloat16", "seconds": 1.0,
    }  # fmt: skip
    return PartHeader(**given | changes)


def recorded(folder: Path) -> dict[str, Part]:
    """Samples of a model and of a pair, with times a card could have needed, in a folder."""
    recorder, pair = Recorder(folder), "tinyllama-1.1b:llama-2-7b"
    solo, both = (recorder.part(part_header(name)) for name in ("llama-2-7b", pair))
    for point, seconds in zip(map(labelled, SOLO), (4e-3, 1e-2, 3.4e-3), strict=True):
        for repeat in range(3):
            solo.add(
                section="solo", model="llama-2-7b", **point.as_dict(), bucket_rows=point.rows,
                bucket_chunk=point.chunk_tokens, context_total=point.rows * 500, repeat=repeat,
                seconds=seconds * (1 + 0.01 * repeat),
            )  # fmt: skip
    for member, (name, point) in enumerate(
        (("tinyllama-1.1b", labelled("draft 8x1@512 k=4")), ("llama-2-7b", labelled("verify 8x5@512")))
    ):
        shared = {"pair": pair, "model": name, **point.as_dict(), "bucket_rows": 8}
        for repeat in range(4):
            start = 0.006 * repeat
            both.add(
                section="corun", **shared, group=0, member=member, members=2, priority=2 - member, repeat=repeat,
                seconds=0.0055, start_s=start, end_s=start + 0.0055,
            )  # fmt: skip
            both.add(section="host", **shared, what="launch_idle", repeat=repeat, seconds=4e-5)
    recorder.save()
    return recorder.parts
