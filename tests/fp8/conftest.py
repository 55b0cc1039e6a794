"""Shared by the tests of FP8: a mesh of one process; Triton's interpreter looks for the functions that it replaces
once."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@pytest.fixture
def mesh_of_one() -> Iterator[DeviceMesh]:
    """A mesh of this one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


if os.environ.get("TRITON_INTERPRET") == "1":
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
