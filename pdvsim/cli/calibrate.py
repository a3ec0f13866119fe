"""`pdvsim calibrate`: fit a profile to samples, logs of an engine or its kernels, or a correction to its benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from pdvsim.cli.command import Command
from pdvsim.common.console import say
from pdvsim.common.files import write_all, write_whole
from pdvsim.common.progress import Progress
from pdvsim.sim.config import Acceptance, Hardware, Server
from pdvsim.sim.core import ServingEngine
from pdvsim.sim.limits import Paths, Placed, Shards, Tokens, check_ranges
from pdvsim.sim.models import presets
from pdvsim.sim.prices.cards import gpu
from pdvsim.sim.relevance import vet
from pdvsim.view.table import cell, grid, percent_cell

if TYPE_CHECKING:
    from pdvsim.calibration.fit.build import Calibration

PROFILE, MACHINE = "profile.json", "machine.json"  # files written where no other is named
WHEN = ("before", "after")
COMPARED = {"output_throughput": "throughput", "mean_tpot_ms": "mean TPOT", "mean_ttft_ms": "mean TTFT"}
FITTED = ("output_throughput", "mean_tpot_ms")
KERNEL_COLUMNS = ("kernels", "points", "median error", "p95")


Fitted = tuple[dict[Path, bytes], dict[str, Any], str]  # files, their document, and its tables


@dataclass(frozen=True)
class FittingCommand(Command):
    """One kind of calibration."""

    output: str = PROFILE
    """File to write: a profile for --profile of `pdvsim run` (with --from-kernels it ends in .npz) or, with
    --from-bench, a correction for --machine. Default: profile.json or machine.json."""

    def __post_init__(self) -> None:
        check_ranges(self)

    def fitted(self, path: Path) -> Fitted:
        """Fit, for that file."""
        raise NotImplementedError

    def execute(self) -> int:
        from pdvsim.bench import output

        files, document, text = self.fitted(output.check_file(Path(self.output)))
        write_all(files)
        names = list(map(str, files))
        self.show(document | {"files": names}, text)
        say("pdvsim", f"saved {', '.join(names)}")
        return 0


@dataclass(frozen=True)
class OtherEngine(FittingCommand):
    """An engine that is not measured here"""

    gpu: str | None = None
    """The GPU it ran on, e.g. a100-80gb or a card.toml."""


@dataclass(frozen=True)
class CalibrateSamples(FittingCommand):
    """Fit samples of `pdvsim profile`, the default"""

    samples: Placed[str | None] = None
    """Folder of samples.parquet and header.json, as written by `pdvsim profile`, or that samples.parquet."""
    served: Paths = ()
    """Results of realrun, or files of its runs. Their warm-ups correct forward and host times to those in service."""
    name: str | None = None
    """Name of the GPU in the profile; default: the profile's file name."""
    plots: str | None = None
    """Folder for the residual plots; default: the profile's folder."""

    def fitted(self, path: Path) -> Fitted:
        if self.samples is None:
            raise ValueError(
                "name a folder of samples, logs of your engine with --from-vllm, or results with --from-bench"
            )

        from pdvsim.bench import output
        from pdvsim.calibration.fit import build
        from pdvsim.calibration.fit.service import join_s, read_gaps, read_served

        samples, served = build.read(self.samples), read_served(self.served)
        joined_s = join_s(read_gaps(self.served))
        folder = output.check_folder(Path(self.plots) if self.plots else path.parent)
        with Progress(build.parts(samples), "fits", self.json) as progress:
            done = count(1)
            name, step = self.name or path.stem, lambda: progress.update(next(done))
            calibration = build.calibrate(samples, name, step, served, joined_s)
        document = calibration.document()
        files = {path: build.as_bytes(calibration.profile), **_plots(calibration, folder, path.stem)}
        return files, document, _table(document)


