# mypy: disable-error-code="no-untyped-call"
# (parts of torch are untyped.)
"""How fast this card is, in a few seconds: reading memory, multiplying, and starting small kernels.

Cards of one model differ by some percent. A probe is taken before a profile and before real runs; what the ratio of two
says is in `pdvsim.calibration.validate.cards`. Nothing in it is fitted to runs.

Not probed: several streams side by side, and the host, whose costs a profile has apart.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from pdvsim.profiler.provenance import now

if TYPE_CHECKING:
    import torch

RATES = ("bytes_per_s", "flops_per_s", "kernels_per_s")
SECONDS = 1.0  # spent on each kind of work, behind as long to reach its clocks
KERNELS = 512  # of the graph
ELEMENTS = 4096  # that one of its kernels works on
SIZES = {"cuda": (2**30, 8192), "cpu": (2**20, 256)}  # bytes copied; rows and columns of a product


def probe(device: str | torch.device, seconds: float | None = None) -> dict[str, Any]:
    """The card's rates, each the median over `seconds`, and their spread: from the 5th to the 95th percentile."""
    import torch

    device = torch.device(device)
    found = {"device": _name(device), "date": now(), **_rates(device, SECONDS if seconds is None else seconds)}
    if device.type == "cuda":
        torch.cuda.empty_cache()  # its memory is another's now
    return found


def _rates(device: torch.device, seconds: float) -> dict[str, float]:
    import torch

    size, width = SIZES[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    source = torch.randn(size // dtype.itemsize, device=device, dtype=dtype)  # constants are copied faster
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
