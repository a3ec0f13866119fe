"""The real GPU as a policy's `Device`: lanes are CUDA streams, launches are graph replays, verdicts are read back.

The host launches and polls; it never waits for the device. The simulator's accounting writes the records, so that they
mean the same. Start and end of a launch are device times around its graphs, relative to the origin of the clock.

Drafts ahead of a verdict are run only for their time: every branch uses the slot of its request, concurrently with its
verify. That is correct with pinned verdicts, where tokens have no meaning.

A head prefills after its target, because it needs the target's hidden states. If a policy launches the head first, its
prefill becomes part of the target's launch and of its time.

The host looks up n-gram drafts in the tokens of each request, which are read back for it, and sends them with the
verify. With pinned verdicts it is also pinned which rows have a draft; the search is still made, for its time.

Differs from the simulator: a draft that must catch up on more than one token does so in prompt forwards of four rows
each; the simulator prices one forward for all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from simpy.events import Event
from torch import Tensor

from pdvsim.common.progress import Progress
from pdvsim.realrun.clock import WallClock
from pdvsim.realrun.engine.batch import MAX_ROW_TOKENS
from pdvsim.realrun.engine.cache import SCRATCH_PAGES, Sequences
from pdvsim.realrun.engine.engine import Engine
from pdvsim.realrun.engine.graphs import MOST_WAIT_S, GraphLane, LaunchOutcome, PromptChunk, Ticket, wait_for
from pdvsim.realrun.engine.head import Head, states_width
from pdvsim.realrun.engine.model import Transformer
from pdvsim.realrun.engine.weights import Weights
from pdvsim.realrun.memory import LaneRole, Needs, PagedKv, packed, places
from pdvsim.realrun.ngram import History
from pdvsim.realrun.streams import open_lanes
from pdvsim.realrun.telemetry import Telemetry
from pdvsim.sim.config import Experiment, Server
from pdvsim.sim.core import Chunk, Request, Role
from pdvsim.sim.machine.batch import Batch, Launch
from pdvsim.sim.machine.ledger import Ledger
from pdvsim.sim.machine.node import Device
from pdvsim.sim.prices.costs import NOTHING, Price
from pdvsim.sim.prices.host import SimulatedHost
from pdvsim.sim.records import Columns
from pdvsim.sim.workload.lookup import Lookup

Pins = Callable[[Launch], "Sequence[int] | None"]

ANCHOR_S = 10.0  # CUDA gives times between events as 32-bit milliseconds: a near origin keeps them exact
WARM_UPS = 5


def sized(model: Transformer, capacity: int, vocab: int) -> Transformer:
    """The same weights for contexts of `capacity`, without the tokens from `vocab` on: padding, in models that differ.

    A token of the one model must be a token of the other, and families pad their vocabularies differently.
    """
    old = model.weights
    if isinstance(model, Head):  # its tokens are its target's
        return Head(model.arch, old, capacity)
    arch = replace(model.arch, spec=replace(model.arch.spec, vocab=vocab))
    same = Transformer(arch, Weights(old.embedding[:vocab], old.layers, old.head[:vocab]), capacity)
    same.overlap = model.overlap
    return same


@dataclass
class ServingRig:
    """Models, lanes and their graphs, ready for every run that needs no more than `needs`."""

    needs: Needs
    server: Server
    lanes: dict[LaneRole, GraphLane]
    models: dict[Role, Transformer]
    sequences: Sequences
    warm_launches: Columns = field(default_factory=dict)  # of the warm-up
    pace: dict[str, Any] = field(default_factory=dict)  # of this machine, as its records have it

    @classmethod
    def build(cls, experiment: Experiment, models: dict[Role, Transformer], needs: Needs, quiet: bool) -> ServingRig:
        """Capture everything and run it once."""
        vocab = min(model.arch.spec.vocab for model in models.values() if not isinstance(model, Head))
        models = {role: sized(model, needs.capacity, vocab) for role, model in models.items()}
        # who is preempted keeps its slot; counted by tokens, a request may have begun one page more
        slots, pool = needs.slots * (1 + needs.resumes), SCRATCH_PAGES + needs.pages + needs.slots
        if experiment.server.async_scheduling:  # an early draft writes further ahead, also for rows that have left
            slots, pool = slots + needs.rows, pool + 2 * needs.slots
        sequences = Sequences(slots, needs.capacity, models["target"].device, pool)
        rows, chunks = needs.row_buckets, needs.chunk_buckets
        if isinstance(head := models.get("draft"), Head):
            head.read_from(models["target"])
            sequences.keep_states(states_width(head.arch), chunks[-1], head.dtype)
        engines = {
            role: Engine(
                model,
                sequences,
                row_buckets=needs.draft_buckets if role == "draft" else rows,
                chunk_buckets=chunks,
                offered=max(needs.draft_lengths) if needs.looks_up else 0,
                packs=max(needs.draft_lengths) + 1 if needs.packs and role == "target" else 0,
            )
            for role, model in models.items()
        }
        lanes_of = tuple(place for place in places(experiment.base_arch) if place[1] in engines)
        lanes = open_lanes(engines, lanes_of, experiment.server)
        wanted = [(lane, shape) for place, lane in lanes.items() for shape in needs.shapes(place)]
        with Progress(len(wanted), "graphs", quiet) as progress:
            for i, (lane, shape) in enumerate(wanted):
                lane.prepare([shape])
                progress.update(i + 1)
        rig = cls(needs, experiment.server, lanes, models, sequences)
        rig.warm_up()
        return rig

    def warm_up(self) -> None:
        """Replay every graph once, which uploads it, and go through the host's own paths."""
        k = self.needs.draft_lengths[-1]
        for lane in self.lanes.values():
            if (streams := lane.streams) is not None:
                for priority in (*streams.by_priority, streams.priority):
                    streams.switch(priority)
                    with lane.on_stream():
                        for graph, _ in lane.graphs.values():
                            graph.replay()
        for (name, role), lane in self.lanes.items():
            for _ in range(WARM_UPS):
                if name == "prefill":
                    lane.prefill([PromptChunk(0, 0, self.needs.prompt_tokens[0], role == "target")]).outcome()
                elif role == "draft":
                    lane.draft([0], k).outcome()
                else:
                    lane.verify([0], k, pins=[0]).outcome()
        self.sequences.tokens.zero_()
        self.sequences.length.fill_(2)
        if self.sequences.device.type == "cuda":
            torch.cuda.synchronize()

    def serves(self, server: Server, needs: Needs) -> bool:
        """Return whether a run with these settings and needs finds everything ready."""
        early = bool(self.server.async_scheduling) >= bool(server.async_scheduling)
        return self.server.priority == server.priority and early and self.needs.covers(needs)

    @property
    def graphs(self) -> int:
        return sum(len(graphs) for lane in self.lanes.values() for graphs in lane.graphs_by_priority.values())


