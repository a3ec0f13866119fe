"""How far predictions on a profile were off where the same runs were served for real.

`pdvsim validate --write` makes the file next to the profile: `NAME.errors.json`. A bar holds 90% of the real runs of a
group; a lead is the error of one prediction over another, at the 95th percentile.

Runs are grouped by what their errors depend on: the load, how many lanes share the GPU, and whether the run is
demanding (long prompts, sizes beyond those measured, a draft length that changes, experts, 8-bit weights). Predictions
for a machine whose pace is known (`--machine`) have narrower bars of their own.

Runs unlike any that was served have no bar. `unvalidated` says which these are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pdvsim.sim.config import Experiment, Hardware, Host, Traffic
from pdvsim.sim.policies import ARCHITECTURES, policy_of
from pdvsim.sim.prices.reach import NOTABLE_SHARE, SIZES
from pdvsim.sim.reading import error_text, read_json
from pdvsim.sim.relevance import applicable

Loading = Literal["closed", "open", "burst"]
Known = Literal["any machine", "this machine"]  # whether a prediction knows the pace of the machine

ANY = "any"  # bars over all runs, for a group of which too few were served
LONG_PROMPT_TOKENS = 1000
THROUGHPUTS = ("request_throughput", "output_throughput", "total_token_throughput")  # all off by the same share

Bars = dict[str, dict[str, float]]  # by group and metric


@dataclass(frozen=True)
class Errors:
    """Errors of one profile's predictions, as shares."""

    profile: str
    runs: int  # that they were taken from
    drafters: list[str]
    reached: dict[str, float]  # largest sizes of these runs, where beyond what was measured
    bars: dict[Known, Bars]
    leads: dict[str, float]  # by metric

    def bar(self, known: Known, groups: Sequence[str], metric: str) -> float | None:
        """The share within which 90% of real runs lay, of the first group that has one; None where none has."""
        name = "output_throughput" if metric in THROUGHPUTS else metric
        bars = self.bars[known]
        return next((bars[group][name] for group in groups if name in bars.get(group, {})), None)


def load_kind(traffic: Traffic) -> Loading:
    """Return how a server is loaded: a closed loop, steady arrivals (Poisson, or more regular), or bursts."""
    if traffic.use_trace_timestamps or traffic.burstiness < 1:
        return "burst"
    if math.isfinite(traffic.request_rate):
        return "open"
    return "burst" if traffic.max_concurrency is None else "closed"


def groups(experiment: Experiment, prompt_tokens: float, outside: float) -> tuple[str, str, str]:
    """The groups of real runs that a run is compared with, the most alike first.

    `prompt_tokens` is the mean of its requests, `outside` the share of its GPU time beyond what was measured.
    """
    load, policy = load_kind(experiment.traffic), policy_of(experiment.arch)
    style = "sequential" if policy.workers == "requests" else "one lane" if policy.in_steps() else "lanes"
    changes, target = experiment.server.controller != "fixed", experiment.pair.target
    fewer = target.experts is not None or target.is_quantised  # weights that a forward reads
    if style != "sequential" and (prompt_tokens >= LONG_PROMPT_TOKENS or outside > NOTABLE_SHARE or changes or fewer):
        style += ", demanding"
    return f"{load}, {style}", load, ANY


def traits(metrics: Mapping[str, Any]) -> tuple[float, float]:
    """Mean prompt tokens of a run, and the share of its GPU time beyond what was measured."""
    outside = metrics.get("outside_measured", {}).get("share", 0.0)
    return metrics["total_input_tokens"] / max(metrics["completed"], 1e-9), outside


def unvalidated(experiment: Experiment, metrics: Mapping[str, Any], errors: Errors | None) -> str | None:
    """Return why real runs do not give the errors of a run on a measured profile; None where they do."""
    hardware, server = experiment.hardware, experiment.server
    drafter, drafts = server.drafted_by, experiment.has_drafter
    reasons = {
        f"{experiment.arch} was never validated against real runs": experiment.arch not in ARCHITECTURES,
        "no real run used several GPUs": hardware.replicas > 1 or experiment.gpus > 1,
        "no real run had KV tiers": hardware.kv_offload_gb or hardware.kv_offload_ssd_gb,
        f"--contention {hardware.contention} is an ablation": hardware.contention != "fluid",
        f"no real run used --padding {hardware.padding}": hardware.padding != "profile",
        "the host costs are not the measured ones": experiment.host != Host(),
        "no real run had this --priority": server.priority not in ("none", "stream"),
        f"too few real runs had --kv-cache-dtype {server.kv_cache_dtype}": server.kv_cache_dtype != "auto",
        "too few real runs used --async-scheduling": server.async_scheduling,
        "a roofline is a bound, not a prediction": hardware.profile == "roofline",
        "the error bar of its forward times was not simulated": hardware.predicted_engine != "pdvsim",
        "this profile was not validated against real runs (pdvsim validate --write)": errors is None,
        f"no real run drafted with {drafter}": errors and drafts and drafter not in ("none", *errors.drafters),
        "real runs padded their n-gram drafts": drafter == "ngram" and drafts and not server.pad_drafts,
    }
    if errors is None or any(reasons.values()):
        return next(reason for reason, holds in reasons.items() if holds)
    if applicable(experiment).server.max_prompts_per_forward is not None:
        return "no real run had this --max-prompts-per-forward"
    far = beyond(metrics, errors.reached)
    return f"real runs never had {far}" if far else None


def beyond(metrics: Mapping[str, Any], ranges: Mapping[str, float]) -> str | None:
    """The first size of a run that is beyond what was measured and beyond what real runs reached, in words."""
    outside = metrics.get("outside_measured", {})
    if not outside.get("share", 0.0) > NOTABLE_SHARE:
        return None
    for prefix, where in (("", ""), ("together_", " in concurrent lanes")):
        for name, label in SIZES.items():
            most, limit = outside.get(prefix + name, 0.0), ranges.get(prefix + name, 0.0)
            if most > limit:
                return f"{label} of {most:,.0f}{where}" + (f" (at most {limit:,.0f})" if limit else "")
    return None


def errors_path(hardware: Hardware) -> Path | None:
    """Return the path of a profile's errors; None where it has no file."""
    if hardware.profile == "roofline" or hardware.predicted_engine != "pdvsim":
        return None
    if hardware.profile is not None:
        return Path(hardware.profile).with_suffix(".errors.json")
    if hardware.gpu.endswith(".toml"):
        return None
    return Path(str(files("pdvsim.sim.prices"))) / "data" / f"{hardware.gpu}.errors.json"


def errors_of(hardware: Hardware) -> Errors | None:
    """The errors of the profile that a run is simulated on; None where it was not validated."""
    path = errors_path(hardware)
    if path is None or not path.is_file():
        return None
    return _read(path, path.stat().st_mtime_ns)


@cache
def _read(path: Path, changed_ns: int) -> Errors:
    try:
        errors = Errors(**read_json(path))
        by_metric = (*(bar for bars in errors.bars.values() for bar in bars.values()), errors.leads)
        if not all(0 <= size < math.inf for sizes in by_metric for size in sizes.values()):
            raise ValueError("an error must be a share")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a file of validate --write: {error_text(error)}") from None
    return errors


def as_text(errors: Errors) -> str:
    """Return the errors as the text of their file."""
    return json.dumps(vars(errors), indent=1) + "\n"
