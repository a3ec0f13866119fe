"""Hand-worked schedules: tiny scenarios whose every launch and delivery is worked out by hand next to the expectation.

The toy GPU (times in ms):

- a draft forward over N tokens takes 1 + N/100, a target forward 10 + N/10 (`sharpness` 1 adds the two terms), so with
  k = 2 drafts and n rows: draft 2 + 0.02n (2 + 0.03n where some row catches up: the first step then has two tokens a
  row), verify 10 + 0.3n, plain decode 10 + 0.1n; a prompt of P tokens is read in 10 + P/10 by the target and 1 + P/100
  by the draft;
- the one host thread takes 0.1 (h) to launch, 0.2 (c) to complete, 0.5 (o) to hand over between lanes;
- every work alone draws the whole bandwidth, so co-running launches split it by weight: each is worth `stream_weight`
  times the next below it of those that run together (decode over verify over prefill), so any two split it
  `stream_weight` to 1; with priority none they split it evenly.

Expected launches are written lane by lane: kind, x rows, start-end, and @ what a further column has. A request's
deliveries are [(time, tokens)]. Each scenario runs twice: through the event queue, and directly where nothing lies
between; both must give the schedule worked out here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from pdvsim.sim.config import Arch, Experiment, Hardware, Host, Server, Traffic
from pdvsim.sim.core import KINDS, Request
from pdvsim.sim.models.presets import MODELS
from pdvsim.sim.models.specs import ModelSpec
from pdvsim.sim.prices import costs
from pdvsim.sim.prices.links import LINKS, LinkSpec
from pdvsim.sim.records import LANES, Result
from pdvsim.sim.relevance import applicable
from pdvsim.sim.run import simulate
from pdvsim.sim.workload.lookup import FOUND_REFUSED

MS = 1e-3
NEAR = 1e-6  # of a millisecond: 1e-9 s

LAUNCH = re.compile(r"(\w+)(?: x(\d+))? ([\d.]+)-([\d.]+)(?: @(\d+))?")
Launch = tuple[Any, ...]  # lane, kind, rows, start_ms, end_ms, and further columns
Deliveries = list[tuple[float, int]]
Asked = tuple[float, int, int, dict[int, int]]  # arrival_ms, prompt, output, {output position: drafts accepted from it}
Run = Callable[..., Result]


def toy_model(name: str, intermediate: int, kv_heads: int = 0) -> ModelSpec:
    """A model without attention or vocabulary: 6 * intermediate bytes a forward, as many flops a token."""
    return ModelSpec(name, "llama", 1, 1, intermediate, heads=0, kv_heads=kv_heads, head_dim=1, vocab=0)


def write_profile(
    path: Path,
    draft_ms: tuple[float, float],
    target_ms: tuple[float, float],
    sharpness: float | None,
    kv_ms: float,
    contention: dict[str, Any],
) -> str:
    def fit(weights_ms: float, token_ms: float, kv_ms: float = 0.0) -> dict[str, Any]:
        forward = {"fixed_s": 0.0, "weights_s": weights_ms * MS, "token_s": token_ms * MS}
        forward |= {"head_weights_s": 0.0, "head_token_s": 0.0, "kv_s": kv_ms * MS, "pair_s": 0.0}
        return forward if sharpness is None else forward | {"sharpness": sharpness}

    profile = {
        "schema_version": 1, "name": "toy", "foundation": "made up",
        "gpu": {
            "name": "toy",
            "bandwidth_bytes_per_s": 1e9,  # below what any work asks: each alone draws all of it
            "flops_per_s": 1e17,  # arithmetic is free: only bandwidth is shared
            "memory_bytes": 1e12, "source": "made up", "measured": False,
        },
        "models": {
            "toy-draft": fit(*draft_ms), "toy-target": fit(*target_ms, kv_ms),
            "eagle3-toy-target": fit(*draft_ms) | {"fused_knots": [[0, 0.5 * MS], [1000, 1.5 * MS]]},
        },
        "host": {"launch_s": 0.1 * MS, "completion_s": 0.2 * MS, "handoff_s": 0.5 * MS}, "contention": contention,
    }  # fmt: skip
    path.write_text(json.dumps(profile))
    return str(path)


@pytest.fixture(params=[False, True], ids=["queued", "blocks"])
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs requests through an architecture on the toy GPU; `options` are fields of its settings or of contention."""
    monkeypatch.setitem(MODELS, "toy-draft", toy_model("toy-draft", 10**7))

    def runs(
        arch: Arch,
        asked: list[Asked],
        *,
        max_concurrency: int | None = None,
        draft_ms: tuple[float, float] = (1.0, 0.01),
        target_ms: tuple[float, float] = (10.0, 0.1),
        sharpness: float | None = 1.0,
        kv_ms: float = 0.0,
        kv_heads: int = 0,
        **options: Any,
    ) -> Result:
        def of(group: type) -> dict[str, Any]:
            return {field.name: options.pop(field.name) for field in fields(group) if field.name in options}

        monkeypatch.setitem(MODELS, "toy-target", toy_model("toy-target", 10**8, kv_heads))
        server = {"pair": "toy-draft:toy-target", "num_speculative_tokens": 2} | of(Server)
        hardware, host = {"kv_capacity_tokens": 10_000} | of(Hardware), of(Host)
        profile = write_profile(tmp_path / "toy.json", draft_ms, target_ms, sharpness, kv_ms, contention=options)
        requests = [
            Request(i, at * MS, prompt, output, bytes(accepted.get(p, 0) for p in range(output)))
            for i, (at, prompt, output, accepted) in enumerate(asked)
        ]
        if "link" in hardware:
            monkeypatch.setitem(LINKS, "made up", hardware["link"])  # type: ignore[misc]
            hardware["link"] = "made up"
        experiment = Experiment(
            arch, traffic=Traffic(num_prompts=len(requests), max_concurrency=max_concurrency),
            server=Server(**server), hardware=Hardware(profile=profile, **hardware), host=Host(**host),
        )  # fmt: skip
        return simulate(applicable(experiment), blocks=request.param, requests=requests)

    return runs


def events(result: Result, *more: str) -> list[Launch]:
    """What ran, by its end: lane, kind, rows, start and end in ms, and `more` columns."""
    columns = result.launches
    listed = [
        (LANES[lane], KINDS[kind], int(rows), start / MS, end / MS, *(int(x) for x in rest))
        for lane, kind, rows, start, end, *rest in zip(
            *(columns[name] for name in ("lane", "kind", "rows", "start_s", "end_s", *more)), strict=True
        )
    ]
    return sorted(listed, key=_by_end)


