# mypy: disable-error-code="no-untyped-call"
# (transformers and parts of torch are untyped.)
"""Throughput of transformers on the same GPU: `python studies/peers.py FILE.json`, on a CUDA GPU.

Output tokens per second of every architecture at concurrency 64, and in the same process of what transformers offers on
models of the same shape: `generate` on one static batch, `generate` with an assistant model (one request at a time),
and `generate_batch`. Weights are random. pdvsim's acceptance is pinned. With an assistant, random weights decide
what is accepted, so its rounds per second are given too.

If the file exists, by default calibration/data/h200/peers.json, it is printed next to what the simulator predicts, with
the measured profile and with roofline latencies and no host cost; that needs no GPU.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from pdvsim.bench.pool import Row
from pdvsim.common.console import say
from pdvsim.common.files import write_whole
from pdvsim.realrun.machine import Machine, as_served
from pdvsim.sim.config import Arch, Experiment, Hardware, Host, Server, Traffic
from pdvsim.sim.hardware.models import pair as named_pair
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.relevance import applicable
from pdvsim.sim.run import simulate

if TYPE_CHECKING:
    import torch

    from pdvsim.realrun.engine.arch import ModelArchitecture

SHIPPED = Path(__file__).parents[1] / "calibration/data/h200/peers.json"
PAIR = "tinyllama-1.1b:llama-2-7b"
TOKENS = 128  # prompt and output
USERS = 64
REPEATS = 3
ORDER: tuple[Arch, ...] = (
    "pd", "pdv", "colocated", "pdv-hybrid", "baseline", "pdv-unified", "adaptive", "autoregressive",
)  # fmt: skip


def closed_loop(arch: Arch, prompts: int) -> Experiment:
    """Return the load of every architecture, with the engine's limits under both clocks."""
    traffic = Traffic("random", num_prompts=prompts, max_concurrency=USERS, input_len=TOKENS, output_len=TOKENS)
    return applicable(as_served(Experiment(arch, traffic, server=Server(pair=PAIR, max_num_seqs=USERS))))


