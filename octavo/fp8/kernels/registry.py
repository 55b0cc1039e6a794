"""The registry of backends, which selects a backend for each operation.

A backend is a set of kernels: casts, GEMMs and others. :func:`select` returns the first backend in order of preference
that supports the operation, together with the reason for the choice and for each rejection. If a backend is requested
by name and does not support the operation, it raises an error instead of falling back silently. A selection is made
once, and the backward uses it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.base.wording import did_you_mean
from octavo.fp8.arithmetic.adamw import Hyper, Piece
from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.arithmetic.errors import Fp8Error
from octavo.fp8.arithmetic.moments import MaxOverRanks
from octavo.fp8.arithmetic.recipe import Recipe
from octavo.fp8.kernels import layout
from octavo.fp8.kernels.groups import Groups

GEMMS = (*layout.CONTRACTED, *(f"grouped_{op}" for op in layout.CONTRACTED))
OPS = ("quantize", "dequantize", *GEMMS, "rmsnorm", "swiglu", "swiglu_backward", "adamw")
"""The operations of backends: casts, the three GEMMs with their casts, the same GEMMs for groups of experts,
elementwise layers with quantized outputs, and the optimizer step."""


class BackendError(Fp8Error, RuntimeError):
    """No backend supports the operation. The message lists the reason for each backend."""


class Backend:
    """A set of kernels. To add a backend, subclass this, override the supported methods and ``register`` an instance.

    Operands of GEMMs are two-dimensional, and scales are dequantization multipliers. Casts return the logical shape of
    their input in any memory layout; :mod:`octavo.fp8.kernels.layout` defines the layout for a GEMM that contracts
    dimension ``contract``. :mod:`octavo.fp8.kernels.groups` defines groups of experts. M, N, K are the numbers of
    tokens, outputs and inputs; R is the number of rows of all experts, and E the number of experts.
    """

    name: str
    pads_results = False
    """True if its GEMMs pad results to a multiple of 16 columns and copy the real columns."""

    def version(self) -> str:
        """Return the version that measurements of this backend depend on, such as ``"triton 3.6.0"``."""
        return f"torch {torch.__version__}"

    def why_not_auto(self, device: torch.device) -> str | None:
        """Return why "auto" does not select this backend on this device, or None if it may."""
        return None

    def supports(
        self, op: str, what: CastSpec | Recipe, device: torch.device, shape: Sequence[int | None] | None
    ) -> str | None:
        """Return why this backend does not support ``op``, or None if it does.

        Args:
            op: one of :data:`OPS`.
            what: a CastSpec for quantize and dequantize, otherwise the Recipe.
            device: where the operation will run.
            shape: shape of x for a cast, (M, N, K) for a GEMM. Unknown sizes, such as the tokens of a plan, are None;
                None for the whole shape if no size is known.
        """
        return f"it has no {op}"

    def quantize(self, x: Tensor, spec: CastSpec, contract: int = 1) -> Quantized:
        """Cast x as ``octavo.fp8.arithmetic.cast.quantize``, bit for bit, for a GEMM that contracts dimension
        ``contract`` of x as a matrix [product of leading dimensions, last]."""
        raise self._missing("quantize")

    def quantize_both(self, x: Tensor, row: CastSpec, col: CastSpec) -> tuple[Quantized, Quantized]:
        """Cast x under ``row`` for a contraction of dimension 1, and under ``col`` for one of dimension 0, reading x
        once if the backend can."""
        return self.quantize(x, row, 1), self.quantize(x, col, 0)

    def quantize_with_scale(
        self, x: Tensor, scale: Tensor, spec: CastSpec, amax: Tensor | None = None, contract: int = 1
    ) -> Quantized:
        """Cast x as ``octavo.fp8.arithmetic.cast.quantize_with_scale``, bit for bit."""
        raise self._missing("quantize")

    def quantize_both_with_scale(
        self, x: Tensor, scale: Tensor, spec: CastSpec, amax: Tensor | None = None
    ) -> tuple[Quantized, Quantized]:
        """Cast x once with the given scale, and return the codes in the layouts for contractions of dimensions 1 and 0,
        reading x once if the backend can."""
        return self.quantize_with_scale(x, scale, spec, amax, 1), self.quantize_with_scale(x, scale, spec, amax, 0)

    def dequantize(self, q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
        """Decode q as ``octavo.fp8.arithmetic.cast.dequantize``, bit for bit."""
        raise self._missing("dequantize")

    def reorder_scales(self, q: Quantized, contract: int) -> Quantized:
        """Return q with its scales in the order for GEMMs that contract ``contract``, for codes that many GEMMs
        read."""
        return q if q.data.dim() != 2 else layout.reorder_scales(q, contract)

    def copy_for_gemm(self, q: Quantized, contract: int) -> Quantized:
        """Return q with both its codes and its scales in the layout for GEMMs that contract ``contract``."""
        fits = q.data.dim() == 2 and layout.is_k_major(q, contract)
        return self.reorder_scales(q if fits else self.copy_to_layout(q, contract), contract)

    def copy_to_layout(self, q: Quantized, contract: int) -> Quantized:
        """Copy the codes of q [rows, columns], or of the weights of experts [E, N, K], into the layout for a
        contraction of dimension ``contract`` of each matrix."""
        return layout.copy_to_layout(q, contract)

    def gemm_fwd(self, x_q: Quantized, w_q: Quantized, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """Return y [M, N] = x [M, K] @ w [N, K].T + bias [N], where the bias is added in fp32 before rounding once."""
        raise self._missing("fwd")

    def gemm_decode(self, x_q: Quantized, w_q: Quantized, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """Compute :meth:`gemm_fwd` in decoding, without a backward; a backend may have a kernel for few rows."""
        return self.gemm_fwd(x_q, w_q, out_dtype, bias)

    def gemm_dgrad(self, dy_q: Quantized, w_q: Quantized, out_dtype: torch.dtype) -> Tensor:
        """Return dx [M, K] = dy [M, N] @ w [N, K]."""
        raise self._missing("dgrad")

    def gemm_wgrad(self, dy_q: Quantized, x_q: Quantized, out_dtype: torch.dtype) -> Tensor:
        """Return dw [N, K] = dy [M, N].T @ x [M, K]."""
        raise self._missing("wgrad")

    def quantize_rows(self, x: Tensor, spec: CastSpec, groups: Groups, contract: int = 1) -> Quantized:
        """Cast the rows x [R, K] of all experts, each expert separately.

        ``scale`` is [R / r, K / c] for finite blocks (r, c), [R, 1] for (1, -1), [E, K] for (-1, 1) and [E, 1] for
        (-1, -1). Padding rows get zero codes, and a block that has only padding gets the scale 1.
        """
        raise self._missing("grouped_fwd")

    def quantize_rows_both(
        self, x: Tensor, row: CastSpec, col: CastSpec, groups: Groups
    ) -> tuple[Quantized, Quantized]:
        """Cast the rows of all experts under ``row`` for a contraction of dimension 1, and under ``col`` for one of
        dimension 0, reading x once if the backend can."""
        return self.quantize_rows(x, row, groups, 1), self.quantize_rows(x, col, groups, 0)

    def quantize_experts(self, w: Tensor, spec: CastSpec, contract: int = 1) -> Quantized:
        """Cast weights [E, N, K] (any strides), each expert separately; ``scale`` is [E, N / r, K / c]."""
        raise self._missing("grouped_fwd")

    def grouped_fwd(
        self, x_q: Quantized, w_q: Quantized, groups: Groups, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """Return y [R, N], each expert's rows x [R, K] times its w [E, N, K] transposed, plus its bias [E, N]. Padding
        rows have arbitrary finite values."""
        raise self._missing("grouped_fwd")

    def grouped_dgrad(self, dy_q: Quantized, w_q: Quantized, groups: Groups, out_dtype: torch.dtype) -> Tensor:
        """Return dx [R, K], each expert's rows dy [R, N] times its w [E, N, K]. Padding rows have arbitrary finite
        values."""
        raise self._missing("grouped_dgrad")

    def grouped_wgrad(self, dy_q: Quantized, x_q: Quantized, groups: Groups, out_dtype: torch.dtype) -> Tensor:
        """Return dw [E, N, K], each expert's dy [R, N] transposed times its x [R, K]; zeros for experts without
        rows."""
        raise self._missing("grouped_wgrad")

    def rmsnorm_quantize(
        self, x: Tensor, weight: Tensor, eps: float, row: CastSpec | None, col: CastSpec | None,
        out: torch.dtype | None = None, low: torch.dtype | None = None, rstd: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Quantized | None, Quantized | None]:  # fmt: skip
        """Return (y, rstd [M] fp32, y under ``row`` for contraction 1, y under ``col`` for contraction 0) of x [M, K].

        y = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + eps) unless given, computed in fp32 and rounded once to
        ``out`` (by default x's dtype). The codes are a cast of y, or of y.to(``low``), the input of the next layer
        under autocast.
        """
        raise self._missing("rmsnorm")

    def rmsnorm_codes(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        row: CastSpec | None,
        col: CastSpec | None,
        out: torch.dtype | None = None,
        low: torch.dtype | None = None,
        rstd: Tensor | None = None,
    ) -> tuple[Tensor, Quantized | None, Quantized | None]:
        """Return what :meth:`rmsnorm_quantize` returns after y, for callers that do not read y. ``rstd`` of x, if the
        caller has it, is returned as it is."""
        return self.rmsnorm_quantize(x, weight, eps, row, col, out, low, rstd)[1:]

    def rmsnorm_backward(
        self, dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, needs_x: bool, needs_w: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return (dx [M, K] in x's dtype, dw [K] in the weight's dtype) of y = x * rstd * weight, computed in fp32 from
        dy and x [M, K]; None for one that is not needed."""
        raise self._missing("rmsnorm")

    def swiglu_quantize(
        self, gate: Tensor, up: Tensor, row: CastSpec | None, col: CastSpec | None
    ) -> tuple[Tensor, Quantized | None, Quantized | None]:
        """Return (h, h under ``row``, h under ``col``) of h = silu(gate) * up [M, I], computed in fp32 and rounded once
        to gate's dtype; the codes are a cast of the rounded h."""
        raise self._missing("swiglu")

    def swiglu_codes(
        self, gate: Tensor, up: Tensor, row: CastSpec | None, col: CastSpec | None
    ) -> tuple[Quantized | None, Quantized | None]:
        """Return only the codes of :meth:`swiglu_quantize`, without writing h."""
        return self.swiglu_quantize(gate, up, row, col)[1:]

    def swiglu_backward_quantize(
        self, dh: Tensor, gate: Tensor, up: Tensor, row: CastSpec | None, col: CastSpec | None
    ) -> tuple[Quantized | None, Quantized | None, Quantized | None, Quantized | None]:
        """Return (dgate under row, dgate under col, dup under row, dup under col), the gradients of h = silu(gate) *
        up, computed in fp32, rounded to gate's dtype and cast, without being written in 16 bits. A result is None if
        its spec is None."""
        raise self._missing("swiglu_backward")

    def adamw(
        self, pieces: Sequence[Piece], hyper: Hyper, factor: float | Tensor | None, agree: MaxOverRanks | None = None
    ) -> None:
        """Run one AdamW step in place, as ``octavo.fp8.arithmetic.adamw.reference_step`` does."""
        raise self._missing("adamw")

    def _missing(self, op: str) -> BackendError:
        return BackendError(f"Backend {self.name!r} has no {op}. Use select() to find a backend that has it.")


class GemmOnlyBackend(Backend):
    """A backend with GEMMs only. Its casts run on the backend that :func:`select` chooses for each cast.

    A subclass lists its GEMMs in ``ops`` and implements its limits in :meth:`why_not_here` and :meth:`why_not_casts`.
    """

    ops: tuple[str, ...] = tuple(layout.CONTRACTED)
    pads_results = True

    def why_not_here(self, device: torch.device) -> str | None:
        """Return why none of its kernels runs on this device, or None if some may."""
        return None

    def why_not_casts(
        self, op: str, a: CastSpec, b: CastSpec, device: torch.device, shape: Sequence[int | None] | None
    ) -> str | None:
        """Return why it does not support ``op`` with operands of these casts, or None if it does."""
        raise NotImplementedError

    def supports(
        self, op: str, what: CastSpec | Recipe, device: torch.device, shape: Sequence[int | None] | None
    ) -> str | None:
        if op in ("quantize", "dequantize"):
            return "it has no casts; another backend casts for it"
        if op not in self.ops or not isinstance(what, Recipe):
            return f"it has no {op}"
        if (why_not := self.why_not_here(device)) is not None:
            return why_not
        casts = what.gemm(op.removeprefix("grouped_"))
        if casts is None:
            return f"the recipe keeps {op} in high precision: there is no FP8 GEMM"
        return self.why_not_casts(op, casts.a, casts.b, device, shape)

    def gemm(
        self, op: str, a_q: Quantized, b_q: Quantized, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """Run fwd, dgrad or wgrad on operands in any layout."""
        raise self._missing(op)

    def gemm_fwd(self, x_q: Quantized, w_q: Quantized, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        return self.gemm("fwd", x_q, w_q, out_dtype, bias)

    def gemm_dgrad(self, dy_q: Quantized, w_q: Quantized, out_dtype: torch.dtype) -> Tensor:
        return self.gemm("dgrad", dy_q, w_q, out_dtype)

    def gemm_wgrad(self, dy_q: Quantized, x_q: Quantized, out_dtype: torch.dtype) -> Tensor:
        return self.gemm("wgrad", dy_q, x_q, out_dtype)

    def quantize(self, x: Tensor, spec: CastSpec, contract: int = 1) -> Quantized:
        return self._cast_backend(spec, x).quantize(x, spec, contract)

    def quantize_both(self, x: Tensor, row: CastSpec, col: CastSpec) -> tuple[Quantized, Quantized]:
        row_backend = self._cast_backend(row, x)
        col_backend = row_backend if row == col else self._cast_backend(col, x)
        if row_backend is col_backend:
            return row_backend.quantize_both(x, row, col)
        return row_backend.quantize(x, row, 1), col_backend.quantize(x, col, 0)

    def quantize_with_scale(
        self, x: Tensor, scale: Tensor, spec: CastSpec, amax: Tensor | None = None, contract: int = 1
    ) -> Quantized:
        return self._cast_backend(spec, x).quantize_with_scale(x, scale, spec, amax, contract)

    def quantize_both_with_scale(
        self, x: Tensor, scale: Tensor, spec: CastSpec, amax: Tensor | None = None
    ) -> tuple[Quantized, Quantized]:
        return self._cast_backend(spec, x).quantize_both_with_scale(x, scale, spec, amax)

    def dequantize(self, q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
        return select("dequantize", recipe_or_spec=q.spec, device=q.data.device).backend.dequantize(q, dtype)

    def copy_to_layout(self, q: Quantized, contract: int) -> Quantized:
        return self._cast_backend(q.spec, q.data).copy_to_layout(q, contract)

    def quantize_rows(self, x: Tensor, spec: CastSpec, groups: Groups, contract: int = 1) -> Quantized:
        return self._cast_backend(spec, x, "grouped_fwd").quantize_rows(x, spec, groups, contract)

    def quantize_rows_both(
        self, x: Tensor, row: CastSpec, col: CastSpec, groups: Groups
    ) -> tuple[Quantized, Quantized]:
        row_backend, col_backend = self._cast_backend(row, x, "grouped_fwd"), self._cast_backend(col, x, "grouped_fwd")
        if row_backend is col_backend:
            return row_backend.quantize_rows_both(x, row, col, groups)
        return row_backend.quantize_rows(x, row, groups, 1), col_backend.quantize_rows(x, col, groups, 0)

    def quantize_experts(self, w: Tensor, spec: CastSpec, contract: int = 1) -> Quantized:
        return self._cast_backend(spec, w, "grouped_fwd").quantize_experts(w, spec, contract)

    def _cast_backend(self, spec: CastSpec, x: Tensor, op: str = "quantize") -> Backend:
        return _cast_backend(tuple(_backends), op, spec, x.device, x.shape)


@lru_cache(maxsize=4096)
def _cast_backend(
    registered: tuple[str, ...], op: str, spec: CastSpec, device: torch.device, shape: torch.Size
) -> Backend:
    """Return the backend of a cast. Cached, because every cast needs it; ``registered`` is part of the cache key, so
    that new backends are considered."""
    return select(op, recipe_or_spec=spec, device=device, shape=shape).backend


class Selection(NamedTuple):
    """The selected backend, the reason, and the (name, reason) of each rejected backend."""

    backend: Backend
    reason: str
    rejected: tuple[tuple[str, str], ...]


_backends: dict[str, Backend] = {}


def register(backend: Backend) -> None:
    """Add a backend. Later backends are preferred, so that the reference, which is registered first, is the last
    resort.

    Raises BackendError if the name is taken or is "auto".
    """
    if backend.name in _backends or backend.name == "auto":
        raise BackendError(f"A backend named {backend.name!r} cannot be registered: the name is taken. Choose another.")
    _backends[backend.name] = backend


def names() -> tuple[str, ...]:
    """Return the names of the registered backends in order of preference."""
    return tuple(reversed(_backends))


def get(name: str) -> Backend:
    """Return the backend of that name. Raises BackendError with the registered names if there is none."""
    if name not in _backends:
        raise BackendError(
            f"There is no backend {name!r}.{did_you_mean(name, names())} Use 'auto' or one of: {', '.join(names())}."
        )
    return _backends[name]


def select(
    op: str,
    *,
    recipe_or_spec: Recipe | CastSpec,
    device: torch.device | str,
    shape: Sequence[int | None] | None = None,
    requested: str = "auto",
) -> Selection:
    """Select the backend for one operation.

    Args:
        op: one of :data:`OPS`.
        recipe_or_spec: the CastSpec of a cast, the Recipe of a GEMM; ignored for adamw.
        device: where the operation will run.
        shape: shape of x for a cast, (M, N, K) for a GEMM, with None for unknown sizes; None if all are unknown.
        requested: "auto", or the name of the required backend.

    Raises:
        BackendError: the op or backend does not exist, or the requested backend (any backend if "auto") does not
            support the op.
    """
    if op not in OPS:
        raise BackendError(f"There is no op {op!r}; use one of: {', '.join(OPS)}.")
    device = torch.device(device)
    if requested != "auto":
        backend = get(requested)
        why_not = backend.supports(op, recipe_or_spec, device, shape)
        if why_not is None:
            return Selection(backend, "requested by name", ())
        alternatives = _describe_alternatives(op, recipe_or_spec, device, shape, skip=requested)
        raise BackendError(
            f"Backend {requested!r} was requested for {op} with {recipe_or_spec} on {device}"
            f"{_format_shape(shape)}, but does not support it: {why_not}. {alternatives}"
        )
    # Plans show why a preferred backend was rejected, so its reason is kept when another one is selected.
    rejected: list[tuple[str, str]] = []
    for name in names():
        backend = _backends[name]
        why_not = backend.supports(op, recipe_or_spec, device, shape) or backend.why_not_auto(device)
        if why_not is None:
            reason = "the only one registered" if len(_backends) == 1 else "the first in order of preference that can"
            return Selection(backend, reason, tuple(rejected))
        rejected.append((name, why_not))
    raise BackendError(
        f"No backend supports {op} with {recipe_or_spec} on {device}{_format_shape(shape)}: "
        + "; ".join(f"{name}: {why}" for name, why in rejected)
        + ". Choose another recipe or device, or keep this GEMM in BF16."
    )


def _format_shape(shape: Sequence[int | None] | None) -> str:
    return "" if shape is None else f" for shape ({', '.join('?' if size is None else str(size) for size in shape)})"


def _describe_alternatives(
    op: str, what: Recipe | CastSpec, device: torch.device, shape: Sequence[int | None] | None, skip: str
) -> str:
    """Describe which backends support the op, and why the others do not."""
    reasons = [(name, _backends[name].supports(op, what, device, shape)) for name in names() if name != skip]
    supporting = [name for name, why_not in reasons if why_not is None]
    parts = [f"{name}: {why_not}" for name, why_not in reasons if why_not is not None]
    fix = (
        f"Use backend='auto' or {', '.join(map(repr, supporting))}." if supporting else "No other backend supports it."
    )
    return " ".join([fix, *(f"({part})" for part in parts)])


def quantize(x: Tensor, spec: CastSpec, backend: str = "auto") -> Quantized:
    """Cast x to FP8 as ``octavo.fp8.arithmetic.cast.quantize``, on the preferred or the named backend.

    Raises:
        BackendError: the named backend does not exist or does not support this cast.
        CastError: x cannot be cast.
    """
    chosen = select("quantize", recipe_or_spec=spec, device=x.device, shape=x.shape, requested=backend)
    return chosen.backend.quantize(x, spec)