def expected(lanes: list[str]) -> list[Launch]:
    """Launches written lane by lane, by their end."""
    launches: list[Launch] = []
    for text in lanes:
        lane, _, listed = text.partition(": ")
        for launch in listed.split(", "):
            match = LAUNCH.fullmatch(launch)
            assert match, launch
            kind, rows, start, end, more = match.groups()
            launches.append((lane, kind, int(rows or 0), float(start), float(end), *([int(more)] if more else [])))
    return sorted(launches, key=_by_end)


def _by_end(launch: Launch) -> tuple[float, Launch]:
    return round(launch[4], 6), launch[:3]


def delivered(result: Result) -> list[Deliveries]:
    """Each request's deliveries as (ms, tokens)."""
    columns = result.deliveries
    lists: list[Deliveries] = [[] for _ in result.requests["id"]]
    for request, tokens, time in zip(columns["request"], columns["tokens"], columns["time_s"], strict=True):
        lists[request].append((time / MS, int(tokens)))
    return lists


def check(result: Result, lanes: list[str], deliveries: list[Deliveries], *more: str) -> None:
    """The schedule is the expected one, with a further column where `more` names it."""
    happened, launches = events(result, *more), expected(lanes)
    assert [e[:3] + e[5:] for e in happened] == [e[:3] + e[5:] for e in launches]
    for got, due in zip(happened, launches, strict=True):
        assert got[3:5] == pytest.approx(due[3:5], abs=NEAR), (got, due)
    for id, (received, due) in enumerate(zip(delivered(result), deliveries, strict=True)):
        assert [tokens for _, tokens in received] == [tokens for _, tokens in due], id
        assert [at for at, _ in received] == pytest.approx([at for at, _ in due], abs=NEAR), id
    # and a request's counts agree with its deliveries
    columns = result.requests
    assert columns["first_token_s"] / MS == pytest.approx([d[0][0] for d in deliveries], abs=NEAR)
    assert columns["finish_s"] / MS == pytest.approx([d[-1][0] for d in deliveries], abs=NEAR)
    assert columns["output_tokens"].tolist() == [sum(tokens for _, tokens in d) for d in deliveries]


def times_ms(result: Result, column: str) -> Any:
    return pytest.approx((result.requests[column] / MS).tolist(), abs=NEAR)


# the eight policies -----------------------------------------------------------------------------------------------


def test_autoregressive(run: Run) -> None:
    """One stream, one token per step for every running request; with a waiting prompt. Each cached token costs 0.01.

    0       R0 arrives: launch 0.1; its 100 tokens take 10 + 10 + 100 * 0.01 = 21 -> 21.1; completion -> 21.3.
    5       R1 arrives; the step under way is not disturbed.
    21.3    R0 decodes and R1's 200 tokens ride along: 201 new tokens 10 + 20.1, R0 reads 101 cached, R1 200:
            30.1 + 1.01 + 2 = 33.11; 21.4 -> 54.51; 54.71 both get a token.
    54.71   both decode: 10.2 + (101 + 1 + 200 + 1) * 0.01 = 13.23; 54.81 -> 68.04; 68.24: R0 has its three tokens.
    68.24   R1 alone: 10.1 + 202 * 0.01 = 12.12; 68.34 -> 80.46; 80.66.
    """
    check(run("autoregressive", [(0, 100, 3, {}), (5, 200, 3, {})], kv_ms=0.01), [
        "main: prefill 0.1-21.1, decode x1 21.4-54.51, decode x2 54.81-68.04, decode x1 68.34-80.46",
    ], [[(21.3, 1), (54.71, 1), (68.24, 1)], [(54.71, 1), (68.24, 1), (80.66, 1)]])  # fmt: skip


def test_baseline(run: Run) -> None:
    """Two workers at batch 1 on one stream; the third request, of one token, waits for a worker.

    0       worker A, R0: draft reads 0.1 -> 2.1, target (launched at 0.2) 2.1 -> 22.1; first token 22.3.
    4       worker B, R1 of 200 tokens, lines up: draft 3 ms 22.1 -> 25.1, target 30 ms -> 55.1; first token 55.3.
    6       R2 finds no worker.
    22.3    A: R0's round runs after R1's prompt: draft 2.02 -> 57.12, verify 10.3 -> 67.42; 67.62: both accepted.
    55.3    B: R1's round: draft 67.42 -> 69.44, verify -> 79.74; 79.94: one accepted, so 2 tokens and R1 is done.
    67.62   A: R0's drafter also reads the last draft: 2.03, 79.74 -> 81.77, verify -> 92.07; 92.27: none accepted.
    79.94   B takes R2: draft 92.07 -> 94.07, target -> 114.07; its only token at 114.27.
    92.27   A: draft 114.07 -> 116.09, verify -> 126.39; 126.59: one token is left of the two gained.
    """
    result = run("baseline", [(0, 100, 6, {1: 2, 4: 0, 5: 1}), (4, 200, 3, {1: 1}), (6, 100, 1, {})], num_workers=2)
    check(result, [
        "main: prefill 0.1-2.1, prefill 2.1-22.1, prefill 22.1-25.1, prefill 25.1-55.1, draft x1 55.1-57.12",
        "main: verify x1 57.12-67.42, draft x1 67.42-69.44, verify x1 69.44-79.74, draft x1 79.74-81.77",
        "main: verify x1 81.77-92.07, prefill 92.07-94.07, prefill 94.07-114.07, draft x1 114.07-116.09",
        "main: verify x1 116.09-126.39",
    ], [[(22.3, 1), (67.62, 3), (92.27, 1), (126.59, 1)], [(55.3, 1), (79.94, 2)], [(114.27, 1)]])  # fmt: skip
    assert times_ms(result, "admitted_s") == [0, 4, 79.94]
    assert result.requests["rounds"].tolist() == [3, 1, 0]
    assert result.requests["drafted"].tolist() == [6, 2, 0]
    assert result.requests["accepted"].tolist() == [3, 1, 0]


