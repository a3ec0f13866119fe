"""Broken files and command lines from a seed, and the law they are held to: for `test_fuzz` and `make fuzz`.

The law: a loader returns or raises a ValueError or OSError of one line. A command ends with 0, 1 or 2; with 2 its last
line begins `pdvsim: error:`; every line of its standard error begins `pdvsim:`; there is no traceback, no crash file
and no file half written, and it stays within a stated processor time. A case is `case(seed, yard)`, and nothing else.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from resultdirs import sweep_folder

from pdvsim import cli
from pdvsim.bench.results import check_result, load
from pdvsim.calibration.validate.bench import read_load
from pdvsim.calibration.validate.served import read_runs
from pdvsim.cli import command_class
from pdvsim.common.options import options
from pdvsim.profiler import samples
from pdvsim.sim.models.presets import model
from pdvsim.sim.prices.cards import card_file
from pdvsim.sim.prices.profile import builtin
from pdvsim.sim.prices.profile import load as load_profile
from pdvsim.sim.workload import acceptance, counters, datasets
from pdvsim.sim.workload.own import read_own
from pdvsim.view.report.document import build
from pdvsim.view.report.sheet import page

MOST_CPU_S = 30.0  # of one case
DEEP = 3000

CARD = """name = "mine"
bandwidth_bytes_per_s = 1.8e12
flops_per_s = 210e12
memory_bytes = 34e9
sms = 170
measured = false
source = "data sheet of 2025"
"""
MODEL = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 688, "vocab_size": 32000,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "tie_word_embeddings": False,
}  # fmt: skip
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023-11-16 18:17:03.9799600,40,6\n" * 6
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n" + "5,GPT-4,40,6,46,API log\n" * 6
MOONCAKE = '{"timestamp": 100, "input_length": 40, "output_length": 6, "hash_ids": [1, 2]}\n' * 6
OWN = "arrival_s,prompt_tokens,output_tokens\n" + "0.5,40,6\n" * 6
TALK = [{"conversations": [{"from": "human", "value": "what is it"}, {"from": "gpt", "value": "this and that"}]}] * 3
REAL = {
    "command": "realrun --arch pd --dataset-name random --num-prompts 3 --max-concurrency 2 --input-len 9",
    "repeat": 0,
    "held_out": False,
    "metrics": {"output_throughput": 400.0, "mean_ttft_ms": 9.0, "mean_tpot_ms": 4.0},
}  # fmt: skip
METRICS = """vllm:spec_decode_num_drafts_total{engine="0"} 100.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 200.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 110.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 70.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 40.0
"""
BENCH = {
    "num_prompts": 3, "request_rate": 2.0, "burstiness": 1.0, "max_concurrency": 2, "duration": 2.0, "completed": 3,
    "total_input_tokens": 27, "total_output_tokens": 12, "request_throughput": 1.5, "output_throughput": 6.0,
    "mean_ttft_ms": 9.0, "p99_tpot_ms": 4.0, "input_lens": [9, 9, 9], "output_lens": [4, 0, 4], "ttfts": [0.1, 0, 0.1],
    "start_times": [5.0, 5.5, 6.0], "queue_times": [0, 0.1, 0], "spec_decode_num_drafts": 2,
    "spec_decode_draft_tokens": 4, "spec_decode_per_position_acceptance_rates": [0.5, 0.5],
}  # fmt: skip
TOML = 'arch = "pd"\nnum_prompts = 3\noutput_len = 5\nrequest_rate = 8.0\ngoodput = ["ttft:500"]\n'


@dataclass(frozen=True)
class Yard:
    """A folder of good files, by what reads them; `case` is where a broken copy goes."""

    folder: Path
    good: dict[str, bytes]
    sweep: Path
    run: Path


def make_yard(folder: Path) -> Yard:
    """Good files of every kind, small ones."""
    os.mkfifo(folder / "fifo")
    sweep = sweep_folder(folder / "sweep", archs=("pd",), rates=(20.0,), seeds=1)
    run = folder / "run.json"
    with _quiet():
        code = cli.main(["run", "--num-prompts", "4", "--output-len", "5", "-o", str(run), "--save-detailed"])
    assert code == 0
    profile = json.loads(json.dumps(builtin("h200").document()))
    profile["models"] = {name: profile["models"][name] for name in ("tinyllama-1.1b", "llama-2-7b")}
    good = {
        "profile.json": json.dumps(profile),
        "card.toml": CARD,
        "config.json": json.dumps(MODEL),
        "azure.csv": AZURE,
        "burst.csv": BURST,
        "mooncake.jsonl": MOONCAKE,
        "own.csv": OWN,
        "sharegpt.json": json.dumps(TALK),
        "accepted.jsonl": "[4, 0, 2]\n[1, 1]\n",
        "metrics.txt": METRICS,
        "runs.jsonl": json.dumps(REAL) + "\n",
        "bench.json": json.dumps(BENCH),
        "flags.toml": TOML,
    }
    content = {name: text.encode() for name, text in good.items()}
    content["sweep/rows.jsonl"] = (sweep / "rows.jsonl").read_bytes()
    details = ("requests", "launches", "deliveries")
    content |= {f"run.{name}.parquet": (folder / f"run.{name}.parquet").read_bytes() for name in details}
    content["run.json"] = run.read_bytes()
    data = Path(samples.__file__).parents[1] / "calibration" / "data" / "h200"
    content["samples/header.json"] = (data / samples.HEADER).read_bytes()
    content["samples/samples.parquet"] = (data / samples.SAMPLES).read_bytes()
    return Yard(folder, content, sweep, run)


@dataclass(frozen=True)
class Case:
    """What is done: a loader called, or a command line."""

    seed: int
    what: str
    call: Callable[[], object] | None = None
    argv: tuple[str, ...] = ()


# ---- values ----------------------------------------------------------------------------------------------------------

NASTY_NUMBERS = (
    "0", "-1", "1", "2", "3", "0.5", "1.5", "1e-300", "1e308", "-1e308", "nan", "inf", "-inf", "1e400", "9" * 30,
    "1" + "0" * 400, "9" * 5000, "-0.0", "0x10", "1_0", "٣", "²", " 4", "1e", "true", "1e-6", "255", "65537",
    "10000001",
)  # fmt: skip
NASTY_TEXTS = (
    "", " ", ",", "=", ":", "a:b", "x=1", "--", "-", "--json", "é", "日本語" * 30, "\u202e", "\ud800", "a\nb", "a\0b",
    "\x1b[31m", "2023-11-16 18:15:46", "2023-11-16T18:15:46.5+02:00", "9999-12-31 23:59:59+00:00",
    "/dev/null", "/dev/zero", "/", ".", "..", "/no/such/file", "~", "%s%n", "{}", "a" * 5000, "../" * 50, "null", "pdv",
)  # fmt: skip
NASTY_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 32.9, 1e-300, 1e300, 1e30, float("nan"), float("inf"), 10**20, 10**400, -(10**20),
    "", "x",
    "1e-3", "false", "a\nb", "\ud800", "é" * 50, [], {}, [[1, 2]], [[1, 0.1], [2, 0.0]], [[1, 0], [2, 0]], [0] * 50,
    {"a": 1},
)  # fmt: skip


def number(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(NASTY_NUMBERS)
    return str(rng.randrange(-5, 40)) if kind < 0.8 else f"{rng.uniform(-2, 2) * 10 ** rng.randrange(-8, 9):g}"


def text(rng: random.Random, yard: Yard) -> str:
    if rng.random() < 0.3:
        return str(rng.choice([yard.folder / "fifo", yard.folder, yard.sweep, yard.run, yard.folder / "missing.json"]))
    return rng.choice(NASTY_TEXTS) if rng.random() < 0.7 else number(rng)


# ---- files -----------------------------------------------------------------------------------------------------------


def mutated(rng: random.Random, name: str, content: bytes) -> bytes:
    """A file's content, broken: by structure where it has one, else byte by byte."""
    if rng.random() < 0.5:
        if name.endswith(".json"):
            return restructured(rng, [json.loads(content)])[0]
        if name.endswith(".jsonl"):
            lines = [json.loads(line) for line in content.splitlines()]
            return b"\n".join(restructured(rng, lines))
        if name.endswith(".csv"):
            rows = [line.split(b",") for line in content.splitlines()]
            row = rng.choice(rows)
            row[rng.randrange(len(row))] = rng.choice(NASTY_NUMBERS + NASTY_TEXTS).encode("utf-8", "surrogatepass")
            return b"\n".join(b",".join(row) for row in rows)
        if name.endswith(".toml"):
            lines = content.splitlines()
            at = rng.randrange(len(lines))
            key = lines[at].partition(b"=")[0]
            value = rng.choice(
                [*NASTY_NUMBERS, *(json.dumps(t) for t in NASTY_TEXTS), "[" * DEEP, "[1, 2]", "{a = 1}", "true"]
            )
            lines[at] = key + b"= " + value.encode("utf-8", "surrogatepass")
            return b"\n".join(lines)
    return _bytes(rng, content)


