"""The commands of `pdvsim` by group, and their modules. Nothing else is imported here."""

from __future__ import annotations

GROUPS = {  # name, also of its module: one line of help
    "decide": {
        "advise": "recommend a setup for a load: pdvsim advise --request-rate 8 --goodput ttft:500 tpot:50",
        "capacity": "find the highest rate of each architecture: pdvsim capacity --goodput ttft:500 tpot:50",
        "map": "map the best architecture over load and acceptance: pdvsim map --y acceptance --against pd",
        "draft-table": "find the best draft length per batch size, for vLLM: pdvsim draft-table --pair draft:target",
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
    },
    "measure": {
        "profile": "measure models on this GPU, or list profiles: pdvsim profile --models llama-2-7b; --list",
        "calibrate": "fit a profile to measured samples: pdvsim calibrate DIR -o profile.json",
        "realrun": "run one experiment on this machine's GPU: pdvsim realrun --arch pdv --request-rate 8",
        "validate": "compare real runs with simulated ones: pdvsim validate [RUNS.jsonl ...]",
    },
    "published": {
        "reproduce": "simulate the published PD-Verify tables: pdvsim reproduce poisson-30s",
    },
}
COMMANDS = {name: line for group in GROUPS.values() for name, line in group.items()}


def module_of(command: str) -> str:
    """The module of a command."""
    return f"pdvsim.cli.{command.replace('-', '_')}"
