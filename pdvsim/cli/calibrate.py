"""`pdvsim calibrate`: fit a profile to samples, logs of an engine or its kernels, or a correction to its benchmarks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdvsim.cli.command import Command, check_kinds
from pdvsim.common.console import say
from pdvsim.common.files import write_all
from pdvsim.common.progress import Progress
from pdvsim.sim.config import Hardware, Server
from pdvsim.sim.core import ServingEngine
from pdvsim.sim.limits import Paths, Placed, Shards, Tokens, check_ranges
from pdvsim.sim.models.presets import pair
from pdvsim.sim.prices.cards import gpu
from pdvsim.view.table import cell, grid, percent_cell

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdvsim.calibration.fit.build import Calibration

PROFILE, MACHINE = "profile.json", "machine.json"  # files written where no other is named
KINDS = {  # which options can be combined with each
    "from_bench": {"pair", "gpu", "engine", "tensor_parallel_size", "max_num_batched_tokens", "output", "json"},
    "from_kernels": {"engine", "gpu", "output", "json"},
    "from_vllm": {"bench", "pair", "gpu", "name", "output", "json"},
}
SAMPLED = {"samples", "served", "name", "plots", "output", "json"}  # the options where samples are fitted


@dataclass(frozen=True)
class CalibrateCommand(Command):
    """Fit a profile to measured samples and print its errors on held-out samples."""

    samples: Placed[str | None] = None
    """Folder of samples.parquet and header.json, as written by `pdvsim profile`, or that samples.parquet."""
    served: Paths = ()
    """Results of realrun, or files of its runs. Their warm-ups correct forward and host times to those in service."""
    gpu: str | None = None
    """With --from-vllm, --from-bench or --from-kernels: the GPU it ran on, e.g. a100-80gb or a card.toml."""
    from_kernels: str | None = None
    """Instead of SAMPLES: folder `systems` of the package aiconfigurator-core, with kernels that were timed inside
    engines. Writes a file of tables, to be used as --profile."""
    engine: ServingEngine | None = None
    """With --from-kernels: vllm, sglang or trtllm. With --from-bench: the engine whose profile is corrected (default:
    as in `pdvsim run`), and that of all commands with --machine."""
    from_vllm: Paths = ()
    """Instead of SAMPLES: vLLM logs with --enable-logging-iteration-details, at least one without speculation."""
    bench: Paths = ()
    """With --from-vllm: results of `vllm bench serve --save-result --save-detailed` on the same servers."""
    from_bench: Paths = ()
    """Instead of SAMPLES: results of `vllm bench serve` or `sglang.bench_serving` of one server. Fits its speed and
    step overhead; all commands take the file as --machine."""
    pair: str | None = None
    """With --from-vllm: the models it served, as draft:target. With --from-bench, also a target alone (or --model);
    default: the model that the results name."""
    tensor_parallel_size: Shards = 1
    """With --from-bench: GPUs that the model is sharded over."""
    max_num_batched_tokens: Tokens = Server.max_num_batched_tokens
    """With --from-bench: token budget of a step of the server."""
    output: str = PROFILE
    """File to write: a profile for --profile of `pdvsim run` (with --from-kernels it ends in .npz) or, with
    --from-bench, a correction for --machine; its default is then machine.json."""
    name: str | None = None
    """Name of the GPU in the profile; default: the profile's file name."""
    plots: str | None = None
    """Folder for the residual plots; default: the profile's folder."""
    json: bool = False
    """Print one JSON document instead of the tables."""

    def __post_init__(self) -> None:
        check_ranges(self)
        check_kinds(self, KINDS, SAMPLED)

    def execute(self) -> int:
        if self.from_bench:
            from pdvsim.cli.calibrate_bench import correct

            file = Path(self.output if self.output != PROFILE else MACHINE)
            hardware = Hardware(
                self.gpu or Hardware.gpu, tensor_parallel_size=self.tensor_parallel_size, engine=self.engine
            )
            return correct(self.from_bench, self.pair, hardware, self.max_num_batched_tokens, file, self.json)
        if self.from_kernels is not None:
            return _kernels(self, self.from_kernels)
        if self.from_vllm:
            return _engine(self)
        if self.samples is None:
            raise ValueError(
                "name a folder of samples, logs of your engine with --from-vllm, or results with --from-bench"
            )

        from pdvsim.bench import output
        from pdvsim.calibration.fit import build
        from pdvsim.calibration.fit.build import save
        from pdvsim.calibration.fit.gaps import join_s, read_gaps
        from pdvsim.calibration.fit.service import read_served

        samples, served = build.read(self.samples), read_served(self.served)
        joined_s = join_s(read_gaps(self.served))
        path = output.check_file(Path(self.output))
        folder = output.check_folder(Path(self.plots) if self.plots else path.parent)
        with Progress(build.parts(samples), "fits", self.json) as progress:
            done = iter(range(1, build.parts(samples) + 1))
            name, step = self.name or path.stem, lambda: progress.update(next(done))
            calibration = build.calibrate(samples, name, step, served, joined_s)
        save(calibration.profile, path)
        saved = [path, *_plots(calibration, folder, path.stem)]
        document = calibration.document() | {"files": [str(file) for file in saved]}
        print(output.dumps(document) if self.json else _table(document))
        say("pdvsim", f"saved {', '.join(map(str, saved))}")
        return 0


