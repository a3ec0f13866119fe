"""The kernels a GPU runs, under the names of their reference_ops."""

# ruff: noqa: F401
# mypy: implicit-reexport
from pdvsim.realrun.engine.attention import decode_attention, plan, prefill_attention
from pdvsim.realrun.engine.experts import mixture
from pdvsim.realrun.engine.kernels import (
    append,
    argmax,
    embed,
    gated,
    head_norm,
    rope_write,
    settle,
    turn_pages,
    unit_norm,
)
from pdvsim.realrun.engine.linear import added, normed
