"""The published PD-Verify figures: reading them, and what their acceptance columns say about the requests.

A figure is read for one of three reasons, and the reason is kept: as an *input* (acceptance: which requests there
were), to *calibrate* a constant, or only to be *compared* with. So "used for calibration" is a record, not a claim.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np

from pdvsim.published.program import K, Score

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


class CalibratedModel:
    """The programs of a table, with constants that are calibrated on published figures."""

    def __init__(self, published: Published) -> None:
        self.published = published
        self.constants: list[Constant] = []

    def constant(self, name: str, value: float, meaning: str, *cells: Key) -> float:
        """Record a constant in seconds, calibrated on these figures; returns its value."""
        self.constants.append(Constant(name, value, "s", meaning, cells))
        return value

    def scores(self, row: TableRow, runs: int, seed: int) -> list[Score]:
        """A row as published, once per replication or order of its requests."""
        raise NotImplementedError


def load_published() -> Published:
    """The published figures included in pdvsim."""
    with (FOLDER / "pdverify_tables.csv").open(newline="", encoding="utf-8") as file:
        return Published(
            Figure(key_of(row), int(row["requests"]), float(row["value"]), row["unit"]) for row in csv.DictReader(file)
        )


def key_of(row: dict[str, str]) -> Key:
    """The key of a figure in a row of a file."""
    return Key(row["table"], row["pair"], row["arch"], int(row["concurrency"]), row["metric"])


def tokens_and_rounds(acceptance: float, output_tokens: int) -> tuple[int, int]:
    """The whole numbers of one request's acceptance: it ended with at most K - 1 tokens too many."""
    choices = (
        (tokens, rounds)
        for tokens in range(output_tokens, output_tokens + K)
        for rounds in range(math.ceil(tokens / K), output_tokens + 1)
    )
    return min(choices, key=lambda choice: abs(choice[0] / (K * choice[1]) - acceptance))


def five_requests(acceptance: dict[str, float], output_tokens: int) -> Mix:
    """The five requests of a row, least accepted first: its four statistics leave one solution in whole numbers."""
    least, middle, most = (tokens_and_rounds(acceptance[name], output_tokens) for name in ("min", "median", "max"))
    known = [tokens / (K * rounds) for tokens, rounds in (least, middle, most)]
    rest = 5 * acceptance["mean"] - sum(known)
    solutions = set()
    for tokens in range(output_tokens, output_tokens + K):
        for rounds in range(math.ceil(tokens / K), output_tokens + 1):
            low = tokens / (K * rounds)
            high = rest - low
            if known[0] - 1e-9 <= low <= known[1] + 1e-9 and known[1] - 1e-9 <= high <= known[2] + 1e-9:
                other = tokens_and_rounds(high, output_tokens)
                if abs(other[0] / (K * other[1]) - high) < 1e-9:
                    solutions.add(((tokens, rounds), other))
    if len(solutions) != 1:
        raise ValueError(f"acceptance {acceptance} fits {len(solutions)} sets of five requests, not one")
    low_one, high_one = solutions.pop()
    return [least, low_one, middle, high_one, most]


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
