"""The driver's library, as one card would answer through it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch


def install(monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
    """Let `import pynvml` and torch know a card; `more` are further functions and constants of the library."""
    nvml = SimpleNamespace(
        NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2, NVML_TEMPERATURE_GPU=0, nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: {"GPU-0-1": "card"}[uuid],
        nvmlDeviceGetPowerUsage=lambda card: 512_000,
        nvmlDeviceGetClockInfo=lambda card, which: {1: 1980, 2: 3201}[which],
        nvmlDeviceGetTemperature=lambda card, sensor: 55, **more,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="0-1"))
