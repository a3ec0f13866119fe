"""The design: what it covers, and that a budget may cut it anywhere."""

from __future__ import annotations

from collections import Counter

import pytest

from pdvsim.profiler import corun, rig
from pdvsim.profiler.grid import KINDS, design, labelled, ordered
from pdvsim.realrun.engine.cache import HEADROOM, PAGE
from pdvsim.sim.models.presets import MODELS

ALL = [p for points in design(drafts=True) for p in points]


def test_no_point_twice_and_a_bearable_number() -> None:
    assert len(ALL) == len(set(ALL)) <= 240
    assert [labelled(p.label()) for p in ALL] == ALL
    assert not any(p.kind == "draft" for points in design(drafts=False) for p in points)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("seed", [0, 7])
def test_any_cut_is_balanced(drafts: bool, seed: int) -> None:
    """Past the first few points every kind is there, each near its share of the class being worked on."""
    classes = design(drafts)
    order = ordered(classes, seed)
    assert order == ordered(classes, seed) != ordered(classes, seed + 1)
    assert Counter(order) == Counter(p for points in classes for p in points)
    kinds = set(KINDS) - ({"read"} if drafts else {"read", "draft"})
    assert {p.kind for p in order[: len(kinds)]} == kinds
    begin = 0
    for points in classes:
        share = Counter(p.kind for p in points)
        for cut in range(1, len(points) + 1):
            seen = Counter(p.kind for p in order[begin : begin + cut])
            for kind, count in share.items():
                assert abs(seen[kind] - cut * count / len(points)) <= len(kinds)
        begin += len(points)


@pytest.mark.parametrize("name", MODELS)
def test_pages_fit_into_memory_and_every_point_into_a_slot(name: str) -> None:
    spec, memory = MODELS[name], 132e9
    assert spec.weight_bytes + rig.pages_that_fit([spec], memory) * PAGE * spec.kv_bytes_per_token <= memory
    assert all(p.positions + HEADROOM <= rig.CAPACITY for p in ALL)


def test_groups_are_pairs_and_triples_in_both_settings() -> None:
    groups = corun.groups()
    assert [number for number, _, _ in groups] == list(range(len(groups)))
    assert len({(setting, members) for _, setting, members in groups}) == len(groups)
    by_members = Counter(tuple(p.kind for p in members) for _, _, members in groups)
    wanted = {("draft", "verify"), ("draft", "prefill"), ("verify", "prefill"), ("draft", "verify", "prefill")}
    reads = {("draft", "read"), ("verify", "read"), ("decode", "read"), ("draft", "verify", "read")}
    assert set(by_members) == wanted | reads | {("decode", "prefill")}
    assert {tuple(p.kind for p in members) for _, _, members in groups[:8]} == wanted
    settings = Counter(setting for _, setting, _ in groups)
    assert 0 < settings["equal"] < settings["ordered"]
    assert max(p.positions for _, _, members in groups for p in members) + HEADROOM <= rig.CAPACITY
