"""A policy file is a program: what names one in a file of data, or of flags, does not run it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from resultdirs import asked, edited_sweep

from pdvsim.cli import main
from pdvsim.common.files import sealed

POLICY = """
from pathlib import Path
from pdvsim.sim.policies.pdv import PDV as Base

Path("executed").touch()

class PDV(Base):
    pass
"""
ARCH = "evil.py:PDV"
SMALL = ["--num-prompts", "4", "--output-len", "5"]
RUN = {
    "command": f"realrun --arch {ARCH} --dataset-name random --num-prompts 4 --max-concurrency 2 --input-len 9",
    "metrics": {"output_throughput": 400.0, "mean_ttft_ms": 9.0, "mean_tpot_ms": 4.0},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    assert main(["run", "--arch", "pdv", *SMALL, "-o", f"{folder}/run.json", "--save-detailed"]) == 0
    assert main(["sweep", "--arch", "pdv", "--request-rate", "8", *SMALL, "--jobs", "1", "-o", f"{folder}/sweep"]) == 0
    return folder


@pytest.fixture(autouse=True)
def files(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of every kind that names an architecture, each naming the policy; none has been run."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(results, tmp_path, dirs_exist_ok=True)
    document = json.loads(Path("run.json").read_text().replace('"pdv"', json.dumps(ARCH)))
    Path("run.json").write_text(json.dumps(sealed(document)))
    edited_sweep(Path("sweep"), **json.loads(json.dumps(asked(Path("sweep"))).replace('"pdv"', json.dumps(ARCH))))
    Path("runs.jsonl").write_text(json.dumps(RUN) + "\n")
    Path("flags.toml").write_text(f'arch = ["{ARCH}"]\nnum_prompts = 4\n')
    Path("evil.py").write_text(POLICY)


READERS: dict[str, Callable[[], int]] = {
    "validate": lambda: main(["validate", "runs.jsonl"]),
    "validate one": lambda: main(["validate", "--run", "run.json"]),
    "report": lambda: main(["report", "run.json", "sweep"]),
    "plot": lambda: main(["plot", "run.json", "--var-y", "mean_ttft_ms", "-o", "plots"]),
    "check": lambda: main(["sweep", "--check", "run.json", "sweep"]),
    "resume": lambda: main(
        ["sweep", "--arch", "pdv", "--request-rate", "8", *SMALL, "--jobs", "1", "-o", "sweep", "--resume"]
    ),
    "run --config": lambda: main(["run", "--config", "flags.toml"]),
    "sweep --config": lambda: main(["sweep", "--config", "flags.toml", "--dry-run"]),
    "live --config": lambda: main(["live", "--config", "flags.toml", "--no-browser", "--port", "0"]),
    "serve a plan": lambda: main(["validate", "--serve", "runs.jsonl", "--tiny", "-o", "out.jsonl"]),
    "serve more": lambda: main(["validate", "--serve", "plan.jsonl", "--tiny", "-o", "runs.jsonl"]),
}


@pytest.mark.parametrize("name", READERS)
def test_no_file_of_data_runs_a_policy_that_it_names(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain = RUN | {"command": str(RUN["command"]).replace(ARCH, "pdv")}
    Path("plan.jsonl").write_text(json.dumps(plain) + "\n")
    capsys.readouterr()
    code = READERS[name]()
    assert not Path("executed").exists()
    if name not in ("report", "plot", "check"):  # these need no policy
        message = capsys.readouterr().err
        if name == "resume":  # its own flags are run, whatever the folder is of
            assert code == 0
        else:
            assert code == 2
            assert message.count("\n") == 1
            assert "is a policy file" in message


@pytest.mark.parametrize("argv", [
    ["validate", "runs.jsonl", "--own-policies", "--no-ablations", "--jobs", "1"],
    ["run", "--config", "flags.toml", "--arch", ARCH],
])  # fmt: skip
def test_a_flag_or_the_command_line_allows_it(argv: list[str]) -> None:
    assert main(argv) == 0
    assert Path("executed").exists()


def test_a_file_of_flags_names_no_policy_in_any_form(capsys: pytest.CaptureFixture[str]) -> None:
    Path("evil=a.py").write_text(POLICY)
    for arch in ('{evil = "a.py:PDV"}', '"pdv,evil.py:PDV"', '[["evil.py:PDV"]]'):
        Path("flags.toml").write_text(f"arch = {arch}\n")
        assert main(["sweep", "--config", "flags.toml", "--dry-run"]) == 2
        assert not Path("executed").exists()
    assert capsys.readouterr().err.count("is a policy file") == 2


def test_a_file_of_flags_does_not_say_what_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    Path("victim.json").write_text("mine")
    Path("flags.toml").write_text('arch = "pdv"\nnum_prompts = 5\noutput = "victim.json"\noverwrite = true\n')
    assert main(["run", "--config", "flags.toml"]) == 2
    assert "give it on the command line" in capsys.readouterr().err
    assert Path("victim.json").read_text() == "mine"
    Path("flags.toml").write_text('arch = "pdv"\nnum_prompts = 5\n')
    assert main(["run", "--config", "flags.toml", "-o", "victim.json", "--overwrite"]) == 0
