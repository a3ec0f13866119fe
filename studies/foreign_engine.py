"""An engine that is not ours, benchmarked and corrected for: transformers' continuous batching.

    python studies/foreign_engine.py serve --output results          # on a GPU, with torch and transformers alone
    python studies/foreign_engine.py serve --output results --tiny   # the same on a CPU with a tiny model, to try it
    python studies/foreign_engine.py predict results                 # anywhere, with pdvsim

`serve` gives a model of Llama-3.1-8B's shape with random weights three closed loops of 4, 16 and 48 requests. It writes
one file for each, as `vllm bench serve --save-result --save-detailed` does. Output lengths are fixed per request and
there is no end-of-sequence token. `predict` fits a correction to each load alone (`pdvsim calibrate --from-bench`) and
predicts the other two with it (`pdvsim validate --bench --machine`).

Left out: HTTP and tokenisation, which this engine does not have when called from Python.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import fields
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

LLAMA = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
TINY = LLAMA | {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
}  # fmt: skip
LOADS = (4, 16, 48)
WAVES = 3  # requests of a load, as a multiple of its concurrency
PROMPTS, OUTPUTS = (64, 512), (32, 64)
BATCH_TOKENS = 2048
BLOCK, BLOCKS = 256, 400
WARM_UPS = 4
SEED = 5


def serve(folder: Path, tiny: bool, loads: list[int], seconds: float) -> int:
    """Serve each load and write its result; returns the exit code."""
    import torch

    transformers: Any = import_module("transformers")
    if not tiny and not torch.cuda.is_available():
        print("no CUDA device: use --tiny to try the script", file=sys.stderr)
        return 1
    folder.mkdir(parents=True, exist_ok=True)
    device = "cpu" if tiny else "cuda"
    torch.manual_seed(SEED)
    config = transformers.LlamaConfig(**(TINY if tiny else LLAMA), eos_token_id=None, pad_token_id=0)
    with torch.device(device):
        model: Any = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32 if tiny else torch.bfloat16, attn_implementation="paged|sdpa"
        )
    model = model.eval().to(device)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, {device}: model made", flush=True)
    wanted = {
        "block_size": BLOCK, "num_blocks": BLOCKS, "max_batch_tokens": BATCH_TOKENS,
        "allow_block_sharing": False,
    }  # fmt: skip
    known = {field.name for field in fields(transformers.ContinuousBatchingConfig)}
    batching = transformers.ContinuousBatchingConfig(**{name: n for name, n in wanted.items() if name in known})
    generation = transformers.GenerationConfig(do_sample=False, max_new_tokens=OUTPUTS[1], eos_token_id=-1)
    failed = 0
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching, block=True, timeout=20
    ) as manager:
        closed_loop(manager, requests_of(WARM_UPS, config.vocab_size, 0), WARM_UPS, 60.0)
        for concurrency in loads:
            asked = requests_of(WAVES * concurrency, config.vocab_size, concurrency)
            served = closed_loop(manager, asked, concurrency, seconds)
            document = bench_result(served, asked, concurrency)
            wrong = faults(document, asked, concurrency)
            file = folder / f"c{concurrency}.json"
            partial = file.with_suffix(".part")
            partial.write_text(json.dumps(document))
            partial.replace(file)
            print(
                f"{file}: {document['completed']} of {len(asked)} requests, {document['duration']:.1f} s, "
                f"{document['output_throughput']:.1f} tok/s, TPOT {document['mean_tpot_ms']:.1f} ms, "
                f"TTFT {document['mean_ttft_ms']:.1f} ms: {'; '.join(wrong) or 'checked'}",
                flush=True,
            )
            failed += bool(wrong)
    print("FAILED" if failed else "OK", flush=True)
    return int(failed > 0)


def requests_of(count: int, vocab: int, seed: int) -> list[tuple[list[int], int]]:
    """Prompts and output lengths of a load."""
    rng = random.Random(SEED + seed)
    return [
        ([rng.randrange(1, vocab) for _ in range(rng.randint(*PROMPTS))], rng.randint(*OUTPUTS)) for _ in range(count)
    ]


def closed_loop(
    manager: Any, asked: list[tuple[list[int], int]], concurrency: int, seconds: float
) -> list[dict[str, Any]]:
    """Keep `concurrency` in flight; after `seconds` no more are sent. Times are the engine's own, of each token."""
    waiting, served = list(enumerate(asked)), []
    under_way: dict[str, tuple[int, float]] = {}
    stop_s = time.perf_counter() + seconds
    give_up_s = stop_s + seconds
    while waiting or under_way:
        while waiting and len(under_way) < concurrency and time.perf_counter() < stop_s:
            number, (prompt, output) = waiting.pop(0)
            sent_s = time.perf_counter()
            name = manager.add_request(
                prompt, request_id=f"{id(asked)}-{number}", max_new_tokens=output, record_timestamps=True,
                eos_token_id=-1,
            )  # fmt: skip
            under_way[name] = (number, sent_s)
        if not under_way:
            break
        result = manager.get_result(timeout=1.0)
        if result is not None and result.is_finished() and result.request_id in under_way:
            number, sent_s = under_way.pop(result.request_id)
            times = list(result.timestamps or ())
            served.append(
                {"number": number, "sent_s": sent_s, "times_s": times, "tokens": len(result.generated_tokens),
                 "error": str(result.error or "")}
            )  # fmt: skip
        elif result is None and (not manager.is_running() or time.perf_counter() > give_up_s):
            raise RuntimeError(f"the engine stopped with {len(under_way)} requests under way")
    return sorted(served, key=lambda one: one["number"])


