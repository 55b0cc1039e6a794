"""Record the arguments that a launch passes to its kernel, without a GPU and without memory.

The host code of a kernel runs on tensors of the meta device, which have shapes and strides alone; what reaches
``launch`` says types, strides that are 1 or a multiple of 16 (for which Triton compiles forms of their own), constants
and options. So a report describes what a GPU would be given, not what somebody believes it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.arithmetic.formats import E8M0
from octavo.fp8.kernels import layout
from tests.fp8.kernels.forms import Variant

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}
_OPTIONS = ("num_warps", "num_stages", "maxnreg")


@contextmanager
def launches(module: Any) -> Iterator[list[tuple[Any, tuple[Any, ...], dict[str, Any]]]]:
    """(kernel, arguments, options) of each launch that ``module`` makes, none of which runs."""
    recorded: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    with mock.patch.object(
        module, "launch", lambda kernel, grid, *args, **options: recorded.append((kernel, args, options))
    ):
        yield recorded


def variant(name: str, arch: int, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Variant:
    """The form that Triton compiles for this launch. Raises KeyError for a dtype that is not in the table."""
    parameters = inspect.signature(kernel.fn).parameters
    fixed = {key: value for key, value in options.items() if key not in _OPTIONS}
    inputs = {**dict(zip(kernel.arg_names, args, strict=False)), **fixed}
    loose = (kernel.kwargs if hasattr(kernel, "kwargs") else vars(kernel)).get("do_not_specialize") or ()
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    for key, value in inputs.items():
        if "constexpr" in str(parameters[key].annotation) or value is None:
            constants[key] = value
        elif isinstance(value, Tensor):
            signature[key] = f"*{_TYPES[value.dtype]}"
        elif isinstance(value, int):
            if key not in loose and value == 1:
                constants[key] = 1
            else:
                signature[key] = "i32:16" if key not in loose and value % 16 == 0 else "i32"
        elif isinstance(value, float):
            signature[key] = "fp32"
        else:  # a tensor descriptor
            box = ", ".join(map(str, value.block_shape))
            signature[key] = f"tensordesc<{_TYPES[value.base.dtype]}[{box}]>"
    run = {key: options[key] for key in _OPTIONS if key in options}
    return Variant(name, kernel, signature, constants, architectures=(arch,), **run)


def operand(spec: CastSpec, contract: int, *shape: int) -> Quantized:
    """A matrix [rows, columns] or weights [E, N, K], as this project's casts write it for a contraction of dimension
    ``contract``; on the meta device."""
    *experts, rows, cols = shape
    blocks = layout.grid_shape(rows, cols, spec)
    dtype = E8M0 if spec.scale == "e8m0" else torch.float32
    scale = torch.empty(*experts, *blocks, dtype=dtype, device="meta")
    if experts:
        sizes = layout.padded_sizes(rows, cols, spec, contract)
        codes = torch.empty(*experts, *sizes, dtype=spec.fmt.dtype, device="meta")
        return Quantized(codes[:, :rows, :cols] if contract == 1 else codes[:, :cols, :rows].mT, scale, spec)
    codes = layout.codes_buffer(rows, cols, spec, contract, torch.device("meta"))[1]
    return layout.reorder_scales(Quantized(codes, scale, spec), contract)