def test_colocated(run: Run) -> None:
    """One stream; each step drafts and verifies for all. The verify carries the waiting prompt, which the drafter
    reads in a forward of its own before its first step.

    0       R0: draft reads 0.1 -> 2.1, target -> 22.1; first token 22.3.
    22.3    R1's 200 tokens take the drafter 1 + 2, R0's drafts 2.02: 22.4 -> 27.42; the verify has 3 + 200 tokens:
            30.3 -> 57.72; 57.92: R0 gains 3, R1 its first.
    57.92   both, and R0's drafter catches up, which pads R1 too: (1 + 0.04) + 1.02 = 2.06, 58.02 -> 60.08; verify
            of 6 tokens 10.6 -> 70.68; 70.88: R0 gains 1, R1 2.
    70.88   both, nobody catches up: 2.04, 70.98 -> 73.02; verify -> 83.62; 83.82: one token was left of each.
    """
    check(run("colocated", [(0, 100, 6, {1: 2, 4: 0, 5: 1}), (10, 200, 4, {1: 1, 3: 2})]), [
        "main: prefill 0.1-2.1, prefill 2.1-22.1, draft x1 22.4-27.42, verify x1 27.42-57.72",
        "main: draft x2 58.02-60.08, verify x2 60.08-70.68, draft x2 70.98-73.02, verify x2 73.02-83.62",
    ], [[(22.3, 1), (57.92, 3), (70.88, 1), (83.82, 1)], [(57.92, 1), (70.88, 2), (83.82, 1)]])  # fmt: skip


def test_a_head_fuses_once_a_draft_and_reads_what_was_accepted_again(run: Run) -> None:
    """A head like the draft model, that also fuses hidden states of N tokens in 0.5 + N/1000: in the first forward of a
    draft, and where it reads a prompt. After a of its drafts were accepted that forward has a + 1 tokens.

    0       R0: the head reads 100 tokens in 2 + 0.6, 0.1 -> 2.7; the target 20 -> 22.7; first token 22.9.
    22.9    one token: fused 0.501, steps 1.01 + 1.01: 23.0 -> 25.521; verify 10.3 -> 35.821; 36.021: both accepted.
    36.021  three tokens: fused 0.503, steps 1.03 + 1.01: 36.121 -> 38.664; verify -> 48.964; 49.164: none accepted.
    49.164  one token: 2.521, 49.264 -> 51.785; verify -> 62.085; 62.285: one token is left of the two gained.
    """
    result = run("colocated", [(0, 100, 6, {1: 2, 4: 0, 5: 1})], pair="toy-draft:toy-target", drafter="eagle3")
    assert result.experiment.server.pair == "eagle3-toy-target:toy-target"
    check(result, [
        "main: prefill 0.1-2.7, prefill 2.7-22.7, draft x1 23-25.521, verify x1 25.521-35.821",
        "main: draft x1 36.121-38.664, verify x1 38.664-48.964, draft x1 49.264-51.785",
        "main: verify x1 51.785-62.085",
    ], [[(22.9, 1), (36.021, 3), (49.164, 1), (62.285, 1)]])  # fmt: skip


@pytest.fixture
def look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking up a row's drafts takes 0.4, however long its text, and finds only drafts that are accepted."""
    monkeypatch.setattr(costs, "LOOKUP_ROW_S", 0.4 * MS)
    monkeypatch.setattr(costs, "LOOKUP_TOKEN_S", 0.0)
    monkeypatch.setitem(FOUND_REFUSED, "sharegpt", 0.0)


def test_ngram_drafts_take_the_host_and_a_verify_has_what_was_found(run: Run, look_up: None) -> None:
    """The host takes 0.4 per row to look; R0 has drafts where one is accepted, R1 never. No drafter reads the prompts.

    0       both prompts in one forward of 200 tokens: 0.1 -> 30.1; first tokens 30.3.
    30.3    the host looks for both, 0.8 -> 31.1; R0 has 2 drafts and R1 none, so the verify has 3 + 1 tokens, 10.4:
            31.2 -> 41.6; 41.8: R0 gains 3, R1 one.
    41.8    looks -> 42.6 and finds nothing: a plain token each, 10.2: 42.7 -> 52.9; 53.1.
    53.1    looks -> 53.9; R0 again has 2: 54.0 -> 64.4; 64.6: of R0's two tokens one was left, R1 has its last.
    """
    result = run("colocated", [(0, 100, 6, {1: 2, 4: 0, 5: 1}), (0, 100, 4, {})], drafter="ngram")
    check(
        result, ["main: prefill 0.1-30.1 @200, verify x2 31.2-41.6 @4, decode x2 42.7-52.9 @2, verify x2 54-64.4 @4"],
        [[(30.3, 1), (41.8, 3), (53.1, 1), (64.6, 1)], [(30.3, 1), (41.8, 1), (53.1, 1), (64.6, 1)]], "tokens",
    )  # fmt: skip
    assert result.requests["drafted"].tolist() == [4, 0]
    assert result.requests["undrafted_rounds"].tolist() == [0, 2]
    assert times_ms(result, "draft_s") == [2.4, 2.4]


