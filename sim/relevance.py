"""Which options act in which experiment: one table, by which an option that would do nothing is refused.

A command that runs several architectures or loads with one set of options sets each aside where it does not act, and
refuses it only if it acts in none of them.

Left out: fields that no option sets; --place, --cards and --tensor-parallel-size, which are refused wherever an
architecture cannot have them, as numbers of GPUs are not set aside; --pair and --drafter, which name the models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from pdvsim.sim.config import Experiment
from pdvsim.sim.core import LOOKED_UP
from pdvsim.sim.policies import archs_where, policy_of
from pdvsim.sim.workload.asked import usual_acceptance

Rule = Callable[[Experiment], bool]


class Need(NamedTuple):
    """An option, as group.field, that acts only where `acts`, and what that takes; without text, certain policies."""

    option: str
    acts: Rule
    takes: str = ""

    @property
    def needs(self) -> str:
        name = self.option.partition(".")[2]
        return self.takes or f"--arch {' or '.join(archs_where(lambda policy: name in policy.options))}"

    @property
    def flag(self) -> str:
        return f"--{self.option.partition('.')[2].replace('_', '-')}"

    def given(self, experiment: Experiment) -> Any:
        group, _, name = self.option.partition(".")
        return getattr(getattr(experiment, group), name)

    def default(self, experiment: Experiment) -> Any:
        group, _, name = self.option.partition(".")
        return getattr(type(getattr(experiment, group)), name)  # a dataclass keeps a field's default on the class

    def is_set(self, experiment: Experiment) -> bool:
        """Whether the option is not at its default."""
        return bool(self.given(experiment) != self.default(experiment))

    def is_asked(self, experiment: Experiment) -> bool:
        """Whether the option is set, and not by the drafter, which brings its recorded acceptance."""
        if not self.is_set(experiment):
            return False
        usual = usual_acceptance(experiment.server.pair, experiment.traffic)
        return self.option != "acceptance.acceptance_model" or experiment.acceptance != usual

    def idle(self, experiment: Experiment) -> bool:
        """Whether the option is set, and does nothing."""
        return self.is_set(experiment) and not self.acts(experiment)


def _own(option: str) -> Need:
    """An option of some architectures alone."""
    return Need(f"server.{option}", lambda e: option in policy_of(e.arch).options)


_DRAFTS: tuple[Rule, str] = (lambda e: e.has_drafter, "an architecture that drafts, and a drafter")
_STREAMS: tuple[Rule, str] = (
    lambda e: len(policy_of(e.arch).lane_names()) > 1,
    "an architecture whose lanes have their own streams",
)

_SEVERAL: tuple[Rule, str] = (
    lambda e: e.gpus > 1,
    "several GPUs per server (--tensor-parallel-size or --place)",
)


def _rate_acts(e: Experiment) -> bool:
    return e.has_drafter and e.acceptance.by_rate


def _priority_acts(e: Experiment) -> bool:
    contention, priority = e.hardware.contention, e.server.priority
    return _STREAMS[0](e) and (contention == "fluid" or (contention == "serial" and priority in ("none", "dynamic")))


def _open_loop(e: Experiment) -> bool:
    return math.isfinite(e.traffic.request_rate) and not e.traffic.use_trace_timestamps


NEEDS: tuple[Need, ...] = (
    Need("traffic.tokenizer",
         lambda e: e.traffic.dataset_name in ("sharegpt", "custom") and e.traffic.dataset_path is not None,
         "--dataset-name sharegpt or custom, and --dataset-path"),
    Need("traffic.max_model_len", lambda e: e.traffic.dataset_path is not None, "--dataset-path"),
    Need("traffic.window", lambda e: e.traffic.use_trace_timestamps, "--use-trace-timestamps"),
    Need("traffic.burstiness", _open_loop, "a finite --request-rate, without --use-trace-timestamps"),
    Need("traffic.random_range_ratio", lambda e: bool(e.traffic.fixed_lengths),
         "--dataset-name random, --input-len or --output-len"),
    Need("traffic.num_prefixes", lambda e: e.traffic.prefixes[0] > 0,
         "--dataset-name prefix_repetition or --prefix-len"),
    Need("traffic.think_time_s", lambda e: e.traffic.converses and not e.traffic.use_trace_timestamps,
         "--num-turns above 1 or a file with sessions and turns, without --use-trace-timestamps"),
    Need("acceptance.acceptance_rate", _rate_acts,
         "an architecture that drafts, and no --synthetic-acceptance-rates, --acceptance-model or --acceptance-trace"),
    Need("acceptance.acceptance_concentration", *_DRAFTS),
    Need("acceptance.synthetic_acceptance_rates", *_DRAFTS),
    Need("acceptance.acceptance_model", *_DRAFTS),
    Need("acceptance.acceptance_trace", *_DRAFTS),
    Need("server.num_speculative_tokens", *_DRAFTS),
    Need("server.controller", *_DRAFTS),
    Need("server.min_speculative_tokens", lambda e: e.server.controller != "fixed", "a --controller other than fixed"),
    Need("server.max_speculative_tokens", lambda e: e.server.controller != "fixed", "a --controller other than fixed"),
    Need("server.expert_overlap", lambda e: e.pair.target.experts is not None, "a target with experts"),
    Need("server.max_draft_batch", *_STREAMS),
    Need("server.max_verify_batch", *_STREAMS),
    Need("server.max_prompts_per_forward", lambda e: policy_of(e.arch).workers == "lanes",
         "an architecture that prefills several prompts per forward"),
    Need("server.async_scheduling",
         lambda e: "async_scheduling" in policy_of(e.arch).options and e.has_drafter
         and e.server.drafted_by not in LOOKED_UP and e.hardware.predicted_engine == "pdvsim",
         "--arch colocated or pd, a drafter on the GPU, and --engine pdvsim (others schedule as they do)"),
    _own("num_workers"),
    _own("max_decode_queue"),
    _own("verify_gather"),
    _own("admission_factor"),
    _own("hybrid_threshold"),
    _own("ahead_fan"),
    Need("server.priority", _priority_acts, f"{_STREAMS[1]} and --contention fluid (none, dynamic: or serial)"),
    Need("hardware.contention", *_STREAMS),
    Need("hardware.gpu_memory_utilization", lambda e: e.hardware.kv_capacity_tokens is None,
         "a KV cache sized by memory, without --kv-capacity-tokens"),
    Need("hardware.draft_tensor_parallel_size", lambda e: _DRAFTS[0](e) and e.hardware.tensor_parallel_size > 1,
         "an architecture that drafts, and --tensor-parallel-size above 1"),
    Need("hardware.link", *_SEVERAL),
    Need("hardware.router", lambda e: e.hardware.replicas > 1, "--replicas above 1"),
)  # fmt: skip


def refuse_idle(experiments: Sequence[Experiment]) -> None:
    """A ValueError of one line for an option that acts in none of the experiments that set it."""
    for need in NEEDS:
        setting = [e for e in experiments if need.is_asked(e)]
        if setting and not any(map(need.acts, setting)):
            raise ValueError(f"{need.flag} has no effect here: it needs {need.needs}")
    _check_rates(experiments)


def applicable(experiment: Experiment) -> Experiment:
    """The same with options that do nothing in it as if they had not been given."""
    while idle := [need for need in NEEDS if need.idle(experiment)]:  # what is set aside may be what another needs
        changed: dict[str, Any] = {}
        for need in idle:
            group, _, name = need.option.partition(".")
            changed[group] = replace(changed.get(group, getattr(experiment, group)), **{name: need.default(experiment)})
        experiment = replace(experiment, **changed)
    return experiment


def _check_rates(experiments: Iterable[Experiment]) -> None:
    """Refuse rates per position that end before the longest draft."""
    for experiment in experiments:
        rates, k = experiment.acceptance.synthetic_acceptance_rates, experiment.server.longest_draft
        if rates and experiment.has_drafter and len(rates) < k:
            raise ValueError(f"--synthetic-acceptance-rates gives {len(rates)} positions; drafts have up to {k}")
