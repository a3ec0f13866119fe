"""Convert an experiment to the command line that runs it (architecture, pair, non-default flags), and back."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from pdvsim.common.arguments import flags_of, read
from pdvsim.common.options import build
from pdvsim.sim.config import Acceptance, Experiment
from pdvsim.sim.policies import file_of
from pdvsim.sim.workload.asked import usual_acceptance

EARLIER_PAIR = "tinyllama-1.1b:llama-2-7b"  # of recorded command lines without a pair: it was the default
GONE = ("--acceptance-trace-k", "--percentile-metrics")  # removed flags that recorded runs still have


def command_line(program: str, experiment: Experiment) -> str:
    """`program` with the flags that run this experiment."""
    flags = list(flags_of(experiment, Experiment(), leave_out=("arch", "pair")))
    given, usual = experiment.acceptance, usual_acceptance(experiment.server.pair, experiment.traffic)
    if (
        given == Acceptance() != usual and experiment.has_drafter
    ):  # without the flag the recorded acceptance would be used
        flags += ["--acceptance-rate", f"{given.acceptance_rate:g}"]
    return shlex.join([*program.split(), "--arch", experiment.arch, "--pair", experiment.server.pair, *flags])


def experiment_of(command: str, own_policies: bool = False) -> Experiment:
    """The experiment of such a command line; a ValueError of one line if it is invalid.

    The command line is from a file, so it must not name a policy file, which would be executed, unless `own_policies`.
    """
    words, skipped = list[str](), True  # skips the program, and removed flags with their values
    for word in shlex.split(command):
        skipped = word in GONE if word.startswith("--") else skipped
        words += [] if skipped else [word]
    given = read(Experiment, words)
    check_trusted(given.get("arch", ""), own_policies)
    return build(Experiment, {"pair": EARLIER_PAIR} | given)


def experiment_from(settings: Mapping[str, Any], own_policies: bool = False) -> Experiment:
    """The experiment from the settings of a result or message, with the same rule; missing settings are defaults."""
    check_trusted(settings["arch"], own_policies)
    groups = {name: kind for name, kind in get_type_hints(Experiment).items() if is_dataclass(kind)}
    return Experiment(settings["arch"], **{name: _configured(kind, settings[name]) for name, kind in groups.items()})


def check_trusted(arch: str, own_policies: bool) -> None:
    """Reject a policy file named by a file, unless policy files are trusted."""
    if not own_policies and file_of(arch) is not None:
        raise ValueError(f"arch {arch} is a policy file, which would be executed: add --own-policies if you trust it")


def _configured(kind: Any, values: Mapping[str, Any]) -> Any:
    given = {part.name: values[part.name] for part in fields(kind) if part.name in values}
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return kind(**{name: math.inf if value == "inf" else value for name, value in plain.items()})
