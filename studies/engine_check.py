"""Check the engine on this GPU: `python studies/engine_check.py [PART ...]`. Exits with 1 if a check fails.

Kernels against their torch counterparts on random data; bf16 logits as close to float32 as transformers' own; greedy
speculative output equal to plain decoding through CUDA graphs, ragged and padded; mixed forwards.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pdvsim.realrun.engine import gpu, reference_ops
from pdvsim.realrun.engine.arch import ModelArchitecture
from pdvsim.realrun.engine.batch import ForwardBatch, Gate, Residual
from pdvsim.realrun.engine.cache import HEADROOM, PAGE, KVCache, Sequences
from pdvsim.realrun.engine.engine import Engine
from pdvsim.realrun.engine.graphs import GraphLane, PromptChunk
from pdvsim.realrun.engine.head import Head
from pdvsim.realrun.engine.model import Transformer
from pdvsim.sim.models.specs import ModelSpec

DEVICE = torch.device("cuda")


def put(sequences: Sequences, slot: int, tokens: Sequence[int], settled: bool = False) -> None:
    """Write a request's tokens from position 0; with `settled` its length too, for a request resumed elsewhere."""
    sequences.tokens[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32, device=sequences.device)
    if settled:
        sequences.length[slot : slot + 1].fill_(len(tokens))


def prefill(
    lane: GraphLane,
    prompts: Sequence[Sequence[int]],
    chunk_tokens: int,
    *,
    emit: bool,
    head: GraphLane | None = None,
) -> list[list[int]]:
    """Feed prompt i into slot i, `chunk_tokens` at a time; with `emit`, each prompt's first output token.

    A `head` on the model reads each stretch after it.
    """
    outputs: list[list[int]] = [[] for _ in prompts]
    for slot, prompt in enumerate(prompts):
        for start in range(0, len(prompt), chunk_tokens):
            size = min(chunk_tokens, len(prompt) - start)
            last = emit and start + size == len(prompt)
            first = lane.prefill([PromptChunk(slot, start, size, last)]).outcome().first[0]
            if first is not None:
                outputs[slot].append(first)
            if head is not None:
                head.prefill([PromptChunk(slot, start, size)]).outcome()
    return outputs


def generate(
    target: GraphLane,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    draft: GraphLane | None = None,
    drafts: int = 4,
    chunk_tokens: int = 512,
) -> list[list[int]]:
    """`new_tokens` tokens after each prompt: plain decoding, or speculative where a `draft` lane is given."""
    sequences = target.engine.sequences
    with target.on_stream():
        for slot, prompt in enumerate(prompts):
            assert len(prompt) + new_tokens <= sequences.capacity - HEADROOM
            put(sequences, slot, prompt)
    rereads = draft is not None and draft.engine.model.arch.spec.rereads
    head = draft if draft is not None and isinstance(draft.engine.model, Head) else None
    outputs = prefill(target, prompts, chunk_tokens, emit=True, head=head)
    if draft is not None and head is None:
        prefill(draft, prompts, chunk_tokens, emit=False)
    unread = [0] * len(prompts)  # accepted drafts that the drafter has yet to read: its own last, or all of them
    while active := [s for s, out in enumerate(outputs) if len(out) < new_tokens]:
        if draft is None:
            rows = target.verify(active, 0).outcome().rows
        else:
            draft.draft(active, drafts, width=1 + max(unread[s] for s in active)).outcome()
            rows = target.verify(active, drafts).outcome().rows
        for slot, new in zip(active, rows, strict=True):
            outputs[slot] += new
            unread[slot] = len(new) - 1 if rereads else int(len(new) == drafts + 1)
    return [out[:new_tokens] for out in outputs]


