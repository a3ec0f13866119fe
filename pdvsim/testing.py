"""Invariants of every serving policy, to test your own: `check_policy(Mine)`.

A violation raises an AssertionError of one line that names the load and the invariant. Every request must finish with
exactly its tokens and with its times in order. GPU records must agree with request records, and each stream runs one
launch at a time. The rounds must be the same whether they are simulated many at a time, one by one through the event
queue, or in real time on two tiny models on the CPU (if torch is installed).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from pdvsim.realrun.machine import Machine
from pdvsim.sim.config import Experiment, Hardware, Server, Traffic
from pdvsim.sim.core import KINDS, LOOKED_UP
from pdvsim.sim.policies import PolicyError, named
from pdvsim.sim.records import Result
from pdvsim.sim.relevance import applicable
from pdvsim.sim.run import simulate
from pdvsim.sim.workload.requests import make_requests

if TYPE_CHECKING:
    from pdvsim.sim.policies.base import Policy

_DRAFT, _VERIFY, _DECODE, _AHEAD = (KINDS.index(kind) for kind in ("draft", "verify", "decode", "ahead"))

_MIXED = Traffic("random", num_prompts=40, input_len=200, output_len=30, random_range_ratio=0.9)
LOADS: dict[str, Experiment] = {
    "concurrency 1": Experiment(traffic=replace(_MIXED, num_prompts=5, max_concurrency=1)),
    "all sent at time 0": Experiment(traffic=_MIXED),
    "concurrency 4": Experiment(traffic=replace(_MIXED, max_concurrency=4)),
    "concurrency 32": Experiment(traffic=replace(_MIXED, num_prompts=80, max_concurrency=32)),
    "100 requests per second": Experiment(traffic=replace(_MIXED, request_rate=100.0)),
    "batch limit 3, chunked prefill": Experiment(
        traffic=_MIXED, server=Server(max_num_seqs=3, max_num_batched_tokens=64)
    ),
    "draft batch 2, verify batch 5": Experiment(
        traffic=_MIXED, server=Server(max_num_seqs=8, max_draft_batch=2, max_verify_batch=5)
    ),
    "dynamic priority": Experiment(traffic=_MIXED, server=Server(priority="dynamic")),
    "small KV cache": Experiment(traffic=_MIXED, hardware=Hardware(kv_capacity_tokens=1200)),
    "paged KV cache with preemption": Experiment(
        traffic=_MIXED, server=Server(kv_cache="paged"), hardware=Hardware(kv_capacity_tokens=800)
    ),
    "no drafts": Experiment(
        traffic=replace(_MIXED, max_concurrency=8), server=Server(num_speculative_tokens=0)
    ),
    "goodput controller": Experiment(
        traffic=replace(_MIXED, max_concurrency=8), server=Server(controller="goodput")
    ),
}  # fmt: skip


def check_policy(policy: type[Policy] | str, *, real: bool | None = None) -> None:
    """Check a policy, a class or file.py:Class, under all `LOADS`; an AssertionError names the violated invariant.

    `real` also runs it in real time; default: if torch is installed.
    """
    arch = named(policy)
    for load, base in LOADS.items():
        experiment = applicable(replace(base, arch=arch))
        with _under(load):
            check_alike(checked(experiment), simulate(experiment, blocks=False))
    if real or (real is None and find_spec("torch") is not None):
        with _under("two tiny models in real time"):
            _check_in_real_time(arch)


def checked(experiment: Experiment) -> Result:
    """Simulate an experiment; an AssertionError if its counts or streams are wrong."""
    requests = make_requests(experiment.traffic, experiment.acceptance)
    result = simulate(experiment)
    check_counts(result, [request.output_tokens for request in requests], [request.arrival_s for request in requests])
    check_streams(result)
    return result


def check_counts(result: Result, outputs: Sequence[int], arrival_s: Sequence[float]) -> None:
    """Check that every request finishes once, with its tokens, its times in order and its rounds accounted for."""
    requests, deliveries, launches = result.requests, result.deliveries, result.launches
    count = len(outputs)
    _law(requests["id"].tolist() == list(range(count)), "every request has one record")
    _law(requests["output_tokens"].tolist() == list(outputs), "a request record has the requested output tokens")
    got = np.bincount(deliveries["request"], deliveries["tokens"], count)
    _law(got.tolist() == list(outputs), "a request gets exactly its output tokens")
    _law(np.all(deliveries["tokens"] >= 1), "a delivery has at least one token")

    _law(np.all(requests["arrival_s"] >= arrival_s), "a request is not sent before it is due")
    _law(np.all(requests["admitted_s"] >= requests["arrival_s"]), "a request is admitted after it arrives")
    _law(np.all(requests["first_token_s"] > requests["admitted_s"]), "the first token comes after admission")
    _law(np.all(requests["finish_s"] >= requests["first_token_s"]), "the last token comes after the first")
    order = np.lexsort((np.arange(len(deliveries["request"])), deliveries["request"]))
    ids, times = deliveries["request"][order], deliveries["time_s"][order]
    same = ids[1:] == ids[:-1]
    _law(np.all(times[1:][same] > times[:-1][same]), "the deliveries of a request are in order")
    first = np.flatnonzero(np.append(True, ~same))
    _law(np.array_equal(times[first], requests["first_token_s"]), "the first delivery is the first token")
    last = np.append(first[1:], len(ids)) - 1
    _law(np.array_equal(times[last], requests["finish_s"]), "a request ends with its last delivery")

    rounds, drafted, accepted = requests["rounds"], requests["drafted"], requests["accepted"]
    resumed = requests["resumptions"]
    _law(np.all(resumed <= requests["preemptions"]), "a request resumes after a preemption")
    chunks = np.bincount(deliveries["request"], minlength=count)
    _law(np.all(chunks == rounds + 1 + resumed), "a round has one delivery")
    _law(np.all(accepted + requests["refused"] <= drafted), "a draft token is accepted, rejected or not judged")
    _law(np.all(requests["refused"] <= requests["drafts"]), "a round rejects at most once")
    # Tokens come from accepted drafts, one target token per round and one per prefill; the last round may overshoot.
    surplus = 1 + rounds + resumed + accepted - requests["output_tokens"]
    _law(np.all(surplus >= 0), "tokens come from prefills and rounds")
    _law(np.all(surplus[rounds == 0] == 0), "a request without rounds has only tokens of its prefills")

    drafts = launches["kind"] == _DRAFT
    verifies = (launches["kind"] == _VERIFY) | (launches["kind"] == _DECODE)
    _law(np.sum(launches["rows"][verifies]) == np.sum(rounds), "every round is a row of a verify or decode")
    judged = np.sum(launches["rows"][launches["kind"] == _VERIFY])
    drafted_tokens = np.sum(launches["rows"][drafts] * launches["steps"][drafts])
    plain = np.sum(requests["undrafted_rounds"])
    _law(judged == np.sum(requests["drafts"]) + plain, "a row of a verify is a drafting round, or one without drafts")
    early, used = requests["ahead_tokens"], requests["ahead_used"]
    works = launches["kind"] == _AHEAD
    made_early = np.sum(launches["rows"][works] * launches["steps"][works])
    _law(made_early == np.sum(early), "every token drafted ahead belongs to a request")
    _law(np.all(used <= early), "a token drafted ahead is used at most once")
    looked_up = result.experiment.server.drafted_by in LOOKED_UP  # by the host, which has no launches
    _law(
        looked_up or drafted_tokens + np.sum(used) == np.sum(drafted),
        "every draft token is drafted by a launch and verified",
    )
    _law(not looked_up or not drafts.any(), "drafts that are looked up have no GPU launches")
    spent_s = launches["rows"] * (launches["end_s"] - launches["start_s"])
    rounding_s = 2e-9 * (np.sum(launches["rows"]) + 1)  # requests keep whole nanoseconds
    stages = [(verifies, "verify_s"), *([] if looked_up else [(drafts, "draft_s")])]
    for which, stage in stages:
        apart_s = abs(np.sum(spent_s[which]) - np.sum(requests[stage]))
        _law(apart_s <= rounding_s, f"{stage} is the time of the request's launches")
    after_first_s = requests["draft_s"] + requests["wait_s"] + requests["verify_s"]
    within_s = requests["finish_s"] - requests["first_token_s"] + 1e-9 * (rounds + 1)
    _law(np.all(after_first_s <= within_s), "the stages of a request fit into its duration")


def check_streams(result: Result) -> None:
    """Check that a stream runs one launch at a time."""
    works = result.launches
    streams = np.stack([works["replica"], works["gpu"], works["lane"]])
    for stream in np.unique(streams, axis=1).T:
        mine = np.all(stream == streams.T, axis=1)
        start_s, end_s = np.sort(works["start_s"][mine]), np.sort(works["end_s"][mine])
        _law(np.all(start_s[1:] >= end_s[:-1]), "a stream runs one launch at a time")


def check_alike(one: Result, other: Result) -> None:
    """Check that two runs have the same records: equal integers, times within 1e-9."""
    for table in ("requests", "launches", "deliveries"):
        mine, theirs = getattr(one, table), getattr(other, table)
        for name in mine:
            left, right = mine[name], theirs[name]
            whole = left.dtype.kind == "i"
            same = len(left) == len(right) and np.allclose(left, right, 0 if whole else 1e-9, 0 if whole else 1e-12)
            _law(same, f"{table}.{name} is the same with and without the fast path")


def _check_in_real_time(arch: str) -> None:
    from pdvsim.realrun.site import serve

    traffic = Traffic("random", num_prompts=9, input_len=30, output_len=10, random_range_ratio=0.9)
    small = Server(num_speculative_tokens=3, max_num_seqs=4, max_num_batched_tokens=32)
    for load in (traffic, replace(traffic, request_rate=200.0), replace(traffic, max_concurrency=2)):
        experiment = applicable(Experiment(arch, load, server=small))
        requests = make_requests(load, experiment.acceptance)
        real = serve(experiment, Machine(device="cpu", tiny=True))
        got = np.bincount(real.deliveries["request"], real.deliveries["tokens"], len(requests))
        _law(got.tolist() == [r.output_tokens for r in requests], "a request gets exactly its output tokens")
        _law(
            np.all(real.requests["finish_s"] >= real.requests["first_token_s"]), "the last token comes after the first"
        )


@contextmanager
def _under(load: str) -> Iterator[None]:
    """Name the load in every error under it."""
    try:
        yield
    except (AssertionError, RuntimeError, PolicyError) as error:
        raise AssertionError(f"{load}: {error}") from error


def _law(holds: object, text: str) -> None:
    if not holds:
        raise AssertionError(f"violated: {text}")
