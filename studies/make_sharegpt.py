"""Make the built-in model of ShareGPT's lengths: `python studies/make_sharegpt.py LENGTHS.csv MODEL.json`.

The CSV has the columns num_prefill_tokens and num_decode_tokens, one row per conversation (first turn). The filter is
that of vLLM's benchmark. Not modelled: dependence between the two lengths beyond their rank correlation.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr
from scipy.stats import spearmanr

from pdvsim.common.files import write_whole

SCORE_STEP = 0.02
SCORES = SCORE_STEP * np.arange(-220, 221)  # to 4.4 standard deviations: one request in 100,000

Ints = NDArray[np.int64]


def read(path: Path) -> tuple[Ints, Ints]:
    """Prompt and output tokens under vLLM's filter."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [(int(r["num_prefill_tokens"]), int(r["num_decode_tokens"])) for r in csv.DictReader(file)]
    prompt, output = np.array(rows, dtype=np.int64).T
    keep = (prompt >= 4) & (output >= 4) & (prompt <= 1024) & (prompt + output <= 2048)
    return prompt[keep], output[keep]


def figures(tokens: Ints) -> dict[str, float]:
    """Figures that the model must reproduce."""
    p50, p95, p99 = np.percentile(tokens, [50, 95, 99])
    return {"mean": round(float(tokens.mean()), 2), "p50": float(p50), "p95": float(p95), "p99": float(p99)}


def fit(prompt: Ints, output: Ints) -> dict[str, Any]:
    """Quantiles at evenly spaced normal scores, and the correlation of the Gaussian copula that joins them."""
    spearman = float(spearmanr(prompt, output).statistic)
    levels = ndtr(SCORES)
    return {
        "name": "ShareGPT V3, first turns",
        "source": "AKafakA/vidur_opt_scheduler, data/processed_traces/sharegpt_V3_format_lens.csv (MIT); "
        "first-turn token lengths of ShareGPT_V3_unfiltered_cleaned_split, tokenizer not stated",
        "filter": "vLLM's: prompt >= 4, output >= 4, prompt <= 1024, prompt + output <= 2048",
        "made_by": "studies/make_sharegpt.py",
        "source_figures": {
            "rows": len(prompt),
            "prompt": figures(prompt),
            "output": figures(output),
            "spearman": round(spearman, 4),
        },
        "copula_correlation": round(2 * math.sin(math.pi * spearman / 6), 4),
        "score_step": SCORE_STEP,
        "prompt": np.quantile(prompt, levels, method="inverted_cdf").tolist(),
        "output": np.quantile(output, levels, method="inverted_cdf").tolist(),
    }


if __name__ == "__main__":
    lengths, target = map(Path, sys.argv[1:])
    # one field per line: the lists of quantiles would otherwise be one number per line
    fields = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in fit(*read(lengths)).items())
    write_whole(target, ("{\n" + fields + "\n}\n").encode())
