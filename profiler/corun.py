# mypy: disable-error-code="no-untyped-call"
# (torch leaves events untyped.)
"""Co-running drafts, verifies and prefills: two engines over shared sequences, each kind of launch on its own lane.

Each launch is first timed alone on its lane. Then the members of a group are launched repeatedly with full queues, and
the start and end of every launch are recorded. Members have their own slots. On the CPU lanes take
turns: the same code, no overlap.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic, perf_counter
from typing import Any

import numpy as np
import torch

from pdvsim.profiler import grid, overlap
from pdvsim.profiler.grid import GridPoint
from pdvsim.profiler.hostcost import host_costs
from pdvsim.profiler.parts import Part
from pdvsim.profiler.rig import CAPACITY, QUICK, Effort, Launcher, pages_a_slot, sample, settle, usable_bytes
from pdvsim.realrun.engine.arch import ModelArchitecture
from pdvsim.realrun.engine.cache import PAGE, SCRATCH_PAGES, Sequences
from pdvsim.realrun.engine.engine import Engine, LaunchShape
from pdvsim.realrun.engine.graphs import GraphLane, Ticket
from pdvsim.realrun.engine.model import Transformer

CONTEXT = 512
AWAY, LONG, FAR = 2000, 3000, 6000
STEPS = 4
PLACE = {"draft": 0, "verify": 1, "decode": 1, "mixed": 1, "prefill": 2, "read": 2}  # whose slots a kind uses
PROMPT_SLOTS = 8
MAX_ROWS = 64
QUEUED_PER_LANE = 3
RUNS = 6  # launches of the slowest member a group should last for, were it alone
SHORTEST_S, LONGEST_S = 0.04, 0.3
STALLED_S = 10.0
SETTINGS: dict[str, dict[str, int]] = {"equal": {}, "ordered": {"draft": 2, "verify": 1, "decode": 1}}  # else 0

GroupPlan = tuple[int, str, tuple[GridPoint, ...]]  # number, priority setting, members
Span = tuple[float, float, int]  # start, end, cached tokens


def groups(quick: bool = False) -> list[GroupPlan]:
    """All groups in measuring order: kinds interleaved in both settings, then more groups by priority only."""
    draft = {r: grid.draft(r, STEPS, CONTEXT) for r in (1, 8, 16, 32, 64)}
    verify = {r: grid.decode(r, STEPS + 1, CONTEXT) for r in (1, 8, 32, 64)}
    prompt = {n: grid.prefill(n) for n in (128, 512, 1024)}
    sizes = ((1, 1), (8, 8), (32, 32), (64, 64), (8, 32), (32, 8), (64, 8), (8, 64))
    kinds: list[list[tuple[GridPoint, ...]]] = [
        [(draft[a], verify[b]) for a, b in sizes],
        [(draft[r], prompt[n]) for r, n in ((8, 512), (32, 128), (1, 512), (32, 1024), (64, 512), (8, 128))],
        [(verify[r], prompt[n]) for r, n in ((8, 512), (32, 128), (1, 512), (32, 1024), (64, 512), (8, 128))],
        [
            (draft[r], verify[r], prompt[n])
            for r, n in ((8, 512), (32, 512), (1, 128), (64, 512), (32, 128), (8, 1024), (64, 1024), (1, 512))
        ],
    ]
    # long contexts, and short launches next to long ones
    far = grid.draft(8, STEPS, LONG), grid.decode(8, STEPS + 1, LONG)
    kinds.append(
        [
            far,
            (grid.draft(8, 1, CONTEXT), verify[32]),
            (draft[8], grid.prefill(2048)),
            (verify[8], grid.prefill(64)),
            (far[1], grid.prefill(512, 2048)),
            (far[0], far[1], grid.prefill(512, 1024)),
        ]
    )
    for kind in kinds:
        random.Random(len(kind)).shuffle(kind)
    placed = [(i / len(kind), k, members) for k, kind in enumerate(kinds) for i, members in enumerate(kind)]
    # prompts far into a context, whose attention leaves less room; last, as groups go by their numbers
    distant = grid.draft(8, STEPS, FAR), grid.decode(8, STEPS + 1, FAR), grid.decode(8, 2, FAR)
    far_off: list[tuple[GridPoint, ...]] = [
        (distant[2], grid.prefill(2048, 4000)),
        (distant[1], grid.prefill(512, FAR)),
        (distant[0], grid.prefill(1024, FAR)),
        (distant[0], distant[1], grid.prefill(256, FAR)),
        (distant[0], distant[1], grid.prefill(2048, 4000)),
    ]
    # one or few rows concurrently with the chunks of a long prompt, as under light loads
    for context, start in ((AWAY, 1024), (FAR, FAR)):
        one = grid.draft(1, STEPS, context), grid.decode(1, STEPS + 1, context)
        some = grid.draft(8, STEPS, context), grid.decode(8, STEPS + 1, context)
        small, large = grid.prefill(256, start), grid.prefill(512, start)
        far_off += [(one[0], small), (one[1], small), (*one, small), (some[0], small), (some[1], small)]
        far_off += [(one[0], large), (one[1], large)]
    far_off += [
        (grid.decode(1, 2, FAR), grid.prefill(2048, 4000)),
        (grid.decode(32, 2, AWAY), grid.prefill(1024, 1024)),
    ]
    # several prompts in a forward, prefill of the drafter, and decoding without drafts
    far_off += [(draft[8], grid.prefill(n, chunks=count)) for n, count in ((128, 4), (256, 8), (512, 4))]
    far_off += [(verify[8], grid.prefill(n, chunks=count)) for n, count in ((128, 4), (256, 8))]
    far_off += [(draft[r], grid.prefill(n)) for r, n in ((1, 1024), (8, 1024), (1, 2048), (16, 512), (16, 2048))]
    far_off += [(verify[r], grid.prefill(n)) for r, n in ((1, 1024), (8, 1024), (1, 2048))]
    reads = grid.read(256), grid.read(1024), grid.read(512, chunks=4)
    far_off += [(work, prompts) for work in (draft[8], verify[8]) for prompts in reads]
    far_off += [(verify[1], grid.read(256, 1024)), (draft[1], grid.read(256, 1024)), (verify[32], grid.read(512))]
    far_off += [(grid.decode(r, 1, CONTEXT), grid.prefill(n)) for r, n in ((8, 256), (8, 1024), (32, 512), (64, 256))]
    far_off += [(grid.decode(8, 1, CONTEXT), grid.read(512)), (draft[8], verify[8], grid.read(512))]
    # prompts of chats with 16 to 32 rows, where products change from the engine's own kernels to the library's
    own = grid.decode(8, 4, CONTEXT), grid.decode(16, 2, CONTEXT), grid.decode(24, 1, CONTEXT)
    library = grid.decode(16, 4, CONTEXT), grid.decode(24, 4, CONTEXT), grid.decode(40, 1, CONTEXT)
    crowd = grid.draft(24, STEPS, CONTEXT), grid.draft(48, STEPS, CONTEXT)
    chats = grid.prefill(512), grid.prefill(256, chunks=4), grid.prefill(512, chunks=2)
    far_off += [(draft[16], chats[1])] + [(rows, prompts) for rows in crowd for prompts in chats[:2]]
    far_off += [(rows, prompts) for rows in (*own, *library) for prompts in chats]
    far_off += [(draft[16], library[0], chats[0]), (crowd[0], library[1], chats[0]), (crowd[0], library[1], chats[1])]
    far_off += [(crowd[0], grid.read(512)), (library[1], grid.read(512)), (own[0], grid.read(512))]
    equal = [
        (draft[16], chats[0]),
        (crowd[0], chats[0]),
        (own[0], chats[0]),
        (own[2], chats[0]),
        (library[0], chats[0]),
    ]
    # drafts whose first forward has two tokens per row; chats' prompts next to verifies, where both fill the GPU
    caught = [
        grid.draft(r, k, CONTEXT, True) for r, k in ((24, 2), (16, 2), (24, 1), (24, 4), (32, 2), (8, 2), (48, 2))
    ]
    checks = [grid.decode(r, 4, CONTEXT) for r in (2, 8, 16, 24, 40, 64)]
    short = grid.prefill(256), grid.prefill(128, chunks=2)
    late = [(rows, prompts) for rows in checks for prompts in short]
    late += [(rows, prompt[512]) for rows in caught]
    late += [(caught[0], prompts) for prompts in (prompt[128], *short, grid.prefill(768), prompt[1024])]
    late += [(checks[r], grid.prefill(256, 1024)) for r in (0, 3)]
    late += [(checks[r], grid.prefill(512, 1024)) for r in (0, 1)]
    late += [(checks[1], grid.prefill(192)), (checks[3], grid.prefill(192)), (checks[3], grid.prefill(768))]
    late += [(grid.decode(r, 1, CONTEXT), grid.prefill(256)) for r in (24, 48)]
    # the library's kernels for these numbers of prompt tokens differ in how many blocks they leave for others
    decodes = grid.decode(8, 1, AWAY), grid.decode(24, 1, CONTEXT), grid.decode(2, 1, AWAY)
    own_rows = draft[8], caught[0], checks[1]
    waves: list[tuple[GridPoint, ...]] = [(rows, grid.prefill(2048)) for rows in (decodes[0], *own_rows[1:])]
    waves += [(rows, grid.prefill(1536)) for rows in (*own_rows, decodes[1])]
    waves += [(rows, grid.prefill(768)) for rows in (draft[8], checks[1], decodes[1])]
    waves += [(caught[0], checks[3], grid.prefill(n)) for n in (2048, 1024, 1536)]
    waves += [(rows, grid.prefill(2048, 2048)) for rows in (decodes[0], draft[8])]
    waves += [(rows, grid.prefill(2048)) for rows in (decodes[1], decodes[2], checks[3])]
    waves += [(checks[1], prompt[1024]), (decodes[1], prompt[1024]), (draft[8], checks[1], grid.prefill(2048))]
    waves += [(checks[3], grid.prefill(1536)), (decodes[0], grid.prefill(512, chunks=4))]
    both = [members for _, _, members in sorted(placed, key=lambda entry: entry[:2])][: 4 if quick else None]
    plan = [(setting, members) for members in both for setting in SETTINGS]
    if not quick:
        plan += [("ordered", members) for members in far_off] + [("equal", members) for members in equal]
        plan += [("ordered", members) for members in (*late, *waves)]
    return [(number, *entry) for number, entry in enumerate(plan)]


def side_by_side(launchers: Sequence[Launcher], seconds: float, stalled_s: float = STALLED_S) -> list[list[Span]]:
    """Launch all again and again for about `seconds`; when each launch ran, since the common start."""
    origin = _common_start([launch.lane for launch in launchers])
    begin = perf_counter()
    waiting: list[deque[tuple[Ticket, int]]] = [deque() for _ in launchers]
    spans: list[list[Span]] = [[] for _ in launchers]
    while (now := perf_counter() - begin) < seconds or any(waiting):
        if now > seconds + stalled_s:
            raise TimeoutError(f"not finished {stalled_s:g} s after its time limit")
        for launch, queue, done in zip(launchers, waiting, spans, strict=True):
            while queue and queue[0][0].done():
                ticket, cached = queue.popleft()
                assert ticket.span is not None
                start, end = (origin.elapsed_time(event) / 1000 for event in ticket.span)
                done.append((start, end, cached))
            if now < seconds and len(queue) < QUEUED_PER_LANE:
                start = perf_counter() - begin
                ticket, data = launch()
                cached = data.context_total
                if launch.lane.gpu:
                    queue.append((ticket, cached))
                else:
                    done.append((start, perf_counter() - begin, cached))
    return spans


def _common_start(lanes: Sequence[GraphLane]) -> Any:
    if not lanes[0].gpu:
        return None
    torch.cuda.synchronize(lanes[0].engine.device)
    origin = torch.cuda.Event(enable_timing=True)
    origin.record()
    for lane in lanes:
        assert lane.stream is not None
        lane.stream.wait_event(origin)
    return origin


class Duo:
    """A draft and a target model on one device, with a lane for each kind of launch and priority."""

    def __init__(
        self,
        pair: str,
        draft: ModelArchitecture,
        target: ModelArchitecture,
        device: torch.device,
        seed: int,
        quick: bool = False,
    ) -> None:
        self.pair, self.quick = pair, quick
        self.rng = np.random.default_rng(seed)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        specs = (draft.spec, target.spec)
        free = usable_bytes(device) - sum(s.weight_bytes + s.head_params * s.dtype_bytes for s in specs)
        slots = 2 * MAX_ROWS + PROMPT_SLOTS
        pages = min(slots * CAPACITY // PAGE, int(free // (PAGE * sum(s.kv_bytes_per_token for s in specs))))
        self.sequences = sequences = Sequences(slots, CAPACITY, device, SCRATCH_PAGES + max(0, pages))
        sequences.tokens.random_(0, min(s.vocab for s in specs))
        self.engines: dict[str, Engine] = {}
        for arch, roles in ((draft, ("draft", "read")), (target, ("verify", "decode", "prefill", "mixed"))):
            engine = Engine(Transformer.random(arch, CAPACITY, device, dtype, seed), sequences)
            engine.cache.randomize(seed)
            self.engines |= dict.fromkeys(roles, engine)
        self.device = device
        self.lanes: dict[tuple[str, int], GraphLane] = {}
        self.solos: dict[tuple[GridPoint, int], tuple[float, LaunchShape]] = {}

    def run(self, part: Part, budget_s: float, say: Callable[[str], None]) -> None:
        """Host costs, then groups until the budget is spent; what a part already has is skipped."""
        begin = monotonic()
        if not any(row["section"] == "host" for row in part.rows):
            for point, shape, what, repeat, seconds in host_costs(self.fits, self.launcher, 4 if self.quick else 20):
                self.add(part, "host", point, shape, what=what, repeat=repeat, seconds=seconds)
            part.save()
            say(f"{self.pair}: host costs after {monotonic() - begin:.0f} s")
        self.measure(part, groups(self.quick), budget_s - (monotonic() - begin), say)

    def measure(self, part: Part, plan: Sequence[GroupPlan], budget_s: float, say: Callable[[str], None]) -> None:
        """The groups of a plan that the part lacks, until the budget is spent."""
        begin = monotonic()
        done = {row["group"] for row in part.rows if row["section"] == "corun"}
        stalled = None
        for number, setting, members in plan:
            reason = stalled or self._refusal(members, monotonic() - begin, budget_s)
            if number in done:
                continue
            if reason is None:
                try:
                    self._group(part, number, setting, members, say)
                except TimeoutError as error:
                    reason, stalled = str(error), "a group before it stalled"
                except RuntimeError as error:  # out of memory, or a kernel that does not fit the card
                    reason = " ".join(str(error).split())[:300]
            if reason is not None:
                label = f"{setting}: {' + '.join(p.label() for p in members)}"
                part.header["left_out"].append({"label": label, "reason": reason})
            part.save()

    def launcher(self, point: GridPoint, priority: int = 0) -> Launcher:
        """Return a launcher of a point on the lane of its kind, on slots no other kind touches."""
        key = (point.kind, priority)
        if key not in self.lanes:
            self.lanes[key] = lane = GraphLane(self.engines[point.kind], priority)
            lane.timing = lane.gpu
        slots = self._slots(point)
        self.sequences.deal(slots, pages_a_slot(point), self.rng, self._pages(point))
        return Launcher(self.lanes[key], point, self.rng, slots)

    def _pages(self, point: GridPoint) -> range:
        """A third of the pool for each of draft, target and prompts."""
        third = (self.sequences.pool - SCRATCH_PAGES) // 3
        return range(*(SCRATCH_PAGES + third * (PLACE[point.kind] + i) for i in (0, 1)))

    def _slots(self, point: GridPoint) -> range:
        """A kind's slots, as many as it has pages for."""
        room = PROMPT_SLOTS if point.kind in ("prefill", "read") else MAX_ROWS
        first = MAX_ROWS * PLACE[point.kind]
        return range(first, first + min(room, len(self._pages(point)) // pages_a_slot(point)))

    def fits(self, point: GridPoint) -> bool:
        """Return whether there are slots enough for a point."""
        return point.slots <= len(self._slots(point))

    def _refusal(self, members: Sequence[GridPoint], spent_s: float, budget_s: float) -> str | None:
        if not all(self.fits(point) for point in members):
            return "does not fit into memory"
        return f"budget of {budget_s:g} s spent" if spent_s > budget_s else None

    def _solo(self, part: Part, point: GridPoint, priority: int) -> tuple[float, LaunchShape]:
        """Median seconds of a point alone on its lane, measured once."""
        key = (point, priority)
        if key not in self.solos:
            samples, shape = sample(self.launcher(point, priority), QUICK if self.quick else Effort())
            settle(self.lanes[point.kind, priority])
            for repeat, (seconds, data) in enumerate(samples):
                self.add(part, "corun", point, shape, priority=priority, repeat=repeat, seconds=seconds,
                         context_total=data.context_total)  # fmt: skip
            self.solos[key] = float(np.median([seconds for seconds, _ in samples])), shape
        return self.solos[key]

    def _group(
        self, part: Part, number: int, setting: str, members: Sequence[GridPoint], say: Callable[[str], None]
    ) -> None:
        priorities = [SETTINGS[setting].get(point.kind, 0) for point in members]
        solos = [self._solo(part, *member) for member in zip(members, priorities, strict=True)]
        launchers = [self.launcher(*member) for member in zip(members, priorities, strict=True)]
        seconds = min(LONGEST_S, max(SHORTEST_S, RUNS * max(solo for solo, _ in solos)))
        spans_of = side_by_side(launchers, seconds)
        for member, (point, spans) in enumerate(zip(members, spans_of, strict=True)):
            for repeat, (start, end, cached) in enumerate(spans):
                self.add(
                    part, "corun", point, solos[member][1], group=number, member=member, members=len(members),
                    priority=priorities[member], repeat=repeat, seconds=end - start, start_s=start, end_s=end,
                    context_total=cached,
                )  # fmt: skip
        say(f"{self.pair} {setting}: {_summary(members, spans_of, [solo for solo, _ in solos])}")

    def add(self, part: Part, section: str, point: GridPoint, shape: LaunchShape, **values: Any) -> None:
        """A row of a point measured on this pair."""
        part.add(
            section=section, pair=self.pair, model=self.engines[point.kind].model.arch.spec.name,
            bucket_rows=shape.rows, bucket_chunk=getattr(shape, "chunk", 0), **{**point.as_dict(), **values},
        )  # fmt: skip


def _summary(members: Sequence[GridPoint], spans_of: Sequence[Sequence[Span]], solos_s: Sequence[float]) -> str:
    spans = [np.array([s[:2] for s in spans], dtype=np.float64).reshape(-1, 2) for spans in spans_of]
    within = overlap.window(spans)
    alone_s = [overlap.work_done_s(each, solo, within) for each, solo in zip(spans, solos_s, strict=True) if within]
    if within is None or not all(alone_s):  # lanes took turns, as on the CPU
        return "; ".join(point.label() for point in members)
    lasted_s = within[1] - within[0]
    slowed = [f"{point.label()} x{lasted_s / s:.2f}" for point, s in zip(members, alone_s, strict=True)]
    return f"{'; '.join(slowed)}; span/serial {lasted_s / sum(alone_s):.2f}"
