"""Origin of samples: the GPU, its peak rates, its clocks and power under load, and all software versions."""

from __future__ import annotations

import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from statistics import median
from typing import Any

import torch

from pdvsim.common.version import __version__
from pdvsim.profiler.header import Card, Reading
from pdvsim.realrun.telemetry import device_name, reader_of

# NVML's bits for clocks held down against the card's will; idling and application clocks are none of them
THROTTLE_BITS = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


def version(package: str) -> str | None:
    """The installed version of a package, if it is."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def software() -> dict[str, str | None]:
    """Versions that decide how fast a kernel is."""
    return {
        "pdvsim": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "cuda": torch.version.cuda,
        "driver": read_card(torch.device("cuda")).get("driver") if torch.cuda.is_available() else None,
        "transformers": version("transformers"),
    }


def card(device: torch.device) -> Card:
    """Return the device's name and measured ceilings; on the CPU, a name without ceilings."""
    if device.type != "cuda":
        return Card(name=device_name(device))
    properties = torch.cuda.get_device_properties(device)
    bandwidth, rate = _ceilings(device)
    torch.cuda.empty_cache()
    return Card(
        name=device_name(device), multiprocessors=int(properties.multi_processor_count),
        memory_bytes=int(properties.total_memory), bandwidth_bytes_per_s=bandwidth, flops_per_s=rate,
    )  # fmt: skip


def _ceilings(device: torch.device) -> tuple[float, float]:
    """Copy bandwidth (bytes read and written) and bf16 matrix rate, on random data."""
    source = torch.randn(2**30, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy_s = _gpu_seconds(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * source.numel() * 2 / copy_s, 2 * 8192**3 / _gpu_seconds(lambda: torch.mm(a, b))


def _gpu_seconds(run: Callable[[], object]) -> float:
    """Median device time of one call of `run`, over ten after three that do not count."""
    spans = []
    for _ in range(13):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        spans.append((start, end))
    torch.cuda.synchronize()
    return float(median(a.elapsed_time(b) for a, b in spans[3:])) / 1000


def reading(device: torch.device, load: Callable[[], object]) -> Reading | None:
    """Clocks, power, temperature and throttling while `load` runs again and again; None where they cannot be read."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(read_card, device)
        while not answer.done():
            load()
        state = answer.result()
    state.pop("driver", None)
    return Reading(**state) if state else None


def read_card(device: torch.device) -> dict[str, Any]:
    """One reading; empty if NVML cannot be asked."""
    read = reader_of(device, _state)
    return {} if read is None else read()


def _state(nvml: Any, card: Any) -> dict[str, Any]:
    reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(card)
    return {
        "sm_mhz": nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM),
        "memory_mhz": nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_MEM),
        "power_w": nvml.nvmlDeviceGetPowerUsage(card) / 1000,
        "temperature_c": nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU),
        "throttled": [name for bit, name in THROTTLE_BITS.items() if reasons & bit],
        "driver": nvml.nvmlSystemGetDriverVersion(),
    }