@dataclass(frozen=True)
class CalibrateBench(OtherEngine):
    """Correct a profile by benchmarks of your server (--from-bench)"""

    key = "from_bench"

    output: str = MACHINE
    from_bench: Paths = ()
    """Instead of SAMPLES: results of `vllm bench serve` or `sglang.bench_serving` of one server. Fits its speed and
    step overhead; all commands take the file as --machine."""
    pair: str | None = None
    """The models it served, as draft:target, or, with --from-bench, a target alone (or --model); default: the model
    that the results name."""
    engine: ServingEngine | None = None
    """With --from-kernels: vllm, sglang or trtllm. With --from-bench: the engine whose profile is corrected (default:
    as in `pdvsim run`), and that of all commands with --machine."""
    tensor_parallel_size: Shards = 1
    """GPUs that the model is sharded over."""
    max_num_batched_tokens: Tokens = Server.max_num_batched_tokens
    """Token budget of a step of the server."""

    def fitted(self, path: Path) -> Fitted:
        from pdvsim.bench.output import dumps
        from pdvsim.calibration.fit.bench import described, fit_bench, separation
        from pdvsim.calibration.validate.bench import check_drafter, read_load

        loads = [read_load(name) for name in self.from_bench]
        named = {load.model for load in loads}
        if self.pair is None and (len(named) != 1 or None in named):
            raise ValueError("the results do not name one model: give --model, or --pair draft:target")
        pair = self.pair or str(named.pop())
        if any(load.k for load in loads):
            check_drafter(pair, Server())
        server = Server(pair, max_num_batched_tokens=self.max_num_batched_tokens)
        hardware = Hardware(
            self.gpu or Hardware.gpu, tensor_parallel_size=self.tensor_parallel_size, engine=self.engine, band=False
        )
        cases = [(load, load.experiment("colocated", Acceptance(), server, hardware, None)) for load in loads]
        hardware = cases[0][1].hardware
        vet([experiment for _, experiment in cases])
        fit = fit_bench(cases)
        about = {"pace_engine": hardware.predicted_engine, "model": server.pair, "gpu": hardware.gpu}
        document = fit.document() | about | {"fitted_to": list(self.from_bench)}
        content = (dumps(document) + "\n").encode()
        rows: list[dict[str, Any]] = []
        with Progress(2 * len(cases), "simulations", self.json) as progress, TemporaryDirectory() as scratch:
            machine, done = Path(scratch) / "machine.json", count(1)
            write_whole(machine, content)
            for name, (load, experiment) in zip(self.from_bench, cases, strict=True):
                corrected = replace(experiment, hardware=replace(hardware, machine=str(machine)))
                row: dict[str, Any] = {"bench": name}
                for when, one in zip(WHEN, (experiment, corrected), strict=True):
                    errors = load.predicted(one).errors
                    row[when] = {metric: errors[metric] for metric in COMPARED if metric in errors}
                    progress.update(next(done))
                rows.append(row)
        before, after = (fmean(abs(row[when][m]) for row in rows for m in FITTED if m in row[when]) for when in WHEN)
        if after > before:
            raise ValueError(
                "the correction predicts throughput and TPOT of these results worse than none "
                f"({percent_cell(before)} off before, {percent_cell(after)} after): nothing is saved"
            )
        notes, figures = separation(fit, len(loads)), described(fit)
        changes = [
            [
                Path(row["bench"]).name,
                *(" -> ".join(percent_cell(row[when][m], "+") for when in WHEN if m in row[when]) for m in COMPARED),
            ]
            for row in rows
        ]
        lines = [
            f"Correction of the profile of {hardware.predicted_engine} on {hardware.gpu}",
            *(f"{name + ':':{max(map(len, figures)) + 2}}{value}" for name, value in figures.items()),
            *notes,
            "\nError of the simulated benchmarks, without -> with the correction",
            grid(["", *COMPARED.values()], changes),
            "\nEvery command takes the file as --machine",
        ]
        return {path: content}, document | {"results": rows, "notes": notes}, "\n".join(lines)


@dataclass(frozen=True)
class CalibrateKernels(OtherEngine):
    """Pack tables of an engine's kernels (--from-kernels)"""

    key = "from_kernels"

    from_kernels: str | None = None
    """Instead of SAMPLES: folder `systems` of the package aiconfigurator-core, with kernels that were timed inside
    engines. Writes a file of tables, to be used as --profile."""
    engine: ServingEngine | None = None
    """The engine of the kernels: vllm, sglang or trtllm."""

    def fitted(self, path: Path) -> Fitted:
        from pdvsim.calibration.kernels import PARTS, as_bytes, left_out, pack

        if self.engine in (None, "pdvsim") or self.gpu is None:
            raise ValueError("--from-kernels needs --engine (vllm, sglang or trtllm) and --gpu")
        if not self.output.endswith(".npz"):
            raise ValueError(f"--output {self.output}: a file of kernel tables must end in .npz")
        with Progress(PARTS, "tables", self.json) as progress:
            done = count(1)
            tables = pack(Path(str(self.from_kernels)), self.engine, gpu(self.gpu), lambda: progress.update(next(done)))
        errors = left_out(tables)
        rows = [[one["kernels"], f"{one['points']:,}", *_median_p95(one)] for one in errors]
        title = f"Errors at points left out; {self.engine} {tables.version} on {tables.about['system']}"
        document = {"about": tables.about, "left_out": errors}
        return {path: as_bytes(tables)}, document, f"{title}\n{grid(KERNEL_COLUMNS, rows)}"


