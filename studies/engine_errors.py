"""Errors of the engines' profiles on held-out rows, as `ERRORS` in the files of `sim/engines` has them.

    pdvsim validate --silicon all --held-out --json > held.json
    python studies/engine_errors.py held.json

Prints them by engine and card, and over all cards of an engine (`any`).
"""

import json
import sys
from pathlib import Path

import numpy as np

from pdvsim.bench.join import of_metric
from pdvsim.calibration.validate.servers import PredictedRow, joined, ratios, read_rows

LEAST_ROWS = 20  # of an engine on a card


def errors_of(group: list[PredictedRow]) -> dict[str, float]:
    """Return the 95% range of the rows, and of the ratios of two of them."""
    tpot, ttft = (np.quantile(np.abs(of_metric(group, name)), 0.95) for name in ("tpot_ms", "ttft_ms"))
    figures = {"tpot": tpot, "ttft": ttft, "ratio": ratios(group)["p95"]}
    return {name: round(float(value), 3) for name, value in figures.items()} | {"rows": len(group)}


def main() -> None:
    rows = {row.id: row for row in read_rows()}
    held = [one for one in json.loads(Path(sys.argv[1]).read_text())["rows"] if rows[one["id"]].kind == "plain"]
    predictions = [joined(rows[one["id"]], {name: one[name] for name in ("tpot_ms", "ttft_ms")}) for one in held]
    errors: dict[str, dict[str, dict[str, float]]] = {}
    for engine in sorted({one.of.engine for one in predictions}):
        own = [one for one in predictions if one.of.engine == engine]
        parts = {card: [one for one in own if one.of.card == card] for card in sorted({one.of.card for one in own})}
        parts["any"] = own
        errors[engine] = {card: errors_of(group) for card, group in parts.items() if len(group) >= LEAST_ROWS}
    print(json.dumps(errors, indent=1))


if __name__ == "__main__":
    main()
