"""Progress says how far a search is, and at its end how much it took."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pdvsim.common.progress import Progress


class Clock:
    """Stands where it is put."""

    now_s = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    hands = Clock()
    monkeypatch.setattr("pdvsim.common.progress.time", SimpleNamespace(monotonic=lambda: hands.now_s))
    return hands


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_lines_begin_after_two_seconds_and_come_every_ten(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """Where there is no terminal. The time left is in proportion; the last line is the end of the search."""
    with Progress(1500, "simulations", after_s=0, about=True) as progress:
        for after_s, done in ((1.9, 40), (3.0, 100), (12.9, 150), (13.0, 200), (14.0, 208)):
            clock.now_s = 100.0 + after_s
            progress.update(done)
    assert lines(capsys) == [
        "pdvsim: 100 of about 1500 simulations after 3 s, about 42 s left",
        "pdvsim: 200 of about 1500 simulations after 13 s, about 84 s left",
        "pdvsim: 208 simulations in 14 s",
    ]


def test_what_was_too_short_to_show_has_no_end_either(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(10, "runs") as progress:
        clock.now_s += 1.9
        progress.update(10)
    assert lines(capsys) == []


def test_what_failed_did_not_end(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with Progress(10, "runs", after_s=0) as progress:
            clock.now_s += 6
            progress.update(3)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert lines(capsys) == ["pdvsim: 3 of 10 runs after 6 s, about 14 s left"]
