"""The command line as data: frozen dataclasses that tyro turns into flags, and the one way in for all of them.

Flags are flat and named after the fields (`request_rate` is `--request-rate` or `--request_rate`). A file given with
`--config` is turned into flags first, so that its values are checked by the same code, with the same message.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import math
import re
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import tyro

from pdvsim.cli.help import help_text
from pdvsim.sim.config import OPEN, Acceptance, Arch, Experiment, Hardware, Host, Scoring, Server, Traffic
from pdvsim.sim.hardware.names import Note
from pdvsim.sim.limits import Range, check_ranges
from pdvsim.sim.policies import USUAL_ARCHS, file_of
from pdvsim.sim.reading import read_toml, said
from pdvsim.study.backends import Backend, BackendName
from pdvsim.study.sweep import DEFAULT_RATES, Sweep

T = TypeVar("T")


@dataclass(frozen=True)
class RunCommand:
    """Simulate one experiment and print its table, in the style of `vllm bench serve`."""

    experiment: Annotated[Experiment, tyro.conf.arg(name="")] = field(default_factory=Experiment)
    output: Annotated[str | None, tyro.conf.arg(aliases=["-o"])] = None
    """Write the result to this file, as JSON with vLLM's keys."""
    save_result: bool = False
    """Write the result to --result-dir, under a name made of label, load, architecture and date."""
    result_dir: str = "."
    """Folder for --save-result."""
    label: str = "pdvsim"
    """Prefix of the name of --save-result."""
    save_detailed: bool = False
    """Also write requests, launches and deliveries as parquet, next to the result."""
    trace_out: str | None = None
    """Write a timeline for ui.perfetto.dev to this file."""
    html: str | None = None
    """Write the table, its picture and where it comes from to this file, as one page."""
    overwrite: bool = False
    """Replace files that are there already; without it they are refused."""
    json: bool = False
    """Print one JSON document instead of the table."""
    config: str | None = None
    """TOML file of flags (request_rate = 8); the command line wins."""

    def __post_init__(self) -> None:
        if not self.experiment.scoring.detailed and (self.save_detailed or self.trace_out or self.html):
            raise ValueError("--no-detailed keeps no records: --save-detailed, --trace-out and --html need them")
        if any(c in "/\\" or not c.isprintable() for c in self.label):
            raise ValueError(f"label is part of a file's name: it takes no slash and prints, got {self.label!r}")


@dataclass(frozen=True)
class SweepTraffic(Traffic):
    """Who asks what, and when."""

    request_rate: tyro.conf.Suppress[float] = math.inf  # the sweep has its own, a list


@dataclass(frozen=True)
class SweepOptions:
    """Architectures, loads and replications, and the experiment they vary."""

    arch: tuple[Arch, ...] = USUAL_ARCHS
    """Serving architectures to compare."""
    concurrency: tuple[int, ...] = ()
    """Loads as requests outstanding at once (closed loop), e.g. 1,2,4,8."""
    request_rate: tuple[float, ...] = ()
    """Loads as requests per second (open loop); without this and --concurrency: 1,2,4,8,16,32,64."""
    num_runs: int = 1
    """Replications of each point; replication i has seed --seed + i, the same for every architecture."""
    vary: tuple[str, ...] = ()
    """Any other flags to vary, e.g. num-speculative-tokens=2,4,8 pair=a:b,c:d; one that takes a list as 0.8+0.6."""
    jobs: int | None = None
    """Points run side by side on this machine; default: one per core."""
    backend: BackendName = "loky"
    """Who runs the points: this machine's cores (loky), or an existing Dask or Ray cluster."""
    scheduler: str | None = None
    """Address of the cluster, e.g. tcp://10.0.0.1:8786 for Dask; Ray finds the one of its machine without."""
    traffic: SweepTraffic = field(default_factory=SweepTraffic)
    acceptance: Acceptance = field(default_factory=Acceptance)
    server: Server = field(default_factory=Server)
    hardware: Hardware = field(default_factory=Hardware)
    host: Host = field(default_factory=Host)
    scoring: Scoring = field(default_factory=Scoring)

    def __post_init__(self) -> None:
        self.where()
        _ = self._sweep

    def where(self) -> Backend:
        """Who runs the points."""
        return Backend(self.backend, self.jobs, self.scheduler)

    def sweep(self) -> Sweep:
        """The sweep these options describe."""
        return self._sweep

    @cached_property
    def _sweep(self) -> Sweep:
        if not self.arch:
            raise ValueError("arch needs at least one value")
        traffic = Traffic(**{f.name: getattr(self.traffic, f.name) for f in fields(Traffic)})
        base = Experiment(self.arch[0], traffic, self.acceptance, self.server, self.hardware, self.host, self.scoring)
        return Sweep(self.arch, self.concurrency, self.request_rate, self.num_runs, base, axes(self.vary))


