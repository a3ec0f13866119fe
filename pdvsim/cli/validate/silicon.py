"""`pdvsim validate --silicon`: measured servers of vLLM, SGLang and TensorRT-LLM against simulations of their load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pdvsim.calibration.validate import silicon
from pdvsim.calibration.validate.servers import SiliconRow, not_simulated, read_rows
from pdvsim.calibration.validate.silicon import LARGE, Prediction, group_of, kind_of, predict
from pdvsim.cli.validate.options import Compared, ValidateOptions
from pdvsim.view.measured_pairs import finished_rows
from pdvsim.view.table import grid
from pdvsim.view.table import percent_cell as _percent

TARGETS: dict[str, tuple[float, ...]] = {  # of TPOT: median, 95th percentile
    "dense": (0.05, 0.20),
    "mixtures of experts": (0.08, 0.30),
    LARGE["expert-parallel"]: (0.12,),
    LARGE["apart"]: (0.15,),
}


def compare_silicon(args: ValidateOptions) -> Compared:
    """Measured servers, of one engine or all, and their predictions."""
    rows = [
        row
        for row in read_rows()
        if row.held_out == args.held_out and args.silicon in ("all", row.engine) and args.kind in (None, row.kind)
    ]
    absent = not_simulated(rows)
    left_out = Counter((group_of(row), kind_of(absent[row.id])) for row in rows if row.id in absent)
    rows = [row for row in rows if row.id not in absent]
    odd = {row.id: row.odd for row in rows if row.odd}
    usual = [row for row in rows if not row.odd]
    if args.rows is not None:
        usual = usual[:: max(1, len(usual) // args.rows)][: args.rows]
    figures, failed = finished_rows(_task, usual, "rows", args.jobs, args.json)
    predictions = sorted((Prediction(usual[at], **row) for at, row in figures.items()), key=lambda one: one.row.id)
    failures = {usual[at].id: reason for at, reason in failed.items()}
    document = silicon.document(predictions, odd, failures, args.held_out)
    document["not_simulated"] = [
        {"kind": kind, "reason": reason, "rows": count} for (kind, reason), count in left_out.most_common()
    ]
    return Compared(document, _text(document))


def _task(index: int, row: SiliconRow) -> dict[str, float]:
    predicted = predict(row)
    return {"ttft_ms": predicted.ttft_ms, "tpot_ms": predicted.tpot_ms}


def _text(document: dict[str, Any]) -> str:
    blocks = []
    for name, parts in document["by"].items():
        rows = [[part, *_cells(part, errors)] for part, errors in parts.items()]
        if name == "kind":
            rows.append(["all", *_cells("all", document["all"])])
        header = [name, "rows", "TPOT", "target", "TTFT", "shared", "TPOT", "AIConfigurator", "TTFT", "AIConfigurator"]
        blocks.append(grid(header, rows))
    which = "held-out" if document["held_out"] else "visible"
    ratio = document["ratios"]
    notes = [
        f"Errors as median / 95th percentile, of {document['all']['rows']} {which} rows; AIConfigurator's on the "
        "rows that it estimates",
        "Ratio of two rows that differ in concurrency, tensor parallelism or weights alone: "
        f"{_both((ratio['median'], ratio['p95']))}",
    ]
    reasons = Counter(kind_of(reason) for reason in (*document["odd"].values(), *document["failed"].values()))
    notes += ["no estimate by AIConfigurator: {rows} rows: {reason}".format(**one) for one in document["not_estimated"]]
    notes += [f"left out: {count} rows: {reason}" for reason, count in reasons.most_common()]
    notes += ["not simulated: {rows} rows, {kind}: {reason}".format(**one) for one in document["not_simulated"]]
    return "\n\n".join([*blocks, "\n".join(notes)])


def _cells(part: str, errors: dict[str, Any]) -> list[str]:
    target = TARGETS.get(part)
    missed = " missed" if target and any(e > t for e, t in zip(errors["tpot"], target, strict=False)) else ""
    goal = f"{_both(target)}{missed}" if target else ""
    shared = errors["shared"]
    others = [_both(errors[name]) if shared else "-" for name in ("tpot_shared", "tpot_aiconfigurator")]
    others += [_percent(errors[name][0]) if shared else "-" for name in ("ttft_shared", "ttft_aiconfigurator")]
    return [str(errors["rows"]), _both(errors["tpot"]), goal, _both(errors["ttft"]), str(shared), *others]


def _both(errors: Sequence[float]) -> str:
    return " / ".join(map(_percent, errors))
