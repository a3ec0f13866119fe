"""Errors of bad input: one line that names what is wrong; and another value of any option."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pdvsim.common.options import Option
from pdvsim.sim.limits import Range


def check_line(error: Exception, *parts: object) -> None:
    """Check that an error is one line that contains each of `parts`."""
    text = str(error)
    assert text
    assert "\n" not in text
    for part in parts:
        assert str(part) in text, text


@contextmanager
def one_line(*parts: object) -> Iterator[None]:
    """A ValueError is raised inside: one line that contains each of `parts`."""
    with pytest.raises(ValueError, match=r".") as refusal:
        yield
    check_line(refusal.value, *parts)


def another(option: Option) -> Any:
    """A value of an option that is not its default."""
    others: tuple[Any, ...] = (True, False) if option.one is bool else option.values
    for span in (mark for mark in option.marks if isinstance(mark, Range)):
        further = min(span.low + 1, span.high)
        others = (further, span.low) if option.one is int else (span.low, further)
    other = next(one for one in (*others, "x") if one != option.default)
    return (other,) if option.is_list else other
