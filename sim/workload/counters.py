"""Acceptance from a file of a server: vLLM's counters of drafts and accepted tokens, or recorded rounds.

Counters give the acceptance of each draft position. Beyond the longest measured draft, the ratio of the last two
positions continues.

Counters do not contain the variation between requests, nor rounds in which an n-gram search found no draft.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from pdvsim.sim.limits import MAX_CONFIG_BYTES
from pdvsim.sim.models.names import Note
from pdvsim.sim.reading import parse_json, printable, quoted
from pdvsim.sim.workload.acceptance import LONGEST_RUN, expected_tokens
from pdvsim.sim.workload.datasets import bad, opened
from pdvsim.sim.workload.options import Acceptance
from pdvsim.sim.workload.own import number_of

POSITIONS = 8  # rates are extrapolated to this length, the longest draft that commands test
READ = (
    "vLLM's /metrics with vllm:spec_decode_num_drafts, a result of `vllm bench serve` with spec_decode_num_drafts, "
    "or recorded rounds, one JSON list of accepted counts per line"
)
COUNTER = re.compile(
    r"vllm:spec_decode_(num_drafts|num_draft_tokens|num_accepted_tokens|num_accepted_tokens_per_pos)(?:_total)?"
    r"(\{.*\})?\s+(\S+)"
)
POSITION = re.compile(r'[{,]\s*position="(\d{1,3})"')
UNEVEN = 0.98  # relative to the draft tokens with one draft length


def read_acceptance(path: str) -> Acceptance:
    """The acceptance in a file of any supported kind; a Note reports what was read.

    A ValueError of one line names the file and what is wrong with it.
    """
    with opened(path) as file:
        text = file.read(MAX_CONFIG_BYTES).lstrip()
    if text.startswith("["):
        return Acceptance(acceptance_trace=path)
    if not text.startswith("{"):
        return _by_position(path, *_of_metrics(path, text))
    try:
        result = parse_json(text)
    except ValueError:
        return Acceptance(acceptance_trace=path)  # responses, one per line; errors are reported when it is read
    if "spec_decode_num_drafts" not in result and isinstance(result.get("metrics"), dict):
        return Acceptance(acceptance_trace=path)
    return _by_position(path, *_of_result(path, result))


def _of_metrics(path: str, text: str) -> tuple[float, float, float, list[float]]:
    """Drafts, draft tokens, accepted tokens, and acceptance by position, from Prometheus text."""
    counts: dict[str, float] = defaultdict(float)  # of all engines of a server
    positions: dict[int, float] = defaultdict(float)
    for number, line in enumerate(text.splitlines(), 1):
        if not (counter := COUNTER.match(line.strip())):
            continue
        name, labels, value = counter.groups()
        count = _count(path, f"line {number}", value)
        if name != "num_accepted_tokens_per_pos":
            counts[name] += count
        elif position := POSITION.search(labels or ""):
            positions[int(position[1])] += count
    drafts = counts["num_drafts"]
    if not drafts > 0:
        raise bad(path, "", "has no count of drafts", READ)
    shares = [positions.get(at, 0.0) / drafts for at in range(len(positions))]
    return drafts, counts["num_draft_tokens"], counts["num_accepted_tokens"], shares


def _of_result(path: str, result: dict[str, Any]) -> tuple[float, float, float, list[float]]:
    """Return the same from a result of `vllm bench serve` or `pdvsim run`."""
    names = ("spec_decode_num_drafts", "spec_decode_draft_tokens", "spec_decode_accepted_tokens")
    drafts, tokens, accepted = (_count(path, name, result.get(name)) for name in names)
    if not drafts > 0:
        raise bad(path, "spec_decode_num_drafts", "is 0: nothing was drafted", READ)
    name = "spec_decode_per_position_acceptance_rates"
    rates = result.get(name) or []
    if not isinstance(rates, list):
        raise bad(path, name, f"is {quoted(rates)}", "a list of shares")
    return drafts, tokens, accepted, [_count(path, f"{name}, item {at}", rate) for at, rate in enumerate(rates)]


def _count(path: str, where: str, value: object) -> float:
    count = number_of(value)
    if not count >= 0:
        raise bad(path, where, f"is {quoted(value)}", READ)
    return count


def _by_position(path: str, drafts: float, tokens: float, accepted: float, shares: Sequence[float]) -> Acceptance:
    """The acceptance of these counts: by position, or one rate if only the totals are known."""
    length = len(shares) or round(min(tokens / drafts, LONGEST_RUN))
    if not length or max([accepted / drafts / length, *shares]) > 1:
        raise bad(path, "", "has inconsistent counts: more tokens accepted than drafted", READ)
    heading = f"{path}: {drafts:,.0f} drafts"
    if len(shares) < 2:
        from scipy.optimize import brentq

        gained = 1 + accepted / drafts
        rate = shares[0] if shares else brentq(lambda rate: expected_tokens(rate, length) - gained, 0, 1)
        warnings.warn(printable(f"{heading} of up to {length} tokens, acceptance rate {rate:.4g}"), Note, stacklevel=2)
        return Acceptance(acceptance_rate=round(rate, 4))
    rates = [round(min(shares[: at + 1]), 4) for at in range(length)]
    going_on = rates[-1] / rates[-2] if rates[-2] else 0.0
    text = f"{heading}, accepted by position {', '.join(f'{rate:.2f}' for rate in rates)}"
    if length < POSITIONS:
        text += f"; further positions: {going_on:.2f} times the one before"
    if tokens < UNEVEN * drafts * length:
        text += "; draft lengths varied, and positions that were not drafted count as rejected"
    warnings.warn(printable(text), Note, stacklevel=2)
    while len(rates) < POSITIONS:
        rates.append(round(rates[-1] * going_on, 4))
    return Acceptance(synthetic_acceptance_rates=tuple(rates))
