"""GPU telemetry during a run: utilisation, memory, power, clocks and temperature, through NVML.

Sampled by the run's own loop in moments when nothing is due, so no thread competes with the host. A driver may take
milliseconds to answer; samples are then taken more rarely, so that they never cost over `MOST_SHARE` of the time.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from datetime import UTC, datetime
from time import perf_counter
from typing import Any

import numpy as np
import torch

from pdvsim.sim.records import Columns

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
        """The card, as far as it is one, NVML's Python binding is installed and the driver answers."""
        if device.type != "cuda":
            return cls(None)
        try:
            reader = _reader(*nvml_of(device))
            reader()
        except Exception:  # not installed, or a driver that refuses: a run without it is still a run
            return cls(None)
        return cls(reader)

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

    def restart(self) -> None:
        """Forget what was before the clock started."""
        self._rows.clear()
        self.cost_s = self._due_s = 0.0

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


def nvml_of(device: torch.device) -> tuple[Any, Any]:
    """NVML's Python binding and its handle of the device; an error if it is not installed or the driver refuses."""
    import pynvml  # type: ignore[import-not-found,unused-ignore]

    pynvml.nvmlInit()
    uuid = str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
    return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")


def _reader(nvml: Any, handle: Any) -> Callable[[], tuple[float, ...]]:
    def read() -> tuple[float, ...]:
        busy = nvml.nvmlDeviceGetUtilizationRates(handle)
        return (
            float(busy.gpu),
            float(busy.memory),
            float(nvml.nvmlDeviceGetMemoryInfo(handle).used),
            nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
            float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        )

    return read


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
