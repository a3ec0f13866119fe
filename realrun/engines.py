"""An experiment on another engine's server: vLLM or SGLang on this machine, by the command that an advice prints.

The server runs in a process group of its own, with random weights and the experiment's acceptance pinned, or with
checkpoints that decide themselves. The client of every run sends the requests, here over HTTP, and what is streamed
back fills the rows of any run.

Not known from outside: launches, and what a request waited before its prefill. Rounds are counted from the stream:
tokens that arrive together count as the fewest rounds that can have gained them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from tempfile import mkdtemp
from time import monotonic, sleep
from typing import Any
from urllib.request import urlopen

import numpy as np
import torch
from numpy.typing import NDArray

from pdvsim.common.files import log_file
from pdvsim.realrun.clock import WallClock
from pdvsim.realrun.machine import Machine
from pdvsim.realrun.site import measured, send_all
from pdvsim.realrun.telemetry import Telemetry
from pdvsim.realrun.texts import next_turns, prompts, repeated
from pdvsim.sim.config import Acceptance, Experiment, Traffic
from pdvsim.sim.core import Request
from pdvsim.sim.models.presets import unquantised
from pdvsim.sim.policies.base import Policy
from pdvsim.sim.records import Columns, Log, Result
from pdvsim.sim.workload.acceptance import FIRST_ROUND, Streams
from pdvsim.sim.workload.requests import make_requests

Rates = tuple[float, ...]

MOST_START_S, STOPPING_S = 900.0, 15.0
MOST_SILENT_S = 300.0  # in which no open request gets a token
MOST_REST_S = 5e-4  # between two looks at the streams
SERVED_NAME = "pdvsim"
WARM_UP = Traffic("random", num_prompts=16, input_len=128, output_len=32, max_concurrency=8)
SAMPLED = 2048, 256  # answers and their tokens that rates are estimated from
TELLING = re.compile(  # lines of a server's log that say what to model
    r"KV cache size|Maximum concurrency|max_total_num_tokens|sync.*schedul|overlap|cudagraph|scheduled_tokens"
    r"|Chunked prefill|Graph capturing finished|Model loading took|torch.compile took|model runner|Using .* backend"
    r"|drafter|synthetic|SIMULATE"
)
KV_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens|max_total_num_tokens=(\d+)")
QUIET = {"VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}


def pinned_rates(experiment: Experiment, requests: Sequence[Request]) -> Rates:
    """Unconditional acceptance by draft position; the same for all seeds, unless a file has the requests' own rates."""
    k, runs = experiment.longest_draft, [request.accept_runs for request in requests]
    if experiment.traffic.dataset_path is None or experiment.acceptance != Acceptance():
        answers, tokens = SAMPLED
        streams = Streams(experiment.acceptance, np.random.default_rng(0), np.random.default_rng(1))
        runs = streams.draw(np.full(answers, tokens))
    accepted, rounds = np.zeros(k), 0
    for run in runs:
        at = FIRST_ROUND
        while at < len(run):
            accepted[: run[at]] += 1
            at, rounds = at + min(run[at], k) + 1, rounds + 1
    return tuple((accepted / max(1, rounds)).round(3).tolist())


def started_with(
    experiment: Experiment, machine: Machine, line: str, rates: Rates, steps: bool
) -> tuple[list[str], dict[str, str]]:
    """The words after `python`, and the environment, of the printed command with what a measurement needs."""
    words, pair = shlex.split(line), experiment.pair
    environment = dict(word.split("=", 1) for word in takewhile(lambda word: "=" in word, words))
    words = words[len(environment) :]
    target, draft = (f"{machine.models}/{unquantised(model.name)}" for model in (pair.target, pair.draft))
    cached = experiment.server.enable_prefix_caching
    if experiment.hardware.engine == "vllm":
        words = ["-m", "vllm.entrypoints.cli.main", *words[1:]]
        given, drafter = words.index("serve") + 1, None
        words += ["--enable-prompt-tokens-details"] if cached else []
        words += ["--enable-logging-iteration-details"] if steps else []
        if "--speculative-config" in words:
            at = words.index("--speculative-config") + 1
            config = json.loads(words[at])
            config |= {"model": draft} if machine.models and "model" in config else {}
            if rates:
                config |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
            words[at] = json.dumps(config)
        if find_spec("flashinfer") is None:
            environment.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    else:
        words = [*words[1:], "--enable-metrics", *(["--enable-cache-report"] if cached else [])]
        given, path = words.index("--model-path") + 1, "--speculative-draft-model-path"
        drafter = words.index(path) + 1 if path in words else None
        if rates:  # real draft tokens: the text of others may be held back until the answer ends
            length = {
                "SGLANG_SIMULATE_ACC_LEN": f"{1 + sum(rates):.3f}",
                "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
            }
            environment |= length | {"SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token"}
    if machine.models:
        words[given], environment["HF_HUB_OFFLINE"] = target, "1"
        if drafter is not None:
            words[drafter] = draft
    words += [] if machine.own_verdict else ["--load-format", "dummy"]
    return [*words, "--served-model-name", SERVED_NAME], environment