def test_pd(run: Run) -> None:
    """Prefill concurrent with an atomic decode lane. Weight 4: decode runs at 0.8, prefill at 0.2.

    0       R0: target 0.1 -> 20.1 (first token 20.3), draft 20.1 -> 22.1, completed 22.3, handed over 22.8.
    22.8    draft 22.9 -> 24.92, verify from 24.92 (launched at 23.0, after the draft).
    25      R1 of 10 tokens (target 11, draft 1.1) is launched, from 25.1 with the verify, which has 10.12 left:
            / 0.8 = 12.65 -> 37.75. R1 has 11 - 2.53 = 8.47 left.
    37.95   R0 gained 3. Until its draft is launched R1 is alone: 0.3, 8.17 left at 38.05.
            Catch-up draft 2.03 / 0.8 = 2.5375 -> 40.5875; verify 10.3 / 0.8 = 12.875 -> 53.4625; R1 does a quarter
            of that, (2.03 + 10.3) / 4 = 3.0825: 5.0875 left.
    53.6625 R0 gained 1. R1 alone 0.3: 4.7875. Draft 2.02 / 0.8 = 2.525: 53.7625 -> 56.2875; verify -> 69.1625;
            R1 12.32 / 4 = 3.08: 1.7075 left.
    69.3625 R0 gained 2. R1 alone 0.3: 1.4075. Draft 69.4625 -> 71.9875; R1 0.9025 left, / 0.2 = 4.5125 -> 76.5;
            first token 76.7. Its draft prompt 1.1 / 0.2 = 5.5: 76.5 -> 82.0, completed 82.2, handed over by 82.7.
            R0's verify did (82 - 71.9875) * 0.8 = 8.01 by 82.0; the last 2.29 alone -> 84.29.
    84.49   R0 gained 3 and R1 joins: draft of two rows with catch-up 2.06: 84.59 -> 86.65; verify 10.6 -> 97.25.
    97.45   R0 gains its last, R1 its last two.
    """
    check(run("pd", [(0, 100, 11, {1: 2, 4: 0, 5: 1, 7: 2, 10: 0}), (25, 10, 3, {1: 1})], stream_weight=4), [
        "prefill: prefill 0.1-20.1, prefill 20.1-22.1, prefill 25.1-76.5, prefill 76.5-82",
        "decode: draft x1 22.9-24.92, verify x1 24.92-37.75, draft x1 38.05-40.5875",
        "decode: verify x1 40.5875-53.4625, draft x1 53.7625-56.2875, verify x1 56.2875-69.1625",
        "decode: draft x1 69.4625-71.9875, verify x1 71.9875-84.29, draft x2 84.59-86.65",
        "decode: verify x2 86.65-97.25",
    ], [
        [(20.3, 1), (37.95, 3), (53.6625, 1), (69.3625, 2), (84.49, 3), (97.45, 1)],
        [(76.7, 1), (97.45, 2)],
    ])  # fmt: skip


PDV_ASKED: list[Asked] = [(0, 100, 9, {1: 2, 4: 0, 5: 1, 7: 2}), (24, 14, 3, {1: 1})]
# As `test_pdv` works it out: the same for every rule of gathering, since until 75.025 there is nothing to gather.
PDV_START = [
    "prefill: prefill 0.1-20.1, prefill 20.1-22.1, prefill 24.1-65.1, prefill 65.1-70.8",
    "decode: draft x1 22.9-25.125, draft x1 39.6-42.1375, draft x1 56.6125-59.1375, draft x1 71.6-74.125",
    "verify: verify x1 25.925-38.8, verify x1 42.9375-55.8125, verify x1 59.9375-74.43",
]


def test_pdv(run: Run) -> None:
    """Three lanes; verify takes what is there (`never` gathers).

    Weight 4: whichever two run together, the higher runs at 0.8 and takes 1.25 times as long as alone, and the lower
    does a quarter of what the higher does.

    0        R0 as in PD: first token 20.3, handed to decode 22.8; draft from 22.9.
    24       R1 of 14 tokens (target 11.4, draft 1.14), from 24.1. R0's draft has 0.82 left: * 1.25 -> 25.125; R1
             11.4 - 0.205 = 11.195 left. Draft completed 25.325, handed over 25.825, verify launched 25.925; R1 alone
             0.8: 10.395.
    25.925   verify 10.3 * 1.25 = 12.875 -> 38.8; R1 - 2.575 = 7.82. Verdict 39.0: 3 tokens; handed over 39.5,
             launched 39.6; R1 - 0.8 = 7.02.
    39.6     catch-up draft 2.03 * 1.25 = 2.5375 -> 42.1375; R1 - 0.5075 = 6.5125. c + o + h: R1 - 0.8 = 5.7125.
    42.9375  verify -> 55.8125; R1 - 2.575 = 3.1375. Verdict 56.0125: 1 token. c + o + h: R1 - 0.8 = 2.3375.
    56.6125  draft 2.02 * 1.25 = 2.525 -> 59.1375; R1 - 0.505 = 1.8325; c + o + h: R1 - 0.8 = 1.0325.
    59.9375  verify; R1's 1.0325 / 0.2 = 5.1625 -> 65.1, first token 65.3; the verify has 10.3 - 4.13 = 6.17 left.
    65.1     R1's draft prompt 1.14 / 0.2 = 5.7 -> 70.8; the verify 6.17 - 4.56 = 1.61. Completed 71.0, handed over
             71.5, R1's draft launched 71.6; the verify alone until then: 0.81 left.
    71.6     draft 2.525 -> 74.125; the verify 0.81 - 0.505 = 0.305 -> 74.43 alone.
    74.325   R1's draft completed; the hand-over keeps the host until 74.825; so R0's verdict comes not at 74.63 but at
             75.025: 2 tokens. R0's hand-over takes the host until 75.525, then R1's verify is launched 75.625, then
             R0's draft (asked at 75.525) 75.725.
    75.725   draft 2.525 -> 78.25; R1's verify 10.3 - 0.1 - 0.505 = 9.695 left -> 87.945. 88.145: R1 done.
    88.145   R0, drafted at 78.45, is verified: 88.245 -> 98.545; 98.745.
    """
    result = run("pdv", PDV_ASKED, verify_gather="never", stream_weight=4)
    check(
        result,
        [*PDV_START, "decode: draft x1 75.725-78.25", "verify: verify x1 75.625-87.945, verify x1 88.245-98.545"],
        [[(20.3, 1), (39.0, 3), (56.0125, 1), (75.025, 2), (98.745, 2)], [(65.3, 1), (88.145, 2)]],
    )
    # between draft and verify: three hand-overs of R0, then from 78.45 to 88.145; R1 from 74.325 to 75.025
    assert times_ms(result, "wait_s") == [3 * 0.5 + 9.695, 0.7]


def test_pdv_always_gathers(run: Run) -> None:
    """As `test_pdv` until R0's verdict at 75.025; then R1's draft waits for R0's, and both are verified together.

    R0 is handed over 75.525, drafted 75.625 -> 77.645 alone, completed 77.845, handed over 78.345.
    Verify of two rows 10.6: 78.445 -> 89.045; 89.245.
    """
    check(
        run("pdv", PDV_ASKED, verify_gather="always", stream_weight=4),
        [*PDV_START, "decode: draft x1 75.625-77.645", "verify: verify x2 78.445-89.045"],
        [[(20.3, 1), (39.0, 3), (56.0125, 1), (75.025, 2), (89.245, 2)], [(65.3, 1), (89.245, 2)]],
    )


