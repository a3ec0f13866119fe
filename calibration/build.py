"""Make a profile from measured samples: `python -m pdvsim.calibration.build SAMPLES -o profile.json`.

Prints, per model, how far points are off that the fit has not seen, and the same for co-runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pdvsim.calibration.corun import Corun, fit_corun
from pdvsim.calibration.fit import Solo, fit_solo, medians
from pdvsim.realrun.buckets import CHUNK_BUCKETS, ROW_BUCKETS, SMALL_BYTES, SMALL_TOKENS
from pdvsim.sim.core import GpuSpec, ModelSpec
from pdvsim.sim.latency import Latency
from pdvsim.sim.profile import SCHEMA, ContentionFit, HostCost, Profile, save

if TYPE_CHECKING:
    import pandas as pd

    from pdvsim.profiler.samples import Header, Samples


def host_cost(frame: pd.DataFrame) -> HostCost:
    """Medians over kinds and sizes: a launch as the server makes it, and noticing and reading a completion.

    A hand-over between lanes is a few queue operations of the same thread; it is not measured apart, and taken as a
    tenth of a launch.
    """
    host = frame[frame["section"] == "host"]
    by = host.groupby("what", observed=True)["seconds"].median()
    launch = float(by["launch_idle"])
    return HostCost(launch_s=launch, completion_s=float(by["poll"] + by["outcome"]), handoff_s=launch / 10)


def gpu_spec(header: Header, name: str) -> GpuSpec:
    """The card with the ceilings measured beside the samples."""
    card = header.device
    if card.bandwidth_bytes_per_s is None or card.flops_per_s is None or card.memory_bytes is None:
        raise ValueError(f"samples of {card.name} hold no ceilings: measured without a GPU")
    dates = sorted(part.date for part in header.parts)
    return GpuSpec(
        name,
        bandwidth_bytes_per_s=card.bandwidth_bytes_per_s,
        flops_per_s=card.flops_per_s,
        memory_bytes=card.memory_bytes,
        source=f"{card.name}: copy and bf16 matrix product measured {dates[0][:10]}",
        measured=True,
        sms=card.multiprocessors,
    )


def nimble_tokens(spec: ModelSpec) -> int:
    """Tokens up to which the engine's own small kernels do all of a model's products; the library's fill the card."""
    largest = 2 * spec.hidden * spec.intermediate * spec.dtype_bytes  # gate and up in one
    return SMALL_TOKENS if largest <= SMALL_BYTES else 0


def build(samples: Samples, name: str) -> tuple[Profile, dict[str, Solo], Corun | None]:
    """A profile, and how well each part of it holds."""
    gpu, frame, specs = gpu_spec(samples.header, name), samples.frame, samples.header.specs()
    solos: dict[str, Solo] = {}
    solo_rows = frame[frame["section"] == "solo"]
    for model, rows in solo_rows.groupby("model", sort=True, observed=True):
        spec = specs[str(model)]
        solos[str(model)] = fit_solo(medians(rows), spec, gpu, ROW_BUCKETS, CHUNK_BUCKETS, nimble_tokens(spec))
    corun = fit_corun(frame, gpu, {model: Latency(specs[model], solo.fit) for model, solo in solos.items()})
    header = samples.header
    profile = Profile(
        schema_version=SCHEMA,
        name=f"{name}-measured",
        foundation=f"measured on {header.device.name}, {min(part.date for part in header.parts)[:10]}",
        gpu=gpu,
        models={model: solo.fit for model, solo in solos.items()},
        host=host_cost(frame),
        contention=corun.fit if corun else ContentionFit(),
        provenance={
            "device": header.device.name,
            "software": header.software,
            "dates": sorted({part.date[:10] for part in header.parts}),
            "samples": header.samples,
            "held_out_error": {m: {"median": s.median_error, "p95": s.p95_error} for m, s in solos.items()},
            "corun": "fitted on pairs" if corun else "ideal sharing, assumed",
        },
    )
    return profile, solos, corun


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pdvsim.calibration.build", description=__doc__.split("\n")[0])
    parser.add_argument("samples", help="folder with samples.parquet and header.json")
    parser.add_argument("-o", "--output", required=True, help="profile to write (JSON)")
    parser.add_argument("--name", required=True, help="the card's name in pdvsim, e.g. h200")
    options = parser.parse_args(argv)
    from pdvsim.profiler.samples import load

    try:
        profile, solos, corun = build(load(options.samples), options.name)
        save(profile, options.output)
    except (ValueError, OSError) as error:
        print(f"calibration: error: {error}", file=sys.stderr)
        return 2
    print(f"{'model':16} {'points':>6} {'median error':>13} {'p95':>7}   held out, {profile.foundation}")
    for model, solo in solos.items():
        print(f"{model:16} {solo.points:6} {solo.median_error:12.1%} {solo.p95_error:8.1%}")
    if corun:
        for label, found in (("co-run pairs", corun.pair_errors), ("triples, not fitted", corun.triple_errors)):
            if len(found):
                middle, high = np.median(np.abs(found)), np.percentile(np.abs(found), 95)
                print(f"{label:20} {len(found):4} works {middle:8.1%} {high:8.1%}")
        print(corun.fit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
