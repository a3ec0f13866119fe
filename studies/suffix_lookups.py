"""Drafts of suffix decoding in recorded tokens: `python studies/suffix_lookups.py OUTPUT TRACES…`.

Each line of a trace is a request of SpecDecode-Bench (`simulator/data/llama3.1-8B/combined_*.jsonl`): the prompt's and
the answer's tokens. The look-up has vLLM's defaults, and a cache of the earlier answers of the same file. OUTPUT gets
for each request the length of the draft at every output position and the tokens that a round there would yield, for
`make_acceptance.py`. For each file it prints tokens per round, those of a look-up limited to k tokens, and how often
and how long it drafts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pdvsim.cli.acceptance import Drafted, looked_up, read_texts, rounds_of
from pdvsim.common.files import write_whole
from pdvsim.sim.workload.acceptance import LONGEST
from pdvsim.sim.workload.suffix import SuffixOptions

LIMIT = 4  # tokens per draft, of a second look-up


def figures(whole: Sequence[Drafted], limited: Sequence[Drafted]) -> str:
    """Return the printed lines of a file."""
    tokens = sum(len(one.accepted) for one in whole)
    cut, limit = (tokens / sum(len(rounds_of(one.accepted, LIMIT)) for one in rows) for rows in (whole, limited))
    lengths = [one.lengths[at] for one in whole for at in rounds_of(one.accepted, LONGEST)]
    share = sum(length > 0 for length in lengths) / len(lengths)
    return (
        f"{tokens / len(lengths):.2f} tokens per round; at k={LIMIT} {cut:.2f}, looked up so {limit:.2f}; "
        f"{share:.0%} of rounds draft, {sum(lengths) / len(lengths) / share:.2f} tokens each"
    )


def main(output: str, traces: Sequence[str]) -> None:
    """Write and print the figures of some traces."""
    lines = []
    for path in map(Path, traces):
        texts, options = read_texts(str(path), None), SuffixOptions()
        whole, limited = (list(looked_up(texts, "suffix", k, options)) for k in (LONGEST, LIMIT))
        dataset = path.stem.removeprefix("combined_")
        for lengths, accepted in whole:
            row = {"dataset": dataset, "suffix": [count + 1 for count in accepted], "suffix_drafted": lengths}
            lines.append(json.dumps(row, separators=(",", ":")))
        print(f"{path.stem}: {figures(whole, limited)}")
    write_whole(Path(output), ("\n".join(lines) + "\n").encode())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