def reference(arch: ModelArchitecture, device: torch.device, dtype: torch.dtype) -> Any:
    """transformers' own model of an architecture, with random weights."""
    import torch
    import transformers as hf

    spec = arch.spec
    config_of, model_of = {
        "llama": (hf.LlamaConfig, hf.LlamaForCausalLM),
        "mistral": (hf.MistralConfig, hf.MistralForCausalLM),
        "qwen2": (hf.Qwen2Config, hf.Qwen2ForCausalLM),
        "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM),
        "phi3": (hf.Phi3Config, hf.Phi3ForCausalLM),
        "gemma": (hf.GemmaConfig, hf.GemmaForCausalLM),
    }[spec.family]
    config = config_of(
        vocab_size=spec.vocab, hidden_size=spec.hidden, intermediate_size=spec.intermediate,
        num_hidden_layers=spec.layers, num_attention_heads=spec.heads, num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim, max_position_embeddings=4096, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return model_of(config).eval()
    finally:
        torch.set_default_dtype(before)


def timed(name: str, tokens: int, run: Callable[[], int], repeats: int, say: Callable[[str], None]) -> Row:
    """Tokens per second of `run`, which returns its target forwards; the first of `repeats` + 1 runs is discarded."""
    import torch

    seconds: list[float] = []
    forwards = 0
    for _ in range(repeats + 1):
        begin = monotonic()
        forwards = run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(monotonic() - begin)
    row = {
        "name": name,
        "tokens": tokens,
        "seconds": seconds[1:],
        "tokens_per_s": tokens / statistics.median(seconds[1:]),
        "target_forwards": forwards,
    }
    say(f"{name}: {row['tokens_per_s']:.1f} tok/s ({', '.join(f'{s:.2f} s' for s in seconds)}; the first not kept)")
    return row


def transformers_rows(
    archs: dict[str, ModelArchitecture], device: torch.device, rows: int, repeats: int, say: Callable[[str], None]
) -> list[Row]:
    """The three modes of transformers; a row says why one fails."""
    import torch

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target, draft = (reference(archs[role], device, dtype) for role in ("target", "draft"))
    vocab = min(archs[role].spec.vocab for role in archs)
    prompts = torch.randint(1, vocab, (2 * rows, TOKENS), generator=torch.Generator().manual_seed(0)).to(device)
    exactly: dict[str, Any] = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
    forwards = [0]
    target.register_forward_hook(lambda *_: forwards.__setitem__(0, forwards[0] + 1))

    def static() -> int:
        forwards[0] = 0
        out = target.generate(prompts[:rows], attention_mask=torch.ones_like(prompts[:rows]), **exactly)
        assert out.shape == (rows, 2 * TOKENS)
        return forwards[0]

    def assisted() -> int:
        forwards[0] = 0
        draft.generation_config.num_assistant_tokens = 4
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        mask = torch.ones_like(prompts[:1])
        out = target.generate(prompts[:1], attention_mask=mask, assistant_model=draft, **exactly)
        assert out.shape == (1, 2 * TOKENS)
        return forwards[0]

    def continuous() -> int:
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        forwards[0] = 0
        # by itself it takes all of the memory there is, which takes seconds on the CPU
        small = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=512) if device.type == "cpu" else None
        config = GenerationConfig(max_new_tokens=TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
        out = target.generate_batch(
            inputs=prompts.tolist(), generation_config=config, continuous_batching_config=small, progress_bar=False
        )
        assert sum(len(request.generated_tokens) for request in out.values()) == 2 * rows * TOKENS
        return forwards[0]

    timings: list[Row] = []
    for name, run, tokens in (
        (f"transformers generate, static batch of {rows}", static, rows * TOKENS),
        ("transformers generate with an assistant, one request", assisted, TOKENS),
        (f"transformers generate_batch, {2 * rows} requests", continuous, 2 * rows * TOKENS),
    ):
        try:
            with torch.no_grad():
                timings.append(timed(name, tokens, run, repeats, say))
        except Exception as error:  # an unsupported version is part of the result
            say(f"{name}: failed: {type(error).__name__}: {str(error)[:200]}")
            timings.append({"name": name, "failed": f"{type(error).__name__}: {str(error)[:500]}"})
    return timings


def architecture_rows(say: Callable[[str], None]) -> list[Row]:
    """Every architecture of pdvsim in a closed loop of 64, through the harness."""
    from pdvsim.realrun.site import prepare, serve
    from pdvsim.sim.workload.requests import make_requests

    machine = Machine()
    models: Any = None
    rows: list[Row] = []
    for arch in ORDER:
        experiment = closed_loop(arch, 64 if arch == "baseline" else 256)
        rig = prepare(experiment, machine, make_requests(experiment.traffic, experiment.acceptance), models=models)
        models = (models or {}) | rig.models
        times = 1 if arch == "baseline" else REPEATS
        results = [serve(experiment, machine, rig=rig) for _ in range(times + (arch != "baseline"))][-times:]
        throughputs = [summarise(result)["output_throughput"] for result in results]
        row = {
            "name": arch,
            "tokens": experiment.traffic.num_prompts * TOKENS,
            "tokens_per_s": statistics.median(throughputs),
            "each": throughputs,
            "host_idle_share": [result.meta.get("host_idle_share") for result in results],
            "graphs_captured_late": max(result.meta["graphs_captured_late"] for result in results),
        }
        say(f"{arch}: {row['tokens_per_s']:.1f} tok/s {[round(r) for r in throughputs]}, idle {row['host_idle_share']}")
        rows.append(row)
    return rows


def measured(say: Callable[[str], None]) -> Row:
    """The whole comparison on this machine."""
    import torch
    import transformers

    from pdvsim.realrun.engine.arch import preset

    pair = named_pair(PAIR)
    archs = {"draft": preset(pair.draft.name), "target": preset(pair.target.name)}
    document: Row = {
        "pair": PAIR,
        "date": date.today().isoformat(),
        "prompt_tokens": TOKENS,
        "output_tokens": TOKENS,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rows": transformers_rows(archs, torch.device("cuda"), USERS, REPEATS, say),
    }
    gc.collect()
    torch.cuda.empty_cache()
    document["rows"] += architecture_rows(say)
    return document


def table(document: Row) -> str:
    """The comparison, with the simulator's prediction and ceiling of each architecture."""
    lines = [f"{'':56} {'tok/s':>8} {'predicted':>10} {'ceiling':>8} {'reached':>8} {'host idle':>10}"]
    for row in document["rows"]:
        if "failed" in row:
            lines.append(f"{row['name']:56} {row['failed']}")
            continue
        line = f"{row['name']:56} {row['tokens_per_s']:8.0f}"
        if row["name"] in ORDER:
            experiment = closed_loop(row["name"], row["tokens"] // TOKENS)
            ideal = replace(
                experiment,
                hardware=Hardware(profile="roofline"),
                host=Host(launch_s=0.0, completion_s=0.0, handoff_s=0.0),
            )
            ceiling, idle = _throughput(ideal), statistics.median(row["host_idle_share"])
            share = row["tokens_per_s"] / ceiling
            line += f" {_throughput(experiment):10.0f} {ceiling:8.0f} {share:8.0%} {idle:10.1%}"
        lines.append(line)
    return "\n".join(lines)


def _throughput(experiment: Experiment) -> float:
    return float(summarise(simulate(experiment))["output_throughput"])


def main(path: Path = SHIPPED) -> None:
    """Measure if there is no file, and print the comparison."""
    if not path.exists():
        document = measured(partial(say, "peers"))
        write_whole(path, (json.dumps(document, indent=1) + "\n").encode())
    print(table(json.loads(path.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
