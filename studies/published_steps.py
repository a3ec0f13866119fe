"""Predictions against figures that others published: `python studies/published_steps.py`.

Nothing in a profile is fitted to these figures of other engines. gpt-fast uses CUDA graphs as this engine does, so its
absolute times are comparable. DistServe's server ran without them, so its fixed time contains host costs; compare its
slopes instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from pdvsim.sim.models.presets import MODELS
from pdvsim.sim.models.specs import ModelSpec, Pair
from pdvsim.sim.prices.costs import CostModel
from pdvsim.sim.prices.profile import builtin

# two matrices of 5120 x 20480 per layer have as many weights as three of this width
OPT_13B = ModelSpec("opt-13b", "llama", 40, 5120, 20480 * 2 // 3, 40, 40, 128, 50272, tied_embeddings=True)
GPT_FAST = "gpt-fast, batch 1, 330 W A100-80GB"
DISTSERVE = "DistServe, OPT-13B on an A100-80GB, vLLM eager"
SPECBENCH = "SpecDecode-Bench, vLLM on an H100"


@dataclass(frozen=True)
class Reference:
    """One figure: its description, its source, and both values in `unit`."""

    source: str
    what: str
    predicted: float
    published: float
    unit: str

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def decode_ms(model: CostModel, rows: int, context: int) -> float:
    """One token per row, each with `context` cached tokens."""
    return model.price(rows).seconds(rows * context) * 1e3


def prefill_ms(model: CostModel, tokens: int) -> float:
    """One whole prompt."""
    return model.price(0, prompts=[(0, tokens)], first_tokens=1).seconds_0 * 1e3


def compare(card: str) -> list[Reference]:
    """Every published figure of a card against its built-in profile."""
    profile = builtin(card)

    def priced(spec: ModelSpec) -> CostModel:
        return CostModel(spec, profile.covering(Pair(spec, spec)).fit(spec))

    return CARDS[card](priced)


def _a100(priced: Callable[[ModelSpec], CostModel]) -> list[Reference]:
    rows = [
        Reference(GPT_FAST, f"{name}, context 100", 1e3 / decode_ms(priced(MODELS[name]), 1, 100), published, "tok/s")
        for name, published in (("llama-2-7b", 104.9), ("llama-3.1-8b", 93.9))
    ]
    opt = priced(OPT_13B)

    def step(batch: int, context: int) -> float:
        return 23.48 + 5.9e-4 * batch * context + 0.0607 * batch

    def prompt(tokens: int) -> float:
        return 22.05 + 0.1405 * tokens + 8.1e-6 * tokens**2

    each_token = (decode_ms(opt, 16, 1024) - decode_ms(opt, 16, 512)) / (16 * 512) * 1e3
    each_new = [(f(2048) - f(512)) / 1536 * 1e3 for f in (partial(prefill_ms, opt), prompt)]
    return [
        *rows,
        *(
            Reference(DISTSERVE, f"decode, batch {n} at 512", decode_ms(opt, n, 512), step(n, 512), "ms")
            for n in (1, 16, 64)
        ),
        Reference(DISTSERVE, "decode, per cached token", each_token, 0.59, "µs"),
        *(Reference(DISTSERVE, f"prefill of {n}", prefill_ms(opt, n), prompt(n), "ms") for n in (512, 2048)),
        Reference(DISTSERVE, "prefill, per token, 512 to 2048", each_new[0], each_new[1], "µs"),
    ]


def _h100(priced: Callable[[ModelSpec], CostModel]) -> list[Reference]:
    llama = priced(MODELS["llama-3.1-8b"])

    def step(batch: int, context: int) -> float:
        return 3.93e-5 * batch * context + 2.10e-2 * batch + 5.886

    rows = [
        Reference(SPECBENCH, f"llama-3.1-8b decode, batch {n} at 512", decode_ms(llama, n, 512), step(n, 512), "ms")
        for n in (1, 16, 64)
    ]
    slope = (decode_ms(llama, 64, 1024) - decode_ms(llama, 64, 512)) / (64 * 512) * 1e6
    return [*rows, Reference(SPECBENCH, "llama-3.1-8b decode, per cached token", slope, 39.3, "ns")]


CARDS = {"a100-80gb": _a100, "h100-sxm": _h100}


def table(rows: Sequence[Reference]) -> str:
    """The comparison as text."""
    lines = [f"{'published by':48} {'what':40} {'predicted':>10} {'published':>10} {'':6} {'error':>7}"]
    lines += [
        f"{r.source:48} {r.what:40} {r.predicted:10.2f} {r.published:10.2f} {r.unit:6} {r.error:+7.1%}" for r in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table([row for card in CARDS for row in compare(card)]))
