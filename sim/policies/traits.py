"""What a command must know of an architecture before it runs. A policy inherits what it does not state."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pdvsim.sim.policies.options import Server

OwnOptions = tuple[str, ...]
MethodNames = tuple[str, ...]
Tuned = tuple[str, tuple[Any, ...]] | None
Workers = Literal["lanes", "turns", "requests"]
Asked = Literal["on change", "while waiting", "every round"]
_ASKED: tuple[Asked, ...] = get_args(Asked)


class PolicyTraits:
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
    drafts_ahead = False  # drafts while a request is verified, from guesses of the verdict
    verifies_all = False  # plans with drafts that are all verified
    least_gpus = 1  # with fewer it is not worth trying
    options: OwnOptions = ()  # server settings that act in it alone
    tuned: Tuned = None  # one of them, and the values that a search tries
    not_in_engines = ""  # what it does that no flag of a serving engine asks for
    # when its workers are asked for a decision: when something changes (an arrival, a finish, another draft length),
    # also in every round while a request waits, or in every round. A class that overrides one of the methods that its
    # bases name below is asked as often as that needs, unless it states this itself
    asked: Asked = "on change"
    while_waiting: MethodNames = ()
    every_round: MethodNames = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "asked" in vars(cls):
            return
        stated = [part is not cls and "asked" in vars(part) for part in cls.__mro__]
        first = stated.index(True)  # the policy that it derives from; before it, what is mixed in
        own = {name for part in cls.__mro__[:first] for name in vars(part)}
        needs = [cls.asked]
        for base in cls.__mro__[first:]:
            needs += ["while waiting"] if own.intersection(vars(base).get("while_waiting", ())) else []
            needs += ["every round"] if own.intersection(vars(base).get("every_round", ())) else []
        cls.asked = max(needs, key=_ASKED.index)

    @classmethod
    def lane_names(cls) -> tuple[str, ...]:
        """The names of its streams."""
        return tuple(dict.fromkeys((cls.prefill_lane, cls.draft_lane, cls.verify_lane)))

    @classmethod
    def in_steps(cls) -> bool:
        """Return whether one lane serves the whole batch step by step, as continuous batching does."""
        return len(cls.lane_names()) == 1 and cls.workers != "requests"

    @classmethod
    def placeable(cls) -> bool:
        """Return whether its lanes may be on different GPUs."""
        return len(cls.lane_names()) > 1 and cls.workers == "lanes"

    @classmethod
    def hands_over(cls) -> bool:
        """Return whether two workers draft and verify concurrently, and hand requests over to each other."""
        return cls.placeable() and cls.verify_lane != cls.draft_lane

    @classmethod
    def disaggregates(cls) -> bool:
        """Return whether its lanes may be engines: some prefill, the others decode whole rounds."""
        return cls.placeable() and not cls.hands_over()

    @classmethod
    def most_in_flight(cls, settings: Server) -> int:
        """Most requests that it admits concurrently."""
        return settings.max_num_seqs