@dataclass(frozen=True)
class SweepCommand:
    """Run loads x architectures x whatever is varied x replications on all cores; print tables, save rows and a plot.

    The folder holds each finished point in a file of its own: after a crash, --resume goes on with what is missing.
    """

    options: Annotated[SweepOptions, tyro.conf.arg(name="")] = field(default_factory=SweepOptions)
    output: Annotated[str | None, tyro.conf.arg(aliases=["-o"])] = None
    """Folder for sweep.json, parts/, summary.parquet and sweep.png; default: results/sweep-DATE-TIME."""
    resume: bool = False
    """Go on with the sweep in the folder, if there is one: what is done is kept, what is missing or failed is run."""
    continue_on_error: bool = False
    """Record a point that fails, with the reason, in failed/ and go on with the others."""
    save_detailed: bool = False
    """Also write each point's requests, launches and deliveries as parquet, to details/."""
    dry_run: bool = False
    """List the points and estimate the time; write nothing."""
    json: bool = False
    """Print one JSON document instead of the table."""
    verbose: bool = False
    """Also print every point in the style of `vllm bench serve`, and the differences from the first architecture."""
    config: str | None = None
    """TOML file of flags (arch = ["pdv", "pd"]); the command line wins."""

    def __post_init__(self) -> None:
        if self.save_detailed and not self.options.scoring.detailed:
            raise ValueError("--no-detailed keeps no records: --save-detailed needs them")


@dataclass(frozen=True)
class ProfileCommand:
    """Measure models on this machine's GPU: forwards, drafts and prompts alone, pairs side by side, host costs."""

    models: tuple[str, ...] = ()
    """Presets to measure alone, e.g. tinyllama-1.1b,llama-2-7b; or shards of them, e.g. llama-3.1-70b/tp4."""
    pairs: tuple[str, ...] = ()
    """Pairs draft:target to measure side by side, with the host's costs."""
    output: Annotated[str, tyro.conf.arg(aliases=["-o"])] = "results/profile"
    """Folder for samples.parquet and header.json; a second run into it goes on where the first stopped."""
    budget_s: float = 100.0
    """Seconds a model may take; the points left out are named in the header."""
    pair_budget_s: float = 60.0
    """Seconds a pair may take."""
    quick: bool = False
    """Only the most important points, with few repeats."""
    seed: int = 0
    """Of weights, caches and the order of points."""
    jobs: int = 8
    """Processes that compile kernels ahead; 0: none."""

    def __post_init__(self) -> None:
        if not self.models and not self.pairs:
            raise ValueError("nothing to measure: name --models or --pairs")
        check_ranges(self, jobs=Range(0, 1024))


@dataclass(frozen=True)
class ProfilesCommand:
    """List the GPUs, models, profiles and measured samples that come with pdvsim."""

    json: bool = False
    """Print one JSON document instead of the table."""


assert DEFAULT_RATES == (1, 2, 4, 8, 16, 32, 64), "the help of --request-rate names the default loads"


def parse(command: type[T], argv: Sequence[str], prog: str = "pdvsim") -> T:
    """The command that `argv` describes; a ValueError of one line if it describes none. --help exits."""
    if {"-h", "--help", "--help-all"} & set(argv):
        sys.stdout.write(help_text(command, prog, "--help-all" in argv))
        raise SystemExit(0)
    offered = visible(command)
    known = {name: hint for name, hint in flags(command).items() if name in offered}
    hints, placed = get_type_hints(command), positionals(command)
    tokens = _tokens(argv, known, math.inf if any(_is_list(hints[name]) for name in placed) else len(placed))
    path = next((value for flag, value in pairwise(tokens) if flag == "--config"), None)
    if path is not None and "config" in known:
        in_file = {name: hint for name, hint in known.items() if name != "config"}  # a file names no other file
        given = {_name(token).removeprefix("no-") for token in tokens if token.startswith("--")} - {"config"}
        settings = {key: value for key, value in _read_toml(path).items() if _name(key) not in given}
        for arch in _items(settings.get("arch", ())):
            if file_of(arch) is not None:  # a file of flags may come from somebody else
                raise ValueError(f"{path}: arch {arch} is a policy file: name it on the command line, with --arch")
        tokens = _tokens(from_mapping(settings, in_file, f"{path}: unknown key"), known) + tokens
    if "--num-prompts" not in tokens and _default(command, "num_prompts") == OPEN:
        tokens += ["--num-prompts", str(OPEN)]  # tyro would take what a default traffic has made of it
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always", Note)
            parsed = tyro.cli(command, prog=prog, args=tokens, config=(tyro.conf.OmitArgPrefixes,))
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ValueError(_own_words(stop.__context__) or _one_line(errors.getvalue())) from None
    for text, kind in {str(note.message): note.category for note in notes}.items():  # not where tyro's errors go
        warnings.warn(text, kind, stacklevel=2)
    return parsed


