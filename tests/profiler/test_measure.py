"""The profiler itself, end to end on the CPU: lanes run eagerly there, and a host clock stands in for events."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import nvml
import pytest
import torch
from small import options, tiny

from pdvsim.profiler import corun, grid, heat, hostcost, measure, provenance, rig
from pdvsim.profiler.header import Reading
from pdvsim.profiler.measure import Profiler
from pdvsim.profiler.rig import Launcher, Rig
from pdvsim.profiler.samples import HEADER, POINT, SAMPLES, load
from pdvsim.realrun.engine.arch import ModelArchitecture, headed
from pdvsim.sim.models.presets import drafter

CPU = torch.device("cpu")
PAIR = "tiny-a:tiny-b"


def quiet(text: str) -> None:
    """Nobody reads along."""


@pytest.fixture(scope="module", autouse=True)
def few_repeats() -> Iterator[None]:
    """Two of each launch, and small caches: both take far longer here than on a card."""
    two = rig.Effort(warm_up=0, least=2, most=2, floor=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "QUICK", two)
        patch.setattr(corun, "QUICK", two)
        patch.setattr(hostcost, "WARM_UP", 0)
        patch.setattr(rig, "MAX_SLOTS", 136)
        patch.setattr(rig, "usable_bytes", lambda device: 30e6)
        yield


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured")
    Profiler(options(folder, pairs=(PAIR,)), tiny, quiet).run()
    return folder


@pytest.fixture(scope="module")
def bed() -> Rig:
    return Rig([tiny("tiny-a")], CPU, seed=1)


def launches(folder: Path) -> Counter[tuple[object, ...]]:
    columns = load(folder).frame
    return Counter(zip(*(columns[name].tolist() for name in (*POINT, "repeat")), strict=True))


def test_everything_asked_for_is_measured(measured: Path) -> None:
    samples = load(measured)
    frame, header = samples.frame, samples.header
    solo = frame[frame["section"] == "solo"]
    assert len(solo.groupby(list(POINT), observed=True)) == len(grid.design(drafts=True)[0])
    assert set(solo["kind"]) == set(grid.KINDS) - {"read"}
    assert [p.left_out for p in header.parts] == [[], []]
    assert header.device.name.startswith("CPU")
    assert (solo["context_total"] <= 1.1 * solo["rows"] * solo["context"]).all()
    assert (solo["context_total"] >= 0.9 * solo["rows"] * solo["context"] - solo["rows"]).all()

    host = frame[frame["section"] == "host"]
    assert set(host["what"]) == {"launch_idle", "launch_busy", "poll", "outcome", "handoff"}
    assert set(host["kind"]) == {"draft", "verify", "prefill", "mixed"}
    assert set(host["rows"]) == {0, 1, 8, 32, 64}
    assert (host["seconds"] > 0).all()

    together = frame[(frame["section"] == "corun") & (frame["members"] > 1)]
    assert set(together["group"]) == {number for number, _, _ in corun.groups(quick=True)}
    assert (together.groupby("group", observed=True)["member"].nunique() >= 2).all()
    assert set(together["priority"]) == {0, 1, 2}
    alone = frame[(frame["section"] == "corun") & (frame["members"] == 1)]
    for _, rows in together.groupby(["model", "kind", "rows", "chunk_tokens", "priority"], observed=True):
        keys = ["model", "kind", "rows", "chunk_tokens", "priority"]
        assert len(alone.merge(rows[keys].head(1), on=keys)), "each member was also timed alone on its lane"


def test_a_second_run_measures_nothing_again(measured: Path) -> None:
    before = (measured / SAMPLES).read_bytes()
    messages: list[str] = []
    Profiler(options(measured), tiny, messages.append).run()
    assert messages == []
    assert (measured / SAMPLES).read_bytes() == before


def test_a_run_that_ends_early_is_resumed_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed, it leaves its files as they are at that moment; Ctrl-C keeps all that is finished."""
    monkeypatch.setattr("pdvsim.profiler.samples.SAVE_EVERY_S", 0.0)
    killed = tmp_path / "killed"
    killed.mkdir()

    def step(done: int) -> None:
        if done == 6:
            for name in (SAMPLES, HEADER):
                shutil.copy(tmp_path / name, killed)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Profiler(options(tmp_path), tiny, quiet, step).run()
    assert len({point[:-1] for point in launches(tmp_path)}) == 6
    before = launches(killed)
    assert len({point[:-1] for point in before}) == 5
    Profiler(options(killed), tiny, quiet).run()
    after = launches(killed)
    assert before.items() <= after.items()
    assert max(after.values()) == 1
    assert len({point[:-1] for point in after}) == 17


