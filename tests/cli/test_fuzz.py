"""Whatever a file or a flag holds: a result, or one line that names what is wrong; never anything else."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import resource
from pathlib import Path
from typing import Any

import fuzzcases
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import check_line, one_line

from pdvsim.bench.pool import Outcome
from pdvsim.bench.rows import Rows
from pdvsim.sim.config import Experiment, Hardware, Traffic
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.policies import ARCHS
from pdvsim.sim.prices.cards import GPUS
from pdvsim.sim.prices.profile import Profile, builtin, load, roofline
from pdvsim.sim.run import simulate

fuzz = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def small_profile(profile: Profile) -> dict[str, Any]:
    document = json.loads(json.dumps(profile.document()))
    document["models"] = {n: document["models"][n] for n in ("tinyllama-1.1b", "llama-2-7b")}
    return document  # type: ignore[no-any-return]


def knots(*pairs: list[float], name: str = "layer_knots") -> dict[str, Any]:
    return builtin("h200").models["tinyllama-1.1b"].figures() | {name: list(pairs)}


PROFILES = {"measured": small_profile(builtin("h200")), "roofline": small_profile(roofline(GPUS["h200"]))}


@pytest.mark.parametrize("kind", PROFILES)
def test_any_changed_profile_serves_or_is_refused(kind: str, tmp_path: Path) -> None:
    """A profile that loads can be simulated with, under every architecture."""
    path = tmp_path / "p.json"

    @settings(max_examples=100)
    @given(seed=st.integers(0, 2**32), arch=st.sampled_from(ARCHS))
    def check(seed: int, arch: Any) -> None:
        document = copy.deepcopy(PROFILES[kind])
        path.write_bytes(fuzzcases.restructured(random.Random(seed), [document])[0])
        try:
            load(path)
        except ValueError as error:
            check_line(error, path)
            return
        traffic = Traffic("random", num_prompts=4, input_len=40, output_len=6, request_rate=20.0)
        try:
            metrics = summarise(simulate(Experiment(arch, traffic, hardware=Hardware(profile=str(path)))))
        except ValueError as error:  # a model that it no longer covers, or no room for the weights
            check_line(error)
        else:
            assert metrics["completed"] == 4
            assert math.isfinite(metrics["duration"])

    check()


@pytest.mark.parametrize(("change", "says"), [
    (("gpu", "bandwidth_bytes_per_s", 4.27), "gpu.bandwidth_bytes_per_s"),
    (("gpu", "memory_bytes", True), "gpu.memory_bytes"),
    (("gpu", "sms", 132.5), "gpu.sms"),
    (("host", "launch_s", "1e-5"), "host.launch_s"),
    (("host", "completion_s", math.nan), "host.completion_s"),
    (("host", "handoff_s", None), "host.handoff_s"),
    (("schema_version", None, 2), "schema_version is 2"),
    (("models", "tinyllama-1.1b", knots([1, 2e-3], [2, 1e-3])), "layer_knots: the last"),
    (("models", "tinyllama-1.1b", knots([1, 3e-3], [2, 9e-4], [4, 3e-3])), "a third"),
    (("models", "tinyllama-1.1b", knots([64, 99.0], name="wait_ratios")), "wait_ratios."),
    (("models", "tinyllama-1.1b", knots()), "tinyllama-1.1b.weights_s: "),
])  # fmt: skip
def test_a_profile_is_refused_by_file_and_field(change: tuple[str, str | None, Any], says: str, tmp_path: Path) -> None:
    document = copy.deepcopy(PROFILES["measured"])
    group, name, new = change
    if name is None:
        document[group] = new
    else:
        document[group][name] = new
    path = tmp_path / "p.json"
    path.write_text(json.dumps(document))
    with one_line(path, says):
        load(path)


@fuzz
@given(data=st.data(), content=st.binary(max_size=40))
def test_any_torn_row_is_itself_or_none(tmp_path: Path, data: st.DataObject, content: bytes) -> None:
    key, path = "0123456789abcdef", tmp_path / "rows.jsonl"
    path.unlink(missing_ok=True)
    Rows(path).add(key, Outcome(0, {"row": {"arch": "pd", "load": math.nan, "x": None, "y": [0.5]}, "details": {}}))
    before, whole = str(Rows(path).get(key)), path.read_bytes()
    assert "arch" in before
    at = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:at] + content + whole[at + data.draw(st.integers(0, 10)) :])
    row = Rows(path).get(key)
    assert row is None or str(row) == before  # as text: nan is not equal to itself


MANY = "FUZZ_COUNT" in os.environ  # of `make fuzz`
FIRST, COUNT, BLOCKS = int(os.environ.get("FUZZ_FIRST", 0)), int(os.environ.get("FUZZ_COUNT", 1000)), 1 if MANY else 2
MOST_BYTES = 12 << 30  # of address space, for many


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> fuzzcases.Yard:
    return fuzzcases.make_yard(tmp_path_factory.mktemp("yard"))


@pytest.mark.parametrize("block", range(BLOCKS))
def test_any_file_and_command_line_is_taken_or_refused_in_one_line(block: int, yard: fuzzcases.Yard) -> None:
    """The first of the cases of `make fuzz`; `make fuzz FUZZ_FIRST=SEED FUZZ_COUNT=1` does one again."""
    if MANY:
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    failures = []
    for seed in range(FIRST + block, FIRST + COUNT, BLOCKS):
        if MANY:  # a case may end the process
            print(f"\rseed {seed}", end="", flush=True)
        case = fuzzcases.case(seed, yard, commands=0.3 if MANY else 0.05, cheap=not MANY)
        if broken := fuzzcases.violation(case, yard):
            failures.append(f"seed {seed}: {broken}: {case.what}")
    assert not failures
