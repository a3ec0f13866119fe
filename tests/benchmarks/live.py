"""How smooth the live page is: `python tests/benchmarks/live.py`. Four architectures, 100 requests in flight, 10×.

Prints pictures a second, the speed that was reached, and the processor time of the simulating process and of the page's
server with one headless browser; then how much memory a session holds after 10 and after 60 simulated minutes.
"""

from __future__ import annotations

import os
import resource
import shutil
import threading
import time
from pathlib import Path

from bokeh.document import Document

from pdvsim.live.knobs import Setup
from pdvsim.live.pace import Feed, drive
from pdvsim.live.page import Dashboard
from pdvsim.live.server import PageServer
from pdvsim.live.session import Session
from pdvsim.sim.config import Experiment, Server, Traffic

ARCHS = ("pdv", "colocated", "pd", "autoregressive")
SECONDS = 20.0


class Unsaved:
    """Nobody saves here."""

    def said(self) -> str | None:
        return "not saved"


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def watch(url: str, feed: Feed, found: dict[str, float]) -> None:
    """A browser for a while, and what it cost."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1500, "height": 1000})
        page.goto(url)
        page.wait_for_function("() => window.Bokeh?.documents[0]?.get_model_by_name('table')?.text?.includes('TTFT')")
        page.wait_for_timeout(5000)
        changed = "Bokeh.documents[0].get_model_by_name('table').properties.text.change.connect(() => window.n++)"
        page.evaluate(f"() => {{ window.n = 0; {changed} }}")
        child = feed._process.pid
        assert child is not None
        assert feed.latest is not None
        began, server, sim, at_s, pictures = (
            time.monotonic(),
            cpu_s(os.getpid()),
            cpu_s(child),
            feed.latest.now_s,
            feed.pictures,
        )
        page.wait_for_timeout(SECONDS * 1000)
        passed = time.monotonic() - began
        found["updates/s in the browser"] = page.evaluate("() => window.n") / passed
        found["pictures/s"] = (feed.pictures - pictures) / passed
        found["speed"] = (feed.latest.now_s - at_s) / passed
        found["cores of the page's server"] = (cpu_s(os.getpid()) - server) / passed
        found["cores of the simulation"] = (cpu_s(child) - sim) / passed
        found["in system"] = feed.latest.figures[0]["in_system"]
        browser.close()


def smooth() -> None:
    """The page, for a while."""
    setup = Setup(ARCHS, Experiment(traffic=Traffic(request_rate=32.0), server=Server(num_speculative_tokens=2)))
    feed = Feed(drive, setup, 10.0, 30.0)

    def made(document: Document) -> None:
        Dashboard(document, feed, ARCHS, ARCHS, setup, lambda shown: Unsaved())

    server = PageServer(made, None, 0, None)
    found: dict[str, float] = {}

    def watched() -> None:
        try:
            watch(server.url, feed, found)
        finally:
            os.kill(os.getpid(), 2)

    threading.Thread(target=watched, daemon=True).start()
    server.run()
    feed.close()
    for name, value in found.items():
        print(f"{name:<28}{value:8.2f}")


def flat() -> None:
    """Memory over an hour of simulated time."""
    session = Session(
        Setup(("pdv",), Experiment(traffic=Traffic(request_rate=8.0), server=Server(num_speculative_tokens=2)))
    )
    for minutes in (10, 60):
        began = time.process_time()
        session.advance(minutes * 60.0)
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"after {minutes} min: at most {held:.0f} MiB, {time.process_time() - began:.0f} s of processor time")


if __name__ == "__main__":
    smooth()
    flat()