def restructured(rng: random.Random, documents: list[Any]) -> list[bytes]:
    """JSON documents with one or two places, at any depth, scaled, replaced, removed or given a neighbour; as text."""
    for _ in range(rng.randrange(1, 3)):
        holder: Any = documents
        key: Any = rng.randrange(len(documents))
        while isinstance(holder[key], dict | list) and holder[key] and rng.random() < 0.8:
            holder = holder[key]
            key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
        how = rng.random()
        if how < 0.15 and isinstance(holder, dict):
            holder[rng.choice(["x", "", "\n", "schema_version"])] = copy.deepcopy(rng.choice(NASTY_VALUES))
        elif how < 0.3 and holder is not documents:
            del holder[key]
        elif how < 0.6 and type(holder[key]) in (int, float) and abs(holder[key]) < 1e300:  # larger ones overflow
            holder[key] *= rng.choice((0.1, 0.5, 2, 10))  # which may well be taken
        else:
            holder[key] = copy.deepcopy(rng.choice(NASTY_VALUES))
    whole = [json.dumps(document).encode() for document in documents]
    if rng.random() < 0.05:
        whole[0] = b"[" * DEEP + b"]" * DEEP if rng.random() < 0.5 else b'{"a":' * DEEP + b"1" + b"}" * DEEP
    return whole


