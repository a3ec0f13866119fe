"""The laws that every serving policy keeps, for your own: `check_policy(Mine)`.

A policy that breaks one raises an AssertionError of one line that names the load and the law. What is checked: every
request ends, with exactly its tokens (conservation, termination), its times are in order, the GPU's books agree with
the requests', each stream runs one work at a time, and the same rounds are gone through whichever way the clock goes:
many rounds at once, one by one through the event queue, or in real time on two tiny models on the CPU (where torch is
there).
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
from pdvsim.sim.core import KINDS
from pdvsim.sim.policies import PolicyError, named
from pdvsim.sim.records import Result
from pdvsim.sim.relevance import suited
from pdvsim.sim.run import simulate
from pdvsim.sim.workload.requests import make_requests

if TYPE_CHECKING:
    from pdvsim.sim.policies.base import Policy

_DRAFT, _VERIFY, _DECODE, _AHEAD = (KINDS.index(kind) for kind in ("draft", "verify", "decode", "ahead"))

_MIXED = Traffic("random", num_prompts=40, input_len=200, output_len=30, random_range_ratio=0.9)
LOADS: dict[str, Experiment] = {
    "one at a time": Experiment(traffic=replace(_MIXED, num_prompts=5, max_concurrency=1)),
    "all at once": Experiment(traffic=_MIXED),
    "4 at once": Experiment(traffic=replace(_MIXED, max_concurrency=4)),
    "32 at once": Experiment(traffic=replace(_MIXED, num_prompts=80, max_concurrency=32)),
    "100 a second": Experiment(traffic=replace(_MIXED, request_rate=100.0)),
    "batches of 3, prompts in chunks": Experiment(
        traffic=_MIXED, server=Server(max_num_seqs=3, max_num_batched_tokens=64)
    ),
    "drafts for 2, verifies of 5": Experiment(
        traffic=_MIXED, server=Server(max_num_seqs=8, max_draft_batch=2, max_verify_batch=5)
    ),
    "priorities by queues and ages": Experiment(traffic=_MIXED, server=Server(priority="dynamic")),
    "hardly any KV cache": Experiment(traffic=_MIXED, hardware=Hardware(kv_capacity_tokens=1200)),
    "blocks of KV cache that run out": Experiment(
        traffic=_MIXED, server=Server(kv_cache="paged"), hardware=Hardware(kv_capacity_tokens=800)
    ),
    "no drafts": Experiment(
        traffic=replace(_MIXED, max_concurrency=8), server=Server(num_speculative_tokens=0)
    ),
    "drafts by the goodput controller": Experiment(
        traffic=replace(_MIXED, max_concurrency=8), server=Server(controller="goodput")
    ),
}  # fmt: skip


def check_policy(policy: type[Policy] | str, *, real: bool | None = None) -> None:
    """Hold a policy, a class or file.py:Class, to the laws under all `LOADS`; an AssertionError names what it breaks.

    `real` says whether to run it in real time as well; by default where torch is installed.
    """
    arch = named(policy)
    for load, base in LOADS.items():
        experiment = suited(replace(base, arch=arch))
        asked = make_requests(experiment.traffic, experiment.acceptance)
        with _under(load):
            result = simulate(experiment)
            check_books(result, [r.output_tokens for r in asked], [r.arrival_s for r in asked])
            check_streams(result)
            check_alike(result, simulate(experiment, blocks=False))
    if real or (real is None and find_spec("torch") is not None):
        with _under("on two tiny models in real time"):
            _check_in_real_time(arch)


def check_books(result: Result, outputs: Sequence[int], arrival_s: Sequence[float]) -> None:
    """Every request ends once, with its tokens, its times in order, its rounds accounted for."""
    requests, deliveries, launches = result.requests, result.deliveries, result.launches
    count = len(outputs)
    _law(requests["id"].tolist() == list(range(count)), "every request is in the records once")
    _law(requests["output_tokens"].tolist() == list(outputs), "a request asks for what was asked")
    got = np.bincount(deliveries["request"], deliveries["tokens"], count)
    _law(got.tolist() == list(outputs), "a request gets exactly the tokens that it asked for")
    _law(np.all(deliveries["tokens"] >= 1), "a delivery has tokens")

    _law(np.all(requests["arrival_s"] >= arrival_s), "a request is not sent before it is due")
    _law(np.all(requests["admitted_s"] >= requests["arrival_s"]), "a request is admitted after it arrives")
    _law(np.all(requests["first_token_s"] > requests["admitted_s"]), "the first token comes after admission")
    _law(np.all(requests["finish_s"] >= requests["first_token_s"]), "the last token comes after the first")
    order = np.lexsort((np.arange(len(deliveries["request"])), deliveries["request"]))
    ids, times = deliveries["request"][order], deliveries["time_s"][order]
    same = ids[1:] == ids[:-1]
    _law(np.all(times[1:][same] > times[:-1][same]), "a request's deliveries follow each other in time")
    first = np.flatnonzero(np.append(True, ~same))
    _law(np.array_equal(times[first], requests["first_token_s"]), "the first delivery is the first token")
    last = np.append(first[1:], len(ids)) - 1
    _law(np.array_equal(times[last], requests["finish_s"]), "a request ends with its last delivery")

    rounds, drafted, accepted = requests["rounds"], requests["drafted"], requests["accepted"]
    resumed = requests["resumptions"]
    _law(np.all(resumed <= requests["preemptions"]), "a request resumes after a preemption")
    chunks = np.bincount(deliveries["request"], minlength=count)
    _law(np.all(chunks == rounds + 1 + resumed), "a round delivers once")
    _law(np.all(accepted + requests["refused"] <= drafted), "a draft is accepted or refused, or not judged")
    _law(np.all(requests["refused"] <= requests["drafts"]), "a round refuses once at most")
    # accepted drafts, one token of the target's a round, a reading's: all but what the last round had too many of
    surplus = 1 + rounds + resumed + accepted - requests["output_tokens"]
    _law(np.all(surplus >= 0), "tokens come from readings and rounds")
    _law(np.all(surplus[rounds == 0] == 0), "a request without rounds has what its readings gave")

    drafts = launches["kind"] == _DRAFT
    verifies = (launches["kind"] == _VERIFY) | (launches["kind"] == _DECODE)
    _law(np.sum(launches["rows"][verifies]) == np.sum(rounds), "every round is a row of a verify or decode")
    judged = np.sum(launches["rows"][launches["kind"] == _VERIFY])
    made = np.sum(launches["rows"][drafts] * launches["steps"][drafts])
    bare = np.sum(requests["bare"])
    _law(judged == np.sum(requests["drafts"]) + bare, "a row of a verify is a drafting round, or one without drafts")
    early, used = requests["ahead_tokens"], requests["ahead_used"]
    works = launches["kind"] == _AHEAD
    made_early = np.sum(launches["rows"][works] * launches["steps"][works])
    _law(made_early == np.sum(early), "every token drafted ahead is some request's")
    _law(np.all(used <= early), "what was drafted ahead is used once at most, and else dropped")
    looked_up = result.experiment.server.drafted_by == "ngram"  # by the host, which has no launches
    _law(
        looked_up or made + np.sum(used) == np.sum(drafted),
        "every draft token is made by a draft or ahead, and verified",
    )
    _law(not looked_up or not drafts.any(), "drafts that the host looks up are no works of the GPU")
    spent_s = launches["rows"] * (launches["end_s"] - launches["start_s"])
    rounding_s = 2e-9 * (np.sum(launches["rows"]) + 1)  # requests keep whole nanoseconds
    stages = [(verifies, "verify_s"), *([] if looked_up else [(drafts, "draft_s")])]
    for which, stage in stages:
        apart_s = abs(np.sum(spent_s[which]) - np.sum(requests[stage]))
        _law(apart_s <= rounding_s, f"{stage} is the time of the request's works")
    after_first_s = requests["draft_s"] + requests["wait_s"] + requests["verify_s"]
    within_s = requests["finish_s"] - requests["first_token_s"] + 1e-9 * (rounds + 1)
    _law(np.all(after_first_s <= within_s), "a request's stages fit into its time")


def check_streams(result: Result) -> None:
    """A stream runs one work at a time."""
    works = result.launches
    streams = np.stack([works["replica"], works["gpu"], works["lane"]])
    for stream in np.unique(streams, axis=1).T:
        mine = np.all(stream == streams.T, axis=1)
        start_s, end_s = np.sort(works["start_s"][mine]), np.sort(works["end_s"][mine])
        _law(np.all(start_s[1:] >= end_s[:-1]), "a stream runs one work at a time")


def check_alike(one: Result, other: Result) -> None:
    """Two runs have the same records: whole numbers equal, times within 1e-9."""
    for table in ("requests", "launches", "deliveries"):
        mine, theirs = getattr(one, table), getattr(other, table)
        for name in mine:
            left, right = mine[name], theirs[name]
            whole = left.dtype.kind == "i"
            same = len(left) == len(right) and np.allclose(left, right, 0 if whole else 1e-9, 0 if whole else 1e-12)
            _law(same, f"{table}.{name} is the same whether rounds pass at once or one by one")


def _check_in_real_time(arch: str) -> None:
    from pdvsim.realrun.site import serve

    traffic = Traffic("random", num_prompts=9, input_len=30, output_len=10, random_range_ratio=0.9)
    small = Server(num_speculative_tokens=3, max_num_seqs=4, max_num_batched_tokens=32)
    for load in (traffic, replace(traffic, request_rate=200.0), replace(traffic, max_concurrency=2)):
        experiment = suited(Experiment(arch, load, server=small))
        asked = make_requests(load, experiment.acceptance)
        real = serve(experiment, Machine(device="cpu", tiny=True))
        got = np.bincount(real.deliveries["request"], real.deliveries["tokens"], len(asked))
        _law(got.tolist() == [r.output_tokens for r in asked], "a request gets exactly the tokens that it asked for")
        _law(
            np.all(real.requests["finish_s"] >= real.requests["first_token_s"]), "the last token comes after the first"
        )


@contextmanager
def _under(load: str) -> Iterator[None]:
    """Names the load in whatever goes wrong under it."""
    try:
        yield
    except (AssertionError, RuntimeError, PolicyError) as error:
        raise AssertionError(f"{load}: {error}") from error


def _law(holds: object, text: str) -> None:
    if not holds:
        raise AssertionError(f"broken: {text}")
