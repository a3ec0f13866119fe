"""Requests as recorded, the lines of a file that holds them, and ShareGPT: its file, and a built-in model of it.

A reader returns the rows of a file or raises a ValueError of one line that names the file, the line or field, and what
is accepted. Not modelled: the text itself, and requests that failed when they were recorded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim import reading
from pdvsim.sim.limits import MAX_LINE_CHARS, MAX_TOKENS
from pdvsim.sim.reading import error_text, parse_json, printable, quoted
from pdvsim.sim.workload.conversations import Growth, Recorded, recorded

Lengths = NDArray[np.int64]  # one row per request: prompt tokens, output tokens

TOKENS_ACCEPTED = f"a whole number from 1 to {MAX_TOKENS}"
SHAREGPT_ACCEPTED = (
    'a JSON list of {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": text}]}'
)
SPEAKERS = ("human", "user"), ("gpt", "chatgpt", "bard", "bing")
SHAREGPT_TOKENS = 2048  # most prompt and output tokens of a request, as in vLLM
SHAREGPT_FILTER = f"prompt >= 4, output >= 4, prompt <= 1024 and prompt + output <= {SHAREGPT_TOKENS} tokens"
CHARACTERS_PER_TOKEN = 4  # approximately, for English text
ESTIMATED = f"no --tokenizer: lengths are estimated at {CHARACTERS_PER_TOKEN} characters per token"
EPOCH, EPOCH_UTC = datetime(1970, 1, 1), datetime(1970, 1, 1, tzinfo=UTC)
SHAREGPT_MODEL = Path(__file__).parent / "data" / "sharegpt_v3.json"


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests as recorded: seconds on the trace's own clock, and lengths, in the file's order."""

    arrival_s: NDArray[np.float64]
    lengths: Lengths
    acceptance: NDArray[np.float32] | None = None  # rate of each request, if in the file
    sessions: NDArray[np.int64] | None = None  # the session of each, by number
    timed: bool = True  # whether the file has arrival times
    turns: NDArray[np.int64] | None = None  # of the sessions, if they are conversations, from 0
    hashes: NDArray[np.object_] | None = None  # of each prompt's blocks of HASHED_TOKENS
    notes: tuple[str, ...] = ()  # how columns were read

    @property
    def shares(self) -> bool:
        """Whether requests may have a prefix in common."""
        return self.turns is not None or self.hashes is not None

    def only(self, rows: NDArray[Any]) -> Trace:
        """Return the selected requests."""
        columns = {name: column for name, column in vars(self).items() if isinstance(column, np.ndarray)}
        return replace(self, **{name: column[rows] for name, column in columns.items()})

    def talk(self) -> Recorded | None:
        """The conversations, if the sessions are some."""
        if self.turns is None or self.sessions is None:
            return None
        return recorded(self.sessions, self.turns, self.lengths)


def bad(path: str, where: str, what: str, accepted: str = "") -> ValueError:
    """A ValueError of one printable line about one place of one file."""
    text = f"{path}: {where}{': ' if where else ''}{what}{f'; accepted: {accepted}' if accepted else ''}"
    return ValueError(printable(text))


@contextmanager
def opened(path: str) -> Iterator[TextIO]:
    """The file as UTF-8 text; a ValueError of one line if that fails."""
    try:
        content = reading.opened(path)
    except (OSError, ValueError) as error:
        raise bad(path, "", f"cannot be read ({error_text(error)})", "a text file") from None
    try:
        with TextIOWrapper(content, encoding="utf-8-sig", newline="") as file:
            yield file
    except UnicodeError:
        raise bad(path, "", "is not UTF-8 text", "a text file, unpacked") from None


def lines_of(file: TextIO) -> Iterator[str]:
    """The lines of a file; one that is far too long comes in pieces, which are no rows."""
    return iter(partial(file.readline, MAX_LINE_CHARS), "")


def json_lines(path: str, accepted: str) -> Iterator[tuple[int, Any]]:
    """Line number and value of each line of a JSONL file; blank lines are skipped."""
    with opened(path) as file:
        for number, line in enumerate(lines_of(file), 1):
            try:
                if text := line.strip():
                    yield number, parse_json(text)
            except ValueError:
                raise bad(path, f"line {number}", f"{quoted(text)} is not JSON", accepted) from None


def moment_s(value: Any) -> float:
    """A date in seconds; nan if it is none. Without a zone it is taken as it stands: this machine's plays no part."""
    try:
        moment = datetime.fromisoformat(value)
        return (moment - (EPOCH_UTC if moment.tzinfo else EPOCH)).total_seconds()
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _conversations(path: str, most: int = 1) -> list[list[tuple[str, str]]]:
    """The first human turns and the first reply to each, up to `most`, of every conversation that has both."""
    with opened(path) as file:
        text = file.read()
    try:
        entries = parse_json(text)
    except ValueError as error:
        raise bad(path, "", str(error), SHAREGPT_ACCEPTED) from None
    if type(entries) is not list:
        raise bad(path, "", f"holds {quoted(entries)}", SHAREGPT_ACCEPTED)
    talks = []
    for index, entry in enumerate(entries):
        turns = entry.get("conversations", []) if type(entry) is dict else None
        if type(turns) is not list:
            raise bad(path, f"entry {index}", "has no list of turns", SHAREGPT_ACCEPTED)
        texts: list[str] = []
        for at, turn in enumerate(turns):
            if len(texts) == 2 * most:
                break
            if type(turn) is not dict or not isinstance(turn.get("value"), str):
                raise bad(path, f"conversation {index}", f"turn {at} has no text under 'value'", SHAREGPT_ACCEPTED)
            speakers = SPEAKERS[len(texts) % 2]
            if turn.get("from", speakers[0]) in speakers:
                texts.append(turn["value"])
        if len(texts) > 1:
            talks.append(list(zip(texts[::2], texts[1::2], strict=False)))
    return talks


