"""`pdvsim draft-table`: the best draft length for each batch size, in the format of vLLM's `--speculative-config`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pdvsim.cli.page import deliver
from pdvsim.common.options import parse, plain
from pdvsim.common.presets import PresetOption
from pdvsim.common.progress import Progress
from pdvsim.decide.draft_lengths import find_table, usual_runs
from pdvsim.decide.draft_table import DraftQuestion, EngineName
from pdvsim.decide.options import OpenTraffic
from pdvsim.decide.runs import Bench
from pdvsim.sim.config import Arch, ControllerName, Experiment, Hardware, Host, Internal, Server
from pdvsim.sim.hardware.padding import Padding
from pdvsim.sim.limits import check_ranges
from pdvsim.sim.workload.asked import AskedAcceptance
from pdvsim.study import output


@dataclass(frozen=True)
class TableTraffic(OpenTraffic):
    """Traffic: the requests."""

    num_prompts: int = 60
    """Requests per simulation, at least three times the batch size."""
    burstiness: Internal[float] = 1.0
    use_trace_timestamps: Internal[bool] = False


@dataclass(frozen=True)
class TableServer(Server):
    """The models and their limits."""

    num_speculative_tokens: Internal[int] = 4
    controller: Internal[ControllerName] = "fixed"
    min_speculative_tokens: Internal[int | None] = None
    max_speculative_tokens: Internal[int] = 8
    max_num_seqs: int = 256
    """Largest batch size of the table."""


@dataclass(frozen=True)
class TableHardware(Hardware):
    """The GPU and how it is modelled."""

    band: Internal[bool] = True
    padding: Internal[Padding] = "profile"


@dataclass(frozen=True)
class DraftTableOptions(PresetOption):
    """Models, GPU and traffic, and the draft lengths to compare."""

    arch: Arch = "colocated"
    """Serving architecture; vLLM and SGLang correspond to colocated."""
    max_k: int = 8
    """Longest draft length."""
    against: int | None = None
    """A fixed draft length to compare with; default: 4."""
    engine: EngineName | None = None
    """Engine of the table: sets the padding of a step, the lowest k, and whether the drafter runs at k=0. Default: vllm
    for colocated, else pdvsim."""
    contexts: tuple[int, ...] = ()
    """Also make a table for each of these mean contexts, in cached tokens per request, e.g. 512 2048 8192."""
    indifference: float = 0.02
    """Relative gains below this start no new range; 0: the best length at every batch size."""
    num_runs: int = 3
    """Replications of each simulation, with the same seeds."""
    jobs: int | None = None
    """Concurrent simulations; default: one per core."""
    traffic: TableTraffic = field(default_factory=TableTraffic)
    acceptance: AskedAcceptance = field(default_factory=AskedAcceptance)
    server: TableServer = field(default_factory=TableServer)
    hardware: TableHardware = field(default_factory=TableHardware)
    host: Host = field(default_factory=Host)

    def __post_init__(self) -> None:
        check_ranges(self)

    def question(self) -> DraftQuestion:
        """The question of these options; a ValueError names what is wrong."""
        server = plain(Server, self.server)
        traffic = self.traffic.asked(server)
        base = Experiment(
            self.arch,
            traffic,
            self.acceptance.asked(server.pair, traffic),
            server,
            plain(Hardware, self.hardware),
            self.host,
        )
        return DraftQuestion(
            base, self.max_k, self.against, self.engine, self.contexts, self.indifference, self.num_runs
        )


@dataclass(frozen=True)
class DraftTableCommand:
    """Find the best draft length for each batch size by simulation, as a table for vLLM, SGLang or TensorRT-LLM."""

    options: DraftTableOptions = field(default_factory=DraftTableOptions)
    output: str | None = None
    """Write the table to this file, as JSON."""
    json: bool = False
    """Print one JSON document instead of the table."""
    config: str | None = None
    """TOML file of flags; the command line takes precedence."""


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    args = parse(DraftTableCommand, argv, "pdvsim draft-table")
    question = args.options.question()

    file = output.check_file(Path(args.output)) if args.output else None
    if file is not None and any(file.resolve() == Path(path).resolve() for path in question.base.files):
        raise ValueError(f"{file} cannot be overwritten: it is an input")
    with Progress(usual_runs(question), "simulations", args.json, bound="about") as progress:
        table = find_table(question, Bench(args.options.jobs, progress.update))
    return deliver(table, args, {}, [file] if file is not None else ())
