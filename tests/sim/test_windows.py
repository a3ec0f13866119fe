"""Windows of a trace: they divide its requests, keep conversations whole, and are replayed by seed at one rate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdvsim.cli import main
from pdvsim.sim.config import Acceptance, Experiment, Traffic
from pdvsim.sim.relevance import refuse_idle, vet
from pdvsim.sim.workload.datasets import Trace
from pdvsim.sim.workload.requests import make_requests, trace_rate
from pdvsim.sim.workload.windows import BUSY, WINDOW_REQUESTS, cut

DAY_S = 86400.0


def written(folder: Path, header: str, rows: Iterable[Sequence[Any]]) -> str:
    path = folder / "log.csv"
    path.write_text("\n".join([header, *(",".join(map(repr, row)) for row in rows)]) + "\n")
    return str(path)


def daily(count: int = 20_000) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Arrivals over a day, busiest at noon."""
    share = np.cumsum(1 - 0.9 * np.cos(2 * np.pi * np.arange(1440) / 1440))
    spread = np.random.default_rng(0).uniform(0, share[-1], count)
    times: np.ndarray[Any, np.dtype[np.float64]] = np.sort(np.interp(spread, share, np.arange(1440) * 60.0))
    return times


def talks(count: int, each: int = 4, over_s: float = 60.0) -> Trace:
    """Conversations whose turns each repeat all earlier text."""
    rng, rows = np.random.default_rng(1), []
    for session in range(count):
        at_s, cached = rng.uniform(0, over_s), 0
        for turn in range(each):
            new, output = rng.integers(50, 300), rng.integers(50, 200)
            rows.append((at_s, cached + new, output, session, turn))
            cached, at_s = cached + new + output, at_s + rng.uniform(5, 15)
    rows.sort()
    table = np.array(rows)
    whole = table.astype(np.int64)
    return Trace(table[:, 0], whole[:, 1:3], sessions=whole[:, 3], turns=whole[:, 4], timed=True)


def test_windows_divide_the_requests_and_the_busiest_is_first() -> None:
    times = daily()
    trace = Trace(times, np.full((len(times), 2), 10))
    windows = cut(trace, np.arange(len(times)))
    assert sorted(np.concatenate([part.rows for part in windows.parts])) == list(range(len(times)))
    counts = [len(part) for part in windows.parts]
    assert len(counts) > 1
    assert counts == sorted(counts, reverse=True)
    assert counts[0] <= WINDOW_REQUESTS
    part_s = np.ptp(times) / len(counts)
    by_time = sorted(windows.parts, key=lambda part: part.start_s)
    for at, part in enumerate(by_time):  # equal lengths in time
        assert at * part_s <= part.start_s - times[0] <= (at + 1) * part_s + 1e-6
        assert part.span_s <= part_s + 1e-6
    assert all(len(part) >= BUSY * counts[0] for part in windows.busy)
    noon = windows.parts[0]
    assert abs(noon.start_s + noon.span_s / 2 - DAY_S / 2) < DAY_S / 6
    assert noon.request_rate * noon.span_s == pytest.approx(len(noon) - 1)
    short = cut(trace, np.arange(0, len(times), 5))
    assert len(short.parts) == 1
    assert len(short.parts[0]) == len(short.whole) == len(times) // 5


def test_no_window_cuts_a_conversation() -> None:
    """Cuts are much further apart than a conversation is long; a log of long ones is not cut."""
    trace = talks(3000, over_s=20_000.0)
    windows = cut(trace, np.arange(len(trace.lengths)))
    assert len(windows.parts) > 1
    assert sorted(np.concatenate([part.rows for part in windows.parts])) == list(range(12_000))
    homes: dict[int, int] = {}
    for number, part in enumerate(windows.parts):
        assert (np.diff(trace.arrival_s[part.rows]) >= 0).all()
        for row in part.rows.tolist():
            assert homes.setdefault(int(trace.sessions[row]), number) == number
    crowded = talks(3000, over_s=60.0)
    assert len(cut(crowded, np.arange(12_000)).parts) == 1


