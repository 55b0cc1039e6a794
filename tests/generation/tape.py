"""A CUDA graph without a GPU: records operations and kernel launches, and repeats them on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from octavo.fp8.kernels.triton_kernels import paged

WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "item", "equal", "scalar_tensor"}
"""Operations that wait for the device or have an output shape that depends on values, and those that create a tensor
from a number on the host, which a GPU waits for (``torch.where`` does with a Python number)."""


def tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


class Recording(TorchDispatchMode):
    """Records operations. Raises for what a graph cannot contain: synchronization, and memory that is neither in
    ``known`` nor created inside, such as numbers from the host."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.known = {x.untyped_storage()._cdata for x in known}
        self.kept_alive: list[Any] = [known]  # so that addresses are not reused
        self.operations: list[Callable[[], Any]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = op.overloadpacket.__name__
        if name in WAITS:
            raise RuntimeError(f"{name} waits for the device")
        inputs = {x.untyped_storage()._cdata for x in tensors((args, kwargs))}
        if inputs - self.known:
            raise RuntimeError(f"{name} reads numbers that come from the host")
        out = op(*args, **kwargs)
        outputs = {x.untyped_storage()._cdata for x in tensors(out)}
        if op._schema.is_mutable:
            self.operations.append(lambda: op(*args, **kwargs))
        elif not outputs <= inputs and "empty" not in name:  # views follow their base
            self.operations.append(lambda: rewrite(out, op(*args, **kwargs)))
        self.known |= outputs
        self.kept_alive.append(out)
        return out


def recording() -> bool:
    """Return whether operations are being recorded."""
    return bool(torch._C._len_torch_dispatch_stack())


def rewrite(out: Any, new: Any) -> None:
    for a, b in zip(tensors(out), tensors(new), strict=True):
        a.copy_(b)


class Tape:
    """A ``Graph`` for the CPU. ``known``: memory that outlives it. Side effects of recording are undone."""

    def __init__(self, known: Callable[[], list[Tensor]]) -> None:
        self.known = known

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        known = self.known()
        before = [x.clone() for x in known]
        self.recording = Recording(known)
        with self.recording, record_launches(self.recording):
            out = work()
        for x, y in zip(known, before, strict=True):
            if not torch.equal(x.flatten().view(torch.uint8), y.flatten().view(torch.uint8)):
                x.copy_(y)
        out.fill_(-7)  # only a replay writes the result
        return out

    def replay(self) -> None:
        for operation in self.recording.operations:
            operation()


@contextmanager
def record_launches(recording: Recording) -> Any:
    def record(*args: Any, **options: Any) -> None:
        recording.operations.append(lambda: start(*args, **options))
        start(*args, **options)

    def waits(self: Tensor, *args: Any) -> Any:  # on a CPU these bypass the dispatcher
        raise RuntimeError("a tensor is read into Python, which waits for the device")

    start = paged.launch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged, "launch", record)
        patch.setattr(Tensor, "tolist", waits)
        patch.setattr(Tensor, "numpy", waits)
        yield
