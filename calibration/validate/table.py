"""The table of errors that every validation makes of its joined rows: by kind of label and label, both signs kept."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pdvsim.bench.join import Joined, Labelled, grouped, middle


def cell(rows: Sequence[Joined[Any]], *metrics: str) -> dict[str, float]:
    """The errors of rows in these metrics, or in all: of how many rows, their sizes, and what holds 90% of them."""
    known = [[error for name, error in one.errors.items() if not metrics or name in metrics] for one in rows]
    errors = [error for each in known for error in each]
    low, signed, high = np.quantile(errors or [math.nan], (0.05, 0.5, 0.95)).tolist()
    return {"rows": sum(map(bool, known)), **middle(errors), "signed": signed, "low": low, "high": high}


def error_table(
    rows: Sequence[Labelled], labels: Mapping[str, Callable[[Labelled], str]], cells: Callable[[list[Labelled]], Any]
) -> dict[str, dict[str, Any]]:
    """By kind of label and by label, in the order of their numbers, what `cells` makes of the rows."""

    def place(label: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", label)]

    groups = {kind: grouped(rows, label) for kind, label in labels.items()}
    return {kind: {part: cells(of[part]) for part in sorted(of, key=place)} for kind, of in groups.items()}
