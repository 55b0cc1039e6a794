"""A CUDA graph without a GPU: operations and launches of kernels are noted once, and run again on the same memory."""

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
"""Operations that wait for the device, or whose result has a shape that only the device knows; and what makes a tensor
of a number on the host, which a GPU waits for (``torch.where`` does with a Python number)."""


def tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


class Recording(TorchDispatchMode):
    """Notes what is done, and refuses what no graph could hold: a wait, and memory that nobody has ``known`` before or
    made inside, such as numbers from the host."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.known = {x.untyped_storage()._cdata for x in known}
        self.held: list[Any] = [known]  # so that no storage gets another's address
        self.done: list[Callable[[], Any]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = op.overloadpacket.__name__
        if name in WAITS:
            raise RuntimeError(f"{name} waits for the device")
        given = {x.untyped_storage()._cdata for x in tensors((args, kwargs))}
        if given - self.known:
            raise RuntimeError(f"{name} reads numbers that come from the host")
        out = op(*args, **kwargs)
        mine = {x.untyped_storage()._cdata for x in tensors(out)}
        if op._schema.is_mutable:
            self.done.append(lambda: op(*args, **kwargs))
        elif not mine <= given and "empty" not in name:  # else a view, which follows its base, or no values
            self.done.append(lambda: rewrite(out, op(*args, **kwargs)))
        self.known |= mine
        self.held.append(out)
        return out


def recording() -> bool:
    """Whether operations are noted now."""
    return bool(torch._C._len_torch_dispatch_stack())


def rewrite(out: Any, new: Any) -> None:
    for a, b in zip(tensors(out), tensors(new), strict=True):
        a.copy_(b)


class Tape:
    """A ``Graph`` of a CPU; ``known``: the memory that outlives it. What a recording leaves behind is undone."""

    def __init__(self, known: Callable[[], list[Tensor]]) -> None:
        self.known = known

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        known = self.known()
        before = [x.clone() for x in known]
        self.recording = Recording(known)
        with self.recording, launches_noted(self.recording):
            out = work()
        for x, y in zip(known, before, strict=True):
            if not torch.equal(x.flatten().view(torch.uint8), y.flatten().view(torch.uint8)):
                x.copy_(y)
        out.fill_(-7)  # only a replay says anything
        return out

    def replay(self) -> None:
        for again in self.recording.done:
            again()


@contextmanager
def launches_noted(recording: Recording) -> Any:
    def noted(*args: Any, **options: Any) -> None:
        recording.done.append(lambda: start(*args, **options))
        start(*args, **options)

    def waits(self: Tensor, *args: Any) -> Any:  # on a CPU these ask no dispatcher
        raise RuntimeError("a tensor is read into Python, which waits for the device")

    start = paged.launch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged, "launch", noted)
        patch.setattr(Tensor, "tolist", waits)
        patch.setattr(Tensor, "numpy", waits)
        yield