def _default(command: type, name: str) -> Any:
    """The default of a field of a command, or of one of its groups; None if it has no such field."""
    own = {field.name: field.default for field in fields(command)}
    inner = (hint for hint in get_type_hints(command).values() if is_dataclass(hint))
    return own[name] if name in own else next((v for h in inner if (v := _default(h, name)) is not None), None)  # type: ignore[arg-type]


def positionals(command: type) -> list[str]:
    """The arguments of a command that are given by place, not by name; in their order, required ones first."""
    hints = get_type_hints(command, include_extras=True)
    return [name for name, hint in hints.items() if tyro.conf.Positional in getattr(hint, "__metadata__", ())]


def flags(command: type) -> dict[str, Any]:
    """Every flag of a command without its dashes, with its type; an outer field hides an inner one of its name."""
    placed = positionals(command)
    hints = {name: hint for name, hint in get_type_hints(command).items() if name not in placed}
    inner = [hint for hint in hints.values() if is_dataclass(hint)]
    known = {name.replace("_", "-"): hint for name, hint in hints.items() if hint not in inner}
    for hint in inner:
        known = flags(hint) | known  # type: ignore[arg-type]
    return known


def visible(command: type) -> set[str]:
    """The flags of a command but those that it sets itself."""
    found: set[str] = set()
    for name, hint in get_type_hints(command, include_extras=True).items():
        if is_dataclass(inner := getattr(hint, "__origin__", hint)):
            found |= visible(inner)  # type: ignore[arg-type]
        elif tyro.conf.Suppress not in getattr(hint, "__metadata__", ()):
            found.add(name.replace("_", "-"))
    return found


def from_mapping(values: Mapping[str, Any], known: Mapping[str, Any], unknown: str) -> list[str]:
    """Keys and Python values as flags; a ValueError that begins with `unknown` and names the nearest key if need be."""
    argv: list[str] = []
    for key, value in values.items():
        name = key.replace("_", "-")
        if name not in known:
            raise ValueError(f"{unknown} {key}{nearest(name, known).replace('--', '').replace('-', '_')}")
        if value is None:
            continue
        many = not isinstance(value, str) and isinstance(value, Iterable)
        if many and not _is_list(known[name]):
            raise ValueError(f"{key} takes one value, got {value}")
        if isinstance(value, Mapping):
            value = [f"{axis}={','.join(_items(values))}" for axis, values in value.items()]
        if known[name] is bool:
            if not isinstance(value, bool):
                raise ValueError(f"{key} must be true or false, got {value!r}")
            argv.append(f"--{name}" if value else f"--no-{name}")
        elif _is_list(known[name]):
            items = _items(value)
            argv += [f"--{name}", *items] if items else []
        else:
            argv.append(f"--{name}={value}")
    return argv


OWN_LISTS = {
    "arch": "--arch",
    "request-rate": "--request-rate",
    "max-concurrency": "--concurrency",
    "seed": "--num-runs",
}


