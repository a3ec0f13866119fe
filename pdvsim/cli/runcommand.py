"""The options of `pdvsim run`, shared with `realrun`."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from pdvsim.common.presets import ExperimentOptions
from pdvsim.sim.config import Experiment


@dataclass(frozen=True)
class AskedExperiment(ExperimentOptions, Experiment):
    """One run: an architecture, under a load, on a GPU."""

    def asked(self) -> Experiment:
        """The experiment, with its acceptance."""
        return self.experiment(self.arch)


@dataclass(frozen=True)
class RunCommand:
    """Simulate one experiment and print its table, in the style of `vllm bench serve`."""

    given: AskedExperiment = field(default_factory=AskedExperiment)
    output: str | None = None
    """Write the result to this file, as JSON with the keys of vLLM."""
    save_result: bool = False
    """Write the result to --result-dir; the file name has label, load, architecture and date."""
    result_dir: str = "."
    """Folder for --save-result."""
    label: str = "pdvsim"
    """Prefix of the file name of --save-result."""
    save_detailed: bool = False
    """Also write requests, launches and deliveries as parquet, next to the result."""
    trace_out: str | None = None
    """Write a timeline for ui.perfetto.dev to this file."""
    html: str | None = None
    """Write the table, its plot and provenance to this file, as one page."""
    overwrite: bool = False
    """Replace existing files; default: refuse them."""
    json: bool = False
    """Print one JSON document instead of the table."""
    config: str | None = None
    """TOML file of flags (request_rate = 8); the command line takes precedence."""

    @cached_property
    def experiment(self) -> Experiment:
        """What is run."""
        return self.given.asked()

    def __post_init__(self) -> None:
        if not self.given.scoring.detailed and (self.save_detailed or self.trace_out or self.html):
            raise ValueError("--save-detailed, --trace-out and --html need records, which --no-detailed does not keep")
        if any(c in "/\\" or not c.isprintable() for c in self.label):
            raise ValueError(f"label is part of a file name: it must print and have no slash, got {self.label!r}")
