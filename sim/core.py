"""The nouns of a run: requests, launches and where they run. No logic beyond derived sizes.

Units are in the names: `_s` seconds, `_bytes` bytes, `tokens` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

Role = Literal["draft", "target"]
Kind = Literal["prefill", "draft", "verify", "decode", "ahead"]
ServingEngine = Literal["pdvsim", "vllm", "sglang", "trtllm"]
Priority = Literal["none", "stream", "dynamic", "preemptive", "partition"]  # of lanes on one GPU
Contention = Literal["fluid", "serial", "max"]  # how streams share a GPU
DrafterKind = Literal["model", "pard", "eagle3", "p-eagle", "dflash", "dspark", "mtp", "ngram", "suffix", "none"]
LOOKED_UP: tuple[DrafterKind, ...] = ("ngram", "suffix")  # by the host, in tokens: no model drafts

# what a prompt consists of, as (end in tokens, number of the text): the last text goes on through the answer. A number
# stands for a text and for all that comes before it; requests with the same number share their tokens up to its end
Chain = tuple[tuple[int, int], ...]
ENDLESS = 1 << 40  # end of a chain's last text

KINDS: tuple[Kind, ...] = ("prefill", "draft", "verify", "decode", "ahead")


@dataclass(init=False, eq=False)  # made by the million: its defaults are the class's own
class RequestState:
    """The progress of a request. Only its policy and its batch write it."""

    prefilled: int = 0  # of the tokens to read, those already in the KV cache
    context: int = 0  # all tokens in the KV cache: the last one delivered enters it with the next forward
    emitted: int = 0  # output tokens delivered
    k: int = 0  # drafts waiting for verification
    left_out: int = 0  # drafts beyond these, which the verify leaves out
    missed: bool = False  # the host looked for drafts, and found none
    # tokens the drafter has yet to read: the last draft after full acceptance, or plain decoding's; a head reads
    # accepted drafts again, with the target's hidden states
    drafter_lag: int = 0
    drafter_cache_gap: int = 0  # of its cached tokens, the last that the drafter's cache does not have
    held_tokens: int = 0  # of the KV cache
    pinned: bool = False  # a launch of it is under way: it keeps what it holds
    entered: bool = False  # a launch has carried its prompt, or a part of it
    prefill_worker: int = 0  # of the workers that read prompts, the one that reads its
    drafter: int = -1  # of several GPUs that draft, the one that drafts for it
    ready_s: float = -1.0  # when its current wait or stage began
    last_delivery_s: float = -1.0  # when its tokens of the last round were delivered


@dataclass(init=False, eq=False)
class RequestUsage:
    """What a request took: with what was asked, the columns of `records.REQUEST_DTYPES`."""

    replica: int = 0
    rounds: int = 0  # forwards of the target after the prompt
    drafts: int = 0  # of these, rounds with draft tokens to verify
    drafted: int = 0  # draft tokens verified
    accepted: int = 0
    refused: int = 0  # at most one per round: tokens after the first refused one do not count
    undrafted_rounds: int = 0  # rounds without drafts, in a verify with rows that had some
    ahead_tokens: int = 0  # that were drafted ahead of verdicts, in all branches, with the guesses they begin with
    ahead_used: int = 0  # of these, verified tokens; the others were dropped
    preemptions: int = 0
    resumptions: int = 0  # readings to the end after a preemption; each gives the next token, as a prompt's does
    recomputed_tokens: int = 0  # that left the KV cache with a preemption
    num_cached_tokens: int = -1  # of the prompt, found cached at its first admission; -1: not looked for
    admitted_s: float = -1.0  # its first launch
    first_token_s: float = -1.0
    finish_s: float = -1.0
    # where its time went
    prefill_s: float = 0.0  # the target reading the prompt, and after a preemption all tokens so far
    draft_s: float = 0.0
    wait_s: float = 0.0  # drafted, in the queue for verification
    verify_s: float = 0.0


@dataclass(slots=True, eq=False)
class DrawnStreams:
    """Acceptance streams that were drawn together, and what is worked out for all of them when one is needed."""

    runs: list[bytes]
    prompt_tokens: list[int]
    rounds: dict[Any, Any] = field(default_factory=dict)  # as `machine.paths` keeps them


@dataclass(slots=True, eq=False)
class Request:
    """One request: what was asked and its acceptance stream; where it stands; and what it took.

    `accept_runs[p]` is the number of consecutive drafts the target would accept from output position `p` on, so a round
    of `k` drafts at `p` accepts `min(accept_runs[p], k)`. It is drawn before the run: every architecture meets the same
    coins.
    """

    id: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    accept_runs: bytes
    chain: Chain = ()  # by which its blocks are known; empty: it shares nothing
    think_s: float = 0.0  # after the answer to the turn before
    session: int = -1  # conversation that it is a turn of; -1: none
    turn: int = 0  # of that conversation, from 0
    state: RequestState = field(default_factory=RequestState)
    taken: RequestUsage = field(default_factory=RequestUsage)
    drawn: DrawnStreams | None = None  # with others, of which it is number `place`
    place: int = 0
    forecast: Any = None  # of its batch, while that has its state (`machine.forecast`)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return the state, as of now, that a forecast has taken."""
            if name == "state" and self.forecast is not None:
                return self.forecast.state_of(self)
            raise AttributeError(f"a Request has no {name}")

    @property
    def to_read(self) -> int:
        """Tokens to read before it decodes: the prompt, and after a preemption what has been delivered as well."""
        return self.prompt_tokens + self.state.emitted

    def evict(self) -> None:
        """Reset what is cached: its tokens leave the KV cache, those delivered stay delivered."""
        state = self.state
        self.taken.preemptions += 1
        self.taken.recomputed_tokens += state.context or state.prefilled
        state.prefilled = state.context = state.drafter_lag = state.k = state.left_out = state.drafter_cache_gap = 0

    def __repr__(self) -> str:
        return f"Request({self.id}, {self.prompt_tokens}->{self.state.emitted}/{self.output_tokens})"


class Placement(NamedTuple):
    """The GPUs of each part: the target where it reads prompts, the drafter, the target where it decodes."""

    prefill: tuple[int, ...] = (0,)
    draft: tuple[int, ...] = (0,)
    verify: int = 0

    @property
    def gpus(self) -> int:
        """Number of GPUs of a server."""
        return max(self.used) + 1

    @property
    def used(self) -> set[int]:
        """Numbers of the GPUs that have a part on them."""
        return {*self.prefill, *self.draft, self.verify}

    @property
    def apart(self) -> bool:
        """Whether drafts come from another GPU than the target's."""
        return self.draft != (self.verify,)


class Chunk(NamedTuple):
    """A stretch of what one request has to read: `tokens` new ones after `start` that are cached."""

    request: Request
    start: int
    tokens: int
    as_row: bool = False  # the last token of a prompt that was prefilled elsewhere, computed as a row that decodes
