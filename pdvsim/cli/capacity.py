"""`pdvsim capacity`: the highest request rate that each architecture holds within the service levels."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from pdvsim.cli.page import deliver, page_file
from pdvsim.common.options import parse, plain
from pdvsim.common.presets import PresetOption
from pdvsim.common.progress import Progress
from pdvsim.decide.capacity import Plan
from pdvsim.decide.capacity_search import find_capacities
from pdvsim.decide.figures import capacity_figure
from pdvsim.decide.goal import ATTAINMENT, Goal
from pdvsim.decide.options import WARMUP_SHARE, OpenTraffic, TrimmedScoring, TunedServer, forewarn_few
from pdvsim.decide.runs import Bench, without_band
from pdvsim.decide.tune import most_runs
from pdvsim.sim.config import Arch, Experiment, Hardware, Host, Internal, Scoring
from pdvsim.sim.limits import check_ranges
from pdvsim.sim.policies import USUAL_ARCHS
from pdvsim.sim.workload.asked import AskedAcceptance
from pdvsim.study import output
from pdvsim.study.estimate import forewarn


@dataclass(frozen=True)
class ServerHardware(Hardware):
    """The GPU and how it is modelled; --gpus sets the number."""

    replicas: Internal[int] = 1


@dataclass(frozen=True)
class CapacityOptions(PresetOption):
    """Architectures, GPUs and replications, and the service levels to hold."""

    arch: tuple[Arch, ...] = USUAL_ARCHS
    """Serving architectures to compare."""
    attainment: float = ATTAINMENT
    """Share of the requests that must meet every service level of --goodput."""
    gpus: tuple[int, ...] = (1,)
    """Numbers of GPUs, as replicas behind a router, e.g. 1,2,4."""
    gpu_hour_usd: float | None = None
    """Price of a GPU per hour; adds the cost per million output tokens."""
    num_runs: int = 5
    """Number of seeds, with one search each; the same seeds for every architecture."""
    tolerance: float = 0.02
    """Relative width of the final bracket: the search ends this close to the first rate that fails."""
    warmup_share: float = WARMUP_SHARE
    """Share of the requests, first by arrival, excluded from the metrics, because the server starts empty."""
    jobs: int | None = None
    """Concurrent simulations; default: one per core."""
    traffic: OpenTraffic = field(default_factory=OpenTraffic)
    acceptance: AskedAcceptance = field(default_factory=AskedAcceptance)
    server: TunedServer = field(default_factory=TunedServer)
    hardware: ServerHardware = field(default_factory=ServerHardware)
    host: Host = field(default_factory=Host)
    scoring: TrimmedScoring = field(default_factory=TrimmedScoring)

    def __post_init__(self) -> None:
        check_ranges(self)

    def plan(self) -> Plan:
        """The searches these options describe; a ValueError names what is wrong."""
        server, hardware = self.server.given(), plain(Hardware, self.hardware)
        traffic, scoring = self.traffic.asked(server), plain(Scoring, self.scoring)
        arch = self.arch[0] if self.arch else Experiment.arch
        acceptance = self.acceptance.asked(server.pair, traffic)
        base = Experiment(arch, traffic, acceptance, server, hardware, self.host, scoring)
        goal = Goal("throughput", scoring.goodput, self.attainment)
        space = self.server.space(self.arch) if self.arch else None
        return Plan(base, self.arch, self.gpus, self.num_runs, goal, self.tolerance, self.warmup_share, space)


@dataclass(frozen=True)
class CapacityCommand:
    """Find the highest request rate each architecture holds within its service levels, with intervals over seeds."""

    options: CapacityOptions = field(default_factory=CapacityOptions)
    output: str | None = None
    """Folder for capacity.parquet, capacity.json and capacity.png; default: results/capacity-DATE-TIME."""
    html: str | None = None
    """Also write the answer, its plot and provenance as one page."""
    json: bool = False
    """Print one JSON document instead of the table."""
    config: str | None = None
    """TOML file of flags (gpus = [1, 2, 4]); the command line takes precedence."""


SEARCH_RUNS = 8  # estimated runs of a search, for the progress bar


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    args = parse(CapacityCommand, argv, "pdvsim capacity")
    plan = args.options.plan()

    date = output.now()
    files, page = output.answer_files("capacity", args.output, date), page_file(args.html)
    # saturated, as in a batch job
    runs = [without_band(plan.experiment(case, inf)) for case in plan.cases() for _ in range(SEARCH_RUNS)]
    forewarn_few(plan.num_runs, len(plan.archs))
    forewarn(runs, args.options.jobs)
    tuning = most_runs(plan.space, 1) if plan.space else 0
    with Progress(len(runs) + tuning, "runs", args.json, after_s=0, bound="about") as progress:
        found = find_capacities(plan, Bench(args.options.jobs, progress.update), args.options.gpu_hour_usd)
    return deliver(found, args, {"Rates held": capacity_figure(found)} if found.rows else {}, files, page, date)