def bench_result(served: list[dict[str, Any]], asked: list[tuple[list[int], int]], concurrency: int) -> dict[str, Any]:
    """The result under the names of `vllm bench serve`."""
    good = [one for one in served if not one["error"] and one["times_s"]]
    ttfts = [one["times_s"][0] - one["sent_s"] for one in good]
    itls = [[b - a for a, b in zip(one["times_s"], one["times_s"][1:], strict=False)] for one in good]
    inputs, outputs = [len(asked[one["number"]][0]) for one in good], [one["tokens"] for one in good]
    duration = max(one["times_s"][-1] for one in good) - min(one["sent_s"] for one in good)
    metrics: dict[str, float] = {}
    for name, values in (
        ("ttft", ttfts), ("itl", [gap for gaps in itls for gap in gaps]),
        ("tpot", [sum(gaps) / len(gaps) for gaps in itls if gaps]),
        ("e2el", [one["times_s"][-1] - one["sent_s"] for one in good]),
    ):  # fmt: skip
        metrics[f"mean_{name}_ms"] = 1e3 * statistics.fmean(values)
        metrics[f"median_{name}_ms"] = 1e3 * statistics.median(values)
        metrics[f"p99_{name}_ms"] = 1e3 * sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]
    return {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"), "backend": "transformers-continuous-batching",
        "model_id": "meta-llama/Llama-3.1-8B", "num_prompts": len(good), "request_rate": "inf", "burstiness": 1.0,
        "max_concurrency": concurrency, "duration": duration, "completed": len(good), "failed": len(asked) - len(good),
        "total_input_tokens": sum(inputs), "total_output_tokens": sum(outputs),
        "request_throughput": len(good) / duration, "output_throughput": sum(outputs) / duration,
        "total_token_throughput": (sum(inputs) + sum(outputs)) / duration, **metrics,
        "input_lens": inputs, "output_lens": outputs, "ttfts": ttfts, "itls": itls,
        "start_times": [one["sent_s"] for one in good], "errors": ["" for _ in good],
    }  # fmt: skip


