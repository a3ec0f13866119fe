"""The options of an experiment, which the commands share, and presets: named settings for those not given."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pdvsim.sim.config import Acceptance, Arch, Experiment, Hardware, Host, Scoring, Server, Traffic
from pdvsim.sim.core import LOOKED_UP
from pdvsim.sim.engines import ENGINES
from pdvsim.sim.limits import Redefined, Share, Tokens, check_ranges
from pdvsim.sim.prices.cards import gpu
from pdvsim.sim.workload.usual import drafter_name, usual_acceptance

PresetName = Literal["pd-verify"]

PRESETS: dict[PresetName, dict[str, Any]] = {
    "pd-verify": {  # as in its published comparison of baseline, pd and pdv (calibration/data/published)
        "pair": "tinyllama-1.1b:llama-2-7b",
        "num_speculative_tokens": 4,
        "dataset_name": "random",
        "input_len": 9,
        "output_len": 100,
    }
}
LENGTHS = ("input_len", "output_len", "dataset_name")
OTHER_LENGTHS = ("dataset_name", "dataset_path")  # options that replace all of these


@dataclass(frozen=True, kw_only=True)
class ExperimentOptions:
    """The options of an experiment, except its architecture. A command leaves some out, or has them open."""

    preset: PresetName | None = None
    """Settings of options that are not given: those of PD-Verify."""
    traffic: Traffic = field(default_factory=Traffic)
    acceptance: Acceptance = field(default_factory=Acceptance)
    acceptance_rate: Redefined[Share | None] = None
    """Chance that a draft token is accepted; default: recorded for the drafter, else 0.6 (assumed)."""
    acceptance_from: str | None = None
    """Acceptance from a file: vLLM's /metrics, its bench result, or rounds."""
    server: Server = field(default_factory=Server)
    max_num_batched_tokens: Redefined[Tokens | None] = None
    """Prompt tokens per forward (the chunk); default: the engine's on this card, as 8192 of vLLM on an H100; pdvsim's:
    2048."""
    hardware: Hardware = field(default_factory=Hardware)
    host: Host = field(default_factory=Host)
    scoring: Scoring = field(default_factory=Scoring)

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.acceptance_from is not None and (self.acceptance_rate, self.acceptance) != (None, Acceptance()):
            raise ValueError("--acceptance-from and the other acceptance options are mutually exclusive")

    @property
    def acceptance_open(self) -> bool:
        """Whether no option gives the acceptance."""
        return (self.acceptance_from, self.acceptance_rate, self.acceptance) == (None, None, Acceptance())

    def experiment(self, arch: Arch, traffic: Traffic | None = None, assumed: bool = False) -> Experiment:
        """The experiment, with the acceptance that is given, read, recorded or assumed.

        `traffic` replaces the given one. With `assumed`, recorded acceptance is not used.
        """
        traffic, hardware = traffic or self.traffic, self.hardware.serving({arch, *self.named})
        acceptance = self.acceptance if assumed and self.acceptance_open else self._acceptance(traffic)
        server, engine = self.server, hardware.predicted_engine
        if self.max_num_batched_tokens is None and engine != "pdvsim" and not hardware.profile:
            server = replace(server, max_num_batched_tokens=ENGINES[engine].chunk(gpu(hardware.gpu)))
        return Experiment(arch, traffic, acceptance, server, hardware, self.host, self.scoring)

    @property
    def named(self) -> tuple[Arch, ...]:
        """The architectures that the options name, which decide whose engine is predicted."""
        named = getattr(self, "arch", ())
        return (named,) if isinstance(named, str) else named

    def _acceptance(self, traffic: Traffic) -> Acceptance:
        if self.acceptance_from is None:
            return usual_acceptance(self.server.pair, traffic) if self.acceptance_open else self.acceptance
        from pdvsim.sim.workload.counters import read_acceptance

        acceptance = read_acceptance(self.acceptance_from)
        drafter = drafter_name(self.server.pair)
        if drafter in LOOKED_UP and acceptance.acceptance_trace is None:
            raise ValueError(
                f"{self.acceptance_from} cannot give the acceptance of {drafter} drafts: vLLM counts no rounds without "
                "a match; give recorded rounds or --acceptance-model"
            )
        return acceptance


def preset_settings(name: PresetName, given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The settings of a preset that a command has and that nothing given replaces."""
    replaced = {*given, *(LENGTHS if any(option in given for option in OTHER_LENGTHS) else ())}
    return {option: value for option, value in PRESETS[name].items() if option in known and option not in replaced}
