"""A profile from Vidur's published operator profiles: `python studies/vidur.py DIR a100-80gb [PROFILE.json]`.

With several GPUs (`a100-80gb,h100-sxm`) it prints errors alone.

Vidur (microsoft/vidur, data/profiling/compute, MIT) times every operator of one layer by number of tokens: `mlp.csv`
holds the products, norms, rope and activation, `attention.csv`, where there is one, attention by batch and cache.
What a file measured is taken from it; attention without a file, the output projection, and the presets that no file
covers come from `sim.hardware.transfer`, under ceilings that the measured layers fix. Host and sharing are the H200's.

Not modelled: gaps between kernels, which Vidur's times do not hold, and this engine's own kernels for few tokens, in
whose place stand the library's. A profile is of whole models; rows of shards are for `studies/shards.py`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pdvsim.calibration.fit.build import save
from pdvsim.calibration.fit.points import middle
from pdvsim.sim.hardware.forward import ForwardTerms, in_waves
from pdvsim.sim.hardware.models import MODELS, shard
from pdvsim.sim.hardware.models import gpu as named_gpu
from pdvsim.sim.hardware.profile import SCHEMA, Profile, builtin
from pdvsim.sim.hardware.reach import Reach
from pdvsim.sim.hardware.transfer import TOKENS, Prices, Transfer, shipped
from pdvsim.sim.reading import check_file, error_text
from pdvsim.sim.specs import GpuSpec, ModelSpec

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]

PRODUCTS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
AROUND = ("input_layernorm", "attn_rope", "post_attention_layernorm", "mlp_act", "add")
LAYER = (*PRODUCTS, *AROUND)
SHAPE = ("n_head", "n_kv_head", "n_embd", "n_expanded_embd")
MLP_KEYS = (*SHAPE, "num_tokens", "num_tensor_parallel_workers")
ATTENTION_KEYS = ("batch_size", "prefill_chunk_size", "kv_cache_size", "num_tensor_parallel_workers")
FOUNDATION = "published kernels + transfer"
SOURCE = "Vidur's operator profiles (microsoft/vidur, data/profiling/compute, MIT)"
FASTEST, SLOWEST = 0.5, 20.0  # a layer's median against the least its card allows: other units lie far outside
DEVICE = re.compile(r"(?<![a-z0-9])([abhltv]\d{1,3}[gs]?)(?![a-z0-9])")  # a100, h100, a40, l40s, … in a path


@dataclass(frozen=True)
class Layer:
    """One model's layer as measured: seconds by number of tokens."""

    spec: ModelSpec
    tokens: Floats
    layer_s: Floats
    embedding_s: Floats
    decode: Floats | None = None  # rows of batch, cached tokens per row, seconds
    prompt: Floats | None = None  # rows of new tokens, tokens before them, seconds

    def at(self, tokens: Iterable[int]) -> tuple[tuple[int, float], ...]:
        """(tokens, seconds) of a whole forward's layers within what was measured."""
        inside = [n for n in tokens if self.tokens[0] <= n <= self.tokens[-1]]
        layers = self.spec.layers * self.layer_s + self.embedding_s
        return tuple((n, float(np.interp(n, self.tokens, layers))) for n in inside)


def read(folder: str | Path, gpu: GpuSpec) -> list[Layer]:
    """Every preset's layer in a folder of Vidur's files; a ValueError of one line naming file and column otherwise."""
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"{folder}: not a folder of Vidur's profiles")
    files = [path for path in sorted(root.rglob("*mlp.csv")) if of_card(path.relative_to(root), gpu.name)]
    layers = [layer for path in files if (layer := read_layer(path)) is not None]
    if not layers:
        raise ValueError(f"{folder}: no *mlp.csv of a known model for {gpu.name}; known: {', '.join(MODELS)}")
    names = [layer.spec.name for layer in layers]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{folder}: {name} occurs twice; keep one of its files")
    for layer in layers:
        if len(layer.at(TOKENS)) < 2:
            raise ValueError(f"{folder}: {layer.spec.name}: too few values of num_tokens for a fit")
        _check_units(folder, layer, gpu)
    return layers


