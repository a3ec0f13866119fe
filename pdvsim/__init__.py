"""pdvsim: choose a serving architecture for speculative decoding on your GPU and load, with error ranges.

    run = pdvsim.run(arch="pdv", request_rate=8)
    run.metrics["mean_ttft_ms"], run.requests, print(run.table())
    points = pdvsim.sweep(arch=["pdv", "pd"], concurrency=[1, 8])
    pdvsim.capacity(goodput=["ttft:500", "tpot:50"])
    pdvsim.advise(request_rate=8, goodput=["ttft:500", "tpot:50"])
    pdvsim.winner_map(y="size", pairs=["gemma-2b:gemma-7b"], concurrency=[1, 8], against="pd")
    pdvsim.draft_table(model="llama-3.1-8b", gpu="h200")
    pdvsim.speedup(model="llama-3.1-8b", gpu="h100")
    pdvsim.traffic("requests.csv")
    pdvsim.validate(bench="bench.json", model="llama-3.1-8b", gpu="h100")

Keywords are the flags of the command of the same name, with underscores. The functions are in `pdvsim.api`, which is
imported when the first of them is used.
"""

from typing import Any

from pdvsim.common.version import __version__ as __version__

__all__ = [
    "Run",
    "__version__",
    "advise",
    "capacity",
    "draft_table",
    "run",
    "speedup",
    "sweep",
    "traffic",
    "validate",
    "winner_map",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'pdvsim' has no attribute {name!r}")
    from pdvsim import api

    globals()[name] = value = api.Run if name == "Run" else api.function(name)
    return value


def __dir__() -> list[str]:
    return __all__
