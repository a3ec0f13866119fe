"""The published PD-Verify figures: reading them, and what their acceptance columns say about the requests.

A figure is read for one of three reasons, and the reason is kept: as an *input* (acceptance: which requests there
were), to *calibrate* a constant, or only to be *compared* with. So "used for calibration" is a record, not a claim.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

import numpy as np

from pdvsim.published.program import K

FOLDER = Path(str(files("pdvsim.calibration"))) / "data" / "published"
SOURCE = "figures of the public repository therealnaveenkamal/pdverify"

THREE_WAY_PAIR = "TinyLlama-1.1B->Llama-2-7b"
POISSON_PAIRS = ("TinyLlama-TinyLlama", "TinyLlama-Llama7B", "TinyLlama-CodeLlama34B")

Mix = list[tuple[int, int]]  # tokens and rounds of each request
TableRow = tuple[str, str, int, int]  # pair, arch, concurrency and requests


@dataclass(frozen=True, order=True)
class Key:
    """Key of a published figure."""

    table: str
    pair: str
    arch: str
    concurrency: int
    metric: str


@dataclass(frozen=True)
class Figure:
    """One published figure."""

    key: Key
    requests: int
    value: float
    unit: str


@dataclass(frozen=True)
class Constant:
    """One calibrated constant of the simulation."""

    name: str
    value: float | str
    unit: str
    meaning: str
    cells: tuple[Key, ...]  # the published figures it was calibrated on


class Published:
    """The figures of all tables, with a record of what they were read for."""

    def __init__(self, figures: Iterable[Figure]) -> None:
        self.figures = {figure.key: figure for figure in figures}
        self.calibrated_on: set[Key] = set()
        self.inputs: set[Key] = set()

    def calibrate(self, key: Key) -> float:
        """A figure that a constant is calibrated on."""
        self.calibrated_on.add(key)
        return self.figures[key].value

    def input(self, key: Key) -> float:
        """A figure that says what the workload was."""
        self.inputs.add(key)
        return self.figures[key].value

    def rows(self, table: str) -> list[TableRow]:
        """The rows of a table, in its order."""
        of_table = (f for f in self.figures.values() if f.key.table == table)
        return list(dict.fromkeys((f.key.pair, f.key.arch, f.key.concurrency, f.requests) for f in of_table))

    def acceptance(self, row: tuple[str, str, int], table: str = "three_way") -> dict[str, float]:
        """Mean, median, least and largest acceptance of a row."""
        return {name: self.input(Key(table, *row, f"acceptance_{name}")) for name in ("mean", "median", "min", "max")}


def load_published() -> Published:
    """The published figures included in pdvsim."""
    with (FOLDER / "pdverify_tables.csv").open(newline="", encoding="utf-8") as file:
        return Published(
            Figure(key_of(row), int(row["requests"]), float(row["value"]), row["unit"]) for row in csv.DictReader(file)
        )


def key_of(row: dict[str, str]) -> Key:
    """The key of a figure in a row of a file."""
    return Key(row["table"], row["pair"], row["arch"], int(row["concurrency"]), row["metric"])


@lru_cache
def _ratios(output_tokens: int) -> dict[float, tuple[int, int]]:
    """The acceptance that one request can show, by its tokens and rounds: it ended with at most K - 1 too many."""
    ratios: dict[float, tuple[int, int]] = {}
    for tokens in range(output_tokens, output_tokens + K):
        for rounds in range(math.ceil(tokens / K), output_tokens + 1):
            ratios.setdefault(tokens / (K * rounds), (tokens, rounds))
    return ratios


def tokens_and_rounds(acceptance: float, output_tokens: int) -> tuple[int, int]:
    """The whole numbers of one request's acceptance."""
    ratios = _ratios(output_tokens)
    return ratios[min(ratios, key=lambda ratio: abs(ratio - acceptance))]


def five_requests(acceptance: dict[str, float], output_tokens: int) -> Mix:
    """The five requests of a row, least accepted first: its four statistics leave one solution in whole numbers."""
    known = [tokens_and_rounds(acceptance[name], output_tokens) for name in ("min", "median", "max")]
    least, middle, most = (tokens / (K * rounds) for tokens, rounds in known)
    rest = 5 * acceptance["mean"] - (least + middle + most)
    ratios = _ratios(output_tokens)
    lower = [ratio for ratio in ratios if least - 1e-9 <= ratio <= middle + 1e-9]
    upper = [ratio for ratio in ratios if middle - 1e-9 <= ratio <= most + 1e-9]
    solutions = [(low, high) for low in lower for high in upper if abs(low + high - rest) < 1e-9]
    if len(solutions) != 1:
        raise ValueError(f"acceptance {acceptance} fits {len(solutions)} sets of five requests, not one")
    [(low, high)] = solutions
    return [known[0], ratios[low], known[1], ratios[high], known[2]]


def many_requests(acceptance: dict[str, float], requests: int, output_tokens: int) -> Mix:
    """Requests spread so that their acceptance has the row's least, median, largest and mean value.

    Below and above the median, acceptance goes with one power of the rank, the one that gives the mean.
    """
    low, middle, high, mean = (acceptance[name] for name in ("min", "median", "max", "mean"))
    power = (high - low) / 2 / (mean - (low + middle) / 2) - 1
    ranks = np.linspace(0, 2, requests)
    spread = np.where(
        ranks <= 1, low + (middle - low) * ranks**power, middle + (high - middle) * np.maximum(ranks - 1, 0) ** power
    )
    return [(output_tokens, math.ceil(output_tokens / (K * a) - 1e-9)) for a in spread.tolist()]
