"""`--html FILE`: what a command found as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdvsim.common.console import say
from pdvsim.common.files import write_whole
from pdvsim.common.version import __version__
from pdvsim.sim.assembly import covering_profile
from pdvsim.sim.config import Experiment
from pdvsim.study import output
from pdvsim.view.report.sheet import Sheet


def page_file(html: str | None) -> Path | None:
    """The page's file if one is asked for and can be written; an OSError otherwise."""
    return output.check_file(Path(html)) if html else None


def write_page(path: Path | None, sheet: Sheet) -> None:
    """Write the page, if one is asked for, and say so."""
    if path is not None:
        write_whole(path, sheet.html().encode())
        say("pdvsim", f"saved {path}")


def facts_of(base: Experiment) -> dict[str, Any]:
    """Where an answer comes from: program, profile and what that rests on, and all settings."""
    profile = covering_profile(base)
    return {
        "pdvsim": __version__,
        "date": output.now(),
        "gpu": profile.gpu.name,
        "profile": profile.name,
        "foundation": profile.foundation,
        "measured": profile.provenance,
        "settings": output.settings(base),
    }
