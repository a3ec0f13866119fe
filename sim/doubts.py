"""What runs but looks like a mistake: said once a command, as a Python warning of one line."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache

from pdvsim.sim.config import BY_SEED, TRACES, Experiment, Hardware, Scoring, Server, Traffic
from pdvsim.sim.core import LOOKED_UP, HeadSpec
from pdvsim.sim.hardware.cards import NO_NVLINK
from pdvsim.sim.hardware.models import gpu, pair, same_vocabulary
from pdvsim.sim.hardware.names import Note
from pdvsim.sim.relevance import refuse_idle

LEAST_MS = {"ttft": 5.0, "tpot": 1.0, "e2el": 50.0}  # service levels below these were meant in seconds
COMPARED_CONTEXT = 512  # cached tokens of the draft and target steps compared


class Doubt(Note):
    """An experiment that looks wrong."""


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
    said: dict[str, type[Note]] = {}
    for experiment in experiments:
        said |= dict.fromkeys(_levels(experiment.scoring.goodput), Doubt)
        said |= dict.fromkeys(_columns(experiment.traffic), Note)
        said |= dict.fromkeys(_linked(experiment.hardware), Doubt)
        said |= dict.fromkeys(_unlike(experiment), Doubt)
        if experiment.base_arch != "autoregressive":
            with suppress(ValueError):  # a name or file that is refused is refused in its place
                hardware = experiment.hardware
                shards = hardware.tensor_parallel_size, hardware.draft_tensor_parallel_size
                said |= dict.fromkeys(_pair(experiment.server.pair, hardware.gpu, hardware.profile, *shards), Doubt)
    for text, kind in said.items():
        warnings.warn(text, kind, stacklevel=2)


def _columns(traffic: Traffic) -> tuple[str, ...]:
    """What the columns of a file were taken for, how many of its requests are left out, and which window is sent."""
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
    bare = [card for card in cards if card in NO_NVLINK]
    if hardware.tensor_parallel_size == 1 or hardware.link != "nvlink4" or not bare:
        return ()
    return (f"{bare[0]} has no NVLink, which the default --link assumes: give --link pcie4",)


def _unlike(experiment: Experiment) -> tuple[str, ...]:
    """Acceptance that was measured with another drafter than the one that drafts."""
    kind, name = experiment.server.drafted_by, experiment.acceptance.acceptance_model or ""
    of = name.rpartition("-")[2]  # the drafter it was measured with
    if not experiment.has_drafter or not name or of == kind or (of not in LOOKED_UP and kind not in LOOKED_UP):
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
