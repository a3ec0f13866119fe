"""Kernel times of an engine on a card, by shape, read between the shapes that were timed.

Tables come from NVIDIA's AIConfigurator (Apache-2.0, see `data/engines/NOTICE`), packed by `pdvsim calibrate
--from-kernels`. `shapes` reads between the timed sizes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim.core import ServingEngine
from pdvsim.sim.models.layers import All2All
from pdvsim.sim.models.specs import GpuSpec
from pdvsim.sim.prices.links import NODE, RACK, LinkSpec, between_nodes, gather_s, nvlink_of
from pdvsim.sim.prices.shapes import (
    ITEM_BYTES,
    Floats,
    between,
    experts_roofline,
    filled,
    rising,
    roofline,
    unpacked,
)  # fmt: skip
from pdvsim.sim.prices.transfer import IMBALANCE

ENGINES: tuple[ServingEngine, ...] = get_args(ServingEngine)

# Engines multiply experts of MXFP4 in 8 bits if they can. Else in 16: gpt-oss by kernels of OpenAI's, DeepSeek-V4 by
# Marlin's, which were timed with integers
MXFP4_KERNELS = {
    "w4a16_mxfp4": ("w4a8_mxfp4_mxfp8", "w4a16_mxfp4"),
    "mxfp4_marlin": ("w4a8_mxfp4_mxfp8", "int4_wo", "w4a16_mxfp4"),
}
CONTEXTS = (255, 16_383)  # cached tokens between which decode attention is read as a line
TOPK = 8  # experts of a token in the timed exchanges
NVLINK_HIDDEN = 7168  # size of a token in the timed exchanges of TensorRT-LLM
# How these send tokens to experts of a type; others take 16 bits
SENT = {"nvfp4": "nvfp4", "fp8": "fp8", "fp8_block": "fp8", "w4a8_mxfp4_mxfp8": "fp8"}
DISPATCHED_BYTES, EXCHANGED_BYTES = 1, 2  # per value, as DeepEP sends it to experts, and of all other exchanges


class TimedAttention(NamedTuple):
    """Attention of a layer as it was timed for the nearest heads."""

    name: str  # of the table
    axes: list[Floats]  # rows and cached tokens per row, or lengths of prompts
    seconds: Floats
    scale: float  # how many times as much as those the wanted heads read

    @property
    def given(self) -> tuple[Floats, Floats]:
        """Lengths of prompts that were timed, and their seconds."""
        use = np.isfinite(self.seconds)
        return self.axes[0][use], self.seconds[use]

    def lines(self, between: tuple[int, int] = CONTEXTS) -> tuple[Floats, Floats, Floats]:
        """By rows, seconds at no context and per cached token of all rows: straight lines through their times.

        By least squares of relative errors. Many rows were timed with short contexts alone: they take the slope of the
        most rows that have one.
        """
        upper: list[float] = []
        fixed: list[float] = []
        slopes: list[float] = []
        context = self.axes[1]
        for count, row in zip(self.axes[0], self.seconds, strict=True):
            known = np.isfinite(row)
            use = known & (context >= between[0]) & (context <= between[1])
            if use.sum() >= 3:
                weight = 1 / row[use]
                design = np.stack([weight, weight * context[use] * count], axis=1)
                (base, slope), *_ = np.linalg.lstsq(design, np.ones(use.sum()), rcond=None)
                if base < 0:
                    base, slope = 0.0, float(np.median(row[use] / (context[use] * count)))
            elif slopes and known.any():
                slope = slopes[-1]
                base = max(0.0, float(np.median(row[known] - slope * context[known] * count)))
            else:
                continue
            upper.append(count)
            fixed.append(float(base))
            slopes.append(max(float(slope), 1e-15))
        return np.array(upper), np.array(fixed), np.array(slopes) * self.scale

    def within(self, use: NDArray[np.bool_], scale: float) -> TimedAttention:
        """Some of the contexts alone, with another scale."""
        return self._replace(axes=[self.axes[0], self.axes[1][use]], seconds=self.seconds[:, use], scale=scale)

    def per_pair(self) -> tuple[float, float]:
        """Seconds per launch, and per pair of query and context token, of prompts of 1,024 tokens and more."""
        length, times = self.given
        long, fixed = length >= 1024, float(times.min())
        pairs = length[long] * (length[long] + 1) / 2
        return fixed, float(np.median(np.maximum(0.0, times[long] - fixed) / pairs)) * self.scale


@dataclass(frozen=True, eq=False)
class KernelTables:
    """The tables of one engine on one card."""

    about: Mapping[str, Any]  # engine, versions by table, card, source, date
    gpu: GpuSpec  # its data sheet
    arrays: Mapping[str, NDArray[Any]]
    _cache: dict[str, tuple[Floats, list[NDArray[Any]]]] = field(default_factory=dict, repr=False)

    @property
    def engine(self) -> str:
        return str(self.about["engine"])

    @property
    def version(self) -> str:
        """The engine's version that its products were timed in."""
        return str(self.about["versions"]["gemm"])

    def kinds(self, table: str) -> list[str]:
        """The data types, or other variants, that a table has."""
        return self._kinds.get(table, [])

    @cached_property
    def _kinds(self) -> dict[str, list[str]]:
        kinds: dict[str, set[str]] = {}
        for table, *rest in (name.split("/") for name in self.arrays):
            kinds.setdefault(table, set()).update(rest[:1])
        return {table: sorted(found) for table, found in kinds.items()}

    def product(self, kind: str, tokens: Floats, outputs: int, inputs: int) -> Floats:
        """Seconds of one matrix product over `tokens`.

        A type that was not timed has its bytes, and otherwise the share of the roofline of the nearest one.
        """
        known = self.kinds("gemm")
        timed = next(name for name in (kind, "fp8" if kind == "fp8_block" else kind, "bfloat16") if name in known)
        shares, axes = self._filled_shares(timed)
        at = (tokens, np.full_like(tokens, outputs), np.full_like(tokens, inputs))
        item = ITEM_BYTES.get(kind, ITEM_BYTES[timed])
        return np.asarray(np.exp(between(shares, axes, at)) * roofline(self.gpu, timed, *at, item))

    def product_shares(self, kind: str) -> tuple[Floats, list[NDArray[Any]]]:
        """Logarithms of the products' times over the roofline's, by tokens, outputs and inputs; and these sizes."""
        axes = [self.arrays[f"gemm/{kind}/{axis}"] for axis in "mnk"]
        m, n, k = (axis.astype(float) for axis in axes)
        roof = roofline(self.gpu, kind, m[:, None, None], n[None, :, None], k[None, None, :])
        return unpacked(self.arrays[f"gemm/{kind}/t"]) - np.log(roof), axes

    def _filled_shares(self, kind: str) -> tuple[Floats, list[NDArray[Any]]]:
        if kind not in self._cache:
            shares, axes = self.product_shares(kind)
            self._cache[kind] = filled(shares, axes), axes
        return self._cache[kind]

    def experts(
        self, kind: str, tokens: Floats, hidden: int, inner: int, per_token: int, count: int, ranks: int = 1,
        gated: bool = True, sent: bool = False, balanced: bool = False,
    ) -> Floats:  # fmt: skip
        """Seconds of one layer's experts over `tokens`, of `inner` intermediate size on this GPU.

        Of experts on several `ranks`, the time of the rank with the most to do: where they are `balanced`, all have as
        much. It takes no longer than one of fewer ranks, which has more experts, does for its share. Some were timed
        with more: MXFP4 on an H200 up to 60% more than one GPU with all, 8 ranks of a B200 up to 70% more than 4.
        Tokens that were `sent` to their rank may be multiplied by other kernels than tokens that all ranks have. Sizes
        that were not timed take the share of the roofline that the nearest ones reach. Models whose experts have
        no gate were timed with their two matrices; from others, two of three are taken.
        """
        table, even = "moe-ep" if ranks > 1 and self.kinds("moe-ep") else "moe", "moe-even"
        kind = self.experts_kind(kind, table)
        if sent and kind in self.kinds("moe-sent"):
            table, even = "moe-sent", "moe-sent-even"
        elif ranks > NODE and kind in self.kinds("moe-wide"):
            table = "moe-wide"
        shape = hidden, inner, per_token, count
        seconds = self._experts_s(table, kind, tokens, *shape, ranks, gated)
        if balanced and kind in self.kinds(even):
            seconds = np.minimum(seconds, self._experts_s(even, kind, tokens, *shape, ranks, gated))
        for fewer in (1, 2, 4) if table == "moe-ep" else ():
            if fewer < ranks:
                share = np.maximum(1.0, tokens * (ranks / fewer) ** (IMBALANCE - 1))
                seconds = np.minimum(
                    seconds, self._experts_s("moe" if fewer == 1 else table, kind, share, *shape, fewer, gated)
                )
        return seconds

    def experts_kind(self, kind: str, table: str = "moe") -> str:
        """Return the timed type in which experts of a type are multiplied."""
        known = self.kinds(table)
        if not known:
            raise ValueError(f"{self.engine} on {self.gpu.name}: its tables have no experts")
        likes = MXFP4_KERNELS.get(kind, (kind,))
        return next((name for name in (*likes, "fp8_block", "fp8", "bfloat16") if name in known), known[0])

    def _experts_s(
        self, table: str, kind: str, tokens: Floats, hidden: int, inner: int, per_token: int, count: int, ranks: int,
        gated: bool,
    ) -> Floats:  # fmt: skip
        shapes = self.arrays[f"{table}/{kind}/shapes"].astype(float)  # hidden, inner, per token and count of a rank
        wanted = np.array([hidden, inner, per_token / ranks, count / ranks], float)
        if table != "moe":
            shapes = np.column_stack([shapes[:, :2], shapes[:, 2:4] / shapes[:, 4:]])
        best = int(np.argmin(np.abs(np.log(shapes / wanted)).sum(axis=1)))
        at, logs = self.arrays[f"{table}/{kind}/tokens"].astype(float), unpacked(self.arrays[f"{table}/{kind}/t"])[best]
        given = np.isfinite(logs)
        at, logs = at[given], logs[given]
        shares = logs - np.log(experts_roofline(self.gpu, kind, at, *shapes[best]))
        here = np.interp(np.log(tokens), np.log(at), shares)
        seconds = np.asarray(np.exp(here) * experts_roofline(self.gpu, kind, tokens, *wanted))
        timed = np.array_equal(shapes[best][[0, 2, 3]], wanted[[0, 2, 3]])
        return seconds if gated or timed else seconds * 2 / 3

    def _axes(self, name: str, *axes: str) -> list[Floats]:
        return [self.arrays[f"{name}/{axis}"].astype(float) for axis in axes]

    def _nearest(self, name: str, axis: str, wanted: float) -> tuple[int, float]:
        """The place of the timed size that is nearest to the wanted one, and how many times as large that is."""
        [known] = self._axes(name, axis)
        best = int(np.argmin(np.abs(np.log(known / wanted))))
        return best, wanted / known[best]

    def _curve(self, name: str, row: int, axis: str = "tokens") -> tuple[Floats, Floats]:
        """The sizes of a row of a table that were timed, and their seconds."""
        [at], seconds = self._axes(name, axis), np.exp(unpacked(self.arrays[f"{name}/t"][row]))
        given = np.isfinite(seconds)
        return at[given], seconds[given]

    def _attention(self, phase: str, name: str, row: int, scale: float) -> TimedAttention:
        axes = self._axes(name, *(("rows", "context") if phase == "decode" else ("length",)))
        return TimedAttention(name, axes, np.exp(unpacked(self.arrays[f"{name}/t"][row])), scale)

    def attention(
        self, phase: str, heads: int, kv_heads: int, head_dim: int, cache: str, window: int = 0
    ) -> TimedAttention:
        """Attention of a layer, in decode or prefill.

        Of a cache that was not timed, that of 16 bits is taken: vLLM's on Blackwell has heads of 192 with 8 bits alone.
        """
        parts = [kind.split("-") for kind in self.kinds(phase) if kind.split("-")[1] in (cache, "bfloat16")]
        size = min({int(size) for size, _, _ in parts}, key=lambda one: abs(np.log(one / head_dim)))
        caches = {kind for one, kind, _ in parts if int(one) == size}
        cache = cache if cache in caches else "bfloat16"
        windows = {int(one) for width, kind, one in parts if int(width) == size and kind == cache}
        name = f"{phase}/{size}-{cache}-{window if window in windows else 0}"
        [pairs] = self._axes(name, "pairs")  # timed numbers of heads and KV heads
        distance = np.abs(np.log(pairs[:, 1] / kv_heads)) * 2 + np.abs(np.log(pairs[:, 0] / heads))
        best = int(np.argmin(distance))
        more = max(1.0, kv_heads / pairs[best, 1])  # in proportion beyond a group's first query
        return self._attention(phase, name, best, head_dim / size * more)

    def latent_attention(self, phase: str, heads: int, cache: str) -> TimedAttention | None:
        """The same of multi-head latent attention. None: it was not timed."""
        if not (known := self.kinds(f"latent-{phase}")):
            return None
        name = f"latent-{phase}/{cache if cache in known else known[0]}"
        return self._attention(phase, name, *self._nearest(name, "heads", heads))

    def sparse_attention(self, phase: str, kind: str, hidden: int, heads: int, cache: str) -> TimedAttention | None:
        """The same of sparse or compressed attention with its products, of the models whose hidden size is nearest."""
        parts = [name.split("-") for name in self.kinds(f"sparse-{phase}") if name.startswith(f"{kind}-")]
        if not parts:
            return None
        near = min((int(one) for _, one, _ in parts), key=lambda one: abs(one - hidden))
        caches = [name for _, one, name in parts if int(one) == near]
        name = f"sparse-{phase}/{kind}-{near}-{cache if cache in caches else caches[0]}"
        return self._attention(phase, name, *self._nearest(name, "heads", heads))

    def absorbed(self, heads: int, tokens: Floats) -> Floats:
        """The products that enter and leave the cache of latent attention, where they were timed apart from it."""
        if (name := "latent-bmm/bfloat16") + "/t" not in self.arrays:
            return np.zeros_like(tokens)
        [at], logs = (
            self._axes(name, "tokens"),
            unpacked(self.arrays[f"{name}/t"][self._nearest(name, "heads", heads)[0]]),
        )
        given = np.isfinite(logs)
        return np.asarray(np.exp(np.interp(np.log(tokens), np.log(at[given]), logs[given])))

    def streams(self, hidden: int, tokens: Floats) -> Floats | None:
        """Mixing the streams of hidden states of a layer of DeepSeek-V4. None: it was not timed."""
        if "streams/all/t" not in self.arrays:
            return None
        best, _ = self._nearest("streams/all", "hidden", hidden)
        return np.asarray(
            rising(*self._curve("streams/all", best), tokens) * hidden / self.arrays["streams/all/hidden"][best]
        )

    def states(self, phase: str, kind: str, key_heads: int, value_heads: int) -> tuple[Floats, Floats] | None:
        """A layer that keeps a state: rows or prompt tokens, and seconds. None: it was not timed.

        Heads that were not timed take as long each as those of the nearest number.
        """
        name = f"state-{phase}/{kind}"
        if f"{name}/t" not in self.arrays:
            return None
        [heads] = self._axes(name, "heads")
        distance = 2 * np.abs(np.log(heads[:, 1] / value_heads)) + np.abs(np.log(heads[:, 0] / key_heads))
        best = int(np.argmin(distance))
        at, times = self._curve(name, best, "at")
        fixed = float(times.min())
        return at, fixed + (times - fixed) * value_heads / heads[best, 1]

    def reduce_s(self, gpus: int, elements: Floats) -> Floats:
        """Seconds of an all-reduce of this number of 16-bit values, in a CUDA graph.

        In a rack, that of 8 GPUs takes no longer than one of 4 and one of pairs. vLLM's and SGLang's were timed with
        NCCL over two nodes, without the symmetric memory that recipes turn on (--enable-symm-mem).
        """
        which = self.arrays["reduce/graph/gpus"].tolist().index(gpus)
        seconds = rising(*self._curve("reduce/graph", which, "elements"), elements)
        if gpus < NODE or nvlink_of(self.gpu.name)[1] != RACK:
            return seconds
        return np.minimum(seconds, self.reduce_s(gpus // 2, elements) + self.reduce_s(2, elements))

    def exchange_s(
        self, how: All2All, ranks: int, tokens: Floats, hidden: int, nodes: int = 1, kind: str = "bfloat16",
        per_token: int = TOPK,
    ) -> Floats:  # fmt: skip
        """Seconds to send the tokens of data-parallel ranks to one layer's experts and to return the results.

        Each rank has `tokens`, which take `per_token` experts of a `kind`. DeepEP was timed on the 8 GPUs of a machine:
        fewer, and those of a rack with one NVLink, are taken to need as long. Over several `nodes` comes what the ports
        between them take.
        """
        if how == "flashinfer_nvlink_two_sided":
            return self._nvlink_s(ranks, tokens * hidden / NVLINK_HIDDEN, SENT.get(kind, "bfloat16"), per_token)
        port = between_nodes(self.gpu.name)
        if how == "allgather_reducescatter" or not self.kinds("deepep"):
            elements, inside = ranks * tokens * hidden, ranks // nodes
            within = self._nccl_s("all_gather", inside, elements) + self._nccl_s("reduce_scatter", inside, elements)
            beyond = [2 * gather_s(port, nodes, EXCHANGED_BYTES * size / inside) for size in elements.tolist()]
            return within + np.array(beyond) if nodes > 1 else within
        name = f"deepep/{'ll' if how == 'deepep_low_latency' else 'ht'}"
        within = rising(*self._curve(name, self._nearest(name, "hidden", hidden)[0]), tokens)
        return within + self._between_nodes(how, nodes, tokens, hidden, port) if nodes > 1 else within

    def _nvlink_s(self, ranks: int, tokens: Floats, sent: str, per_token: int) -> Floats:
        """TensorRT-LLM's exchange of tokens of the timed size: prepare, dispatch and combine.

        A token goes once to each rank that has some of its experts. Numbers of ranks that were not timed take as long
        as the next larger one.
        """
        if f"nvlink/{sent}/t" not in self.arrays:
            raise ValueError(f"{self.engine} on {self.gpu.name}: its tables have no exchange over NVLink")
        known = self.arrays[f"nvlink/{sent}/ranks"]
        which = min(int(np.searchsorted(known, ranks)), len(known) - 1)
        ranks_reached, timed = (ranks * (1 - (1 - 1 / ranks) ** count) for count in (per_token, TOPK))
        return rising(*self._curve(f"nvlink/{sent}", which), tokens * ranks_reached / timed)

    def _between_nodes(self, how: All2All, nodes: int, tokens: Floats, hidden: int, port: LinkSpec) -> Floats:
        """Seconds of DeepEP on several nodes beyond its time on one: as timed, else by the bytes that leave a GPU.

        Low latency sends a token to each of its experts, high throughput once to each node that has some of them.
        """
        name = f"deepep-nodes/{'ll' if how == 'deepep_low_latency' else 'ht'}"
        if f"{name}/t" in self.arrays and nodes <= (known := self.arrays[f"{name}/nodes"])[-1]:
            at, times = self.arrays[f"{name}/tokens"].astype(float), np.exp(unpacked(self.arrays[f"{name}/t"]))
            more = np.maximum.accumulate(np.maximum(times - times[0], 0.0), axis=0)
            width = hidden / float(self.arrays[f"{name}/hidden"][0])
            here = np.array([np.interp(nodes, known, column) for column in more.T])
            return rising(at, here, tokens * width)
        copies = TOPK * (1 - 1 / nodes)
        if how == "deepep_high_throughput":
            copies = (nodes - 1) * (1 - (1 - 1 / nodes) ** TOPK)
        sent = tokens * copies * hidden * (DISPATCHED_BYTES + EXCHANGED_BYTES)
        return np.asarray(2 * port.latency_s + sent / port.bytes_per_s)

    def _nccl_s(self, operation: str, gpus: int, elements: Floats) -> Floats:
        """Seconds of an NCCL collective over this total of 16-bit values.

        A group larger than those timed takes as long as the largest of them for the values that each GPU receives.
        """
        if gpus == 1:
            return np.zeros(elements.shape)
        known = self.arrays[f"nccl/{operation}/gpus"].tolist()
        timed = min(gpus, int(known[-1]))
        elements = elements * ((1 - 1 / gpus) / (1 - 1 / timed))
        return rising(*self._curve(f"nccl/{operation}", known.index(timed), "elements"), elements)


def read_tables(path: Path, gpu: GpuSpec) -> KernelTables:
    """Tables as `pdvsim calibrate --from-kernels` writes them; a ValueError of one line if the file is none."""
    try:
        with np.load(path) as data:
            arrays = {name: data[name] for name in data.files}
        about = json.loads(str(arrays.pop("about")))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path}: not a file of calibrate --from-kernels: {' '.join(str(error).split())}") from None
    return KernelTables(about, gpu, arrays)


def shipped_tables() -> Iterator[tuple[ServingEngine, str, Path]]:
    """Engine, card and file of the tables that come with pdvsim."""
    folder = Path(str(files("pdvsim.sim.prices"))) / "data" / "engines"
    for engine in ENGINES:
        for path in sorted(folder.glob(f"{engine}-*.npz")):
            yield engine, path.stem.removeprefix(f"{engine}-"), path
