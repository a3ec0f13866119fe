"""The tables of docs/results.md that come from the committed runs: `python studies/tables.py` writes them again.

Each table is between `<!-- table: NAME -->` and `<!-- end -->`. A test compares it with the runs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from pdvsim.calibration.validate.compare import document, validate
from pdvsim.calibration.validate.served import SHIPPED, read_runs
from studies import truth

ROOT = Path(__file__).parents[1]
PAGE, DATA = ROOT / "docs" / "results.md", ROOT / "calibration" / "data" / "h200"
STRONG = 0.10  # 95th percentiles up to this are strong
MANY = 8  # strong groups from this many on are counted, not named
USUAL = (", batch 128", ", chunk 2048")  # stated once, above the table
METRICS = {
    "output_throughput": "output throughput", "mean_ttft_ms": "mean TTFT", "p99_ttft_ms": "p99 TTFT",
    "mean_tpot_ms": "mean TPOT", "p99_itl_ms": "p99 ITL", "mean_e2el_ms": "mean E2EL",
}  # fmt: skip
WAYS = {"arch": "architecture", "pair": "models", "dataset": "data set", "load": "load"}
TRIALS = {"throughput": ("", "tok/s"), "e2el": ("E2EL ", "ms"), "headroom": ("head-room ", "")}

Document = dict[str, Any]


def percent(share: float) -> str:
    """Two digits, as errors are given."""
    return f"{100 * share:.1f}%" if share < 0.0995 else f"{100 * share:.0f}%"


def figure(value: float) -> str:
    """Four digits, without a power of ten."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def both(errors: Mapping[str, float]) -> str:
    """Median / 95th percentile."""
    return f"{percent(errors['median'])} / {percent(errors['p95'])}"


def overall(part: Mapping[str, Any]) -> str:
    return both(part["by"]["all"]["all"])


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(line)} |" for line in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


def errors(validation: Document) -> str:
    """By metric: visible runs without and with their machine's pace, held-out ones, repeats."""
    held, paced = validation["held_out"], validation["paced"]
    parts = [validation, paced["after"], held, validation["spread"]]
    counts = [part["by"]["all"]["all"]["rows"] for part in parts]
    heads = ("{} runs", "{} of them, pace known", "{} held-out runs", "{} real runs repeated")
    rows = [["all", *map(overall, parts)]]
    rows += [[name, *(both(part["by"]["metric"][metric]) for part in parts)] for metric, name in METRICS.items()]
    return markdown(["metric", *(head.format(count) for head, count in zip(heads, counts, strict=True))], rows)


def weak(validation: Document) -> str:
    """Groups of visible runs by their 95th percentile over all metrics: strong up to a tenth."""
    rows = []
    for key, way in WAYS.items():
        ordered = sorted(validation["by"][key].items(), key=lambda group: group[1]["p95"])
        entries = [(name, part["p95"], f"{name} {percent(part['p95'])}") for name, part in ordered]
        strong, weak = ([text for _, p95, text in entries if (p95 <= STRONG) == side] for side in (True, False))
        if len(strong) >= MANY:
            strong = [f"the {len(strong)} others, up to {strong[-1].split()[-1]}"]
        rows.append([way, "; ".join(strong), "; ".join(weak)])
    return markdown(["by", "strong", "weak"], rows)


def shortly(setting: str) -> str:
    """A setting without what is usual."""
    for usual in USUAL:
        setting = setting.replace(usual, "")
    return setting


def advice(report: Document) -> str:
    """The scenarios that were decided and then served."""
    rows = []
    for trial in report["trials"]:
        before, unit = TRIALS[trial["objective"]]
        entries = trial["entries"]

        def measured(chosen: Callable[[Document], bool], entries: list[Document] = entries) -> str:
            entry = next(filter(chosen, entries), None)
            return figure(entry["measured"]) if entry else ""

        first = entries[0]
        rows.append(
            [
                f"{trial['pair']}, {trial['name']}",
                shortly(first["described"]),
                f"{before}{figure(first['measured'])} {unit}".strip(),
                f"{first['predicted'] / first['measured'] - 1:+.1%}",
                measured(lambda e: e["described"].startswith("autoregressive")),
                measured(lambda e: e["role"] == "usual"),
                measured(lambda e: e["described"].startswith("pdv,")),
                percent(trial["regret"]),
            ]
        )
    header = ["scenario", "recommended", "measured", "prediction", "plain", "`colocated` k=4", "best `pdv`", "regret"]
    return markdown(header, rows)


def tables(validation: Document) -> dict[str, str]:
    """All tables of a validation, and of the scenarios served."""
    return {
        "errors": errors(validation),
        "weak": weak(validation),
        "advice": advice(truth.report(DATA / "truth.json", DATA / "truth.jsonl")),
    }


def written(text: str, contents: Mapping[str, str]) -> str:
    """The page with its tables in place; a ValueError if the page has no place for one."""
    for name, table in contents.items():
        place = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not place.search(text):
            raise ValueError(f"{PAGE}: no place for the table {name}")
        text = place.sub(lambda match, table=table: f"{match[1]}\n{table}\n\n{match[2]}", text)  # type: ignore[misc]
    return text


def main() -> None:
    """Simulate the served runs, and write the tables."""
    runs = [run for name in SHIPPED for run in read_runs(DATA / name)]
    contents = tables(document(validate(runs)))
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), contents), encoding="utf-8")


if __name__ == "__main__":
    main()