@dataclass(frozen=True)
class CalibrateEngine(OtherEngine):
    """Fit whole steps of your engine, from its log (--from-vllm)"""

    key = "from_vllm"

    from_vllm: Paths = ()
    """Instead of SAMPLES: vLLM logs with --enable-logging-iteration-details, at least one without speculation."""
    bench: Paths = ()
    """Results of `vllm bench serve --save-result --save-detailed` on the same servers."""
    pair: str | None = None
    """The models it served, as draft:target."""
    name: str | None = None
    """Name of the GPU in the profile; default: the profile's file name."""

    def fitted(self, path: Path) -> Fitted:
        from pdvsim.calibration.fit.build import as_bytes
        from pdvsim.calibration.fit.engine import calibrate_engine, read_bench, read_logs

        if self.pair is None or self.gpu is None:
            raise ValueError("--from-vllm needs --pair (the models it served) and --gpu")
        log, benches = read_logs(self.from_vllm), tuple(map(read_bench, self.bench))
        fit = calibrate_engine(log, benches, presets.pair(self.pair), gpu(self.gpu), self.name or path.stem)
        rows = [[str(size), *_median_p95(error)] for size, error in fit.errors.items()]
        lines = [
            f"Errors at batch sizes left out of the fit; {fit.profile.foundation}, {fit.steps:,} steps",
            grid(["concurrent requests, up to", "median error", "p95"], rows),
            f"\nBetween steps: {cell(fit.host_s, 2, 1e3)} ms" + ("" if benches else " (no --bench: assumed 0)"),
        ]
        lines += [f"KV cache: --kv-capacity-tokens {log.cache_tokens}"] if log.cache_tokens else []
        return {path: as_bytes(fit.profile)}, fit.document(), "\n".join(lines)


@dataclass(frozen=True)
class CalibrateCommand(Command):
    """Fit a profile to measured samples and print its errors on held-out samples."""

    kinds = (CalibrateBench, CalibrateKernels, CalibrateEngine, CalibrateSamples)


def _plots(calibration: Calibration, folder: Path, stem: str) -> dict[Path, bytes]:
    from pdvsim.bench.output import picture
    from pdvsim.view.calibration_plots import corun_figure, solo_figure

    figures = {"solo": solo_figure(calibration.solos, calibration.profile.foundation)}
    if calibration.corun:
        figures["corun"] = corun_figure(calibration.corun, calibration.profile.foundation)
    content = {folder / f"{stem}.{name}.png": figure for name, figure in figures.items()}
    return {path: picture(figure, path) for path, figure in content.items()}


def _median_p95(errors: Mapping[str, float]) -> list[str]:
    return [percent_cell(errors[key]) for key in ("median", "p95")]


def _table(document: Mapping[str, Any]) -> str:
    """Held-out errors by model, then those of co-running launches."""
    header = ["model alone", "points", "median error", "p95", "spread of samples", "p95"]
    rows = [
        [model, str(solo["points"]), *_median_p95(solo), *_median_p95(solo["spread"])]
        for model, solo in document["solo"].items()
    ]
    blocks = [f"Errors at points held out of the fit; {document['foundation']}\n" + grid(header, rows)]
    if document["corun"]:
        names = {"by_shape": "shapes not fitted", "by_models": "models not fitted", "no_triples": "no triples fitted"}
        header = ["slowdown when co-running", "held out", "launches", "median error", "p95"]
        rows = []
        for key, errors in document["corun"].items():
            works, _, how = key.partition("_")
            rows.append([works, names[how], str(errors["works"]), *_median_p95(errors)])
        blocks.append(grid(header, rows))
    host = document["host"]
    costs = ", ".join(f"{name.removesuffix('_s')} {cell(host[name], 1, 1e6)} us" for name in host)
    return "\n\n".join([*blocks, f"Host: {costs}"])
