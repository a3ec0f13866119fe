"""`pdvsim compare`: architectures over model pairs and cards, as a table, a parquet file and a plot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from pdvsim.cli.args import parse
from pdvsim.common.progress import Progress
from pdvsim.common.version import __version__
from pdvsim.decide.compare import best_text, compare, paired
from pdvsim.decide.contest import Contest
from pdvsim.decide.goal import Goal, Objective
from pdvsim.decide.options import WARMUP_SHARE, CountedTraffic, TrimmedScoring, TunedServer, forewarn_few, plain
from pdvsim.decide.runs import Bench
from pdvsim.decide.text import contest_document, lengths_note
from pdvsim.decide.tune import most_runs
from pdvsim.sim.config import Acceptance, Arch, Experiment, Hardware, Host, Scoring, Server
from pdvsim.sim.hardware.cards import GPUS
from pdvsim.sim.hardware.names import card_name
from pdvsim.sim.limits import RANGES, check, check_ranges
from pdvsim.sim.metrics.summary import percentile_name
from pdvsim.sim.policies import USUAL_ARCHS
from pdvsim.study import output
from pdvsim.study.compare import Comparison, Spot, summary
from pdvsim.study.estimate import forewarn
from pdvsim.study.sweep import Point
from pdvsim.view.compare_plots import comparison_figure
from pdvsim.view.compare_text import comparison_text

if TYPE_CHECKING:
    import pandas as pd

DEFAULT_CONCURRENCY = (3, 10)


@dataclass(frozen=True)
class CompareServer(TunedServer):
    """The server's settings. Those left open are each architecture's own best for the goal."""

    pair: tyro.conf.Suppress[str] = Server.pair  # the comparison has its own, a list


@dataclass(frozen=True)
class CompareHardware(Hardware):
    """How the GPU is modelled, and how many there are."""

    gpu: tyro.conf.Suppress[str] = Hardware.gpu  # the comparison has its own, a list


@dataclass(frozen=True)
class CompareOptions:
    """Pairs, cards, architectures, loads and replications, and what each architecture is tuned for."""

    pairs: tuple[str, ...] = ("tinyllama-1.1b:llama-2-7b", "qwen2-1.5b:qwen2-7b", "gemma-2b:gemma-7b")
    """Models, as draft:target."""
    gpus: tuple[str, ...] = ("h200",)
    """Cards; see `pdvsim profiles`."""
    arch: tuple[Arch, ...] = USUAL_ARCHS
    """Serving architectures to compare; differences are against the first."""
    concurrency: tuple[int, ...] = ()
    """Loads as requests outstanding at once (closed loop); without this and --request-rate: 3,10."""
    request_rate: tuple[float, ...] = ()
    """Loads as requests per second (open loop)."""
    pair_acceptance: tuple[float, ...] = ()
    """Acceptance rate of each pair, in their order; default: --acceptance-rate for all."""
    objective: Objective | None = None
    """What each is tuned for; default: headroom with --goodput, else throughput in a closed loop and e2el at a rate."""
    indifference: float = 0.01
    """Smaller leads, as a share, do not count, however sure."""
    attainment: float = 0.9
    """Share of the requests that should meet every service level of --goodput."""
    num_runs: int = 5
    """Replications of each point; replication i has seed --seed + i, the same everywhere. Fewer than 5 tell nothing."""
    gpu_hour_usd: tuple[str, ...] = ()
    """Price of a card's hour, one for all (2.5) or by name (h200=4,a100-80gb=2); without it no cost is given."""
    warmup_share: float = WARMUP_SHARE
    """Share of the requests, the first by arrival, that is left out of the metrics."""
    jobs: int | None = None
    """Points run side by side; default: one per core."""
    traffic: CountedTraffic = field(default_factory=CountedTraffic)
    acceptance: Acceptance = field(default_factory=Acceptance)
    server: CompareServer = field(default_factory=CompareServer)
    hardware: CompareHardware = field(default_factory=CompareHardware)
    host: Host = field(default_factory=Host)
    scoring: TrimmedScoring = field(
        default_factory=lambda: TrimmedScoring(percentile_metrics=("e2el",), metric_percentiles=(95.0,))
    )

    def __post_init__(self) -> None:
        check_ranges(self)

    def comparison(self) -> Comparison:
        """The comparison these options describe."""
        if not self.arch:
            raise ValueError("arch needs at least one value")
        base = Experiment(
            self.arch[0],
            self.traffic.at(self.request_rate, self.server.given(), *self.pairs),
            self.acceptance,
            self.server.given(),
            plain(Hardware, self.hardware),
            self.host,
            plain(Scoring, self.scoring),
        )
        loads = self.concurrency or (() if self.request_rate else DEFAULT_CONCURRENCY)
        prices = prices_usd(self.gpu_hour_usd, tuple(card_name(card, GPUS) for card in self.gpus))
        return Comparison(
            self.pairs,
            self.gpus,
            self.arch,
            loads,
            self.request_rate,
            self.num_runs,
            self.goal().prepared(base, self.warmup_share),
            self.pair_acceptance,
            prices,
        )

    def goal(self) -> Goal:
        """What each architecture is tuned for."""
        usual: Objective = "headroom" if self.scoring.goodput else "e2el" if self.request_rate else "throughput"
        return Goal(self.objective or usual, self.scoring.goodput, self.attainment)


