"""One experiment on the real device: make the models, capture their graphs, and let the policy serve the requests.

The policy, the client and the records are the simulator's. A request gets exactly its output tokens: end-of-text tokens
do not end it.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pdvsim.common.progress import Progress
from pdvsim.realrun.clock import WallClock
from pdvsim.realrun.device import CudaGPU, Lookups, ServingRig
from pdvsim.realrun.engine.arch import ModelArchitecture, from_config, headed, preset
from pdvsim.realrun.engine.cache import PAGE
from pdvsim.realrun.engine.head import Head
from pdvsim.realrun.engine.model import Transformer
from pdvsim.realrun.machine import Machine, as_served, refuse
from pdvsim.realrun.memory import Needs, PagedKv, available_bytes, pages_that_fit
from pdvsim.realrun.telemetry import Telemetry, machine_facts
from pdvsim.realrun.texts import next_turns, prompts, repeated
from pdvsim.sim.assembly import make_controller, make_planner, profile_of, reuse_of
from pdvsim.sim.cluster import cached_facts, check_context, check_kv, drawn_verdict
from pdvsim.sim.config import Experiment, Traffic
from pdvsim.sim.core import Request, Role
from pdvsim.sim.machine.ledger import Ledger
from pdvsim.sim.metrics.sketch import Union
from pdvsim.sim.models.presets import PARD, drafter, in_parallel, is_config, quantised, unquantised
from pdvsim.sim.models.presets import pair as named_pair
from pdvsim.sim.models.specs import ModelSpec, Pair
from pdvsim.sim.policies import own_errors, policy_of
from pdvsim.sim.policies.base import Context, Policy
from pdvsim.sim.prices.costs import CostModel, LookupCosts
from pdvsim.sim.prices.host import HostCost, SimulatedHost
from pdvsim.sim.prices.pace import pace_of
from pdvsim.sim.prices.profile import Profile
from pdvsim.sim.records import Columns, Log, Result, request_columns, rows_of
from pdvsim.sim.run import Client, Servers, no_collector
from pdvsim.sim.workload.lookup import lookup_of
from pdvsim.sim.workload.requests import make_requests

WARM_UPS, WARM_UP_S = (1, 4, 16, 64), 4.0  # requests at a time, and seconds after which no more are served
WARM_UP_PROMPT, WARM_UP_OUTPUT = 256, 48  # tokens of a request at most

TINY = {
    "draft": ModelArchitecture(ModelSpec("tiny-draft", "llama", 1, 32, 64, 2, 1, 16, 512), 1e4, 1e-5),
    "target": ModelArchitecture(ModelSpec("tiny", "llama", 2, 64, 128, 4, 2, 16, 512), 1e4, 1e-5),
}


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a run; `result` has the requests that had finished, or is None if none had."""

    def __init__(self, result: Result | None, requests: int) -> None:
        super().__init__()
        self.result, self.requests = result, requests


class Lines(Progress):
    """Progress as lines, even on a terminal: a bar would redraw from another thread and disturb the host."""

    def __init__(self, total: int, unit: str, quiet: bool) -> None:
        super().__init__(total, unit, quiet)
        self._terminal = False


# models --------------------------------------------------------------------------------------------------------------


def architectures(experiment: Experiment, machine: Machine) -> dict[Role, ModelArchitecture]:
    """The models a run needs, by role; a head reads its target's states."""
    server, kind = experiment.server, experiment.server.drafted_by
    paths: dict[Role, str | None] = {"draft": machine.draft_path, "target": machine.target_path}
    named = None if machine.tiny or machine.target_path else named_pair(server.pair)

    def of(role: Role) -> ModelArchitecture:
        if (path := paths[role]) is None:
            arch = TINY[role] if named is None else _named(getattr(named, role).name)
        else:
            arch = from_config(Path(path))
            if role == "target" and server.quantization:
                arch = replace(arch, spec=quantised(arch.spec))
        return replace(arch, spec=server.served(arch.spec))

    archs: dict[Role, ModelArchitecture] = {"target": of("target")}
    if experiment.speculates and (spec := drafter(kind, archs["target"].spec)).is_head:
        archs["draft"] = headed(archs["target"], spec)
    elif experiment.speculates and (paths["draft"] or kind in ("model", "pard")):
        drafts = of("draft")
        archs["draft"] = replace(drafts, spec=in_parallel(drafts.spec)) if kind == "pard" else drafts
    return archs


