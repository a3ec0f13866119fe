"""The books of foreseen stretches: arrays while a run goes, then the same rows that single rounds leave."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim.device import KIND_CODE
from pdvsim.sim.records import DELIVERY_DTYPES, LAUNCH_DTYPES, Columns, typed

Floats = NDArray[np.floating[Any]]

_NS = 1e9


class Lap(NamedTuple):
    """The settled rounds of a stretch, as they are kept until the records are made."""

    scalars: tuple[float, ...]  # see `_columns`
    context: NDArray[np.int64]
    owes: NDArray[np.bool_]
    draft_start_s: Floats
    draft_end_s: Floats
    verify_start_s: Floats
    verify_end_s: Floats
    draft_solo_s: Floats
    verify_solo_s: Floats
    waited_ns: NDArray[np.int64] | None  # between draft and verify, where they are separate lanes
    delivered_s: Floats
    rows: list[tuple[int, NDArray[np.int64]]]  # request, output positions before and after each delivery


class Ledger:
    """All settled stretches of a run, packed into columns now and then to keep memory small."""

    PACK = 4096

    def __init__(self, requests: int) -> None:
        self._laps: list[Lap] = []
        self.launches: list[Columns] = []
        self.deliveries: list[Columns] = []
        self.spent_ns = {stage: np.zeros(requests, np.int64) for stage in ("draft_ns", "verify_ns", "wait_ns")}

    def append(self, lap: Lap) -> None:
        self._laps.append(lap)
        if len(self._laps) >= self.PACK:
            self.pack()

    def pack(self) -> None:
        """Turn the laps kept so far into columns, and into each request's time by stage."""
        if self._laps:
            launches, deliveries = _columns(self._laps, self.spent_ns)
            self.launches.append(typed(launches, LAUNCH_DTYPES))
            self.deliveries.append(typed(deliveries, DELIVERY_DTYPES))
            self._laps.clear()


def _columns(laps: list[Lap], spent: dict[str, NDArray[np.int64]]) -> tuple[Columns, Columns]:
    rounds = np.array([len(lap.context) for lap in laps])
    context = np.concatenate([lap.context for lap in laps])
    owes = np.concatenate([lap.owes for lap in laps])
    scalars = np.array([lap.scalars for lap in laps])
    replica, gpu, rows, k, draft_lane, draft_depth, verify_lane, verify_depth = (
        np.repeat(scalars[:, i].astype(np.int32), rounds) for i in range(8)
    )

    def prices(first: int) -> dict[str, Floats]:
        """Bytes and flops of each round's work, by the six figures of its shape from column `first` on."""
        line = {name: np.repeat(scalars[:, first + i], rounds) for name, i in (("bytes", 2), ("flops", 4))}
        return {
            name: offset + np.repeat(scalars[:, first + i], rounds) * context
            for (name, offset), i in zip(line.items(), (3, 5), strict=True)
        }

    single, double = prices(8), prices(14)
    drafted = k > 0
    drafts: Columns = {
        "replica": replica, "gpu": gpu, "lane": draft_lane, "rows": rows, "queue_depth": draft_depth, "steps": k,
        "tokens": rows * (owes + k), "kind": np.full(len(k), KIND_CODE["draft"], np.int8),
        "role": np.zeros(len(k), np.int8),
        "start_s": np.concatenate([lap.draft_start_s for lap in laps]),
        "end_s": np.concatenate([lap.draft_end_s for lap in laps]),
        "solo_s": np.concatenate([lap.draft_solo_s for lap in laps]),
        **{name: np.where(owes, double[name], single[name]) for name in single},
    }  # fmt: skip
    verifies: Columns = {
        "replica": replica, "gpu": gpu, "lane": verify_lane, "rows": rows, "queue_depth": verify_depth,
        "steps": np.ones(len(k), np.int8), "tokens": rows * (k + 1), "role": np.ones(len(k), np.int8),
        "kind": np.where(drafted, KIND_CODE["verify"], KIND_CODE["decode"]),
        "start_s": np.concatenate([lap.verify_start_s for lap in laps]),
        "end_s": np.concatenate([lap.verify_end_s for lap in laps]),
        "solo_s": np.concatenate([lap.verify_solo_s for lap in laps]),
        **prices(20),
    }  # fmt: skip

    members = np.array([len(lap.rows) for lap in laps])
    kept = [row for lap in laps for row in lap.rows]
    ids = np.array([request for request, _ in kept])
    first_round = np.cumsum(rounds) - rounds

    def book(stage: str, spent_ns: NDArray[np.int64]) -> None:
        np.add.at(spent[stage], ids, np.repeat(np.add.reduceat(spent_ns, first_round), members))

    book("draft_ns", np.where(drafted, _whole_ns(drafts["start_s"], drafts["end_s"]), 0))
    book("verify_ns", _whole_ns(verifies["start_s"], verifies["end_s"]))
    if any(lap.waited_ns is not None for lap in laps):
        none = np.zeros(int(rounds.max()), np.int64)
        waits = [none[: len(lap.context)] if lap.waited_ns is None else lap.waited_ns for lap in laps]
        book("wait_ns", np.concatenate(waits))
    launches = {name: np.concatenate([column[drafted], verifies[name]]) for name, column in drafts.items()}

    counts = np.repeat([len(lap.delivered_s) for lap in laps], members)
    steps = np.diff(np.concatenate([positions for _, positions in kept]))
    inside = np.ones(len(steps), bool)
    inside[(np.cumsum(counts + 1) - 1)[:-1]] = False  # from one request's last position to the next one's first
    deliveries = {
        "request": np.repeat(ids, counts),
        "tokens": steps[inside],
        "time_s": np.concatenate([lap.delivered_s for lap in laps for _ in lap.rows]),
    }
    return launches, deliveries


def _whole_ns(start_s: Floats, end_s: Floats) -> NDArray[np.int64]:
    return ((end_s - start_s) * _NS).astype(np.int64)
