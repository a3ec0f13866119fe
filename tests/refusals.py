"""Errors of bad input: one line that names what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


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