def _named(name: str) -> ModelArchitecture:
    """The architecture of a preset or of a config.json."""
    if not is_config(whole := unquantised(name)):
        return preset(name)
    arch = from_config(Path(whole), whole)
    return arch if name == whole else replace(arch, spec=quantised(arch.spec))


def dtype_of(machine: Machine) -> torch.dtype:
    """Return the type of weights and caches: the requested one, else the device's default."""
    dtype: torch.dtype = getattr(torch, machine.dtype or ("float32" if machine.device == "cpu" else "bfloat16"))
    return dtype


def make_models(
    archs: dict[Role, ModelArchitecture],
    machine: Machine,
    capacity: int,
    dtype: torch.dtype,
    seed: int,
    loaded: dict[Role, Transformer] | None = None,
) -> dict[Role, Transformer]:
    """The models on the device, `loaded` ones as they are; checkpoints where paths are given, else random weights."""
    device = torch.device(machine.device)
    paths = {"draft": machine.draft_path, "target": machine.target_path}
    models: dict[Role, Transformer] = dict(loaded or {})
    for role, arch in sorted(archs.items(), reverse=True):  # the target first: a head shares its embedding
        path = paths[role]
        if role in models:
            continue
        if path is not None:
            models[role] = Transformer.load(path, capacity, device, dtype, arch)
        elif arch.spec.is_head:
            models[role] = Head.on(models["target"], arch.spec, seed + 1)
        else:
            models[role] = Transformer.random(arch, capacity, device, dtype, seed + (role == "draft"))
    if device.type == "cuda":
        torch.cuda.empty_cache()  # scratch of making the weights
    return models


# the run -------------------------------------------------------------------------------------------------------------


class RealServer:
    """The one server, on the real device."""

    def __init__(
        self,
        env: WallClock,
        experiment: Experiment,
        profile: Profile,
        rig: ServingRig,
        requests: Sequence[Request],
        own: bool,
        traced: bool = False,
    ) -> None:
        self.env, self.experiment, self.profile, self.rig, self.log = env, experiment, profile, rig, Log()
        self.log.launches.carried = [] if traced else None
        self.outputs: dict[int, list[int]] | None = None  # where each request's tokens are kept, if anywhere
        self.on_finish: Callable[[Request], None] = lambda request: None
        self.servers: list[Policy] = []
        settings = experiment.server
        models = {role: model.arch.spec for role, model in rig.models.items()}
        predicted = profile.covering(Pair(models.get("draft", models["target"]), models["target"]))
        latency: dict[Role, CostModel] = {role: predicted.cost_model(model) for role, model in models.items()}
        lookups = None
        vocab, seed = rig.models["target"].arch.spec.vocab, experiment.traffic.seed
        texts = prompts(requests, vocab, seed)
        on_device = torch.from_numpy(np.concatenate([*texts.values()])).to(rig.sequences.device)
        parts = on_device.split([len(text) for text in texts.values()])
        tokens = dict(zip(texts, parts, strict=True))
        self._next_turns = next_turns(requests)
        if rig.needs.looks_up:
            latency["draft"] = LookupCosts(drafter("ngram", models["target"]))
            on_host = {id: text.tolist() for id, text in texts.items()}
            lookups = Lookups(on_host, None if own else lookup_of(settings.drafted_by, experiment.acceptance))
        known = rig.sequences.device.type == "cuda" and all(m.name in profile.models for m in models.values())
        host = SimulatedHost(HostCost(0.0, 0.0, 0.0))  # what an operation costs the host has been paid when it is over
        ledger = Ledger(latency if known else {}, self.log.launches)
        held = rig.needs.pages * PAGE
        capacity = min(experiment.hardware.kv_capacity_tokens or held, held)
        kv = PagedKv(capacity, experiment.longest_draft, experiment.paged, rig.sequences, reuse_of(experiment))
        self.device = CudaGPU(
            env, host, rig.lanes, kv, tokens, ledger, (lambda launch: None) if own else drawn_verdict,
            Telemetry.of(rig.sequences.device), lookups, rig.needs.verify_lengths,
        )  # fmt: skip
        env.sources.append(self.device)
        planner = make_planner(experiment, profile, latency)
        self.context = Context(
            env=env,
            device=self.device,
            settings=settings,
            controller=make_controller(settings, planner),
            planner=planner,
            kv=kv,
            deliveries=self.log.deliveries,
            on_finish=self._finished,
        )

    def open(self) -> None:
        """Start the clock and the policy's processes."""
        self.env.start()
        self.device.begin()
        self.servers = [policy_of(self.experiment.arch)(self.context)]
        for process in self.servers[0].processes():
            self.env.process(process)

    def receive(self, request: Request) -> None:
        self.servers[0].submit(request)

    def _finished(self, request: Request) -> None:
        if self.outputs is not None:
            tokens = self.rig.sequences.get(self.device.kv.slots[request.id])
            self.outputs[request.id] = tokens[request.prompt_tokens :][: request.output_tokens]
        if (turn := self._next_turns.get(request.id)) is not None:
            self.device.continue_with(request, turn, repeated(request, turn))
        self.device.kv.release_slot(request)
        if self.device.lookups is not None:
            self.device.lookups.forget(request)
        self.on_finish(request)


