"""The books of rounds that were run ahead: noted as cheaply as can be, turned into records in bulk.

A round is one tuple, a delivery one number; what follows from them (bytes, flops, each request's time by stage) is
worked out for thousands of rounds at once, with the arithmetic of `SimulatedGPU.note`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim.latency import Shape
from pdvsim.sim.records import DELIVERY_DTYPES, WRITTEN_DTYPES, Columns

Round = tuple[
    float, float, float, float, float, int, bool
]  # draft start, end; verify start, end; delivered; context; owed

_NS = 1e9


class Lap(NamedTuple):
    """What the rounds of one batch have in common. `rows` begin a launch record, up to its context."""

    ids: list[int]
    launched: int  # rounds noted
    settled: int  # of these, rounds whose tokens were delivered
    k: int
    wait: tuple[float, float] | None  # completion and hand-over between draft and verify, where these are two lanes
    rows: tuple[tuple[int, int, int, int, int], ...]  # draft, draft that catches up, verify
    shapes: tuple[Shape, ...]  # likewise


class Ledger:
    """Notes of all batches of a run, packed into columns now and then to keep memory small."""

    PACK = 1 << 16

    def __init__(self, requests: int = 0) -> None:
        self.rounds: list[Round] = []
        self.gains: list[int] = []  # of each row of each settled round
        self._laps: list[Lap] = []
        self.launches: list[Columns] = []
        self.deliveries: list[Columns] = []
        self.spent_ns = {stage: np.zeros(requests, np.int64) for stage in ("draft_ns", "verify_ns", "wait_ns")}

    def close(self, lap: Lap) -> None:
        """The rounds and gains noted since the last call were this batch's."""
        self._laps.append(lap)
        if len(self.rounds) >= self.PACK:
            self.pack()

    def pack(self) -> None:
        """Turn what is noted into columns, and into each request's time by stage."""
        if not self._laps:
            return
        laps, self._laps = self._laps, []
        grid = np.array(self.rounds)
        counts = np.array([lap.launched for lap in laps])
        of = np.repeat(np.arange(len(laps)), counts)
        settled = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts) < np.repeat(
            [lap.settled for lap in laps], counts
        )
        start, drafted, checked, finish, delivered, context, owed = grid.T
        drafts = np.repeat([lap.k > 0 for lap in laps], counts)
        self._launches(laps, of, np.where(owed > 0, 1, 0), start, drafted, context, drafts)
        self._launches(laps, of, np.full(len(of), 2), checked, finish, context, np.ones(len(of), bool))
        self._spend("draft_ns", laps, counts, np.where(drafts, _whole(start, drafted), 0))
        self._spend("verify_ns", laps, counts, _whole(checked, finish))
        if any(lap.wait for lap in laps):
            completion, handoff = np.repeat([lap.wait or (0.0, 0.0) for lap in laps], counts, axis=0).T
            done = drafted + completion
            self._spend("wait_ns", laps, counts, _whole(done, done + handoff))
        sizes = np.repeat([len(lap.ids) for lap in laps], counts)[settled]
        deliveries = {
            "request": np.array([i for lap in laps for i in lap.ids * lap.settled], DELIVERY_DTYPES["request"]),
            "tokens": np.array(self.gains, DELIVERY_DTYPES["tokens"]),
            "time_s": np.repeat(delivered[settled], sizes),
        }
        self.deliveries.append(deliveries)
        self.rounds.clear()
        self.gains.clear()

    def _launches(
        self,
        laps: list[Lap],
        of: NDArray[np.int64],
        which: NDArray[np.int64],
        start: NDArray[np.float64],
        end: NDArray[np.float64],
        context: NDArray[np.float64],
        mask: NDArray[np.bool_],
    ) -> None:
        at = (of * 3 + which)[mask]
        rows = np.array([row for lap in laps for row in lap.rows])[at]
        s0, s1, b0, b1, f0, f1 = np.array([shape for lap in laps for shape in lap.shapes])[at].T
        start, end, context = start[mask], end[mask], context[mask]
        prices = (s0 + s1 * context, b0 + b1 * context, f0 + f1 * context)
        columns = zip(WRITTEN_DTYPES.items(), (*rows.T, context, start, end, *prices), strict=True)
        self.launches.append({name: column.astype(dtype) for (name, dtype), column in columns})

    def _spend(self, stage: str, laps: list[Lap], counts: NDArray[np.int64], spent: NDArray[np.int64]) -> None:
        total = np.add.reduceat(spent, np.cumsum(counts) - counts)
        ids = np.array([i for lap in laps for i in lap.ids])
        self._book(stage, ids, np.repeat(total, [len(lap.ids) for lap in laps]))

    def _book(self, stage: str, ids: NDArray[np.int64], spent: NDArray[np.int64]) -> None:
        np.add.at(self.spent_ns[stage], ids, spent)


class SumLedger(Ledger):
    """The same where requests are not kept: only the time that all of them spent, those of a warm-up apart."""

    def __init__(self, warmup: int) -> None:
        super().__init__()
        self.warmup = warmup
        self.total_ns = dict.fromkeys(self.spent_ns, 0)

    def _book(self, stage: str, ids: NDArray[np.int64], spent: NDArray[np.int64]) -> None:
        self.total_ns[stage] += int(spent[ids >= self.warmup].sum())


def _whole(start_s: NDArray[np.float64], end_s: NDArray[np.float64]) -> NDArray[np.int64]:
    return ((end_s - start_s) * _NS).astype(np.int64)
