"""The kernels into which Inductor fuses a graph on a GPU, found on a machine without one.

Inductor decides which operations share a kernel before it generates code. It asks for the kind of device and for a few
of its properties, but not for the device: with the properties of an H200 it fuses a graph as it would there. The
backward of a norm shows the difference: dx sums along rows and dw along columns. On a CPU these are two kernels, on a
GPU one (``triton.mix_order_reduction``, on by default).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

#: what an H200 reports
_HINTS = {
    "major": 9,
    "multi_processor_count": 132,
    "warp_size": 32,
    "regs_per_multiprocessor": 2**16,
    "max_threads_per_multi_processor": 2048,
}
_DEVICE: dict[str, int | str] = {**_HINTS, "minor": 0, "name": "NVIDIA H200", "gcnArchName": ""}


@contextmanager
def h200() -> Iterator[None]:
    """Let Inductor fuse graphs of CUDA tensors as on an H200; no kernel is generated or run.

    Conditions on sizes for sharing a kernel by both reductions of a norm are skipped, so that a small graph is fused as
    the same graph with many tokens (from 4,096 on, twice as many as columns, which 8,192 x 4,096 fulfils).
    """
    from torch._inductor import config, scheduler
    from torch._inductor.runtime.hints import DeviceProperties
    from torch._subclasses import fake_tensor

    answers = {
        "get_device_properties": SimpleNamespace(**_DEVICE),
        "get_device_capability": (_DEVICE["major"], _DEVICE["minor"]),
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, mock.Mock(return_value=answer)))
        hints = DeviceProperties(type="cuda", index=0, cc=90, **_HINTS)
        stack.enter_context(mock.patch.object(DeviceProperties, "create", mock.Mock(return_value=hints)))
        stack.enter_context(mock.patch.object(scheduler, "has_triton", mock.Mock(return_value=True)))
        stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context", mock.Mock()))
        stack.enter_context(config.patch({"triton.mix_order_reduction_non_strict_mode": True}))
        yield


def move_to_gpu(module: torch.fx.GraphModule, inputs: Sequence[object], mode: FakeTensorMode) -> list[object]:
    """Give a graph, which is changed, the device of an H200, and return its inputs as fake tensors of that device.
    Call it within :func:`h200`."""
    from torch._inductor.compile_fx import fake_tensor_prop

    with mode:
        fake = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") if isinstance(x, Tensor) else x
            for x in inputs
        ]
    for node in module.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
    fake_tensor_prop(module, fake)
    return fake