def _kernels(args: CalibrateCommand, folder: str) -> int:
    """Tables of an engine's kernels."""
    from pdvsim.bench import output
    from pdvsim.calibration.kernels import PARTS, as_bytes, left_out, pack

    if args.engine in (None, "pdvsim") or args.gpu is None:
        raise ValueError("--from-kernels needs --engine (vllm, sglang or trtllm) and --gpu")
    if not args.output.endswith(".npz"):
        raise ValueError(f"--output {args.output}: a file of kernel tables must end in .npz")
    path = output.check_file(Path(args.output))
    with Progress(PARTS, "tables", args.json) as progress:
        done = iter(range(1, PARTS + 1))
        tables = pack(Path(folder), args.engine, gpu(args.gpu), lambda: progress.update(next(done)))
    write_all({path: as_bytes(tables)})
    errors = left_out(tables)
    if args.json:
        print(output.dumps({"about": tables.about, "left_out": list(map(asdict, errors)), "files": [str(path)]}))
    else:
        rows = [[one.kernels, f"{one.points:,}", percent_cell(one.median), percent_cell(one.p95)] for one in errors]
        print(f"Errors at points left out; {args.engine} {tables.version} on {tables.about['system']}")
        print(grid(["kernels", "points", "median error", "p95"], rows))
    say("pdvsim", f"saved {path}")
    return 0


def _engine(args: CalibrateCommand) -> int:
    """Write the profile of the user's own engine, from whole steps; returns the exit code."""
    from pdvsim.bench import output
    from pdvsim.calibration.fit.build import save
    from pdvsim.calibration.fit.engine import calibrate_engine, read_bench, read_logs

    if args.pair is None or args.gpu is None:
        raise ValueError("--from-vllm needs --pair (the models it served) and --gpu")
    path = output.check_file(Path(args.output))
    log, benches = read_logs(args.from_vllm), tuple(map(read_bench, args.bench))
    fit = calibrate_engine(log, benches, pair(args.pair), gpu(args.gpu), args.name or path.stem)
    save(fit.profile, path)
    if args.json:
        print(output.dumps(fit.document() | {"files": [str(path)]}))
    else:
        rows = [[str(size), *_median_p95(error)] for size, error in fit.errors.items()]
        print(f"Errors at batch sizes left out of the fit; {fit.profile.foundation}, {fit.steps:,} steps")
        print(grid(["concurrent requests, up to", "median error", "p95"], rows))
        print(f"\nBetween steps: {cell(fit.host_s, 2, 1e3)} ms" + ("" if benches else " (no --bench: assumed 0)"))
        if log.cache_tokens:
            print(f"KV cache: --kv-capacity-tokens {log.cache_tokens}")
    say("pdvsim", f"saved {path}")
    return 0


def _plots(calibration: Calibration, folder: Path, stem: str) -> list[Path]:
    from pdvsim.bench.output import picture
    from pdvsim.view.calibration_plots import corun_figure, solo_figure

    figures = {"solo": solo_figure(calibration.solos, calibration.profile.foundation)}
    if calibration.corun:
        figures["corun"] = corun_figure(calibration.corun, calibration.profile.foundation)
    content = {folder / f"{stem}.{name}.png": figure for name, figure in figures.items()}
    write_all({path: picture(figure, path) for path, figure in content.items()})
    return list(content)


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
