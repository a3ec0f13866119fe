"""Presets: settings for options that are not given, the same on the command line, in a file and in Python."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fuzzcases import METRICS

from pdvsim.cli.advise import AdviseCommand
from pdvsim.cli.capacity import CapacityCommand
from pdvsim.cli.drafting import DraftTableCommand
from pdvsim.cli.live import LiveCommand
from pdvsim.cli.map import MapCommand
from pdvsim.cli.realrun import RealrunCommand
from pdvsim.cli.run import RunCommand
from pdvsim.cli.sweep import SweepCommand
from pdvsim.common.commandline import parse
from pdvsim.common.options import build, options
from pdvsim.common.presets import PRESETS
from pdvsim.sim.config import Experiment, Server
from pdvsim.sim.limits import BatchLimit, DraftLength, Redefined
from pdvsim.sim.models.names import Note

ORIGINAL = PRESETS["pd-verify"]
ASKED = ["--preset", "pd-verify"]
EXPERIMENTS: dict[type, Any] = {  # the experiment of each command, and flags it needs
    RunCommand: ([], lambda args: args.experiment),
    RealrunCommand: ([], lambda args: args.experiment),
    SweepCommand: ([], lambda args: args.sweep.base),
    AdviseCommand: (["--request-rate", "2"], lambda args: args.question().base),
    CapacityCommand: (["--goodput", "ttft:500"], lambda args: args.question().base),
    MapCommand: (["--y", "card", "--try-cards", "h200"], lambda args: args.question().base),
    DraftTableCommand: ([], lambda args: args.question().base),
    LiveCommand: ([], lambda args: args.setup().base),
}


def values(experiment: Experiment) -> dict[str, Any]:
    """The settings of an experiment that the preset has."""
    groups = (experiment.traffic, experiment.server)
    return {name: getattr(group, name) for name in ORIGINAL for group in groups if hasattr(group, name)}


@pytest.mark.parametrize("command", EXPERIMENTS)
def test_a_command_takes_the_settings_that_it_has(command: type) -> None:
    flags, experiment = EXPERIMENTS[command]
    has = options(command)
    taken = values(experiment(parse(command, [*flags, *ASKED])))
    assert {name: taken[name] for name in ORIGINAL if name in has} == {n: v for n, v in ORIGINAL.items() if n in has}
    assert {"pair", "dataset_name", "input_len", "output_len"} <= set(has)
    assert values(experiment(parse(command, flags)))["pair"] == Server.pair


def test_every_command_that_simulates_drafts_reads_the_acceptance_of_a_server(tmp_path: Path) -> None:
    path = tmp_path / "metrics.txt"
    path.write_text(METRICS)
    read = [command for command in EXPERIMENTS if "acceptance_from" in options(command)]
    assert set(read) == set(EXPERIMENTS) - {LiveCommand}
    for command in read:
        flags, experiment = EXPERIMENTS[command]
        with pytest.warns(Note):
            base = experiment(parse(command, [*flags, "--acceptance-from", str(path)]))
        assert base.acceptance.synthetic_acceptance_rates[:2] == (0.7, 0.4)


def test_what_is_given_overrides_it(tmp_path: Path) -> None:
    def experiment(*flags: str) -> Experiment:
        return parse(RunCommand, [*ASKED, *flags]).experiment

    assert experiment("--model", "gemma-7b").server.pair == "gemma-2b:gemma-7b"
    assert values(experiment("--num-speculative-tokens", "2")) == ORIGINAL | {"num_speculative_tokens": 2}
    assert experiment("--dataset-name", "sharegpt").traffic.fixed_lengths == ()
    requests = tmp_path / "requests.csv"
    requests.write_text("arrival_s,prompt_tokens,output_tokens\n0,30,5\n1,40,6\n")
    own = experiment("--dataset-path", str(requests)).traffic
    assert (own.dataset_name, own.fixed_lengths) == ("custom", ())
    file = tmp_path / "flags.toml"
    file.write_text('preset = "pd-verify"\noutput_len = 50\n')
    assert values(parse(RunCommand, ["--config", str(file)]).experiment) == ORIGINAL | {"output_len": 50}


# options that a command redefines ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tuned:
    """A command that may leave the draft length open."""

    num_speculative_tokens: Redefined[DraftLength | None] = None
    """Draft length; default: the best."""
    max_num_seqs: Redefined[BatchLimit] = 256
    server: Server = field(default_factory=Server)


def test_an_option_that_is_redefined_is_open_here_and_its_group_has_what_is_given() -> None:
    args = build(Tuned, {})
    assert (args.num_speculative_tokens, args.server.num_speculative_tokens) == (None, Server.num_speculative_tokens)
    assert args.max_num_seqs == args.server.max_num_seqs == 256
    args = build(Tuned, {"num_speculative_tokens": "7", "max_num_seqs": 512, "max_draft_batch": 300})
    assert args.num_speculative_tokens == 7
    assert args.server == Server(num_speculative_tokens=7, max_num_seqs=512, max_draft_batch=300)
    with pytest.raises(ValueError, match=r"max-draft-batch .* max-num-seqs, 256, got 300"):
        build(Tuned, {"max_draft_batch": 300})
