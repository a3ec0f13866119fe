"""What a run will ask of the device, worked out before it starts: slots, pages, graphs, and bytes.

A request holds a slot from its first forward to its end, and pages as its tokens come; preempted, it gives back its
pages and keeps the slot, where its tokens are. A run that fits at the start fits to its end: the policy's KV cache
counts the same pages and never gives out more than there are. It also decides which prefixes are cached; here the pages
of cached blocks are mapped into the page tables of all requests that have them in common.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from pdvsim.realrun.engine.arch import ModelArchitecture
from pdvsim.realrun.engine.buckets import CHUNK_BUCKETS, ROW_BUCKETS, most_prompts, packed_sizes
from pdvsim.realrun.engine.cache import HEADROOM, PAGE, RING, SCRATCH_PAGES, Sequences
from pdvsim.realrun.engine.engine import DraftShape, ForwardShape, LaunchShape
from pdvsim.realrun.engine.graphs import PromptChunk, Ticket
from pdvsim.realrun.engine.head import states_width
from pdvsim.sim.assembly import reuse_of
from pdvsim.sim.config import Arch, Experiment, Server
from pdvsim.sim.core import Request, Role
from pdvsim.sim.machine.kv import KvCache, capacity_tokens
from pdvsim.sim.machine.prefix import Reuse, block_hashes
from pdvsim.sim.models.presets import HEADS
from pdvsim.sim.models.specs import ModelSpec
from pdvsim.sim.policies import policy_of
from pdvsim.sim.policies.ahead import FANS, Lookahead

LaneRole = tuple[str, Role]

CATCH_UP_TOKENS = 256  # that a drafter reads in one forward after plain decoding, at least
SLOT_ROUNDING = 64
CATCH_UP_ROWS = 4  # that one forward of the drafter catches up
WORKSPACE_BYTES = 2 * 2**30  # a GPU's libraries, graphs and allocator


def places(arch: Arch) -> list[LaneRole]:
    """Which model runs on which lane."""
    policy = policy_of(arch)
    lanes: list[LaneRole] = [(policy.prefill_lane, "target"), (policy.verify_lane, "target")]
    if policy.speculates:
        lanes += [(policy.prefill_lane, "draft"), (policy.draft_lane, "draft")]
    if policy.atomic_rounds:
        lanes.append((policy.draft_lane, "target"))
    return list(dict.fromkeys(lanes))


class PagedKv(KvCache):
    """The policy's KV cache over real pages: what a request gives up is free again, or stays cached.

    Slots are handed out in turn, so that each rests as long as it can.
    """

    def __init__(
        self, capacity_tokens: int, lookahead: int, paged: bool, sequences: Sequences, reuse: Reuse | None = None
    ) -> None:
        super().__init__(capacity_tokens, lookahead, paged, reuse)
        self.slots: dict[int, int] = {}  # by the number of the request that holds it
        self.early: Ticket | None = None  # a draft that may still write to what is given up from now on
        self._count, self._width = sequences.slots, sequences.pages.shape[1]
        self._free = deque(range(self._count))
        self._free_pages = deque(range(SCRATCH_PAGES, sequences.pool))
        self._pages: list[list[int]] = [[] for _ in range(self._count)]  # by slot
        self._named = [0] * self._count  # of a slot's pages, the first ones that are named blocks
        self._cached: set[int] = set()  # pages of named blocks
        self._given_up: deque[tuple[Ticket, list[int], list[int]]] = deque()  # slots and pages, until it is over

    def slots_of(self, requests: Sequence[Request]) -> list[int]:
        """The slots that requests hold."""
        slots = self.slots
        return [slots[request.id] for request in requests]

    def take_slot(self, request: Request) -> int:
        """Give a request the slot that it holds to its end."""
        assert request.id not in self.slots, f"request {request.id} has a slot"
        self._reclaim()
        assert self._free, f"more than {self._count} requests in flight"
        slot = self.slots[request.id] = self._free.popleft()
        return slot

    def release_slot(self, request: Request) -> None:
        """Take back a request's slot, which must have no pages left."""
        slot = self.slots.pop(request.id)
        assert not self._pages[slot], f"request {request.id} still holds pages"
        self._give_up([slot], [])

    def grown(self, slots: Sequence[int], tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Give slots the pages they lack for their first `tokens` tokens: (place in the page table, page) of each."""
        self.evict()  # which frees the pages of cached blocks that others have been given
        self._reclaim()
        new: list[tuple[int, int]] = []
        for slot, wanted in zip(slots, tokens, strict=True):
            pages = self._pages[slot]
            while len(pages) * PAGE < wanted:
                page = self._free_pages.popleft()
                new.append((slot * self._width + len(pages), page))
                pages.append(page)
        return new

    def shared(self, request: Request) -> tuple[int, list[int]]:
        """Give a request's slot the cached blocks that it names: their place in the page table, and their pages."""
        slot, names = self._unnumbered(request)
        pages, first = self.prefixes.pages(names), self._named[slot]
        self._named[slot] = last = first + len(pages)
        self._give_up([], self._pages[slot][first:last])
        self._pages[slot][first:last] = pages
        return slot * self._width + first, pages

    def number(self, request: Request) -> None:
        """The other blocks that a request names are at pages of its own."""
        slot, names = self._unnumbered(request)
        if names:
            pages = self._pages[slot][self._named[slot] : self._inside[request]]
            self._named[slot] = self._inside[request]
            self._cached.update(pages)
            self.prefixes.number(names, pages)

    def _unnumbered(self, request: Request) -> tuple[int, list[int]]:
        """Return the slot of a request, and the hashes of its named blocks without a page."""
        slot = self.slots[request.id]
        return slot, block_hashes(request.chain, self._named[slot], self._inside[request])

    def _keep(self, request: Request, reuse: Reuse) -> None:
        super()._keep(request, reuse)
        if self._inside[request]:  # with those of the answer by now
            self.shared(request)
            self.number(request)

    def release(self, request: Request) -> None:
        """Take back a request's pages but for named blocks; it keeps its slot."""
        super().release(request)
        slot = self.slots.get(request.id)
        if slot is not None:
            self._give_up([], self._pages[slot][self._named[slot] :])
            self._pages[slot], self._named[slot] = [], 0

    def forget(self, blocks: int) -> list[int]:
        evicted = super().forget(blocks)
        pages = self.prefixes.reclaim(evicted)
        self._cached.difference_update(pages)
        self._give_up([], pages)
        return evicted

    def _give_up(self, slots: list[int], pages: list[int]) -> None:
        if self.early is not None and not self.early.done():
            self._given_up.append((self.early, slots, pages))
        else:
            self._free.extend(slots)
            self._free_pages.extend(pages)

    def _reclaim(self) -> None:
        """Take back what no draft can write to any more; wait for one where nothing else is left."""
        given_up = self._given_up
        while given_up and (given_up[0][0].done() or not self._free or not self._free_pages):
            draft, slots, pages = given_up.popleft()
            draft.collect()
            self._free.extend(slots)
            self._free_pages.extend(pages)

    def check_integrity(self) -> None:
        """Every slot is free or held once, and every page is free, cached, or held once."""
        super().check_integrity()
        resting = [(slots, pages) for _, slots, pages in self._given_up]
        slots = [*self._free, *self.slots.values(), *(slot for given, _ in resting for slot in given)]
        assert sorted(slots) == list(range(self._count))
        own = (pages[named:] for pages, named in zip(self._pages, self._named, strict=True))
        held = [*own, *(given for _, given in resting)]
        pages = sorted([*self._free_pages, *self._cached, *(page for some in held for page in some)])
        assert pages == list(range(SCRATCH_PAGES, SCRATCH_PAGES + len(pages)))
        shared = (pages[:named] for pages, named in zip(self._pages, self._named, strict=True))
        assert self._cached.issuperset(page for some in shared for page in some)


def most_branches(server: Server) -> int:
    """The most rows that one request has in a draft ahead."""
    fan = max(FANS) if server.ahead_fan is None else server.ahead_fan
    return Lookahead(fan, True).branches(server.longest_draft)


def buckets_for(buckets: Sequence[int], most: int) -> tuple[int, ...]:
    """The buckets up to the first that holds `most`, doubled from the last on where none does."""
    sizes = list(buckets)
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return tuple(s for i, s in enumerate(sizes) if i == 0 or sizes[i - 1] < most)


@dataclass(frozen=True)
class Needs:
    """The sizes of everything a run may launch."""

    arch: Arch
    slots: int  # requests in flight
    capacity: int  # positions of a slot
    pages: int  # of every slot's caches together
    resumes: bool  # requests may be preempted, and read again with what they had put out
    rows: int  # largest batch
    draft_lengths: tuple[int, ...]
    prompt_tokens: tuple[int, int]  # least and most in one forward
    prompts: int  # most of them in one forward
    splits_from: int | None  # least tokens at which prompts are cut; None: never
    batched_tokens: int  # rows and prompts of a mixed forward share this many
    branches: int = 0  # most rows of a request in a draft ahead of its verdict; 0: none
    rereads: bool = False  # the drafter reads what was accepted again
    looks_up: bool = False  # the host drafts, where it finds a draft
    packs: bool = False  # verifies take unlike numbers of drafts of their rows
    leaves_out: bool = False  # some verifies take none

    @classmethod
    def of(cls, experiment: Experiment, requests: Sequence[Request], pages: int | None = None) -> Needs:
        """The needs of a run with `pages` pages; default: all that its requests may use."""
        server, arch = experiment.server, experiment.base_arch
        policy, asked = policy_of(arch), experiment.traffic.max_concurrency or len(requests)
        slots = min(policy_of(experiment.arch).most_in_flight(server), len(requests), asked)
        rows = 1 if policy.workers == "requests" else min(server.max_num_seqs, slots)
        if not experiment.speculates:
            lengths: tuple[int, ...] = (0,)
        elif server.controller == "table":
            lengths = tuple(sorted({max(1, k) for _, k in server.draft_table}))
        elif not server.varies_length:
            lengths = (server.num_speculative_tokens,)
        else:
            least, most = server.draft_range
            lengths = tuple(range(least, most + 1))
        longest = max(request.prompt_tokens + request.output_tokens for request in requests)
        capacity = -(-(longest + HEADROOM) // SLOT_ROUNDING) * SLOT_ROUNDING
        wanted = slots * capacity // PAGE
        reuses = reuse_of(experiment) is not None and any(request.chain for request in requests)
        if reuses:  # all that may be cached
            wanted = max(wanted, sum(-(-(r.prompt_tokens + r.output_tokens) // PAGE) for r in requests))
        held = experiment.hardware.kv_capacity_tokens or wanted * PAGE
        resumes = experiment.paged and min(held, (pages or wanted) * PAGE) < slots * longest
        prompts = [request.prompt_tokens for request in requests]
        if resumes:
            prompts += [1, longest]
        if reuses:
            prompts.append(1)  # left to read after a hit
        most = least = server.max_num_batched_tokens
        if policy.in_steps():
            least = max(1, most - rows * (max(lengths) + 1))
        together = 1 if policy.workers != "lanes" else min(server.max_prompts_per_forward or slots, slots)
        splits = together * max(prompts) > least
        return cls(
            arch=arch,
            slots=slots,
            capacity=capacity,
            pages=min(pages or wanted, wanted),
            resumes=resumes,
            rows=rows,
            draft_lengths=lengths,
            prompt_tokens=(1 if splits else min(prompts), min(most, together * max(prompts))),
            prompts=together,
            splits_from=least if max(prompts) > least else None,
            batched_tokens=most,
            branches=most_branches(server) if policy.drafts_ahead and max(lengths) else 0,
            rereads=server.drafted_by in (*HEADS, "pard"),
            looks_up=server.drafted_by == "ngram" and max(lengths) > 0,
            packs=server.controller == "adaptive-verification" and max(lengths) > 0,
            leaves_out=server.controller in ("adaptive-verification", "table") and max(lengths) > 0,
        )

    def covers(self, other: Needs) -> bool:
        """Return whether what is ready for these needs is ready for the others; with fewer pages admission waits."""
        alike = ("arch", "batched_tokens", "rereads", "looks_up", "packs", "leaves_out")
        sizes = ("slots", "capacity", "rows", "branches", "prompts", "resumes")
        return (
            all(getattr(self, name) == getattr(other, name) for name in alike)
            and all(getattr(self, name) >= getattr(other, name) for name in sizes)
            and all(set(self.shapes(place)) >= set(other.shapes(place)) for place in places(self.arch))
        )

    @property
    def verify_lengths(self) -> list[int]:
        """Drafts of a verify's rows; a search may find none, and none may be worth verifying."""
        return sorted({*self.draft_lengths, *([0] if self.looks_up or self.leaves_out else [])})

    def _packed(self, rows: int, k: int) -> list[int]:
        """Tokens that the layers may compute in a verify; 0: all."""
        return [0, *(packed_sizes(rows, k + 1) if self.packs and k else [])]

    @property
    def row_buckets(self) -> tuple[int, ...]:
        return buckets_for(ROW_BUCKETS, self.rows)

    @property
    def draft_buckets(self) -> tuple[int, ...]:
        """Buckets of the drafter's rows: more rows where it drafts ahead."""
        return buckets_for(ROW_BUCKETS, self.rows * max(1, self.branches))

    @property
    def chunk_buckets(self) -> tuple[int, ...]:
        most = self._most_tokens
        return buckets_for(CHUNK_BUCKETS, max(most, CATCH_UP_TOKENS) if self.catches_up else most)

    @property
    def _most_tokens(self) -> int:
        """Most prompt tokens that a forward must have room for; short prompts need room for their number."""
        sizes = (size for size in CHUNK_BUCKETS if most_prompts(size) >= self.prompts)
        return max(self.prompt_tokens[1], next(sizes, CHUNK_BUCKETS[-1]))

    @property
    def catches_up(self) -> bool:
        """Return whether the drafter may lag, for example over plain rounds."""
        if self.looks_up:
            return False
        plain = policy_of(self.arch).plain_rounds and max(self.draft_lengths) > 0
        return plain or min(self.draft_lengths) == 0 < max(self.draft_lengths)

    def shapes(self, place: LaneRole) -> list[LaunchShape]:
        """The graphs that one model on one lane will need, the largest first: later ones fit into its memory."""
        lane, role = place
        shapes: set[LaunchShape] = set()
        if lane in ("prefill", "main"):
            shapes.update(self._prompts(role))
        if lane != "prefill":
            shapes.update(self._drafts() if role == "draft" else self._verifies(lane))
        return sorted(shapes, key=_size, reverse=True)

    def _chunks(self) -> list[int]:
        return [b for b in buckets_for(self.chunk_buckets, self._most_tokens) if b >= self.prompt_tokens[0]]

    def _prompts(self, role: Role) -> Iterator[LaunchShape]:
        if role == "draft":  # which may also read cached tokens that only the target has
            yield from (ForwardShape(0, 0, chunk) for chunk in self.chunk_buckets if chunk >= self.prompt_tokens[0])
            return
        for chunk in self._chunks():
            if self._unfinished(chunk):
                yield ForwardShape(0, 0, chunk, False)
            yield ForwardShape(0, 0, chunk, True)

    def _unfinished(self, chunk: int) -> bool:
        """Return whether a forward of `chunk` prompt tokens may end no prompt: only a prompt that is cut fills it."""
        return self.splits_from is not None and chunk >= self.splits_from

    def _drafts(self) -> Iterator[LaunchShape]:
        for rows in self.row_buckets:
            for k in self.draft_lengths:
                widths = range(1, k + 2) if self.rereads else (1, 2)
                yield from (DraftShape(rows, k, width) for width in widths if k)
        if self.branches:
            for rows in self.draft_buckets:
                for k in self.draft_lengths:
                    if k:
                        yield DraftShape(rows, k + 1)
        if self.catches_up:
            for chunk in self.chunk_buckets:
                yield ForwardShape(0, 0, chunk, False)

    def _verifies(self, lane: str) -> Iterator[LaunchShape]:
        policy = policy_of(self.arch)
        plain = policy.plain_rounds and (lane == policy.draft_lane or not policy.atomic_rounds)
        lengths = {0, *self.draft_lengths} if plain else set(self.verify_lengths)
        for k in sorted(lengths):
            for rows in self.row_buckets:
                yield from (ForwardShape(rows, k + 1, packed=packed) for packed in self._packed(rows, k))
        if policy.in_steps():
            yield from self._mixed()

    def _mixed(self) -> Iterator[LaunchShape]:
        for k in self.verify_lengths:
            for fewer, rows in zip((0, *self.row_buckets), self.row_buckets, strict=False):
                room = self.batched_tokens - (fewer + 1) * (k + 1)
                for smaller, chunk in zip((0, *self._chunks()), self._chunks(), strict=False):
                    if room > smaller and fewer + 1 < self.slots:  # the prompt's request is not among the rows
                        ends = (True, False) if self._unfinished(chunk) else (True,)
                        for packed in self._packed(rows, k):
                            yield from (ForwardShape(rows, k + 1, chunk, end, packed) for end in ends)


def _size(shape: LaunchShape) -> tuple[int, int, int]:
    if isinstance(shape, DraftShape):
        return shape.rows * shape.width, shape.steps, 0
    computed = shape.packed or shape.rows * shape.tokens_per_row
    return computed + shape.chunk, shape.chunk, int(shape.emit)


def packed(chunks: Sequence[PromptChunk], most_tokens: int) -> Iterator[list[PromptChunk]]:
    """Chunks in groups that one forward takes; one that is too long is cut."""
    group: list[PromptChunk] = []
    room = most_tokens
    for chunk in chunks:
        start, left = chunk.start, chunk.tokens
        while left:
            if not room or len(group) == CATCH_UP_ROWS:
                yield group
                group, room = [], most_tokens
            tokens = min(left, room)
            group.append(PromptChunk(chunk.slot, start, tokens))
            start, left, room = start + tokens, left - tokens, room - tokens
    if group:
        yield group


def available_bytes(device: torch.device, utilization: float) -> float:
    """Memory that a run may take."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return min(float(free), total * utilization) - WORKSPACE_BYTES
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) * utilization


def copied_bytes(specs: Iterable[ModelSpec]) -> int:
    """Weights that the engine has beyond a model's own: a tied head is a copy."""
    return sum(spec.tied_embeddings * spec.head_params * spec.dtype_bytes for spec in specs)


def forward_bytes(arch: ModelArchitecture, needs: Needs, item: int) -> float:
    """Room for the largest forward: its widest activations twice over, and its logits."""
    verified = needs.rows * max(max(needs.draft_lengths) + 1, needs.branches)
    taken = arch.spec.experts.per_token if arch.spec.experts else 1
    widest = taken * (2 * arch.mlp_width + arch.spec.hidden) + arch.qkv_width + arch.spec.hidden
    return 2.0 * item * ((needs.prompt_tokens[1] + verified) * widest + (verified + 4) * arch.spec.vocab)


def pages_that_fit(
    models: dict[Role, ModelArchitecture], needs: Needs, item: int, room: float, loaded: Collection[Role] = ()
) -> int:
    """Return the needed pages that `room` bytes hold; a ValueError with what to lower if no request fits.

    With fewer pages admission waits, as with any full KV cache. `loaded`: roles whose weights are on the device.
    """
    specs = {role: replace(arch.spec, dtype_bytes=item) for role, arch in models.items()}
    there = [spec for role, spec in specs.items() if role in loaded]
    room += sum(spec.weight_bytes for spec in there) + copied_bytes(there)  # which is theirs already
    work = sum(forward_bytes(models[role], needs, item) for _, role in places(needs.arch) if role in models)
    if "draft" in models and models["draft"].spec.is_head:
        ring_tokens = (needs.slots * (1 + needs.resumes) + 1) * RING + needs.chunk_buckets[-1]
        work += ring_tokens * states_width(models["draft"]) * item
    all_specs = [*specs.values()]
    work += copied_bytes(all_specs)
    addressed = (2**31 - 1) // PAGE // max(spec.kv_heads * spec.head_dim for spec in all_specs)
    pages = min(addressed, capacity_tokens(room - work, all_specs) // PAGE)
    fits = min(needs.pages, pages - 3 * needs.slots - SCRATCH_PAGES)
    if fits * PAGE >= needs.capacity:
        return fits
    weights, cache = (sum(getattr(s, name) for s in all_specs) for name in ("weight_bytes", "kv_bytes_per_token"))
    raise ValueError(
        f"out of memory before the start: weights {weights / 1e9:.1f} GB, {needs.capacity} tokens of KV cache for one "
        f"request {cache * needs.capacity / 1e9:.1f} GB and {work / 1e9:.1f} GB to work with are more than the "
        f"{room / 1e9:.1f} GB there are: lower --input-len, --output-len or --max-num-batched-tokens"
    )
