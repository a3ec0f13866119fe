"""`pdvsim probe`: how fast this machine's card is, beside the one that a profile was measured on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pdvsim.common.options import parse
from pdvsim.sim.config import Hardware

SHOWN = {  # rate: what it is of, unit, how many make one
    "bytes_per_s": ("reading and writing memory", "TB/s", 1e12),
    "flops_per_s": ("multiplying (bf16)", "Tflop/s", 1e12),
    "kernels_per_s": ("starting small kernels", "million/s", 1e6),
}


@dataclass(frozen=True)
class ProbeCommand:
    """Measure in a few seconds how fast this machine's GPU reads, multiplies and starts kernels."""

    gpu: str = Hardware.gpu
    """Card whose built-in profile it is compared with."""
    profile: str | None = None
    """A profile file (JSON) to compare with instead."""
    device: Literal["cuda", "cpu"] = "cuda"
    """cuda, or cpu to try the command."""
    json: bool = False
    """Print one JSON document instead of the table."""


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    args = parse(ProbeCommand, argv, "pdvsim probe")
    try:
        import torch
    except ModuleNotFoundError as error:
        raise ValueError(f"probe needs {error.name}: pip install 'pdvsim[gpu]'") from None
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("no CUDA device here; --device cpu tries the command")

    from pdvsim.calibration.validate.cards import probed_reference, slower
    from pdvsim.profiler.probe import probe
    from pdvsim.study.output import dumps
    from pdvsim.view.table import grid

    reference = probed_reference(args.profile, args.gpu)
    found = probe(args.device)
    than = slower(found, reference)
    times = dict(zip(SHOWN, than, strict=True)) if than else {}
    if args.json:
        print(dumps(found | {"speed": {name: 1 / ratio for name, ratio in times.items()} or None}))
        return 0
    rows = [
        [
            what,
            f"{found[name] / scale:.2f} {unit}",
            f"{found[f'{name}_spread']:.1%}",
            f"{1 / times[name] - 1:+.1%}" if name in times else "-",
        ]
        for name, (what, unit, scale) in SHOWN.items()
    ]
    print(grid([found["device"], "median", "5% to 95%", "against the profile's card"], rows))
    if reference is None:
        print("the profile's card was not probed when it was measured")
    return 0
