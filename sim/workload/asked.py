"""Acceptance as a command is asked for it: given, read from a file of the user's own server, recorded, or assumed.

Where nothing is given, it is what was recorded of the kind of drafter, or `Acceptance()`, which every output calls
assumed. A file holds vLLM's counters of drafts and accepted tokens, and says how often each draft position is accepted;
beyond the longest draft that was measured, the last position's share of the one before it goes on.

Not told by such counters: which requests are easy to draft for, and rounds for which an n-gram search found no draft.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from pdvsim.sim.hardware.names import Note
from pdvsim.sim.reading import parse_json, printable, quoted, read_text, said
from pdvsim.sim.workload.acceptance import LONGEST_RUN, expected_tokens
from pdvsim.sim.workload.datasets import bad, opened
from pdvsim.sim.workload.options import ACCEPTANCE_MODELS, Acceptance, Traffic
from pdvsim.sim.workload.own import read_requests

USUAL_DATA = "sharegpt"  # whose recorded acceptance is taken where the traffic is of another data set
POSITIONS = 8  # that a file's rates go on to, if it has fewer: the longest draft that commands try
READ = (
    "vLLM's /metrics with vllm:spec_decode_num_drafts, a result of `vllm bench serve` with spec_decode_num_drafts, "
    "or recorded rounds, one JSON list of accepted counts per line"
)
COUNTER = re.compile(
    r"vllm:spec_decode_(num_drafts|num_draft_tokens|num_accepted_tokens|num_accepted_tokens_per_pos)(?:_total)?"
    r"(\{.*\})?\s+(\S+)"
)
POSITION = re.compile(r'[{,]\s*position="(\d{1,3})"')
STEPS = 50  # of bisection
UNEVEN = 0.98  # of the draft tokens that drafts of one length would have


@dataclass(frozen=True)
class AskedAcceptance(Acceptance):
    """How often the target agrees with the draft."""

    acceptance_rate: float | None = None  # type: ignore[assignment]
    """Chance that one draft token is accepted (alpha); default: as recorded of the drafter, else 0.6, assumed."""
    acceptance_from: str | None = None
    """Your own: vLLM's /metrics, its bench result, or recorded rounds, in a file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.acceptance_from is not None and self._given:
            raise ValueError("--acceptance-from and the other acceptance options exclude each other")

    @property
    def _given(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(Acceptance)}
        return {name: value for name, value in values.items() if value not in (None, ())}

    @property
    def is_open(self) -> bool:
        """Whether nothing is given."""
        return not self._given and self.acceptance_from is None

    def asked(self, pair: str, traffic: Traffic) -> Acceptance:
        """What is given or read, or else what is usual for the drafter of a pair."""
        if self.is_open:
            return usual_acceptance(pair, traffic)
        if self.acceptance_from is None:
            return Acceptance(**self._given)
        found = read_acceptance(self.acceptance_from)
        if pair.startswith("ngram:") and found.acceptance_trace is None:
            raise ValueError(
                f"{self.acceptance_from} does not tell the acceptance of n-gram drafts: vLLM counts no round that "
                "found none; give recorded rounds, or --acceptance-model"
            )
        return found


def usual_acceptance(pair: str, traffic: Traffic) -> Acceptance:
    """What was recorded of the pair's kind of drafter, on that data set if it was; else what is assumed.

    A file of requests that has a column of acceptance rates says it better.
    """
    kind, data = drafter_name(pair), traffic.dataset_name
    names = [name for name in (f"{data}-{kind}", f"{USUAL_DATA}-{kind}") if name in ACCEPTANCE_MODELS]
    return Acceptance(acceptance_model=names[0]) if names and not has_rates(traffic) else Acceptance()


def drafter_name(pair: str) -> str:
    """Who drafts in a pair, in a word."""
    draft, _, target = pair.partition(":")
    return draft.removesuffix(f"-{target}")


def has_rates(traffic: Traffic) -> bool:
    """Whether the requests come from a file that has the acceptance rate of each."""
    if traffic.dataset_name != "custom":
        return False
    return read_requests(traffic.dataset_name, traffic.dataset_path or "", traffic.tokenizer).acceptance is not None


