"""The rows of a sweep in Python: a frame that prints as a summary and plots itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd
from pandas.plotting import PlotAccessor

from pdvsim.bench.stats import headline, over_replications, paired_differences, varied
from pdvsim.view.comparison import comparison_table
from pdvsim.view.plots import sweep_figure
from pdvsim.view.style import tail
from pdvsim.view.table import TextTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class _Plot(PlotAccessor):
    """pandas' plots; without arguments, the sweep's plot."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return super().__call__(*args, **options) if args or options else self._parent.figure()  # type: ignore[attr-defined]


class SweepPoints(pd.DataFrame):
    """One row per run. Prints as a summary, also in a notebook. Selections from it are ordinary frames."""

    _metadata = ["setting"]  # noqa: RUF012 (pandas' own)
    setting = ""  # the setting in one line

    @property
    def _constructor(self) -> type[pd.DataFrame]:
        return pd.DataFrame

    @property
    def plot(self) -> _Plot:
        """`plot()` is the plot of `pdvsim sweep`; `plot.line(…)` and others are pandas'."""
        return _Plot(self)

    def figure(self) -> Figure:
        """Throughput, latencies and acceptance over the load, one curve per architecture."""
        return sweep_figure(self, self.setting)

    def __repr__(self) -> str:
        table = self._summary()
        return super().__repr__() if table is None else str(table)

    def _repr_html_(self) -> str | None:
        table = self._summary()
        shown: str | None = super()._repr_html_() if table is None else table.html()  # type: ignore[misc]
        return shown

    def _summary(self) -> TextTable | None:
        """The table of `pdvsim sweep`; None for a modified frame that is no longer a sweep."""
        try:
            return sweep_table(self)
        except (KeyError, IndexError):
            return None


def sweep_table(points: pd.DataFrame) -> TextTable:
    """One row per architecture, load and setting, with the differences from the first architecture if there are any."""
    entries = over_replications(points)
    compared_by = headline((entry["load_kind"], entry["load"]) for entry in entries)
    paired = points["arch"].nunique() > 1 and points["seed"].nunique() > 1
    leads = paired_differences(points, compared_by, str(points["arch"].iloc[0])) if paired else []
    highest = tail(points)
    percentiles = () if highest == "median" else (float(highest[1:]),)
    return comparison_table(entries, percentiles=percentiles, varied=varied(points), differences=leads)
