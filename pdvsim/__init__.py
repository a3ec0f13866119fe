"""pdvsim: which serving architecture for speculative decoding, on your GPU and load, and how sure.

    run = pdvsim.run(arch="pdv", request_rate=8)
    run.metrics["mean_ttft_ms"], run.requests, print(run.table())
    points = pdvsim.sweep(arch=["pdv", "pd"], concurrency=[1, 8])

Keywords are the flags of `pdvsim run` and `pdvsim sweep`, with underscores.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from pdvsim.sim.records import Result

__version__ = "0.1.0"
__all__ = ["Run", "__version__", "run", "sweep"]


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
        from pdvsim.sim.band import spanned
        from pdvsim.sim.metrics import summarise

        return spanned(summarise(self.result), self.ends)

    @cached_property
    def _frames(self) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
        from pdvsim.sim.metrics import frames

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
        from pdvsim.sim.sweep import flatten

        experiment = self.result.experiment
        load = {"request_rate": experiment.traffic.request_rate, "max_concurrency": experiment.traffic.max_concurrency}
        return {"arch": experiment.arch, "pair": experiment.server.pair, **load, **self.result.meta} | flatten(
            self.metrics
        )

    def table(self) -> str:
        """The metrics as `vllm bench serve` prints them."""
        from pdvsim.table import serving_table

        scoring = self.result.experiment.scoring
        return serving_table(self.values, scoring.percentile_metrics, scoring.metric_percentiles)

    def _repr_html_(self) -> str:
        from pdvsim.table import serving_html

        scoring = self.result.experiment.scoring
        return serving_html(self.values, scoring.percentile_metrics, scoring.metric_percentiles)

    def __repr__(self) -> str:
        experiment = self.result.experiment
        count = len(self.result.requests["id"])
        return f"Run({experiment.arch}, {count} requests, {self.result.meta.get('foundation', '?')})"


def run(**options: Any) -> Run:
    """Simulate one experiment; keywords are the flags of `pdvsim run`. A ValueError names what is wrong."""
    from pdvsim.args import flags, from_mapping, parse
    from pdvsim.sim.band import ends
    from pdvsim.sim.config import Experiment
    from pdvsim.sim.run import simulate

    experiment = parse(Experiment, from_mapping(options, flags(Experiment), "unknown option"))
    return Run(simulate(experiment), ends(experiment))


def sweep(**options: Any) -> pd.DataFrame:
    """Simulate architectures x loads x replications; one row a point. Keywords are the flags of `pdvsim sweep`."""
    from pdvsim.args import SweepOptions, flags, from_mapping, parse
    from pdvsim.sim.sweep import run_sweep

    chosen = parse(SweepOptions, from_mapping(options, flags(SweepOptions), "unknown option"))
    return run_sweep(chosen.sweep().points(), chosen.jobs)
