"""Predicted tensor-parallel shards compared with measured ones: `python studies/shards.py DIR a100-80gb`.

Vidur also timed the operators of a layer as one of two, four or eight workers runs them. DIR is its
data/profiling/compute. Here the shard and the whole model are predicted from their sizes; their ratio is more accurate
than either. Nothing is fitted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim.hardware.models import PRESETS, gpu, shard
from pdvsim.sim.hardware.transfer import TOKENS, shipped
from pdvsim.sim.specs import GpuSpec
from studies.vidur import layer_errors, of_card, read_layer

WORKERS = (2, 4, 8)


@dataclass(frozen=True)
class ShardErrors:
    """Errors of one model's shard by number of tokens: |log(predicted / measured)| of its time, and of its share."""

    name: str
    layer: NDArray[np.float64]
    share: NDArray[np.float64]  # of the whole layer's time


def compare(folder: str | Path, card: GpuSpec) -> list[ShardErrors]:
    """Every shard of a known model that was measured on a card."""
    root = Path(folder)
    files = [path for path in sorted(root.rglob("*mlp.csv")) if of_card(path.relative_to(root), card.name)]
    by_shard = []
    for path in files:
        whole = read_layer(path, known=PRESETS)
        if whole is None:
            continue
        layers = [whole]
        for workers in WORKERS:
            try:
                shard(whole.spec, workers)
                layers.append(read_layer(path, workers, PRESETS) or whole)
            except ValueError:  # the model cannot be sharded this way, or was not measured so
                continue
        off = layer_errors(layers, card, shipped())
        measured = {layer.spec.name: [n for n, _ in layer.at(TOKENS)] for layer in layers}
        own = dict(zip(measured[whole.spec.name], off[whole.spec.name].tolist(), strict=True))
        for layer in layers[1:]:
            name = layer.spec.name
            both = [(e, own[n]) for n, e in zip(measured[name], off[name].tolist(), strict=True) if n in own]
            errors = np.array(both)
            by_shard.append(ShardErrors(name, np.abs(errors[:, 0]), np.abs(errors[:, 0] - errors[:, 1])))
    if not by_shard:
        raise ValueError(f"{folder}: no *mlp.csv with shards of a known model on {card.name}")
    return by_shard


def table(errors: Sequence[ShardErrors]) -> str:
    """The errors as text."""
    head = f"{'shard':22} {'points':>6} {'time: median':>13} {'95%':>6} {'share of the whole: median':>27} {'95%':>6}"
    both = ShardErrors("all", *(np.concatenate([getattr(e, part) for e in errors]) for part in ("layer", "share")))
    lines = [
        f"{e.name:22} {len(e.layer):6} {np.median(e.layer):13.1%} {np.percentile(e.layer, 95):6.1%} "
        f"{np.median(e.share):27.1%} {np.percentile(e.share, 95):6.1%}"
        for e in (*errors, both)
    ]
    return "\n".join([head, *lines])


if __name__ == "__main__":
    print(table(compare(sys.argv[1], gpu(sys.argv[2]))))