def test_pdv_unified(run: Run) -> None:
    """One worker, three streams: each turn starts at most one prompt, then drafts, then verifies; weights as in PDV.

    The worker looks for first tokens when it has nothing to do, or at the end of its turn.

    0         R0: target 0.1 -> 20.1, first token 20.3; draft -> 22.1; 22.3: end of the turn.
    22.3      draft 22.4 -> 24.42, completed 24.62; verify 24.72 -> 35.02; 35.22: 3 tokens.
    30        R1 and R2, of 5 tokens each, have to wait for the end of the turn.
    35.22     R1's prompt starts (target ready 35.32), R0's draft is launched third: 35.52. R1 10.5 - 0.2 = 10.3.
              Catch-up draft 2.03 * 1.25 = 2.5375 -> 38.0575; R1 - 0.5075 = 9.7925; c + h = 0.3 alone: 9.4925.
    38.3575   verify 12.875 -> 51.2325; R1 - 2.575 = 6.9175. 51.4325: 1 token. c + h: R1 6.6175.
    51.5325   draft 2.02 * 1.25 = 2.525 -> 54.0575; R1 - 0.505 = 6.1125; c + h: 5.8125.
    54.3575   verify -> 67.2325; R1 3.2375. 67.4325: 1 token; c + h: R1 2.9375.
    67.5325   draft -> 70.0575; R1 2.4325; c + h: 2.1325.
    70.3575   verify; R1's 2.1325 / 0.2 = 10.6625 -> 81.02; the verify has 10.3 - 8.53 = 1.77 left, * 1.25 -> 83.2325;
              R1's draft prompt 1.05 - 0.4425 = 0.6075 -> 83.84.
    83.4325   end of the turn: R0's last token, R1's first. 84.04: R1 joins.
    84.04     R2's prompt starts (84.14); R1's draft 84.34, R2 10.3: 2.525 -> 86.865, R2 9.795; c + h: 9.495.
    87.165    verify -> 100.04; R2 - 2.575 = 6.92; 100.24: R1 done.
    100.04    R2 alone -> 106.96; 107.16: its only token, and the end: nobody waits for the drafter to read the prompt.
    """
    result = run("pdv-unified", [(0, 100, 7, {1: 2}), (30, 5, 3, {1: 1}), (30, 5, 1, {})], stream_weight=4)
    check(
        result,
        [
            "prefill: prefill 0.1-20.1, prefill 20.1-22.1, prefill 35.32-81.02, prefill 81.02-83.84",
            "prefill: prefill 84.14-106.96",
            "decode: draft x1 22.4-24.42, draft x1 35.52-38.0575, draft x1 51.5325-54.0575",
            "decode: draft x1 67.5325-70.0575, draft x1 84.34-86.865",
            "verify: verify x1 24.72-35.02, verify x1 38.3575-51.2325, verify x1 54.3575-67.2325",
            "verify: verify x1 70.3575-83.2325, verify x1 87.165-100.04",
        ],
        [[(20.3, 1), (35.22, 3), (51.4325, 1), (67.4325, 1), (83.4325, 1)], [(83.4325, 1), (100.24, 2)], [(107.16, 1)]],
    )
    assert times_ms(result, "admitted_s") == [0, 35.22, 84.04]


def test_pdv_hybrid(run: Run) -> None:
    """Threshold 1: R0 alone is drafted and verified on the decode lane, with R1 admitted it goes through the lanes.

    22.8      R0, atomic: draft 22.9 -> 24.92, verify -> 35.22; 35.42: 3 tokens.
    35.42     atomic: catch-up draft 35.52 -> 37.55, verify from 37.55.
    40        R1 of 5 tokens, from 40.1. A verify on the decode lane has decode's priority: it has 7.75 left,
              * 1.25 -> 49.7875; R1 10.5 - 1.9375 = 8.5625. 49.9875: 1 token.
    49.9875   two in flight: three lanes. R1 - 0.3; draft 50.0875, 2.02 * 1.25 -> 52.6125, R1 - 0.505 = 7.7575;
              completed, handed over, launched: R1 - 0.8 = 6.9575.
    53.4125   verify 10.3 / 0.8 -> 66.2875; R1 - 2.575 = 4.3825 -> 70.67 alone. 66.4875: R0's last token.
    70.67     R1: first token 70.87, draft prompt -> 71.72, completed 71.92, handed over 72.42.
    72.42     one in flight: atomic. Draft 72.52 -> 74.54, verify -> 84.84; 85.04.
    """
    check(
        run("pdv-hybrid", [(0, 100, 6, {1: 2, 4: 0, 5: 1}), (40, 5, 3, {1: 1})], hybrid_threshold=1, stream_weight=4),
        [
            "prefill: prefill 0.1-20.1, prefill 20.1-22.1, prefill 40.1-70.67, prefill 70.67-71.72",
            "decode: draft x1 22.9-24.92, verify x1 24.92-35.22, draft x1 35.52-37.55, verify x1 37.55-49.7875",
            "decode: draft x1 50.0875-52.6125, draft x1 72.52-74.54, verify x1 74.54-84.84",
            "verify: verify x1 53.4125-66.2875",
        ],
        [[(20.3, 1), (35.42, 3), (49.9875, 1), (66.4875, 1)], [(70.87, 1), (85.04, 2)]],
    )


# admission --------------------------------------------------------------------------------------------------------


def test_a_full_paged_cache_preempts_the_request_admitted_last(run: Run) -> None:
    """Five blocks of 16 tokens. Two prompts of 32 take two each, and R0's first step the fifth: none is left for R1's.

    0       64 tokens take 16.4: 0.1 -> 16.5; 16.7 both get their first token.
    16.7    33 tokens of R0 are three blocks. R1 gives its two up, and nobody is let in: R0 alone, 16.8 -> 26.9; 27.1.
    27.1    R1's 33 tokens, prompt and first token, are three blocks, and two are free. R0 27.2 -> 37.3; 37.5.
    37.5    R0 37.6 -> 47.7; 47.9 R0 has its four tokens and gives three blocks back.
    47.9    R1 reads 33 tokens in 13.3: 48 -> 61.3; 61.5 its second token.
    61.5    R1 decodes: 61.6 -> 71.7; 71.9. 72 -> 82.1; 82.3.
    """
    result = run("autoregressive", [(0, 32, 4, {}), (0, 32, 4, {})], kv_capacity_tokens=80)
    check(result, [
        "main: prefill 0.1-16.5 @64, decode x1 16.8-26.9 @1, decode x1 27.2-37.3 @1, decode x1 37.6-47.7 @1",
        "main: prefill 48-61.3 @33, decode x1 61.6-71.7 @1, decode x1 72-82.1 @1",
    ], [
        [(16.7, 1), (27.1, 1), (37.5, 1), (47.9, 1)],
        [(16.7, 1), (61.5, 1), (71.9, 1), (82.3, 1)],
    ], "tokens")  # fmt: skip
    assert times_ms(result, "admitted_s") == [0, 0]
    assert [result.requests[name].tolist() for name in ("preemptions", "resumptions", "recomputed_tokens")] == [
        [0, 1],
        [0, 1],
        [0, 32],
    ]
    assert result.meta["kv_peak_tokens"] == 80


