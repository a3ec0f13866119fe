"""GPUs as specifications: what a card can do at most, with the source of every figure. A user adds one in TOML.

Rates are dense bf16 with fp32 sums and the data sheet's bandwidth, except where `measured` says otherwise; memory is
what the driver reports, which is less than the number on the box where error correction takes its part (for H100, A100,
L40S, L4 and A10 as listed in github.com/modal-labs/modal-client, pull request 2797).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdvsim.sim.core import GpuSpec, ModelSpec
from pdvsim.sim.hardware.names import card_name, unknown
from pdvsim.sim.limits import MIB, Range
from pdvsim.sim.reading import printable, quoted, read_toml, said


def _sheet(name: str, gb_per_s: float, tflops: float, memory_mib: int, sms: int, source: str) -> GpuSpec:
    return GpuSpec(name, gb_per_s * 1e9, tflops * 1e12, memory_mib * MIB, source, measured=False, sms=sms)


_A100 = "data sheet, NVIDIA A100 Tensor Core GPU (2021)"
_H100 = "data sheet, NVIDIA H100 Tensor Core GPU (2023), without sparsity"
_A10G = "data sheet, NVIDIA A10G for AWS (2022), as quoted by others, without sparsity"
_H100_PCIE = "product brief, NVIDIA H100 PCIe GPU (PB-11133-001, 2022); data sheet for the arithmetic, without sparsity"

GPUS: dict[str, GpuSpec] = {
    card.name: card
    for card in (
        GpuSpec(
            "h200",
            bandwidth_bytes_per_s=4.27e12,
            flops_per_s=790e12,
            memory_bytes=143771 * MIB,
            source="measured on one H200 SXM: device-to-device copy and 8192^3 bf16 matrix product on random data",
            measured=True,
            sms=132,
        ),
        #      name            GB/s  TFLOP/s   MiB  SMs
        _sheet("a100-40gb", 1555, 312, 40960, 108, _A100),
        _sheet("a100-40gb-pcie", 1555, 312, 40960, 108, _A100),
        _sheet("a100-80gb", 2039, 312, 81920, 108, _A100),
        _sheet("a100-80gb-pcie", 1935, 312, 81920, 108, _A100),
        _sheet("h100-sxm", 3350, 989.4, 81559, 132, _H100),
        _sheet("h100-pcie", 2000, 756.5, 81559, 114, _H100_PCIE),
        _sheet("h100-nvl", 3938, 835.5, 95830, 132, _H100),
        _sheet("l40s", 864, 362, 46068, 142, "data sheet, NVIDIA L40S (2023), without sparsity"),
        _sheet("l4", 300, 121, 23034, 58, "data sheet, NVIDIA L4 (2023), half of that with sparsity"),
        _sheet("a10g", 600, 70, 23028, 80, _A10G),
        _sheet("rtx-4090", 1008, 165.2, 24564, 128, "NVIDIA Ada GPU architecture white paper (2023), fp32 sums"),
        _sheet("b200", 8000, 2250, 183359, 148, "data sheet, NVIDIA HGX B200 (2025), without sparsity"),
    )
}

NO_FP8 = ("a100", "a10g")  # how the names of cards begin that multiply 8-bit floats no faster than 16-bit ones
NO_NVLINK = ("l40s", "l4", "a10g", "rtx-4090")  # cards whose data sheets have none

_REQUIRED = {"name": str, "bandwidth_bytes_per_s": float, "flops_per_s": float, "memory_bytes": float, "source": str}
_OPTIONAL = {"sms": int, "measured": bool}
LONGEST_TEXT = 1000
CARD_RANGES = {  # one unit off by a thousand falls outside
    "bandwidth_bytes_per_s": Range(1e9, 1e14),
    "flops_per_s": Range(1e12, 1e17),
    "memory_bytes": Range(1e9, 4e12),
    "sms": Range(1, 1024),
}


def flops_of(spec: ModelSpec, card: GpuSpec) -> float:
    """Flops per second of a model's layers: twice as many of 8-bit weights, on a card that has such units."""
    return card.flops_per_s * (2 if spec.layer_bytes == 1 and not card.name.startswith(NO_FP8) else 1)


def gpu(name: str) -> GpuSpec:
    """The card that `name` means, or the one in a TOML file; a ValueError naming the known ones otherwise."""
    if name.endswith(".toml"):
        return card_file(name)
    taken = card_name(name, GPUS)
    if taken not in GPUS:
        raise unknown("gpu", name, GPUS, "a card.toml of your own")
    return GPUS[taken]


def card_file(path: str | Path) -> GpuSpec:
    """The card in a TOML file; a ValueError of one line naming the file and field if it is not one."""
    try:
        data = read_toml(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"card {path}: {said(error)}") from None
    known: Mapping[str, type] = {**_REQUIRED, **_OPTIONAL}
    for key in data:
        if key not in known:
            raise ValueError(f"card {path}: {printable(key)}: unknown key; known: {', '.join(known)}")
    for key in _REQUIRED:
        if key not in data:
            raise ValueError(f"card {path}: {key}: is missing; a card needs {', '.join(_REQUIRED)}")
    for key, value in data.items():
        _check(path, key, value, known[key])
    if data["name"] in GPUS:
        raise ValueError(f"card {path}: name: {data['name']} is a built-in card; choose another name")
    numbers = {key: float(data[key]) for key, kind in _REQUIRED.items() if kind is float}
    return GpuSpec(
        name=data["name"], source=data["source"], measured=data.get("measured", False), sms=data.get("sms"), **numbers
    )


def _check(path: str | Path, key: str, value: Any, kind: type) -> None:
    if kind is str:
        good = isinstance(value, str) and bool(value.strip()) and value.isprintable() and len(value) <= LONGEST_TEXT
    elif kind is bool:
        good = isinstance(value, bool)
    else:
        good = not isinstance(value, bool) and isinstance(value, int if kind is int else (int, float))
    words = {
        str: f"a text of one line, at most {LONGEST_TEXT} characters",
        bool: "true or false",
        int: "a whole number",
        float: "a number",
    }
    if not good:
        raise ValueError(f"card {path}: {key}: must be {words[kind]}, got {quoted(value)}")
    if key in CARD_RANGES and not CARD_RANGES[key].holds(value):
        raise ValueError(f"card {path}: {key}: must be {CARD_RANGES[key]}, got {quoted(value)}")
