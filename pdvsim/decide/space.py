"""The settings that a search tunes over, and which of two is simpler to run.

Varied: the architecture, the draft length and its controller, the batch limit, the prompt tokens per forward, and
settings that only one architecture has. Given settings are not varied; all others keep their values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from pdvsim.decide.formula import Formula
from pdvsim.sim.config import Arch, ControllerName, Experiment, Server
from pdvsim.sim.limits import BatchLimit, DraftLength, Tokens, check_list, check_ranges
from pdvsim.sim.policies import ARCHS, archs_where, policy_of

LENGTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8)
LONG_LENGTHS = (10, 12, 15)  # also tested for drafters whose further tokens cost no further forward
CONTROLLERS: tuple[ControllerName, ...] = ("fixed", "goodput", "feedback")
ADAPTIVE: ControllerName = "adaptive-verification"  # also for heads and parallel drafters; always drafts k
ADAPTIVE_LENGTH = 8

PROMISING = 3  # best-ranked draft lengths of the formula that are simulated, at most
LIKELY = 0.05  # formula's error between draft lengths near its best, and ...
EXCLUDED = 0.15  # ... the gap from which a length is not simulated even next to the best


@dataclass(frozen=True)
class Space:
    """Values to test; a single value fixes a setting."""

    archs: tuple[Arch, ...] = field(default_factory=lambda: tuple(archs_where(lambda policy: policy.least_gpus == 1)))
    draft_lengths: tuple[DraftLength, ...] = LENGTHS
    controllers: tuple[ControllerName, ...] = CONTROLLERS
    max_num_seqs: tuple[BatchLimit, ...] = (32, 64, 128, 256)
    max_num_batched_tokens: tuple[Tokens, ...] = (256, 512, 2048, 8192)
    own: bool = True  # whether settings of single architectures are varied

    def __post_init__(self) -> None:
        for name in ("archs", "draft_lengths", "controllers", "max_num_seqs", "max_num_batched_tokens"):
            check_list("arch" if name == "archs" else name.replace("_", "-"), getattr(self, name))
        check_ranges(self)

    def starts(self, base: Experiment, archs: Sequence[Arch] = ()) -> list[Experiment]:
        """Each architecture with the given settings, or the nearest allowed ones, and the formula's draft length."""
        server = replace(
            base.server,
            controller=self.controllers[0],
            num_speculative_tokens=_nearest(base.server.num_speculative_tokens, self.draft_lengths),
            max_num_seqs=_nearest(base.server.max_num_seqs, self.max_num_seqs),
            max_num_batched_tokens=_nearest(base.server.max_num_batched_tokens, self.max_num_batched_tokens),
        )
        starts = _possible(base, ((arch, server) for arch in archs or self.archs))
        fixed = "fixed" in self.controllers
        return [with_best_length(start, self.lengths(start)) if fixed else start for start in starts]

    def lengths(self, candidate: Experiment) -> tuple[int, ...]:
        """The draft lengths of a candidate; without drafts colocated batching is plain decoding, a contender itself."""
        drafting = tuple(k for k in self.draft_lengths if k)
        same = candidate.arch == "colocated" and "autoregressive" in self.archs
        return drafting if same and drafting and candidate.has_drafter else self.draft_lengths

    def kinds(self, archs: Sequence[Arch] = ()) -> list[str]:
        """The kinds of setting in the order of the search, without fixed ones, and those of none of `archs`."""
        several = {
            "num_speculative_tokens": len(self.draft_lengths) > 1,
            "controller": len(self.controllers) > 1 or self.controllers == (ADAPTIVE,),
            "max_num_seqs": len(self.max_num_seqs) > 1,
            "max_num_batched_tokens": len(self.max_num_batched_tokens) > 1,
            "own": self.own and (not archs or any(policy_of(arch).tuned for arch in archs)),
        }
        return [name for name, more in several.items() if more]

    def others(self, candidate: Experiment, kind: str) -> list[Experiment]:
        """The candidate with other values of a kind of setting: those next to its own, or all if they have no order.

        Of draft lengths those that the formula excludes are left out, and those that it finds likely are added.
        """
        server, drafts = candidate.server, candidate.has_drafter
        values: Sequence[Any] = getattr(self, kind, ())
        if kind == "own":
            kind, values = policy_of(candidate.arch).tuned or ("", ())
            if not kind or getattr(server, kind) != getattr(Server, kind):  # given by the user
                return []
        elif kind == "controller":
            usual = [name for name in self.controllers if name not in ("fixed", ADAPTIVE)]
            servers = [replace(server, controller=name) for name in usual]
            if ADAPTIVE in self.controllers and (candidate.arch == "colocated" or len(self.controllers) == 1):
                k = min(max(self.draft_lengths), ADAPTIVE_LENGTH)
                servers.append(replace(server, controller=ADAPTIVE, num_speculative_tokens=k))
            servers = servers if drafts and server.controller == self.controllers[0] else []
            return _possible(candidate, ((candidate.arch, one) for one in servers))
        elif kind == "num_speculative_tokens":
            if not drafts or server.controller != "fixed":
                return []
            lengths, formula = self.lengths(candidate), Formula(candidate)
            likely = formula.likely(lengths, LIKELY)[:PROMISING] if len(lengths) > PROMISING else lengths
            values = [*likely, *_next(server.num_speculative_tokens, formula.likely(lengths, EXCLUDED))]
        else:
            values = _next(getattr(server, kind), values)
        changes: list[dict[str, Any]] = [{kind: value} for value in values]
        return _possible(candidate, ((candidate.arch, replace(server, **change)) for change in changes))

    def fewest(self, candidate: Experiment) -> list[Experiment]:
        """The candidate with the shortest allowed draft length."""
        if not candidate.has_drafter or "fixed" not in self.controllers:
            return []
        server = replace(candidate.server, num_speculative_tokens=min(self.lengths(candidate)))
        return _possible(candidate, [(candidate.arch, server)])