def test_nobody_is_let_in_while_somebody_is_preempted(run: Run) -> None:
    """Four blocks, 32 tokens a forward. R1 is preempted, and the first stretch of it would fit again immediately.

    0       R0's 16 tokens and 16 of R1's 32: 13.2: 0.1 -> 13.3; 13.5 R0's first token.
    13.5    R0's 17 tokens are two blocks, R1's 32 as well: 17 tokens take 11.7: 13.6 -> 25.3; 25.5 a token each.
    25.5    33 tokens of R1 are three blocks: it gives its two up, and R0 goes on alone: 25.6 -> 35.7; 35.9.
    35.9    31 of R1's 33 tokens fit with R0's one: 36 -> 49.2; 49.4 R0 has its four tokens.
    49.4    The other two, 10.2: 49.5 -> 59.7; 59.9 the second token of R1, its last.
    """
    result = run("autoregressive", [(0, 16, 4, {}), (0, 32, 2, {})], max_num_batched_tokens=32, kv_capacity_tokens=64)
    check(result, [
        "main: prefill 0.1-13.3 @32, decode x1 13.6-25.3 @17, decode x1 25.6-35.7 @1, decode x1 36-49.2 @32",
        "main: prefill 49.5-59.7 @2",
    ], [[(13.5, 1), (25.5, 1), (35.9, 1), (49.4, 1)], [(25.5, 1), (59.9, 1)]], "tokens")  # fmt: skip
    assert result.requests["recomputed_tokens"].tolist() == [0, 32]


def test_bounded_decode_queue_of_pdv(run: Run) -> None:
    """With one request waiting to be drafted, prefill admits nobody. A slow drafter (30 + N/100), priority none.

    Concurrent launches get an equal share. A prompt of 100: target 20, draft 31; a draft of one row 60.02.

    0        R0 alone is admitted (100 tokens are a full forward): target 0.1 -> 20.1, first token 20.3, draft -> 51.1.
    51.3     R0 is queued for decode, so R1 is refused; decode takes R0 at 51.8 and opens admission.
    51.8     R0's draft launched 51.9, R1's target 52.0, R1's draft 52.1.
    52.0     R0's draft has 59.92 left. R1's target 20 at 1/2 -> 92.0, first token 92.2; its draft 31 at 1/2 -> 154.0.
             R0's draft has 59.92 - 20 - 31 = 8.92 left: alone -> 162.92.
    154.2    R1 is queued for decode, so R2 is refused.
    163.12   R0's draft completed, hand-over until 163.62. Decode takes R1 at 163.12 and opens admission. The host then
             launches R1's draft 163.72, R2's target 163.82, R2's draft 163.92, R0's verify 164.02.
    164.02   R1's draft has 60.02 - 0.1 - 0.1 = 59.82 left, R2's target 19.9. Three at 1/3: the verify 10.3 -> 194.92,
             verdict 195.12, R0 done. R1's draft 49.52, R2's target 9.6 left.
    194.92   at 1/2: R2's target -> 214.12; its only token 214.32. Its draft prompt, already launched, 31 -> 276.12.
             R1's draft 49.52 - 9.6 - 31 = 8.92 -> 285.04.
    285.24   R1 handed over 285.74, verify 285.84 -> 296.14; 296.34.
    """
    asked: list[Asked] = [(0, 100, 2, {}), (0, 100, 2, {}), (0, 100, 1, {})]
    limits = {"max_decode_queue": 1, "max_num_batched_tokens": 100}
    result = run("pdv", asked, verify_gather="never", priority="none", draft_ms=(30.0, 0.01), **limits)
    check(result, [
        "prefill: prefill 0.1-20.1, prefill 20.1-51.1, prefill 52-92, prefill 92-154, prefill 163.82-214.12",
        "prefill: prefill 214.12-276.12",
        "decode: draft x1 51.9-162.92, draft x1 163.72-285.04",
        "verify: verify x1 164.02-194.92, verify x1 285.84-296.14",
    ], [[(20.3, 1), (195.12, 1)], [(92.2, 1), (296.34, 1)], [(214.32, 1)]])  # fmt: skip
    assert times_ms(result, "admitted_s") == [0, 51.8, 163.12]


def test_chunked_prefill_in_colocated(run: Run) -> None:
    """103 tokens per step: R0's draft and bonus token take 3, so R1's prompt of 250 comes in 100, 100 and 50.

    22.3   R0 and 100: the drafter (1 + 1) + 2.02 = 4.02, 22.4 -> 26.42; verify 103 tokens 20.3 -> 46.72; 46.92.
    46.92  the same: 47.02 -> 51.04 -> 71.34; 71.54.
    71.54  R0 and 50: (1 + 0.5) + 2.02 = 3.52, 71.64 -> 75.16; verify 53 tokens 15.3 -> 90.46; 90.66: R0's last
           token, R1's first.
    90.66  R1 alone: 90.76 -> 92.78 -> 103.08; 103.28.
    """
    check(run("colocated", [(0, 100, 4, {}), (1, 250, 2, {})], max_num_batched_tokens=103), [
        "main: prefill 0.1-2.1, prefill 2.1-22.1, draft x1 22.4-26.42, verify x1 26.42-46.72",
        "main: draft x1 47.02-51.04, verify x1 51.04-71.34, draft x1 71.64-75.16, verify x1 75.16-90.46",
        "main: draft x1 90.76-92.78, verify x1 92.78-103.08",
    ], [[(22.3, 1), (46.92, 1), (71.54, 1), (90.66, 1)], [(90.66, 1), (103.28, 1)]])  # fmt: skip


