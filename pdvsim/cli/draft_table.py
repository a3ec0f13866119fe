"""`pdvsim draft-table`: the best draft length for each batch size, as vLLM's `--speculative-config` takes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from pdvsim.cli.args import parse
from pdvsim.common.console import say
from pdvsim.common.progress import Progress
from pdvsim.decide.draft_lengths import confirm, find_table, simulations
from pdvsim.decide.draft_table import DraftQuestion, IdleDrafter, draft_document, draft_text
from pdvsim.decide.options import OpenTraffic, plain
from pdvsim.decide.runs import Bench
from pdvsim.sim.config import Acceptance, Arch, ControllerName, Experiment, Hardware, Host, Server
from pdvsim.sim.limits import check_ranges
from pdvsim.study import output

CHOSEN = (  # what the table tries itself
    ("traffic", "request_rate"),
    ("traffic", "max_concurrency"),
    ("traffic", "use_trace_timestamps"),
    ("server", "num_speculative_tokens"),
    ("server", "controller"),
)


@dataclass(frozen=True)
class TableTraffic(OpenTraffic):
    """Who asks what."""

    num_prompts: int = 60
    """Requests of a simulation; at least three for each at once."""
    burstiness: tyro.conf.Suppress[float] = 1.0


@dataclass(frozen=True)
class TableServer(Server):
    """The models and their limits; draft lengths are what is looked for."""

    num_speculative_tokens: tyro.conf.Suppress[int] = 4
    controller: tyro.conf.Suppress[ControllerName] = "fixed"
    min_speculative_tokens: tyro.conf.Suppress[int | None] = None
    max_speculative_tokens: tyro.conf.Suppress[int] = 8
    max_num_seqs: int = 256
    """The largest batch of the table."""


@dataclass(frozen=True)
class TableHardware(Hardware):
    """The GPU and how it is modelled."""

    band: tyro.conf.Suppress[bool] = True


@dataclass(frozen=True)
class DraftTableOptions:
    """Models, card and traffic, and which draft lengths to compare."""

    arch: Arch = "colocated"
    """Serving architecture; vLLM and SGLang are colocated."""
    max_k: int = 8
    """Longest draft."""
    against: int | None = None
    """A fixed draft length to compare with; default: 4."""
    idle_drafter: IdleDrafter | None = None
    """At k=0 the drafter reads along (follows: vLLM, SGLang; default of colocated), or rests (pdvsim's controllers)."""
    indifference: float = 0.02
    """Smaller gains, as a share, get no range of their own; 0: the best at every size."""
    confirm: bool = True
    """Simulate each range's draft length and its neighbours; --no-confirm: by formula alone."""
    num_runs: int = 5
    """Replications of each simulation, the same seeds for each."""
    jobs: int | None = None
    """Runs side by side; default: one per core."""
    traffic: TableTraffic = field(default_factory=TableTraffic)
    acceptance: Acceptance = field(default_factory=Acceptance)
    server: TableServer = field(default_factory=TableServer)
    hardware: TableHardware = field(default_factory=TableHardware)
    host: Host = field(default_factory=Host)

    def __post_init__(self) -> None:
        check_ranges(self)

    def question(self) -> DraftQuestion:
        """What these options ask; a ValueError names what is wrong."""
        for group, name in CHOSEN:
            given = getattr(self, group)
            if getattr(given, name) != getattr(type(given), name):
                raise ValueError(f"{name} is not for a draft table: it looks for draft lengths at every batch size")
        base = Experiment(
            self.arch,
            self.traffic.asked(plain(Server, self.server)),
            plain(Acceptance, self.acceptance),
            plain(Server, self.server),
            plain(Hardware, self.hardware),
            self.host,
        )
        return DraftQuestion(base, self.max_k, self.against, self.idle_drafter, self.indifference, self.num_runs)


@dataclass(frozen=True)
class DraftTableCommand:
    """Compute the best draft length for each batch size, with its gain and how sure it is, ready for vLLM."""

    options: Annotated[DraftTableOptions, tyro.conf.arg(name="")] = field(default_factory=DraftTableOptions)
    output: Annotated[str | None, tyro.conf.arg(aliases=["-o"])] = None
    """Write the table to this file, as JSON."""
    json: bool = False
    """Print one JSON document instead of the table."""
    config: str | None = None
    """TOML file of flags; the command line wins."""


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    args = parse(DraftTableCommand, argv, "pdvsim draft-table")
    question = args.options.question()

    file = output.check_file(Path(args.output)) if args.output else None
    if file is not None and any(file.resolve() == Path(path).resolve() for path in question.base.files):
        raise ValueError(f"{file} cannot be written: the table is made from it")
    table = find_table(question)
    if args.options.confirm:
        runs = sum(len(found) for tier in table.tiers for found in simulations(table, tier).values())
        with Progress(runs, "runs", args.json) as progress:
            confirm(table, Bench(args.options.jobs, progress.update))
    document = output.dumps(draft_document(table))
    print(document if args.json else draft_text(table))
    stopped = "the table is there, not all of its simulations" if table.interrupted else ""
    if file is not None:
        return output.save({file: (document + "\n").encode()}, stopped)
    if stopped:
        say("pdvsim", f"interrupted: {stopped}")
    return 130 if stopped else 0
