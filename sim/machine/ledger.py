"""Accounting of a GPU: the price of a launch, and its entry in the log.

The simulated and the real GPU share it, so that their records mean the same.
"""

from __future__ import annotations

from pdvsim.sim.core import KINDS, Kind, Role
from pdvsim.sim.machine.batch import Launch
from pdvsim.sim.prices.costs import AffineCost, CostModel, Price, total
from pdvsim.sim.records import LANES, ROLES, Launches


class Ledger:
    """Prices the launches of one GPU, and records finished ones in the log and in their requests."""

    def __init__(self, models: dict[Role, CostModel], log: Launches, replica: int = 0, gpu: int = 0) -> None:
        self.models = models
        self.log, self._append, self.extend_short = log, log.append, log.extend_short
        self._heads = {
            (lane, kind, role): (replica, gpu, LANES.index(lane), KINDS.index(kind), ROLES.index(role))
            for lane in LANES
            for kind in KINDS
            for role in ROLES
        }  # the first columns of rows in the log
        self._kinds: dict[tuple[str, Kind, Role, int, int, int, bool], tuple[int, AffineCost]] = {}

    def kind(
        self, lane: str, kind: Kind, role: Role, rows: int, tokens: int, steps: int, context: int = 0
    ) -> tuple[int, AffineCost]:
        """The number that launches of one kind have in the log, without prompts; and their price about a context."""
        key = (lane, kind, role, rows, tokens, steps, self.models[role].is_past_window(rows, context))
        known = self._kinds.get(key)
        if known is None:
            cost = self.models[role].price(rows, tokens, steps, context)
            self.log.kinds.append(
                (*self._heads[lane, kind, role], rows, rows * (tokens + steps - 1), steps, tokens, *cost)
            )
            known = self._kinds[key] = (len(self.log.kinds) - 1, cost)
        return known

    def price(self, launch: Launch) -> Price:
        """Return a launch's cost alone. A drafter's forwards over prompts and catch-up tokens precede its draft."""
        rows, tokens, context, chunks = launch.rows, launch.tokens, launch.context, launch.chunks
        model = self.models[launch.role]
        if context < 0:
            context = launch.context = rows.context
        if not chunks and (tokens <= model.widest or launch.role == "target"):
            return model.price(len(rows), tokens, launch.steps, context, (), 0, launch.packed).at(context)
        prompts, first_tokens, of_target = [], 0, launch.role == "target"
        for chunk in chunks:
            prompts.append((chunk.start, chunk.tokens))
            if of_target:
                if chunk.as_row:
                    return self._price_joining(launch)
                first_tokens += chunk.start + chunk.tokens >= chunk.request.to_read
        if of_target or not rows:
            cost = model.price(len(rows), tokens, launch.steps, context, prompts, first_tokens, launch.packed)
            return cost.at(context)
        before = [model.price(0, prompts=prompts)] if prompts else []
        if tokens > model.widest:
            before.append(model.catch_up_cost(rows))
            lags = [row.state.drafter_lag for row in rows]
            tokens = 1 + max([lag for lag in lags if lag < model.widest], default=0)
        return total([*before, model.price(len(rows), tokens, launch.steps, context)]).at(context)

    def _price_joining(self, launch: Launch) -> Price:
        """A step of the target in which some rows have one token, the last of a prompt that is in the cache."""
        joining = [chunk for chunk in launch.chunks if chunk.as_row]
        others = [chunk for chunk in launch.chunks if not chunk.as_row]
        context = launch.context + sum([chunk.start for chunk in joining])
        new = launch.packed or len(launch.rows) * launch.tokens
        tokens = launch.tokens if launch.rows else 1
        cost = self.models["target"].price(
            len(launch.rows) + len(joining), tokens, 1, context, [(chunk.start, chunk.tokens) for chunk in others],
            sum(chunk.start + chunk.tokens >= chunk.request.to_read for chunk in others),
            new + len(joining) if tokens > 1 else 0,
        )  # fmt: skip
        return cost.at(context)

    def note(self, launch: Launch, start_s: float, end_s: float, price: Price) -> None:
        """Record a finished launch."""
        rows, chunks = launch.rows, launch.chunks
        spent_s = end_s - start_s
        count, prompt_start = len(rows), 0
        tokens = launch.packed or count * (launch.tokens + launch.steps - 1)
        if count:
            rows.spend(launch.kind, spent_s)
        for chunk in chunks:
            tokens += chunk.tokens
            if chunk.start > prompt_start:
                prompt_start = chunk.start
            if launch.role == "target":  # the drafter prefills after it or concurrently
                chunk.request.taken.prefill_s += spent_s
        self._append([
            *self._heads[launch.lane, launch.kind, launch.role], count, tokens, launch.steps, launch.tokens,
            launch.queue_depth, prompt_start, launch.context, start_s, end_s, *price[:3],
        ])  # fmt: skip
        if self.log.carried is not None:
            self.log.carried.append((tuple([row.id for row in rows]), tuple([chunk.request.id for chunk in chunks])))
