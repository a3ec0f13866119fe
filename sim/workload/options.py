"""The options of a workload: traffic and acceptance."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Literal

from pdvsim.sim.limits import (
    MAX_REQUESTS,
    MAX_TOKENS,
    Fact,
    Internal,
    PartialShare,
    Range,
    RequestRate,
    Requests,
    Seed,
    Share,
    Tokens,
    check,
    check_ranges,
    of,
)

if TYPE_CHECKING:
    from pdvsim.sim.workload.datasets import Trace
    from pdvsim.sim.workload.windows import TraceWindow, TraceWindows

Dataset = Literal["random", "prefix_repetition", "sharegpt", "custom", "azure", "burstgpt", "mooncake"]

RECORDED = ("cnn", "gsm8k", "instructcoder", "sharegpt")  # data sets whose acceptance was recorded, ...
USUAL_DATA = "sharegpt"  # the recording that stands for other data sets
RECORDED_DRAFTERS = ("eagle3", "ngram", "suffix")  # ... with each of these
ACCEPTANCE_MODELS = tuple(f"{data}-{drafter}" for data in RECORDED for drafter in RECORDED_DRAFTERS)
TRACES: tuple[Dataset, ...] = ("custom", "azure", "burstgpt", "mooncake")  # files of requests
LENGTHS: dict[str, tuple[int, int]] = {"random": (1024, 128), "prefix_repetition": (256, 128)}  # without a data set
PREFIXES = (256, 10)  # tokens and number of prefix_repetition's, as in vLLM
OPEN = -1  # number of requests not given
FORMS = ("synthetic_acceptance_rates", "acceptance_model", "acceptance_trace")  # of acceptance, instead of a rate
WINDOW_PROMPTS = Range(OPEN, MAX_REQUESTS)
ALL, PEAK, BY_SEED = "all", "peak", "by-seed"  # windows of a trace, besides their numbers


@dataclass(frozen=True)
class Traffic:
    """Traffic: the requests and their arrival times."""

    dataset_name: Dataset = "sharegpt"
    """Source of the lengths. sharegpt without a file is a built-in model. The kind of a file is inferred."""
    dataset_path: Annotated[str | None, of(dataset_name=("sharegpt", *TRACES))] = None
    """File of the data set: a published one, or your own CSV or JSONL of arrivals and tokens (docs/traffic.md)."""
    tokenizer: Annotated[str | None, of("dataset_path", dataset_name=("sharegpt", "custom"))] = None
    """Folder of a local Hugging Face tokenizer. It counts the tokens of files that hold text (sharegpt, custom);
    default: an estimate."""
    max_model_len: Annotated[int | None, Range(2, 2 * MAX_TOKENS), of("dataset_path")] = None
    """Exclude requests of the file with more prompt and output tokens; default: the models' shortest context."""
    model_context: Internal[Annotated[int, Range(1, 10**9)] | None] = None  # shortest, set by the experiment
    num_prompts: Requests = OPEN
    """Number of requests; default: 1000, or the whole trace if it is replayed."""
    request_rate: RequestRate = math.inf
    """Requests per second. inf sends all immediately, or as soon as --max-concurrency allows."""
    burstiness: Annotated[float, Range(0.001, 1e6), of("request_rate", without=["use_trace_timestamps"])] = 1.0
    """Shape of the Gamma gaps between arrivals: 1 is Poisson, below 1 burstier, above 1 more regular."""
    max_concurrency: Requests | None = None
    """Maximum number of concurrent requests; with --request-rate inf this is a closed loop."""
    use_trace_timestamps: Annotated[bool, of(dataset_name=TRACES)] = False
    """Replay a trace's arrival times, scaled to --request-rate if given."""
    window: Annotated[str, of("use_trace_timestamps")] = ALL
    """Part of a replayed trace: all, peak (the busiest window), N (the Nth busiest), or by-seed (seed 0 the busiest,
    seed 1 the next, and so on). A trace of at most 5,000 requests is one window."""
    columns: Annotated[tuple[str, ...], of(dataset_name="custom")] = ()
    """Columns of your own file, where their names are not recognised: prompt=NAME,output=NAME,time=NAME (also
    acceptance, session, turn, text)."""
    input_len: Tokens | None = None
    """Prompt tokens; default: 1024 for random, else the data set's own."""
    output_len: Tokens | None = None
    """Output tokens; default: 128 for random, else the data set's own."""
    random_range_ratio: Annotated[
        PartialShare, of(dataset_name=("random", "prefix_repetition")), of("input_len"), of("output_len")
    ] = 0.0
    """Spread of --input-len and --output-len: uniform in [len*(1-ratio), len*(1+ratio)]."""
    prefix_len: Annotated[int, Range(0, MAX_TOKENS)] | None = None
    """Tokens of a prefix that requests share, such as a system prompt, before the --input-len tokens of their own.
    Default: 256 for prefix_repetition (which has 256 of its own and 128 output tokens), else 0."""
    num_prefixes: Annotated[Requests | None, of(dataset_name="prefix_repetition"), of("prefix_len")] = None
    """Number of such prefixes; each request has one at random. Default: 10 for prefix_repetition, else 1."""
    num_turns: Annotated[int, Range(1, 10_000), of(without=["use_trace_timestamps"])] = 1
    """Turns of a conversation; of a ShareGPT file at most as many as it has. Each sends the earlier turns and answers
    again, once the last is answered. Rates are of requests; --max-concurrency is in conversations."""
    think_time_s: Annotated[
        float, Range(0, 86_400), of("num_turns"), of(Fact.SESSIONS, without=["use_trace_timestamps"])
    ] = 0.0
    """Mean time from an answer to the next turn of the conversation (exponential)."""
    seed: Seed = 0
    """Seed of arrivals, lengths and acceptance. Every architecture gets the same requests from one seed."""

    # num_prompts, if the window determines it
    window_prompts: Internal[Annotated[int, WINDOW_PROMPTS]] = field(default=OPEN, compare=False)

    usual_prompts = 1000  # default number of requests

    @property
    def longest_request(self) -> int | None:
        """Most tokens of a request from the file."""
        return self.max_model_len or self.model_context

    @property
    def fixed_lengths(self) -> tuple[int, ...]:
        """Given prompt and output tokens, not from a data set."""
        usual = LENGTHS.get(self.dataset_name, (None, None))
        lengths = (self.input_len or usual[0], self.output_len or usual[1])
        return tuple(length for length in lengths if length is not None)

    @property
    def prefixes(self) -> tuple[int, int]:
        """Tokens of a prefix that requests share, and the number of such prefixes."""
        usual = PREFIXES if self.dataset_name == "prefix_repetition" else (0, 1)
        return usual[0] if self.prefix_len is None else self.prefix_len, self.num_prefixes or usual[1]

    @property
    def room(self) -> int:
        """Most tokens of a request without its prefix."""
        return (self.longest_request or 2 * MAX_TOKENS) - self.prefixes[0]

    @property
    def shares(self) -> bool:
        """Whether requests may have a prefix in common."""
        return bool(self.prefixes[0]) or self.converses or (self.dataset_name in TRACES and self.trace().shares)

    @property
    def converses(self) -> bool:
        """Whether requests are turns of conversations."""
        return self.num_turns > 1 or (self.dataset_name in TRACES and self.trace().turns is not None)

    def __post_init__(self) -> None:
        if self.dataset_name == "sharegpt" and self.dataset_path is not None:
            from pdvsim.sim.workload.own import kind_of

            with suppress(OSError, ValueError):  # errors are reported when it is read
                object.__setattr__(self, "dataset_name", kind_of(self.dataset_path, self.columns))
        if self.dataset_name in TRACES and self.dataset_path is None:
            raise ValueError(f"dataset {self.dataset_name} needs --dataset-path with its file")
        window = self.window
        if window not in (None, ALL, PEAK, BY_SEED) and not (window.isascii() and window.isdecimal() and int(window)):
            raise ValueError(f"--window must be {ALL}, {PEAK}, {BY_SEED} or a number from 1, got {window!r}")
        check("window-prompts", self.window_prompts, WINDOW_PROMPTS)
        derived = self.num_prompts in (OPEN, self.window_prompts)
        count = OPEN
        if derived and self.use_trace_timestamps and self.dataset_name in TRACES:
            # again for another seed, window or limit of the context
            count = max(1, len(self.replayed()))
        elif self.num_prompts == OPEN:
            object.__setattr__(self, "num_prompts", self.usual_prompts)
        object.__setattr__(self, "window_prompts", count)
        if count != OPEN:
            object.__setattr__(self, "num_prompts", count)
        check_ranges(self)

    def trace(self) -> Trace:
        """The requests of the file."""
        from pdvsim.sim.workload.own import read_own

        return read_own(self.dataset_path or "", self.tokenizer, self.dataset_name, self.columns)

    def windows(self) -> TraceWindows:
        """The windows of the file, of requests that are short enough."""
        from pdvsim.sim.workload.windows import windows_of

        return windows_of(self.trace(), self.room, self.input_len, self.output_len)

    def window_number(self) -> int | None:
        """The number of the window that is replayed, from 1, by option and seed; None: the whole trace."""
        if self.window == ALL:
            return None
        if self.window == BY_SEED:
            return 1 + self.seed % len(self.windows().busy)
        number, count = (1 if self.window == PEAK else int(self.window)), len(self.windows().parts)
        if number > count:
            raise ValueError(f"--window {number}: {self.dataset_path} has {count} window{'s' if count > 1 else ''}")
        return number

    def about(self, requests: int) -> Traffic:
        """This traffic with `requests` requests; of a replay all of the window, repeated to come near the number.

        A replay that is limited to a part of its window stays so.
        """
        if not self.use_trace_timestamps:
            return replace(self, num_prompts=requests)
        rows = max(1, len(self.replayed()))
        if self.num_prompts < rows:
            return self
        times = round(requests / rows)
        return replace(self, num_prompts=times * rows if times > 1 else OPEN)

    def replayed(self) -> TraceWindow:
        """The requests of the file that a replay sends."""
        windows, number = self.windows(), self.window_number()
        return windows.whole if number is None else windows.parts[number - 1]


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of draft tokens by the target."""

    acceptance_rate: Annotated[Share, of(Fact.DRAFTS, without=FORMS)] = 0.6
    """Probability that a draft token is accepted (Leviathan's alpha), if no other form is given."""
    acceptance_concentration: Annotated[float | None, Range(0.001, 1e9), of(Fact.DRAFTS, without=FORMS)] = None
    """Draw each request's rate from a Beta distribution with mean --acceptance-rate and this concentration (a+b)."""
    synthetic_acceptance_rates: Annotated[tuple[Share, ...], of(Fact.DRAFTS, without=FORMS[1:])] = ()
    """Unconditional acceptance per draft position (vLLM's convention): non-increasing, e.g. 0.8,0.6,0.4."""
    acceptance_model: Annotated[str | None, of(Fact.DRAFTS, without=FORMS[::2])] = None
    """Acceptance as measured for Llama-3.1-8B: cnn, gsm8k, instructcoder or sharegpt, followed by -eagle3, -ngram or
    -suffix."""
    acceptance_trace: Annotated[str | None, of(Fact.DRAFTS, without=FORMS[:2])] = None
    """JSONL of recorded rounds: one list of accepted counts per line, assigned to the requests in turn. The largest
    count is the draft length of the recording."""

    def __post_init__(self) -> None:
        check_ranges(self)
        rates = self.synthetic_acceptance_rates
        if any(b > a for a, b in pairwise(rates)):
            raise ValueError(f"synthetic-acceptance-rates must be non-increasing, got {rates}")
        name = self.acceptance_model
        if name is not None and name not in ACCEPTANCE_MODELS:
            raise ValueError(f"acceptance-model must be one of {', '.join(ACCEPTANCE_MODELS)}, got {name}")

    @property
    def by_rate(self) -> bool:
        """Whether acceptance is a rate per request, and no other form."""
        return not self.synthetic_acceptance_rates and self.acceptance_model is None and self.acceptance_trace is None
