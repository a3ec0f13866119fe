"""Presets: named settings for options that are not given."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

PresetName = Literal["pd-verify"]

PRESETS: dict[PresetName, dict[str, Any]] = {
    "pd-verify": {  # as in its published comparison of baseline, pd and pdv (calibration/data/published)
        "pair": "tinyllama-1.1b:llama-2-7b",
        "num_speculative_tokens": 4,
        "dataset_name": "random",
        "input_len": 9,
        "output_len": 100,
    }
}
LENGTHS = ("input_len", "output_len", "dataset_name")
OTHER_LENGTHS = ("dataset_name", "dataset_path")  # options that replace all of these


@dataclass(frozen=True, kw_only=True)
class PresetOption:
    """Settings to start from."""

    preset: PresetName | None = None
    """Settings of options that are not given: those of PD-Verify."""


def preset_settings(name: PresetName, given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The settings of a preset that a command has and that nothing given replaces."""
    replaced = {*given, *(LENGTHS if any(option in given for option in OTHER_LENGTHS) else ())}
    return {option: value for option, value in PRESETS[name].items() if option in known and option not in replaced}
