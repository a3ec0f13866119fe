"""`pdvsim calibrate`: a profile from measured samples, or from kernels that others published, with its errors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pdvsim.common.console import say
from pdvsim.common.files import write_all
from pdvsim.common.options import Placed, parse
from pdvsim.common.progress import Progress
from pdvsim.sim.hardware.models import gpu, pair

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdvsim.calibration.fit.build import Calibration


@dataclass(frozen=True)
class CalibrateCommand:
    """Fit a profile to measured samples, and print how far it is off what its fits have not seen."""

    samples: Placed[str | None] = None
    """Folder of samples.parquet and header.json, as `pdvsim profile` makes it, or that samples.parquet; with --from
    vidur a folder of Vidur's mlp.csv, and attention.csv where there are some."""
    served: tuple[str, ...] = ()
    """Results of realrun, or files of its runs: forwards and the host become as slow as their warm-ups show."""
    from_: Literal["samples", "vidur"] = "samples"
    """What SAMPLES holds: samples of `pdvsim profile`, or Vidur's operator profiles of a card named by --gpu."""
    gpu: tuple[str, ...] = ()
    """With --from-vllm and --from vidur: the card, e.g. a100-80gb, or a card.toml; vidur: several for errors alone."""
    from_vllm: tuple[str, ...] = ()
    """In place of SAMPLES: logs of your vLLM with --enable-logging-iteration-details, one without speculation."""
    bench: tuple[str, ...] = ()
    """Only with --from-vllm: results of `vllm bench serve --save-result --save-detailed` on the same servers."""
    pair: str | None = None
    """Only with --from-vllm: the models it served, as draft:target."""
    output: str = "profile.json"
    """Profile to write, for --profile of `pdvsim run`."""
    name: str | None = None
    """The card's name in the profile; default: the profile's file name."""
    plots: str | None = None
    """Folder for the residual plots; default: the profile's folder."""
    json: bool = False
    """Print one JSON document instead of the tables."""


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    args = parse(CalibrateCommand, argv, "pdvsim calibrate")
    if args.from_vllm:
        return _engine(args)
    if args.served and args.from_ != "samples":
        raise ValueError("--served goes with samples")
    if args.bench or args.pair:
        raise ValueError("--bench and --pair go with --from-vllm")
    if args.samples is None:
        raise ValueError("give a folder of samples, or logs of your engine with --from-vllm")
    if args.from_ == "vidur":
        return _vidur(args, args.samples)
    if args.gpu:
        raise ValueError("--gpu goes with --from vidur; samples know their card")

    from pdvsim.calibration.fit import build
    from pdvsim.calibration.fit.build import save
    from pdvsim.calibration.fit.service import read_served
    from pdvsim.study import output

    samples, served = build.read(args.samples), read_served(args.served)
    path = output.check_file(Path(args.output))
    folder = output.check_folder(Path(args.plots) if args.plots else path.parent)
    with Progress(build.parts(samples), "fits", args.json) as progress:
        done = iter(range(1, build.parts(samples) + 1))
        found = build.calibrate(samples, args.name or path.stem, lambda: progress.update(next(done)), served)
    save(found.profile, path)
    saved = [path, *_plots(found, folder, path.stem)]
    document = found.document() | {"files": [str(file) for file in saved]}
    print(output.dumps(document) if args.json else _table(document))
    say("pdvsim", f"saved {', '.join(map(str, saved))}")
    return 0