def token_counter(folder: str | None) -> Callable[[list[str]], list[int]]:
    """A function from texts to token counts (special tokens included, as vLLM counts) by a local tokenizer.

    Without one they are estimated.
    """
    if folder is None:
        return lambda texts: [math.ceil(len(text) / CHARACTERS_PER_TOKEN) for text in texts]
    tokens_of = tokenized_by(folder)
    return lambda texts: [len(ids) for ids in tokens_of(texts)]


def tokenized_by(folder: str) -> Callable[[list[str]], list[list[int]]]:
    """A function from texts to their tokens, by a local tokenizer."""
    accepted = "a local folder of a Hugging Face tokenizer (tokenizer.json, tokenizer_config.json)"
    if "\0" in folder or not Path(folder).is_dir():
        raise bad(folder, "--tokenizer", "is not a folder", accepted)
    for path in Path(folder).iterdir():
        if path.exists() and not path.is_file() and not path.is_dir():  # reading a pipe or device may block
            raise bad(folder, "--tokenizer", f"{path.name} is not a regular file", accepted)
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ValueError("--tokenizer needs the package transformers: pip install transformers") from None
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a broken folder may raise anything
        raise bad(folder, "--tokenizer", f"cannot be loaded ({type(error).__name__})", accepted) from None

    def tokens(texts: list[str]) -> list[list[int]]:
        # JSON may hold half of a surrogate pair, which no tokenizer takes.
        clean = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
        return [list(ids) for ids in tokenizer(clean, verbose=False)["input_ids"]]

    return tokens


def read_sharegpt(
    path: str, tokenizer: str | None, wanted: int, rng: np.random.Generator, longest: int = MAX_TOKENS, turns: int = 1
) -> Trace:
    """Conversations in random order, with `wanted` turns in all: the first `turns` of each, as far as they fit.

    vLLM's filter applies to the first turn. Later prompts include all earlier prompts and answers. No request has
    more than `longest` tokens. With one turn, conversations are requests.
    """
    rows: list[tuple[int, ...]] = []  # prompt, output, conversation, turn
    for number, new in enumerate(_tokenized(_conversations(path, turns), token_counter(tokenizer), rng)):
        prompt, output = new[0].tolist()
        if min(prompt, output) < 4 or prompt > 1024 or prompt + output > min(longest, SHAREGPT_TOKENS):
            continue
        grown, talk = Growth(turns, longest).add(new)
        first = grown[talk[:, 0] == 0]  # it starts again where it has become too long
        rows += [(*lengths, number, turn) for turn, lengths in enumerate(first.tolist())]
        if len(rows) >= wanted:
            break
    if not rows:
        raise bad(path, "", "holds no conversation that passes vLLM's filter", SHAREGPT_FILTER)
    table = np.array(rows, dtype=np.int64)
    trace = Trace(np.zeros(len(table)), table[:, :2], timed=False)
    return trace if turns == 1 else replace(trace, sessions=table[:, 2], turns=table[:, 3])


def _tokenized(
    talks: list[list[tuple[str, str]]], count: Callable[[list[str]], list[int]], rng: np.random.Generator
) -> Iterator[Lengths]:
    """The lengths of conversations in random order; in blocks, as tokenizing all of ShareGPT V3 would take minutes."""
    order = rng.permutation(len(talks)).tolist()
    for start in range(0, len(order), 256):
        block = [talks[at] for at in order[start : start + 256]]
        counts = np.array(count([text for talk in block for pair in talk for text in pair]), dtype=np.int64)
        yield from np.split(np.maximum(1, counts).reshape(-1, 2), np.cumsum([len(talk) for talk in block])[:-1])


def sample_sharegpt(count: int, rng: np.random.Generator, most: int = SHAREGPT_TOKENS) -> Lengths:
    """Lengths sampled from the built-in model of ShareGPT V3: its quantiles, joined by a Gaussian copula.

    Requests of more than `most` tokens are cut.

    The model has quantiles at evenly spaced normal scores. So no normal distribution function is needed, and the tails
    have the finest resolution.
    """
    rho, scores, prompts, outputs = _sharegpt_model()
    normal = rng.standard_normal((count, 2))
    prompt = np.rint(np.interp(normal[:, 0], scores, prompts))
    correlated = rho * normal[:, 0] + math.sqrt(1 - rho * rho) * normal[:, 1]
    output = np.rint(np.interp(correlated, scores, outputs))
    if most < SHAREGPT_TOKENS:
        prompt = np.minimum(prompt, most // 2)
    # vLLM drops longer requests; only about one in 10,000 is, so cutting them changes nothing.
    output = np.minimum(output, most - prompt)
    return np.column_stack((prompt, output)).astype(np.int64)


@cache
def _sharegpt_model() -> tuple[float, NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Correlation of the copula; normal scores, and prompt and output tokens at each of them."""
    model = json.loads(SHAREGPT_MODEL.read_text(encoding="utf-8"))
    prompts, outputs = (np.array(model[name], np.float64) for name in ("prompt", "output"))
    scores = model["score_step"] * (np.arange(len(prompts)) - len(prompts) // 2)
    return model["copula_correlation"], scores, prompts, outputs