@dataclass(frozen=True)
class CompareCommand:
    """Compare architectures across model pairs and cards: latency, throughput, acceptance, cost."""

    options: Annotated[CompareOptions, tyro.conf.arg(name="")] = field(default_factory=CompareOptions)
    output: Annotated[str | None, tyro.conf.arg(aliases=["-o"])] = None
    """Folder for compare.parquet, compare.json and compare.png; default: results/compare-DATE-TIME."""
    json: bool = False
    """Print one JSON document instead of the tables."""
    config: str | None = None
    """TOML file of flags (pairs = ["gemma-2b:gemma-7b"]); the command line wins."""


def prices_usd(given: tuple[str, ...], gpus: tuple[str, ...]) -> dict[str, float]:
    """The price of an hour by card, from `2.5` or `h200=4`; nothing if none is given."""
    prices: dict[str, float] = {}
    for text in given:
        name, equals, value = text.rpartition("=")
        try:
            price = float(value)
        except ValueError:
            raise ValueError(f"gpu-hour-usd: {text!r} must be a price, or card=price, e.g. h200=4") from None
        check("gpu-hour-usd", price, RANGES["gpu_hour_usd"])
        name = name if name in gpus else card_name(name, GPUS)
        if equals and name not in gpus:
            raise ValueError(f"gpu-hour-usd: {name!r} is not among the cards compared: {', '.join(gpus)}")
        prices |= {name: price} if equals else dict.fromkeys(gpus, price) | prices
    missing = [gpu for gpu in gpus if gpu not in prices]
    if prices and missing:
        raise ValueError(f"gpu-hour-usd gives no price for {', '.join(missing)}")
    return prices


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    args = parse(CompareCommand, argv, "pdvsim compare")

    import pandas as pd

    options = args.options
    comparison, goal, space = options.comparison(), options.goal(), options.server.space(options.arch)
    date = output.now()
    files = output.answer_files("compare", args.output, date)
    points = [point for place in comparison.places() for point in comparison.points(*place)]
    forewarn_few(options.num_runs, len(options.arch))
    forewarn([point.experiment for point in points], options.jobs)
    runs = len(points) + most_runs(space, len(_loads(points)))
    with Progress(runs, "runs or so", args.json, after_s=0) as progress:
        bench = Bench(options.jobs, progress.update, band=True)
        found = compare(comparison, space, goal, bench, options.warmup_share, options.indifference)
    frame = pd.DataFrame() if found.frame is None else found.frame
    held, comparison = found.contests(), found.comparison
    document = {"date": date, "interrupted": found.interrupted, **_document(options, comparison, frame, held)}
    text = output.dumps(document)
    if args.json:
        print(text)
    elif len(frame):
        print(comparison_text(document, options.scoring))
        if held:
            print(f"\n{best_text(held, goal, options.indifference)}")
        for note in lengths_note(comparison.base.traffic):
            print(note)
    figure = None
    if len(frame):
        figure = comparison_figure(frame, asdict(comparison.base), document["paired_differences"])
    done = f"{len(frame)} of {len(points)} points" if found.interrupted else ""
    return output.save_answer(files, frame, text, figure, done)


def _loads(points: list[Point]) -> set[tuple[str, str, float]]:
    return {(p.experiment.server.pair, p.experiment.hardware.gpu, p.load) for p in points}


def _document(
    options: CompareOptions, comparison: Comparison, frame: pd.DataFrame, held: Mapping[Spot, tuple[str, Contest]]
) -> dict[str, Any]:
    """A comparison as it was run, and what came of it."""
    tails = [f"{percentile_name(p)}_e2el_ms" for p in sorted(options.scoring.metric_percentiles)]
    metrics = ("output_throughput", "mean_e2el_ms", *tails[-1:])
    return {
        "pdvsim_version": __version__,
        "objective": options.goal().objective,
        "comparison": output.settings(replace(comparison, servers={}, seeds={})),
        "points": frame.to_dict("records"),
        "summary": summary(frame) if len(frame) else [],
        "best": [
            {"pair": pair, "gpu": gpu, "load": load, "arch": arch, "contest": contest_document(found)}
            for (pair, gpu, load), (arch, found) in held.items()
        ],
        "paired_differences": paired(comparison, frame, metrics),
    }