def read_layer(path: Path, workers: int = 1, known: Mapping[str, ModelSpec] = MODELS) -> Layer | None:
    """The layer in one mlp.csv and the attention.csv next to it, as one of `workers` ran it; None if no preset's."""
    frame = _table(path, MLP_KEYS, [f"time_stats.{name}.median" for name in ("emb", *LAYER)], workers=workers)
    shapes = frame[list(SHAPE)].drop_duplicates()
    if len(shapes) != 1:
        raise ValueError(f"{path}: holds {len(shapes)} models; it must hold one")
    shape = tuple(int(value) for value in shapes.iloc[0])
    same = (m for m in known.values() if (m.heads, m.kv_heads, m.hidden, m.intermediate) == shape)
    if (spec := next(same, None)) is None:
        return None
    by = frame.groupby("num_tokens")[[f"time_stats.{name}.median" for name in ("emb", *LAYER)]].median() * 1e-3
    tokens, times = by.index.to_numpy(float), by.to_numpy(float)
    attention_path = path.with_name(path.name.removesuffix("mlp.csv") + "attention.csv")
    decode, prompt = read_attention(attention_path) if attention_path.is_file() and workers == 1 else (None, None)
    return Layer(shard(spec, workers), tokens, times[:, 1:].sum(axis=1), times[:, 0], decode, prompt)


def read_attention(path: Path) -> tuple[Floats | None, Floats | None]:
    """Decode and prompt attention of one layer; a file may hold either."""
    columns = {"decode": "time_stats.attn_decode.median", "prompt": "time_stats.attn_prefill.median"}
    frame = _table(path, ATTENTION_KEYS, [], optional=list(columns.values()))
    decodes = frame["prefill_chunk_size"] == 0
    parts: list[Floats | None] = []
    for kind, rows in (("decode", frame[decodes]), ("prompt", frame[~decodes])):
        if rows.empty or columns[kind] not in frame:
            parts.append(None)
            continue
        _finite(path, rows, [columns[kind]])
        first = "batch_size" if kind == "decode" else "prefill_chunk_size"
        parts.append(rows[[first, "kv_cache_size", columns[kind]]].to_numpy(float) * [1, 1, 1e-3])
    return parts[0], parts[1]


def _table(
    path: Path, keys: Sequence[str], times: Sequence[str], optional: Sequence[str] = (), workers: int = 1
) -> pd.DataFrame:
    import pandas as pd

    try:
        check_file(path)
        frame = pd.read_csv(path)
    except (OSError, ValueError, OverflowError) as error:  # pandas' parser errors are ValueErrors
        raise ValueError(f"{path}: cannot be read: {error_text(error)}") from None
    for name in (*keys, *times):
        if name not in frame.columns:
            raise ValueError(f"{path}: column {name} is missing")
    for name in (*keys, *times, *(name for name in optional if name in frame.columns)):
        if not pd.api.types.is_numeric_dtype(frame[name]):
            raise ValueError(f"{path}: {name}: must be numbers")
    frame = frame[frame["num_tensor_parallel_workers"] == workers]
    if frame.empty:
        raise ValueError(f"{path}: num_tensor_parallel_workers: no row of {'one worker' if workers == 1 else workers}")
    _finite(path, frame, times)
    _finite(path, frame, keys, zero=True)
    return frame


def _finite(path: Path, frame: pd.DataFrame, columns: Sequence[str], zero: bool = False) -> None:
    for name in columns:
        values = frame[name].to_numpy(float)
        bad = ~np.isfinite(values) | (values < 0 if zero else values <= 0)
        if bad.any():
            row = int(frame.index[bad][0]) + 2  # as an editor counts, under the header
            raise ValueError(f"{path}: {name}: line {row}: must be a number above 0, got {values[bad][0]:g}")


