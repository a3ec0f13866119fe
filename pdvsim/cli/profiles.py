"""`pdvsim profile --list`: GPUs, models, profiles and samples included in pdvsim."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from pdvsim.sim.hardware.models import GPUS, PRESETS


def show_profiles(json: bool) -> int:
    """List the GPUs, models, profiles and measured samples included in pdvsim; returns the exit code."""
    from pdvsim.sim.hardware.profile import builtin
    from pdvsim.study import output
    from pdvsim.view import table

    profiles = {name: builtin(name) for name in GPUS}
    document = {
        "gpus": [
            {
                "gpu": name,
                "bandwidth_tb_per_s": gpu.bandwidth_bytes_per_s / 1e12,
                "tflop_per_s": gpu.flops_per_s / 1e12,
                "memory_gib": gpu.memory_bytes / 2**30,
                "source": gpu.source,
            }
            for name, gpu in GPUS.items()
        ],
        "profiles": [
            {
                "gpu": name,
                "profile": p.name,
                "foundation": p.foundation,
                "models": len(p.models),
                "forward_error_bar": max(p.uncertainty.values(), default=None),
            }
            for name, p in profiles.items()
        ],
        "models": [
            {
                "model": name,
                "params_b": model.params / 1e9,
                "weights_gb": model.weight_bytes / 1e9,
                "kv_kib_per_token": model.kv_bytes_per_token / 2**10,
            }
            for name, model in PRESETS.items()
        ],
    }
    document["samples"] = shipped(Path(str(files("pdvsim.calibration"))) / "data")
    print(output.dumps(document) if json else table.profiles_table(document))
    return 0


def shipped(data: Path) -> list[dict[str, Any]]:
    """One line per set of samples in a folder, with its GPU."""
    from pdvsim.profiler.header import HEADER, load_header

    lines = []
    for folder in (path.parent for path in sorted(data.glob(f"*/{HEADER}"))):
        header = load_header(folder)
        parts, software = header.parts, header.software
        lines.append(
            {
                "samples": folder.name,
                "gpu": header.device.name,
                "models": sum(":" not in part.name for part in parts),
                "pairs": sum(":" in part.name for part in parts),
                "points": sum(part.points for part in parts),
                "rows": header.samples,
                "left_out": sum(len(part.left_out) for part in parts),
                "measured": min(part.date for part in parts)[:10],
                **{name: software.get(name) for name in ("torch", "triton", "cuda", "driver")},
            }
        )
    return lines