def test_seeds_replay_different_windows_at_one_rate(tmp_path: Path) -> None:
    times = daily()
    rows = ((time, 100, 1 + at % 9) for at, time in enumerate(times.tolist()))
    path = written(tmp_path, "arrival_s,prompt_tokens,output_tokens", rows)
    traffic = Traffic("custom", path, use_trace_timestamps=True, window="by-seed", request_rate=5.0)
    windows = traffic.windows()
    assert trace_rate(traffic) == windows.parts[0].request_rate
    assert trace_rate(replace(traffic, window="all")) == pytest.approx((len(times) - 1) / np.ptp(times))
    for seed in range(len(windows.busy) + 1):
        mine = replace(traffic, seed=seed)
        window = windows.busy[seed % len(windows.busy)]
        assert mine.num_prompts == len(window)
        requests = make_requests(mine, Acceptance())
        assert [r.output_tokens for r in requests] == [1 + row % 9 for row in window.rows.tolist()]
        assert requests[-1].arrival_s == pytest.approx((len(window) - 1) / 5.0)
        scale = window.request_rate / 5.0
        own = (times[window.rows] - times[window.rows[0]]) * scale
        assert [r.arrival_s for r in requests] == pytest.approx(own.tolist())
    assert replace(traffic, seed=1, num_prompts=70).num_prompts == 70
    assert replace(replace(traffic, num_prompts=70), seed=1).num_prompts == 70
    peak = replace(traffic, window="peak", seed=3)
    assert peak.num_prompts == len(windows.parts[0])
    assert replace(traffic, window="2").num_prompts == len(windows.parts[1])
    with pytest.warns(UserWarning, match=rf"window 1 of {len(windows.parts)} \(the busiest\): .* requests in"):
        vet([Experiment(traffic=peak)])
    with pytest.raises(ValueError, match=rf"--window 99: .*log.csv has {len(windows.parts)} windows"):
        replace(traffic, window="99")
    for wrong in ("0", "busy", "-1", ""):
        with pytest.raises(ValueError, match="--window must be all, peak, by-seed or a number from 1"):
            replace(traffic, window=wrong)


def test_columns_are_as_they_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "in_tok,out_tok,clock,prompt_tokens", [(10, 5, 3.0, 99), (20, 6, 1.0, 99)])
    columns = ("prompt=in_tok", "output=Out-Tok", "time=clock")
    traffic = Traffic(dataset_path=path, columns=columns, use_trace_timestamps=True)
    assert [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in make_requests(traffic, Acceptance())] == [
        (0, 20, 6),
        (2, 10, 5),
    ]
    assert main(["traffic", path, "--columns", ",".join(columns)]) == 0
    replay = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("replay it: pdvsim "))
    assert main([*replay.removeprefix("replay it: pdvsim ").split(), "--json"]) == 0
    for wrong, says in (
        (("prompt=inn",), r"names inn, which is not there \(columns: in_tok, out_tok, clock, prompt_tokens\)"),
        (("in_tok",), "--columns takes prompt=NAME, output=NAME, time=NAME"),
        (("prompt=in_tok", "prompt_tokens=in_tok"), "names prompt_tokens twice"),
    ):
        with pytest.raises(ValueError, match=says):
            Traffic(dataset_path=path, columns=wrong, use_trace_timestamps=True)
    with pytest.raises(ValueError, match="--columns has no effect here: it belongs to --dataset-name custom"):
        refuse_idle([Experiment(traffic=Traffic(columns=columns))])


def test_other_seeds_replay_other_days_of_a_short_log(tmp_path: Path) -> None:
    """Seed 0 is the log itself; others draw its parts: rows keep their gaps, the rate is the same."""
    rng = np.random.default_rng(1)
    gaps_s = np.where(np.arange(400) // 40 % 2, 4.0, 0.5) * rng.exponential(size=400)
    lines = [(float(at), 20 + number, 5) for number, at in enumerate(np.cumsum(gaps_s))]
    path = written(tmp_path, "arrival_s,prompt_tokens,output_tokens", lines)

    def sent(seed: int, window: str = "by-seed") -> tuple[Any, Any]:
        load = Traffic("custom", path, request_rate=10.0, use_trace_timestamps=True, window=window, seed=seed)
        requests = make_requests(load, Acceptance())
        return np.array([r.arrival_s for r in requests]), np.array([r.prompt_tokens - 20 for r in requests])

    _, rows = sent(0)
    assert rows.tolist() == list(range(400))
    assert all((sent(seed, "all")[1] == rows).all() for seed in (1, 2))
    log_s = np.cumsum(gaps_s)
    for seed in (1, 2, 3):
        other_s, others = sent(seed)
        assert len(others) == 400
        assert others.tolist() != rows.tolist()
        assert 400 / other_s[-1] == pytest.approx(10.0, rel=0.1)
        following = np.flatnonzero(np.diff(others) == 1)
        assert len(following) > 350  # of one part
        gaps, own = np.diff(other_s)[following], np.diff(log_s)[others[following]]
        assert gaps == pytest.approx(gaps.sum() / own.sum() * own, abs=1e-4)
    assert (sent(2)[0] == sent(2)[0]).all()