def _bytes(rng: random.Random, content: bytes) -> bytes:
    """Cut, flipped, doubled, prefixed or noisy."""
    how, at = rng.randrange(7), rng.randrange(len(content) + 1)
    if how == 0:
        return content[:at]
    if how == 1:
        flipped = bytearray(content)
        for _ in range(rng.randrange(1, 8)):
            flipped[rng.randrange(len(flipped))] = rng.randrange(256)
        return bytes(flipped)
    if how == 2:
        return content[:at] + rng.randbytes(rng.randrange(1, 40)) + content[at:]
    if how == 3:
        return content[:at] + content[min(len(content), at + rng.randrange(1, 200)) :]
    if how == 4:
        return rng.choice([b"\xef\xbb\xbf", b"\xff\xfe", b"\0", b"\x1f\x8b\x08", b"PAR1"]) + content
    if how == 5:
        return content[:at] + content[: rng.randrange(1, 500)] + content[at:]
    return rng.randbytes(rng.randrange(200)) if rng.random() < 0.5 else b""


def _rows(kind: str | None, path: Path) -> None:
    """Read requests: one or more, with finite times and with tokens, or an error that names the file."""
    try:
        trace = read_own(str(path), kind=kind or "custom")
    except ValueError as error:
        if str(path) not in str(error):
            raise AssertionError(f"the file is not named: {error}") from error
        return
    assert len(trace.lengths) > 0
    assert trace.lengths.min() >= 1
    assert len(trace.arrival_s) == len(trace.lengths) or not kind  # one's own may have no times
    assert np.isfinite(trace.arrival_s).all()