def of_card(path: Path, card: str) -> bool:
    """Return whether a path names this card, or none."""
    named = set(DEVICE.findall(path.as_posix().lower()))
    return not named or not named.isdisjoint(card.lower().split("-"))


def _check_units(folder: str | Path, layer: Layer, gpu: GpuSpec) -> None:
    spec = layer.spec
    params = spec.layer_params / spec.layers
    least = np.maximum(
        params * spec.dtype_bytes / gpu.bandwidth_bytes_per_s, 2 * params * layer.tokens / gpu.flops_per_s
    )
    ratio = float(np.median(layer.layer_s / least))
    if not FASTEST <= ratio <= SLOWEST:
        raise ValueError(
            f"{folder}: {spec.name}: a layer takes {ratio:.3g} times the minimum of {gpu.name}; "
            "times must be in milliseconds and from this GPU"
        )


def library_only(transfer: Transfer) -> Transfer:
    """The transfer without this engine's own kernels, which Vidur did not run."""
    return replace(transfer, engine=replace(transfer.engine, small_bytes=0))


def layer_errors(layers: Sequence[Layer], gpu: GpuSpec, transfer: Transfer) -> dict[str, Floats]:
    """log(predicted / published) of a layer, by model, at the knots' tokens."""
    errors, ceilings = {}, transfer.ceilings(gpu)
    for layer in layers:
        knots = np.array(layer.at(TOKENS))
        prices = Prices(layer.spec, ceilings, gpu.sms or transfer.sms, library_only(transfer))
        errors[layer.spec.name] = np.asarray(np.log(prices.layers(knots[:, 0]) / knots[:, 1]))
    return errors


def fitted_ceilings(layers: Sequence[Layer], gpu: GpuSpec, transfer: Transfer) -> GpuSpec:
    """The card's ceilings under which the measured layers are predicted best."""
    from scipy.optimize import least_squares

    def card(x: Floats) -> GpuSpec:
        shares = np.exp(x)
        return replace(
            gpu,
            bandwidth_bytes_per_s=gpu.bandwidth_bytes_per_s * float(shares[0]),
            flops_per_s=gpu.flops_per_s * float(shares[1]),
            measured=True,
        )

    def residuals(x: Floats) -> Floats:
        return np.concatenate(list(layer_errors(layers, card(x), transfer).values()))

    start = np.log([transfer.bandwidth_share, transfer.flops_share])
    best = card(np.asarray(least_squares(residuals, start, loss="soft_l1", f_scale=0.05).x))
    shares = (best.bandwidth_bytes_per_s / gpu.bandwidth_bytes_per_s, best.flops_per_s / gpu.flops_per_s)
    shares_note = f"{shares[0]:.0%} of the bandwidth and {shares[1]:.0%} of the arithmetic achieved in {SOURCE}"
    return replace(best, source=f"{gpu.source}; {shares_note}")


def published_fit(layer: Layer, fit: ForwardTerms) -> ForwardTerms:
    """Transferred terms with what was measured in their place."""
    fit = replace(fit, layer_knots=layer.at(TOKENS), small_kernel_tokens=0)
    if layer.decode is not None:
        batch, cached, seconds = layer.decode.T
        design = np.stack([np.ones_like(batch), batch * cached], axis=1) / seconds[:, None]  # relative errors
        fixed, each = (max(0.0, float(x)) * layer.spec.layers for x in np.linalg.lstsq(design, np.ones_like(batch))[0])
        ratio = each / fit.kv_knots[0][1]
        fit = replace(
            fit,
            kv_knots=tuple((n, s * ratio) for n, s in fit.kv_knots),
            width_knots=tuple((n, fixed + s - fit.width_knots[0][1]) for n, s in fit.width_knots),
        )
    if layer.prompt is not None:
        spec, seconds = layer.spec, layer.prompt[:, 2] * layer.spec.layers
        chunks = layer.prompt[:, :2].astype(int).tolist()
        waves = [in_waves([(before, new)], spec.heads, spec.head_dim, fit.prompt_sms) for new, before in chunks]
        fit = replace(fit, prompt_wave_s=float(np.median(seconds / np.array(waves))))
    return fit


