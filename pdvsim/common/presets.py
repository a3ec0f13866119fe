"""The options of an experiment, which the commands share, and presets: named settings for those not given."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pdvsim.sim.config import Acceptance, Arch, Experiment, Hardware, Host, Scoring, Server, Traffic
from pdvsim.sim.workload.asked import AskedAcceptance

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
    acceptance: AskedAcceptance = field(default_factory=AskedAcceptance)
    server: Server = field(default_factory=Server)
    hardware: Hardware = field(default_factory=Hardware)
    host: Host = field(default_factory=Host)
    scoring: Scoring = field(default_factory=Scoring)

    def experiment(
        self, arch: Arch, traffic: Traffic | None = None, server: Server | None = None, assumed: bool = False
    ) -> Experiment:
        """The experiment, with the acceptance that is given, read, recorded or assumed.

        `traffic` and `server` replace the given ones. With `assumed`, recorded acceptance is not used.
        """
        traffic, server = traffic or self.traffic, server or self.server
        given = AskedAcceptance(Acceptance.acceptance_rate) if assumed and self.acceptance.is_open else self.acceptance
        acceptance = given.asked(server.pair, traffic)
        return Experiment(arch, traffic, acceptance, server, self.hardware, self.host, self.scoring)


def preset_settings(name: PresetName, given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The settings of a preset that a command has and that nothing given replaces."""
    replaced = {*given, *(LENGTHS if any(option in given for option in OTHER_LENGTHS) else ())}
    return {option: value for option, value in PRESETS[name].items() if option in known and option not in replaced}