def _engine(args: CalibrateCommand) -> int:
    """Whole steps of the user's own engine."""
    from pdvsim.calibration.fit.build import save
    from pdvsim.calibration.fit.engine_fit import calibrate_engine
    from pdvsim.calibration.fit.engine_log import read_bench, read_logs
    from pdvsim.study import output
    from pdvsim.view.table import cell, grid

    if args.samples or args.from_ != "samples" or args.plots or args.served:
        raise ValueError("--from-vllm takes the place of samples, --from, --served and --plots")
    if args.pair is None or len(args.gpu) != 1:
        raise ValueError("--from-vllm needs --pair, the models it served, and --gpu, the card")
    path = output.check_file(Path(args.output))
    log, benches = read_logs(args.from_vllm), tuple(map(read_bench, args.bench))
    found = calibrate_engine(log, benches, pair(args.pair), gpu(args.gpu[0]), args.name or path.stem)
    save(found.profile, path)
    if args.json:
        print(output.dumps(found.document() | {"files": [str(path)]}))
    else:
        rows = [
            [str(size), *(f"{cell(error[key], 1, 100)}%" for key in ("median", "p95"))]
            for size, error in found.errors.items()
        ]
        print(f"Batch sizes left out of the fit; {found.profile.foundation}, {found.steps:,} steps")
        print(grid(["requests at once, up to", "median error", "p95"], rows))
        print(
            f"\nBetween steps: {cell(found.host_s, 2, 1e3)} ms" + ("" if benches else " (no --bench: taken as nothing)")
        )
        if log.cache_tokens:
            print(f"KV cache: --kv-capacity-tokens {log.cache_tokens}")
    say("pdvsim", f"saved {path}")
    return 0


def _vidur(args: CalibrateCommand, folder: str) -> int:
    """Published kernels where there are some, the rest transferred."""
    from pdvsim.calibration.fit import vidur
    from pdvsim.calibration.fit.build import save
    from pdvsim.study import output

    if not args.gpu:
        raise ValueError("--from vidur needs --gpu: the card that its files were measured on, e.g. a100-80gb")
    if args.name or args.plots:
        raise ValueError("--name and --plots go with samples; --from vidur names its profile after the card")
    cards = [gpu(name) for name in args.gpu]
    saved = [output.check_file(Path(args.output))] if len(cards) == 1 else []
    profiles = [vidur.build_vidur(folder, card) for card in cards]
    if saved:
        save(profiles[0], saved[0])
    errors = vidur.card_errors(folder, cards)
    if args.json:
        print(output.dumps({"profiles": {one.name: one.foundation for one in profiles}, "layers": errors}))
    else:
        print(vidur.report(errors))
        for profile in profiles:
            print(f"\n{profile.name}: {profile.foundation}")
    if saved:
        say("pdvsim", f"saved {saved[0]}")
    return 0


def _plots(found: Calibration, folder: Path, stem: str) -> list[Path]:
    from pdvsim.study.output import picture
    from pdvsim.view.calibration_plots import corun_figure, solo_figure

    figures = {"solo": solo_figure(found.solos, found.profile.foundation)}
    if found.corun:
        figures["corun"] = corun_figure(found.corun, found.profile.foundation)
    content = {folder / f"{stem}.{name}.png": figure for name, figure in figures.items()}
    write_all({path: picture(figure, path) for path, figure in content.items()})
    return list(content)


def _table(document: Mapping[str, Any]) -> str:
    """Held-out errors by model, then those of works side by side."""
    from pdvsim.view.table import cell, grid

    def percent(errors: Mapping[str, float]) -> list[str]:
        return [f"{cell(errors[key], 1, 100)}%" for key in ("median", "p95")]

    header = ["model alone", "points", "median error", "p95", "spread of a point's samples", "p95"]
    rows = [
        [model, str(solo["points"]), *percent(solo), *percent(solo["spread"])]
        for model, solo in document["solo"].items()
    ]
    blocks = [f"Points held out of the fit; {document['foundation']}\n" + grid(header, rows)]
    if document["corun"]:
        names = {"by_shape": "shapes not fitted", "by_models": "models not fitted", "no_triples": "no triples fitted"}
        header = ["slowdown side by side", "held out", "works", "median error", "p95"]
        rows = []
        for key, errors in document["corun"].items():
            works, _, how = key.partition("_")
            rows.append([works, names[how], str(errors["works"]), *percent(errors)])
        blocks.append(grid(header, rows))
    host = document["host"]
    costs = ", ".join(f"{name.removesuffix('_s')} {cell(host[name], 1, 1e6)} us" for name in host)
    return "\n\n".join([*blocks, f"Host: {costs}"])
