"""What the options of an experiment do together: one that has no effect is refused, a likely mistake is a warning.

The tables below are of which options act in which experiment; those of some architectures alone are on the policies. A
command that runs several architectures or loads with one set of options drops each where it does not act, and refuses
it only if it acts in none of them.

Left out: fields that no option sets; --place, --disaggregate, --cards, --tensor-parallel-size and --data-parallel-size,
which are refused wherever an architecture cannot have them, as numbers of GPUs are not dropped; --pair and --drafter,
which name the models.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from typing import NamedTuple

from pdvsim.sim.config import BY_SEED, DEFAULTS, TRACES, Experiment, Hardware, Scoring, Server, Traffic
from pdvsim.sim.core import LOOKED_UP
from pdvsim.sim.engines import ENGINES
from pdvsim.sim.limits import flag_of
from pdvsim.sim.models.names import Doubt, Note
from pdvsim.sim.models.presets import pair, same_vocabulary
from pdvsim.sim.models.specs import HeadSpec
from pdvsim.sim.policies import ARCHS, archs_where, policy_of
from pdvsim.sim.prices.cards import NO_NVLINK, gpu
from pdvsim.sim.workload.asked import usual_acceptance

LEAST_MS = {"ttft": 5.0, "tpot": 1.0, "e2el": 50.0}  # service levels below these were meant in seconds
COMPARED_CONTEXT = 512  # cached tokens of the draft and target steps compared
RECORDED = ("acceptance_model", "synthetic_acceptance_rates")  # options that a drafter may bring
Rule = Callable[[Experiment], bool]
NeedRows = tuple[tuple[str, Rule, str], ...]  # options, where they act, and what that takes


class Need(NamedTuple):
    """An option that acts only where `acts`, and what that takes."""

    name: str
    acts: Rule
    takes: str

    def is_set(self, experiment: Experiment) -> bool:
        """Return whether the option is not at its default."""
        return bool(experiment.setting(self.name) != DEFAULTS[self.name])

    def is_asked(self, experiment: Experiment) -> bool:
        """Return whether the option is set, and not by the drafter, which brings its recorded acceptance."""
        if not self.is_set(experiment):
            return False
        usual = usual_acceptance(experiment.server.pair, experiment.traffic)
        return self.name not in RECORDED or experiment.acceptance != usual

    def idle(self, experiment: Experiment) -> bool:
        """Return whether the option is set, and does nothing."""
        return self.is_set(experiment) and not self.acts(experiment)


_DRAFTS: tuple[Rule, str] = (lambda e: e.has_drafter, "an architecture that drafts, and a drafter")
_STREAMS: tuple[Rule, str] = (
    lambda e: len(policy_of(e.arch).lane_names()) > 1 and e.sides is None,
    "an architecture whose lanes have their own streams",
)


def _priority_acts(e: Experiment) -> bool:
    contention, priority = e.hardware.contention, e.server.priority
    return _STREAMS[0](e) and (contention == "fluid" or (contention == "serial" and priority in ("none", "dynamic")))


def _offloads(e: Experiment) -> bool:
    return e.server.enable_prefix_caching and e.paged and e.traffic.shares and policy_of(e.arch).workers == "lanes"


def _schedules(e: Experiment) -> bool:
    if "async_scheduling" not in policy_of(e.arch).options and e.arch != "autoregressive":
        return False
    if e.hardware.predicted_engine == "pdvsim":
        return e.arch != "autoregressive" and e.has_drafter and e.server.drafted_by not in LOOKED_UP
    engine, kind = ENGINES[e.hardware.predicted_engine], e.server.drafted_by if e.speculates else "none"
    return engine.can_schedule(kind, e.server.async_scheduling is True, e.hardware.engine_version)


_SERVING: NeedRows = (
    ("tokenizer", lambda e: e.traffic.dataset_name in ("sharegpt", "custom") and e.traffic.dataset_path is not None,
     "--dataset-name sharegpt or custom, and --dataset-path"),
    ("max_model_len", lambda e: e.traffic.dataset_path is not None, "--dataset-path"),
    ("window", lambda e: e.traffic.use_trace_timestamps, "--use-trace-timestamps"),
    ("burstiness", lambda e: math.isfinite(e.traffic.request_rate) and not e.traffic.use_trace_timestamps,
     "a finite --request-rate, without --use-trace-timestamps"),
    ("random_range_ratio", lambda e: bool(e.traffic.fixed_lengths),
     "--dataset-name random, --input-len or --output-len"),
    ("num_prefixes", lambda e: e.traffic.prefixes[0] > 0, "--dataset-name prefix_repetition or --prefix-len"),
    ("think_time_s", lambda e: e.traffic.converses and not e.traffic.use_trace_timestamps,
     "--num-turns above 1 or a file with sessions and turns, without --use-trace-timestamps"),
    ("acceptance_rate", lambda e: e.has_drafter and e.acceptance.by_rate,
     "an architecture that drafts, and no --synthetic-acceptance-rates, --acceptance-model or --acceptance-trace"),
    ("acceptance_concentration synthetic_acceptance_rates acceptance_model acceptance_trace", *_DRAFTS),
    ("num_speculative_tokens", lambda e: e.has_drafter and e.server.controller != "table",
     f"{_DRAFTS[1]}, without --controller table"),
    ("num_speculative_tokens_per_batch_size", lambda e: e.server.controller == "table", "--controller table"),
    ("controller", *_DRAFTS),
    ("min_speculative_tokens max_speculative_tokens", lambda e: e.server.varies_length,
     "--controller goodput or feedback"),
    ("adaptive_verification_profile_context_len", lambda e: e.server.controller == "adaptive-verification",
     "--controller adaptive-verification"),
    ("expert_overlap", lambda e: e.pair.target.experts is not None, "a target with experts"),
    ("attention_dp_timeout_iters",
     lambda e: e.hardware.data_parallel_size > 1 and e.hardware.disaggregate is None
     and e.hardware.predicted_engine == "trtllm",
     "--engine trtllm and --data-parallel-size above 1, without --disaggregate"),
    ("attention_dp_batching_wait_iters", lambda e: e.server.attention_dp_timeout_iters is not None,
     "--attention-dp-timeout-iters"),
    ("max_draft_batch max_verify_batch", *_STREAMS),
    ("max_prompts_per_forward", lambda e: policy_of(e.arch).workers == "lanes",
     "an architecture that prefills several prompts per forward"),
    ("enforce_eager", lambda e: ENGINES[e.hardware.predicted_engine].era(e.hardware.engine_version).eager_s > 0,
     "--engine vllm, 0.14 or later"),
    ("async_scheduling", _schedules, "--arch colocated or pd, and --engine pdvsim with a drafter on the GPU; or "
     "--engine vllm, where it is on only without draft models, n-gram and suffix drafts"),
)  # fmt: skip
_HARDWARE: NeedRows = (
    ("priority", _priority_acts, f"{_STREAMS[1]} and --contention fluid (none, dynamic: or serial)"),
    ("contention", *_STREAMS),
    ("gpu_memory_utilization", lambda e: e.hardware.kv_capacity_tokens is None,
     "a KV cache sized by memory, without --kv-capacity-tokens"),
    ("draft_tensor_parallel_size", lambda e: e.has_drafter and e.hardware.tensor_parallel_size > 1,
     "an architecture that drafts, and --tensor-parallel-size above 1"),
    ("enable_expert_parallel", lambda e: e.pair.target.experts is not None and e.pair.target.experts.ranks > 1,
     "a target with experts, and --tensor-parallel-size or --data-parallel-size above 1"),
    ("all2all_backend", lambda e: e.hardware.data_parallel_size > 1 and e.hardware.enable_expert_parallel,
     "--data-parallel-size above 1 and --enable-expert-parallel"),
    ("enable_eplb", lambda e: e.pair.target.experts is not None and e.pair.target.experts.balanced,
     "a target with experts, and --enable-expert-parallel"),
    ("num_redundant_experts", lambda e: e.pair.target.experts is not None and e.pair.target.experts.copies > 0,
     "--enable-eplb, where it has an effect"),
    ("link", lambda e: e.gpus > 1, "several GPUs per server (--tensor-parallel-size, --data-parallel-size or --place)"),
    ("kv_offload_gb kv_offload_ssd_gb", _offloads,
     "prompts that share prefixes, prefix caching, and an architecture with a lane for prompts"),
    ("kv_offload_link", lambda e: _offloads(e) and e.hardware.kv_offload_gb > 0,
     "--kv-offload-gb, where it has an effect"),
    ("prefill_tensor_parallel_size prefill_data_parallel_size kv_link kv_transfer",
     lambda e: e.hardware.disaggregate is not None, "--disaggregate"),
    ("draft_kv",
     lambda e: e.hardware.disaggregate is not None and e.has_drafter and e.server.drafted_by not in LOOKED_UP,
     "--disaggregate and a drafter on the GPU"),
    ("router",
     lambda e: e.hardware.replicas > 1 or (e.hardware.router == "prefix-aware" and e.hardware.groups()[0] > 1),
     "--replicas above 1 (prefix-aware: or several prefill engines)"),
)  # fmt: skip


@cache
def needs() -> tuple[Need, ...]:
    """The options that act only in some experiments: those of the tables, and those that policies name as their own."""
    named = dict.fromkeys(name for arch in ARCHS for name in policy_of(arch).options)
    del named["async_scheduling"]  # which takes more than its architecture
    return (*_rows(_SERVING), *map(_own, named), *_rows(_HARDWARE))


def _rows(table: NeedRows) -> Iterator[Need]:
    yield from (Need(name, acts, takes) for names, acts, takes in table for name in names.split())


def _own(option: str) -> Need:
    archs = archs_where(lambda policy: option in policy.options)
    return Need(option, lambda e: option in policy_of(e.arch).options, f"--arch {' or '.join(archs)}")


def refuse_idle(experiments: Sequence[Experiment]) -> None:
    """A ValueError of one line for an option that acts in none of the experiments that set it."""
    for need in needs():
        setting = [e for e in experiments if need.is_asked(e)]
        if setting and not any(map(need.acts, setting)):
            raise ValueError(f"{flag_of(need.name)} has no effect here: it needs {need.takes}")
    _check_rates(experiments)


def applicable(experiment: Experiment) -> Experiment:
    """Return the experiment with options that have no effect at their defaults."""
    while idle := {need.name: DEFAULTS[need.name] for need in needs() if need.idle(experiment)}:
        experiment = experiment.with_settings(**idle)  # a dropped option may be what another needs
    return experiment


def _check_rates(experiments: Iterable[Experiment]) -> None:
    """Refuse rates per position that end before the longest draft."""
    for experiment in experiments:
        rates, k = experiment.acceptance.synthetic_acceptance_rates, experiment.server.longest_draft
        if rates and experiment.has_drafter and len(rates) < k:
            raise ValueError(f"--synthetic-acceptance-rates gives {len(rates)} positions; drafts have up to {k}")


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


def warn(experiments: Iterable[Experiment]) -> None:
    """Say what is doubtful about the experiments, each thing once."""
    notes: dict[str, type[Note]] = {}
    for experiment in experiments:
        notes |= dict.fromkeys(_levels(experiment.scoring.goodput), Doubt)
        notes |= dict.fromkeys(_columns(experiment.traffic), Note)
        notes |= dict.fromkeys(_linked(experiment.hardware), Doubt)
        notes |= dict.fromkeys(_unlike(experiment), Doubt)
        if policy_of(experiment.arch).speculates:
            with suppress(ValueError):  # a name or file that is refused is refused in its place
                hardware = experiment.hardware
                shards = hardware.tensor_parallel_size, hardware.draft_tensor_parallel_size
                notes |= dict.fromkeys(_pair(experiment.server.pair, hardware.gpu, hardware.profile, *shards), Doubt)
    for text, kind in notes.items():
        warnings.warn(text, kind, stacklevel=2)


def _columns(traffic: Traffic) -> tuple[str, ...]:
    """Notes on the columns of a file: what they were taken for, requests left out, and the window."""
    path = traffic.dataset_path
    if path is None:
        return ()
    from pdvsim.sim.workload.datasets import ESTIMATED

    if traffic.dataset_name not in TRACES:
        return () if traffic.tokenizer else (f"{path}: {ESTIMATED}",)
    fits, notes = traffic.fitting(), list(traffic.trace().notes)
    if left_out := int((~fits).sum()):
        most = traffic.longest_request
        text = f"{left_out} of {len(fits)} requests have more than {most} tokens and are excluded (--max-model-len)"
        notes.append(f"{path}: {text}")
    if fits.any() and traffic.use_trace_timestamps and (number := traffic.window_number()) is not None:
        windows = traffic.windows()
        if len(windows.parts) > 1:
            busy = f"; seeds use the busiest {len(windows.busy)} in turn" if traffic.window == BY_SEED else ""
            notes.append(f"{path}: {windows.described(number)}{busy}")
    return tuple(notes)


def _linked(hardware: Hardware) -> tuple[str, ...]:
    """A group of cards over a link that they do not have."""
    cards = hardware.cards or (hardware.gpu,)
    without = [card for card in cards if card in NO_NVLINK]
    alone = hardware.tensor_parallel_size == hardware.data_parallel_size == 1
    if alone or hardware.link != "nvlink4" or not without:
        return ()
    return (f"{without[0]} has no NVLink, which the default --link assumes: give --link pcie4",)


def _unlike(experiment: Experiment) -> tuple[str, ...]:
    """Acceptance that was measured with another drafter than the one that drafts."""
    kind, name = experiment.server.drafted_by, experiment.acceptance.acceptance_model or ""
    own = name.rpartition("-")[2]  # the drafter it was measured with
    if not experiment.has_drafter or not name or own == kind or (own not in LOOKED_UP and kind not in LOOKED_UP):
        return ()
    return (f"--acceptance-model {name} was not measured with --drafter {kind}, whose acceptance differs",)


@lru_cache
def _levels(goodput: tuple[str, ...]) -> tuple[str, ...]:
    levels = {name: level_s * 1e3 for name, level_s in Scoring(goodput=goodput).slo().items()}
    return tuple(
        f"--goodput {name}:{ms:g} is {ms:g} ms, which looks like seconds; {ms:g} s is {name}:{ms * 1e3:g}"
        for name, ms in levels.items()
        if 0 < ms < LEAST_MS[name]
    )


@lru_cache
def _pair(name: str, gpu: str, profile: str | None, shards: int, drafters: int | None) -> tuple[str, ...]:
    from pdvsim.sim.assembly import covering_profile

    named = pair(name)
    draft, target = named.draft, named.target
    doubts: list[str] = []
    if draft.on_host:
        return ()
    if not isinstance(draft, HeadSpec) and not same_vocabulary(draft, target):
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
