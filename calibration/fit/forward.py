"""From measured samples to a profile: the latency model's coefficients, by least squares on relative errors.

Times are put together by the simulator's own `CostModel`, run over figures that are still free: it gives which of them
a time consists of. So a fit needs no model of its own, and has the slopes of the simulator's. Kernels change with the
number of tokens, so the layers' time over the roofline is free at knots and held smooth between. Where the layers were
measured without attention, at all numbers of tokens, that takes the place of the roofline. Attention reads cached
tokens at the card's speed, or, where too few programs read, at that of the longest stretch one of them reads; both
depend on the tile its queries are packed into. Attention over prompts goes through its contexts in waves of programs.
Nothing is fitted on whole serving runs.

Not modelled: the card's clock, which falls under long heavy work and makes the same launch up to a tenth slower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdvsim.calibration.fit.points import Floats, price_s, tokens_of
from pdvsim.realrun.engine.buckets import query_tile
from pdvsim.sim.models.specs import GpuSpec, ModelSpec
from pdvsim.sim.prices.costs import CostModel
from pdvsim.sim.prices.forward import PROMPT_QUERIES, ForwardTerms, large_products_s

if TYPE_CHECKING:
    import pandas as pd

MOST_WIDTH = 9  # new tokens per row in the samples
KNOTS = (1, 2, 4, 8, 16, 17, 32, 33, *range(48, 160, 16), *range(160, 512, 32), *range(512, 1024, 64),
         *range(1024, 4097, 128))  # fmt: skip
ATTENTION_ROW_KNOTS = (1, 2, 4, 8, 16, 32, 48, 64, 128)
# The weights of what is believed beforehand, against a relative error of one: decisive only where no point lies.
SMOOTHNESS = 0.1  # of the layers' time over the roofline, per square root of a factor e in tokens
TILE_SMOOTHNESS = 0.02
ROOFLINE_WEIGHT = 0.003  # of where a search begins; of some figures it is
WEIGHTS = {
    "rows": 0.3,  # attention is equally fast at any number of rows
    "head": 0.03, "head_token": 0.03,  # few points distinguish the head from the layers
    "expert": 1.0,  # points of as many tokens read nearly as many experts
}  # fmt: skip
OUTLIER_ERROR = 0.03  # points with a larger relative error have less influence
FOLDS = 5


class Factor(NamedTuple):
    """Two figures joined, the second weighted: the larger of them, or the root of the sum of their squares."""

    larger: bool
    first: int
    second: int
    weight: float  # 0: the first figure alone


class Traced:
    """A time as the simulator puts it together from figures that are still free: products of factors, and how often."""

    def __init__(self, products: dict[tuple[Factor, ...], float]) -> None:
        self.products = {product: count for product, count in products.items() if count}

    @classmethod
    def figures(cls, count: int) -> list[Traced]:
        """Return `count` free figures."""
        return [cls({(Factor(False, number, number, 0.0),): 1.0}) for number in range(count)]

    def joined(self, other: Traced, larger: bool) -> Traced:
        """One figure and another one, weighted."""
        ([(first, _)], [(second, weight)]) = self.products.items(), other.products.items()
        return Traced({(Factor(larger, first[0].first, second[0].first, weight),): 1.0})

    def __add__(self, other: Traced | float) -> Traced:
        if not isinstance(other, Traced):  # the simulator's sums begin with 0
            return self
        both = dict(self.products)
        for product, count in other.products.items():
            both[product] = both.get(product, 0.0) + count
        return Traced(both)

    def __mul__(self, other: Traced | float) -> Traced:
        if not isinstance(other, Traced):
            return Traced({product: count * other for product, count in self.products.items()})
        pairs = [(a + b, n * m) for a, n in self.products.items() for b, m in other.products.items()]
        return sum((Traced({product: count}) for product, count in pairs), Traced({}))

    def __truediv__(self, other: float) -> Traced:
        return Traced({product: count / other for product, count in self.products.items()})

    def __sub__(self, other: Traced) -> Traced:
        return self + other * -1.0

    def __lt__(self, other: float) -> bool:
        return False  # than 0: no time is

    __radd__, __rmul__ = __add__, __mul__


class TracedTerms(ForwardTerms):
    """A forward over figures that are still free."""

    def logits_s(self, logits: int) -> Any:
        weights_s: Any = self.head_weights_s
        return weights_s.joined(self.head_token_s * logits, larger=True)

    def _joined(self, wide_s: Any, long_s: Any) -> Any:
        return wide_s.joined(long_s, larger=False)


class TracedTimes:
    """Traced times as matrices: how often each product is in each time, and each factor in each product."""

    def __init__(self, times: Sequence[Traced]) -> None:
        products = list(dict.fromkeys(product for time in times for product in time.products))
        factors = list(dict.fromkeys(factor for product in products for factor in product))
        self._times = np.array([[time.products.get(product, 0.0) for product in products] for time in times])
        self._products = np.array([[float(product.count(factor)) for factor in factors] for product in products])
        larger, first, second, self._weight = np.array(factors).T
        self._larger, self._first, self._second = larger > 0, first.astype(int), second.astype(int)

    def at(self, chosen: NDArray[Any]) -> TracedTimes:
        """Return the times that `chosen` selects."""
        some = copy(self)
        some._times = self._times[chosen]
        return some

    def seconds(self, figures: Floats) -> Floats:
        """Return the times that these figures give."""
        return np.asarray(self._times @ np.exp(self._products @ np.log(self._factors(figures)[2])))

    def predict(self, logarithms: Floats) -> tuple[Floats, Floats]:
        """The times with figures of these logarithms, and how they change with each of those."""
        first, second, size = self._factors(np.exp(logarithms))
        share = np.where(self._larger, first >= second, (first / size) ** 2)  # of a factor's growth, by the first
        every, growth = np.arange(len(size)), np.zeros((len(size), len(logarithms)))
        growth[every, self._first] += share
        growth[every, self._second] += 1 - share
        times = self._times * np.exp(self._products @ np.log(size))
        return times.sum(1), times @ (self._products @ growth)

    def _factors(self, figures: Floats) -> tuple[Floats, Floats, Floats]:
        first, second = figures[self._first], self._weight * figures[self._second]
        return first, second, np.where(self._larger, np.maximum(first, second), np.hypot(first, second))


def traced_times(spec: ModelSpec, figures: ForwardTerms, frame: pd.DataFrame) -> TracedTimes:
    """The times of measured points as the simulator prices them, with traced figures."""
    drafter, verifier = (CostModel(spec, TracedTerms(**figures.figures())) for _ in range(2))
    verifier.widest = 2  # a head's draft has logits of its newest tokens, but it is measured with all of them too
    points = frame.to_dict("records")
    return TracedTimes([price_s(drafter if point["kind"] == "draft" else verifier, point) for point in points])


@dataclass(frozen=True)
class Kernels:
    """Effects of the engine that samples do not show."""

    row_buckets: tuple[int, ...]
    chunk_buckets: tuple[int, ...]
    programs: int  # concurrent ones that attention aims at
    small_tokens: int = 0  # up to which kernels leave room for others
    small_bytes: float = 0.0  # of weights, up to which a product is theirs


class Model:
    """The figures of a latency model as functions of free parameters, all of them logarithms."""

    def __init__(
        self,
        spec: ModelSpec,
        gpu: GpuSpec,
        kernels: Kernels,
        most_tokens: float,
        course: Mapping[int, float] | None = None,
    ) -> None:
        self.spec, self.gpu, self.kernels = spec, gpu, kernels
        self.roof = roof = ForwardTerms.roofline(spec, gpu).figures()
        most = max(most_tokens, 2.0)
        self.course = course or {}  # seconds of the layers without attention by tokens, where they were measured
        self.knots = np.array([n for n in KNOTS if n < most] + [most])
        self.group = spec.heads // spec.kv_heads
        self.tiles = sorted({query_tile(width * self.group) for width in range(1, MOST_WIDTH + 1)})
        stretch_s = roof["kv_s"] * kernels.programs / spec.kv_heads  # were all programs to read at the card's speed
        self.sms, tiles = gpu.sms or 1, np.ones(len(self.tiles))
        begin = {
            "layers": 1.3 * self._expected(self.knots),
            "kv": roof["kv_s"] * tiles,
            "span": stretch_s * tiles,
            "fixed": 1e-5 * tiles,
            "rows": np.ones(len(ATTENTION_ROW_KNOTS)),
            "split": 1e-5,
            "row": 1e-7,
            "wave": PROMPT_QUERIES * roof["pair_s"] * self.sms / spec.heads,  # were all to multiply at its speed
            "mixed": 1e-5,
            "head": roof["head_weights_s"],
            "head_token": roof["head_token_s"],
            "draft": 1.0,
        }
        begin |= {"fused": 1.3} if roof.get("fused_knots") else {}
        begin |= {"expert": roof["expert_s"]} if spec.experts else {}
        parts = {name: np.atleast_1d(figures) for name, figures in begin.items()}
        ends = np.cumsum([len(part) for part in parts.values()]).tolist()
        self.at = {name: slice(end - len(parts[name]), end) for name, end in zip(parts, ends, strict=True)}
        self.start = np.log(np.concatenate(list(parts.values())))

    def _roofline(self, tokens: Floats) -> Floats:
        """The layers' memory and compute time joined smoothly: products do not all turn at the same size."""
        return np.asarray(np.hypot(self.roof["weights_s"], self.roof["token_s"] * tokens))

    def _expected(self, tokens: Floats) -> Floats:
        """The layers' time as it is believed to go with tokens: as measured without attention, else the roofline."""
        roofline = self._roofline(tokens)
        if not self.course:
            return roofline
        known = np.array(sorted(self.course), np.float64)
        over = np.array([self.course[int(n)] for n in known]) / self._roofline(known)
        return np.asarray(roofline * np.interp(tokens, known, over))

    def _between(self, figures: Sequence[Any]) -> list[tuple[int, Any]]:
        """The layers' time between knots, where it is believed to go otherwise than in a straight line."""
        knots = self.knots
        known = [n for n in self.course if knots[0] < n < knots[-2]]  # beyond, the last two knots give the slope
        expected, at_knots = self._expected(np.array(known, np.float64)), self._expected(knots)
        points = []
        for tokens, seconds, after in zip(known, expected, np.searchsorted(knots, known, "right"), strict=True):
            share = (tokens - knots[after - 1]) / (knots[after] - knots[after - 1])
            if share:
                first, second = (1 - share) * seconds / at_knots[after - 1], share * seconds / at_knots[after]
                points.append((tokens, figures[after - 1] * float(first) + figures[after] * float(second)))
        return points

    def fused(self, tokens: float) -> float:
        """The product that fuses a head's inputs, at the roofline."""
        (ridge, fused_s), _ = self.roof["fused_knots"]
        return float(fused_s * np.hypot(1.0, tokens / ridge))

    @cached_property
    def beliefs(self) -> tuple[Floats, Floats]:
        """Return prior beliefs as a matrix and its target: matrix @ parameters should equal it."""
        every, layers = np.eye(len(self.start)), self.at["layers"]
        smooth = SMOOTHNESS / np.sqrt(np.diff(np.log(self.knots)))
        expected = np.diff(np.log(self._expected(self.knots)))
        by_tile = np.concatenate([np.diff(every[self.at[name]], axis=0) for name in ("kv", "span", "fixed")])
        names = [name for name, part in self.at.items() for _ in range(part.start, part.stop)][layers.stop :]
        near = np.array([WEIGHTS.get(name, ROOFLINE_WEIGHT) for name in names])
        matrix = (
            smooth[:, None] * np.diff(every[layers], axis=0),
            TILE_SMOOTHNESS * by_tile,
            near[:, None] * every[layers.stop :],
        )
        return np.concatenate(matrix), np.concatenate(
            (smooth * expected, np.zeros(len(by_tile)), near * self.start[layers.stop :])
        )

    def times(self, frame: pd.DataFrame) -> TracedTimes:
        """The times of measured points as the simulator prices them."""
        tokens = sorted({1, 2, *tokens_of(frame)})  # so that nothing is read between what is fused
        return traced_times(self.spec, self.result(Traced.figures(len(self.start)), tokens), frame)

    def fit(self, times: TracedTimes, seconds: Floats) -> Floats:
        """Parameters with the least relative errors; a few points far off do not pull."""
        from scipy.optimize import least_squares

        matrix, target = self.beliefs

        def residuals(parameters: Floats) -> Floats:
            errors = np.log(times.predict(parameters)[0] / seconds)
            return np.concatenate([errors, matrix @ parameters - target])

        def jacobian(parameters: Floats) -> Floats:
            predicted, slopes = times.predict(parameters)
            return np.concatenate([slopes / predicted[:, None], matrix])

        best = least_squares(residuals, self.start, jacobian, loss="soft_l1", f_scale=OUTLIER_ERROR, max_nfev=200)
        return np.asarray(best.x)

    def result(self, figures: Sequence[Any], fused_at: Sequence[int] | None = None) -> ForwardTerms:
        """The figures as the simulator reads them; `fused_at`: the tokens at which the product that fuses has knots."""
        one = {name: figures[part.start] for name, part in self.at.items()}  # the first of several
        knots = [int(n) for n in self.knots]
        # tiles change in steps: a knot at every width, the last one twice, so that what is wider stays there
        widths = [(w, self.tiles.index(query_tile(min(w, MOST_WIDTH) * self.group))) for w in range(1, MOST_WIDTH + 2)]

        def by_width(name: str) -> tuple[tuple[int, Any], ...]:
            return tuple((w, figures[self.at[name]][tile]) for w, tile in widths)

        by_rows = tuple(zip(ATTENTION_ROW_KNOTS, figures[self.at["rows"]], strict=True))
        of_layers = figures[self.at["layers"]]
        layers = [*zip(knots, of_layers, strict=True), *self._between(of_layers)]
        fused = [(n, one["fused"] * self.fused(n)) for n in fused_at or knots] if "fused" in one else ()
        kernels, bandwidth = self.kernels, self.gpu.bandwidth_bytes_per_s
        return ForwardTerms(
            layer_knots=tuple(sorted(layers, key=lambda knot: knot[0])),
            expert_s=one.get("expert", 0.0),
            head_weights_s=one["head"],
            head_token_s=one["head_token"],
            kv_knots=by_width("kv"),
            span_knots=by_width("span"),
            row_factors=(*by_rows, (ATTENTION_ROW_KNOTS[-1] + 1, by_rows[-1][1])),  # what is beyond stays there
            programs=kernels.programs,
            split_s=one["split"],
            width_knots=by_width("fixed"),
            row_s=one["row"],
            prompt_sms=self.sms,
            prompt_wave_s=one["wave"],
            mixed_s=one["mixed"],
            fused_knots=tuple(fused),
            draft_ratio=one["draft"],
            small_kernel_tokens=kernels.small_tokens,
            large_s=large_products_s(self.spec, kernels.small_bytes, bandwidth),
            row_buckets=kernels.row_buckets,
            chunk_buckets=kernels.chunk_buckets,
        )


