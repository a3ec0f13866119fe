"""The `pdvsim` command. Tables on standard output, everything else on standard error.

Bad input prints one line on standard error and exits with 2; Ctrl-C prints one line and exits with 130. Each command is
a module of this package with a `Command`; only the requested one is imported.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from pdvsim.common.console import guarded
from pdvsim.common.version import __version__

if TYPE_CHECKING:
    from pdvsim.cli.command import Command

GROUPS = {  # name, also of its module if that is not SHARED: one line of help
    "decide": {
        "advise": "recommend a setup for a load: pdvsim advise --request-rate 8 --goodput ttft:500 tpot:50",
        "capacity": "find the highest rate of each architecture: pdvsim capacity --goodput ttft:500 tpot:50",
        "map": "map the best architecture over load and acceptance: pdvsim map --y acceptance --against pd",
        "draft-table": "find the best draft length per batch size, for vLLM: pdvsim draft-table --pair draft:target",
        "speedup": "show what drafting gains by draft length and load: pdvsim speedup --model llama-3.1-8b --gpu h100",
    },
    "simulate": {
        "run": "simulate one experiment: pdvsim run --arch pdv --request-rate 8",
        "sweep": "simulate architectures x loads: pdvsim sweep --arch pdv,pd --concurrency 1,8,64 --num-runs 5",
        "live": "show architectures on a page while they serve: pdvsim live --arch pdv,colocated",
    },
    "view": {
        "plot": "plot sweeps and runs: pdvsim plot results/sweep-DATE --against pd",
        "report": "write one interactive page: pdvsim report results/sweep-DATE -o report.html",
        "traffic": "summarise a trace: pdvsim traffic FILE -o traffic.png",
        "acceptance": "list known acceptance of draft tokens: pdvsim acceptance --drafter eagle3",
    },
    "measure": {
        "profile": "measure models on this GPU, or list profiles: pdvsim profile --models llama-2-7b; --list",
        "calibrate": "fit a profile to measured samples: pdvsim calibrate DIR -o profile.json",
        "realrun": "run one experiment on this machine's GPU: pdvsim realrun --arch pdv --request-rate 8",
        "compare": "compare two benchmarks: pdvsim compare A.json B.json",
        "validate": "compare real runs with simulated ones: pdvsim validate [RUNS.jsonl ...]",
    },
    "published": {"reproduce": "simulate the published PD-Verify tables: pdvsim reproduce poisson-30s"},
}
SHARED = {"compare": "validate.bench", "draft-table": "drafting", "plot": "report", "speedup": "drafting"}
COMMANDS = {name: line for group in GROUPS.values() for name, line in group.items()}


def command_class(command: str) -> type[Command]:
    """The dataclass of a command: DraftTableCommand of draft-table."""
    module = import_module(f"pdvsim.cli.{SHARED.get(command, command)}")
    kind: type[Command] = getattr(module, f"{command.title().replace('-', '')}Command")
    return kind


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process, which ends with it; returns the exit code."""
    if argv is None:  # else its worker processes would import a random.py in the current folder
        os.environ["PYTHONSAFEPATH"] = "1"
    return guarded("pdvsim", lambda: _dispatch(list(sys.argv[1:] if argv is None else argv)), last=argv is None)


def _dispatch(argv: list[str]) -> int:
    first = argv[0] if argv else None
    if first == "help" and len(argv) > 1:  # pdvsim help run --help-all
        argv = [argv[1], *(argv[2:] or ["--help"])]
        first = argv[0]
    if first in (None, "-h", "--help", "help"):
        sys.stdout.write(help_text())
        return 0
    if first == "--version":
        print(f"pdvsim {__version__}")
        return 0
    if first in ("--completion", "--complete"):
        return int(import_module("pdvsim.cli.completion").main(argv))
    if first not in COMMANDS:
        what = f"unknown {'option' if first[:1] == '-' else 'command'} {first!r}"
        close = difflib.get_close_matches(first, COMMANDS, n=1)
        hint = f"; did you mean {close[0]}?" if close else f"; commands: {', '.join(COMMANDS)} (see pdvsim --help)"
        raise ValueError(what + hint)
    return command_class(first).main(argv[1:], f"pdvsim {first}")


def help_text() -> str:
    """The text of `pdvsim --help`."""
    width = max(len(name) for name in COMMANDS) + 2  # not `map`, which is a module of this package once loaded
    parts = (
        [f"{group}:", *(f"  {name:<{width}}{line}" for name, line in own.items())] for group, own in GROUPS.items()
    )
    lines = "\n\n".join("\n".join(part) for part in parts)
    return f"""\
usage: pdvsim COMMAND [OPTIONS]

Choose a serving architecture for speculative decoding on your GPU and load, with error ranges.

{lines}

options:
  -h, --help          show this text; `pdvsim COMMAND --help` lists a command's main options, `--help-all` all
  --version           show the version
  --completion SHELL  print a completion script for bash, zsh or fish: eval "$(pdvsim --completion bash)"
"""
