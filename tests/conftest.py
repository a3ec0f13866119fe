"""Property tests draw the same examples on every machine: a failure is one to look into, never a matter of luck."""

from __future__ import annotations

import gc
import os
import pickle
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

from pdvsim.bench import pool

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# One thread a process: on matrices this small more of them only spin, for several times the processor's time. It must
# be set before numpy and torch are imported, and holds for every process that a test starts.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
# Bytecode is kept, whatever the environment says: tests start many processes, whose imports it makes twice as fast.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ["COLUMNS"] = "160"  # tables fit the terminal: whose, decides nothing

# Tests run side by side, so each has one core: a command starts workers where a test asks for them. This, too, must be
# defined first: other modules import the function.
pool.cores = lambda: 1

os.environ["PDVSIM_CACHE"] = ""  # a decision that a test asks for is made, not remembered

settings.register_profile(  # how fast the machine is decides nothing; `make soak` draws examples of its own
    "pdvsim",
    derandomize="PDVSIM_SOAK" not in os.environ,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("pdvsim")


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell without job control starts what is in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


SLOW = (
    "test_validate.py", "test_calibrate.py", "test_notebooks.py", "test_docs.py", "test_hold.py", "test_draft_table.py",
    "test_studies.py", "test_pdverify.py", "test_backends.py", "test_sweepdir.py", "test_site.py", "test_ship.py",
    "test_sdist.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slowest files first, so that no worker waits long for another at the end."""
    items.sort(key=lambda item: item.path.name not in SLOW)


@pytest.fixture(scope="module", autouse=True)
def earlier_objects_are_left_alone() -> None:
    """What is there before a file's tests stays: a garbage collection, of which a real run makes two, passes it by."""
    gc.collect()
    gc.freeze()


def _draw_nothing(patch: pytest.MonkeyPatch) -> None:
    end = b"IEND\xaeB`\x82"
    patch.setattr("pdvsim.view.plots.sweep_png", lambda points, base: end)
    patch.setattr("matplotlib.figure.Figure.savefig", lambda figure, buffer, **_: buffer.write(end))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The concurrency of every run of a sweep or a decision."""
    from pdvsim.bench import run

    loads, usual = list[int | None](), run.simulate

    def counted(experiment: Any) -> Any:
        loads.append(experiment.traffic.max_concurrency)
        return usual(experiment)

    monkeypatch.setattr(run, "simulate", counted)
    return loads


@pytest.fixture
def quick_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every picture is tested elsewhere, and takes longer than the small runs of these tests: only its file is made."""
    _draw_nothing(monkeypatch)


@pytest.fixture(scope="module")
def quick_plots_in_module() -> Iterator[None]:
    """The same for a whole file, its fixtures included."""
    with pytest.MonkeyPatch.context() as patch:
        _draw_nothing(patch)
        yield


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[[Sequence[str]], str]:
    """Run a command, of `realrun` if it is named, that has to be refused.

    Exit code 2, nothing printed but one line, which is returned.
    """

    def run(argv: Sequence[str]) -> str:
        from pdvsim.cli import main
        from pdvsim.cli.realrun import main as realrun

        program = "realrun" if argv[0] == "realrun" else "pdvsim"
        capsys.readouterr()
        assert (realrun([*argv[1:]]) if program == "realrun" else main([*argv])) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith(f"{program}: error: ")
        assert captured.err.count("\n") == 1
        return captured.err

    return run


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Callable[[str, Callable[[], Any]], Any]:
    """What takes a minute: the first process of a session that asks for a name makes it, the others read its file."""
    folder = tmp_path_factory.getbasetemp() if worker_id == "master" else tmp_path_factory.getbasetemp().parent

    def made(name: str, make: Callable[[], Any]) -> Any:
        path = folder / f"{name}.pickle"
        with FileLock(f"{path}.lock", timeout=500):
            if not path.exists():
                path.write_bytes(pickle.dumps(make()))
            return pickle.loads(path.read_bytes())

    return made


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Headless Chromium; where there is none the tests are skipped, but fail under CI."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        says = "no Chromium here, so nothing was tested in a browser: apt-get install chromium"
        pytest.fail(says) if os.environ.get("CI") else pytest.skip(says)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"], timeout=600_000)
        yield chromium
        chromium.close()


@pytest.fixture(autouse=True)
def ctrl_c_is_left_alone() -> Iterator[None]:
    """A test, or a library it uses, leaves Ctrl-C to the next test as it was."""

    def state() -> tuple[object, bool]:
        return signal.getsignal(signal.SIGINT), signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())

    before = state()
    yield
    assert state() == before
