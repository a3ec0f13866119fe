"""My traffic: replay the requests of a log on several architectures.

    python my_traffic.py [log.csv]

The log has one line per request, as in the Azure traces: arrival time, prompt tokens, output tokens. Without a log the
script makes a small one, with a quiet and a busy phase.
"""

import sys
from datetime import datetime, timedelta
from random import Random
from tempfile import TemporaryDirectory

import pdvsim


def made_up(path: str) -> str:
    """Ten quiet seconds, then five busy ones."""
    random, time = Random(0), datetime(2026, 1, 1)
    with open(path, "w", encoding="utf-8") as log:
        print("TIMESTAMP,ContextTokens,GeneratedTokens", file=log)
        for request in range(60):
            time += timedelta(seconds=random.expovariate(2 if request < 20 else 8))
            print(f"{time.isoformat(sep=' ')},{random.randint(50, 900)},{random.randint(20, 200)}", file=log)
    return path


def main(path: str) -> None:
    """Replay the log on three architectures, at its arrival times."""
    points = pdvsim.sweep(
        arch=["colocated", "pd", "pdv"],
        dataset_name="azure",
        dataset_path=path,
        use_trace_timestamps=True,
        num_prompts=60,
        goodput=["ttft:500", "tpot:50"],
        jobs=1,
    )
    print(points[["arch", "request_goodput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms"]].to_string(index=False))


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else made_up(f"{folder}/my_log.csv"))
