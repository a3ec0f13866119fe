"""The options of `pdvsim validate`, and which of them each kind of validation takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pdvsim.calibration.validate.served import SHIPPED, ServedRun, read_runs
from pdvsim.cli.command import check_kinds
from pdvsim.sim.config import Acceptance, Arch, Contention, Hardware, Server
from pdvsim.sim.limits import DraftLength, Jobs, Paths, Placed, Range, Redefined, check_ranges

RUNS = "runs.jsonl"
SERVER = {"pair", "arch", "acceptance", "num_speculative_tokens", "server", "hardware"}  # the benchmarked one
KINDS = {  # which options can be combined with each
    "bench": {*SERVER, "profile", "contention", "json"},
    "silicon": {"held_out", "rows", "kind", "jobs", "json"},
    "speculation": {"held_out", "rows", "jobs", "json"},
    "serve": {"output", "minutes", "tiny", "own_policies", "models", "hardware"},
}
RECORDED = {  # the options where recorded runs are compared
    "runs", "run", "own_policies", "held_out", "profile", "write", "contention", "ablations", "plot", "html", "jobs",
    "json",
}  # fmt: skip


@dataclass(frozen=True)
class ValidateOptions:
    """Compare real serving runs with simulations of the same experiments and seeds."""

    runs: Placed[Paths] = ()
    """Files of real runs, one JSON object per line; default: the H200 runs included in pdvsim."""
    run: str | None = None
    """Compare one run launch by launch: its number, or a result of realrun --save-detailed."""
    own_policies: bool = False
    """Execute the policy files that the runs name as file.py:Class. Use this only for files you trust."""
    held_out: bool = False
    """Also show the held-out runs, which are not used to develop the model."""
    profile: str | None = None
    """Profile file (JSON) instead of the built-in one of the H200."""
    write: bool = False
    """Save the errors next to the profile; all other commands take their error ranges from there."""
    contention: Contention = "fluid"
    """How streams share the simulated GPU."""
    ablations: bool = True
    """Predict with one contention model, without the others for comparison."""
    plot: str | None = None
    """Plot predicted against measured metrics to this file (PNG)."""
    html: str | None = None
    """Write tables, plot and provenance to this file, as one page."""
    jobs: Jobs | None = None
    """Concurrent simulations; default: one per core."""
    json: bool = False
    """Print one JSON document instead of the tables."""
    serve: str | None = None
    """Instead of comparing, serve the runs planned in this file on this machine's GPU and append them to --output."""
    output: str = RUNS
    """With --serve: file of real runs. Runs already in it are not served again."""
    minutes: Annotated[float, Range(0, 30 * 1440, or_inf=True)] = math.inf
    """With --serve: start no run after this many minutes."""
    tiny: bool = False
    """With --serve: try the command with tiny models and short requests on the CPU."""
    models: str | None = None
    """With --serve and --engine: folder with one folder per model, as of realrun."""
    bench: Paths = ()
    """Instead of recorded runs: compare a result of `vllm bench serve` on your server with a simulation of its load.
    Two results, without drafts and with them, also show what drafting gains, measured and predicted."""
    silicon: Literal["all", "vllm", "sglang", "trtllm"] | None = None
    """Instead of recorded runs: compare measured servers of this engine, or of all, with simulations of their load."""
    speculation: Literal["all", "vllm", "sglang", "trtllm"] | None = None
    """The same for measured pairs of servers, without and with speculation."""
    rows: Annotated[int, Range(1, 1_000_000)] | None = None
    """With --silicon or --speculation: predict at most this number of rows, spread over all."""
    kind: Literal["plain", "expert-parallel", "apart"] | None = None
    """With --silicon: only servers with tensor parallelism alone (plain), with expert or data parallelism, or with
    prefill apart."""
    pair: str | None = None
    """With --bench: the served models, as draft:target, or the target alone (or --model)."""
    arch: Arch = "colocated"
    """With --bench: the architecture; vLLM is colocated."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    num_speculative_tokens: Redefined[DraftLength | None] = None
    """With --bench: draft length; default: that of the benchmark."""
    server: Server = field(default_factory=Server)
    hardware: Hardware = field(default_factory=Hardware)

    def __post_init__(self) -> None:
        check_ranges(self)
        check_kinds(self, KINDS, RECORDED)
        if self.bench and self.pair is None:
            raise ValueError("--bench needs the served models: give --model or --pair draft:target")
        if self.serve is not None and replace(self.hardware, engine=None) != Hardware():
            raise ValueError("--serve takes the hardware of its plan: of these options, --engine alone")
        if self.html and self.run is not None:
            raise ValueError("--html is a page of all runs and cannot be combined with --run")
        if self.write and (self.run is not None or self.contention != "fluid"):
            raise ValueError("--write needs all runs and --contention fluid")

    def served_runs(self) -> list[ServedRun]:
        """The real runs to compare."""
        paths = [Path(path) for path in self.runs] or shipped()
        return [run for path in paths for run in read_runs(path, own_policies=self.own_policies)]


@dataclass(frozen=True)
class Comparison(ValidateOptions):
    """Compare measurements with simulations; nothing is served or written."""

    without = ("serve", "output", "minutes", "tiny", "models", "run", "plot", "html", "write", "json")


@dataclass(frozen=True, repr=False)
class Compared:
    """A comparison of measurements with predictions. Prints as tables."""

    document: dict[str, Any]
    text: str
    interrupted: bool = False

    def __repr__(self) -> str:
        return self.text


def shipped() -> list[Path]:
    """The files of real runs that are included in pdvsim."""
    folder = Path(str(files("pdvsim.calibration"))) / "data" / "h200"
    return [folder / name for name in SHIPPED]
