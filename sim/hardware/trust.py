"""How far predictions on a profile were off where the same runs were served for real: by metric and kind of load.

`pdvsim validate --write` makes the file, beside the profile: `NAME.errors.json`. A bar holds 90% of the real runs;
a lead is how far one prediction over another was off, at the 95th percentile. Not told: errors on loads unlike any that
was served.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal

from pdvsim.sim.config import Hardware, Traffic
from pdvsim.sim.reading import read_json, said

Loading = Literal["closed", "open", "burst"]

ANY = "any"  # bars over all kinds of load, for a kind of which too few runs were served
THROUGHPUTS = ("request_throughput", "output_throughput", "total_token_throughput")  # all off by the same share


@dataclass(frozen=True)
class Errors:
    """Errors of one profile's predictions, as shares."""

    profile: str
    runs: int  # that they were taken from
    bars: dict[str, dict[str, float]]  # by kind of load and metric
    leads: dict[str, float]  # by metric

    def bar(self, load: Loading, metric: str) -> float | None:
        """The share within which 90% of real runs lay; None where none was served that tells."""
        name = "output_throughput" if metric in THROUGHPUTS else metric
        return self.bars.get(load, {}).get(name, self.bars.get(ANY, {}).get(name))


def load_kind(traffic: Traffic) -> Loading:
    """How a server is loaded: a closed loop, steady arrivals (Poisson, or more regular), or bursts."""
    if traffic.use_trace_timestamps or traffic.burstiness < 1:
        return "burst"
    if math.isfinite(traffic.request_rate):
        return "open"
    return "burst" if traffic.max_concurrency is None else "closed"


def errors_path(hardware: Hardware) -> Path | None:
    """Where the errors of a profile are; None where it has no file."""
    if hardware.profile == "roofline":
        return None
    if hardware.profile is not None:
        return Path(hardware.profile).with_suffix(".errors.json")
    if hardware.gpu.endswith(".toml"):
        return None
    return Path(str(files("pdvsim.sim.hardware"))) / "data" / f"{hardware.gpu}.errors.json"


def errors_of(hardware: Hardware) -> Errors | None:
    """The errors of the profile that a run is simulated on; None where it was not validated."""
    path = errors_path(hardware)
    if path is None or not path.is_file():
        return None
    return _read(path, path.stat().st_mtime_ns)


@cache
def _read(path: Path, changed_ns: int) -> Errors:
    try:
        found = Errors(**read_json(path))
        sizes = [size for by_metric in (*found.bars.values(), found.leads) for size in by_metric.values()]
        if not all(0 <= size < math.inf for size in sizes):
            raise ValueError("an error is no share")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not errors of a profile, which validate --write makes: {said(error)}") from None
    return found


def as_text(errors: Errors) -> str:
    """As it is written."""
    return json.dumps(vars(errors), indent=1) + "\n"
