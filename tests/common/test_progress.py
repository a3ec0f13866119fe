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
    """Where there is no terminal. The last line is the end of the search.

    The time left is in proportion to what was done since the first finished.
    """
    with Progress(1500, "simulations", after_s=0, about=True) as progress:
        for after_s, done in ((2.0, 1), (3.0, 101), (12.0, 201), (13.0, 301), (14.0, 308)):
            clock.now_s = 100.0 + after_s
            progress.update(done)
    assert lines(capsys) == [
        "pdvsim: 1 of about 1500 simulations after 2 s",
        "pdvsim: 201 of about 1500 simulations after 12 s, about 65 s left",
        "pdvsim: 308 simulations in 14 s",
    ]


def test_what_was_too_short_to_show_has_no_end_either(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(10, "runs") as progress:
        clock.now_s += 1.9
        progress.update(10)
    assert lines(capsys) == []


def test_what_failed_did_not_end(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with Progress(10, "runs", after_s=0) as progress:
            progress.update(1)
            clock.now_s += 6
            progress.update(3)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert lines(capsys) == ["pdvsim: 3 of 10 runs after 6 s, about 21 s left"]
