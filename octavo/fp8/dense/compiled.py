"""The casts and GEMMs of compiled graphs: operators registered with ``torch.library`` in namespace ``octavo``.

``torch.compile`` cannot trace kernels, caches and the selection of backends. It traces these operators instead, each
with a fake implementation that returns the shapes of the results::

    octavo::cast(x, row, col)       -> codes and scales of x [M, N] for a GEMM that contracts dimension 1 (row), and for
                                       one that contracts dimension 0 (col); none for an empty cast
    octavo::linear(x, weight, ...)  -> y, from the row codes of x; its autograd formula is the three GEMMs' backward
    octavo::dgrad(dy codes, weight) -> dx
    octavo::wgrad(dy codes, x codes, weight) -> dw; the weight tells its layer, shape and dtype
    octavo::count(y, weight, rows)  -> y, the output of a module in high precision, which is counted; its gradient is
                                       passed by octavo::count_gradient
    octavo::unwritten(x)            -> nothing; raises while a compiler traces an x that was written to

The operators of blocks that quantize their output are in :mod:`octavo.fp8.blocks.compiled`. These blocks attach the
codes to the traced tensor for the next layers (:func:`attach_codes`), in Python and not as part of the graph.

Casts are separate operators so that equal casts run once: q, k and v cast the same input the same way, and AOTAutograd
removes the duplicates as common subexpressions. The same holds for gate and up.

Three rules make this correct under a compiler:

* Codes cross the graph as plain contiguous ``uint8`` buffers in the padded layout of
  :mod:`octavo.fp8.kernels.layout`, and scales as their buffers. Their sizes depend only on the input's sizes, for
  every backend, and no kernel that Inductor generates ever reads or stores FP8 (a transposed FP8 store in a generated
  Triton kernel sometimes gave NaN: pytorch#188841).
* Codes of weights are never returned. Inductor may write a later result into a buffer that it considers dead, which
  would corrupt a cache. The operators look codes up by the weight's storage
  (:func:`octavo.fp8.weights.cache.codes_of`), and cast the weight if no known layer has it or a CUDA graph is being
  captured.
* No argument identifies a layer: a short text describes backends and casts, the same for all layers with a recipe, so
  that the blocks of a model share one compiled graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from octavo.fp8.arithmetic.cast import CastSpec, Quantized, check_castable
from octavo.fp8.dense import gemms, graph_counts
from octavo.fp8.dense.graph_arguments import (
    fake_pack,
    pack_pair,
    parse_gemm,
    parse_key,
    parse_operand,
    unpack,
)
from octavo.fp8.dense.graph_counts import gradient_needs
from octavo.fp8.kernels.registry import Backend
from octavo.fp8.observe import recorder
from octavo.fp8.weights.cache import WeightSlice, codes_of

# --- the operators ----------------------------------------------------------------------------------------------------

# Inductor copies an operand that is not written yet for every operator with exact strides: a norm before q, k and v was
# written four times.
_ANY_LAYOUT = (torch.Tag.flexible_layout,)
_lib = torch.library.Library("octavo", "DEF")
_lib.define("unwritten(Tensor x) -> ()")
_lib.define("cast(Tensor x, str row, str col) -> (Tensor, Tensor, Tensor, Tensor)", tags=_ANY_LAYOUT)
_lib.define(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor row, Tensor row_scale, Tensor col, Tensor col_scale, "
    "str key, int needs) -> Tensor",
    tags=_ANY_LAYOUT,
)
_lib.define("dgrad(Tensor dy, Tensor? dy_scale, Tensor weight, SymInt tokens, ScalarType dtype, str key) -> Tensor")
_lib.define(
    "wgrad(Tensor dy, Tensor? dy_scale, Tensor x, Tensor? x_scale, Tensor weight, SymInt tokens, str key) -> Tensor"
)
_lib.define("count(Tensor y, Tensor weight, SymInt rows, int needs) -> Tensor")
_lib.define("count_gradient(Tensor dy, Tensor weight, SymInt rows, int needs) -> Tensor")


def _cast(x: Tensor, row: str, col: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if row and col and row.split(":")[0] == col.split(":")[0]:
        (backend, row_spec), (_, col_spec) = parse_operand(row), parse_operand(col)
        return pack_pair(x, *backend.quantize_both(x, row_spec, col_spec))
    codes: list[Quantized | None] = [None, None]
    for contract, text in ((1, row), (0, col)):
        if text:
            backend, spec = parse_operand(text)
            codes[1 - contract] = backend.quantize(x, spec, contract)
    return pack_pair(x, *codes)


def _cast_fake(x: Tensor, row: str, col: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if row or col:
        check_castable(x)
    return (*fake_pack(x, row, 1), *fake_pack(x, col, 0))


def _unwritten_fake(x: Tensor) -> None:
    """Raise if x was written to. This runs while Dynamo traces, when tensors have versions; later graphs have no
    versions and do not contain this operator."""
    if not x.is_inference() and x._version:  # tensors of inference mode have no version
        raise RuntimeError(
            "the output of a norm was modified in place before the FP8 layers that use its codes; compiled graphs do "
            "not support this. Use fuse: off, or train.compile: false"
        )


def get_weight_codes(
    weight: Tensor, spec: CastSpec, backend: Backend, forward: bool, shared: bool = False
) -> Quantized:
    """Return the codes of a weight for fwd or dgrad, from the cache of its layer or by a new cast.

    ``shared`` is True if dgrad multiplies by the codes of the forward.
    """
    codes, cast = codes_of(weight), partial(backend.quantize, contract=1 if forward or shared else 0)
    if codes is None:
        return cast(weight.detach(), spec)
    return codes.get(weight, WeightSlice(), spec, backend, forward, cast, shared)


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, row: Tensor, row_scale: Tensor, col: Tensor, col_scale: Tensor,
    key: str, needs: int,
) -> Tensor:  # fmt: skip
    """Return y [M, N] in the dtype of x. Only the backward uses ``col`` and ``col_scale``, only counters ``needs``."""
    return multiply_fwd(x, row, row_scale, weight, bias, x.dtype, key, needs)


def multiply_fwd(
    x: Tensor, row: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, key: str, needs: int
) -> Tensor:
    """Return y [M, N] in ``dtype``, from the row codes of x [M, K], or from x itself if fwd runs in high precision."""
    if recorder.is_active():
        graph_counts.report_forward(weight, key, x.shape[0], needs)
    fwd = parse_key(key).fwd
    if not fwd:
        return gemms.high_linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    backend, a, b = parse_gemm(fwd)
    x_q = unpack(row, scale, x.shape[0], weight.shape[1], a, 1)
    return backend.gemm_fwd(x_q, get_weight_codes(weight, b, backend, True), dtype, bias).contiguous()


def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _dgrad(dy: Tensor, dy_scale: Tensor | None, weight: Tensor, tokens: int, dtype: torch.dtype, key: str) -> Tensor:
    """Return dx [M, K] in ``dtype``, from the row codes of dy, or from dy [M, N] itself in high precision."""
    if recorder.is_active():
        graph_counts.report_backward("dgrad", weight, key, tokens)
    parts = parse_key(key)
    if dy_scale is None:
        return gemms.high_mm(dy, weight.to(dy.dtype)).to(dtype)
    backend, a, b = parse_gemm(parts.dgrad)
    dy_q = unpack(dy, dy_scale, tokens, weight.shape[0], a, 1)
    shared = parts.fwd != "" and parse_gemm(parts.fwd)[2] == b
    return backend.gemm_dgrad(dy_q, get_weight_codes(weight, b, backend, False, shared), dtype).contiguous()


def _dgrad_fake(
    dy: Tensor, dy_scale: Tensor | None, weight: Tensor, tokens: int, dtype: torch.dtype, key: str
) -> Tensor:
    return dy.new_empty(tokens, weight.shape[1], dtype=dtype)


def _wgrad(
    dy: Tensor, dy_scale: Tensor | None, x: Tensor, x_scale: Tensor | None, weight: Tensor, tokens: int, key: str
) -> Tensor:
    """Return dw [N, K] in the dtype of the weight, from the column codes of dy and x, or from dy [M, N] and x [M, K]
    themselves in high precision. Of the weight only its layer, shape and dtype are read."""
    if recorder.is_active():
        graph_counts.report_backward("wgrad", weight, key, tokens)
    if dy_scale is None or x_scale is None:
        return gemms.high_mm(dy.t(), x).to(weight.dtype)
    backend, a, b = parse_gemm(parse_key(key).wgrad)
    dy_q = unpack(dy, dy_scale, tokens, weight.shape[0], a, 0)
    x_q = unpack(x, x_scale, tokens, weight.shape[1], b, 0)
    return backend.gemm_wgrad(dy_q, x_q, weight.dtype).contiguous()


def _wgrad_fake(
    dy: Tensor, dy_scale: Tensor | None, x: Tensor, x_scale: Tensor | None, weight: Tensor, tokens: int, key: str
) -> Tensor:
    return weight.new_empty(weight.shape)


# --- autograd ---------------------------------------------------------------------------------------------------------


def _save_for_backward(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    """Save the codes of x in wgrad layout (x itself if wgrad stays in high precision) and the weight."""
    x, weight, bias, _, _, col, col_scale, key, _ = inputs
    needs_x, needs_w, needs_b = ctx.needs_input_grad[:3]
    saved: tuple[Tensor, ...] = (weight,) if needs_x or needs_w else ()
    if needs_w:
        saved += (col, col_scale) if parse_key(key).wgrad else (x,)
    ctx.save_for_backward(*saved)
    ctx.key, ctx.needs, ctx.x_dtype = key, (needs_x, needs_w, needs_b), x.dtype
    ctx.b_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (needs_x, needs_w, needs_b), parts, ops = ctx.needs, parse_key(ctx.key), torch.ops.octavo
    saved = list(ctx.saved_tensors)
    weight = saved.pop(0) if saved else None
    row, col = parts.operand("dgrad", 0) if needs_x else "", parts.operand("wgrad", 0) if needs_w else ""
    tokens = dy.shape[0]
    dx = dw = db = None
    if row or col:
        row_q, row_s, col_q, col_s = ops.cast(dy, row, col)
    if needs_x:
        a, a_scale = (row_q, row_s) if row else (dy, None)
        dx = ops.dgrad(a, a_scale, weight, tokens, ctx.x_dtype, ctx.key)
    if needs_w:
        a, a_scale = (col_q, col_s) if col else (dy, None)
        dw = ops.wgrad(a, a_scale, *(saved if col else (saved[0], None)), weight, tokens, ctx.key)
    if needs_b:
        db = dy.sum(0, dtype=torch.float32).to(ctx.b_dtype)
    return dx, dw, db, None, None, None, None, None, None


def _mark_codes_non_differentiable(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    ctx.mark_non_differentiable(*output)


def refuse_second_derivative(ctx: Any, *grads: Tensor) -> NoReturn:
    raise RuntimeError(
        "The gradient of an FP8 GEMM was differentiated again, but rounding to FP8 has no second derivative. Remove "
        "create_graph=True, or exclude this layer from FP8 by a rule (recipe: off)."
    )


def _cast_backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
    return None, None, None


# --- modules in high precision ----------------------------------------------------------------------------------------


def _count(y: Tensor, weight: Tensor, rows: int, needs: int) -> Tensor:
    if recorder.is_active():
        graph_counts.report_module(weight, ("fwd",), rows)
    return y.clone()


def _count_gradient(dy: Tensor, weight: Tensor, rows: int, needs: int) -> Tensor:
    if recorder.is_active():
        flags = (("dgrad", graph_counts.DGRAD), ("wgrad", graph_counts.WGRAD))
        graph_counts.report_module(weight, [gemm for gemm, flag in flags if needs & flag], rows)
    return dy.clone()


def _save_owner(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.rows, ctx.gradients = inputs[2:]


def _pass_gradient(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.octavo.count_gradient(dy, *ctx.saved_tensors, ctx.rows, ctx.gradients), None, None, None


for _name, _run, _fake in (
    ("cast", _cast, _cast_fake),
    ("linear", _linear, _linear_fake),
    ("dgrad", _dgrad, _dgrad_fake),
    ("wgrad", _wgrad, _wgrad_fake),
    ("count", _count, lambda y, *rest: torch.empty_like(y)),
    ("count_gradient", _count_gradient, lambda dy, *rest: torch.empty_like(dy)),
    ("unwritten", lambda x: None, _unwritten_fake),
):
    _lib.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"octavo::{_name}", _fake, lib=_lib)
torch.library.register_autograd("octavo::cast", _cast_backward, setup_context=_mark_codes_non_differentiable, lib=_lib)
torch.library.register_autograd("octavo::count", _pass_gradient, setup_context=_save_owner, lib=_lib)
torch.library.register_autograd("octavo::linear", _backward, setup_context=_save_for_backward, lib=_lib)
torch.library.register_autograd("octavo::dgrad", refuse_second_derivative, lib=_lib)
torch.library.register_autograd("octavo::wgrad", refuse_second_derivative, lib=_lib)


# --- the layer as a compiler traces it --------------------------------------------------------------------------------


def forward(layer: Any, x: Tensor) -> Tensor:
    """Run the forward of an FP8 layer while a compiler traces it: the same three GEMMs, as operators of one graph.

    Values and gradients equal the eager path bit for bit, and ``fp8.count_gemms`` counts what it counts there
    (:mod:`octavo.fp8.dense.graph_counts`). ``fp8.health`` reads operands, which a graph does not show: it raises.
    Collect health in steps under ``torch.compiler.set_stance("force_eager")``, as Octavo's training loop does.

    Delayed scaling is not compiled: every forward writes its histories, which must not happen twice when a compiler
    reorders or recomputes. FP8 weights are not compiled either, because their codes are outside of the graph. Such a
    layer breaks the graph, and ``fullgraph=True`` raises an error.
    """
    if layer._fp8_param:
        torch._dynamo.graph_break(
            "the codes of an FP8 weight (param: true, or frozen) are outside of the compiled graph. Use torch.compile "
            "without fullgraph=True, or param=False."
        )
        return _eager(layer, x)
    if layer._site.scaling is not None:
        torch._dynamo.graph_break(
            "delayed scaling writes amax histories in every forward and runs outside of the compiled graph. Use "
            "another recipe (tensorwise scales by the current amax), or torch.compile without fullgraph=True."
        )
        return _eager(layer, x)
    return linear(x, layer.weight, layer.bias, layer._site.key)


@torch._disable_dynamo
def _eager(layer: Any, x: Tensor) -> Tensor:
    return layer.forward(x)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, key: str) -> Tensor:
    """Return x [..., K] @ weight [N, K].T + bias [N], as [..., N]; ``key`` is the text of :func:`describe`.

    The result has the dtype of x (autocast's under autocast) and is rounded once. Raises RuntimeError if the shapes do
    not match.
    """
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise RuntimeError(
            f"This FP8 linear layer expects inputs with {weight.shape[1]} features (its weight is "
            f"{list(weight.shape)}), got an input of shape {list(x.shape)}."
        )
    low = x.to(traced_compute_dtype(x.device.type, x.dtype))
    x_MK, parts = as_matrix(low), parse_key(key)
    # The backward needs x only if the weight is trained, and only its codes in wgrad layout.
    needs_wgrad = weight.requires_grad and torch.is_grad_enabled()
    needs = gradient_needs(x, weight)
    carrier, codes = get_input_codes(x, x_MK, parts.operand("fwd", 0), parts.operand("wgrad", 1) if needs_wgrad else "")
    if parts.fwd and (parts.wgrad or not needs_wgrad):
        x_MK = carrier  # no GEMM reads x itself
    y_MN = torch.ops.octavo.linear(x_MK, weight, bias, *codes, key, needs)
    return y_MN.view(*x.shape[:-1], weight.shape[0])


def as_matrix(x: Tensor) -> Tensor:
    """Return x [..., K] as [M, K]."""
    return x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)


def traced_compute_dtype(device: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of GEMMs for an input of ``dtype``, as :func:`octavo.fp8.dense.inputs.compute_dtype` does."""
    # Dynamo of torch 2.11 cannot trace is_autocast_available; meta is the only device without autocast.
    if dtype != torch.float64 and device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return dtype


_CODES_ATTRIBUTE = "_octavo_codes"
_graph_numbers = itertools.count()


def attach_codes(
    y: Tensor, dtype: torch.dtype, row: str, col: str, codes: tuple[Tensor, ...], carrier: Tensor | None
) -> None:
    """Attach the codes of ``y`` in ``dtype`` under ``row`` and ``col``, for layers that are traced with y itself.

    ``carrier`` [M, K] has y's gradient and not its values: layers that multiply only the codes take it instead of y,
    which is then never written. These layers must be in the same graph, where a write to y before them raises an error.
    After a graph break such a write could not be detected, and y is cast again.
    """
    setattr(y, _CODES_ATTRIBUTE, (dtype, row, col, codes, carrier, graph_number()))


_Attached = tuple[torch.dtype, str, str, tuple[Tensor, ...], "Tensor | None", str]


def get_input_codes(x: Tensor, x_MK: Tensor, row: str, col: str) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return a tensor with the gradient of ``x_MK``, and its codes and scales. ``x_MK`` is x in the dtype of the GEMMs.
    The codes are those attached to x if they match, otherwise from a cast."""
    attached: _Attached | None = getattr(x, _CODES_ATTRIBUTE, None)
    if attached is not None:
        dtype, attached_row, attached_col, codes, carrier, graph = attached
        if dtype == x_MK.dtype and attached_row == row and col in ("", attached_col) and graph == graph_number():
            torch.ops.octavo.unwritten(x.detach())
            return x_MK if carrier is None else carrier, codes
    return x_MK, torch.ops.octavo.cast(x_MK.detach(), row, col)


def graph_number() -> str:
    """Return the number of the graph that is being traced, a constant in it; empty outside of a trace."""
    context: Any = torch._guards.TracingContext.try_get()
    if context is None:
        return ""
    return str(context.__dict__.setdefault("octavo_number", next(_graph_numbers)))


# As torch.compiler.assume_constant_result, without importing torch._dynamo before the first call.
graph_number._dynamo_marked_constant = True  # type: ignore[attr-defined]
