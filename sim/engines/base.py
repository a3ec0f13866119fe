"""What every engine has: facts by version, its scheduler's rules, and how it is started.

An engine is one file with a subclass of `InferenceEngine`. Times are constants on top of its kernels (`EngineStep`),
fitted to measured servers of all models and cards together, for versions apart (`studies/engine_steps.py`). Errors are
those of rows that the fit never saw (`pdvsim validate --silicon`, `studies/engine_errors.py`).

Not modelled: what a step larger than the largest graph pays for its launches.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, NamedTuple

from pdvsim.sim.config import Experiment, Server
from pdvsim.sim.core import DrafterKind, ServingEngine
from pdvsim.sim.engines.served import Block, Served, as_served, is_fp8, unknown_head
from pdvsim.sim.models.presets import NVFP4, bits_of
from pdvsim.sim.models.specs import GpuSpec
from pdvsim.sim.prices.links import NODE
from pdvsim.sim.prices.options import Hardware, Padding
from pdvsim.sim.prices.steps import EngineError, EngineStep, GraphSizes

GIB = 2**30
SURE, STEPS = 0.9, 1024  # share of the predicted KV cache that a context may take, in steps of so many tokens
SIDES = ("the engines that prefill", "the engines that decode")


class Era(NamedTuple):
    """An engine's constants up to a version, and what enabling a drafter changes in them."""

    before: str  # the first version that has others; empty: the newest have these
    step: EngineStep
    drafters: Mapping[DrafterKind, Mapping[str, float]] = {}  # constants that are others with a kind of drafter
    synchronous: frozenset[DrafterKind] = frozenset()  # drafters with which it does not schedule asynchronously
    eager_s: float = 0.0  # least time per layer of a forward without CUDA graphs; 0: not known


class InferenceEngine:
    """One serving engine. A class attribute that is left as it is here has no counterpart in that engine."""

    name: ServingEngine
    title: str  # as its makers write it
    checked: str  # the release that flags and names were checked against
    padding: Padding = "profile"  # its name in --padding, and how it pads a forward to its CUDA graphs
    graphs = GraphSizes()
    pads: str = ""  # the same in words
    lowest_k: int = 0  # of a table by batch size
    at_0: str = ""  # what it does at k=0
    separate_prefill: bool = False  # decoding waits while prompts are prefilled
    sends_first_token: bool = False  # with prefill apart, the prefill engine sends the first token
    waiting_weight: int | None = 1  # of a waiting request, when ranks are chosen by load; None: each rank in turn
    eras: Sequence[Era] = (Era("", EngineStep()),)  # by version, the newest last
    errors: Mapping[str, EngineError] = {}  # by card; "any": of all cards

    def era(self, version: str = "") -> Era:
        """What is true of a version; empty: of the newest."""
        dated = version and not version.startswith("nightly")  # such a build counts as the newest
        older = (era for era in self.eras if dated and era.before and _numbers(version) < _numbers(era.before))
        return next(older, self.eras[-1])

    def serving(self, version: str, kind: DrafterKind, asynchronous: bool | None, eager: bool = False) -> EngineStep:
        """The constants with a kind of drafter, asynchronous scheduling or not (None: by default), and eager or not."""
        era = self.era(version)
        changed: dict[str, Any] = {**era.drafters.get(kind, {}), "launched_s": era.eager_s * eager}
        step = replace(era.step, **changed)
        if asynchronous is None:
            asynchronous = kind not in era.synchronous
        return step.serving(kind != "none", asynchronous)

    def can_schedule(self, kind: DrafterKind, asynchronous: bool, version: str = "") -> bool:
        """Whether steps can be scheduled so with a kind of drafter, and the price of it is known."""
        era = self.era(version)
        return era.step.sync_s > 0 and not (asynchronous and kind in era.synchronous)

    def chunk(self, card: GpuSpec) -> int:
        """Prompt tokens of a step by default."""
        return Server.max_num_batched_tokens

    def error(self, card: str) -> EngineError | None:
        """The errors of predictions on a card; of all cards where few servers were measured on this one."""
        usual = replace(self.errors["any"], here=False) if "any" in self.errors else None
        return self.errors.get(card, usual)

    def commands(self, served: Served) -> list[Block]:
        """What starts the server, its own configuration files included; none where pdvsim writes no command."""
        return []

    def apart(self, experiment: Experiment) -> list[Block]:
        """What starts a disaggregated server: each kind of engine, and what requests are sent to."""
        return []

    def table(self, served: Served) -> list[Block]:
        """What starts a server whose draft length follows a table by batch size."""
        return self.commands(served)


