"""The metrics of the published tables, and fair metrics of the same runs.

Published, poisson_30s: tokens of completed requests over the time of the last completion, or over the cut-off if any
request was unfinished then. What an unfinished request had received counts for nothing.
Fair: all tokens delivered, every request served to its end, latencies over every request.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pdvsim.published.job import PublishedJob

Score = dict[str, float]


def score_three_way(jobs: Sequence[PublishedJob]) -> Score:
    """The metrics of the three_way table; all requests complete."""
    latency_ms = [1e3 * (job.finish_s - job.arrival_s) for job in jobs]
    total_s = max(job.finish_s for job in jobs)
    marks = {f"request_latency_p{rank}": float(np.percentile(latency_ms, rank)) for rank in (50, 95, 99)}
    return {
        "total_time": total_s,
        "throughput": len(jobs) / total_s,
        "request_latency_mean": float(np.mean(latency_ms)),
        **marks,
        "request_latency_min": min(latency_ms),
        "request_latency_max": max(latency_ms),
    }


def score_poisson(jobs: Sequence[PublishedJob], cutoff_s: float) -> Score:
    """The metrics of the poisson_30s table; latencies are nan where nothing completed."""
    done = [job for job in jobs if job.completed]
    end_s = max(job.finish_s for job in done) if len(done) == len(jobs) else cutoff_s
    since_start_ms = [
        1e3 * (time_s - job.arrival_s) for job in done for time_s, tokens in job.deliveries for _ in range(tokens)
    ]
    p50, p99 = np.percentile(since_start_ms, (50, 99)).tolist() if since_start_ms else (np.nan, np.nan)
    return {
        "completions": len(done),
        "throughput_completed_only": sum(job.tokens for job in done) / end_s,
        "request_latency_mean_completed_only": (
            1e3 * float(np.mean([job.finish_s - job.arrival_s for job in done])) if done else np.nan
        ),
        "token_latency_p50_since_request_start": p50,
        "token_latency_p99_since_request_start": p99,
        "acceptance_completed": float(np.mean([job.acceptance for job in done])) if done else np.nan,
        "throughput_all_tokens": sum(job.tokens for job in jobs) / end_s,
    }


def score_fairly(jobs: Sequence[PublishedJob]) -> Score:
    """All tokens of all requests, served to the end; time runs from the first arrival."""
    latency_s = [job.finish_s - job.arrival_s for job in jobs]
    duration_s = max(job.finish_s for job in jobs) - min(job.arrival_s for job in jobs)
    return {
        "duration": duration_s,
        "output_throughput": sum(job.tokens for job in jobs) / duration_s,
        "mean_e2el_ms": 1e3 * float(np.mean(latency_s)),
        "p95_e2el_ms": 1e3 * float(np.percentile(latency_s, 95)),
    }