def prepare(
    experiment: Experiment,
    machine: Machine,
    requests: Sequence[Request],
    quiet: bool = True,
    models: dict[Role, Transformer] | None = None,
) -> ServingRig:
    """All that must be ready before the clock starts; `models` saves making them. Refuses what does not fit."""
    refuse(experiment, machine)
    experiment = as_served(experiment)
    archs, needs, dtype = architectures(experiment, machine), Needs.of(experiment, requests), dtype_of(machine)
    check_context([arch.spec for arch in archs.values()], requests)
    gc.collect()  # an earlier run's graphs and caches
    if machine.device == "cuda":
        torch.cuda.empty_cache()
    try:
        room = available_bytes(torch.device(machine.device), experiment.hardware.gpu_memory_utilization)
        models = {role: model for role, model in (models or {}).items() if role in archs}
        for role, model in models.items():  # whose vocabulary may have been cut to that of another
            given, wanted = model.arch, archs[role]
            if replace(given, spec=replace(given.spec, vocab=wanted.spec.vocab)) != wanted:
                raise ValueError(f"models[{role!r}] is {given.spec.name}; this run needs {wanted.spec.name} as {role}")
        pages = pages_that_fit(archs, needs, dtype.itemsize, room, loaded=models.keys())
        needs = Needs.of(experiment, requests, pages)
        models = make_models(archs, machine, needs.capacity, dtype, experiment.traffic.seed, models)
        rig = ServingRig.build(experiment, models, needs, quiet)
        if machine.device == "cuda":
            warm_up(rig, experiment, machine, requests)
        return rig
    except RuntimeError as error:  # torch's own class for it, and CUDA's errors
        if "out of memory" not in str(error):
            raise
        raise ValueError(
            f"out of memory before the start ({str(error).splitlines()[0]}): lower --max-num-seqs, "
            "--max-num-batched-tokens, --input-len or --output-len"
        ) from None


