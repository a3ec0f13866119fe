"""`pdvsim profiles`: what comes with pdvsim."""

from __future__ import annotations

from pdvsim.cli.args import ProfilesCommand, parse
from pdvsim.sim.hardware.models import GPUS, PRESETS


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    args = parse(ProfilesCommand, argv, "pdvsim profiles")

    from pdvsim.calibration.shipped import shipped
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
    if samples := shipped():
        document["samples"] = samples
    print(output.dumps(document) if args.json else table.profiles_table(document))
    return 0
