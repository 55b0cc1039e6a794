"""Triton's interpreter, in which kernels run on a CPU."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any


@cache
def make_quicker() -> None:
    """Let it look once for the functions that it replaces."""
    from triton.runtime import interpreter

    is_builtin, patch_attr = interpreter.tl.core.is_builtin, interpreter._patch_attr

    @cache
    def builtins_of(place: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(place) if is_builtin(member)]

    def patch_builtin(place: Any, builder: Any, scope: Any) -> None:
        """As the interpreter's own, which walks through all members of ``triton.language`` at every call of a device
        function, though the launch has replaced them already: a third of what a kernel costs there."""
        names = builtins_of(place)
        if names and is_builtin(getattr(place, names[0])):  # they are replaced and given back together
            for name in names:
                patch_attr(place, name, getattr(place, name), builder, scope)

    interpreter._patch_builtin = patch_builtin
