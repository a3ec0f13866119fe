"""`pdvsim validate --probe`: how fast this machine's card is, compared with the one that a profile was measured on."""

from __future__ import annotations

from typing import Literal

SHOWN = {  # rate: what it is of, unit, how many make one
    "bytes_per_s": ("reading and writing memory", "TB/s", 1e12),
    "flops_per_s": ("multiplying (bf16)", "Tflop/s", 1e12),
    "kernels_per_s": ("starting small kernels", "million/s", 1e6),
}


def show_probe(gpu: str, profile: str | None, device: Literal["cuda", "cpu"], json: bool) -> int:
    """Measure how fast this machine's GPU reads, multiplies and starts kernels, and print it; returns the exit code."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise ValueError(f"--probe needs {error.name}: pip install 'pdvsim[gpu]'") from None
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("no CUDA device here; --tiny tries the command on the CPU")

    from pdvsim.calibration.validate.cards import probed_reference, slower
    from pdvsim.profiler.probe import probe
    from pdvsim.study.output import dumps
    from pdvsim.view.table import grid

    reference = probed_reference(profile, gpu)
    found = probe(device)
    than = slower(found, reference)
    times = dict(zip(SHOWN, than, strict=True)) if than else {}
    if json:
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
