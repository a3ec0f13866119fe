"""A real vLLM and SGLang next to their simulations: `python studies/served_vllm.py [PICTURE.png]` prints and draws.

The last table has pdvsim's own engine and vLLM under the same requests (`own.jsonl`, `served.jsonl`), each run with
what was predicted for it before.

Every bench of `calibration/data/h200/{vllm,sglang}/rows.jsonl` is simulated with its own requests on the constants of
that version on an H200; none was fitted to rows marked held out. Gains are ratios of TPOT to the same model's server
without a drafter under the same load. The regret is what the server loses that is predicted to be the best of those
measured under one load, by TPOT. Takes about two minutes of one core.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pdvsim.bench.output import picture
from pdvsim.calibration.validate.bench import METRIC, BenchedLoad
from pdvsim.calibration.validate.served import read_runs
from pdvsim.sim.config import Acceptance, Hardware, Server, Traffic
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.run import simulate
from pdvsim.sim.workload.requests import Workload
from pdvsim.view.charts import Chart, Curve
from pdvsim.view.figure import chart_figure
from pdvsim.view.style import ARCH_COLOURS, GREY

MEASURED = Path(__file__).parents[1] / "calibration" / "data" / "h200"
DATA = MEASURED / "vllm"
METHODS = {"EAGLE3": "eagle3", "STANDALONE": "draft_model"}  # SGLang's names
USUAL_BUDGET = 8192  # tokens per step of vLLM on an H200
DRAFTERS = {"draft_model": "a draft model of 1B", "eagle3": "EAGLE-3", "ngram": "n-gram", None: "no drafter"}
TAILS = ("tpot", "ttft")
METRICS = {"mean_tpot_ms": "TPOT", "output_throughput": "throughput", "mean_ttft_ms": "TTFT", "p99_itl_ms": "P99 ITL"}


class Bench(NamedTuple):
    """One bench of a real server: what it measured, and what its simulation gives."""

    row: dict[str, Any]
    predicted: dict[str, float]

    @property
    def model(self) -> str:
        return model_of(self.row) + (", SGLang" if self.row["engine"] == "sglang" else "")

    @property
    def drafts(self) -> str:
        """What drafts, and how far."""
        asked = self.row["speculation"]
        return DRAFTERS[None] if asked is None else f"{DRAFTERS[method_of(asked)]}, k={asked['num_speculative_tokens']}"

    @property
    def usual(self) -> bool:
        """Whether the server has no setting besides its drafter."""
        return not re.search("eager|async|batched|disable-overlap", self.row["serve"])

    def error(self, metric: str) -> float:
        return float(self.predicted[metric] / self.row[metric] - 1)


def model_of(row: dict[str, Any]) -> str:
    """The model as pdvsim names it."""
    return str(row["model"]) + ("-fp8" if "--quantization fp8" in row["serve"] else "")


def method_of(speculation: dict[str, Any]) -> str | None:
    """The kind of drafter by vLLM's name; None without one."""
    method = speculation.get("method")
    return METHODS.get(str(method), method)


def predicted(row: dict[str, Any]) -> dict[str, float]:
    """The metrics of a row's load on a simulated server."""
    asked, load, model = row["speculation"] or {}, row["load"], model_of(row)
    k, rates = asked.get("num_speculative_tokens", 0), tuple(asked.get("synthetic_acceptance_rates", ()))
    drafter = {"draft_model": asked.get("model"), "eagle3": f"eagle3-{model}", "ngram": "ngram", None: "none"}
    budget = re.search(r"max-num-batched-tokens (\d+)", row["serve"])
    server = Server(
        f"{drafter[method_of(asked)]}:{model}", max_num_seqs=1024,
        max_num_batched_tokens=int(budget[1]) if budget else USUAL_BUDGET,
        async_scheduling=False if re.search("no-async|disable-overlap", row["serve"]) else None,
        enforce_eager="eager" in row["serve"],
    )  # fmt: skip
    lengths = np.array([row["input_lens"], row["output_lens"]]).T
    prompt, output = lengths.mean(axis=0).round().astype(int).tolist()
    traffic = Traffic(
        "random", num_prompts=len(lengths), request_rate=load.get("rate", np.inf), max_concurrency=load.get("c"),
        input_len=prompt, output_len=output,
    )  # fmt: skip
    sent_s = Workload(traffic, Acceptance()).arrival_s * ("rate" in load)
    measured = {name: value for name, value in row.items() if METRIC.fullmatch(name)}
    benched = BenchedLoad(traffic, lengths, sent_s, k, rates, measured, ())
    arch = "colocated" if k else "autoregressive"
    hardware = Hardware("h200", engine=f"{row['engine']}=={row['version']}")
    experiment = benched.experiment(arch, Acceptance(), server, hardware, k)
    return summarise(simulate(experiment, requests=benched.requests(experiment.acceptance)))


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(line)} |" for line in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:], ""])


