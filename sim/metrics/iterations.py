"""The steps of a colocated run, one line each, as vLLM 0.27.1 writes them with --enable-logging-iteration-details.

A step is a draft and the target's forward after it. As in vLLM, the requests in it are not named.
"""

from __future__ import annotations

from collections.abc import Iterator

from pdvsim.sim.core import KINDS
from pdvsim.sim.policies import archs_where, policy_of
from pdvsim.sim.records import ROLES, Result

DRAFT = ROLES.index("draft")
PREFILL = KINDS.index("prefill")


def iteration_lines(result: Result, engine: str, version: str) -> Iterator[str]:
    """The lines of a log: the engine's version, its KV cache, and one line per step."""
    arch = result.experiment.arch
    if not policy_of(arch).in_steps():
        fitting = archs_where(lambda policy: policy.in_steps())
        raise ValueError(f"a log of steps needs {' or '.join(fitting)}, not {arch}")
    capacity = int(result.meta["kv_capacity_tokens"])
    yield f"INFO Initializing a {engine} engine (v{version}) with config: {result.experiment.server.pair}"
    yield f"INFO GPU KV cache size: {capacity:,} tokens"
    names = ("kind", "role", "rows", "tokens", "width", "prompt_start", "context", "start_s", "end_s")
    began_s, step, carried = None, 0, result.carried
    for at, row in enumerate(zip(*(result.launches[name][:].tolist() for name in names), strict=True)):
        kind, role, rows, tokens, width, prompt_start, context, start_s, end_s = row
        began_s = start_s if began_s is None else began_s
        if role == DRAFT:
            continue
        prompt = tokens - rows * width
        if kind == PREFILL:
            rows = 0  # a real one's may have been filled by the time it was entered
        drafted = rows * width
        prompts = len(carried[at][1]) if carried is not None else int(prompt > 0)
        usage = 100 * (context + tokens + prompt_start) / capacity
        yield (
            f"INFO Iteration({step}): {prompts} context requests, {prompt} context tokens, {rows} generation requests, "
            f"{drafted} generation tokens, iteration elapsed time: {(end_s - began_s) * 1e3:.2f} ms, "
            f"GPU KV cache usage: {usage:.1f}%"
        )
        began_s, step = None, step + 1
