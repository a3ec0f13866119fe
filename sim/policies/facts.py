"""What a command must know of an architecture before it runs. A policy inherits what it does not state."""

from __future__ import annotations

from typing import Any, Literal

from pdvsim.sim.policies.options import Server

OwnOptions = tuple[str, ...]
Tuned = tuple[str, tuple[Any, ...]] | None
Workers = Literal["lanes", "turns", "requests"]


class Facts:
    """Facts that stand on the class of a policy."""

    speculates = True  # has a draft model, and uses it
    draft_lane = "main"
    verify_lane = "main"
    prefill_lane = "main"
    # lanes: each lane has a worker of its own; turns: one worker serves all lanes in turn, with one prompt per turn;
    # requests: each worker serves one request to its end
    workers: Workers = "lanes"
    atomic_rounds = False  # may also verify on the draft lane
    plain_rounds = False  # may go on without draft tokens whatever the draft length is
    least_gpus = 1  # with fewer it is not worth trying
    options: OwnOptions = ()  # server settings that act in it alone
    tuned: Tuned = None  # one of them, and the values that a search tries
    beyond = ""  # what it does that no flag of a serving engine asks for

    @classmethod
    def lane_names(cls) -> tuple[str, ...]:
        """Its streams."""
        return tuple(dict.fromkeys((cls.prefill_lane, cls.draft_lane, cls.verify_lane)))

    @classmethod
    def in_steps(cls) -> bool:
        """Whether one lane serves the whole batch step by step, as continuous batching does."""
        return len(cls.lane_names()) == 1 and cls.workers != "requests"

    @classmethod
    def placeable(cls) -> bool:
        """Whether its lanes may be on different GPUs."""
        return len(cls.lane_names()) > 1 and cls.workers == "lanes"

    @classmethod
    def hands_over(cls) -> bool:
        """Whether two workers draft and verify concurrently, and hand requests over to each other."""
        return cls.placeable() and cls.verify_lane != cls.draft_lane

    @classmethod
    def most_in_flight(cls, settings: Server) -> int:
        """Most requests that it admits concurrently."""
        return settings.max_num_seqs
