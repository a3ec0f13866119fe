"""`pdvsim profile`: measure models on this machine's GPU."""

from __future__ import annotations

from functools import partial

from pdvsim.args import ProfileCommand, parse
from pdvsim.console import say


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    args = parse(ProfileCommand, argv, "pdvsim profile")

    from pdvsim.profiler.command import profile

    return profile(args, argv, partial(say, "pdvsim"))
