"""What an annotation of an option states besides its type, and sizes of inputs.

The range of a number is part of its declaration: a field `jobs: Jobs` or `k: Annotated[int, Range(1, 8)]` of a
dataclass that calls `check_ranges`. The ends are what is sensible, not what is possible: beyond them a value is a slip
(milliseconds for seconds) or asks for more work than anyone waits for.

So is the choice that an option belongs to: `window: Annotated[str, of("use_trace_timestamps")]`. Elsewhere the option
has no effect and is refused (`relevance` for experiments, `common.options` for commands).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

T = TypeVar("T")
Internal = Annotated[T, "internal"]  # a field that no option sets
Redefined = Annotated[T, "redefined"]  # an option of a group, with another default and help in this command
Placed = Annotated[T, "placed"]  # a positional argument
Paths = Annotated[tuple[str, ...], "paths"]  # each an argument of its own: a path may contain spaces and commas

MAX_DRAFT = 32  # longest draft that a verify forward is modelled for
MAX_REQUESTS = 10_000_000
MAX_TOKENS = 10_000_000  # of a prompt or an output: beyond any context window
MAX_OUTPUT_TOKENS = 1 << 32  # of all requests in memory: each is a byte of memory
MAX_POINTS = 100_000  # of one sweep, comparison, map or search
MAX_RUNS = 10_000  # replications

MIB = 2**20
MAX_CONFIG_BYTES = 64 * MIB  # of a file that describes something: JSON, TOML
MAX_DATA_BYTES = 4096 * MIB  # of a data set, a trace or a table
MAX_LINE_CHARS = 32 * MIB  # of a trace


@dataclass(frozen=True)
class Range:
    """Values from `low` to `high`, or those `among` them that are listed; and infinity where `or_inf`."""

    low: float
    high: float
    or_inf: bool = False
    among: tuple[int, ...] = ()

    def holds(self, value: float) -> bool:
        """Return whether a value is one of them; nan is not."""
        listed = value in self.among if self.among else self.low <= value <= self.high
        return listed or (self.or_inf and value == math.inf)

    def __str__(self) -> str:
        if self.among:
            return f"one of {', '.join(map(str, self.among))}"
        low, high = (str(end) if isinstance(end, int) else f"{end:g}" for end in (self.low, self.high))
        return f"{low} to {high}{', or inf' if self.or_inf else ''}"


@dataclass(frozen=True)
class Of:
    """A choice that an option belongs to; an option of several belongs to each of them. `of` makes one."""

    given: tuple[str, ...]  # options that are not at their defaults, and facts of an experiment
    without: tuple[str, ...]  # options that are at their defaults
    values: tuple[tuple[str, tuple[Any, ...]], ...]  # options with one of these values

    def chosen(self, is_given: Callable[[str], bool], value: Callable[[str], Any]) -> bool:
        """Return whether it is chosen, by what is given and by the values of options."""
        rest = not any(map(is_given, self.without)) and all(value(name) in among for name, among in self.values)
        return rest and all(map(is_given, self.given))

    @property
    def named(self) -> bool:
        """Whether options that have to be given state all of it."""
        facts = any(isinstance(name, Fact) for name in self.given)
        return not facts and all(None not in among for _, among in self.values) and bool(self.given or self.values)

    def __str__(self) -> str:
        values = [f"{flag_of(name)} {either(map(str, filter(None, among)))}" for name, among in self.values]
        both = " and ".join([*values, *(name if isinstance(name, Fact) else flag_of(name) for name in self.given)])
        without = f"without {either(map(flag_of, self.without))}" if self.without else ""
        return ", ".join(filter(None, (both, without)))


def of(*given: str, without: Sequence[str] = (), **values: Any) -> Of:
    """The choice where these options are given (or facts true), those `without` are not, and others have a value."""
    among = ((name, value if isinstance(value, tuple) else (value,)) for name, value in values.items())
    return Of(given, tuple(without), tuple(among))


def no_effect(name: str, belongs: Iterable[Of]) -> str:
    """The refusal of an option of which no choice is made."""
    return f"{flag_of(name)} has no effect here: it belongs to {'; or '.join(map(str, belongs))}"


def either(names: Iterable[str]) -> str:
    """Names as a choice: a, b or c."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


