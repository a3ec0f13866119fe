"""Published figures of mixtures of experts and 8-bit weights against predictions: `python studies/experts.py`.

A round is our target's forward over all its draft tokens and what the engine adds: a part of every forward, fitted on
one plain figure of the mixture itself, and a part of every speculative round and draft step, fitted on figures of
Llama-3.1-8B on the same engine. No speculative figure of a mixture is fitted. "Kernels" is the same without any of it.

Drafts that are trees count by the tokens that are verified. Batches are taken to be full.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from pdvsim.sim.models.layers import Experts, Latent
from pdvsim.sim.models.presets import PRESETS, drafter, quantised
from pdvsim.sim.models.specs import HeadKind, ModelSpec
from studies.engines import (
    CONTEXT,
    EngineCell,
    EngineSource,
    Fit,
    engines_text,
    forward_ms,
    latency,
)

CARD = "h100-sxm"
GLM_FLASH = ModelSpec(  # zai-org/GLM-4.7-Flash, config.json
    "glm-4.7-flash", "glm4", 47, 2048, 10240, 20, 1, 256, 154880, max_position_embeddings=202752,
    experts=Experts(64, 4, 1536, shared=1536, dense_layers=1), latent=Latent(512, 64, 192, 256, 768),
)  # fmt: skip
QWEN36 = PRESETS["qwen3.5-35b-a3b"]  # Qwen/Qwen3.6-35B-A3B has the same sizes


@dataclass(frozen=True)
class Setting:
    """A mixture as one publication ran it: the engine adds `each_ms` to a forward, and `round_ms` to a round.

    `round_ms` is a fixed part and one per draft step; None: scheduling overlaps, and drafts take their kernels alone.
    """

    card: str
    spec: ModelSpec
    gpus: int
    each_ms: float
    round_ms: Fit | None
    head: HeadKind = "eagle3"

    def plain(self, rows: int, context: float = CONTEXT) -> float:
        """Tokens per second without speculation."""
        return rows / self._forward(rows, 1, context) * 1e3

    def drafted(self, rows: int, steps: int, width: int, tokens: float, context: float = CONTEXT) -> float:
        """The same with drafts of `steps` steps, `width` verified tokens per row and `tokens` of them per round."""
        draft_ms = self._draft(rows, steps, context)
        if self.round_ms is not None:
            draft_ms = self.round_ms[0] + steps * self.round_ms[1]
        return rows * tokens / (self._forward(rows, width, context) + draft_ms) * 1e3

    def kernels(self, rows: int, steps: int, width: int, tokens: float, context: float = CONTEXT) -> float:
        """Speed-up over plain decoding if the engine added nothing."""
        alone = replace(self, each_ms=0.0, round_ms=None)
        return alone.drafted(rows, steps, width, tokens, context) / alone.plain(rows, context)

    def _forward(self, rows: int, tokens: int, context: float) -> float:
        return forward_ms(self.card, rows, tokens - 1, context, self.spec, self.gpus) + self.each_ms

    def _draft(self, rows: int, steps: int, context: float) -> float:
        model = latency(self.card, drafter(self.head, self.spec), self.gpus)
        return model.price(rows, 2, steps, rows * context).seconds(rows * context) * 1e3


def setting(card: str, spec: ModelSpec, gpus: int, plain: float, round_ms: Fit | None) -> Setting:
    """The setting in which one request decodes at this rate of tokens per second."""
    return Setting(card, spec, gpus, 1e3 / plain - forward_ms(card, 1, 0, CONTEXT, spec, gpus), round_ms)


def dense_round(plain_ms: float, rounds: Sequence[tuple[int, int, float]]) -> Fit:
    """What an engine adds to a round of Llama-3.1-8B on an H100, of (steps, verified tokens, milliseconds) twice."""
    each_ms = plain_ms - forward_ms(CARD, 1, 0, CONTEXT)
    (few, few_ms), (many, many_ms) = (
        (steps, ms - forward_ms(CARD, 1, width - 1, CONTEXT) - each_ms) for steps, width, ms in rounds
    )
    step_ms = (many_ms - few_ms) / (many - few)
    return few_ms - few * step_ms, step_ms


def sglang_round() -> Fit:
    """SGLang pull request 4247 (EAGLE-3, 5 and 8 steps, MT-bench) and its documentation; 32 verified tokens assumed."""
    return dense_round(1e3 / 158.34, ((5, 32, 4.68 / 361.70 * 1e3), (8, 32, 5.39 / 378.57 * 1e3)))


def vllm_round() -> Fit:
    """vLLM issue 20780 (EAGLE-3, draft lengths 2 and 7)."""
    return dense_round(7.07, ((2, 3, 2.36 * 4.32), (7, 8, 3.54 * 4.29)))


def _setting_text(case: Setting) -> str:
    drafts = "drafts take their kernels"
    if case.round_ms is not None:
        drafts = f"{case.round_ms[0]:.2f} ms per round, {case.round_ms[1]:.2f} ms per draft step (Llama-3.1-8B)"
    return f"{case.each_ms:.2f} ms per forward (plain, batch 1); {drafts}"


Figures = Sequence[tuple[int, float, float, int, int, float]]  # batch, plain, drafted, steps, width, tokens per round


def speculation(title: str, about: str, case: Setting, figures: Figures, why: str = "") -> EngineSource:
    """Plain decoding, drafts and the speed-up between them, in tokens per second and as a factor."""
    cells = []
    for rows, plain, drafted, steps, width, tokens in figures:
        ours, ours_drafted = case.plain(rows), case.drafted(rows, steps, width, tokens)
        cells += [
            EngineCell(f"batch {rows}, plain", plain, ours, rows == 1),
            EngineCell(f"batch {rows}, EAGLE-3", drafted, ours_drafted, False),
            EngineCell(f"batch {rows}, speed-up", drafted / plain, ours_drafted / ours, False),
            EngineCell(f"batch {rows}, kernels", drafted / plain, case.kernels(rows, steps, width, tokens), False),
        ]
    return EngineSource(title, about, "tok/s, factors", _setting_text(case), tuple(cells), why)


def specforge_each_ms() -> float:
    """Return the milliseconds that SGLang adds to a forward of Qwen3-30B-A3B over two H100s."""
    return setting(CARD, PRESETS["qwen3-30b-a3b"], 2, 222.47, None).each_ms


def specforge() -> EngineSource:
    """Qwen3-30B-A3B with a chain of three drafts: speculation loses."""
    return speculation(
        "SpecForge issue 339",
        "SGLang, Qwen3-30B-A3B bf16 over 2 H100s, EAGLE-3, chains of 3, MT-bench",
        Setting(CARD, PRESETS["qwen3-30b-a3b"], 2, specforge_each_ms(), sglang_round()),
        ((1, 222.47, 159.78, 3, 4, 1.86), (4, 566.21, 447.90, 3, 4, 1.86)),
        "With kernels alone it would gain at batch 1: what SGLang adds to a round exceeds the forward itself.",
    )


def angelslim() -> EngineSource:
    """Qwen3-30B-A3B with trees of sixteen drafts: loses at batch 1."""
    drafts = (4, 16)
    return speculation(
        "AngelSlim issue 163",
        "SGLang, Qwen3-30B-A3B bf16 over 4 H100s, EAGLE-3, trees of 16 from 4 steps, greedy",
        setting(CARD, PRESETS["qwen3-30b-a3b"], 4, 218.89, sglang_round()),
        (
            (1, 218.89, 185.64, *drafts, 2.542), (4, 507.49, 476.37, *drafts, 2.556),
            (8, 677.14, 673.14, *drafts, 2.578), (32, 1128.30, 927.11, *drafts, 2.560),
            (64, 1237.84, 1307.95, *drafts, 2.553),
        ),
        "From batch 8 on, the published plain figures grow by 1.8 from 8 to 64: few requests of unequal length leave "
        "batches half empty, and prefills are included. Levels and speed-ups there cannot be compared.",
    )  # fmt: skip


def specdrift() -> EngineSource:
    """gpt-oss-120b with a chain of three drafts: gains."""
    case = setting(CARD, PRESETS["gpt-oss-120b"], 1, 212.0, None)
    older = replace(case, round_ms=sglang_round()).drafted(1, 3, 4, 2.41) / case.plain(1)
    return speculation(
        "Dogacel/specdrift-gpt-oss-120b-eagle3, model card",
        "SGLang with overlapped scheduling, gpt-oss-120b on one H100, EAGLE-3, chains of 3, MT-bench",
        case,
        ((1, 212.0, 285.0, 3, 4, 2.41), (8, 795.0, 1044.0, 3, 4, 2.41), (64, 1620.0, 2339.0, 3, 4, 2.43)),
        "Overlapped scheduling hides most of what SGLang adds to a round, not all: without it the speed-up at batch 1 "
        f"would be {older:.2f}. Published batches of 64 were not full: plain decoding would take 40 ms per step.",
    )


def glm() -> EngineSource:
    """GLM-4.7-Flash with trees of six drafts: gains."""
    return speculation(
        "EAGLE pull request 330 (thoughtworks/GLM-4.7-Flash-Eagle3)",
        "SGLang, GLM-4.7-Flash bf16 on one H100, EAGLE-3, trees of 6 from 3 steps, MT-bench",
        setting(CARD, GLM_FLASH, 1, 120.3, sglang_round()),
        ((1, 120.3, 167.75, 3, 6, 2.4), (32, 258.61, 440.15, 3, 6, 2.4)),
        "A plain batch of 32 at 259 tok/s would take 124 ms per step: it was not full.",
    )


def red_hat() -> EngineSource:
    """gpt-oss-120b on H200s: gains 10% to 21% at every concurrency up to 200."""
    spec, k, tokens = PRESETS["gpt-oss-120b"], 3, 2.41
    case = Setting("h200", spec, 1, 0.0, vllm_round())
    cells = []
    for rows in (1, 8, 32, 64, 100, 200):
        ours = case.drafted(rows, k, k + 1, tokens) / case.plain(rows)
        cells += [
            EngineCell(f"{rows} concurrent, speed-up", 1.155, ours, False),
            EngineCell(f"{rows} concurrent, kernels", 1.155, case.kernels(rows, k, k + 1, tokens), False),
        ]
    return EngineSource(
        "Red Hat Developer, 16 April 2026 (gpt-oss-120b, vLLM 0.13)",
        "H200, EAGLE-3, draft length 2 to 3, ShareGPT, MLPerf and SWE-bench, up to 200 concurrent: +10% to +21%. The "
        "middle is compared; tokens per round are those of MT-bench",
        "speed-up",
        _setting_text(case),
        tuple(cells),
        "Nothing is known of plain decoding there. At concurrency 8 a verify reads almost twice the experts of a plain "
        "step. Between 32 and 100 nearly all experts are read either way, and drafts are almost free here; vLLM's "
        "verified tokens cost more than ours, and prefills take their share of a server's time.",
    )


A100_TPOT = {128: 9.6, 1024: 9.8, 2048: 9.9, 3072: 10.1, 4096: 10.3, 8192: 10.6}  # ms by prompt, 128 output tokens


def a100() -> EngineSource:
    """Plain decoding of one request."""
    spec = PRESETS["qwen3-30b-a3b"]
    each_ms = A100_TPOT[128] - forward_ms("a100-80gb", 1, 0, 192, spec)
    cells = [
        EngineCell(f"{tokens} in", ms, forward_ms("a100-80gb", 1, 0, tokens + 64, spec) + each_ms, tokens == 128)
        for tokens, ms in A100_TPOT.items()
    ]
    alone = EngineCell("128 in, kernels", A100_TPOT[128], forward_ms("a100-80gb", 1, 0, 192, spec), False)
    return EngineSource(
        "tt-inference-server issue 340 (Qwen3-30B-A3B on an A100)",
        "vLLM of July 2025, one request, 128 tokens out",
        "ms per token",
        f"{each_ms:.2f} ms per forward (128 in)",
        (*cells, alone),
        "Kernels alone lack 77 us per layer: routing, sorting and grouped products of few rows take longer in vLLM "
        "than products of the same size do in our engine. This is the largest error of the prediction.",
    )


def qwen36() -> EngineSource:
    """Return the gain of 8-bit weights, and the cost of sixteen requests."""
    context, k, each_ms = 8192 + 512, 3, specforge_each_ms()

    def ms(spec: ModelSpec, rows: int, tokens: float) -> float:
        served = Setting("h200", spec, 1, each_ms, None, "mtp")
        return rows * 1e3 / served.drafted(rows, k, k + 1, tokens, context)

    tokens = ms(QWEN36, 1, 1.0) / 2.23
    narrow = quantised(QWEN36)
    published = ((QWEN36, 1, 2.23), (QWEN36, 16, 8.13), (narrow, 1, 1.98), (narrow, 16, 6.20))
    cells = [
        EngineCell(f"{'fp8' if spec is narrow else 'bf16'}, {rows} concurrent", value, ms(spec, rows, tokens), n == 0)
        for n, (spec, rows, value) in enumerate(published)
    ]
    return EngineSource(
        "SGLang documentation, Qwen3.6 (docs/src/snippets/configs/Qwen/qwen3.6-benchmarks.jsx)",
        "SGLang 0.5.16, Qwen3.6-35B-A3B on one H200, MTP with chains of 3, 8192 tokens in and 1024 out",
        "ms per token",
        f"{tokens:.2f} tokens per round (bf16, one request); {each_ms:.2f} ms per forward (Qwen3-30B-A3B on 2 H100s)",
        tuple(cells),
        "Acceptance is not stated and random prompts accept more than text: tokens per round are fitted. Prefills of "
        "8192 tokens, which hold up sixteen requests, are not in the forward times.",
    )


SHORT = {
    "SpecForge issue 339": "Qwen3-30B-A3B, 2 H100s, SGLang",
    "AngelSlim issue 163": "Qwen3-30B-A3B, 4 H100s, SGLang",
    "Dogacel/specdrift-gpt-oss-120b-eagle3, model card": "gpt-oss-120b, H100, SGLang",
    "EAGLE pull request 330 (thoughtworks/GLM-4.7-Flash-Eagle3)": "GLM-4.7-Flash, H100, SGLang",
    "Red Hat Developer, 16 April 2026 (gpt-oss-120b, vLLM 0.13)": "gpt-oss-120b, H200, vLLM",
}


def reproduce_experts() -> tuple[EngineSource, ...]:
    """All publications: losses, gains and levels."""
    return (specforge(), angelslim(), specdrift(), glm(), red_hat(), a100(), qwen36())


def speed_ups(sources: Sequence[EngineSource]) -> str:
    """The speed-ups as the table of docs/large-models.md."""
    lines = ["| EAGLE-3 on | requests | published | predicted | kernels alone |", "|---|---|---|---|---|"]
    for source in (source for source in sources if source.title in SHORT):
        by_kind = {
            kind: {cell.what.split()[where]: cell for cell in source.cells if cell.what.endswith(kind)}
            for kind in ("speed-up", "kernels")
            for where in [0 if source.title.startswith("Red Hat") else 1]
        }
        requests = "/".join(where.rstrip(",") for where in by_kind["speed-up"])
        published, ours = (
            "/".join(f"{value:.2f}" for value in values)
            for values in zip(*((cell.published, cell.ours) for cell in by_kind["speed-up"].values()), strict=True)
        )
        alone = "/".join(f"{cell.ours:.2f}" for cell in by_kind["kernels"].values())
        if source.title.startswith("Red Hat"):
            published = "1.10 to 1.21"
        lines.append(f"| {SHORT[source.title]} | {requests} | {published} | {ours} | {alone} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(engines_text(reproduce_experts()), speed_ups(reproduce_experts()), sep="\n\n")