def faults(document: dict[str, Any], asked: list[tuple[list[int], int]], concurrency: int) -> list[str]:
    """Return the faults of a result; none if it has the requested load."""
    wrong = []
    if document["failed"]:
        wrong.append(f"{document['failed']} requests did not finish")
    elif document["output_lens"] != [output for _, output in asked]:
        wrong.append("output lengths differ from those asked for")
    if any(len(gaps) + 1 != tokens for gaps, tokens in zip(document["itls"], document["output_lens"], strict=True)):
        wrong.append("a request has not one time for each token")
    if any(gap < 0 for gaps in document["itls"] for gap in gaps) or min(document["ttfts"]) <= 0:
        wrong.append("times are not in order")
    ends = [
        (start + first + sum(gaps), -1)
        for start, first, gaps in zip(document["start_times"], document["ttfts"], document["itls"], strict=True)
    ]
    running = most = 0
    for _, change in sorted([(start, 1) for start in document["start_times"]] + ends):
        running += change
        most = max(most, running)
    if most > concurrency:
        wrong.append(f"{most} requests were under way, not {concurrency}")
    return wrong


def predict(folder: Path, gpu: str) -> int:
    """Fit each load alone, and predict the others."""
    from pdvsim.calibration.fit.bench import fit_bench
    from pdvsim.calibration.validate.bench import read_load
    from pdvsim.sim.config import Acceptance, Hardware, Server
    from pdvsim.sim.metrics.summary import summarise
    from pdvsim.sim.run import simulate

    loads = {path.stem: read_load(str(path)) for path in sorted(folder.glob("c*.json"), key=lambda p: int(p.stem[1:]))}
    server = Server("llama-3.1-8b", max_num_batched_tokens=BATCH_TOKENS)
    errors: list[float] = []
    scratch = tempfile.TemporaryDirectory()
    machine = Path(scratch.name) / "machine.json"
    for fitted_to, mine in [("", None), *loads.items()]:
        hardware = Hardware(gpu, band=False)
        if mine is not None:
            fit = fit_bench([(mine, mine.experiment("colocated", Acceptance(), server, hardware, None))])
            machine.write_text(json.dumps(fit.document()))
            hardware = Hardware(gpu, band=False, machine=str(machine))
            print(
                f"fitted to {fitted_to}: speed {fit.speed:.2f}, step {fit.step_s * 1e3:.1f} ms, "
                f"row {fit.row_s * 1e6:.0f} µs; not determined: {', '.join(fit.undetermined) or 'nothing'}"
            )
        for name, load in loads.items():
            experiment = load.experiment("colocated", Acceptance(), server, hardware, None)
            off = load.errors(summarise(simulate(experiment, requests=load.requests(experiment.acceptance))))
            both, first = [off["output_throughput"], off["mean_tpot_ms"]], off["mean_ttft_ms"]
            label = "not corrected" if mine is None else "fitted" if name == fitted_to else "predicted"
            print(f"  {name:4} {label:13} throughput {both[0]:+7.1%}  TPOT {both[1]:+7.1%}  TTFT {first:+7.1%}")
            if label == "predicted":
                errors += map(abs, both)
    scratch.cleanup()
    if errors:
        within = sum(error <= 0.1 for error in errors)
        print(f"predicted throughput and TPOT: {within} of {len(errors)} within 10%, worst {max(errors):.1%}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    serving = commands.add_parser("serve")
    serving.add_argument("--output", type=Path, default=Path("results"))
    serving.add_argument("--tiny", action="store_true")
    serving.add_argument("--loads", type=int, nargs="+", default=list(LOADS))
    serving.add_argument("--seconds", type=float, default=50.0, help="of a load, after which no more requests are sent")
    predicting = commands.add_parser("predict")
    predicting.add_argument("folder", type=Path)
    predicting.add_argument("--gpu", default="h200")
    args = parser.parse_args()
    if args.command == "serve":
        return serve(args.output, args.tiny, args.loads, args.seconds)
    return predict(args.folder, args.gpu)


if __name__ == "__main__":
    sys.exit(main())
