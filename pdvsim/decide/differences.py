"""Tuned architectures compared with one of them: the metrics of each, and differences paired by seed.

A difference is significant if its interval lies above the profile's error, with 95% confidence for all together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pdvsim.decide.contest import LEAST_SEEDS, corrected, exceeds
from pdvsim.decide.error import lead_error
from pdvsim.decide.report import unsure_text
from pdvsim.sim.config import Experiment
from pdvsim.sim.metrics.summary import percentile_name
from pdvsim.study.stats import Interval, over_replications, paired_differences
from pdvsim.view.comparison import founded, stability_text, uncertainty
from pdvsim.view.report.sheet import PageSection, Showable
from pdvsim.view.table import DETAIL, TextTable, banded, cell, load_name, load_text

if TYPE_CHECKING:
    import pandas as pd

Spot = tuple[str, float]  # a place in words, and a load


@dataclass(frozen=True)
class Differences:
    """Rows with a `place` in words, and the settings of all at each spot."""

    points: pd.DataFrame
    against: str
    settings: Mapping[Spot, Mapping[str, Experiment]]

    @cached_property
    def summary(self) -> list[dict[str, Any]]:
        """One entry per place, load and architecture; numbers are Intervals over the replications."""
        groups = self.points.groupby("place", sort=False)
        return [{"place": place} | entry for place, group in groups for entry in over_replications(group)]

    @cached_property
    def paired(self) -> list[dict[str, Any]]:
        """Differences from one architecture in three metrics, and whether each is significant."""
        metrics = ("output_throughput", "mean_e2el_ms", self._tail)
        rivals = sum(len(mine) - 1 for mine in self.settings.values())
        confidence = corrected(len(metrics) * rivals)
        pairs = []
        for place, group in self.points.groupby("place", sort=False):
            for metric in metrics:
                for difference in paired_differences(group, metric, self.against, confidence):
                    mine = self.settings[str(place), difference["load"]][difference["arch"]]
                    error, apart = lead_error(mine, metric), difference["relative"]
                    significant = exceeds(Interval(abs(apart.mean), apart.half_width, apart.n), error)
                    verdict = {"significant": significant, "enough_runs": apart.n >= LEAST_SEEDS}
                    pairs.append({"place": place} | difference | {"error": error, "confidence": confidence} | verdict)
        return pairs

    @property
    def _tail(self) -> str:
        """The highest percentile of the latency."""
        [here, *_] = (mine for spot in self.settings.values() for mine in spot.values())
        return f"{percentile_name(max(here.scoring.metric_percentiles))}_e2el_ms"

    def sections(self) -> list[PageSection]:
        """The metrics of all, then the differences."""
        return [("", [self._figures()]), ("", self._differences() if self.paired else [])]

    def _figures(self) -> TextTable:
        entries = self.summary
        columns = {"out tok/s": "output_throughput", "mean latency ms": "mean_e2el_ms"}
        tail = f"{self._tail.partition('_')[0].upper()} latency ms"
        columns |= {tail: self._tail, "accepted % of drafted": "spec_decode_acceptance_rate"}
        columns |= {"of judged": "spec_decode_judged_acceptance_rate", "tok/round": "spec_decode_acceptance_length"}
        rows = [
            {
                **_row_key(entry),
                "settings": str(entry["settings"]),
                **{title: banded(entry, key) for title, key in columns.items()},
                "stability": stability_text(entry),
            }
            for entry in entries
        ]
        notes = [*dict.fromkeys(f"{e['gpu']}, {founded(e)}" for e in entries), *uncertainty(entries)]
        spare = ("of judged", "accepted % of drafted", "tok/round", DETAIL, "mean latency ms", "settings")
        return TextTable(rows, spare, notes, _places(entries))

    def _differences(self) -> list[str | Showable]:
        rows = [
            {
                **_row_key(d),
                "metric": d["metric"],
                f"against {self.against} %": cell(lead, scale=100, sign="+"),
                "": "" if d["significant"] else unsure_text(lead, d["error"], abs(lead.mean) <= lead.half_width),
            }
            for d in self.paired
            for lead in [d["relative"]]
        ]
        few = not all(d["enough_runs"] for d in self.paired)
        note = ["too few runs for a significant difference; raise --num-runs"] if few else []
        each = f"{self.paired[0]['confidence']:.2%} confidence each, 95% for all together"
        return [f"Paired differences, same seeds, {each}", TextTable(rows, (), note, _places(self.paired))]


def _places(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    return [str(entry["place"]) for entry in entries]


def _row_key(entry: Mapping[str, Any]) -> dict[str, str]:
    return {load_name(entry["load_kind"]): load_text(entry["load"]), "arch": str(entry["arch"])}
