"""Measure models, pairs and the host's costs on this machine's GPU, for `pdvsim profile`.

Each model and each pair is a part of the samples. A second run into the same folder continues where the first stopped.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from pdvsim.profiler import provenance
from pdvsim.profiler.corun import measure_pair
from pdvsim.profiler.grid import SMALL_PARAMS, GridPoint, design, ordered
from pdvsim.profiler.header import SCHEMA
from pdvsim.profiler.heat import groups, heat
from pdvsim.profiler.layers import measure_layers
from pdvsim.profiler.options import Options
from pdvsim.profiler.precompile import precompile
from pdvsim.profiler.rig import QUICK, Effort, Rig, free
from pdvsim.profiler.samples import POINT, Part, Recorder
from pdvsim.realrun.engine.arch import ModelArchitecture
from pdvsim.realrun.telemetry import now
from pdvsim.sim.models.presets import HEADS

CONSECUTIVE_FAILURES = 3  # a broken device fails every point; stop asking

Say = Callable[[str], None]
Step = Callable[[int], None]


class Profiler:
    """Runs the options, part by part. `say` gets what failed or throttled, `step` the number of points processed."""

    def __init__(
        self, options: Options, lookup: Callable[[str], ModelArchitecture], say: Say, step: Step = lambda done: None
    ) -> None:
        self.options, self.lookup, self.say, self.step = options, lookup, say, step
        self.device = torch.device(options.device)
        self.recorder = Recorder(Path(options.output))
        self.dealt = 0

    def run(self) -> list[str]:
        """Measure everything; returns the models and pairs that failed, whose finished points are kept."""
        if self.options.jobs and self.device.type == "cuda":
            precompile(self.options)
        tasks = [(name, self.model) for name in self.options.models] + [
            (pair, self.pair) for pair in self.options.pairs
        ]
        failed = []
        for name, measure in tasks:
            try:
                measure(name)
            except ValueError:
                raise
            except Exception as error:  # the card may still do for the others
                failed.append(name)
                self.say(f"{name}: failed: {' '.join(f'{type(error).__name__}: {error}'.split())[:300]}")
            self._release()
        return failed

    def points(self, arch: ModelArchitecture) -> list[GridPoint]:
        """The points of a model in the order to measure them."""
        classes = design(drafts=self._small(arch), heads=arch.spec.name.startswith(HEADS))
        return ordered(classes[:1] if self.options.quick else classes, self.options.seed)

    def _small(self, arch: ModelArchitecture) -> bool:
        """Return whether the model may draft."""
        return arch.spec.name in self.options.drafts or arch.spec.params <= SMALL_PARAMS

    def count(self) -> int:
        """Points of all models, for a bar; a pair counts as one."""
        return sum(len(self.points(self.lookup(name))) for name in self.options.models) + len(self.options.pairs)

    def model(self, name: str) -> None:
        """Solo forwards of one model."""
        begin, options, arch = monotonic(), self.options, self.lookup(name)
        part = self.recorder.part(self.header(name, [arch]))
        points, done = self.points(arch), part.done("solo", *POINT)
        todo = [p for p in points if tuple(getattr(p, field) for field in POINT) not in done]
        self.dealt += len(points) - len(todo)
        unheated: dict[int, list[GridPoint]] = {}
        if not options.quick:
            self._layers(part, arch)
            if self.device.type == "cuda":
                heated = part.done("heat", "group")
                unheated = {n: group for n, group in enumerate(groups(self._small(arch))) if (n,) not in heated}
        if not todo and not unheated:
            return
        rig = Rig([arch], self.device, options.seed)
        part.header["before"] = part.header.get("before") or self._reading(rig, arch)
        effort = QUICK if options.quick else Effort()
        failures = 0
        try:
            for point in todo:
                reason = self._refusal(rig, point, monotonic() - begin, failures)
                if reason is None:
                    try:
                        samples, shape = rig.measure(point, effort)
                        for repeat, (seconds, data) in enumerate(samples):
                            part.measured(
                                "solo", arch.spec.name, point, shape, context_total=data.context_total,
                                longest=data.longest, repeat=repeat, seconds=seconds,
                            )  # fmt: skip
                        failures = 0
                    except Exception as error:  # one shape the card or a kernel refuses must not cost the others
                        reason, failures = f"{type(error).__name__}: {error}", failures + 1
                if reason is not None:
                    part.leave_out(point.label(), reason)
                self._dealt_one()
                self.recorder.keep()
            heat(rig, part, unheated)
            part.header["after"] = self._reading(rig, arch)
        finally:
            part.header["seconds"] += monotonic() - begin
            self.recorder.save()

    def pair(self, pair: str) -> None:
        """Co-runs and host costs of one pair."""
        begin, options = monotonic(), self.options
        archs = [self.lookup(name) for name in pair.split(":")]
        part = self.recorder.part(self.header(pair, archs))
        rig = Rig(archs, self.device, options.seed)
        try:
            measure_pair(rig, part, options.quick, options.pair_budget_s, self.recorder.keep)
        finally:
            part.header["seconds"] += monotonic() - begin
            self.recorder.save()
        self._dealt_one()

    def _dealt_one(self) -> None:
        self.dealt += 1
        self.step(self.dealt)

    @cached_property
    def ground(self) -> dict[str, Any]:
        """What is measured on."""
        return {"device": provenance.card(self.device), "software": provenance.software()}

    def header(self, name: str, archs: Sequence[ModelArchitecture]) -> dict[str, Any]:
        """Return the provenance of a part."""
        options = self.options
        return {
            "schema_version": SCHEMA,
            "name": name,
            "date": now(),
            "command": options.command,
            "seed": options.seed,
            "budget_s": options.pair_budget_s if ":" in name else options.budget_s,
            "quick": options.quick,
            **self.ground,
            "models": {arch.spec.name: asdict(arch.spec) for arch in archs},
            "dtype": "bfloat16" if self.device.type == "cuda" else "float32",
            "left_out": [],
            "before": None,
            "after": None,
            "resumed": None,
            "seconds": 0.0,
        }

    def _refusal(self, rig: Rig, point: GridPoint, spent_s: float, failures: int) -> str | None:
        if not rig.fits(point):
            return "does not fit into memory"
        if spent_s > self.options.budget_s:
            return f"budget of {self.options.budget_s:g} s spent"
        if failures >= CONSECUTIVE_FAILURES:
            return f"{failures} points before it failed"
        return None

    def _layers(self, part: Part, arch: ModelArchitecture) -> None:
        name = arch.spec.name
        known = {tokens for (tokens,) in part.done("layers", "chunk_tokens")}

        def add(tokens: int, repeat: int, seconds: float) -> None:
            padded = {"chunk_tokens": tokens, "bucket_chunk": tokens, "chunks": 1}
            part.add(section="layers", model=name, kind="prefill", repeat=repeat, seconds=seconds, **padded)

        if measure_layers(arch, self.device, self.options.seed, known, self.options.budget_s, add):
            self.recorder.save()

    def _reading(self, rig: Rig, arch: ModelArchitecture) -> dict[str, Any] | None:
        """Clocks and power while the model runs; throttling is reported immediately."""
        if self.device.type != "cuda":
            return None
        point = next(p for p in self.points(arch) if p.kind == "verify")
        launch = rig.launcher(point)
        launch()
        reading = provenance.reading(self.device, launch)
        free(launch.lane)
        if reading and reading["throttled"]:
            self.say(f"{arch.spec.name}: the GPU is throttled: {', '.join(reading['throttled'])}")
        return reading

    def _release(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
