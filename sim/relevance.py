"""What the options of an experiment do together: one that has no effect is refused, a likely mistake is a warning.

A field states the choice that it belongs to (`limits.of`); those of some architectures alone are named by the policies.
A command that runs several architectures or loads with one set of options drops each where it does not act, and refuses
it only if it acts in none of them.

Left out: --place, --disaggregate, --tensor-parallel-size and --data-parallel-size, which are refused wherever an
architecture cannot have them, as numbers of GPUs are not dropped.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, lru_cache, partial
from itertools import chain
from typing import Any

from pdvsim.sim.config import BY_SEED, DEFAULTS, GROUPS, TRACES, Experiment, Hardware, Server
from pdvsim.sim.core import LOOKED_UP
from pdvsim.sim.engines import ENGINES
from pdvsim.sim.engines.served import unknown_head
from pdvsim.sim.limits import Fact, Of, hints_of, no_effect, of
from pdvsim.sim.models.names import Doubt, Note
from pdvsim.sim.models.presets import HEADS, pair, same_vocabulary
from pdvsim.sim.models.specs import OWN_PROJECTION
from pdvsim.sim.policies import ARCHS, policy_of
from pdvsim.sim.prices.cards import NO_NVLINK, gpu
from pdvsim.sim.prices.options import SERVED
from pdvsim.sim.workload.usual import usual_acceptance

COMPARED_CONTEXT = 512  # cached tokens of the draft and target steps compared
SERIAL_PRIORITIES = (("serial", "none"), ("serial", "dynamic"))  # which act without sharing
RECORDED = ("acceptance_model", "synthetic_acceptance_rates")  # options that a drafter may bring


def _prioritises(e: Experiment) -> bool:
    contention, priority = e.hardware.contention, e.server.priority
    return RULES[Fact.STREAMS](e) and (contention == "fluid" or (contention, priority) in SERIAL_PRIORITIES)


def _schedules(e: Experiment) -> bool:
    if "async_scheduling" not in policy_of(e.arch).options and e.arch != "autoregressive":
        return False
    if e.hardware.predicted_engine == "pdvsim":
        return e.arch != "autoregressive" and RULES[Fact.DRAFTS_ON_GPU](e)
    engine, kind = ENGINES[e.hardware.predicted_engine], e.server.drafted_by if e.speculates else "none"
    return engine.can_schedule(kind, e.server.async_scheduling is True, e.hardware.engine_version)


RULES: dict[str, Callable[[Experiment], bool]] = {
    Fact.DRAFTS: lambda e: e.has_drafter,
    Fact.EAGLE: lambda e: e.has_drafter and e.server.drafted_by in OWN_PROJECTION,
    Fact.DRAFTS_ON_GPU: lambda e: e.has_drafter and e.server.drafted_by not in LOOKED_UP,
    Fact.STREAMS: lambda e: len(policy_of(e.arch).lane_names()) > 1 and e.sides is None,
    Fact.PREFILL_LANE: lambda e: policy_of(e.arch).workers == "lanes",
    Fact.SEVERAL_GPUS: lambda e: e.gpus > 1,
    Fact.EXPERTS: lambda e: e.pair.target.experts is not None,
    Fact.SPLIT_EXPERTS: lambda e: e.pair.target.experts is not None and e.pair.target.experts.ranks > 1,
    Fact.SESSIONS: lambda e: e.traffic.converses,
    Fact.OFFLOADS: lambda e: (
        e.server.enable_prefix_caching and e.paged and e.traffic.shares and policy_of(e.arch).workers == "lanes"
    ),
    Fact.PRIORITISED: _prioritises,
    Fact.PREFILL_ENGINES: lambda e: e.hardware.groups()[0] > 1,
    Fact.TENSORRT_RANKS: lambda e: (
        e.hardware.data_parallel_size > 1 and e.sides is None and e.hardware.predicted_engine == "trtllm"
    ),
    Fact.EAGER: lambda e: ENGINES[e.hardware.predicted_engine].era(e.hardware.engine_version).eager_s > 0,
    Fact.ASYNC: _schedules,
}


@cache
def choices() -> dict[str, tuple[Of, ...]]:
    """The options that act only in some experiments, with the choices that their fields state.

    Those of which policies alone say that they act belong to their architectures.
    """
    stated = {name: marks for kind in GROUPS.values() for name, (_, marks) in hints_of(kind).items()}
    belongs = {name: tuple(mark for mark in marks if isinstance(mark, Of)) for name, marks in stated.items()}
    archs = {name: [arch for arch in ARCHS if name in policy_of(arch).options] for name in stated}
    own = {name: (of(arch=tuple(those)),) for name, those in archs.items() if those}
    return own | {name: any_of for name, any_of in belongs.items() if any_of}


def is_given(experiment: Experiment, name: str) -> bool:
    """Return whether an option is not at its default, or a fact is true."""
    return RULES[name](experiment) if name in RULES else bool(experiment.setting(name) != DEFAULTS[name])


def acts(experiment: Experiment, name: str) -> bool:
    """Return whether an option may have an effect: one of the choices that it belongs to is made."""
    belongs = choices()[name]
    if "arch" in dict(belongs[0].values):  # also of a policy of the user's own
        return name in policy_of(experiment.arch).options
    return any(choice.chosen(partial(is_given, experiment), experiment.setting) for choice in belongs)


def idle(experiment: Experiment) -> dict[str, Any]:
    """The options that are given and have no effect, with their defaults."""
    given = (name for name in choices() if is_given(experiment, name))
    return {name: DEFAULTS[name] for name in given if not acts(experiment, name)}


def refuse_idle(experiments: Sequence[Experiment]) -> None:
    """A ValueError of one line for an option that acts in none of the experiments that set it."""
    for name, belongs in choices().items():
        setting = [e for e in experiments if is_given(e, name) and not _brought(e, name)]
        if setting and not any(acts(e, name) for e in setting):
            raise ValueError(no_effect(name, belongs))
    for experiment in experiments:
        rates, k = experiment.acceptance.synthetic_acceptance_rates, experiment.server.longest_draft
        if rates and experiment.has_drafter and len(rates) < k:
            raise ValueError(f"--synthetic-acceptance-rates gives {len(rates)} positions; drafts have up to {k}")


def _brought(experiment: Experiment, name: str) -> bool:
    """Return whether an option is set by the drafter, which brings its recorded acceptance."""
    usual = usual_acceptance(experiment.server.pair, experiment.traffic) if name in RECORDED else None
    return experiment.acceptance == usual


def applicable(experiment: Experiment) -> Experiment:
    """Return the experiment with options that have no effect at their defaults."""
    while dropped := idle(experiment):
        experiment = experiment.with_settings(**dropped)  # a dropped option may be what another needs
    return experiment


# likely mistakes ------------------------------------------------------------------------------------------------------


def vet(experiments: Iterable[Experiment]) -> None:
    """Refuse unknown names and what the experiments of one command set for nothing; say what is doubtful about them."""
    given = list(experiments)
    for name in dict.fromkeys(experiment.server.pair for experiment in given):
        pair(name)
    for hardware in dict.fromkeys(experiment.hardware for experiment in given):
        if hardware.profile in (None, "roofline"):  # of a profile's own card the name may be any
            gpu(hardware.gpu)
    refuse_idle(given)
    warn(given)


def warn(experiments: Sequence[Experiment]) -> None:
    """Say what is doubtful about the experiments, each thing once."""
    kinds: tuple[tuple[type[Note], Callable[[Experiment], Iterator[str]]], ...] = ((Note, _columns), (Doubt, _doubts))
    for kind, texts in kinds:
        for text in dict.fromkeys(chain.from_iterable(map(texts, experiments))):
            warnings.warn(text, kind, stacklevel=2)


def _columns(experiment: Experiment) -> Iterator[str]:
    """Notes on the columns of a file: what they were taken for, requests left out, and the window."""
    traffic, path = experiment.traffic, experiment.traffic.dataset_path
    if path is None:
        return
    if traffic.dataset_name not in TRACES:
        if not traffic.tokenizer:
            from pdvsim.sim.workload.datasets import ESTIMATED

            yield f"{path}: {ESTIMATED}"
        return
    trace, fitting = traffic.trace(), len(traffic.windows().whole)
    yield from trace.notes
    if trace.timed and not traffic.use_trace_timestamps and traffic.request_rate < math.inf:
        made = f"arrivals are made at {traffic.request_rate:g} req/s, not the file's (--use-trace-timestamps)"
        yield f"{path}: {made}"
    if left_out := len(trace.lengths) - fitting:
        most = f"more than {traffic.longest_request} tokens and are excluded (--max-model-len)"
        yield f"{path}: {left_out} of {len(trace.lengths)} requests have {most}"
    if fitting and traffic.use_trace_timestamps and (number := traffic.window_number()) is not None:
        windows = traffic.windows()
        if len(windows.parts) > 1:
            busy = f"; seeds use the busiest {len(windows.busy)} in turn" if traffic.window == BY_SEED else ""
            yield f"{path}: {windows.described(number)}{busy}"


def _doubts(experiment: Experiment) -> Iterator[str]:
    """Likely mistakes and hypotheses: links and engines that do not exist, drafters that do not fit."""
    hardware, server, engine = experiment.hardware, experiment.server, experiment.hardware.predicted_engine
    shards, kind = (hardware.tensor_parallel_size, hardware.draft_tensor_parallel_size), server.drafted_by
    without = [card for card in hardware.cards or (hardware.gpu,) if card in NO_NVLINK]
    if without and hardware.link == "nvlink4" and max(shards[0], hardware.data_parallel_size) > 1:
        yield f"{without[0]} has no NVLink, which the default --link assumes: give --link pcie4"
    measured = experiment.acceptance.acceptance_model or ""
    with_drafter = measured.rpartition("-")[2]
    looked_up = with_drafter in LOOKED_UP or kind in LOOKED_UP
    if measured and experiment.has_drafter and with_drafter != kind and looked_up:
        yield f"--acceptance-model {measured} was not measured with --drafter {kind}, whose acceptance differs"
    if engine != "pdvsim" and not SERVED.issuperset([experiment.arch]) and experiment.sides is None:
        yield f"{experiment.arch} with the kernels of {engine} is a hypothesis: {engine} cannot serve it"
    if experiment.speculates and kind in HEADS and (why := unknown_head(experiment)):
        yield f"hypothetical: {why}"
    if policy_of(experiment.arch).speculates:
        with suppress(ValueError):  # a name or file that is refused is refused in its place
            yield from _pair(server.pair, hardware.gpu, hardware.profile, *shards)


@lru_cache
def _pair(name: str, gpu: str, profile: str | None, shards: int, drafters: int | None) -> tuple[str, ...]:
    from pdvsim.sim.assembly import covering_profile

    named = pair(name)
    draft, target = named.draft, named.target
    doubts: list[str] = []
    if draft.on_host:
        return ()
    if not draft.is_head and not same_vocabulary(draft, target):
        doubts.append(
            f"{draft.name} has {draft.vocab:,} tokens and {target.name} {target.vocab:,}: "
            "drafts from another vocabulary cannot be verified directly"
        )
    if draft.params > target.params:
        sizes = [f"{m.name} ({m.params / 1e9:.1f}B)" for m in (draft, target)]
        return (*doubts, f"the drafter {sizes[0]} is larger than its target {sizes[1]}; --pair is draft:target")
    hardware = Hardware(gpu=gpu, profile=profile, tensor_parallel_size=shards, draft_tensor_parallel_size=drafters)
    alone = Experiment(server=Server(pair=name), hardware=hardware)
    fits = covering_profile(alone)
    models = [fits.cost_model(model) for model in (alone.pair.draft, alone.pair.target)]
    draft_s, target_s = (one.price(1, 1, 1, COMPARED_CONTEXT).seconds(COMPARED_CONTEXT) for one in models)
    if draft_s >= target_s:
        times = f"{draft_s * 1e3:.2f} ms against {target_s * 1e3:.2f} ms"
        doubts.append(f"a step of the drafter {draft.name} takes as long as one of its target {target.name}: {times}")
    return tuple(doubts)
