"""`pdvsim acceptance`: what is known of how many draft tokens are accepted, or what a look-up in your texts gains."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, TypeGuard

from pdvsim.bench.output import optional_file
from pdvsim.cli.command import Command
from pdvsim.common.files import write_whole
from pdvsim.common.progress import Progress
from pdvsim.realrun.ngram import History
from pdvsim.sim.core import DrafterKind
from pdvsim.sim.limits import of
from pdvsim.sim.workload.acceptance import LONGEST
from pdvsim.sim.workload.datasets import bad, json_lines, tokenized_by
from pdvsim.sim.workload.suffix import SuffixCache, SuffixOptions
from pdvsim.view.acceptance import known, row_of
from pdvsim.view.table import TextTable

LENGTHS = (1, 2, 3, 4, 5, 7)
ACCEPTED = "JSON objects with prompt_token_ids and generated_token_ids, or with prompt and output as text (--tokenizer)"
ADVICE = (
    "tokens per round, one of them the target's own, by draft length k. Acceptance depends on model, drafter and task: "
    "give yours with --acceptance-from FILE (vLLM's /metrics, its bench result, or recorded rounds)"
)


@dataclass(frozen=True)
class AcceptanceCommand(Command):
    """List the acceptance that is recorded, published or assumed, by drafter and task, with its source.

    Or measure it in your own texts: --drafter ngram or suffix with --texts.
    """

    drafter: DrafterKind | None = None
    """Only this drafter; default: all."""
    texts: Annotated[str | None, of(drafter=("ngram", "suffix"))] = None
    """JSONL of your requests, in which to look up drafts: prompt_token_ids and generated_token_ids, or prompt and
    output as text."""
    tokenizer: Annotated[str | None, of("texts")] = None
    """Folder of a local Hugging Face tokenizer, for files that hold text."""
    suffix: Annotated[SuffixOptions, of("texts", drafter="suffix")] = field(default_factory=SuffixOptions)
    output: Annotated[str | None, of("texts")] = None
    """Write the rounds found in --texts to this file, for --acceptance-from."""
    overwrite: Annotated[bool, of("output")] = False
    """Replace that file if it exists already."""

    def execute(self) -> int:
        rows = [row for row in known(LENGTHS) if self.drafter in (None, row["drafter"])]
        if not rows:
            raise ValueError(f"--drafter {self.drafter}: no acceptance is known; give yours with --acceptance-from")
        if self.texts is not None:
            rows = [_measured(self, self.texts), *rows]
        self.show({"tokens_per_round": rows}, TextTable(rows, notes=(ADVICE,)))
        return 0


def _measured(args: AcceptanceCommand, path: str) -> dict[str, Any]:
    """Look drafts up in the texts, write the rounds where asked, and return the row of the table."""
    texts = read_texts(path, args.tokenizer)
    cached = args.suffix.suffix_decoding_max_cached_requests
    if 0 < cached < len(texts):
        raise ValueError(
            f"--suffix-decoding-max-cached-requests must be 0 or at least the {len(texts)} requests of {path}"
        )
    file = optional_file(args.output)
    drafted: list[Drafted] = []
    with Progress(len(texts), "requests", args.json) as progress:
        for one in looked_up(texts, args.drafter, LONGEST, args.suffix):
            drafted.append(one)
            progress.update(len(drafted))
    tokens = sum(len(one.accepted) for one in drafted)
    if not tokens:
        raise ValueError(f"{path}: the answers have no tokens")
    means = {k: tokens / sum(len(rounds_of(one.accepted, k)) for one in drafted) for k in LENGTHS}
    lengths = [one.lengths[at] for one in drafted for at in rounds_of(one.accepted, LONGEST)]
    drafts = [length for length in lengths if length]
    text = f"{len(drafts) / len(lengths):.0%} of rounds draft, {sum(drafts) / max(1, len(drafts)):.1f} tokens each"
    if file is not None:
        rounds = [[one.accepted[at] for at in rounds_of(one.accepted, LONGEST)] for one in drafted]
        lines = [json.dumps(counts, separators=(",", ":")) for counts in rounds if counts]
        write_whole(file, ("\n".join(lines) + "\n").encode(), args.overwrite)
        text += f": --acceptance-from {file}"
    return row_of(str(args.drafter), "-", "your texts", means, LENGTHS, f"looked up in {path}: {text}")


# look-ups in a user's own texts ------------------------------------------------------------------------------------


class Written(NamedTuple):
    """The tokens of a request."""

    prompt: list[int]
    answer: list[int]


class Drafted(NamedTuple):
    """By output position of a request: tokens of the draft, and how many of them are right."""

    lengths: list[int]
    accepted: list[int]


def read_texts(path: str, tokenizer: str | None) -> list[Written]:
    """The requests of a JSONL file with tokens, or with texts and a tokenizer; a ValueError names what is wrong."""
    tokens_of = None if tokenizer is None else tokenized_by(tokenizer)
    texts = [_written(path, number, row, tokens_of) for number, row in json_lines(path, ACCEPTED)]
    if not texts:
        raise bad(path, "", "holds no request", ACCEPTED)
    return texts


def _written(path: str, number: int, row: Any, tokens_of: Callable[[list[str]], list[list[int]]] | None) -> Written:
    fields: dict[str, Any] = row if isinstance(row, dict) else {}
    prompt, answer = fields.get("prompt_token_ids"), fields.get("generated_token_ids")
    if _are_tokens(prompt) and _are_tokens(answer):
        return Written(prompt, answer)
    texts = [fields.get(name) for name in ("prompt", "output")]
    if not all(isinstance(text, str) for text in texts):
        raise bad(path, f"line {number}", "has no tokens and no texts", ACCEPTED)
    if tokens_of is None:
        raise ValueError(f"{path}: line {number} holds texts: give the folder of their --tokenizer")
    return Written(*tokens_of([str(text) for text in texts]))


def _are_tokens(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(id) is int and 0 <= id < 2**31 for id in value)


def looked_up(
    texts: Sequence[Written], drafter: DrafterKind | None, k: int, options: SuffixOptions
) -> Iterator[Drafted]:
    """The number of tokens that a look-up of up to k drafts for each request, in turn.

    Requests are gone through one after the other, so that a cache has all earlier answers. Not modelled: answers that
    are still being written when another request looks for them.
    """
    cache = SuffixCache(options)
    for number, (prompt, answer) in enumerate(texts):
        history, drafted = History(prompt), Drafted([], [])
        cache.start(number, prompt if drafter == "suffix" else ())
        for at, token in enumerate(answer):
            drafts = cache.drafts(number, k) if drafter == "suffix" else history.drafts(k)
            drafted.lengths.append(len(drafts))
            right = (a == b for a, b in zip(drafts, answer[at:], strict=False))
            drafted.accepted.append(
                next((i for i, same in enumerate(right) if not same), min(len(drafts), len(answer) - at))
            )
            if drafter == "suffix":
                cache.extend(number, [token])
            else:
                history.extend([token])
        cache.stop(number)
        yield drafted


def rounds_of(accepted: Sequence[int], k: int) -> list[int]:
    """Output positions at which rounds of draft length k start."""
    at, starts = 0, list[int]()
    while at < len(accepted):
        starts.append(at)
        at += min(accepted[at], k) + 1
    return starts