def with_best_length(candidate: Experiment, lengths: Sequence[int]) -> Experiment:
    """The candidate with the draft length that the formula prefers; unchanged if there is no choice."""
    if not candidate.has_drafter or len(lengths) == 1:
        return candidate
    best = Formula(candidate).ranked(lengths)[0].k
    return replace(candidate, server=replace(candidate.server, controller="fixed", num_speculative_tokens=best))


def complexity(candidate: Experiment, base: Experiment) -> tuple[int, int, int, int, int]:
    """Sort key, smaller is simpler: architecture, GPUs per server, controller, number of changed settings."""
    settings = ("max_num_seqs", "max_num_batched_tokens", *((policy_of(candidate.arch).tuned or ())[:1]))
    moved = sum(getattr(candidate.server, name) != getattr(base.server, name) for name in settings)
    arch = ARCHS.index(candidate.arch) if candidate.arch in ARCHS else len(ARCHS)
    controllers, k = (*CONTROLLERS, ADAPTIVE), candidate.server.num_speculative_tokens
    controller = controllers.index(candidate.server.controller)
    return arch, candidate.gpus, controller, moved, k


def settings_text(candidate: Experiment) -> list[str]:
    """The settings of a candidate, one by one."""
    server, words = candidate.server, []
    if candidate.has_drafter:
        moved = "{} controller, k {} to {}".format(server.controller, *server.draft_range)
        words.append(moved if server.varies_length else drafts_text(candidate))
    if policy_of(candidate.arch).workers == "requests":
        words.append(f"{server.num_workers} workers")
    else:
        words.append(f"batch {server.max_num_seqs}")
    limits = (("draft", server.max_draft_batch), ("verify", server.max_verify_batch))
    words += [f"{what} batch {limit}" for what, limit in limits if limit is not None]
    words.append(f"chunk {server.max_num_batched_tokens}")
    name, _ = policy_of(candidate.arch).tuned or ("", ())
    if name and name != "num_workers" and getattr(server, name) != getattr(Server, name):
        words.append(f"{name.replace('_', '-')} {getattr(server, name)}")
    return words


def drafts_text(candidate: Experiment) -> str:
    """The draft length as short text: k=2, goodput, or empty without drafts."""
    if not candidate.has_drafter:
        return ""
    server = candidate.server
    k = f"k={server.num_speculative_tokens}"
    return server.controller if server.varies_length else k if server.controller == "fixed" else f"{k} {ADAPTIVE}"


def _next(value: int, choices: Sequence[int]) -> list[int]:
    """The next smaller and the next larger choice."""
    smaller, larger = [one for one in choices if one < value], [one for one in choices if one > value]
    return [*([max(smaller)] if smaller else []), *([min(larger)] if larger else [])]


def _nearest(value: int, choices: tuple[int, ...]) -> int:
    return min(choices, key=lambda choice: (abs(choice - value), choice))


def _possible(base: Experiment, servers: Iterable[tuple[Arch, Server]]) -> list[Experiment]:
    """The experiments that their architecture accepts."""
    possible = []
    for arch, server in servers:
        if arch == "autoregressive":
            server = replace(server, controller="fixed")
        with suppress(ValueError):
            possible.append(replace(base, arch=arch, server=server))
    return possible
