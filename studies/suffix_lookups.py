"""Drafts of suffix decoding in recorded tokens: `python studies/suffix_lookups.py OUTPUT TRACES…`.

Each line of a trace is a request of SpecDecode-Bench (`simulator/data/llama3.1-8B/combined_*.jsonl`): the prompt's and
the answer's tokens. The look-up has vLLM's defaults, and a cache of the earlier answers of the same file. OUTPUT gets
for each request the length of the draft at every output position and the tokens that a round there would yield, for
`make_acceptance.py`. For each file it prints tokens per round, those of a look-up limited to k tokens, and
how often and how long it drafts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pdvsim.common.files import write_whole
from pdvsim.sim.workload.suffix import SuffixCache

LIMIT = 4  # tokens per draft, of a second look-up


def agreed(drafts: Sequence[int], answer: Sequence[int]) -> int:
    """Draft tokens that are accepted."""
    return next(
        (i for i, (a, b) in enumerate(zip(drafts, answer, strict=False)) if a != b), min(len(drafts), len(answer))
    )


def looked_up(requests: Sequence[dict[str, Any]], dataset: str) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Each request with its drafts and gains by position; and the gains of drafts of at most LIMIT tokens."""
    cache = SuffixCache()
    for number, request in enumerate(requests):
        answer = request["generated_token_ids"]
        cache.start(number, request["prompt_token_ids"])
        drafted, gains, limited = list[int](), list[int](), list[int]()
        for at, token in enumerate(answer):
            drafts = cache.drafts(number, len(answer))
            drafted.append(len(drafts))
            gains.append(agreed(drafts, answer[at:]) + 1)
            limited.append(agreed(cache.drafts(number, LIMIT), answer[at:]) + 1)
            cache.extend(number, [token])
        cache.stop(number)
        yield {"dataset": dataset, "suffix": gains, "suffix_drafted": drafted}, limited


def rounds(gains: Sequence[int], k: int) -> list[int]:
    """Output positions at which rounds of draft length k start."""
    at, starts = 0, []
    while at < len(gains):
        starts.append(at)
        at += min(gains[at], k + 1)
    return starts


def main(output: str, traces: Sequence[str]) -> None:
    """Write and print the figures of some traces."""
    lines = []
    for path in map(Path, traces):
        requests = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        rows = list(looked_up(requests, path.stem.removeprefix("combined_")))
        lines += [json.dumps(row, separators=(",", ":")) for row, _ in rows]
        tokens = sum(len(limited) for _, limited in rows)
        cut = tokens / sum(len(rounds(row["suffix"], LIMIT)) for row, _ in rows)
        limit = tokens / sum(len(rounds(limited, LIMIT)) for _, limited in rows)
        drafted = [row["suffix_drafted"][at] for row, _ in rows for at in rounds(row["suffix"], tokens)]
        share = sum(length > 0 for length in drafted) / len(drafted)
        print(
            f"{path.stem}: {tokens / len(drafted):.2f} tokens per round; "
            f"at k={LIMIT} {cut:.2f}, looked up so {limit:.2f}; "
            f"{share:.0%} of rounds draft, {sum(drafted) / len(drafted) / share:.2f} tokens each"
        )
    write_whole(Path(output), ("\n".join(lines) + "\n").encode())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