def published_reach(layer: Layer) -> Reach:
    """Return the ranges of its files; a size that is in none of them is left out."""
    rows = context = prompt_start = None
    if layer.decode is not None:
        rows, context = (int(most) for most in layer.decode[:, :2].max(axis=0))
    if layer.prompt is not None:
        prompt_start = int(layer.prompt[:, 1].max())
    return Reach(rows=rows, context=context, prompt_start=prompt_start, tokens=layer.at(TOKENS)[-1][0])


def build_vidur(folder: str | Path, gpu: GpuSpec) -> Profile:
    """The profile of a card from Vidur's files: measured layers where there are some, the rest transferred."""
    transfer, h200 = shipped(), builtin("h200")
    layers = read(folder, gpu)
    card = fitted_ceilings(layers, gpu, transfer)
    models = {name: transfer.fit(spec, card) for name, spec in MODELS.items()}
    models |= {layer.spec.name: published_fit(layer, models[layer.spec.name]) for layer in layers}
    left = np.abs(np.concatenate(list(layer_errors(layers, card, transfer).values())))
    bar = transfer.with_card(float(np.percentile(left, 95)))
    measured = {layer.spec.name for layer in layers}
    return Profile(
        schema_version=SCHEMA,
        name=f"{gpu.name}-published",
        foundation=FOUNDATION,
        gpu=replace(card, measured=False),
        models=models,
        host=h200.host,
        contention=h200.contention,
        provenance={
            "ceilings": card.source,
            "layers": f"{', '.join(sorted(measured))}: {SOURCE}",
            "attention": "as published" if any(layer.decode is not None for layer in layers) else "transferred",
            "other models": "transferred",
            "kernels": transfer.source,
            "host": h200.name,
            "contention": h200.name,
        },
        uncertainty={name: transfer.bar(card_known=True) if name in measured else bar for name in models},
        measured={layer.spec.name: published_reach(layer) for layer in layers},
    )


def card_errors(folder: str | Path, cards: Sequence[GpuSpec]) -> list[dict[str, Any]]:
    """|log(predicted / published)| of each layer: from the data sheet alone, and with ceilings fitted to the files."""
    transfer, errors = shipped(), []
    for card in cards:
        layers = read(folder, card)
        alone = layer_errors(layers, card, transfer)
        fitted = layer_errors(layers, fitted_ceilings(layers, card, transfer), transfer)
        errors += [(f"{name} on {card.name}", np.abs(alone[name]), np.abs(fitted[name])) for name in alone]
    errors.append(("all", np.concatenate([row[1] for row in errors]), np.concatenate([row[2] for row in errors])))
    return [
        {"layer": name, "points": len(alone), "data_sheet": middle(alone), "fitted": middle(fitted)}
        for name, alone, fitted in errors
    ]


def report(errors: Sequence[Mapping[str, Any]]) -> str:
    """These errors as text."""
    lines = ["A layer, |log(predicted / published)|: median and 95th percentile"]
    lines.append(f"{'':28} {'points':>6} {'data sheet alone':>20} {'ceilings fitted':>20}")
    for row in errors:
        figures = [f"{row[kind]['median']:8.1%} {row[kind]['p95']:8.1%}" for kind in ("data_sheet", "fitted")]
        lines.append(f"{row['layer']:28} {row['points']:6} {figures[0]:>20} {figures[1]:>20}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    """Print the errors by layer; write the profile if a file is named."""
    folder, cards = argv[0], [named_gpu(name) for name in argv[1].split(",")]
    if argv[2:]:
        save(build_vidur(folder, cards[0]), Path(argv[2]))
    print(report(card_errors(folder, cards)))


if __name__ == "__main__":
    main(sys.argv[1:])
