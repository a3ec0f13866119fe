"""The documentation site: it builds without a warning, and a reader finds every command, name, metric and column."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import notebookfiles
import pytest

import pdvsim
from pdvsim.cli import COMMANDS

ROOT = Path(__file__).parents[1]


class Page(HTMLParser):
    """The targets of a page's links, its pictures, and the places that a link can lead to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        where = given.get("href") or given.get("src")
        if where and tag in ("a", "img"):
            self.links.append(where)
        if given.get("id"):
            self.ids.add(str(given["id"]))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it, from nothing."""
    target = tmp_path_factory.mktemp("site") / "html"  # what myst-nb makes of the notebooks is next to it
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-E", "-c", "docs", ".", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def test_every_link_leads_somewhere(pages: dict[Path, Page]) -> None:
    assert len(pages) > 20
    lost = []
    for path, page in pages.items():
        for link in page.links:
            where, place = urldefrag(link)
            if where.startswith(("http:", "https:", "data:")):
                continue
            target = (path.parent / unquote(where)).resolve() if where else path
            if not target.exists() or (place and place not in pages[target].ids):
                lost.append(f"{path.name}: {link}")
    assert not lost


@pytest.mark.parametrize("notebook", notebookfiles.paths(), ids=lambda path: path.stem)
def test_a_notebook_is_a_page_with_its_pictures(notebook: Path, pages: dict[Path, Page], site: Path) -> None:
    assert any(".png" in link for link in pages[site / "notebooks" / f"{notebook.stem}.html"].links)


def test_the_reference_is_whole(pages: dict[Path, Page], site: Path) -> None:
    assert {*COMMANDS, "realrun"} <= pages[site / "docs" / "commands.html"].ids
    assert {f"pdvsim.{name}" for name in pdvsim.__all__ if name[0] != "_"} <= pages[site / "docs" / "commands.html"].ids


def code_in(page: str) -> set[str]:
    """What a page sets as code within its text."""
    return set(re.findall(r"`([^`\n]+)`", (ROOT / "docs" / page).read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def run() -> pdvsim.Run:
    return pdvsim.run(arch="pdv", request_rate=8, num_prompts=6, goodput=["ttft:500"])


def test_every_metric_is_defined(run: pdvsim.Run) -> None:
    defined = code_in("metrics.md")
    assert {"NAME_error", "NAME_se"} <= defined
    for full, value in run.metrics.items():
        name = full.removesuffix("_error").removesuffix("_se")
        latency = re.fullmatch(r"(mean|std|median|p99)_(ttft|tpot|itl|e2el)_ms", name)
        assert {name} <= defined or (latency and {f"{latency[1]}_NAME_ms", latency[2]} <= defined), name
        if name in ("lanes", "kinds"):
            assert set(next(iter(value.values()))) <= defined
        elif name == "breakdown_ms":
            assert set(value) <= defined


def test_every_column_is_defined(run: pdvsim.Run) -> None:
    defined = code_in("files.md")
    for frame in (run.requests, run.launches, run.deliveries):
        assert set(frame.columns) <= defined