def spread(errors: Sequence[float]) -> str:
    """Median / 95th percentile of their sizes."""
    median, most = np.quantile(np.abs(errors), [0.5, 0.95])
    return f"{median:.1%} / {most:.0%}"


def grouped(benches: Iterable[Bench], key: Callable[[Bench], str]) -> dict[str, list[Bench]]:
    groups = defaultdict(list)
    for bench in benches:
        groups[key(bench)].append(bench)
    return dict(groups)


def errors(benches: Sequence[Bench]) -> str:
    """Errors by model, drafter and setting, and of visible and held-out rows."""

    def kind(bench: Bench) -> str:
        drafts = bench.drafts.partition(",")[0]
        flags = re.findall(
            r"--(?:no-async|disable-overlap|enforce|max-num-batched)[a-z-]+(?: \d+)?", bench.row["serve"]
        )
        return f"{bench.model}, {drafts}" + (f", `{flags[0]}`" if flags else "")

    parts = grouped(benches, kind)
    marks = ("visible", "held out")
    parts |= grouped(benches, lambda bench: f"all of {bench.row['engine']}, {marks[bench.row['held_out']]}")
    rows = [
        [name, str(len(part)), *(spread([bench.error(metric) for bench in part]) for metric in METRICS)]
        for name, part in parts.items()
    ]
    return markdown(["server", "benches", *METRICS.values()], rows)


def gains(benches: Sequence[Bench]) -> list[tuple[Bench, float, float]]:
    """Benches with a drafter, and how many times as fast as without they are: measured, predicted."""
    usual = [bench for bench in benches if bench.usual]
    plain = {(bench.model, bench.row["bench"]): bench for bench in usual if bench.row["speculation"] is None}
    pairs = [(bench, plain.get((bench.model, bench.row["bench"]))) for bench in usual if bench.row["speculation"]]
    return [
        (bench, base.row["mean_tpot_ms"] / bench.row["mean_tpot_ms"],
         base.predicted["mean_tpot_ms"] / bench.predicted["mean_tpot_ms"])
        for bench, base in pairs if base is not None
    ]  # fmt: skip


def gain_table(benches: Sequence[Bench]) -> str:
    """Measured and predicted gains by drafter and load."""
    rows = [
        [bench.model, bench.drafts, bench.row["bench"].replace("_", " "), f"{real:.2f}", f"{told:.2f}",
         f"{told / real - 1:+.0%}", "held out" if bench.row["held_out"] else ""]
        for bench, real, told in gains(benches)
    ]  # fmt: skip
    return markdown(["model", "drafter", "load", "measured", "predicted", "error", ""], rows)


def regrets(benches: Sequence[Bench]) -> str:
    """What is predicted to be best of three or more servers under one load, and what it loses."""
    rows = []
    usual = [bench for bench in benches if bench.usual]
    for load, group in grouped(usual, lambda bench: f"{bench.model}, {bench.row['bench'].replace('_', ' ')}").items():
        if len({bench.drafts for bench in group}) > 1:
            best = min(group, key=lambda bench: bench.row["mean_tpot_ms"])
            chosen = min(group, key=lambda bench: bench.predicted["mean_tpot_ms"])
            lost = chosen.row["mean_tpot_ms"] / best.row["mean_tpot_ms"] - 1
            rows.append([load, str(len(group)), best.drafts, chosen.drafts, f"{lost:.1%}"])
    return markdown(["load", "servers", "measured best", "predicted best", "loss"], rows)


