"""Triton kernels run in its interpreter here, on the CPU; it must be asked for before they are imported."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="module")
def quick_interpreter() -> Iterator[None]:
    """The language is patched once for all functions of a module that kernels call, not at each of their calls."""
    from triton.runtime import interpreter

    patched = set[str]()

    def call(function: Any, *args: object, **kwargs: object) -> object:
        if function.fn.__module__ not in patched:
            patched.add(function.fn.__module__)
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "__call__", call)
        yield