LOADERS: dict[str, Callable[[Path], object]] = {
    "profile.json": load_profile,
    "card.toml": card_file,
    "config.json": lambda path: model(str(path)),
    "azure.csv": partial(_rows, "azure"),
    "burst.csv": partial(_rows, "burstgpt"),
    "mooncake.jsonl": partial(_rows, "mooncake"),
    "own.csv": partial(_rows, None),
    "sharegpt.json": lambda path: datasets._conversations(str(path)),
    "accepted.jsonl": lambda path: acceptance.read_trace(str(path)),
    "metrics.txt": lambda path: counters.read_acceptance(str(path)),
    "runs.jsonl": read_runs,
    "bench.json": lambda path: read_load(str(path)),
    "sweep/rows.jsonl": lambda path: (check_result(path.parent), load([path.parent])),
    "run.json": lambda path: page(build(load([path]))),
    **dict.fromkeys(
        ("run.requests.parquet", "run.launches.parquet", "run.deliveries.parquet"),
        lambda path: page(build(load([path.with_name("run.json")]))),
    ),
    "samples/header.json": lambda path: samples.load_header(path.parent),
    "samples/samples.parquet": lambda path: samples.load(path.parent),
}
SMALL = ("--num-prompts", "3", "--input-len", "20", "--output-len", "5")
USES: dict[str, tuple[str, ...]] = {  # a command line that reads the file, which stands for {}
    "profile.json": ("run", "--profile", "{}", *SMALL),
    "card.toml": ("run", "--gpu", "{}", *SMALL),
    "config.json": ("run", "--pair", "{}:llama-2-7b", *SMALL),
    "azure.csv": ("run", "--dataset-name", "azure", "--dataset-path", "{}", "--num-prompts", "3"),
    "burst.csv": ("run", "--dataset-name", "burstgpt", "--dataset-path", "{}", "--num-prompts", "3"),
    "mooncake.jsonl": ("run", "--dataset-name", "mooncake", "--dataset-path", "{}", "--use-trace-timestamps", *SMALL),
    "accepted.jsonl": ("run", "--acceptance-trace", "{}", *SMALL),
    "metrics.txt": ("run", "--acceptance-from", "{}", *SMALL),
    "bench.json": ("validate", "--bench", "{}", "--model", "llama-2-7b", "--num-speculative-tokens", "0", "--json"),
    "runs.jsonl": ("validate", "{}", "--no-ablations", "--jobs", "1", "--json"),
    "flags.toml": ("run", "--config", "{}"),
    "run.json": ("report", "{}", "-o", "{}.html"),
    "sweep/rows.jsonl": ("sweep", "-o", "{folder}", "--resume", "--dry-run", "--request-rate", "20", *SMALL),
}


def _broken_file(rng: random.Random, yard: Yard, name: str) -> Path:
    """A broken copy of a good file among good ones; now and then no file at all, but something else of its name."""
    place = yard.folder / "case"
    shutil.rmtree(place, ignore_errors=True)
    (place / name).parent.mkdir(parents=True)
    siblings = [other for other in yard.good if other.split("/")[0].split(".")[0] == name.split("/")[0].split(".")[0]]
    for other in siblings:
        (place / other).write_bytes(yard.good[other])
    path = place / name
    path.unlink()
    how = rng.random()
    if how < 0.02:
        os.mkfifo(path)
    elif how < 0.04:
        path.symlink_to(rng.choice(["/dev/zero", "/dev/null", "/dev/full", path.name, "/proc/self/mem"]))
    elif how < 0.05:
        path.mkdir()
    elif how < 0.06:
        with open(path, "wb") as file:
            file.truncate(1 << rng.choice([20, 26, 27, 33, 42]))
    else:
        path.write_bytes(mutated(rng, name, yard.good[name]))
    return path


# ---- command lines ---------------------------------------------------------------------------------------------------

ALWAYS: dict[str, tuple[str, ...]] = {  # what keeps a command line small unless given
    "run": SMALL,
    "sweep": (*SMALL, "--dry-run", "--request-rate", "4"),
    "map": (*SMALL, "--arch", "pd,pdv", "--num-runs", "2", "--concurrency", "2", "--acceptances", "0.5", "--jobs", "1"),
    "capacity": ("--goodput", "ttft:9", *SMALL, "--num-runs", "1", "--arch", "pd", "--jobs", "1"),
    "advise": ("--request-rate", "4", *SMALL, "--num-runs", "2", "--arch", "pd", "--jobs", "1", "--budget", "9"),
    "draft-table": (*SMALL, "--max-num-seqs", "4", "--num-runs", "2", "--jobs", "1"),
}
BARE = ("plot", "report", "validate", "calibrate", "reproduce", "profile", "nonsense", "--version", "-h", "")
WRITES = {"output", "result-dir", "trace-out", "html", "label", "plot", "plots"}


