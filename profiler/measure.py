"""Measure models, pairs and the host's costs on this machine's GPU, for `pdvsim profile`.

Each model and each pair is a part of the samples. A second run into the same folder continues where the first stopped.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple
from functools import cached_property, partial
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import torch

from pdvsim.profiler import corun, provenance
from pdvsim.profiler.grid import SMALL_PARAMS, GridPoint, design, ordered
from pdvsim.profiler.header import Card, PartHeader, Reading
from pdvsim.profiler.heat import groups, heat
from pdvsim.profiler.layers import measure_layers
from pdvsim.profiler.options import Options
from pdvsim.profiler.precompile import precompile
from pdvsim.profiler.rig import QUICK, Effort, Rig, free
from pdvsim.profiler.samples import POINT, Part, Recorder
from pdvsim.realrun.engine.arch import ModelArchitecture
from pdvsim.realrun.telemetry import now
from pdvsim.sim.models.presets import HEADS

CONSECUTIVE_FAILURES = 3  # a broken device fails everything; stop asking

Say = Callable[[str], None]
Step = Callable[[int], None]


class Measurement(NamedTuple):
    """Something to measure: what it is called, the points that it launches, and what measures and records it."""

    label: str
    points: Sequence[GridPoint]
    measure: Callable[[], None]


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

    def heated(self, arch: ModelArchitecture) -> list[tuple[GridPoint, ...]]:
        """The groups of a model that are launched without a pause."""
        return [] if self.options.quick or self.device.type != "cuda" else groups(self._small(arch))

    def count(self) -> int:
        """Everything to measure, for a bar."""
        archs = map(self.lookup, self.options.models)
        alone = sum(len(self.points(arch)) + len(self.heated(arch)) for arch in archs)
        return alone + len(self.options.pairs) * (1 + len(corun.groups(self.options.quick)))

    def model(self, name: str) -> None:
        """Solo forwards of one model."""
        begin, options, arch = monotonic(), self.options, self.lookup(name)
        part = self.recorder.part(self.header(name, [arch]))
        points, done = self.points(arch), part.done("solo", *POINT)
        todo = [point for point in points if astuple(point) not in done]
        known = part.done("heat", "group")
        unheated = [(n, group) for n, group in enumerate(self.heated(arch)) if (n,) not in known]
        if not options.quick and measure_layers(part, arch, self.device, options.seed, options.budget_s):
            self.recorder.save()
        self.dealt += len(points) - len(todo) + len(self.heated(arch)) - len(unheated)
        if not todo and not unheated:
            return
        rig = Rig([arch], self.device, options.seed)
        part.header.before = part.header.before or self._reading(rig, arch)
        with self._timed(part, begin):
            alone = [Measurement(point.label(), [point], partial(self._solo, rig, part, point)) for point in todo]
            heats = [Measurement(f"heat {n}", group, partial(heat, rig, part, n, group)) for n, group in unheated]
            self._work_off(rig, part, alone, options.budget_s, begin)
            self._work_off(rig, part, heats, math.inf, begin)
            part.header.after = self._reading(rig, arch)

    def _solo(self, rig: Rig, part: Part, point: GridPoint) -> None:
        """One point alone."""
        samples, shape = rig.measure(point, QUICK if self.options.quick else Effort())
        for repeat, (seconds, data) in enumerate(samples):
            part.measured(
                "solo", part.header.name, point, shape, context_total=data.context_total, longest=data.longest,
                repeat=repeat, seconds=seconds,
            )  # fmt: skip

    def pair(self, pair: str) -> None:
        """Co-runs and host costs of one pair."""
        begin, options = monotonic(), self.options
        archs = [self.lookup(name) for name in pair.split(":")]
        part = self.recorder.part(self.header(pair, archs))
        rig = Rig(archs, self.device, options.seed)
        runs = corun.CoRuns(rig, part, options.quick)
        tasks = [] if part.done("host", "what") else [Measurement("host costs", [], runs.host)]
        known = part.done("corun", "group")
        for number, setting, members in corun.groups(options.quick):
            if (number,) not in known:
                label = f"{setting}: {' + '.join(point.label() for point in members)}"
                tasks.append(Measurement(label, members, partial(runs.group, number, setting, members)))
        self.dealt += 1 + len(corun.groups(options.quick)) - len(tasks)
        with self._timed(part, begin):
            self._work_off(rig, part, tasks, options.pair_budget_s, monotonic())

    @contextmanager
    def _timed(self, part: Part, begin_s: float) -> Iterator[None]:
        """Save a part in any case, with the time that it took."""
        try:
            yield
        finally:
            part.header.seconds += monotonic() - begin_s
            self.recorder.save()

    def _work_off(self, rig: Rig, part: Part, tasks: Sequence[Measurement], budget_s: float, begin_s: float) -> None:
        """Measure as far as the time goes; note what is left out, and why. One that fails must not cost the others."""
        failures = 0
        for label, points, measure in tasks:
            reason = ""
            if not all(map(rig.fits, points)):
                reason = "does not fit into memory"
            elif monotonic() - begin_s > budget_s:
                reason = f"budget of {budget_s:g} s spent"
            elif failures >= CONSECUTIVE_FAILURES:
                reason = f"{failures} before it failed"
            else:
                try:
                    measure()
                    failures = 0
                except Exception as error:
                    reason = f"{type(error).__name__}: {error}"
                    failures += CONSECUTIVE_FAILURES if isinstance(error, TimeoutError) else 1  # a device that hangs
            if reason:
                part.leave_out(label, reason)
            self.dealt += 1
            self.step(self.dealt)
            self.recorder.keep()

    @cached_property
    def ground(self) -> tuple[Card, dict[str, str | None]]:
        """What is measured on: the card, and the versions of all software."""
        return provenance.card(self.device), provenance.software()

    def header(self, name: str, archs: Sequence[ModelArchitecture]) -> PartHeader:
        """Return the provenance of a part."""
        options, (card, software) = self.options, self.ground
        return PartHeader(
            name=name, date=now(), command=options.command, seed=options.seed, quick=options.quick, device=card,
            budget_s=options.pair_budget_s if ":" in name else options.budget_s, software=software,
            models={arch.spec.name: asdict(arch.spec) for arch in archs},
            dtype="bfloat16" if self.device.type == "cuda" else "float32",
        )  # fmt: skip

    def _reading(self, rig: Rig, arch: ModelArchitecture) -> Reading | None:
        """Clocks and power while the model runs; throttling is reported immediately."""
        if self.device.type != "cuda":
            return None
        point = next(p for p in self.points(arch) if p.kind == "verify")
        launch = rig.launcher(point)
        launch()
        reading = provenance.reading(self.device, launch)
        free(launch.lane)
        if reading and reading.throttled:
            self.say(f"{arch.spec.name}: the GPU is throttled: {', '.join(reading.throttled)}")
        return reading

    def _release(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