@dataclass(slots=True, eq=False)
class Flight:
    """A launch that the host has not completed yet."""

    launch: Launch
    tickets: list[Ticket]
    done: Event
    span_s: tuple[float, float]  # by the host's clock, where the device has none
    price: Price
    before: list[Flight] = field(default_factory=list)  # unwatched launches ahead of it on the same stream


class Lookups:
    """The host's own copy of every request's tokens, and the drafts for the next verify from a search in it."""

    def __init__(self, prompts: dict[int, list[int]], lookup: Lookup | None) -> None:
        self._held = {id: History(prompt) for id, prompt in prompts.items()}
        self._lookup = lookup  # None: whether the search matched
        self.offers: dict[int, list[int]] = {}

    def look(self, row: Request, k: int) -> None:
        """Search for a draft of k tokens: the row has as many as there are, or as it is pinned."""
        drafts = self._held[row.id].drafts(k)
        if self._lookup is not None:
            drafts = [*drafts, *[0] * (k - len(drafts))][: self._lookup.length(row, k)]
        self.offers[row.id] = drafts
        row.state.k, row.state.missed = len(drafts), not drafts

    def note(self, launch: Launch, outcome: LaunchOutcome) -> None:
        """Tokens of a launch that is over."""
        for row, tokens in zip(launch.rows, outcome.rows, strict=True):
            self._held[row.id].extend(tokens)
        for chunk, first in zip(launch.chunks, outcome.first, strict=True):
            if first is not None:
                self._held[chunk.request.id].extend([first])

    def continue_with(self, request: Request, turn: Request, tokens: int) -> None:
        """A conversation's next turn begins with the tokens of the last."""
        self._held[turn.id].begin_like(self._held[request.id], tokens)

    def forget(self, request: Request) -> None:
        """A request has all its tokens."""
        del self._held[request.id]
        self.offers.pop(request.id, None)