def read_acceptance(path: str) -> Acceptance:
    """The acceptance that a file tells, of whichever kind it is; a Note says what was read.

    A ValueError of one line names the file and what is wrong with it.
    """
    with opened(path) as file:
        first = file.read(1 << 16).lstrip()[:1]
    if first == "[":
        return Acceptance(acceptance_trace=path)
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise bad(path, "", f"cannot be read ({said(error)})", READ) from None
    if first != "{":
        return _by_position(path, *_of_metrics(path, text))
    try:
        result = parse_json(text)
    except ValueError:
        return Acceptance(acceptance_trace=path)  # responses, one a line: whatever is wrong is said when it is read
    if "spec_decode_num_drafts" not in result and isinstance(result.get("metrics"), dict):
        return Acceptance(acceptance_trace=path)
    return _by_position(path, *_of_result(path, result))


def _of_metrics(path: str, text: str) -> tuple[float, float, float, list[float]]:
    """Drafts, their tokens, those accepted, and the share accepted at each position: of Prometheus text."""
    counts: Counter[str] = Counter()
    positions: Counter[int] = Counter()
    for number, line in enumerate(text.splitlines(), 1):
        if not (found := COUNTER.match(line.strip())):
            continue
        name, labels, value = found.groups()
        count = _count(path, f"line {number}", value)
        if name != "num_accepted_tokens_per_pos":
            counts[name] += count  # type: ignore[assignment]  # of all engines of a server
        elif position := POSITION.search(labels or ""):
            positions[int(position[1])] += count  # type: ignore[assignment]
    drafts = counts["num_drafts"]
    if not drafts > 0:
        raise bad(path, "", "holds no count of drafts", READ)
    shares = [positions[at] / drafts for at in range(len(positions))]
    return drafts, counts["num_draft_tokens"], counts["num_accepted_tokens"], shares


def _of_result(path: str, result: dict[str, Any]) -> tuple[float, float, float, list[float]]:
    """The same of a result of `vllm bench serve`, or of `pdvsim run`."""
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
    try:
        count = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        count = math.nan
    if isinstance(value, bool) or not 0 <= count < math.inf:
        raise bad(path, where, f"is {quoted(value)}", READ)
    return count


def _by_position(path: str, drafts: float, tokens: float, accepted: float, shares: Sequence[float]) -> Acceptance:
    """The acceptance of these counts: by position, or as one rate where only the totals are known."""
    length = len(shares) or round(min(tokens / drafts, LONGEST_RUN))
    if not length or max([accepted / drafts / length, *shares]) > 1:
        raise bad(path, "", "holds counts that do not fit together: more is accepted than drafted", READ)
    found = f"{path}: {drafts:,.0f} drafts"
    if len(shares) < 2:
        rate = round(shares[0] if shares else _rate(accepted / drafts, length), 4)
        _note(f"{found} of up to {length} tokens, acceptance rate {rate:g}")
        return Acceptance(acceptance_rate=rate)
    rates = [round(min(shares[: at + 1]), 4) for at in range(length)]
    going_on = rates[-1] / rates[-2] if rates[-2] else 0.0
    text = f"{found}, accepted by position {', '.join(f'{rate:.2f}' for rate in rates)}"
    if length < POSITIONS:
        text += f"; longer drafts go on at {going_on:.2f} of the position before"
    if tokens < UNEVEN * drafts * length:
        text += "; drafts were of several lengths, and positions that were not drafted count as not accepted"
    _note(text)
    while len(rates) < POSITIONS:
        rates.append(round(rates[-1] * going_on, 4))
    return Acceptance(synthetic_acceptance_rates=tuple(rates))


def _rate(accepted: float, k: int) -> float:
    """The rate at which a round of k draft tokens has so many accepted, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, k) - 1 < accepted else (low, middle)
    return low


def _note(text: str) -> None:
    warnings.warn(printable(text), Note, stacklevel=2)