def _command_line(rng: random.Random, yard: Yard, cheap: bool) -> tuple[str, ...]:
    """A command with a few flags of its own and values from the grammar; `cheap` ones that mostly end at the parser."""
    if rng.random() < 0.12:
        name = rng.choice(BARE)
        words = [text(rng, yard) for _ in range(rng.randrange(3))]
        if name in ("reproduce", "profile", "calibrate", "validate"):
            flag = rng.choice(["num-runs", "seed", "budget-s", "jobs", "gpu", "nope"])
            words.append(f"--{flag}={rng.choice(['-1', 'nan', ''])}")
        return (name, *words) if name else ()
    name = rng.choice(["run"] * 5 + ["sweep"] * 2 + ["map"] * 2 + ["capacity", "advise", "draft-table"])
    known = {option.flag[2:]: option.hint for option in options(command_class(name)).values()}
    chosen = rng.sample(sorted(known), rng.randrange(1, 3))
    argv: list[str] = [name, *ALWAYS[name]]
    if name not in ("run", "sweep"):
        argv += ["-o", str(yard.folder / "case" / "out")]
        if cheap:  # a service level, an architecture or a seed that nobody has ends it before anything is simulated
            argv += ["--seed", rng.choice(["-1", "x", "1.5"])]
    for flag in chosen:
        if known[flag] is bool:
            argv.append(rng.choice([f"--{flag}", f"--no-{flag}", f"--{flag}=yes"]))
            continue
        if flag in WRITES:
            value = str(yard.folder / "case" / rng.choice(["out", "no/such", "é", "o" * 300]))
        elif flag in ("jobs", "backend", "scheduler"):
            value = rng.choice(["0", "-1", "nan", "x", "1"])
        else:
            value = number(rng) if rng.random() < 0.6 else text(rng, yard)
            if flag in ("num-prompts", "output-len") and value in ("255", "65537"):
                value = "7"  # lawful, and seconds of work
        argv += [f"--{flag}={value}"] if rng.random() < 0.5 else [f"--{flag}", value]
    return tuple(argv)


def case(seed: int, yard: Yard, commands: float = 0.1, cheap: bool = True) -> Case:
    """The case of a seed; `commands` is the share of command lines, the others call a loader."""
    rng = random.Random(seed)
    if rng.random() >= commands:
        name = rng.choice(list(LOADERS))
        path = _broken_file(rng, yard, name)
        return Case(seed, f"load {name} at {path}", call=lambda: LOADERS[name](path))
    if rng.random() < 0.35:
        name = rng.choice(list(USES))
        path = _broken_file(rng, yard, name)
        filled = (part.replace("{folder}", str(path.parent)).replace("{}", str(path)) for part in USES[name])
        argv = tuple(filled)
    else:
        shutil.rmtree(yard.folder / "case", ignore_errors=True)
        (yard.folder / "case").mkdir()
        argv = _command_line(rng, yard, cheap)
    return Case(seed, f"pdvsim {' '.join(map(repr, argv))}"[:2000], argv=argv)


# ---- the law ---------------------------------------------------------------------------------------------------------


def violation(broken: Case, yard: Yard) -> str | None:
    """How a case breaks the law; None if it does not."""
    try:
        with _limited():
            return _loaded(broken.call) if broken.call is not None else _commanded(broken.argv, yard)
    except TooLong:
        return f"took more than {MOST_CPU_S:.0f} s of processor time"


def _loaded(call: Callable[[], object]) -> str | None:
    try:
        call()
    except TooLong:
        raise
    except (ValueError, OSError) as error:
        message = str(error)
        if not message or "\n" in message or len(message) > 3000:
            return f"not one line: {message!r:.300}"
    except BaseException as error:
        return f"{type(error).__name__}: {error!s:.300}"
    return None


def _commanded(argv: tuple[str, ...], yard: Yard) -> str | None:
    here = os.getcwd()
    os.chdir(yard.folder / "case")
    try:
        with _quiet() as (out, err):
            try:
                code = cli.main(argv)
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else 1
    finally:
        os.chdir(here)
    lines = err.getvalue().splitlines()
    if code not in (0, 1, 2):
        return f"exit code {code}: {lines[-1:]}"
    if "Traceback" in err.getvalue() + out.getvalue():
        return "a traceback is printed"
    wrong = [line for line in lines if not line.startswith("pdvsim:")]
    if wrong:
        return f"on standard error: {wrong[0]!r:.300}"
    if code == 2 and not (lines and lines[-1].startswith("pdvsim: error: ")):
        return f"exit code 2 without a reason: {lines[-1:]}"
    if code == 0 and "--json" in argv and not {"-h", "--help"} & set(argv):
        json.loads(out.getvalue())
    left = [
        path.name for path in (yard.folder / "case").rglob("*") if path.name.endswith(".tmp") or "crash" in path.name
    ]
    return f"left behind: {left[0]}" if left else None


class TooLong(BaseException):
    """Not an Exception: nobody catches it but the law."""


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextlib.contextmanager
def _quiet() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield out, err
