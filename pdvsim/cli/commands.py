"""The commands of `pdvsim` by what they are for, and the modules they are in. Nothing else is imported here."""

from __future__ import annotations

GROUPS = {  # name, that of a module of this package: one line of help
    "ask": {
        "advise": "what to run, and how sure: pdvsim advise --request-rate 8 --goodput ttft:500 tpot:50",
        "capacity": "the highest rate each architecture holds: pdvsim capacity --goodput ttft:500 tpot:50",
        "map": "which architecture wins where, or each against one: pdvsim map --y acceptance --against pd",
        "draft-table": "the best draft length by batch size, for vLLM: pdvsim draft-table --pair draft:target",
    },
    "simulate": {
        "run": "one experiment: pdvsim run --arch pdv --request-rate 8",
        "sweep": "architectures x loads x replications: pdvsim sweep --arch pdv,pd --concurrency 1,8,64 --num-runs 5",
        "live": "architectures on a page while they serve: pdvsim live --arch pdv,colocated",
    },
    "look": {
        "plot": "pictures of sweeps and runs: pdvsim plot results/sweep-DATE --against pd",
        "report": "one interactive page: pdvsim report results/sweep-DATE -o report.html",
        "traffic": "what is in a trace: pdvsim traffic FILE -o traffic.png",
    },
    "measure": {
        "profile": "measure models on this GPU, or list what was: pdvsim profile --models llama-2-7b; --list",
        "calibrate": "a profile from measured samples: pdvsim calibrate DIR -o profile.json",
        "realrun": "one experiment on this machine's GPU: pdvsim realrun --arch pdv --request-rate 8",
        "validate": "real runs against the same runs simulated: pdvsim validate [RUNS.jsonl ...]",
    },
    "published": {
        "reproduce": "the published PD-Verify tables, simulated: pdvsim reproduce poisson-30s --fair",
    },
}
COMMANDS = {name: line for group in GROUPS.values() for name, line in group.items()}


def module_of(command: str) -> str:
    """The module of a command."""
    return f"pdvsim.cli.{command.replace('-', '_')}"
