"""Rounds in which nothing else happens, gone through at once.

A policy that has said that its rows go on (`Policy.rounds`) need not be asked after every round. While the GPU has no
other work, no event is due and the KV cache has room, a round is two launches one after the other, and their times
follow from the batch's sums. They are computed here as the event queue would have them, to the last bit.

Not here: hosts that poll, drafts that the host looks up, and lanes on several GPUs. These go round by round.
"""

from __future__ import annotations

from math import inf

from typing import TYPE_CHECKING

from pdvsim.sim.machine.batch import Batch, Way

if TYPE_CHECKING:
    from pdvsim.sim.machine.device import SimulatedGPU


def pass_rounds(gpu: SimulatedGPU, batch: Batch, way: Way) -> int:
    """Go through the rounds of `batch` that are over before anything else happens; returns how many.

    The last is the one with which the first row finishes; where rows are handed over, the one before it.
    """
    env, host, power, books = gpu.env, gpu.host, gpu.power, gpu.books
    if not env.direct or gpu.running or gpu.coming or gpu.fresh or host.times.idle_poll_s:
        return 0
    horizon_s = env.horizon(gpu)
    now_s, k, rows = env._now, batch.k, len(batch)
    kind = "verify" if k else "decode"
    verify_number, verify = books.kind(way.verify_lane, kind, "target", rows, k + 1, 1)
    most = batch.end - batch.round - way.handed
    if horizon_s < inf:  # no round is shorter than its verify
        most = min(most, int((horizon_s - now_s) / verify.solo_0))
    if most < 1 or (most := batch.roomy(most)) < 1:
        return 0
    contexts, owed = batch.sums(most)
    if k and max(owed) >= books.models["draft"].widest:
        return 0

    at_s, free_s, ended_s, mean_w = now_s, host.free_at, gpu.time_s, gpu.mean_w
    launch_s, completion_s = host.times.launch_s, host.times.completion_s
    handoff_s, notify_s = host.times.handoff_s, host.times.notify_s
    watched, handed, depth = way.watched, way.handed, way.depth
    solo_0, solo_1, bytes_0, bytes_1, flops_0, flops_1 = verify
    target_bytes = gpu.kv_bytes["target"]
    draft_bytes = k * gpu.kv_bytes["draft"] if k else 0
    drafts = {
        behind: books.kind(way.draft_lane, "draft", "draft", rows, 1 + behind, k) for behind in (set(owed) if k else ())
    }
    launches: list[float] = []
    over_s: list[float] = []
    draft_ns = wait_ns = verify_ns = 0
    for context, behind in zip(contexts, owed, strict=True):
        now_w, free_before_s, row = mean_w, free_s, len(launches)
        drafted_ns = waited_ns = 0
        end_s = ended_s
        if k:
            number, shape = drafts[behind]
            free_s = (at_s if at_s > free_s else free_s) + launch_s
            start_s = free_s if free_s > end_s else end_s
            solo_s = shape[0] + shape[1] * context
            if power is None:
                end_s = start_s + solo_s
            else:
                end_s, now_w = power.spent(
                    now_w, start_s - end_s, start_s, solo_s, shape[2] + shape[3] * context,
                    float(draft_bytes * context), shape[4] + shape[5] * context,
                )  # fmt: skip
            launches += (number, depth, context, start_s, end_s)
            drafted_ns = int((end_s - start_s) * 1e9)
            if watched:
                at_s = free_s = (end_s if end_s > free_s else free_s) + completion_s
        if handed:
            made_s = at_s
            free_s = (at_s if at_s > free_s else free_s) + handoff_s
            at_s = free_s + notify_s
            waited_ns = int((at_s - made_s) * 1e9)
        free_s = (at_s if at_s > free_s else free_s) + launch_s
        start_s = free_s if free_s > end_s else end_s
        solo_s = solo_0 + solo_1 * context
        if power is None:
            end_s = start_s + solo_s
        else:
            end_s, now_w = power.spent(
                now_w, start_s - end_s, start_s, solo_s, bytes_0 + bytes_1 * context, float(target_bytes * context),
                flops_0 + flops_1 * context,
            )  # fmt: skip
        launches += (verify_number, depth, context, start_s, end_s)
        at_s = free_s = (end_s if end_s > free_s else free_s) + completion_s
        seen_s = at_s
        if handed:
            free_s = at_s + handoff_s
            at_s = free_s + notify_s
        if at_s >= horizon_s:
            free_s = free_before_s
            del launches[row:]
            break
        over_s.append(seen_s)
        ended_s, mean_w, now_s = end_s, now_w, at_s
        draft_ns, wait_ns = draft_ns + drafted_ns, wait_ns + waited_ns
        verify_ns += int((end_s - start_s) * 1e9)
    if over_s:
        env._now, host.free_at, gpu.time_s, gpu.mean_w = now_s, free_s, ended_s, mean_w
        books.extend_short(launches)
        batch.draft_ns, batch.verify_ns = batch.draft_ns + draft_ns, batch.verify_ns + verify_ns
        batch.wait_ns += wait_ns
        batch.pass_rounds(over_s)
    return len(over_s)