def test_a_budget_cuts_the_order_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured points are the first of the order, the others are named with the reason."""
    clock = iter(range(10**6))
    monkeypatch.setattr(measure, "monotonic", lambda: float(next(clock)))
    profiler = Profiler(options(tmp_path, budget_s=10.0), tiny, quiet)
    profiler.run()
    samples = load(tmp_path)
    columns, [header] = samples.frame, samples.header.parts
    order = profiler.points(tiny("tiny-a"))
    done = list(dict.fromkeys(zip(*(columns[name].tolist() for name in POINT), strict=True)))
    assert 3 <= len(done) < len(order)
    assert [tuple(getattr(p, f) for f in POINT) for p in order[: len(done)]] == done
    assert header.left_out == [{"label": p.label(), "reason": "budget of 10 s spent"} for p in order[len(done) :]]


def test_what_does_not_fit_or_fails_is_left_out_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One refused shape does not cost the others."""
    real = Rig.measure

    def choosy(self: Rig, point: grid.GridPoint, effort: rig.Effort) -> object:
        if point.kind == "mixed":
            raise RuntimeError("out of\nresources")
        return real(self, point, effort)

    monkeypatch.setattr(Rig, "measure", choosy)
    spec = tiny("tiny-a").spec
    room = spec.weight_bytes + 12 * spec.kv_bytes_per_token * 640
    monkeypatch.setattr(rig, "usable_bytes", lambda device: float(room))
    Profiler(options(tmp_path), tiny, quiet).run()
    samples = load(tmp_path)
    columns, [header] = samples.frame, samples.header.parts
    assert columns["rows"].max() == 8
    assert set(columns["kind"].tolist()) == set(grid.KINDS) - {"mixed", "read"}
    reasons = {entry["reason"] for entry in header.left_out}
    assert reasons == {"does not fit into memory", "RuntimeError: out of resources"}
    assert any("32x5@512" in entry["label"] for entry in header.left_out)


@pytest.mark.parametrize(
    "point",
    [grid.labelled("verify 8x5@128"), grid.labelled("draft 4x2@128 k=2+catch-up")],
    ids=lambda p: p.label(),
)
def test_recorded_contexts_are_what_the_engine_sees(bed: Rig, point: grid.GridPoint) -> None:
    launch = bed.launcher(point)
    for _ in range(3):
        data = launch.draw()
        lengths = launch.lane.engine.sequences.length[torch.tensor(data.rows)]
        unread = 2 if point.catch_up else 1  # the newest token is settled, not cached; catching up feeds two
        assert int((lengths - unread).sum()) == data.context_total
        assert len(set(data.rows)) == point.rows
        launch.fire(data)


def test_a_stalled_group_is_given_up(bed: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = bed.launcher(grid.labelled("decode 1x1@128"))

    class Never:
        def done(self) -> bool:
            return False

    monkeypatch.setattr(launch.lane, "gpu", True)
    monkeypatch.setattr(Launcher, "__call__", lambda self: (Never(), launch.draw()))
    monkeypatch.setattr(corun, "_common_start", lambda lanes: None)
    with pytest.raises(TimeoutError, match="not finished"):
        corun.side_by_side([launch], 0.01, stalled_s=0.05)


def test_a_head_is_measured_like_a_model(tmp_path: Path) -> None:
    """Its drafts read a round again; what it reads of a target is random, and its shape is in the header."""

    def lookup(name: str) -> ModelArchitecture:
        target = tiny(name.removeprefix("eagle3-"))
        spec = drafter("eagle3", target.spec)
        assert spec.is_head
        return headed(target, spec)

    Profiler(options(tmp_path, models=("eagle3-tiny-a",)), lookup, quiet).run()
    samples = load(tmp_path)
    spec = samples.header.specs()["eagle3-tiny-a"]
    assert spec.is_head
    assert (spec.layers, spec.fused_inputs) == (1, 96)
    solo = samples.frame[samples.frame["section"] == "solo"]
    assert len(solo.groupby(list(POINT), observed=True)) == len(grid.design(drafts=True, heads=True)[0])
    assert 5 in set(solo[solo["kind"] == "draft"]["tokens"])


def test_a_head_with_its_target_is_not_measured(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="measure a head alone"):
        options(tmp_path, pairs=("eagle3-llama-3.1-8b:llama-3.1-8b",))


def test_the_card_is_read_through_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.install(
        monkeypatch,
        NVML_FI_DEV_POWER_INSTANT=7,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda card: 0x44,
        nvmlSystemGetDriverVersion=lambda: "580.1",
        nvmlDeviceGetFieldValues=lambda card, names: [SimpleNamespace(value=SimpleNamespace(uiVal=498_500))],
    )
    card = torch.device("cuda")
    throttled = ["software power cap", "hardware thermal slowdown"]
    clocks = {"sm_mhz": 1980, "memory_mhz": 3201, "power_w": 512.0, "temperature_c": 55, "throttled": throttled}
    assert provenance.read_card(card) == clocks | {"driver": "580.1"}
    assert provenance.reading(card, lambda: None) == Reading(**clocks)
    assert heat.card_reader(card)() == (1980.0, 498.5)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert provenance.read_card(card) == {}
    assert heat.card_reader(card)() == (None, None)
