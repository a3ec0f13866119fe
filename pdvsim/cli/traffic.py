"""`pdvsim traffic`: summarise a trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pdvsim.common.arguments import parse
from pdvsim.common.files import in_place
from pdvsim.common.options import Placed
from pdvsim.view.figure import DPI


@dataclass(frozen=True)
class TrafficCommand:
    """Summarise and plot a trace: rates over time, burstiness, lengths, acceptance and sessions."""

    file: Placed[str]
    """CSV or JSONL of requests: your own, or an Azure, BurstGPT or Mooncake trace."""
    dataset_name: Literal["custom", "azure", "burstgpt", "mooncake"] | None = None
    """Kind of the trace; default: inferred from its columns."""
    columns: tuple[str, ...] = ()
    """Columns whose names are not recognised: prompt=NAME,output=NAME,time=NAME (also acceptance, session, turn,
    text)."""
    tokenizer: str | None = None
    """Folder of a local Hugging Face tokenizer, for a file that holds prompts as text."""
    output: str | None = None
    """Also plot it to this file (PNG or SVG)."""
    overwrite: bool = False
    """Replace the plot if it exists already."""
    json: bool = False
    """Print one JSON document instead of text."""


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    args = parse(TrafficCommand, argv, "pdvsim traffic")

    from pdvsim.sim.workload.own import kind_of, read_requests
    from pdvsim.study.output import check_file, dumps, picture, save
    from pdvsim.study.traffic import account
    from pdvsim.view.traffic import traffic_figure, traffic_text

    path = Path(args.output) if args.output else None
    if path is not None:
        check_file(path)
        if path.exists() and not args.overwrite and not in_place(path):
            raise ValueError(f"{path} exists already; use --overwrite to replace it")
    kind = args.dataset_name or ("custom" if args.columns else kind_of(args.file))
    trace = read_requests(kind, args.file, args.tokenizer, args.columns)
    statistics = account(Path(args.file).name, trace)
    if args.json:
        print(dumps({"file": args.file, "dataset_name": kind, "notes": trace.notes, **statistics.summary()}))
    else:
        for note in trace.notes:
            print(note)
        print(traffic_text(statistics))
        named = f"--dataset-name {kind} --dataset-path {args.file}"
        named += f" --columns {','.join(args.columns)}" if args.columns else ""
        if statistics.window_s:
            print(f"replay it: pdvsim run {named} --use-trace-timestamps")
            rate, shape = statistics.summary()["request_rate"], statistics.summary()["burstiness"]
            print(f"use its lengths at any rate: pdvsim run {named} --request-rate {rate:.3g} --burstiness {shape:.2g}")
    if path is not None:
        return save({path: picture(traffic_figure(statistics), path, DPI)})
    return 0