def test_an_arrival_at_the_very_end_of_a_step_is_in_time_for_the_next(run: Run) -> None:
    """Steps of 1/128 s, to the last bit, and a host that costs nothing: R0 has its tokens at 1, 2 and 3 steps.

    R1 arrives within the third step, R2 at the instant of its end: one forward reads both prompts.
    """
    step = 1000 / 128
    free_host = dict.fromkeys(("launch_s", "completion_s", "handoff_s"), 0.0)
    asked: list[Asked] = [(0, 1, 3, {}), (2.5 * step, 1, 1, {}), (3 * step, 1, 1, {})]
    result = run("autoregressive", asked, target_ms=(step, 0.0), sharpness=None, **free_host)
    assert result.requests["arrival_s"].tolist() == [0, 2.5 / 128, 3 / 128]
    check(result, [
        f"main: prefill 0.0-{step}, decode x1 {step}-{2 * step}, decode x1 {2 * step}-{3 * step}",
        f"main: prefill {3 * step}-{4 * step}",
    ], [[(step, 1), (2 * step, 1), (3 * step, 1)], [(4 * step, 1)], [(4 * step, 1)]])  # fmt: skip


# R1's prompt of 5 tokens (target 10.5, draft 1.05) arrives while R0 drafts, from 22.9 on, with its verify next.
OVERLAP: list[Asked] = [(0, 100, 4, {1: 1, 3: 0}), (24, 5, 3, {1: 1})]
BEFORE = ["prefill: prefill 0.1-20.1, prefill 20.1-22.1"]


def test_preemptive_priority(run: Run) -> None:
    """Decode runs as if alone; R1's prompt moves only while the decode stream is empty.

    22.9   R0: draft -> 24.92, verify -> 35.22; 35.42: 2 tokens; R1, launched at 24.1, is held back.
    35.22  R1 starts and runs for 0.3: 10.2 left. R0's second round 35.52 -> 37.54 -> 47.84; 48.04: its last token.
    47.84  R1 10.2 -> 58.04, first token 58.24; draft prompt -> 59.09; completed 59.29, handed over 59.79.
    59.89  R1: draft -> 61.91, verify -> 72.21; 72.41.
    """
    check(run("pd", OVERLAP, priority="preemptive"), [
        *BEFORE,
        "decode: draft x1 22.9-24.92, verify x1 24.92-35.22, draft x1 35.52-37.54, verify x1 37.54-47.84",
        "decode: draft x1 59.89-61.91, verify x1 61.91-72.21",
        "prefill: prefill 35.22-58.04, prefill 58.04-59.09",
    ], [[(20.3, 1), (35.42, 2), (48.04, 1)], [(58.24, 1), (72.41, 2)]])  # fmt: skip


def test_serial_ablation(run: Run) -> None:
    """No overlap, first come first served: each work runs to its end before another begins to move.

    24.1   R1's prompt waits for the draft (-> 24.92), then precedes the verify, which came to the head of its
           stream at 24.92: 10.5 -> 35.42, first token 35.62. Then the verify -> 45.72; 45.92: 2 tokens.
    45.72  R1's draft prompt (at the head since 35.42) -> 46.77; completed 46.97. R0's draft, launched at 46.02,
           -> 48.79, its verify -> 59.09; 59.29: R0's last token. R1 was handed over at 47.47 and joins.
    59.29  R1: draft 59.39 -> 61.41, verify -> 71.71; 71.91.
    """
    check(run("pd", OVERLAP, priority="none", contention="serial"), [
        *BEFORE,
        "decode: draft x1 22.9-24.92, verify x1 35.42-45.72, draft x1 46.77-48.79, verify x1 48.79-59.09",
        "decode: draft x1 59.39-61.41, verify x1 61.41-71.71",
        "prefill: prefill 24.92-35.42, prefill 45.72-46.77",
    ], [[(20.3, 1), (45.92, 2), (59.29, 1)], [(35.62, 1), (71.91, 2)]])  # fmt: skip


LINK = LinkSpec(1 * MS, 8 / MS, "made up")  # a row's two drafts take 1 + 1 ms, as does a verdict
NO_TIME = LinkSpec(0.0, 1e14, "made up")
APART = ("prefill=1", "verify=1")
AHEAD = {"ahead_miss": "draft", "priority": "none", "place": APART, "link": NO_TIME}


def test_target_on_a_second_gpu(run: Run) -> None:
    """GPU 1 holds the target. A row's drafts (2 tokens of 4 bytes) and its verdict (8 bytes) take 2 ms between them.

    0      R0: target 0.1 -> 20.1 on GPU 1; draft 0.2 -> 2.2 on GPU 0. First token 20.3, hand-over 20.8.
    20.8   draft launched 20.9, verdict there 22.9 -> 24.92 on GPU 0; completed 25.12, handed over 25.62; verify
           launched 25.72, drafts there 27.72.
    26     R1 of 5 tokens: target 26.1 on GPU 1, draft 26.2 -> 27.25 on GPU 0. From 27.72 the target has 8.88 left: at
           1/2 -> 45.48; R0's verify 10.3 - 8.88 = 1.42 -> 46.9 alone.
    45.68  R1's first token, hand-over 46.18; draft launched 46.28, there 48.28 -> 50.3 on GPU 0.
    47.1   R0 gained 3; handed over 47.6, decode is busy.
    50.5   R1's draft completed, hand-over until 51; decode takes R0, its catch-up draft is launched 51.1, there 53.1 ->
           55.13; verify of R1 is launched next, 51.2, there 53.2 -> 63.5; 63.7: R1's last tokens.
    63.7   R0, drafted at 55.33, is verified: 63.8, there 65.8 -> 76.1; 76.3.
    """
    asked: list[Asked] = [(0, 100, 5, {1: 2, 4: 0}), (26, 5, 3, {1: 1})]
    result = run("pdv", asked, verify_gather="never", priority="none", place=APART, link=LINK)
    check(result, [
        "prefill: prefill 0.2-2.2 @0, prefill 0.1-20.1 @1, prefill 26.2-27.25 @0, prefill 26.1-45.48 @1",
        "decode: draft x1 22.9-24.92 @0, draft x1 48.28-50.3 @0, draft x1 53.1-55.13 @0",
        "verify: verify x1 27.72-46.9 @1, verify x1 53.2-63.5 @1, verify x1 65.8-76.1 @1",
    ], [[(20.3, 1), (47.1, 3), (76.3, 1)], [(45.68, 1), (63.7, 2)]], "gpu")  # fmt: skip
    assert result.meta["gpus"] == 2
    assert [way["bytes"] for way in result.meta["links"].values()] == [24, 24]


