"""The kernels a GPU runs, under the names of their twins."""

from pdvsim.realrun.attention import decode_attention, prefill_attention, prefill_plan
from pdvsim.realrun.kernels import append, argmax, embed, gated, rms_norm, rope_write, settle
from pdvsim.realrun.linear import linear

__all__ = [
    "append",
    "argmax",
    "decode_attention",
    "embed",
    "gated",
    "linear",
    "prefill_attention",
    "prefill_plan",
    "rms_norm",
    "rope_write",
    "settle",
]
