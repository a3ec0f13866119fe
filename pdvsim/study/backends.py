"""Backends of a sweep: this machine's cores (joblib's loky), or the workers of a Dask or Ray cluster.

A backend only decides where a point runs. It returns each point's row, or the reason why it failed, in the order of
completion. If a worker dies, its point is retried; the sweep continues. joblib is used for loky only; clusters are used
directly (`clusters`).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal

from pdvsim.common.outcomes import Item, Notice, Outcome, Row, Task
from pdvsim.common.workers import cores, finished_here
from pdvsim.sim.limits import check_ranges
from pdvsim.study import clusters

__all__ = ["Backend", "BackendName", "Row", "check_reachable", "cores", "finished"]

BackendName = Literal["loky", "dask", "ray"]


@dataclass(frozen=True)
class Backend:
    """Where points run: `jobs` local processes (None: one per core), or an existing cluster at an address."""

    name: BackendName = "loky"
    jobs: int | None = None
    scheduler: str | None = None

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.jobs is not None and self.name != "loky":
            raise ValueError(f"--jobs sets the processes of this machine; the {self.name} cluster has its own workers")
        if self.scheduler is not None and self.name == "loky":
            raise ValueError("--scheduler needs --backend dask or ray")
        if self.scheduler is None and self.name == "dask":
            raise ValueError(
                "--backend dask needs --scheduler with the address of a running one, e.g. tcp://10.0.0.1:8786; "
                "start it with `dask scheduler`, and `dask worker ADDRESS` on each machine"
            )


def finished(
    task: Task, items: Sequence[Item], backend: Backend, notice: Notice = lambda text: None
) -> Generator[Outcome, None, None]:
    """The outcome of every item, in order of completion. Closing the generator cancels the rest.

    A lost cluster is a ValueError; a cluster without workers is waited for and reported to `notice`.
    """
    if backend.name == "dask" and items:
        return clusters.on_dask(task, items, str(backend.scheduler), notice)
    if backend.name == "ray" and items:
        return clusters.on_ray(task, items, backend.scheduler, notice)
    return finished_here(task, items, backend.jobs)


def check_reachable(backend: Backend) -> None:
    """A ValueError of one line if the cluster does not answer, or its package is not installed."""
    if backend.name == "dask":
        clusters.check_dask(str(backend.scheduler))
    elif backend.name == "ray":
        clusters.ray_connected(backend.scheduler)