class EngineServer:
    """A server in a process group of its own, ready after `wait`; `close` ends the whole group."""

    def __init__(self, words: Sequence[str], environment: dict[str, str], log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address: tuple[str, int] = free.getsockname()
        self.log, (host, port) = log, self.address
        self.url = f"http://{host}:{port}"
        command = [sys.executable, *words, "--host", host, "--port", str(port)]
        with log_file(log) as file:
            self._process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env={**QUIET, **environment, **os.environ}, start_new_session=True,
            )  # fmt: skip

    def wait(self, most_s: float = MOST_START_S) -> None:
        """Wait until it is ready; a ValueError in one line if it has ended, or takes too long."""
        end_s = monotonic() + most_s
        while True:
            with suppress(OSError):
                self.get("/health")
                return
            if self._process.poll() is not None or monotonic() > end_s:
                raise ValueError(self.failure(f"the server was not ready (exit code {self._process.poll()})"))
            sleep(0.25)

    def get(self, path: str) -> str:
        """The text at a path of the server."""
        with urlopen(f"{self.url}{path}", timeout=10) as answer:
            text: str = answer.read().decode()
        return text

    def counters(self) -> Counter[str]:
        """The counters and sums of /metrics, over all their labels."""
        totals: Counter[str] = Counter()
        for line in self.get("/metrics").splitlines():
            name, value = re.split(r"[{ ]", line, maxsplit=1)[0], line.rpartition(" ")[2]
            if name.startswith(("vllm:", "sglang:")) and name.endswith(("_total", "_sum", "_count")):
                totals[name] += float(value)  # type: ignore[assignment]
        return totals

    def told(self) -> list[str]:
        """What its log says of scheduling, graphs and memory."""
        lines = (line.partition("] ")[2] or line for line in self.lines() if TELLING.search(line))
        return list(dict.fromkeys(line.strip()[:300] for line in lines))

    def lines(self) -> list[str]:
        """The lines of the log so far."""
        return self.log.read_text(encoding="utf-8", errors="replace").splitlines()

    def failure(self, what: str) -> str:
        """One line of what failed, with the log's last error and where the log is."""
        lines = [" ".join(line.split())[-300:] for line in self.lines() if line.strip()]
        errors = [line for line in lines if "rror" in line] or lines
        return f"{what}: {errors[-1] if errors else 'its log is empty'}; its log: {self.log}"

    def close(self) -> None:
        """End every process of the group."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOPPING_S)


class StreamedAnswer:
    """The answer to one request as its bytes arrive: an HTTP head, chunks, and in them server-sent events."""

    def __init__(self, request: Request, link: socket.socket) -> None:
        self.request, self.link = request, link
        self.tokens: list[int] = []  # their ids, if the engine sends them
        self.delivered = 0
        self._raw = self._body = b""
        self._chunked: bool | None = None  # None: the head is not whole yet

    def events(self, data: bytes) -> Iterator[dict[str, Any]]:
        """The events that are whole with these bytes."""
        self._raw += data
        if self._chunked is None:
            head, found, rest = self._raw.partition(b"\r\n\r\n")
            if not found:
                return
            self._chunked, self._raw = b"chunked" in head.lower(), rest
            if head.split(None, 2)[1] != b"200":
                raise ValueError(f"the server refused request {self.request.id}: {(head[:40] + b' ' + rest[:300])!r}")
        if not self._chunked:
            self._body, self._raw = self._body + self._raw, b""
        while self._chunked:
            size, found, rest = self._raw.partition(b"\r\n")
            length = int(size.partition(b";")[0], 16) if found else 0
            if not found or len(rest) < length + 2:
                break
            self._body, self._raw = self._body + rest[:length], rest[length + 2 :]
        *lines, self._body = self._body.split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield json.loads(line[len(b"data: ") :])


class EngineClient:
    """What the client of a run sees of the server, and the source of the clock's events: one connection per request."""

    def __init__(
        self, env: WallClock, server: EngineServer, texts: dict[int, NDArray[np.int32]], requests: Sequence[Request],
        k: int, telemetry: Telemetry,
    ) -> None:  # fmt: skip
        self.env, self.server, self.texts, self.k, self.telemetry = env, server, texts, k, telemetry
        self.log = Log()
        self.servers: list[Policy] = []
        self.on_finish: Callable[[Request], None] = lambda request: None
        self._next_turns = next_turns(requests)
        self._selector, self._heard_s = DefaultSelector(), 0.0
        env.sources.append(self)

    def receive(self, request: Request) -> None:
        """Send a request."""
        asked = {
            "model": SERVED_NAME, "prompt": self.texts[request.id].tolist(), "max_tokens": request.output_tokens,
            "ignore_eos": True, "temperature": 0, "stream": True, "return_token_ids": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }  # fmt: skip
        body = json.dumps(asked).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        try:
            link = socket.create_connection(self.server.address)
            link.sendall(head.encode() + body)
        except OSError as error:
            raise ValueError(self.server.failure(f"request {request.id} could not be sent ({error})")) from None
        link.setblocking(False)
        self._selector.register(link, EVENT_READ, StreamedAnswer(request, link))
        self._heard_s = self.env.now

    def poll(self) -> bool:
        """Take in what has arrived."""
        for key, _ in self._selector.select(0):
            self._read(key.data)
        return bool(self._selector.get_map())

    def rest(self) -> None:
        """Wait a moment for the next bytes, so that the server has the processor."""
        now = self.env.now
        self.telemetry.sample_if_due(now)
        if self._selector.get_map() and now - self._heard_s > MOST_SILENT_S:
            raise ValueError(self.server.failure(f"no token within {MOST_SILENT_S:g} s"))
        self._selector.select(max(0.0, min(MOST_REST_S, self.env.peek() - now)))

    def _read(self, answer: StreamedAnswer) -> None:
        request, taken = answer.request, answer.request.taken
        data = b""  # as of a server that has ended
        with suppress(ConnectionError):
            data = answer.link.recv(1 << 18)
        self._heard_s = now = self.env.now
        for event in answer.events(data):
            usage, choices = event.get("usage") or {}, event.get("choices") or []
            if "error" in event:
                raise ValueError(f"the server failed at request {request.id}: {event['error']}")
            if details := usage.get("prompt_tokens_details"):
                taken.num_cached_tokens = details.get("cached_tokens") or 0
            answer.tokens += [token for choice in choices for token in choice.get("token_ids") or ()]
            self._deliver(answer, usage.get("completion_tokens", answer.delivered + len(choices)), now)
        if data:
            return
        self._selector.unregister(answer.link)
        answer.link.close()
        if answer.delivered != request.output_tokens:
            got = f"{answer.delivered} of {request.output_tokens} tokens"
            raise ValueError(self.server.failure(f"the server ended request {request.id} after {got}"))
        if (turn := self._next_turns.get(request.id)) is not None:
            same = np.concatenate([self.texts[request.id], np.array(answer.tokens, np.int32)])
            same = same[: repeated(request, turn)]
            self.texts[turn.id][: len(same)] = same
        self.on_finish(request)

    def _deliver(self, answer: StreamedAnswer, total: int, now: float) -> None:
        """Tokens up to a total have arrived."""
        request, taken, new = answer.request, answer.request.taken, total - answer.delivered
        if new <= 0:
            return
        taken.finish_s, answer.delivered = now, total
        for first in range(0, new, 255):
            self.log.deliveries.append((request.id, min(255, new - first), now))
        if taken.first_token_s < 0:
            taken.admitted_s, taken.first_token_s = request.arrival_s, now
            return
        rounds = -(-new // (self.k + 1))
        taken.rounds += rounds
        if self.k:
            taken.drafts, taken.drafted = taken.drafts + rounds, taken.drafted + rounds * self.k
            taken.accepted += new - rounds
            taken.refused += rounds * (self.k + 1) > new


class EngineBench:
    """Runs on an engine's servers: one stays as long as the next run needs the same. `line` prints the command.

    A server that is given was started by another, and serves every run.
    """

    warm_launches: Columns = {}  # noqa: RUF012

    def __init__(
        self, machine: Machine, line: Callable[[Experiment], str], quiet: bool = True, log: Path | None = None,
        server: EngineServer | None = None,
    ) -> None:  # fmt: skip
        self._machine, self._line, self._quiet, self._log = machine, line, quiet, log
        self._server, self._given = server, server is not None
        self._started: Any = None
        self._runs = 0

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.close()
        self._server = self._started = None

    def ready(self, group: Sequence[Experiment]) -> None:
        """Each run starts what it needs."""

    def served(self, experiment: Experiment) -> Result:
        """Serve an experiment; Ctrl-C raises Interrupted with the requests that had finished."""
        engine = str(experiment.hardware.engine)
        line = self._line(experiment)
        if find_spec(engine) is None:
            raise ValueError(f"--engine {engine}: {engine} is not installed for {sys.executable}: pip install {engine}")
        requests = make_requests(experiment.traffic, experiment.acceptance)
        drafts = experiment.speculates and not self._machine.own_verdict
        rates = pinned_rates(experiment, requests) if drafts else ()
        started = started_with(experiment, self._machine, line, rates, self._log is not None)
        if self._started != started and not self._given:
            self.close()
            path = self._log or Path(mkdtemp(prefix="pdvsim-")) / f"{engine}.log"
            self._server = EngineServer(*started, path)
            self._server.wait()
            self._started = started
            warm = replace(experiment, traffic=WARM_UP)
            self._run(warm, make_requests(WARM_UP, Acceptance()), Telemetry(None), True)
        assert self._server is not None
        before, telemetry = self._server.counters(), Telemetry.of(torch.device(self._machine.device))
        log, stopped = self._run(experiment, requests, telemetry, self._quiet)
        lines, after = self._server.lines(), self._server.counters()
        held = [token for found in map(KV_TOKENS.search, lines) if found for token in found.groups() if token]
        with suppress(PackageNotFoundError):
            engine = f"{engine} {version(engine)}"
        facts: dict[str, Any] = {
            "served_by": engine,
            "gpus": experiment.gpus,
            "weights": "checkpoints" if self._machine.own_verdict else "random",
            "command": shlex.join([*(f"{name}={value}" for name, value in started[1].items()), "python", *started[0]]),
            **({"kv_capacity_tokens": int(held[-1].replace(",", ""))} if held else {}),
            **{name: after[name] - before[name] for name in sorted(after) if after[name] > before[name]},
            "server_log": "\n".join(self._server.told())[-6000:],
        }
        return measured(experiment, self._machine, requests, log, facts, telemetry, stopped)

    def _run(
        self, experiment: Experiment, requests: list[Request], telemetry: Telemetry, quiet: bool
    ) -> tuple[Log, bool]:
        """Send requests as an experiment's, or those of the warm-up; whether Ctrl-C ended it."""
        assert self._server is not None
        self._runs, pair = self._runs + 1, experiment.pair
        vocab = min(model.vocab for model in ((pair.draft, pair.target) if pair.draft.layers else (pair.target,)))
        texts = prompts(requests, vocab, experiment.traffic.seed + (self._runs << 32))  # no run's are cached by another
        env, k = WallClock(), experiment.longest_draft if experiment.speculates else 0
        client = EngineClient(env, self._server, texts, requests, k, telemetry)
        env.start()
        return client.log, send_all(env, requests, experiment, client, quiet)
