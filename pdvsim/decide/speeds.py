"""Tokens per second of closed loops by batch size and draft length: by formula, corrected by simulations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pdvsim.bench.stats import Interval, interval
from pdvsim.decide.draft_table import PLAIN, DraftQuestion, SizeAndLength
from pdvsim.decide.formula import JOINING_ROUNDS, SAMPLED_REQUESTS, Formula
from pdvsim.decide.runs import Bench
from pdvsim.sim.config import Acceptance

Logs = NDArray[np.float64]  # log tokens per second: one row per batch size, one column per draft length


class Speeds:
    """Tokens per second of closed loops, by formula, corrected by simulations."""

    def __init__(self, question: DraftQuestion) -> None:
        drafting = question.drafting(question.max_k)
        self.question = question
        self.formula = Formula(replace(drafting, traffic=replace(drafting.traffic, num_prompts=SAMPLED_REQUESTS)))
        self.fits = self.formula.fits(question.max_k)
        self.simulated: dict[SizeAndLength, Interval] = {}
        self._formulas = {drafting.acceptance: self.formula}
        self._offsets: dict[SizeAndLength, float] = {}  # log of simulated over formula

    def learn(self, points: Iterable[SizeAndLength], bench: Bench) -> None:
        """Use simulated points."""
        for rows, k in sorted(points):  # plain decoding first: k=0 depends on it
            if runs := bench.known(self.question.loops(rows, k)):
                speeds = interval(float(row["output_throughput"]) for row in runs)
                self.simulated[rows, k] = speeds
                self._offsets[rows, k] = math.log(speeds.mean) - float(self._by_formula([rows], k)[0])

    def logs(self, sizes: Sequence[int], acceptance: Acceptance | None = None) -> Logs:
        """Log throughput by batch size and draft length from 0 on; minus infinity for lengths the engine lacks."""
        return np.column_stack([self.length(sizes, k, acceptance) for k in range(self.question.max_k + 1)])

    def plain(self, sizes: Sequence[int]) -> Logs:
        """Log throughput by batch size, on a server without a drafter."""
        return self.length(sizes, PLAIN)

    def length(self, sizes: Sequence[int], k: int, acceptance: Acceptance | None = None) -> Logs:
        """Log throughput by batch size, with one draft length."""
        return self._by_formula(sizes, k, acceptance) + self._moves(sizes, k)

    def _by_formula(self, sizes: Sequence[int], k: int, acceptance: Acceptance | None = None) -> Logs:
        if k == 0:
            return self._idle_by_formula(sizes)
        formula = self.formula
        if acceptance is not None:
            changed = replace(formula.experiment, acceptance=acceptance)
            formula = self._formulas.setdefault(acceptance, Formula(changed))
        return np.log([speed for _, speed in formula.loops(max(k, 0), sizes)])

    def _idle_by_formula(self, sizes: Sequence[int]) -> Logs:
        """At k=0: plain decoding, plus the drafter's pass over every token."""
        if self.question.facts.lowest_k > 0:
            return np.full(len(sizes), -np.inf)
        plain, formula = self.plain(sizes), self.formula
        rounds, drafter, more_s = formula.rounds(0) + JOINING_ROUNDS, formula.planner.models["draft"], []
        for rows in (min(size, self.fits) for size in sizes):
            cached = int(rows * formula.context)
            step = drafter.price(rows, 1, 1, cached)
            prompt_s = drafter.price(rows, 1, 1, cached, [formula.prompt]).seconds_0 - step.seconds_0
            more_s.append((rounds * step.seconds(cached) / rows + prompt_s) / formula.output_tokens)
        return -np.log(np.exp(-plain) + more_s)

    def _moves(self, sizes: Sequence[int], k: int) -> Logs:
        """Simulated over predicted (log) for the nearest simulated length at each size; k=0 and PLAIN have their own.

        Between simulated sizes it is interpolated linearly in the logarithm of the size.
        """
        nearest: dict[int, int] = {}
        for rows, other in self._offsets:
            if np.sign(other) == np.sign(k) and (rows not in nearest or abs(other - k) < abs(nearest[rows] - k)):
                nearest[rows] = other
        if not nearest:
            return np.zeros(len(sizes))
        places = sorted(nearest)
        moved: Logs = np.interp(np.log(sizes), np.log(places), [self._offsets[rows, nearest[rows]] for rows in places])
        return moved