def rivals() -> str:
    """Both engines under the same requests: measured, and predicted in brackets."""
    rows = []
    for run in read_runs(DATA / "own.jsonl") + read_runs(DATA / "served.jsonl"):
        experiment, real = run.experiment, run.metrics
        traffic = experiment.traffic
        if traffic.dataset_name == "sharegpt":
            told = summarise(simulate(experiment))
            load = (
                f"{traffic.max_concurrency} clients" if traffic.max_concurrency else f"{traffic.request_rate:g} req/s"
            )
            engine = "vLLM" if experiment.hardware.engine == "vllm" else "pdvsim"
            drafts = f", k={experiment.longest_draft}" if experiment.speculates else ", no drafter"
            cells = [f"{real[name]:,.4g} ({told[name]:,.4g})" for name in ("mean_tpot_ms", "mean_ttft_ms")]
            cells += [
                " / ".join(f"{real[f'{mark}_{name}_ms']:.3g}" for mark in ("p50", "p95", "p99")) for name in TAILS
            ]
            busy = f"{run.meta['mean_gpu_percent']:.0f}% / {run.meta['mean_memory_percent']:.0f}%"
            speed = f"{real['output_throughput']:,.0f} ({told['output_throughput']:,.0f})"
            rows.append((load, [f"{engine} `{experiment.arch}`{drafts}", speed, *cells, busy]))
    loads = list(dict.fromkeys(load for load, _ in rows))
    ordered = sorted(rows, key=lambda row: loads.index(row[0]))
    header = [
        "load",
        "server",
        "tok/s",
        "mean TPOT",
        "mean TTFT",
        "TPOT p50/95/99",
        "TTFT p50/95/99",
        "GPU / memory busy",
    ]
    return markdown(header, [[load, *cells] for load, cells in ordered])


def draw(benches: Sequence[Bench], path: str) -> None:
    """Measured gains against predicted ones; rings are held out."""
    drafting = [bench for bench, *_ in gains(benches)]
    groups = grouped(drafting, lambda bench: f"{bench.model}, {bench.drafts.partition(',')[0]}")
    told = {id(bench.row): (foreseen, real) for bench, real, foreseen in gains(benches)}
    ends = 0.2, 2.2
    curves = [Curve("", GREY, ends, ends)]
    for (name, group), colour in zip(sorted(groups.items()), cycle(ARCH_COLOURS.values()), strict=False):
        x, y = zip(*(told[id(bench.row)] for bench in group), strict=True)
        hollow = [bool(bench.row["held_out"]) for bench in group]
        curves.append(Curve(name, colour, x, y, hollow=hollow, marker="o", dash="none", size=6.0))
    title = "Speculation on vLLM and SGLang, one H200: TPOT without drafts over TPOT with"
    chart = Chart(
        title, "Measured gain", "Predicted gain", curves, log_x=True, log_y=True, range=ends, levels=[1.0]
    )  # fmt: skip
    Path(path).write_bytes(picture(chart_figure([[chart]], "Rings are held out.", inches=(10, 6)), path))


def main() -> None:
    """Print the tables, and draw where a picture is named."""
    files = (MEASURED / engine / "rows.jsonl" for engine in ("vllm", "sglang"))
    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    cold = [row for row in rows if "prefix" not in row["load"]]  # the others' prompts are cached from the warm-up on
    benches = [Bench(row, predicted(row)) for row in cold]
    print(errors(benches), gain_table(benches), regrets(benches), rivals(), sep="\n")
    if sys.argv[1:]:
        draw(benches, sys.argv[1])


if __name__ == "__main__":
    main()