def warm_up(rig: ServingRig, experiment: Experiment, machine: Machine, requests: Sequence[Request]) -> None:
    """Serve some of the requests, cut short, in batches of several sizes; keep the launches, and how fast they were.

    A first run is not trusted.
    """
    parts: list[Columns] = []
    policy, served_s = policy_of(experiment.arch), 0.0
    server = replace(experiment.server, async_scheduling=False)  # it would hide the host
    longest = max(WARM_UP_PROMPT, rig.needs.prompt_tokens[0])  # nothing is ready for shorter forwards than the run has
    for users in sorted({min(users, rig.needs.slots) for users in WARM_UPS}):
        if len(parts) > 1 and served_s > WARM_UP_S:
            break
        few = [  # of several runs, whose numbers may be the same
            Request(at, 0.0, min(r.prompt_tokens, longest), min(r.output_tokens, WARM_UP_OUTPUT), r.accept_runs)
            for at, r in enumerate(requests[: 2 * users])
        ]
        traffic = replace(experiment.traffic, max_concurrency=users)
        unscored = replace(experiment.scoring, warmup_requests=0)
        try:
            chosen = replace(experiment, traffic=traffic, scoring=unscored, server=server)
            served = dict(serve(chosen, machine, requests=few, rig=rig).launches)
        except Interrupted:
            raise KeyboardInterrupt from None
        for name in ("start_s", "end_s"):  # one run after the other
            served[name] = served[name] + served_s + len(parts)
        parts.append(served)
        served_s = float(served["end_s"].max()) - len(parts) + 1
    launches = {name: np.concatenate([part[name] for part in parts[1:] or parts]) for name in parts[0]}
    rig.warm_launches = launches
    rig.pace = pace_of(launches, profile_of(experiment).host, experiment.pair, policy.hands_over())
    if policy.workers == "requests":  # they take turns on the GPU, which so hides the host
        rig.pace = {name: pace for name, pace in rig.pace.items() if name == "pace_launches"}


def _naming_its_models(experiment: Experiment, machine: Machine) -> Experiment:
    """The experiment with the models that the machine loads in place of its pair."""
    if not (machine.tiny or machine.target_path):
        return experiment
    names = {role: arch.spec.name for role, arch in architectures(experiment, machine).items()}
    fallback = "ngram" if experiment.server.drafted_by == "ngram" else "none"
    before = PARD if experiment.server.drafted_by == "pard" else ""
    pair = f"{before}{names.get('draft', fallback)}:{names['target']}"
    return replace(experiment, server=replace(experiment.server, pair=pair))


def probe(experiment: Experiment, machine: Machine, quiet: bool = True) -> dict[str, Any]:
    """Run a warm-up only; return its figures of this machine as a run records them."""
    users = min(max(WARM_UPS), experiment.server.max_num_seqs)
    traffic = Traffic(
        "random", num_prompts=2 * users, input_len=WARM_UP_PROMPT, output_len=WARM_UP_OUTPUT, max_concurrency=users
    )
    chosen = replace(experiment, traffic=traffic, scoring=replace(experiment.scoring, warmup_requests=0))
    requests = make_requests(traffic, chosen.acceptance)
    rig = prepare(chosen, machine, requests, quiet)
    if machine.device != "cuda":  # which no run needs
        warm_up(rig, as_served(chosen), machine, requests)
    pair = _naming_its_models(chosen, machine).server.pair
    return {"arch": chosen.arch, "pair": pair, **machine_facts(rig.sequences.device), **rig.pace}


