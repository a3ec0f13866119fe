"""What a serving engine adds to its kernels, and how far its predictions were off: `data/engines/steps.json`.

The constants are fitted to measured servers of all models and cards together, for an engine's older and newer versions
apart (`studies/engine_steps.py`). The errors are those of rows that the fit never saw (`pdvsim validate --silicon`).

What drafting adds is `round_s` and `draft_s`, from published pairs of plain and drafted runs
(`studies/published_speculation.py`). A round ends with rejection sampling over several tokens per row, new metadata for
drafter and target, and accepted counts that the host waits for (vLLM pull request 29957). A forward of a drafter is
short and only partly in a CUDA graph: attention and its metadata are launched one by one (vLLM issue 45258).
SGLang replays all steps of a draft as one graph (its EAGLEDraftCudaGraphRunner), which cost nothing more. But up to
0.5.10 it schedules without overlap while it drafts, so that the host's whole step is exposed: its time per round is
several times vLLM's. Overlap is the default since pull request 21062 (April 2026). Pull request 11398, which introduced
it, states rounds that are 1.1 ms shorter (2.99 tokens at 246.80 tok/s without, 3.01 at 273.43 with): newer ones have
so much less. A pair of runs with overlap (gpt-oss-120b, `studies/experts.py`) is inconclusive: plain steps of it
are mispredicted by more than a round costs. No pair of vLLM from 0.14 on was found: it has the older figures.

With prefill apart a request takes `handover_s` besides: the median that TTFT lacked on visible servers under Dynamo,
some 15 of SGLang's with DeepSeek-R1 and seven of vLLM's with Kimi-K2.5. TensorRT-LLM's lacked nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class EngineStep:
    """What an engine adds to its kernels: one set for all models and cards."""

    step_s: float = 0.0  # between the end of a forward and the next: scheduling, sampling, what is not in a graph
    row_s: float = 0.0  # the same per request of a step
    layer_s: float = 0.0  # per layer and forward: small kernels and gaps between kernels
    state_s: float = 0.0  # more per layer that keeps a state: small kernels that newer versions fuse
    sparse_s: float = 0.0  # the same of sparse attention
    kernels: float = 1.0  # times as long as in the tables, of layers over few tokens and of decode attention, ...
    prompts: float = 1.0  # ... and of those over many
    experts: float = 1.0  # ... and of experts, besides
    expert_prompts: float = 1.0
    mxfp4_experts: float | None = None  # the same of MXFP4, which other kernels multiply; None: as of the others
    mxfp4_prompts: float | None = None
    reduces: float = 1.0  # ... and of all-reduces, which engines fuse with norms
    quantised_s: float = 0.0  # more per product of 8 or 4 bits; below 0 where tables quantise what engines fuse
    # Whose times products of 8 bits with a scale per block have. vLLM's were timed waiting for the host, 55 us at least
    # on an H200 where SGLang's same kernels take 7. Servers up to vLLM 0.16 wait as well, those of 0.18 do not.
    block_products: str = "fp8_block"
    # Least time per layer of a forward with prompts, which is not in a CUDA graph: the host launches its kernels one by
    # one. Of models with a latent KV cache or states, whose layers have some forty; others' are longer than that.
    eager_layer_s: float = 0.0
    request_s: float = 0.0  # from a request's arrival until the scheduler has it, and to stream its first token
    prompt_token_s: float = 0.0  # per prompt token, to receive and tokenise it: one request after the other
    handover_s: float = 0.0  # with prefill apart, per request: router, connector, and waits for a step of either engine
    round_s: float = 0.0  # more per forward that verifies drafts: rejection sampling, metadata, waiting for counts
    draft_s: float = 0.0  # more per forward of a drafter: what is not in a graph

    def expert_factors(self, kind: str) -> tuple[float, float]:
        """Times as long as in the tables that experts of a type take, over few tokens and over many."""
        own = (self.mxfp4_experts, self.mxfp4_prompts) if "mxfp4" in kind else (None, None)
        return (self.experts if own[0] is None else own[0], self.expert_prompts if own[1] is None else own[1])


@dataclass(frozen=True)
class EngineError:
    """Errors of an engine's predictions against measured servers, as shares."""

    tpot: float  # 95% of the rows lie within
    ttft: float
    ratio: float  # of the ratio of two rows of one card, engine and model, in TPOT: 95% lie within
    rows: int
    here: bool = True  # on this card; False: on the engine's other cards


@cache
def _document() -> dict[str, Any]:
    text = (files("pdvsim.sim.hardware") / "data" / "engines" / "steps.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


def constants(engine: str, card: str, version: str = "") -> tuple[EngineStep, EngineError | None]:
    """An engine's constants, and its errors on a card; of all cards where none was measured on this one."""
    document = _document()
    eras = document["steps"].get(engine, [])
    dated = version and not version.startswith("nightly")  # such a build counts as the newest
    older = (one for one in eras if dated and "before" in one and _numbers(version) < _numbers(one["before"]))
    step = next(older, eras[-1] if eras else {})
    errors = document["errors"].get(engine, {})
    entry = errors.get(card) or ({**errors["any"], "here": False} if "any" in errors else None)
    figures = {part.name: step[part.name] for part in fields(EngineStep) if part.name in step}
    return EngineStep(**figures), None if entry is None else EngineError(**entry)


def _numbers(version: str) -> tuple[int, ...]:
    """A version as numbers, up to what is no number."""
    parts = []
    for part in version.split("."):
        if not part.isdecimal():
            break
        parts.append(int(part))
    return tuple(parts)