def test_two_gpus_read_prompts_for_one_that_decodes(run: Run) -> None:
    """GPUs 0 and 1 read for the target, GPU 2 drafts and verifies. A token's KV is 4 bytes, 0.1 ms on the link.

    0      R0: target 0.1 -> 20.1 on GPU 0; draft 0.2 -> 2.2 on GPU 2.
    1      R1: target 1.1 -> 16.1 on GPU 1, whose reader is free; draft after R0's on the stream, 2.2 -> 3.7.
    16.3   R1's first token; its 200 bytes of KV leave GPU 1, are in by 21.3 and there 22.3. Hand-over 16.8; draft 16.9
           -> 18.92, the verify waits for the KV: 22.3 -> 32.6; 32.8.
    20.3   R0's first token; its 400 bytes wait for GPU 2's way in: 21.3 -> 31.3, there 32.3. Decode is busy.
    32.8   draft of R0 32.9 -> 34.92 -> verify 45.22; 45.42.
    """
    asked, link = [(0, 100, 3, {1: 1}), (1, 50, 3, {1: 1})], LinkSpec(1 * MS, 40 / MS, "made up")
    result = run("pd", asked, priority="none", place=("prefill=0+1", "decode=2"), link=link, kv_heads=1)
    check(result, [
        "prefill: prefill 0.2-2.2 @2, prefill 2.2-3.7 @2, prefill 1.1-16.1 @1, prefill 0.1-20.1 @0",
        "decode: draft x1 16.9-18.92 @2, verify x1 22.3-32.6 @2, draft x1 32.9-34.92 @2",
        "decode: verify x1 34.92-45.22 @2",
    ], [[(20.3, 1), (45.42, 2)], [(16.3, 1), (32.8, 2)]], "gpu")  # fmt: skip
    ways = {"0->2": {"bytes": 400, "busy_s": 10 * MS}, "1->2": {"bytes": 200, "busy_s": 5 * MS}}
    assert result.meta["links"] == {way: pytest.approx(sent) for way, sent in ways.items()}


def test_drafting_ahead_as_a_chain(run: Run) -> None:
    """Target on GPU 1, a link that takes no time. Three more tokens are drafted while two are verified: 3.03 ms.

    20.8   draft 20.9 -> 22.92 on GPU 0, 23.12, handed over 23.62; verify 23.72 -> 34.02, ahead 23.82 -> 26.85.
    34.22  both accepted, and the target's own token as guessed: handed over until 34.72, verify 34.82 -> 45.12, ahead
           34.92 -> 37.95.
    45.32  both accepted, but not the guess: handed over 45.82, catch-up draft 45.92 -> 47.95, 48.15, handed over 48.65;
           verify 48.75 -> 59.05. Two tokens are missing: nothing is drafted ahead.
    59.25  none accepted: 59.75, draft 59.85 -> 61.87, 62.07, 62.57; verify 62.67 -> 72.97, 73.17.
    """
    check(run("pdv-ahead", [(0, 100, 9, {1: 3, 4: 2, 7: 0, 8: 0})], ahead_fan=0, **AHEAD), [
        "prefill: prefill 0.2-2.2 @0, prefill 0.1-20.1 @1",
        "decode: draft x1 20.9-22.92 @0, ahead x1 23.82-26.85 @0, ahead x1 34.92-37.95 @0",
        "decode: draft x1 45.92-47.95 @0, draft x1 59.85-61.87 @0",
        "verify: verify x1 23.72-34.02 @1, verify x1 34.82-45.12 @1, verify x1 48.75-59.05 @1",
        "verify: verify x1 62.67-72.97 @1",
    ], [[(20.3, 1), (34.22, 3), (45.32, 3), (59.25, 1), (73.17, 1)]], "gpu")  # fmt: skip


def test_drafting_ahead_for_every_outcome(run: Run) -> None:
    """As above, with one token guessed after each of 0, 1, 2 accepted: 3 rows, 3 steps of 1.03. Guesses hold.

    34.22  one of two accepted, and foreseen: verify 34.82 -> 45.12. Two tokens are missing: nothing is drafted ahead.
    45.32  none accepted: 45.82, draft 45.92 -> 47.94, 48.14, 48.64; verify 48.74 -> 59.04, 59.24.
    """
    check(run("pdv-ahead", [(0, 100, 5, {1: 1, 3: 0, 4: 0})], ahead_fan=1, ahead_exponent=10.0, **AHEAD), [
        "prefill: prefill 0.2-2.2 @0, prefill 0.1-20.1 @1",
        "decode: draft x1 20.9-22.92 @0, ahead x3 23.82-26.91 @0, draft x1 45.92-47.94 @0",
        "verify: verify x1 23.72-34.02 @1, verify x1 34.82-45.12 @1, verify x1 48.74-59.04 @1",
    ], [[(20.3, 1), (34.22, 2), (45.32, 1), (59.24, 1)]], "gpu")  # fmt: skip


# the host ---------------------------------------------------------------------------------------------------------


def test_idle_lane_notices_work_at_its_next_look(run: Run) -> None:
    """An idle lane looks every 1 ms from when it fell idle (and looking is free here).

    0.3    R0 arrives; prefill, idle since 0, looks at 1.0: 1.1 -> 21.1, first token 21.3; draft -> 23.1, 23.3.
    23.8   R0 handed over; decode, idle since 0, looks at 24.0: 24.1 -> 26.12 -> 36.42; 36.62.
    40.55  R1 arrives; prefill, idle since 23.3, looks at 41.3: 41.4 -> 61.4, first token 61.6; draft -> 63.4, 63.6.
    64.1   R1 handed over; decode, idle since 36.62, looks at 64.62: 64.72 -> 66.74 -> 77.04; 77.24.
    """
    check(run("pd", [(0.3, 100, 3, {1: 1}), (40.55, 100, 3, {1: 1})], idle_poll_s=1 * MS, idle_poll_cost_s=0.0), [
        "prefill: prefill 1.1-21.1, prefill 21.1-23.1, prefill 41.4-61.4, prefill 61.4-63.4",
        "decode: draft x1 24.1-26.12, verify x1 26.12-36.42, draft x1 64.72-66.74, verify x1 66.74-77.04",
    ], [[(21.3, 1), (36.62, 2)], [(61.6, 1), (77.24, 2)]])  # fmt: skip