def _numbers(version: str) -> tuple[int, ...]:
    """A version as numbers, up to what is no number."""
    return tuple(map(int, takewhile(str.isdecimal, version.split("."))))


def line(words: Sequence[Any]) -> str:
    """A command of words, whole numbers without a point."""
    return shlex.join(str(word).removesuffix(".0") if isinstance(word, float) else str(word) for word in words)


def shared_flags(served: Served, k: int, context: str, fp8: str, ranks: int = 1) -> list[Any]:
    """Flags that vLLM and SGLang have in common: context, shards, 8-bit weights and KV cache.

    The context is the drafter's if it is shorter than the target's, as nothing was simulated beyond it, and no longer
    than the KV cache has room for: vLLM does not start otherwise. `ranks` are those that the engine counts among its
    shards.
    """
    size = ranks * served.experiment.hardware.tensor_parallel_size
    mine, whole = (model.max_position_embeddings or math.inf for model in (served.pair.draft, served.pair.target))
    room = STEPS * (int(SURE * served.cache_tokens) // STEPS) or math.inf  # 0: not known, or hardly any
    shortest = min(mine if k else math.inf, room)
    flags: list[Any] = [context, int(shortest)] if shortest < whole else []
    flags += ["--tensor-parallel-size", size] if size > 1 else []
    flags += ["--quantization", "fp8"] if is_fp8(served.pair.target) else []
    return [*flags, *(["--kv-cache-dtype", fp8] if served.experiment.server.kv_cache_dtype == "fp8" else [])]


def shared_notes(served: Served, k: int) -> list[str]:
    """Notes for both engines, on replicas and on a drafter that is sharded otherwise than its target.

    vLLM refuses a draft model of another size than its target's (draft_model.py); SGLang has one size for both.
    """
    why, hardware = unknown_head(served.experiment) if k else "", served.experiment.hardware
    notes = [*filter(None, [why]), *served.notes]
    if hardware.tensor_parallel_size * hardware.data_parallel_size > NODE:
        notes.append(
            "on several machines: add vLLM's --data-parallel-size-local and --data-parallel-address, or SGLang's "
            "--nnodes, --node-rank and --dist-init-addr"
        )
    if bits_of(served.pair.target.name) == NVFP4:
        notes.append("name a checkpoint with NVFP4 weights instead")
    if hardware.kv_offload_gb or hardware.kv_offload_ssd_gb:
        notes.append("simulated with fetches only where they are faster than a prefill; the engine always fetches")
    if hardware.replicas > 1:
        notes.append(f"start {hardware.replicas} of them with a router; data parallelism turns vLLM's table off")
    if k and hardware.draft_tensor_parallel_size not in (None, hardware.tensor_parallel_size):
        notes.append("simulated with the drafter on one GPU of the group; the engine shards it like the target")
    return notes


def sides_of(experiment: Experiment) -> list[tuple[str, Served, int]]:
    """The two kinds of engine of a disaggregated server: what each does, how it is served, and how many there are."""
    assert experiment.sides is not None
    served = map(as_served, experiment.sides)
    return list(zip(SIDES, served, experiment.hardware.groups(), strict=True))


def transfer_notes(hardware: Hardware) -> list[str]:
    """How the transfer of the KV cache was simulated."""
    sent = "layer by layer during the prefill" if hardware.kv_transfer == "layers" else "after the prefill"
    notes = [f"simulated with the KV cache sent {sent}, over {hardware.kv_link or hardware.link}"]
    if hardware.kv_transfer == "layers":
        notes.append("NIXL sends it after the prefill: --kv-transfer prompt")
    return notes
