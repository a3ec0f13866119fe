"""Fits side by side, one a core. Each has one thread: more only wait for each other, and may round differently."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from pdvsim.study.backends import cores

T = TypeVar("T")


def in_workers(
    function: Callable[..., T], arguments: Iterable[tuple[Any, ...]], progress: Callable[[], None]
) -> list[T]:
    """`function` of each of the arguments, in their order; `progress` is called after each."""
    from joblib import Parallel, delayed, parallel_config

    calls = [delayed(function)(*given) for given in arguments]
    found: list[T] = []
    with parallel_config(backend="loky", inner_max_num_threads=1):
        # two at least: a single one would run in this process, with its threads
        pool = Parallel(n_jobs=max(2, min(cores(), len(calls))), return_as="generator", batch_size=1)
        for result in pool(calls):
            found.append(result)
            progress()
    return found