class Fact(StrEnum):
    """What no option of an experiment states alone, in the words of a refusal; `relevance` has their rules."""

    DRAFTS = "an architecture that drafts, with a drafter"
    EAGLE = "an architecture that drafts, with an EAGLE-3 or P-EAGLE head"
    DRAFTS_ON_GPU = "an architecture that drafts, with a drafter on the GPU"
    STREAMS = "an architecture whose lanes have their own streams"
    PRIORITISED = f"{STREAMS} and --contention fluid (none, dynamic: or serial)"
    PREFILL_LANE = "an architecture that prefills several prompts per forward"
    SEVERAL_GPUS = "several GPUs per server (--tensor-parallel-size, --data-parallel-size or --place)"
    EXPERTS = "a target with experts"
    SPLIT_EXPERTS = f"{EXPERTS}, and --tensor-parallel-size or --data-parallel-size"
    SESSIONS = "a file with sessions and turns"
    OFFLOADS = "prompts that share prefixes, prefix caching, and an architecture with a lane for prompts"
    PREFILL_ENGINES = "several prefill engines (--disaggregate)"
    TENSORRT_RANKS = "--engine trtllm and --data-parallel-size, without --disaggregate"
    EAGER = "--engine vllm, 0.14 or later"
    ASYNC = (
        "--arch colocated or pd, and --engine pdvsim with a drafter on the GPU; or --engine vllm, where it is on only "
        "without draft models, n-gram and suffix drafts"
    )


# Ranges that several options have.
Share = Annotated[float, Range(0, 1)]
LeastShare = Annotated[float, Range(0.01, 1)]  # a share of which there must be some
PartialShare = Annotated[float, Range(0, 0.99)]  # a share that must leave something
Requests = Annotated[int, Range(1, MAX_REQUESTS)]
RequestRate = Annotated[float, Range(1e-6, 1e9, or_inf=True)]
Tokens = Annotated[int, Range(1, MAX_TOKENS)]
DraftLength = Annotated[int, Range(0, MAX_DRAFT)]
LeastDraft = Annotated[int, Range(1, MAX_DRAFT)]
BatchLimit = Annotated[int, Range(1, 65_536)]
SHARDED = (1, 2, 4, 8)  # GPUs that a model may be sharded over
RANKED = (*SHARDED, 16, 24, 32, 48, 64, 72)  # data-parallel groups, and GPUs that whole experts may be divided among
Shards = Annotated[int, Range(1, 8, among=SHARDED)]
Ranks = Annotated[int, Range(1, 72, among=RANKED)]
Gpus = Annotated[int, Range(1, 1024)]
Gigabytes = Annotated[float, Range(0, 1e9)]
Seed = Annotated[int, Range(0, 2**53)]
NumRuns = Annotated[int, Range(1, MAX_RUNS)]
Jobs = Annotated[int, Range(1, 1024)]
Budget = Annotated[int, Range(1, MAX_POINTS)]
GpuHourUsd = Annotated[float, Range(0.0001, 1e6)]
HostSeconds = Annotated[float, Range(0, 1)]
LongSeconds = Annotated[float, Range(0, 1e9)]
Tolerance = Annotated[float, Range(0.001, 0.5)]
MeasuringSeconds = Annotated[float, Range(0.01, 30 * 86400)]


def check_ranges(config: Any) -> None:
    """Refuse a dataclass with a number outside the range that its field declares."""
    kind: type = type(config)
    for name, span in ranges(kind).items():
        value = getattr(config, name)
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, (int, float)):
                check(name.replace("_", "-"), item, span)


def check(name: str, value: float, span: Range) -> None:
    """A ValueError of one line that states the range if a number is outside it."""
    if not span.holds(value):
        raise ValueError(f"{name} must be {span}, got {shown(value)}")


def check_list(name: str, values: Sequence[Any], needed: bool = True) -> None:
    """A ValueError of one line if a list is empty, where one value is needed, or names a value twice."""
    if needed and not values:
        raise ValueError(f"{name} needs at least one value")
    if len(set(values)) != len(values):
        raise ValueError(f"{name} names a value twice: {', '.join(map(str, values))}")


def check_points(what: str, *counts: int) -> None:
    """A ValueError of one line if the product of lists has too many points, before it is spelt out."""
    total = math.prod(counts)
    if total > MAX_POINTS:
        raise ValueError(f"{' x '.join(map(str, counts))} {what} are {total}; at most {MAX_POINTS} are accepted")


def shown(value: float) -> str:
    """A number as an error quotes it; Python refuses to spell out one of thousands of digits."""
    return str(value) if not isinstance(value, int) or abs(value) < 10**18 else "a number of 19 or more digits"


@cache
def hints_of(config: type) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """The type of every field of a dataclass, and what its annotation states besides."""
    plain, marked = get_type_hints(config), get_type_hints(config, include_extras=True)
    return {field.name: (plain[field.name], tuple(_marks(marked[field.name]))) for field in fields(config)}


def _marks(hint: Any) -> Iterator[Any]:
    """What a type states: of a number, of a list of them, or of one that may be left out."""
    yield from getattr(hint, "__metadata__", ())
    for part in get_args(hint):
        yield from _marks(part)


@cache
def ranges(config: type) -> dict[str, Range]:
    """The ranges that the fields of a dataclass declare."""
    marks = [(name, mark) for name, (_, marks) in hints_of(config).items() for mark in marks]
    return {name: mark for name, mark in marks if isinstance(mark, Range)}


def flag_of(name: str) -> str:
    """The flag of an option; fields named like Python keywords end with an underscore."""
    return f"--{name.rstrip('_').replace('_', '-')}"
