"""The predictions of all real runs take a minute: one process makes them, and the others of a session read its file."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from filelock import FileLock

from pdvsim.calibration.validate.compare import Validation, validate
from pdvsim.calibration.validate.served import SHIPPED, read_runs

DATA = Path(__file__).parents[2] / "calibration" / "data" / "h200"


@pytest.fixture(scope="session")
def everything(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Validation:
    """The shipped runs, each predicted for any machine and for its own."""
    folder = tmp_path_factory.getbasetemp()
    path = (folder if worker_id == "master" else folder.parent) / "predictions.pickle"
    with FileLock(f"{path}.lock", timeout=500):
        if not path.exists():
            runs = [run for name in SHIPPED for run in read_runs(DATA / name)]
            path.write_bytes(pickle.dumps(validate(runs, jobs=1)))
        validation: Validation = pickle.loads(path.read_bytes())
    return validation