def axes(tokens: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Flags to vary and their values, from "flag=value", "value", …; a ValueError as for the flag itself."""
    known = flags(Experiment)
    texts: dict[str, list[str]] = {}
    last: list[str] | None = None
    for token in tokens:
        flag, equals, value = token.partition("=")
        if equals:
            name = _name(flag)
            if name not in known:
                raise ValueError(f"vary: unknown flag {flag}{nearest(name, known).replace('--', '')}")
            if name in OWN_LISTS:
                raise ValueError(f"vary: {flag} has an option of its own, {OWN_LISTS[name]}")
            if name in texts:
                raise ValueError(f"vary names {flag} twice")
            last = texts[name] = []
        elif last is None:
            raise ValueError(f"vary takes flag=value,value, got {token!r}")
        else:
            value = token
        last += [value] if value else []
    for name, values in texts.items():
        if not values:
            raise ValueError(f"vary: {name} needs a value")
    return {name.replace("-", "_"): tuple(_typed(name, known[name], v) for v in vs) for name, vs in texts.items()}


def _typed(name: str, hint: Any, text: str) -> Any:
    """One value of a flag, read as the command line reads it."""
    key = name.replace("-", "_")
    if hint is bool:
        if text not in ("true", "false"):
            raise ValueError(f"vary: {name} must be true or false, got {text!r}")
        return text == "true"
    command = make_dataclass("Flag", [(key, hint)], frozen=True)
    return getattr(parse(command, [f"--{name}", *(text.split("+") if _is_list(hint) else [text])]), key)


def _items(value: Any) -> list[str]:
    many = not isinstance(value, str) and isinstance(value, Iterable)
    return [str(item) for item in value] if many else [str(value)]


def _tokens(argv: Sequence[str], known: Mapping[str, Any], places: float = 0) -> list[str]:
    """`argv` with flags spelt one way, lists split at commas, those given by place first; unknown ones are refused."""
    tokens: list[str] = []
    placed: list[str] = []
    room = 0.0  # values the last flag still takes
    missing: str | None = None
    splits = False
    for token in argv:
        is_flag = token.startswith("-") and token != "-" and not _is_number(token)
        if is_flag and missing:
            raise ValueError(f"{missing} needs a value")
        if is_flag:
            spelt, equals, value = token.partition("=")
            name = "output" if spelt == "-o" and "output" in known else _name(spelt)
            switch = name if name in known else name.removeprefix("no-")
            if known.get(switch) is bool and spelt.startswith("--"):
                if equals:
                    raise ValueError(f"{spelt} takes no value, got {value!r}")
                room, missing = 0, None
            elif name in known and (spelt.startswith("--") or spelt == "-o"):
                splits = _is_list(known[name])
                room, missing = (math.inf if splits else 1), f"--{name}"
            else:
                raise ValueError(f"unknown option {spelt}{nearest(name, known)}")
            tokens.append(f"--{name}")
            if not equals:
                continue
            token = value
        if not room and len(placed) < places:
            placed.append(token)
            continue
        if not room:
            raise ValueError(f"unexpected argument {token!r}; options start with --")
        parts = [part for part in token.replace(",", " ").split() if part] if splits else [token]
        tokens += parts
        room -= 1
        missing = None if parts else missing
    if missing:
        raise ValueError(f"{missing} needs a value")
    return placed + tokens


def _name(flag: str) -> str:
    return flag.lstrip("-").replace("_", "-")


def _is_list(hint: Any) -> bool:
    return get_origin(hint) is tuple


def _is_number(token: str) -> bool:
    try:
        float(token)
    except ValueError:
        return False
    return True


def nearest(name: str, known: Iterable[str]) -> str:
    """A question that names the known flag that is most like `name`; nothing if none is."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean --{close[0]}?" if close else ""


def _read_toml(path: str) -> dict[str, Any]:
    try:
        return read_toml(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {said(error)}") from None


def _own_words(error: BaseException | None) -> str | None:
    """What a dataclass of ours refused, as it said it: tyro's box would break long words. None if tyro refused."""
    refused = error.args if error is not None else ()
    return refused[0] if len(refused) == 2 and all(isinstance(part, str) for part in refused) else None


def _one_line(box: str) -> str:
    """What tyro says in a box, without the box, the help it repeats and the group of flags it names."""
    lines = [line.strip("│╭╮╰╯─ \t") for line in box.splitlines()[1:]]
    lines = ["" if set(line) == {"-"} else line for line in lines]  # a rule, where the terminal has no box characters
    lines = lines[not lines[0] :] if lines else lines
    message = " ".join(lines[: lines.index("")] if "" in lines else lines)
    message = re.sub(r"^Error parsing (\S+): (?:Error parsing \S+: )*", lambda m: _flag_only(m[1]), message)
    message = re.sub(r"^Missing from [^:]*: [\w|{},-]+ (.*) \(required\)$", r"an argument is missing: \1", message)
    message = re.sub(r"invalid literal for int\(\) with base 10: (.*)", r"must be a whole number, got \1", message)
    message = re.sub(r"could not convert string to float: (.*)", r"must be a number, got \1", message)
    message = re.sub(r"Could not find valid parse for arguments: (.*)", r"must be a list of numbers, got \1", message)
    return message.replace(": must be", " must be") or "cannot read the command line"


def _flag_only(name: str) -> str:
    return f"{name}: " if name.startswith("--") else ""