@dataclass(frozen=True)
class Solo:
    """One model's fit, and how far points are off that it was not fitted on."""

    fit: ForwardTerms
    frame: pd.DataFrame  # one row per point: its shape, `seconds` and `held_out`, the prediction of a fit without it
    spread: Floats  # of the samples of each point: half the range of the middle 80%, over the median

    @property
    def points(self) -> int:
        return len(self.frame)

    @property
    def errors(self) -> Floats:
        return np.asarray(self.frame["held_out"] / self.frame["seconds"] - 1)


def fit_solo(
    frame: pd.DataFrame, spec: ModelSpec, gpu: GpuSpec, kernels: Kernels, course: Mapping[int, float] | None = None
) -> Solo:
    """Fit one model's medians; errors by cross-validation over points."""
    seconds = frame["seconds"].to_numpy(float)
    model = Model(spec, gpu, kernels, max(tokens_of(frame)), course)
    times, held_out = model.times(frame), np.empty(len(frame))
    fold = np.random.default_rng(0).permutation(len(frame)) % FOLDS
    for number in range(FOLDS):
        rest = model.fit(times.at(fold != number), seconds[fold != number])
        held_out[fold == number] = times.at(fold == number).predict(rest)[0]
    spread = (frame["high"] - frame["low"]).to_numpy(float) / 2 / seconds
    fit = model.result(np.exp(model.fit(times, seconds)).tolist())
    return Solo(fit, frame.assign(held_out=held_out), spread)
