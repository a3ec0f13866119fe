"""The samples that come with pdvsim: those that its profiles were fitted on."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from pdvsim.profiler.header import HEADER, load_header


def shipped(data: Path | None = None) -> list[dict[str, Any]]:
    """A line for each set of samples."""
    data = data or Path(str(resources.files("pdvsim.calibration"))) / "data"
    return [_line(path.parent) for path in sorted(data.glob(f"*/{HEADER}"))]


def _line(folder: Path) -> dict[str, Any]:
    header = load_header(folder)
    parts, software = header.parts, header.software
    return {
        "samples": folder.name,
        "gpu": header.device.name,
        "models": sum(":" not in part.name for part in parts),
        "pairs": sum(":" in part.name for part in parts),
        "points": sum(part.points for part in parts),
        "rows": header.samples,
        "left_out": sum(len(part.left_out) for part in parts),
        "measured": f"{min(part.date for part in parts)[:10]}",
        "torch": software.get("torch"),
        "triton": software.get("triton"),
        "cuda": software.get("cuda"),
        "driver": software.get("driver"),
    }
