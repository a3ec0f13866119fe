"""`pdvsim profile`: measure, or list what pdvsim includes."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pdvsim.cli.command import Command
from pdvsim.common.commandline import flags_of
from pdvsim.common.console import say
from pdvsim.common.options import options
from pdvsim.common.progress import Progress
from pdvsim.profiler.options import Options
from pdvsim.sim.limits import of
from pdvsim.sim.models.presets import PRESETS, model_or_shard, pair
from pdvsim.sim.prices.cards import GPUS
from pdvsim.sim.prices.links import NVLINK5_CARDS, nvlink_of

if TYPE_CHECKING:
    from pdvsim.profiler.samples import Samples


@dataclass(frozen=True)
class ProfileCommand(Command, Options):
    """Measure models on this machine's GPU: forwards, drafts and prefills alone, co-running pairs, and host costs."""

    list_: bool = False
    """List the GPUs, models and profiles included in pdvsim; measure nothing."""
    json: Annotated[bool, of("list_")] = False
    """Print one JSON document instead of the tables."""

    def __post_init__(self) -> None:
        if not self.models and not self.pairs and not self.list_:
            raise ValueError("nothing to measure: name --models or --pairs")
        super().__post_init__()

    def execute(self) -> int:
        """Measure, or list; returns the exit code."""
        if self.list_:
            return self._list()

        models, pairs = [model_or_shard(name).name for name in self.models], [pair(name).name for name in self.pairs]
        try:
            import torch
        except ImportError:
            raise ValueError("measuring needs torch: pip install 'pdvsim[gpu]'") from None
        if not torch.cuda.is_available():
            raise ValueError("no CUDA device: profiling needs one")

        from pdvsim.bench.output import check_folder
        from pdvsim.profiler.measure import Profiler
        from pdvsim.profiler.samples import HEADER, SAMPLES, load
        from pdvsim.realrun.engine.arch import preset

        folder = check_folder(Path(self.output))
        given = {name: getattr(self, name) for name in options(ProfileCommand)}
        changed = {name: value for name, value in given.items() if value != options(ProfileCommand)[name].default}
        command = shlex.join(["pdvsim", "profile", *flags_of(changed)])
        measured = replace(self, models=tuple(models), pairs=tuple(pairs), output=str(folder), command=command)
        lines: list[str] = []
        profiler = Profiler(measured, preset, lines.append)
        failed: list[str] = []
        interrupted = False
        try:
            with Progress(profiler.count(), "points", after_s=0) as progress:
                profiler.step = progress.update
                failed = profiler.run()
        except KeyboardInterrupt:
            interrupted = True
        for line in lines:
            say("pdvsim", line)
        if (folder / SAMPLES).exists():
            print(summary(load(folder)))
            say("pdvsim", f"saved {folder / SAMPLES}, {folder / HEADER}")
        if interrupted:
            say("pdvsim", f"interrupted: what is measured is kept in {folder}; repeat the command to continue")
        return 130 if interrupted else int(bool(failed))

    def _list(self) -> int:
        """List the GPUs, models and profiles included in pdvsim; returns the exit code."""
        from pdvsim.sim.engines.profiles import engine_profile
        from pdvsim.sim.prices.kernels import shipped_tables
        from pdvsim.sim.prices.profile import Profile, builtin
        from pdvsim.view.comparison import profiles_table

        rows: list[tuple[str, str, Profile, float | None]] = []
        for name in GPUS:
            profile = builtin(name)
            rows.append((name, "pdvsim", profile, max(profile.uncertainty.values(), default=None)))
        for engine, name, _ in shipped_tables():
            composed = engine_profile(engine, name)
            rows.append((name, engine, composed, composed.error.tpot if composed.error else None))
        document = {
            "gpus": [
                {
                    "gpu": name,
                    "bandwidth_tb_per_s": gpu.bandwidth_bytes_per_s / 1e12,
                    "tflop_per_s": gpu.flops_per_s / 1e12,
                    "memory_gib": gpu.memory_bytes / 2**30,
                    "nvlink5_gpus": nvlink_of(name)[1] if name in NVLINK5_CARDS else None,
                    "source": gpu.source,
                }
                for name, gpu in GPUS.items()
            ],
            "profiles": [
                {
                    "gpu": name,
                    "engine": engine,
                    "profile": p.name,
                    "foundation": p.foundation,
                    "models": len(p.models) or None,
                    "forward_error_bar": bar,
                }
                for name, engine, p, bar in rows
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
        self.show(document, profiles_table(document))
        return 0


def summary(samples: Samples) -> str:
    """One line per part: measured and skipped points."""
    lines = [f"{samples.header.device.name}: {samples.header.samples} samples"]
    for part in samples.header.parts:
        left = f", {len(part.left_out)} points left out" if part.left_out else ""
        lines.append(f"  {part.name}: {part.points} points, {part.samples} samples in {part.seconds:.0f} s{left}")
    return "\n".join(lines)
