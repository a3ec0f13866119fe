"""An experiment as the command line that runs it, with only what differs from the defaults, and back from its texts."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from pdvsim.common.options import build, flags_of, read
from pdvsim.sim.config import Acceptance, Experiment
from pdvsim.sim.policies import file_of, policy_of
from pdvsim.sim.workload.asked import usual_acceptance

GONE = ("--acceptance-trace-k", "--percentile-metrics")  # of recorded runs: the trace says it, and all are given


def command_line(program: str, experiment: Experiment) -> str:
    """`program` with the flags that make it run just this experiment."""
    flags = list(flags_of(experiment, Experiment(), leave_out=("arch",)))
    given, usual = experiment.acceptance, usual_acceptance(experiment.server.pair, experiment.traffic)
    if given == Acceptance() != usual and experiment.has_drafter:  # without the flag it would be the recorded one
        flags += ["--acceptance-rate", f"{given.acceptance_rate:g}"]
    return shlex.join([*program.split(), "--arch", experiment.arch, *flags])


def experiment_of(command: str, own_policies: bool = False) -> Experiment:
    """The experiment that a command line as above runs; a ValueError of one line if it is none.

    The command line comes from a file: it names no policy file, which would be run, unless `own_policies` are trusted.
    """
    words, skipped = list[str](), True  # the program, and flags that are gone with their values
    for word in shlex.split(command):
        skipped = word in GONE if word.startswith("--") else skipped
        words += [] if skipped else [word]
    given = read(Experiment, words)
    check_trusted(given.get("arch", ""), own_policies)
    return build(Experiment, given)


def experiment_from(settings: Mapping[str, Any], own_policies: bool = False) -> Experiment:
    """The experiment whose settings a result or a message holds, on the same terms; what they lack is as usual."""
    check_trusted(settings["arch"], own_policies)
    if settings["server"].get("kv_cache", "") is None:  # an older result: the mode was left to the architecture
        mode = "paged" if policy_of(settings["arch"]).in_steps() else "reserved"
        settings = {**settings, "server": {**settings["server"], "kv_cache": mode}}
    if settings["hardware"].get("verify_gpu"):  # an older result
        settings = {**settings, "hardware": {**settings["hardware"], "place": ["prefill=1", "verify=1"]}}
    groups = {name: kind for name, kind in get_type_hints(Experiment).items() if is_dataclass(kind)}
    return Experiment(settings["arch"], **{name: _configured(kind, settings[name]) for name, kind in groups.items()})


def check_trusted(arch: str, own_policies: bool) -> None:
    """Refuse an architecture that a file names and that is a policy file, unless those are trusted."""
    if not own_policies and file_of(arch) is not None:
        raise ValueError(f"arch {arch} is a policy file, which would be executed: add --own-policies if you trust it")


def _configured(kind: Any, values: Mapping[str, Any]) -> Any:
    given = {part.name: values[part.name] for part in fields(kind) if part.name in values}
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return kind(**{name: math.inf if value == "inf" else value for name, value in plain.items()})
