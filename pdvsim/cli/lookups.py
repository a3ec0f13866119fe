"""Acceptance of look-ups in a user's own texts: the draft at every output position, and how much of it is right.

Requests are gone through one after the other, so that a cache has all earlier answers. Not modelled: answers that are
still being written when another request looks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeGuard

from pdvsim.realrun.ngram import History
from pdvsim.sim.workload.datasets import bad, json_lines, tokenized_by
from pdvsim.sim.workload.suffix import SuffixCache, SuffixOptions

LookupKind = Literal["ngram", "suffix"]
ACCEPTED = "JSON objects with prompt_token_ids and generated_token_ids, or with prompt and output as text (--tokenizer)"


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


def looked_up(texts: Sequence[Written], drafter: LookupKind, k: int, options: SuffixOptions) -> Iterator[Drafted]:
    """The number of tokens that a look-up of up to k drafts for each request, in turn."""
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
