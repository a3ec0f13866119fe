"""How smooth the live page is: `python studies/live_page.py`. Four architectures, 100 requests in flight, 10×.

Prints updates per second, the speed that was reached, and the processor time of the session with its page's server and
of one headless browser, which draws without a GPU; and what other programs took meanwhile: what they take is not there
for the rest. Then how much memory a session holds after 10 and 60 simulated minutes.
"""

from __future__ import annotations

import os
import resource
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path

from pdvsim.live.page import Dashboard
from pdvsim.live.server import PageServer
from pdvsim.live.session import Session, Setup
from pdvsim.sim.config import Experiment, Server, Traffic

ARCHS = ("pdv", "colocated", "pd", "autoregressive")
PAIR = "tinyllama-1.1b:llama-2-7b"
SECONDS = 20.0
TICKS = os.sysconf("SC_CLK_TCK")


def spent_s() -> dict[int, tuple[int, float]]:
    """Of every process its parent, and its processor time so far."""
    processes = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "stat").read_text().rpartition(")")[2].split()
            processes[int(folder.name)] = int(words[1]), (int(words[11]) + int(words[12])) / TICKS
    return processes


def below(root: int, of: dict[int, tuple[int, float]]) -> float:
    """Processor time of a process and of all that it started."""
    return of[root][1] + sum(below(pid, of) for pid, (parent, _) in of.items() if parent == root)


def busy_s() -> float:
    """Processor time of the whole machine so far."""
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return sum(int(words[at]) for at in (1, 2, 3, 6, 7)) / TICKS


def costs_s() -> dict[str, float]:
    """Processor time so far, by whose it is."""
    of, me = spent_s(), os.getpid()
    every, own = below(me, of), of[me][1]
    return {"session and server": own, "browser": every - own, "other programs": busy_s() - every}


def watch(url: str, show: Dashboard, figures: dict[str, float]) -> None:
    """A browser for a while, and what it cost."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1500, "height": 1000})
        page.goto(url)
        page.wait_for_function("() => document.getElementById('table')?.innerHTML.includes('TTFT')")
        page.wait_for_timeout(5000)
        strip = "document.querySelector('#strip .body div'), {childList: true}"
        page.evaluate(f"() => {{ window.n = 0; new MutationObserver(() => window.n++).observe({strip}) }}")
        began, costs, at_s = time.monotonic(), costs_s(), show.session.now_s
        inside = []
        for _ in range(int(SECONDS)):
            page.wait_for_timeout(1000)
            inside.append(show.session.stations[0].in_system)
        passed_s, later, went_s = time.monotonic() - began, costs_s(), show.session.now_s - at_s
        figures["updates/s in the browser"] = page.evaluate("() => window.n") / passed_s
        figures["speed"] = went_s / passed_s
        figures["speed for a core"] = went_s / (later["session and server"] - costs["session and server"])
        figures |= {f"cores: {name}": (later[name] - cost_s) / passed_s for name, cost_s in costs.items()}
        figures["in system, mean"] = sum(inside) / len(inside)
        browser.close()


def smooth() -> None:
    """The page, for a while."""
    setup = Setup(ARCHS, Experiment(traffic=Traffic(request_rate=30.0), server=Server(PAIR, 2)))
    show = Dashboard(setup, 10.0, lambda *_: "", "")
    server = PageServer(None, 0, None)
    figures: dict[str, float] = {}

    def watched() -> None:
        try:
            watch(server.url, show, figures)
        finally:
            os.kill(os.getpid(), 2)

    threading.Thread(target=watched, daemon=True).start()
    server.run(show)
    for name, value in figures.items():
        print(f"{name:<28}{value:8.2f}")


def flat() -> None:
    """Memory over an hour of simulated time."""
    session = Session(Setup(("pdv",), Experiment(traffic=Traffic(request_rate=8.0), server=Server(PAIR, 2))))
    for minutes in (10, 60):
        began = time.process_time()
        session.advance(minutes * 60.0)
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"after {minutes} min: at most {held:.0f} MiB, {time.process_time() - began:.0f} s of processor time")


if __name__ == "__main__":
    smooth()
    flat()
