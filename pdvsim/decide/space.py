"""The settings a search may choose from, and which of two is the simpler to run.

Varied: the architecture, the draft length and who chooses it, the batch limit, and the prompt tokens of one forward.
Everything else stays as it was given.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from pdvsim.sim.config import Arch, ControllerName, Experiment, Server
from pdvsim.sim.limits import check_ranges
from pdvsim.sim.policies import ARCHS

# from the one with the fewest parts that can go wrong: models, then lanes, then rules that switch at run time
SIMPLEST_FIRST: tuple[Arch, ...] = (
    "autoregressive", "baseline", "colocated", "pd", "pdv-unified", "pdv", "pdv-hybrid", "adaptive",
)  # fmt: skip
CONTROLLERS: tuple[ControllerName, ...] = ("fixed", "goodput", "feedback")
assert set(SIMPLEST_FIRST) == set(ARCHS)


@dataclass(frozen=True)
class Space:
    """What may be tried; one value fixes a setting."""

    archs: tuple[Arch, ...] = SIMPLEST_FIRST
    draft_lengths: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    controllers: tuple[ControllerName, ...] = CONTROLLERS
    max_num_seqs: tuple[int, ...] = (32, 64, 128, 256)
    max_num_batched_tokens: tuple[int, ...] = (512, 2048, 8192)

    def __post_init__(self) -> None:
        for name in ("archs", "draft_lengths", "controllers", "max_num_seqs", "max_num_batched_tokens"):
            values = getattr(self, name)
            flag = "arch" if name == "archs" else f"try-{name.replace('_', '-')}"
            if not values:
                raise ValueError(f"{flag} needs at least one value")
            if len(set(values)) != len(values):
                raise ValueError(f"{flag} names a value twice: {', '.join(map(str, values))}")
        check_ranges(self)

    def starts(self, base: Experiment) -> list[Experiment]:
        """Each architecture with the settings given, or the nearest that may be tried."""
        server = replace(
            base.server,
            controller=self.controllers[0],
            num_speculative_tokens=_nearest(base.server.num_speculative_tokens, self.draft_lengths),
            max_num_seqs=_nearest(base.server.max_num_seqs, self.max_num_seqs),
            max_num_batched_tokens=_nearest(base.server.max_num_batched_tokens, self.max_num_batched_tokens),
        )
        return _possible(base, ((arch, server) for arch in self.archs))

    def candidates(self, base: Experiment) -> list[Experiment]:
        """Everything that may be tried, at the batch and prompt limits nearest to those given."""
        return [candidate for start in self.starts(base) for candidate in self.drafts(start)]

    def drafts(self, candidate: Experiment) -> list[Experiment]:
        """The candidate with every draft length, and with every controller that moves it."""
        server = candidate.server
        if candidate.arch == "autoregressive":
            return [candidate]
        ways: list[Server] = []
        if "fixed" in self.controllers:
            ways += [replace(server, controller="fixed", num_speculative_tokens=k) for k in self.draft_lengths]
        ways += [replace(server, controller=name) for name in self.controllers if name != "fixed"]
        return _possible(candidate, ((candidate.arch, way) for way in ways))

    def batches(self, candidate: Experiment) -> list[Experiment]:
        """The candidate with every batch limit."""
        ways = (replace(candidate.server, max_num_seqs=limit) for limit in self.max_num_seqs)
        return _possible(candidate, ((candidate.arch, way) for way in ways))

    def prompts(self, candidate: Experiment) -> list[Experiment]:
        """The candidate with every limit on the prompt tokens of a forward."""
        ways = (replace(candidate.server, max_num_batched_tokens=limit) for limit in self.max_num_batched_tokens)
        return _possible(candidate, ((candidate.arch, way) for way in ways))

    @property
    def size(self) -> int:
        """Settings in all, if every combination were tried."""
        fixed = len(self.draft_lengths) if "fixed" in self.controllers else 0
        drafting = fixed + sum(name != "fixed" for name in self.controllers)
        ways = sum(1 if arch == "autoregressive" else drafting for arch in self.archs)
        return ways * len(self.max_num_seqs) * len(self.max_num_batched_tokens)


def complexity(candidate: Experiment, base: Experiment) -> tuple[int, int, int, int]:
    """What is smaller is simpler: the architecture, then the controller, then fewer settings off those given."""
    settings = ("num_speculative_tokens", "max_num_seqs", "max_num_batched_tokens")
    moved = sum(getattr(candidate.server, name) != getattr(base.server, name) for name in settings)
    arch, controller = SIMPLEST_FIRST.index(candidate.arch), CONTROLLERS.index(candidate.server.controller)
    return arch, controller, moved, candidate.server.num_speculative_tokens


def described(candidate: Experiment) -> str:
    """A candidate in a few words."""
    server = candidate.server
    words: list[str] = [candidate.arch]
    if candidate.arch != "autoregressive":
        k = server.num_speculative_tokens
        moved = f"{server.controller} from k={k}, {server.min_speculative_tokens} to {server.max_speculative_tokens}"
        words.append(f"k={k}" if server.controller == "fixed" else moved)
    batch = f"{server.num_workers} workers" if candidate.arch == "baseline" else f"batch {server.max_num_seqs}"
    return ", ".join([*words, batch, f"{server.max_num_batched_tokens} prompt tokens a forward"])


def _nearest(value: int, choices: tuple[int, ...]) -> int:
    return min(choices, key=lambda choice: (abs(choice - value), choice))


def _possible(base: Experiment, ways: Iterable[tuple[Arch, Server]]) -> list[Experiment]:
    """The experiments that their architecture does not refuse."""
    found = []
    for arch, server in ways:
        if arch == "autoregressive":
            server = replace(server, controller="fixed")
        try:
            found.append(replace(base, arch=arch, server=server))
        except ValueError:
            continue
    return found
