"""`pdvsim advise`: which architecture and settings to run for a load, how sure, and where that changes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from pdvsim.cli.page import deliver, page_file
from pdvsim.common.options import parse, plain
from pdvsim.common.progress import Progress
from pdvsim.decide.advice import Question
from pdvsim.decide.advise import advise
from pdvsim.decide.drafters import Drafted, drafters
from pdvsim.decide.figures import flips_figure
from pdvsim.decide.fleet import ARCHS as FLEET_ARCHS
from pdvsim.decide.fleet import Fleet, fleets
from pdvsim.decide.goal import ATTAINMENT, Goal, Objective
from pdvsim.decide.options import (
    BUDGET,
    PROMPTS,
    WARMUP_SHARE,
    OpenTraffic,
    TrimmedScoring,
    TunedServer,
    forewarn_few,
)
from pdvsim.decide.runs import Bench
from pdvsim.decide.space import CONTROLLERS, Space
from pdvsim.sim.config import Acceptance, Arch, ControllerName, Experiment, Hardware, Host, Scoring, Traffic
from pdvsim.sim.limits import check_ranges
from pdvsim.sim.policies import USUAL_ARCHS
from pdvsim.study import output


@dataclass(frozen=True)
class AskedTraffic(OpenTraffic):
    """Who asks what, and how often."""

    num_prompts: int = PROMPTS
    """Requests per run; runs of the search have a quarter of that."""
    request_rate: float = math.inf
    """Load in requests per second."""


@dataclass(frozen=True)
class AdviseOptions:
    """The load, the service levels, what may be tried and what that may cost."""

    arch: tuple[Arch, ...] = USUAL_ARCHS
    """Architectures to choose from."""
    gpus: int = 1
    """Number of GPUs. Replicas, tensor parallelism and split lanes are compared, each at its best settings, by the
    objective and by cost."""
    drafter_card: str | None = None
    """With --gpus: also compare fleets in which one GPU is replaced by this type, e.g. l4, for drafting."""
    card_hour_usd: tuple[str, ...] = ()
    """With --gpus: price of each GPU type per hour in dollars, e.g. h200=4.5. One GPU alone is then compared too."""
    attainment: float = ATTAINMENT
    """Share of the requests that must meet every service level of --goodput."""
    objective: Objective | None = None
    """What to optimise among settings that meet the service levels; default: headroom with --goodput, else e2el."""
    indifference: float = 0.01
    """Relative differences below this are ignored, even if significant: the simpler choice is taken."""
    try_draft_lengths: tuple[int, ...] = Space.draft_lengths
    """Draft lengths to try, prefiltered by a formula; 0 means no drafts."""
    try_controllers: tuple[ControllerName, ...] = CONTROLLERS
    """Draft-length controllers to try."""
    try_max_num_seqs: tuple[int, ...] = Space.max_num_seqs
    """Batch limits to try."""
    try_max_num_batched_tokens: tuple[int, ...] = Space.max_num_batched_tokens
    """Limits to try on the prompt tokens per forward."""
    num_runs: int = 5
    """Replications of each finalist, with the same seeds."""
    budget: int = BUDGET
    """Maximum number of simulations; steps that do not fit are listed."""
    warmup_share: float = WARMUP_SHARE
    """Share of the requests, first by arrival, excluded from the metrics, because the server starts empty."""
    gpu_hour_usd: float | None = None
    """Price of a GPU per hour; adds the cost per million output tokens."""
    jobs: int | None = None
    """Concurrent simulations; default: one per core."""
    traffic: AskedTraffic = field(default_factory=AskedTraffic)
    acceptance: Acceptance = field(default_factory=Acceptance)
    server: TunedServer = field(default_factory=TunedServer)
    hardware: Hardware = field(default_factory=Hardware)
    host: Host = field(default_factory=Host)
    scoring: TrimmedScoring = field(default_factory=TrimmedScoring)

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def archs(self) -> tuple[Arch, ...]:
        """Architectures to choose from: those named, else what is usual for so many GPUs."""
        return FLEET_ARCHS if self.gpus > 1 and self.arch == USUAL_ARCHS else self.arch

    def fleets(self, base: Experiment) -> tuple[Fleet, ...]:
        """Ways to use several GPUs; none where there is one."""
        if self.gpus > 1:
            return fleets(base, self.archs, self.gpus, self.drafter_card, bool(self.card_hour_usd))
        if self.drafter_card or self.card_hour_usd:
            raise ValueError("--drafter-card and --card-hour-usd need --gpus 2 or more")
        return ()

    def question(self) -> Question:
        """What these options ask; a ValueError names what is wrong."""
        space = self.server.space(
            self.archs,
            draft_lengths=self.try_draft_lengths,
            controllers=self.try_controllers,
            max_num_seqs=self.try_max_num_seqs,
            max_num_batched_tokens=self.try_max_num_batched_tokens,
        )
        traffic, scoring = self.traffic.asked(self.server.given()), plain(Scoring, self.scoring)
        goal = Goal(self.objective or ("headroom" if scoring.goodput else "e2el"), scoring.goodput, self.attainment)
        base = self._base(traffic, scoring)
        return Question(
            base,
            space,
            goal,
            self.num_runs,
            self.indifference,
            self.warmup_share,
            self.budget,
            self.gpu_hour_usd,
            self.fleets(base),
            self.card_hour_usd,
            self.drafters(base),
        )

    def drafters(self, base: Experiment) -> tuple[Drafted, ...]:
        """Who may draft for a model that is given alone; on several GPUs, its natural drafter."""
        if ":" in self.server.pair or self.server.drafter is not None or self.gpus > 1:
            return ()
        given = None if self.acceptance == Acceptance() else self.acceptance
        return drafters(base, self.server.pair, self.archs, given)

    def _base(self, traffic: Traffic, scoring: Scoring) -> Experiment:
        """With the first architecture that does not refuse the options; if all do, what the last one says."""
        refused, server = ValueError("arch needs at least one value"), self.server.given()
        for arch in self.archs:
            try:
                return Experiment(arch, traffic, self.acceptance, server, self.hardware, self.host, scoring)
            except ValueError as error:
                refused = error
        raise refused


@dataclass(frozen=True)
class AdviseCommand:
    """Recommend an architecture and its settings for a load, how sure that is and where the answer changes."""

    options: AdviseOptions = field(default_factory=AdviseOptions)
    output: str | None = None
    """Folder for advice.json and advice.png; default: nothing is saved."""
    html: str | None = None
    """Also write the answer, its plot and provenance to this file, as one page."""
    json: bool = False
    """Print one JSON document instead of the text."""
    config: str | None = None
    """TOML file of flags; the command line takes precedence."""


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    args = parse(AdviseCommand, argv, "pdvsim advise")
    question = args.options.question()

    forewarn_few(question.num_runs, len(question.space.archs))
    files, page = list[Path](), page_file(args.html)
    if args.output:
        folder = output.check_folder(Path(args.output))
        files = [output.check_file(folder / name) for name in ("advice.json", "advice.png")]
    with Progress(question.budget, "simulations at most", args.json, after_s=0) as progress:
        bench = Bench(args.options.jobs, lambda done: progress.update(min(question.budget, done)))
        advice = advise(question, bench)
    pictures = {"Where the decision changes": flips_figure(advice)} if advice.flips else {}
    return deliver(advice, args, pictures, files, page)
