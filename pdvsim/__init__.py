"""pdvsim: which serving architecture for speculative decoding, on your GPU and load, and how sure.

    run = pdvsim.run(arch="pdv", request_rate=8)
    run.metrics["mean_ttft_ms"], run.requests, print(run.table())
    points = pdvsim.sweep(arch=["pdv", "pd"], concurrency=[1, 8])
    pdvsim.capacity(goodput=["ttft:500", "tpot:50"])
    pdvsim.advise(request_rate=8, goodput=["ttft:500", "tpot:50"])

Keywords are the flags of the command of the same name, with underscores.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Unpack

if TYPE_CHECKING:
    import pandas as pd

    from pdvsim.decide.advise import Advice
    from pdvsim.decide.capacity import Capacities
    from pdvsim.decide.winners import WinnerMap
    from pdvsim.options import AdviseOptions, CapacityOptions, MapOptions, RunOptions, SweepOptions
    from pdvsim.sim.records import Result

__version__ = "0.1.0"
__all__ = ["Run", "__version__", "advise", "capacity", "run", "sweep", "winner_map"]


class Run:
    """One finished run. Metrics and frames are made from its rows when first asked for."""

    def __init__(self, result: Result, ends: Sequence[dict[str, Any]] = ()) -> None:
        self.result = result
        self.ends = ends  # metrics at both ends of the profile's error bar; none where forwards were measured

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """Every metric, under the names of `vllm bench serve` where it has one.

        Where forward times are predicted the main ones also have a `NAME_low` and `NAME_high`.
        """
        from pdvsim.sim.metrics.summary import summarise
        from pdvsim.study.band import spanned

        return spanned(summarise(self.result), self.ends)

    @cached_property
    def _frames(self) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
        from pdvsim.sim.metrics.summary import frames

        return frames(self.result)

    @property
    def requests(self) -> pd.DataFrame:
        """One row a request."""
        return self._frames[0]

    @property
    def launches(self) -> pd.DataFrame:
        """One row a work that ran on a GPU."""
        return self._frames[1]

    @property
    def deliveries(self) -> pd.DataFrame:
        """One row a chunk of tokens that reached a request."""
        return self._frames[2]

    @property
    def telemetry(self) -> pd.DataFrame:
        """One row a sample of the real GPU's counters; empty for a simulated one."""
        import pandas as pd

        return pd.DataFrame(self.result.meta.get("telemetry", []))

    @property
    def values(self) -> dict[str, Any]:
        """The metrics as one level, with what was run: what the tables print."""
        from pdvsim.study.sweep import flatten

        experiment = self.result.experiment
        load = {"request_rate": experiment.traffic.request_rate, "max_concurrency": experiment.traffic.max_concurrency}
        return {"arch": experiment.arch, "pair": experiment.server.pair, **load, **self.result.meta} | flatten(
            self.metrics
        )

    def table(self) -> str:
        """The metrics as `vllm bench serve` prints them."""
        from pdvsim.view.table import serving_table

        scoring = self.result.experiment.scoring
        return serving_table(self.values, scoring.percentile_metrics, scoring.metric_percentiles)

    def _repr_html_(self) -> str:
        from pdvsim.view.table import serving_html

        scoring = self.result.experiment.scoring
        return serving_html(self.values, scoring.percentile_metrics, scoring.metric_percentiles)

    def __repr__(self) -> str:
        experiment = self.result.experiment
        return (
            f"Run({experiment.arch}, {self.metrics['completed']} requests, {self.result.meta.get('foundation', '?')})"
        )


def run(**options: Unpack[RunOptions]) -> Run:
    """Simulate one experiment; keywords are the flags of `pdvsim run`. A ValueError names what is wrong."""
    from pdvsim.cli.build import build
    from pdvsim.sim.config import Experiment
    from pdvsim.sim.run import simulate
    from pdvsim.study.band import ends
    from pdvsim.study.inputs import checked

    experiment = build(Experiment, options)
    return Run(simulate(experiment, requests=checked(experiment)), ends(experiment))


def sweep(**options: Unpack[SweepOptions]) -> pd.DataFrame:
    """Simulate architectures x loads x replications; one row a point. Keywords are the flags of `pdvsim sweep`.

    `vary` is a dictionary: vary={"num_speculative_tokens": [2, 4]}. Nothing is written.
    """
    from pdvsim.cli.args import SweepOptions as Options
    from pdvsim.cli.build import build
    from pdvsim.study.sweep import run_sweep

    chosen = build(Options, options)
    return run_sweep(chosen.sweep().points(), backend=chosen.where())


def capacity(**options: Unpack[CapacityOptions]) -> Capacities:
    """The highest rate each architecture holds; keywords are the flags of `pdvsim capacity`. Printed: its table."""
    from pdvsim.cli.build import build
    from pdvsim.cli.capacity import CapacityOptions as Options
    from pdvsim.decide.capacity import find_capacities
    from pdvsim.decide.runs import Bench

    chosen = build(Options, options)
    return find_capacities(chosen.plan(), Bench(chosen.jobs), chosen.gpu_hour_usd)


def advise(**options: Unpack[AdviseOptions]) -> Advice:
    """What to run for a load, and how sure; keywords are the flags of `pdvsim advise`. Printed: the advice."""
    from pdvsim.cli.advise import AdviseOptions as Options
    from pdvsim.cli.build import build
    from pdvsim.decide.advise import advise as answer
    from pdvsim.decide.runs import Bench

    chosen = build(Options, options)
    return answer(chosen.question(), Bench(chosen.jobs))


def winner_map(**options: Unpack[MapOptions]) -> WinnerMap:
    """Which architecture wins where; keywords are the flags of `pdvsim map`. Printed: its table."""
    from pdvsim.cli.build import build
    from pdvsim.cli.map import MapOptions as Options
    from pdvsim.decide.runs import Bench
    from pdvsim.decide.winners import draw_map

    chosen = build(Options, options)
    return draw_map(chosen.grid(), Bench(chosen.jobs))
