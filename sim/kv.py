"""The KV cache as a number of tokens: a request is admitted when all it may need fits, and reserves it.

Not modelled: paging, prefix sharing, and preemption of running requests (so none is needed).
"""

from __future__ import annotations

from pdvsim.sim.core import GpuSpec, ModelSpec, Request


class KvCache:
    """Tokens reserved out of a capacity."""

    def __init__(self, capacity_tokens: int, lookahead: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.lookahead = lookahead  # drafts beyond the last output token that may be written
        self.used_tokens = 0
        self.peak_tokens = 0

    def need(self, request: Request) -> int:
        return request.prompt_tokens + request.output_tokens + self.lookahead

    def reserve(self, request: Request) -> bool:
        """Reserve the request's tokens if they fit."""
        used = self.used_tokens + self.need(request)
        if used > self.capacity_tokens:
            return False
        self.used_tokens = used
        if used > self.peak_tokens:
            self.peak_tokens = used
        return True

    def release(self, request: Request) -> None:
        self.used_tokens -= self.need(request)
        assert self.used_tokens >= 0, "released more KV than was reserved"


def capacity_tokens(gpu: GpuSpec, models: list[ModelSpec], utilization: float) -> int:
    """Tokens that fit beside the weights of `models`, whose caches grow together."""
    room = gpu.memory_bytes * utilization - sum(m.weight_bytes for m in models)
    return max(0, int(room // sum(m.kv_bytes_per_token for m in models)))
