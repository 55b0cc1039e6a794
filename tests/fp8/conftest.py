"""Shared by the tests of FP8: a mesh of one process; collecting cycles looks at what a test made, not at everything
that was imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@pytest.fixture(scope="module", autouse=True)
def _nothing_older() -> None:
    """The accountant of saved bytes, and many tests of what dies when, call ``gc.collect``. With torch, transformers
    and all tests in one process that takes half a second; without what was there before the module, a few
    milliseconds."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def mesh_of_one() -> Iterator[DeviceMesh]:
    """A mesh of this one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()