def error(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference over norm of the expected; infinite where anything is not finite."""
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def ints(*values: int) -> Tensor:
    """Whole numbers as a tensor on the device."""
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def batch_of(
    slots: list[int],
    width: int,
    sequences: Sequences,
    chunk: int = 0,
    stretches: list[tuple[int, int, int]] | None = None,
) -> ForwardBatch:
    """Rows at `slots`, then stretches of (slot, start, tokens)."""
    stretches = (stretches or []) + [(0, 0, 0)] * (4 - len(stretches or []))
    bounds = torch.tensor([0, *(s[2] for s in stretches)]).cumsum(0).int().to(DEVICE)
    return ForwardBatch(
        len(slots), width, chunk, ints(*slots), ints(*(s[0] for s in stretches)), ints(*(s[1] for s in stretches)),
        bounds, sequences.pages, sequences.scratch,
    )  # fmt: skip


def check_linear(dtype: torch.dtype, limit: float) -> Iterator[tuple[str, float, float]]:
    """Products on the residual stream against float64; one token count per form of the kernel, one for the library."""
    for tokens, outputs, inputs in ((1, 2560, 2048), (5, 2048, 5632), (32, 1024, 1100), (80, 512, 640)):
        x = torch.randn(tokens, inputs, device=DEVICE).to(dtype)
        weight = (torch.randn(2 * outputs, inputs, device=DEVICE) * inputs**-0.5).to(dtype)
        bias = torch.randn(2 * outputs, device=DEVICE).to(dtype)
        residual = torch.randn(tokens, 2 * outputs, device=DEVICE).to(dtype)
        wide, name = x.double(), f"{tokens}x{inputs}->{outputs}"
        exact = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) @ weight.double().t()
        gate, up = exact.unflatten(-1, (-1, 2, 16)).unbind(-2)
        stream = Residual(x, x.float().pow(2).view(tokens, 4, -1).sum(-1).t().contiguous())
        silu = gpu.normed(stream, weight, 1e-5, gate=Gate("silu", 16))
        gelu = gpu.normed(stream, weight, 1e-5, gate=Gate("gelu_tanh", 16))
        yield f"normed {name}", error(gpu.normed(stream, weight, 1e-5, bias=bias), exact + bias.double()), limit
        yield f"normed silu {name}", error(silu, (F.silu(gate) * up).flatten(1)), limit
        yield f"normed gelu {name}", error(gelu, (F.gelu(gate, approximate="tanh") * up).flatten(1)), limit
        expected = residual.double() + wide @ weight.double().t()
        total = gpu.added(x, weight, Residual(residual, None))
        yield f"added {name}", error(total.x, expected), limit
        if total.squares is not None:
            yield f"squares {name}", error(total.squares.sum(0), total.x.double().pow(2).sum(-1)), 1e-5


def check_attention(dtype: torch.dtype, limit: float) -> Iterator[tuple[str, float, float]]:
    """The attention kernels against plain torch."""
    shapes = [(32, 4, 64, 1), (32, 32, 128, 5), (8, 1, 256, 5), (28, 4, 128, 9)]
    if dtype == torch.float32:
        shapes = [(8, 2, 32, 1), (4, 4, 64, 5)]  # float32 tiles of long heads compile slowly, and serve tests only
    for heads, kv_heads, dim, width in shapes:
        capacity, slots = 700, 6
        arch = ModelArchitecture(ModelSpec("c", "llama", 1, 64, 64, heads, kv_heads, dim, 64), 1e4, 1e-5)
        sequences = Sequences(slots, capacity, DEVICE)
        sequences.deal(range(slots), -(-capacity // PAGE), np.random.default_rng(width))
        cache = KVCache(arch, sequences.pool, DEVICE, dtype)
        cache.randomize(width)
        angles = torch.outer(torch.arange(capacity).float(), arch.rope_frequencies())
        cos, sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
        for rows in (1, 6):
            batch = batch_of([5, 2, 0, 3, 1, 4][:rows], width, sequences)
            firsts = [0, 17, 640, 333, 511, 64][:rows]
            positions = torch.cat([torch.arange(f, f + width) for f in firsts]).int().to(DEVICE)
            qkv = torch.randn(rows * width, arch.qkv_width, device=DEVICE).to(dtype)
            kv, twin_kv = cache.layers[0].clone(), cache.layers[0].float().clone()
            planned = gpu.plan(batch, positions, kv_heads)
            got = gpu.decode_attention(qkv.clone(), kv, batch, planned, positions, cos, sin)
            expected = reference_ops.decode_attention(
                qkv.float().clone(), twin_kv, batch, positions, positions, cos, sin
            )
            name = f"decode attention {heads}/{kv_heads}x{dim}, {rows} rows of {width}"
            yield name, error(got, expected), limit
            yield name + ", cache", error(kv, twin_kv), limit
        stretches = [(4, 0, 130), (1, 70, 33), (3, 500, 64)]
        batch = batch_of([], 0, sequences, 256, stretches)
        tokens = torch.zeros(slots + 1, capacity, dtype=torch.int32, device=DEVICE)
        table = torch.randn(4, 64, device=DEVICE)
        _, at, positions = gpu.embed(batch, tokens, ints(*[2] * (slots + 1)), table, 1.0)
        qkv = torch.randn(256, arch.qkv_width, device=DEVICE).to(dtype)
        kv, twin_kv, twin_qkv = cache.layers[0].clone(), cache.layers[0].float().clone(), qkv.float().clone()
        gpu.rope_write(qkv, kv, sequences.pages, at, positions, cos, sin)
        got = gpu.prefill_attention(qkv, kv, batch, at, positions)[:227]
        reference_ops.rope_write(twin_qkv, twin_kv, sequences.pages, at, positions, cos, sin)
        expected = reference_ops.prefill_attention(twin_qkv, twin_kv, batch, at, positions)[:227]
        yield f"prefill attention {heads}/{kv_heads}x{dim}", error(got, expected), limit


def check_logits() -> Iterator[tuple[str, float, float]]:
    """bf16 logits against float32's, next to transformers' own bf16 ones; the limit is 1.2 times their error."""
    import transformers as hf

    shape: dict[str, Any] = {
        "vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
        "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 1024,
    }  # fmt: skip
    families: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "llama": (hf.LlamaConfig, hf.LlamaForCausalLM, {}),
        "mistral": (hf.MistralConfig, hf.MistralForCausalLM, {"sliding_window": None}),
        "qwen2": (hf.Qwen2Config, hf.Qwen2ForCausalLM, {}),
        "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM, {"head_dim": 128}),
        "phi3": (hf.Phi3Config, hf.Phi3ForCausalLM, {"pad_token_id": 0}),
        "gemma": (hf.GemmaConfig, hf.GemmaForCausalLM, {"head_dim": 64}),
    }
    for family, (config, model_class, extra) in families.items():
        torch.manual_seed(1)
        tokens = torch.randint(0, 4096, (300,))
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            model_class(config(**shape, **extra)).to(torch.bfloat16).save_pretrained(folder)
            # loaded, not cast: a cast would round the angles of the positions too
            theirs, exact = (
                model_class.from_pretrained(folder, dtype=dtype).eval().to(DEVICE)(tokens[None].to(DEVICE)).logits[0]
                for dtype in (torch.bfloat16, torch.float32)
            )
            model = Transformer.load(folder, 384, DEVICE, torch.bfloat16)
        sequences = Sequences(2, 384, DEVICE)
        cache = model.new_cache(sequences.pool)
        put(sequences, 0, tokens.tolist(), settled=True)
        limit = 1.2 * error(theirs, exact)
        whole = model.forward(batch_of([], 0, sequences, 320, [(0, 0, 300)]), cache, sequences)
        yield f"{family} logits, prompt", error(model.logits(whole.stream)[:300], exact), limit
        parts = []
        for width, upto in ((1, 285), (5, 290), (10, 300)):
            sequences.length[0] = upto - width + 1
            hidden = model.forward(batch_of([0], width, sequences), cache, sequences)
            parts.append(error(model.logits(hidden.stream), exact[upto - width : upto]))
        yield f"{family} logits, decode", max(parts), limit


def check_generation() -> Iterator[tuple[str, float, float]]:
    """Counts of wrong tokens, in float32 so that no tie is decided by rounding."""
    target_arch = ModelArchitecture(ModelSpec("t", "llama", 3, 256, 512, 8, 2, 32, 499), 1e4, 1e-5)
    draft_arch = ModelArchitecture(ModelSpec("d", "llama", 1, 128, 256, 4, 4, 32, 499), 1e4, 1e-5)
    sequences = Sequences(12, 256, DEVICE)
    buckets: dict[str, Any] = {"row_buckets": (1, 4, 8, 16), "chunk_buckets": (16, 64)}
    target = Engine(Transformer.random(target_arch, 256, DEVICE, torch.float32, 1), sequences, **buckets)
    weak = Engine(Transformer.random(draft_arch, 256, DEVICE, torch.float32, 2), sequences, **buckets)
    same = Engine(Transformer.random(target_arch, 256, DEVICE, torch.float32, 1), sequences, **buckets)
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(0, 499, (n,), generator=generator).tolist() for n in (3, 40, 17, 1, 60, 9, 33)]
    lane = GraphLane(target)
    plain = generate(lane, prompts, 40, chunk_tokens=64)

    def wrong(other: list[list[int]]) -> float:
        return float(sum(a != b for x, y in zip(plain, other, strict=True) for a, b in zip(x, y, strict=True)))

    for name, engine in (("weak drafter", weak), ("perfect drafter", same)):
        for k in (2, 5):
            got = generate(lane, prompts, 40, draft=GraphLane(engine), drafts=k, chunk_tokens=13)
            yield f"greedy speculation, {name}, k={k}: wrong tokens", wrong(got), 0.0
    alone = [generate(lane, [p], 40, draft=GraphLane(weak), drafts=3, chunk_tokens=64)[0] for p in prompts[:3]]
    yield (
        "ragged batch against one by one: wrong tokens",
        float(sum(a != b for a, b in zip(alone, plain[:3], strict=True))),
        0.0,
    )
    with lane.on_stream():
        put(sequences, 0, prompts[1])
        put(sequences, 1, prompts[2])
    lane.prefill([PromptChunk(0, 0, 40, True)]).outcome()
    mixed = lane.verify([0], 0, chunks=[PromptChunk(1, 0, 17, True)]).outcome()
    yield "mixed forward: wrong tokens", float([mixed.rows[0][0], mixed.first[0]] != [plain[1][1], plain[2][0]]), 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts named, or all; returns the exit code."""
    if not torch.cuda.is_available():
        print("no CUDA device: this check needs one", file=sys.stderr)
        return 1
    chosen = sys.argv[1:] if argv is None else argv
    torch.backends.cuda.matmul.allow_tf32 = False
    parts: list[tuple[str, Callable[[], Iterator[tuple[str, float, float]]]]] = [
        ("linear bf16", lambda: check_linear(torch.bfloat16, 8e-3)),
        ("linear fp32", lambda: check_linear(torch.float32, 1e-5)),
        ("attention bf16", lambda: check_attention(torch.bfloat16, 8e-3)),
        ("attention fp32", lambda: check_attention(torch.float32, 1e-5)),
        ("logits", check_logits),
        ("generation", check_generation),
    ]
    failures = 0
    for title, part in [p for p in parts if not chosen or p[0].split()[0] in chosen]:
        worst, count = 0.0, 0
        for name, value, limit in part():
            count += 1
            worst = max(worst, value)
            if not value <= limit:
                failures += 1
                print(f"WRONG {name}: {value:.3g} > {limit:.3g}", flush=True)
        print(f"{title}: {count} checks, largest error {worst:.3g}", flush=True)
        gc.collect()
    print("all right" if not failures else f"{failures} wrong")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