def serve(
    experiment: Experiment,
    machine: Machine,
    *,
    requests: list[Request] | None = None,
    quiet: bool = True,
    rig: ServingRig | None = None,
    outputs: dict[int, list[int]] | None = None,
    traced: bool = False,
) -> Result:
    """Run an experiment for real, on a `rig` that is ready if one is given.

    `outputs` is filled with each request's tokens, which makes the host wait for the device. `traced` keeps whom each
    launch carried. A ValueError says in one line what cannot be done, before the first request; Ctrl-C raises
    Interrupted.
    """
    refuse(experiment, machine)
    experiment = as_served(experiment)
    experiment = _naming_its_models(experiment, machine)
    if requests is None:
        requests = make_requests(experiment.traffic, experiment.acceptance)
    if rig is None:
        rig = prepare(experiment, machine, requests, quiet)
    elif not rig.serves(experiment.server, Needs.of(experiment, requests)):
        raise ValueError("the run needs more memory than the rig has")
    env = WallClock()
    site = RealServer(env, experiment, profile_of(experiment), rig, requests, machine.own_verdict, traced)
    site.outputs = outputs
    check_kv(site.context.kv, requests)
    graphs = rig.graphs
    gc.collect()
    with own_errors(experiment.arch), no_collector():
        site.open()
        stopped = send_all(env, requests, experiment, site, quiet)
    site.device.flush()
    kv, ledger = site.context.kv, site.device.ledger
    facts = {
        "planned_with": site.profile.name,
        "dtype": str(rig.models["target"].dtype).removeprefix("torch."),
        "kv_capacity_tokens": kv.capacity_tokens,
        "kv_peak_tokens": kv.peak_tokens,
        **cached_facts([kv]),
        "kv_wanted_tokens": Needs.of(experiment, requests).pages * PAGE,
        "graphs": rig.graphs,
        "graphs_captured_late": rig.graphs - graphs,
        **rig.pace,
    }
    if ledger.models:
        gpu = site.profile.gpu
        facts |= {"bandwidth_bytes_per_s": gpu.bandwidth_bytes_per_s, "flops_per_s": gpu.flops_per_s}
    return measured(experiment, machine, requests, site.log, facts, site.device.telemetry, stopped)


def send_all(env: WallClock, requests: list[Request], experiment: Experiment, servers: Servers, quiet: bool) -> bool:
    """Send the requests and wait until all are served; returns whether Ctrl-C ended it before."""
    with Lines(len(requests), "requests", quiet) as progress:
        try:
            Client(env, requests, experiment, servers, progress.update).run()
        except KeyboardInterrupt:
            return True
    return False


def measured(
    experiment: Experiment, machine: Machine, asked: Sequence[Request], log: Log, facts: dict[str, Any],
    telemetry: Telemetry, stopped: bool,
) -> Result:  # fmt: skip
    """The finished requests' records, and where they came from; Interrupted with them if the run was stopped."""
    finished = [request for request in asked if request.taken.finish_s >= 0]
    if not finished:
        raise Interrupted(None, len(asked))
    requests, launches, deliveries = request_columns(finished), log.launches.drain(), log.deliveries.drain()
    by_end = np.argsort(launches["end_s"], kind="stable")
    launches, carried = rows_of(launches, by_end), log.launches.carried
    meta = {
        "clock": "wall",
        "foundation": "measured run",
        **machine_facts(torch.device(machine.device)),
        "weights": "checkpoints" if machine.target_path else "random",
        "verdict": "own" if machine.own_verdict else "pinned",
        "longest_request": experiment.traffic.longest_request or 0,  # tokens of a file's; 0: any
        **facts,
        **host_idle_share(launches, requests),
        **telemetry.summary(),
        "telemetry": telemetry.columns(),
    }
    served = np.isin(deliveries["request"], requests["id"])
    result = Result(
        experiment=experiment,
        requests=requests,
        deliveries=rows_of(deliveries, served),
        launches=launches,
        meta=meta,
        carried=None if carried is None else [carried[at] for at in by_end],
    )
    if stopped:
        raise Interrupted(result, len(asked))
    return result


def host_idle_share(launches: Columns, requests: Columns) -> dict[str, float]:
    """Share of the time that requests were there in which the GPU had nothing to run; nothing without launches.

    Gaps between the kernels of one launch are the GPU's own and do not count; copying inputs in and results out does.
    """
    present, busy = Union(), Union()
    present.add(requests["arrival_s"], requests["finish_s"], math.inf)
    busy.add(launches["start_s"], launches["end_s"], math.inf)
    lasted_s = present.length_s()
    return {"host_idle_share": max(0.0, 1 - busy.length_s() / lasted_s)} if len(launches["end_s"]) and lasted_s else {}
