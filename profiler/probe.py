# mypy: disable-error-code="no-untyped-call"
# (parts of torch are untyped.)
"""How fast this card is, in a few seconds: reading memory, multiplying, and starting small kernels.

Cards of one model differ by some percent. A probe is taken before a profile and before real runs; the ratio of two says
how much slower or faster one card is than the other for each kind of work. Nothing in it is fitted to runs.

Not probed: several streams side by side, and the host, whose costs a profile has apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pdvsim.profiler.provenance import now
from pdvsim.sim.config import Experiment, Hardware
from pdvsim.sim.records import Result
from pdvsim.sim.run import profile_of

if TYPE_CHECKING:
    import torch

RATES = ("bytes_per_s", "flops_per_s", "kernels_per_s")
SECONDS = 1.0  # spent on each kind of work, behind as long to reach its clocks
KERNELS = 512  # of the graph
ELEMENTS = 4096  # that one of its kernels works on
SIZES = {"cuda": (2**30, 8192), "cpu": (2**20, 256)}  # bytes copied; rows and columns of a product


class Slower(NamedTuple):
    """How many times as long a card takes as another, by what bounds the work."""

    reading: float
    multiplying: float
    starting: float


def probe(device: str | torch.device, seconds: float = SECONDS) -> dict[str, Any]:
    """The card's rates, each the median over `seconds`, and their spread: from the 5th to the 95th percentile."""
    import torch

    device = torch.device(device)
    found = {"device": _name(device), "date": now(), **_rates(device, seconds)}
    if device.type == "cuda":
        torch.cuda.empty_cache()  # its memory is another's now
    return found


def _rates(device: torch.device, seconds: float) -> dict[str, float]:
    import torch

    size, width = SIZES[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    source = torch.ones(size // dtype.itemsize, device=device, dtype=dtype)
    target = torch.empty_like(source)
    a, b = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    works: dict[str, tuple[float, Callable[[], object]]] = {
        "bytes_per_s": (2.0 * size, partial(target.copy_, source)),
        "flops_per_s": (2.0 * width**3, partial(torch.mm, a, b)),
        "kernels_per_s": (KERNELS, _kernels(device)),
    }
    found: dict[str, float] = {}
    for name, (amount, work) in works.items():
        _timed(work, device, seconds)
        rates = amount / _timed(work, device, seconds)
        low, median, high = np.percentile(rates, (5, 50, 95))
        found |= {name: float(median), f"{name}_spread": float((high - low) / median)}
    return found


def _name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _kernels(device: torch.device) -> Callable[[], object]:
    """Many small kernels one behind the other, on a GPU as one graph."""
    import torch

    small = torch.zeros(ELEMENTS, device=device)

    def chain() -> None:
        for _ in range(KERNELS):
            small.add_(1.0)

    if device.type != "cuda":
        return chain
    with torch.cuda.device(device):
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # once before it is captured
            chain()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain()
    return graph.replay


def _timed(work: Callable[[], object], device: torch.device, seconds: float) -> np.ndarray[Any, Any]:
    """Seconds of each call, as many as go into `seconds`; 5 at the least."""
    import torch

    spans: list[float] = []
    begin = perf_counter()
    while perf_counter() - begin < seconds or len(spans) < 5:
        if device.type == "cuda":
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            marks[0].record()
            work()
            marks[1].record()
            torch.cuda.synchronize(device)
            spans.append(marks[0].elapsed_time(marks[1]) / 1e3)
        else:
            started = perf_counter()
            work()
            spans.append(perf_counter() - started)
    return np.array(spans)


def probed_reference(profile: str | None, gpu: str = Hardware.gpu) -> Mapping[str, Any] | None:
    """The probe of the card that a profile was measured on; None where none was taken."""
    found = profile_of(Experiment(hardware=Hardware(gpu=gpu, profile=profile))).provenance.get("probe")
    return found if isinstance(found, Mapping) else None


def slower(this: Mapping[str, Any] | None, reference: Mapping[str, Any] | None) -> Slower | None:
    """How many times as long this card takes as the reference; None where either was not probed."""
    if this is None or reference is None:
        return None
    try:
        ratios = [float(reference[name]) / float(this[name]) for name in RATES]
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        raise ValueError("not a probe: it lacks " + ", ".join(RATES)) from None
    return Slower(*ratios)


def slowdown(result: Result, than: Slower) -> float:
    """How many times as long a run's forwards take on a card, by what bounds each of them alone.

    A forward takes as long as its bytes or its arithmetic at the card's ceilings, whichever is longer; the rest of its
    time goes to starting its kernels.
    """
    launches, meta = result.launches, result.meta
    solo = np.asarray(launches["solo_s"], np.float64)
    reading = np.asarray(launches["bytes"], np.float64) / float(meta["bandwidth_bytes_per_s"])
    multiplying = np.asarray(launches["flops"], np.float64) / float(meta["flops_per_s"])
    bound = np.minimum(np.maximum(reading, multiplying), solo)
    by_bytes = reading >= multiplying
    share = bound[by_bytes].sum(), bound[~by_bytes].sum(), (solo - bound).sum()
    return float(np.dot(share, than) / solo.sum())
