"""`pdvsim acceptance`: what is known of how many draft tokens are accepted, or what a look-up in your texts gains."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated, Any

from pdvsim.cli.command import Command
from pdvsim.common.files import write_whole
from pdvsim.common.progress import Progress
from pdvsim.sim.core import DrafterKind
from pdvsim.sim.limits import of
from pdvsim.sim.workload.suffix import SuffixOptions
from pdvsim.view.table import TextTable

LENGTHS = (1, 2, 3, 4, 5, 7)
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
        from pdvsim.bench.output import dumps
        from pdvsim.view.acceptance import known

        rows = [row for row in known(LENGTHS) if self.drafter in (None, row["drafter"])]
        if not rows:
            raise ValueError(f"--drafter {self.drafter}: no acceptance is known; give yours with --acceptance-from")
        if self.texts is not None:
            rows = [_measured(self, self.texts), *rows]
        if self.json:
            print(dumps({"tokens_per_round": rows}))
            return 0
        print(TextTable(rows, notes=(ADVICE,)))
        return 0


def _measured(args: AcceptanceCommand, path: str) -> dict[str, Any]:
    """Look drafts up in the texts, write the rounds where asked, and return the row of the table."""
    from pdvsim.bench.output import optional_file
    from pdvsim.cli.lookups import Drafted, looked_up, read_texts, rounds_of
    from pdvsim.sim.workload.acceptance import LONGEST
    from pdvsim.view.acceptance import row_of

    texts = read_texts(path, args.tokenizer)
    cached = args.suffix.suffix_decoding_max_cached_requests
    if 0 < cached < len(texts):
        raise ValueError(
            f"--suffix-decoding-max-cached-requests must be 0 or at least the {len(texts)} requests of {path}"
        )
    file = optional_file(args.output)
    drafted: list[Drafted] = []
    with Progress(len(texts), "requests", args.json) as progress:
        for one in looked_up(texts, "suffix" if args.drafter == "suffix" else "ngram", LONGEST, args.suffix):
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
