"""The source distribution holds every file of the repository and the links, and its tests pass where it is unpacked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import pdvsim

ROOT = Path(__file__).parents[1]
MADE = {"PKG-INFO", "setup.cfg"}  # by setuptools, as is pdvsim.egg-info
BUILD = "import setuptools.build_meta as backend; backend.build_sdist('dist')"
ITS_TESTS = ["tests/sim/test_terms.py"]  # which read data of the package and of their own

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git says which files there are")


@pytest.fixture(scope="module")
def tracked() -> set[str]:
    """The files of the repository that are there; others, such as results, may lie among them."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    return {name for name in names if name and os.path.lexists(ROOT / name)}


@pytest.fixture(scope="module")
def unpacked(tracked: set[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The distribution, made from a copy (setuptools leaves build files) and unpacked."""
    copy, target = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("unpacked")
    for name in tracked:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    subprocess.run([sys.executable, "-c", BUILD], cwd=copy, check=True, capture_output=True)
    (archive,) = (copy / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(target, filter="data")
    return target / f"pdvsim-{pdvsim.__version__}"


def test_it_holds_the_repository(tracked: set[str], unpacked: Path) -> None:
    walked = ((folder, names) for folder, folders, files in os.walk(unpacked) for names in (folders, files))
    paths = (Path(folder, name) for folder, names in walked for name in names)
    packed = {path.relative_to(unpacked).as_posix() for path in paths if path.is_symlink() or path.is_file()}
    assert {name for name in packed - MADE if not name.startswith("pdvsim.egg-info/")} == tracked


def test_links_stay_links(tracked: set[str], unpacked: Path) -> None:
    links = sorted(name for name in tracked if (ROOT / name).is_symlink())
    assert links
    assert [os.readlink(unpacked / name) for name in links] == [os.readlink(ROOT / name) for name in links]


def test_its_tests_pass(unpacked: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(unpacked)}  # before the installed one
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *ITS_TESTS]
    done = subprocess.run(command, cwd=unpacked, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