class CudaGPU(Device):
    """One device that runs what a policy launches; on the CPU a launch runs immediately."""

    def __init__(
        self,
        env: WallClock,
        host: SimulatedHost,
        lanes: dict[LaneRole, GraphLane],
        kv: PagedKv,
        prompts: dict[int, Tensor],
        ledger: Ledger,
        pins: Pins,
        telemetry: Telemetry,
        lookups: Lookups | None = None,
        verify_lengths: Sequence[int] = (),
    ) -> None:
        self.lookups, self.verify_lengths = lookups, verify_lengths
        self.env, self.host = env, host
        self.lanes, self.kv, self.prompts = lanes, kv, prompts
        self.ledger, self.pins, self.telemetry = ledger, pins, telemetry
        self._under_way: dict[str, deque[Flight]] = {lane: deque() for lane, _ in lanes}
        self._queues = list(self._under_way.values())
        self._unwatched: dict[str, list[Flight]] = {lane: [] for lane, _ in lanes}
        self._unrecorded: deque[Flight] = deque()
        self._anchors: list[tuple[torch.cuda.Event, float]] = []
        drafters = [lane.engine.model for (_, role), lane in lanes.items() if role == "draft"]
        self._heads = any(isinstance(model, Head) for model in drafters)
        parallel = any(model.arch.spec.parallel for model in drafters)  # whose mask tokens take half of a row's
        self._most_first_tokens = MAX_ROW_TOKENS // 2 + 1 if parallel else MAX_ROW_TOKENS if self._heads else 2
        self._last_read: dict[str, list[PromptChunk]] = {}  # by lane, the chunks of the target's last launch
        self._unread_by_head: dict[str, list[PromptChunk]] = {}  # by lane
        for lane in lanes.values():
            lane.timing = lane.gpu

    def begin(self) -> None:
        """Lay the device's time over the clock's, which has just started."""
        lane = next(iter(self.lanes.values()))
        if lane.gpu:
            torch.cuda.synchronize(lane.engine.device)
            event = torch.cuda.Event(enable_timing=True)
            asked = self.env.now
            event.record(lane.stream)
            wait_for(event)
            origin = (event, (asked + self.env.now) / 2)
            self._anchors = [origin, origin]

    # what a policy asks ------------------------------------------------------------------------------------------

    def launch(self, launch: Launch) -> Event:
        """Put a launch on its lane's stream; the event's value is the verdict."""
        done, asked = Event(self.env), self.env.now
        if self.lookups is not None and launch.role == "draft":
            for row in launch.rows:
                self.lookups.look(row, launch.steps)
            spent_s = self.env.now - asked
            for row in launch.rows:
                row.taken.draft_s += spent_s
            return self.env.at(self.env.now, done) if launch.watched else done
        launch = replace(launch, rows=Batch(launch.rows))  # the policy's batch may change before the ledger is written
        tickets = self._submit(launch)
        if not tickets:  # a head's prompt, which is read with the target's
            return done
        # the device is at work by now: from here on the host's time is free
        flight = Flight(launch, tickets, done, (asked, self.env.now), self._price(launch))
        if launch.watched:
            flight.before, self._unwatched[launch.lane] = self._unwatched[launch.lane], []
            self._under_way[launch.lane].append(flight)
        else:
            self._unwatched[launch.lane].append(flight)
        return done

    def continue_with(self, request: Request, turn: Request, tokens: int) -> None:
        """A conversation's next turn begins with the tokens of the last, its answer included."""
        slot = self.kv.slots[request.id]
        lane = next(iter(self.lanes.values()))  # the one that puts prompts in their slots
        with lane.on_stream():
            self.prompts[turn.id][:tokens].copy_(lane.engine.sequences.tokens[slot, :tokens])
        if self.lookups is not None:
            self.lookups.continue_with(request, turn, tokens)

    # launching ---------------------------------------------------------------------------------------------------

    def _submit(self, launch: Launch) -> list[Ticket]:
        lane = self.lanes[launch.lane, launch.role]
        if lane.streams is not None and len(lane.streams.by_priority) > 1:
            lane.streams.switch(launch.priority)
        chunks = [self._chunk(chunk, lane, launch.role) for chunk in launch.chunks]
        if chunks and self._heads and launch.role == "draft" and self._last_read.get(launch.lane) != chunks:
            self._unread_by_head[launch.lane], chunks = chunks, []
        slots = self.kv.slots_of(launch.rows)
        more = launch.tokens if launch.role == "target" else launch.steps + 1
        tokens = [row.state.context + more for row in launch.rows]
        if launch.kind == "ahead" or launch.early:  # the verdict may come before it, with all that is being verified
            tokens = [row.state.context + row.state.k + 1 + more for row in launch.rows]
        lane.new_pages += self.kv.grown(slots, tokens)
        for chunk, stretch in zip(
            chunks, launch.chunks, strict=False
        ):  # in order: one may share what another reads here
            place, cached = self.kv.shared(stretch.request)
            if cached:
                with lane.on_stream():
                    lane.engine.sequences.turn(place, cached)
            lane.new_pages += self.kv.grown([chunk.slot], [chunk.start + chunk.tokens])
            self.kv.number(stretch.request)
        if launch.role == "draft":
            return self._draft(launch, lane, slots, chunks)
        if slots:
            limits = [row.state.k for row in launch.rows]
            drafts, offers = launch.tokens - 1, []
            if self.lookups is not None and drafts:  # graphs are of whole lengths, of which some rows have less
                drafts = min(k for k in self.verify_lengths if k >= drafts)
                offers = [self.lookups.offers[row.id] if row.state.k else [] for row in launch.rows]
            ticket = lane.verify(slots, drafts, limits=limits, pins=self.pins(launch), chunks=chunks, offers=offers)
        else:
            ticket = lane.prefill(chunks)
        return [ticket, *self._read_along(launch.lane, chunks)]

    def _read_along(self, name: str, chunks: list[PromptChunk]) -> list[Ticket]:
        """Have a head read what the target has just been launched to read, if it is to."""
        if not self._heads or not chunks:
            return []
        self._last_read[name] = read = [replace(chunk, final=False) for chunk in chunks]
        if self._unread_by_head.get(name) != read:
            return []
        return [self.lanes[name, "draft"].prefill(self._unread_by_head.pop(name))]

    def _draft(self, launch: Launch, lane: GraphLane, slots: list[int], chunks: list[PromptChunk]) -> list[Ticket]:
        tickets = self._read_prompts(lane, chunks)
        if launch.kind == "ahead":
            return [lane.draft(slots, launch.steps)]
        if launch.early:
            self.kv.early = lane.draft(slots, launch.steps, width=launch.tokens)
            return [self.kv.early]
        if slots:
            lagging = [
                # the newest token is fed by the draft itself
                PromptChunk(
                    slot, row.prompt_tokens + row.state.emitted - 1 - row.state.drafter_lag, row.state.drafter_lag
                )
                for slot, row in zip(slots, launch.rows, strict=True)
                if row.state.drafter_lag >= self._most_first_tokens
            ]
            catch_up = max(
                [row.state.drafter_lag for row in launch.rows if row.state.drafter_lag < self._most_first_tokens],
                default=0,
            )
            tickets += [lane.prefill(group) for group in packed(lagging, lane.engine.chunk_buckets[-1])]
            tickets.append(lane.draft(slots, launch.steps, width=1 + catch_up))
        return tickets

    def _read_prompts(self, lane: GraphLane, chunks: list[PromptChunk]) -> list[Ticket]:
        """Prompts that the drafter reads: in one forward, unless cached tokens that it lacks make them too many."""
        most = lane.engine.chunk_buckets[-1]
        if sum(chunk.tokens for chunk in chunks) > most:
            return [lane.prefill(group) for group in packed(chunks, most)]
        return [lane.prefill(chunks)] if chunks else []

    def _chunk(self, chunk: Chunk, lane: GraphLane, role: Role) -> PromptChunk:
        request = chunk.request
        slot = self.kv.slots.get(request.id)
        if slot is None:
            slot, prompt = self.kv.take_slot(request), self.prompts[request.id]
            with lane.on_stream():
                lane.engine.sequences.tokens[slot, : len(prompt)].copy_(prompt, non_blocking=True)
        final = role == "target" and chunk.start + chunk.tokens == request.to_read
        return PromptChunk(slot, chunk.start, chunk.tokens, final)

    def _price(self, launch: Launch) -> Price:
        if launch.role in self.ledger.models:
            return self.ledger.price(launch)
        launch.context = sum(row.state.context for row in launch.rows)
        return NOTHING.at(0)

    # seeing it through -------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Trigger the events of finished launches; returns whether any is still running."""
        busy = False
        for queue in self._queues:
            while queue and queue[0].tickets[-1].done():
                self._complete(queue.popleft())
            busy = busy or bool(queue)
        return busy

    def _complete(self, flight: Flight) -> None:
        launch = flight.launch
        verdict: Sequence[int] | None = None
        if launch.role == "target":
            verdict = flight.tickets[0].accepted() if launch.rows else []
            if self.lookups is not None:
                self.lookups.note(launch, flight.tickets[0].outcome())
        self.env.at(self.env.now, flight.done, verdict)
        self._unrecorded.extend(flight.before)
        self._unrecorded.append(flight)

    def rest(self) -> None:
        """Update the accounting while the device is busy."""
        if self._unrecorded:
            self._note(self._unrecorded.popleft())
            return
        now = self.env.now
        for queue in self._queues:
            if queue and now - queue[0].span_s[1] > MOST_WAIT_S:
                raise TimeoutError(f"the GPU has not finished a launch within {MOST_WAIT_S:g} s")
        self.telemetry.sample_if_due(now)

    def flush(self) -> None:
        """Wait for the device and update the accounting; launches that were not completed are left out."""
        for lane in self.lanes.values():
            if lane.stream is not None:
                wait_for(lane.stream.record_event())
        while self._unrecorded:
            self._note(self._unrecorded.popleft())

    def _note(self, flight: Flight) -> None:
        start_s, end_s = flight.span_s
        first, last = flight.tickets[0].span, flight.tickets[-1].span
        if first is not None and last is not None:
            anchor, anchor_s = self._anchors[0]
            start_s = anchor_s + anchor.elapsed_time(first[0]) / 1000
            end_s = anchor_s + anchor.elapsed_time(last[1]) / 1000
            if end_s - self._anchors[1][1] > ANCHOR_S:
                self._anchors = [self._anchors[1], (last[1], end_s)]
        self.ledger.note(flight.launch, start_s, end_s, flight.price)
