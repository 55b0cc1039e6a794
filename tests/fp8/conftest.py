"""Shared by the tests of FP8: an empty compiler, a mesh of one process, and a quicker interpreter of Triton's."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests import interpreter


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """No graph of another test, and none left for the next."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def mesh_of_one() -> Iterator[DeviceMesh]:
    """A mesh of this one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


if os.environ.get("TRITON_INTERPRET") == "1":
    interpreter.make_quicker()
