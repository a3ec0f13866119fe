"""Speculative decoding in one loop: draft k tokens, verify them in one target forward, keep what agrees.

The plain reference of what the serving policies do piecewise; one batch, run until every prompt has its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdvsim.realrun.engine.graphs import GraphLane, PromptChunk
from pdvsim.realrun.engine.head import Head


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
            if len(prompt) + new_tokens > sequences.usable:
                raise ValueError(f"prompt {slot} and {new_tokens} new tokens do not fit {sequences.usable}")
            sequences.put(slot, prompt)
    rereads = draft is not None and draft.engine.model.arch.spec.rereads
    head = draft if draft is not None and isinstance(draft.engine.model, Head) else None
    outputs = prefill(target, prompts, chunk_tokens, emit=True, head=head)
    if draft is not None and head is None:
        prefill(draft, prompts, chunk_tokens, emit=False)
    unread = [0] * len(prompts)  # accepted drafts that the drafter has yet to read: its own last, or all of them
    while active := [s for s, out in enumerate(outputs) if len(out) < new_tokens]:
        if draft is None:
            rows = target.step(active).outcome().rows
        else:
            draft.draft(active, drafts, width=1 + max(unread[s] for s in active)).outcome()
            rows = target.verify(active, drafts).outcome().rows
        for slot, new in zip(active, rows, strict=True):
            outputs[slot] += new
            unread[slot] = len(new) - 1 if rereads else int(len(new) == drafts + 1)
    return [out[:new_tokens] for out in outputs]
