"""GPU telemetry during a run: utilisation, memory, power, clocks and temperature, through NVML.

Sampled by the run's own loop in moments when nothing is due, so no thread competes with the host. A driver may take
milliseconds to answer; samples are then taken more rarely, so that they never cost over `MOST_SHARE` of the time.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import torch

from pdvsim.sim.records import Columns

NvmlAnswer = TypeVar("NvmlAnswer")

EVERY_S = 0.25
MOST_SHARE = 0.005

COLUMNS = ("time_s", "gpu_percent", "memory_percent", "memory_bytes", "power_w", "sm_mhz", "memory_mhz", "celsius")


class Telemetry:
    """Samples of one card; none where `read` is None."""

    def __init__(self, read: Callable[[], tuple[float, ...]] | None) -> None:
        self.cost_s = 0.0
        self._read = read
        self._due_s = 0.0
        self._rows: list[tuple[float, ...]] = []

    @classmethod
    def of(cls, device: torch.device) -> Telemetry:
        """The card, as far as it is one and can be read."""
        return cls(reader_of(device, _figures))

    def sample_if_due(self, now_s: float) -> None:
        """Take a sample if the last one is long enough ago."""
        if self._read is None or now_s < self._due_s:
            return
        began = perf_counter()
        try:
            self._rows.append((now_s, *self._read()))
        except Exception:  # a driver that stops answering must not end the run
            self._read = None
        took = perf_counter() - began
        self.cost_s += took
        self._due_s = now_s + max(EVERY_S, took / MOST_SHARE)

    def columns(self) -> Columns:
        """Columns with one row per sample."""
        grid = np.array(self._rows, dtype=np.float64).reshape(-1, len(COLUMNS))
        return {name: grid[:, i] for i, name in enumerate(COLUMNS)}

    def summary(self) -> dict[str, Any]:
        """Means over the run, and what sampling cost the host."""
        if not self._rows:
            return {"telemetry_samples": 0}
        columns = self.columns()
        means = {f"mean_{name}": float(columns[name].mean()) for name in COLUMNS[1:]}
        return {"telemetry_samples": len(self._rows), "telemetry_cost_s": self.cost_s, **means}


def reader_of(device: torch.device, read: Callable[[Any, Any], NvmlAnswer]) -> Callable[[], NvmlAnswer] | None:
    """`read` of NVML's Python binding and a card's handle; None on a CPU, not installed, or if the driver refuses."""
    if device.type != "cuda":
        return None
    try:
        import pynvml  # type: ignore[import-not-found,unused-ignore]

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
        reader = partial(read, pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
        reader()
    except Exception:  # a run, and times, without it are still of use
        return None
    return reader


def _figures(nvml: Any, card: Any) -> tuple[float, ...]:
    """The values of COLUMNS after the time."""
    busy = nvml.nvmlDeviceGetUtilizationRates(card)
    return (
        float(busy.gpu),
        float(busy.memory),
        float(nvml.nvmlDeviceGetMemoryInfo(card).used),
        nvml.nvmlDeviceGetPowerUsage(card) / 1000,
        float(nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM)),
        float(nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_MEM)),
        float(nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU)),
    )


def device_name(device: torch.device) -> str:
    """The card, or the kind of CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}"


def now() -> str:
    """The date and time, UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def machine_facts(device: torch.device) -> dict[str, Any]:
    """Return the device and versions of a run, and its date."""
    return {
        "gpu": device_name(device),
        "gpus": 1,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "measured_at": now(),
    }
