"""The commands of `pdvsim`, and the modules they are in. Nothing else is imported here."""

from __future__ import annotations

COMMANDS = {  # name, that of a module of this package: one line of help
    "run": "one experiment: pdvsim run --arch pdv --request-rate 8",
    "sweep": "architectures x loads x replications: pdvsim sweep --arch pdv,pd --concurrency 1,8,64 --num-runs 5",
    "plot": "pictures of sweeps and runs: pdvsim plot results/sweep-DATE --against pd",
    "report": "one interactive page: pdvsim report results/sweep-DATE -o report.html",
    "check": "whether results on disk are whole: pdvsim check results/sweep-DATE",
    "capacity": "the highest rate each architecture holds: pdvsim capacity --goodput ttft:500 tpot:50 --attainment 0.9",
    "advise": "what to run, and how sure: pdvsim advise --request-rate 8 --goodput ttft:500 tpot:50",
    "draft-table": "the best draft length by batch size, for vLLM: pdvsim draft-table --pair draft:target --gpu h200",
    "map": "which architecture wins where, or each against one: pdvsim map --y acceptance --against pd",
    "live": "architectures side by side while they serve, on a page: pdvsim live --arch pdv,colocated",
    "reproduce": "the published PD-Verify tables, simulated: pdvsim reproduce poisson-30s --fair",
    "profile": "measure models on this GPU: pdvsim profile --models llama-2-7b -o DIR",
    "calibrate": "a profile from measured samples: pdvsim calibrate DIR -o profile.json",
    "validate": "real serving runs against the same runs simulated: pdvsim validate [RUNS.jsonl ...]",
    "traffic": "what is in a trace: pdvsim traffic FILE -o traffic.png",
    "realrun": "one experiment on this machine's GPU: pdvsim realrun --arch pdv --request-rate 8",
    "probe": "how fast this GPU is, beside a profile's: pdvsim probe",
    "profiles": "the GPUs, models, profiles and samples that come with pdvsim",
}


def module_of(command: str) -> str:
    """The module of a command."""
    return f"pdvsim.cli.{command.replace('-', '_')}"
