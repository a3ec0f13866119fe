"""The table of serving architectures, and the loading of user policies.

An architecture is a name, `pdv`, or a class in a user's file, `path/to/mine.py:Mine`. What a command must know before a
run (lanes, whether it drafts, which options apply) is declared on the class (`Policy`). Measurements exist only for
named architectures; a user's policy has a base architecture: the one it derives from, or whose lanes it has.
"""

from __future__ import annotations

import difflib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import FrameType
from typing import Any, TypeGuard

from pdvsim.sim.reading import error_text, read_bytes

_PACKAGE = __name__
_OWN_MODULE = "pdvsim_own_"

# from the one with the fewest parts that can go wrong: models, then lanes, then rules that switch at run time
ARCHITECTURES: dict[str, str] = {  # module and class
    "autoregressive": "colocated:Autoregressive",
    "baseline": "baseline:Baseline",
    "colocated": "colocated:Colocated",
    "pd": "pd:PD",
    "pdv": "pdv:PDV",
    "pdv-unified": "unified:Unified",
    "pdv-hybrid": "hybrid:Hybrid",
    "adaptive": "hybrid:Adaptive",
    "pdv-ahead": "ahead:Ahead",
}
ARCHS = tuple(ARCHITECTURES)
USUAL_ARCHS = ("autoregressive", "colocated", "pd", "pdv")  # what a command compares where none is named
SERVED_ARCHS = USUAL_ARCHS[:2]  # of these, what other engines than pdvsim's own can serve on one GPU


class OwnArch(str):
    """The name of an architecture that is a class at hand, not one to be found by its name."""

    policy: type[Any]

    def __new__(cls, policy: type[Any], name: str | None = None) -> OwnArch:
        self = super().__new__(cls, name or policy.__name__)
        self.policy = policy
        return self

    def __reduce__(self) -> Any:
        return OwnArch, (self.policy, str(self))


class PolicyError(ValueError):
    """A policy file of the user's failed; the text names its line and the exception, which is the cause."""


def named(arch: str | type[Any]) -> str:
    """The name of an architecture given by its name or as a class: `file:Class`, where it can be found that way."""
    if isinstance(arch, str):
        return arch
    if not is_policy(arch):
        raise ValueError(f"arch is a name or a class derived from Policy, got {arch!r}")
    return OwnArch(arch)


def is_policy(candidate: Any) -> TypeGuard[type[Any]]:
    """Return whether it is a class derived from `Policy`, without importing that."""
    ancestors = candidate.__mro__[1:] if inspect.isclass(candidate) else ()
    return any((base.__module__, base.__name__) == (f"{_PACKAGE}.base", "Policy") for base in ancestors)


def file_of(arch: str) -> str | None:
    """The file that an architecture of the user's own is in."""
    return None if arch in ARCHITECTURES or isinstance(arch, OwnArch) else arch.rpartition(":")[0] or None


def policy_of(arch: str) -> type[Any]:
    """The policy of an architecture, a class derived from `Policy`; a ValueError of one line if there is none."""
    if isinstance(arch, OwnArch):
        return arch.policy
    if arch in ARCHITECTURES:
        module, _, name = ARCHITECTURES[arch].partition(":")
        policy: type[Any] = getattr(import_module(f"{_PACKAGE}.{module}"), name)
        return policy
    path, colon, name = arch.rpartition(":")
    if not colon or not path.endswith(".py"):
        close = difflib.get_close_matches(arch, ARCHS, n=1, cutoff=0.5)
        guess = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(f"unknown arch {arch!r}{guess}; known: {', '.join(ARCHS)}, or your own as file.py:Class")
    try:
        source = read_bytes(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"arch {arch}: cannot read {path}: {error_text(error)}") from None
    return _loaded(str(Path(path).resolve()), sha256(source).hexdigest(), name)


def archs_where(fact: Callable[[type[Any]], bool]) -> list[str]:
    """The named architectures whose policy has it."""
    return [arch for arch in ARCHS if fact(policy_of(arch))]


@cache
def _loaded(path: str, digest: str, name: str) -> type[Any]:
    """A class of a file with that content."""
    module_name = f"{_OWN_MODULE}{Path(path).stem}_{digest[:12]}"
    spec = spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[module_name] = module  # where dataclasses and pickle look for it
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        line = error.lineno if isinstance(error, SyntaxError) else _own_line(error)
        where = f"{path}:{line}" if line else f"{path}:{name}"
        raise ValueError(f"arch {where}: {_message(error)}") from error
    policy: Any = getattr(module, name, None)
    if not is_policy(policy):
        own = [c.__name__ for c in vars(module).values() if is_policy(c) and c.__module__ == module_name]
        there = f"; it has {', '.join(own)}" if own else ""
        raise ValueError(f"{path} has no policy {name}, a class derived from Policy{there}")
    return policy


@contextmanager
def own_errors(arch: str) -> Iterator[None]:
    """Errors of a policy from a user's file become a PolicyError; those of any other architecture stay as they are."""
    path = file_of(arch)
    try:
        yield
    except PolicyError:
        raise
    except Exception as error:
        line = None if path is None else _own_line(error)
        ours = isinstance(error, MemoryError) or (line is None and isinstance(error, ValueError | OSError))
        if path is None or ours:  # what is refused, or cannot be read, before the policy runs
            raise
        where = arch if line is None else f"{path}:{line}"
        raise PolicyError(f"{where}: {_message(error)}") from error


def _message(error: Exception) -> str:
    """Return an error as one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _own_line(error: BaseException) -> int | None:
    """The line of a user's policy file that an error passed through last, or where a process of it waits."""
    waits = None
    chained: BaseException | None = error
    while chained is not None:  # SimPy raises a copy, with the error of the process as its cause
        passed = None
        for frame, line in traceback.walk_tb(chained.__traceback__):
            if _is_own(frame):
                passed = line
            process = getattr(frame.f_locals.get("self"), "_generator", None)
            while process is not None:  # a process that yields what is no event is not on the stack
                inner = getattr(process, "gi_frame", None)
                waits = inner.f_lineno if inner is not None and _is_own(inner) else waits
                process = getattr(process, "gi_yieldfrom", None)
        if passed is not None:
            return passed
        chained = chained.__cause__ or chained.__context__
    return waits


def _is_own(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(_OWN_MODULE)


def base_arch(arch: str) -> str:
    """The named architecture whose lanes, options and needs an architecture shares: itself, or its nearest ancestor."""
    if arch in ARCHITECTURES:
        return arch
    own = policy_of(arch)
    for base in own.__mro__:
        for name in ARCHS:
            if base is policy_of(name):
                return name
    if not own.speculates:
        return "autoregressive"
    lanes = {own.prefill_lane, own.draft_lane, own.verify_lane}
    return "colocated" if len(lanes) == 1 else "pd" if own.draft_lane == own.verify_lane else "pdv"
