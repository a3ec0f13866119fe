"""`pdvsim frontier`: the first token against the others at one load, over architectures and prompt chunks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated

import tyro

from pdvsim.cli.args import parse
from pdvsim.common.progress import Progress
from pdvsim.decide.frontier import (
    FirstToken,
    FrontierQuestion,
    OtherTokens,
    draw_frontier,
    frontier_document,
    frontier_table,
)
from pdvsim.decide.frontier_figure import frontier_figure
from pdvsim.decide.options import OpenTraffic, TrimmedScoring, TunedServer, forewarn_few, plain
from pdvsim.decide.runs import Bench, replications, without_band
from pdvsim.decide.space import Space
from pdvsim.sim.config import Acceptance, Arch, ControllerName, Experiment, Hardware, Host, Scoring, Server
from pdvsim.sim.limits import check_ranges
from pdvsim.sim.policies import USUAL_ARCHS
from pdvsim.sim.relevance import suited
from pdvsim.study import output
from pdvsim.study.estimate import forewarn


@dataclass(frozen=True)
class FrontierTraffic(OpenTraffic):
    """Who asks what."""

    num_prompts: int = 500
    """Requests of a run."""


@dataclass(frozen=True)
class FrontierServer(TunedServer):
    """The server's settings, the same for everyone but the draft length and the chunk."""

    num_speculative_tokens: int | None = None
    """Draft length k, the same for everyone; default: of each what the formula ranks first, from 0 (none) to 8."""
    controller: ControllerName | None = None
    """Who chooses the draft length: fixed, goodput, feedback; default: fixed."""
    max_num_seqs: int = Server.max_num_seqs
    """Batch limit."""
    max_num_batched_tokens: tyro.conf.Suppress[int | None] = None


@dataclass(frozen=True)
class FrontierOptions:
    """The load, who serves it, the two figures, and replications."""

    arch: tuple[Arch, ...] = USUAL_ARCHS
    """Serving architectures."""
    max_num_batched_tokens: tuple[int, ...] = Space.max_num_batched_tokens
    """Prompt tokens of a forward (the chunk): every architecture runs with each of these."""
    request_rate: float | None = None
    """The load in requests per second (open loop)."""
    concurrency: int | None = None
    """The load as requests outstanding at once (closed loop)."""
    x: FirstToken = "mean_ttft"
    """The figure of the first token."""
    y: OtherTokens | None = None
    """The figure of the other tokens; default: p99_tpot where --goodput has a level for TPOT, else p99_itl."""
    num_runs: int = 5
    """Replications of each point; replication i has seed --seed + i, the same for everyone."""
    warmup_share: float = 0.1
    """Share of the requests, the first by arrival, that is left out of the metrics."""
    jobs: int | None = None
    """Runs side by side; default: one per core."""
    traffic: FrontierTraffic = field(default_factory=FrontierTraffic)
    acceptance: Acceptance = field(default_factory=Acceptance)
    server: FrontierServer = field(default_factory=FrontierServer)
    hardware: Hardware = field(default_factory=Hardware)
    host: Host = field(default_factory=Host)
    scoring: TrimmedScoring = field(default_factory=TrimmedScoring)

    def __post_init__(self) -> None:
        check_ranges(self)

    def question(self) -> FrontierQuestion:
        """What these options ask; a ValueError names what is wrong."""
        scoring, space = plain(Scoring, self.scoring), self.server.space(self.arch)
        traffic = replace(
            self.traffic.asked(self.server.given()),
            request_rate=self.request_rate or math.inf,
            max_concurrency=self.concurrency,
        )
        server = self.server.given()
        base = Experiment(self.arch[0], traffic, self.acceptance, server, self.hardware, self.host, scoring)
        y = self.y or ("p99_tpot" if "tpot" in scoring.slo() else "p99_itl")
        return FrontierQuestion(base, space, self.max_num_batched_tokens, self.x, y, self.num_runs, self.warmup_share)


@dataclass(frozen=True)
class FrontierCommand:
    """Draw what the first token costs in the others, over architectures and prompt chunks, and which nothing beats."""

    options: Annotated[FrontierOptions, tyro.conf.arg(name="")] = field(default_factory=FrontierOptions)
    output: Annotated[str | None, tyro.conf.arg(aliases=["-o"])] = None
    """Folder for frontier.parquet, frontier.json and frontier.png; default: results/frontier-DATE-TIME."""
    json: bool = False
    """Print one JSON document instead of the table."""
    config: str | None = None
    """TOML file of flags (request_rate = 6); the command line wins."""


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    args = parse(FrontierCommand, argv, "pdvsim frontier")
    question = args.options.question()

    date = output.now()
    files = output.answer_files("frontier", args.output, date)
    runs = [run for mine in question.candidates for run in replications(mine, question.num_runs)]
    forewarn_few(question.num_runs, len(question.candidates))
    forewarn([suited(without_band(run)) for run in runs], args.options.jobs)
    with Progress(len(runs), "runs", args.json, after_s=0) as progress:
        found = draw_frontier(question, Bench(args.options.jobs, progress.update))
    document = output.dumps({"date": date, **frontier_document(found)})
    print(document if args.json else frontier_table(found))
    figure = frontier_figure(found) if found.points else None
    done = f"{len(found.points)} of {len(runs) // question.num_runs} points" if found.interrupted else ""
    return output.save_answer(files, found.runs, document, figure, done)
