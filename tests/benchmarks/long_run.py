"""A day of simulated time at 95% load: the laws that hold for seconds hold for 24 hours.

    python tests/benchmarks/long_run.py [--hours 24]

1. One server, identical requests: every service takes as long at the end of the day as at its beginning, and the whole
   day is Lindley's recursion, worked out in exact fractions. This is the drift of the clock.
2. Continuous batching (batches of 4, ShareGPT lengths) at 95% of what it can serve, records not kept: nothing is
   lost, Little's law, a GPU that is busy 95% of the time and not more, a queue that does not grow, an empty KV cache.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from fractions import Fraction

import numpy as np

from pdvsim.sim.assembly import profile_of
from pdvsim.sim.client import Client
from pdvsim.sim.cluster import Cluster
from pdvsim.sim.config import Experiment, Scoring, Server, Traffic
from pdvsim.sim.core import Request
from pdvsim.sim.machine.clock import Clock
from pdvsim.sim.metrics.summary import Tally, summarise
from pdvsim.sim.records import Log
from pdvsim.sim.run import no_collector, simulate
from pdvsim.sim.workload.requests import Workload

LOAD = 0.95
PAIR = "tinyllama-1.1b:llama-2-7b"


def clock_drift(hours: float) -> dict[str, float]:
    """Identical requests through one worker: seconds that a service and the whole recursion are off, at most."""
    output, runs = 200, bytes([2, 1, 0] * 67)[:200]
    experiment = Experiment("baseline", Traffic(num_prompts=1), server=Server(PAIR, num_workers=1))

    def request(id: int, at_s: float) -> Request:
        return Request(id, at_s, 100, output, runs)

    alone = simulate(experiment, requests=[request(0, 0.0)]).requests
    service_s = float(alone["finish_s"][0] - alone["admitted_s"][0])
    count = int(hours * 3600 * LOAD / service_s)
    arrival_s = np.cumsum(np.random.default_rng(0).exponential(service_s / LOAD, count))
    result = simulate(experiment, requests=[request(i, float(at)) for i, at in enumerate(arrival_s)])
    served = result.requests["finish_s"] - result.requests["admitted_s"]
    exact, free, worst = Fraction(service_s), Fraction(0), 0.0
    for at, finish in zip(arrival_s.tolist(), result.requests["finish_s"].tolist(), strict=True):
        free = max(Fraction(at), free) + exact
        worst = max(worst, abs(float(free - Fraction(finish))))
    return {
        "requests": count,
        "simulated_hours": float(result.requests["finish_s"].max()) / 3600,
        "service_off_s": float(np.abs(served - service_s).max()),
        "lindley_off_s": worst,
    }


def capacity(experiment: Experiment) -> float:
    """Requests per second where there is always one waiting."""
    closed = replace(experiment, traffic=Traffic(num_prompts=2000, max_concurrency=64, seed=1))
    return float(summarise(simulate(closed))["request_throughput"])


def steady_day(hours: float) -> dict[str, float]:
    """Continuous batching at 95% of its capacity, streamed: what the laws say of it."""
    experiment = Experiment("colocated", server=Server(PAIR, max_num_seqs=4), scoring=Scoring(detailed=False))
    rate = LOAD * capacity(experiment)
    traffic = Traffic(num_prompts=int(rate * hours * 3600), request_rate=rate, seed=0)
    experiment = replace(experiment, traffic=traffic)
    profile = profile_of(experiment)
    log, env = Log(), Clock()
    site = Cluster(env, experiment, profile, log)
    tally = Tally(experiment, traffic.num_prompts, [profile.gpu.bandwidth_bytes_per_s], log, site.settled_s)
    client = Client(env, Workload(traffic, experiment.acceptance), experiment, site, None, tally)
    area = occupancy(site, env)
    with no_collector():
        env.run_to(client.all_done)
    metrics = tally.close()
    span_s = metrics["duration"]
    end_s = span_s + tally.sums.window.start_s
    census = tally.sums.census
    quarters = [census.in_system(end_s * q / 4, end_s * (q + 1) / 4) for q in range(4)]
    assert metrics["completed"] == traffic.num_prompts
    assert len(client.inside) == site.servers[0].in_flight == site.servers[0].kv.used_tokens == 0
    return {
        "requests": metrics["completed"],
        "simulated_hours": env.now / 3600,
        "rate_per_s": rate,
        "mean_in_system": area() / env.now,
        "rate_times_mean_time": metrics["completed"] / env.now * metrics["mean_e2el_ms"] / 1e3,
        "gpu_busy": metrics["lanes"]["main"]["utilisation"],
        **{f"in_system_quarter_{i + 1}": mean for i, mean in enumerate(quarters)},
        "overloaded": float(metrics["stability"] == "overloaded"),
    }


def occupancy(site: Cluster, env: Clock) -> object:
    """The integral of the number of requests in the system, taken from the server's own counts at each change."""
    state = {"area": 0.0, "inside": 0, "at_s": 0.0}
    route, finish = site.route, site.on_finish

    def moved(by: int) -> None:
        state["area"] += state["inside"] * (env.now - state["at_s"])
        state["inside"] += by
        state["at_s"] = env.now

    def routed(request: Request) -> object:
        moved(+1)
        return route(request)

    def finished(request: Request) -> None:
        moved(-1)
        finish(request)

    site.route, site.on_finish = routed, finished  # type: ignore[assignment,method-assign]
    return lambda: state["area"]


def check(drift: dict[str, float], day: dict[str, float]) -> None:
    """The laws; an AssertionError names the one that is broken."""
    # after a day a float of seconds resolves 1.5e-11; a service is a few hundred sums, a busy period many services
    assert drift["service_off_s"] < 1e-8, "a service takes another time than at the beginning"
    assert drift["lindley_off_s"] < 1e-6, "the clock has drifted from Lindley's recursion"
    little = abs(day["mean_in_system"] / day["rate_times_mean_time"] - 1)
    assert little < 1e-6, f"Little's law is off by {little:g}"
    assert day["gpu_busy"] < 1, "a GPU cannot be busy for more than all of the time"
    assert not day["overloaded"], "the queue grew"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=24.0)
    hours = parser.parse_args().hours
    begin_s = time.process_time()
    drift, day = clock_drift(hours), steady_day(hours)
    for title, figures in (("one server, identical requests", drift), ("continuous batching, streamed", day)):
        print(title)
        print("\n".join(f"  {name:<24}{figure:.6g}" for name, figure in figures.items()))
    check(drift, day)
    print(f"all laws hold ({time.process_time() - begin_s:.0f} s of processor time)")


if __name__ == "__main__":
    main()
