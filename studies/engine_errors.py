"""Errors of the engines' profiles on held-out rows, as `ERRORS` in the files of `sim/engines` has them.

    pdvsim validate --silicon all --held-out --json > held.json
    python studies/engine_errors.py held.json

Prints them by engine and card, and over all cards of an engine (`any`).
"""

import json
import sys
from pathlib import Path

import numpy as np

from pdvsim.calibration.validate.servers import read_rows
from pdvsim.calibration.validate.silicon import Prediction, ratios

LEAST_ROWS = 20  # of an engine on a card


def errors_of(group: list[Prediction]) -> dict[str, float]:
    """Return the 95% range of the rows, and of the ratios of two of them."""
    tpot = np.quantile([abs(one.tpot_error) for one in group], 0.95)
    ttft = np.quantile([abs(one.ttft_error) for one in group if one.row.ttft_counts], 0.95)
    figures = {"tpot": tpot, "ttft": ttft, "ratio": ratios(group)[1]}
    return {name: round(float(value), 3) for name, value in figures.items()} | {"rows": len(group)}


def main() -> None:
    rows = {row.id: row for row in read_rows()}
    held = [one for one in json.loads(Path(sys.argv[1]).read_text())["rows"] if rows[one["id"]].kind == "plain"]
    predictions = [Prediction(rows[one["id"]], one["ttft_ms"], one["tpot_ms"]) for one in held]
    errors: dict[str, dict[str, dict[str, float]]] = {}
    for engine in sorted({one.row.engine for one in predictions}):
        own = [one for one in predictions if one.row.engine == engine]
        parts = {card: [one for one in own if one.row.card == card] for card in sorted({one.row.card for one in own})}
        parts["any"] = own
        errors[engine] = {card: errors_of(group) for card, group in parts.items() if len(group) >= LEAST_ROWS}
    print(json.dumps(errors, indent=1))


if __name__ == "__main__":
    main()
