"""The registry of backends, which chooses one for each operation.

A backend is a set of kernels: casts, GEMMs and others. :func:`select` goes through the backends in order of preference
and returns the first that supports the operation, with the reason, and with the rejected backends and why. A backend
requested by name is used or raises an error; there is no silent fallback. The choice is made once and also used in the
backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.fp8.arithmetic.adamw import Hyper, Piece
from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.arithmetic.errors import Fp8Error
from octavo.fp8.arithmetic.moments import MaxOverRanks
from octavo.fp8.arithmetic.recipe import Recipe
from octavo.fp8.kernels import layout
from octavo.fp8.kernels.groups import Groups

GEMMS = (*layout.CONTRACTED, *(f"grouped_{op}" for op in layout.CONTRACTED))
OPS = ("quantize", "dequantize", *GEMMS, "rmsnorm", "swiglu", "swiglu_backward", "adamw")
"""The operations of backends: casts, the three GEMMs with their casts, the same for groups of experts, the elementwise
layers with quantized outputs, and the optimizer's step."""


class BackendError(Fp8Error, RuntimeError):
    """No backend supports the operation; the message says why for each one."""


class Backend:
    """A set of kernels. To add one, subclass this, override the supported methods and ``register`` an instance.

    Operands of GEMMs are two-dimensional; scales are always dequantization multipliers. Casts return the logical shape
    of their input, whatever the memory layout; :mod:`octavo.fp8.kernels.layout` defines the layout for a GEMM that
    contracts dimension ``contract``. :mod:`octavo.fp8.kernels.groups` defines groups of experts. M, N, K are tokens,
    outputs and inputs; R is the number of rows of all experts; E the number of experts.
    """

    name: str
    pads_results = False
    """Whether its GEMMs pad results to a multiple of 16 columns, from which the real ones are copied."""

    def version(self) -> str:
        """The version that measurements of this backend depend on, such as ``"triton 3.6.0"``."""
        return f"torch {torch.__version__}"

    def why_not_auto(self, device: torch.device) -> str | None:
        """None if automatic choice may take it on this device, else why it must be requested by name."""
        return None

    def supports(
        self, op: str, what: CastSpec | Recipe, device: torch.device, shape: Sequence[int | None] | None
    ) -> str | None:
        """None if this backend supports ``op``, else why not.

        ``what``: a CastSpec for quantize and dequantize, else the Recipe. ``shape``: of x for a cast; (M, N, K) for a
        GEMM, with None for unknown sizes (the tokens of a plan); None: no size is known.
        """
        return f"it has no {op}"

    def quantize(self, x: Tensor, spec: CastSpec, contract: int = 1) -> Quantized:
        """``octavo.fp8.arithmetic.cast.quantize``, bit for bit, for a GEMM that contracts dimension ``contract`` of x
        as a matrix [product of leading dimensions, last]."""
        raise self._missing("quantize")

    def quantize_both(self, x: Tensor, row: CastSpec, col: CastSpec) -> tuple[Quantized, Quantized]:
        """(x under ``row`` for a contraction of dimension 1, x under ``col`` for one of dimension 0), from one read of
        x if the backend can."""
        return self.quantize(x, row, 1), self.quantize(x, col, 0)

    def quantize_with_scale(
        self, x: Tensor, scale: Tensor, spec: CastSpec, amax: Tensor | None = None, contract: int = 1
    ) -> Quantized:
        """As ``octavo.fp8.arithmetic.cast.quantize_with_scale``, bit for bit."""
        raise self._missing("quantize")

    def quantize_both_with_scale(
        self, x: Tensor, scale: Tensor, spec: CastSpec, amax: Tensor | None = None
    ) -> tuple[Quantized, Quantized]:
        """The same codes for a contraction of dimension 1 and for one of dimension 0, from one read of x if the backend
        can."""
        return self.quantize_with_scale(x, scale, spec, amax, 1), self.quantize_with_scale(x, scale, spec, amax, 0)

    def dequantize(self, q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
        """As ``octavo.fp8.arithmetic.cast.dequantize``, bit for bit."""
        raise self._missing("dequantize")

    def reorder_scales(self, q: Quantized, contract: int) -> Quantized:
        """q with its scales in the order of GEMMs that contract ``contract``, for codes that many GEMMs read."""
        return q if q.data.dim() != 2 else layout.reorder_scales(q, contract)

    def copy_for_gemm(self, q: Quantized, contract: int) -> Quantized:
        """:meth:`reorder_scales`, with the codes in the layout of that contraction too."""
        fits = q.data.dim() == 2 and layout.is_k_major(q, contract)
        return self.reorder_scales(q if fits else self.copy_to_layout(q, contract), contract)

    def copy_to_layout(self, q: Quantized, contract: int) -> Quantized:
        """q [rows, columns], or weights of experts [E, N, K], with its codes copied into the layout for a contraction
        of dimension ``contract`` of each matrix."""
        return layout.copy_to_layout(q, contract)

    def gemm_fwd(self, x_q: Quantized, w_q: Quantized, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """y [M, N] = x [M, K] @ w [N, K].T + bias [N], the bias added in fp32 before the one rounding."""
        raise self._missing("fwd")

    def gemm_decode(self, x_q: Quantized, w_q: Quantized, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """:meth:`gemm_fwd` without a backward, as in decoding: a backend may have a kernel for few rows."""
        return self.gemm_fwd(x_q, w_q, out_dtype, bias)

    def gemm_dgrad(self, dy_q: Quantized, w_q: Quantized, out_dtype: torch.dtype) -> Tensor:
        """dx [M, K] = dy [M, N] @ w [N, K]"""
        raise self._missing("dgrad")

    def gemm_wgrad(self, dy_q: Quantized, x_q: Quantized, out_dtype: torch.dtype) -> Tensor:
        """dw [N, K] = dy [M, N].T @ x [M, K]"""
        raise self._missing("wgrad")

    def quantize_rows(self, x: Tensor, spec: CastSpec, groups: Groups, contract: int = 1) -> Quantized:
        """Cast the rows of all experts x [R, K], each expert's rows separately.

        ``scale`` is [R / r, K / c] for finite blocks (r, c), [R, 1] for (1, -1), [E, K] for (-1, 1), [E, 1] for
        (-1, -1). Padding rows get zero codes; a block without real elements gets the scale 1.
        """
        raise self._missing("grouped_fwd")

    def quantize_rows_both(
        self, x: Tensor, row: CastSpec, col: CastSpec, groups: Groups
    ) -> tuple[Quantized, Quantized]:
        """(the rows of all experts under ``row`` for a contraction of dimension 1, under ``col`` for one of dimension
        0), from one read of x if the backend can."""
        return self.quantize_rows(x, row, groups, 1), self.quantize_rows(x, col, groups, 0)

    def quantize_experts(self, w: Tensor, spec: CastSpec, contract: int = 1) -> Quantized:
        """Cast weights [E, N, K] (any strides), each expert separately; ``scale`` is [E, N / r, K / c]."""
        raise self._missing("grouped_fwd")

    def grouped_fwd(
        self, x_q: Quantized, w_q: Quantized, groups: Groups, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """y [R, N]: each expert's rows x [R, K] times its w [E, N, K] transposed, plus its bias [E, N]. Padding rows
        have any finite values."""
        raise self._missing("grouped_fwd")

    def grouped_dgrad(self, dy_q: Quantized, w_q: Quantized, groups: Groups, out_dtype: torch.dtype) -> Tensor:
        """dx [R, K]: each expert's rows dy [R, N] times its w [E, N, K]. Padding rows have any finite values."""
        raise self._missing("grouped_dgrad")

    def grouped_wgrad(self, dy_q: Quantized, x_q: Quantized, groups: Groups, out_dtype: torch.dtype) -> Tensor:
        """dw [E, N, K]: each expert's dy [R, N] transposed times its x [R, K]; zeros for an expert without rows."""
        raise self._missing("grouped_wgrad")

    def rmsnorm_quantize(
        self, x: Tensor, weight: Tensor, eps: float, row: CastSpec | None, col: CastSpec | None,
        out: torch.dtype | None = None, low: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor, Quantized | None, Quantized | None]:  # fmt: skip
        """(y, rstd [M] fp32, y under ``row`` for contraction 1, y under ``col`` for contraction 0), x [M, K].

        y = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + eps), in fp32, rounded once to ``out`` (None: x's dtype);
        the codes are a cast of y.to(``low``), which autocast passes to the next layer (None: of y).
        """
        raise self._missing("rmsnorm")

    def swiglu_quantize(
        self, gate: Tensor, up: Tensor, row: CastSpec | None, col: CastSpec | None
    ) -> tuple[Tensor, Quantized | None, Quantized | None]:
        """(h, h under ``row``, h under ``col``) of h = silu(gate) * up [M, I], in fp32, rounded once to gate's dtype;
        the codes are a cast of the rounded h."""
        raise self._missing("swiglu")

    def swiglu_codes(
        self, gate: Tensor, up: Tensor, row: CastSpec | None, col: CastSpec | None
    ) -> tuple[Quantized | None, Quantized | None]:
        """The codes of :meth:`swiglu_quantize`, for callers that do not read h, which is then not written."""
        return self.swiglu_quantize(gate, up, row, col)[1:]

    def swiglu_backward_quantize(
        self, dh: Tensor, gate: Tensor, up: Tensor, row: CastSpec | None, col: CastSpec | None
    ) -> tuple[Quantized | None, Quantized | None, Quantized | None, Quantized | None]:
        """(dgate under row, dgate under col, dup under row, dup under col): the gradients of h = silu(gate) * up,
        computed in fp32, rounded to gate's dtype and cast, without being written in 16 bits. None for no spec."""
        raise self._missing("swiglu_backward")

    def adamw(
        self, pieces: Sequence[Piece], hyper: Hyper, factor: float | Tensor | None, agree: MaxOverRanks | None = None
    ) -> None:
        """One step of AdamW, in place: see ``octavo.fp8.arithmetic.adamw.reference_step``."""
        raise self._missing("adamw")

    def _missing(self, op: str) -> BackendError:
        return BackendError(f"Backend {self.name!r} has no {op}. Ask select() for one that has.")


class GemmOnlyBackend(Backend):
    """A backend that has only GEMMs. Its casts come from the backend that :func:`select` chooses for each cast.

    A subclass lists its GEMMs in ``ops`` and its limits in :meth:`why_not_here` and :meth:`why_not_casts`.
    """

    ops: tuple[str, ...] = tuple(layout.CONTRACTED)
    pads_results = True

    def why_not_here(self, device: torch.device) -> str | None:
        """Why none of its kernels runs on this device, None if some may."""
        return None

    def why_not_casts(
        self, op: str, a: CastSpec, b: CastSpec, device: torch.device, shape: Sequence[int | None] | None
    ) -> str | None:
        """Why it cannot do ``op`` with operands of these casts, None if it can."""
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
        """fwd, dgrad or wgrad, whatever layout the operands have."""
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
        caster = self._cast_backend(row, x)
        other = caster if row == col else self._cast_backend(col, x)
        if caster is other:
            return caster.quantize_both(x, row, col)
        return caster.quantize(x, row, 1), other.quantize(x, col, 0)

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
        caster, other = self._cast_backend(row, x, "grouped_fwd"), self._cast_backend(col, x, "grouped_fwd")
        if caster is other:
            return caster.quantize_rows_both(x, row, col, groups)
        return caster.quantize_rows(x, row, groups, 1), other.quantize_rows(x, col, groups, 0)

    def quantize_experts(self, w: Tensor, spec: CastSpec, contract: int = 1) -> Quantized:
        return self._cast_backend(spec, w, "grouped_fwd").quantize_experts(w, spec, contract)

    def _cast_backend(self, spec: CastSpec, x: Tensor, op: str = "quantize") -> Backend:
        return _cast_backend(tuple(_backends), op, spec, x.device, x.shape)


@lru_cache(maxsize=4096)
def _cast_backend(
    registered: tuple[str, ...], op: str, spec: CastSpec, device: torch.device, shape: torch.Size
) -> Backend:
    """The backend of a cast. Cached, because every cast of every step needs it; ``registered`` is part of the key, so
    that a new backend is considered."""
    return select(op, recipe_or_spec=spec, device=device, shape=shape).backend


class Selection(NamedTuple):
    """A choice: the backend, the reason, and the (name, reason) of each backend that was rejected."""

    backend: Backend
    reason: str
    rejected: tuple[tuple[str, str], ...]


_backends: dict[str, Backend] = {}


def register(backend: Backend) -> None:
    """Add a backend. The latest is preferred, so that the reference, which comes first, is the last resort. Raises
    BackendError if the name is taken, or "auto"."""
    if backend.name in _backends or backend.name == "auto":
        raise BackendError(f"A backend named {backend.name!r} cannot be registered: the name is taken. Choose another.")
    _backends[backend.name] = backend


def names() -> tuple[str, ...]:
    """The names of the registered backends, the preferred one first."""
    return tuple(reversed(_backends))


def get(name: str) -> Backend:
    """The backend of that name. Raises a BackendError that lists the registered names."""
    if name not in _backends:
        raise BackendError(f"There is no backend {name!r}; use 'auto' or one of: {', '.join(names())}.")
    return _backends[name]


def select(
    op: str,
    *,
    recipe_or_spec: Recipe | CastSpec,
    device: torch.device | str,
    shape: Sequence[int | None] | None = None,
    requested: str = "auto",
) -> Selection:
    """Choose the backend for one op.

    Args:
        op: one of :data:`OPS`.
        recipe_or_spec: the CastSpec of a quantize, the Recipe of a GEMM; any for adamw, which casts nothing.
        device: where it will run.
        shape: of x for quantize; (M, N, K) for a GEMM, with None for unknown sizes. None: all are unknown.
        requested: "auto", or the name of the backend that must run it.

    Raises BackendError for an unknown op or backend, if the requested backend does not support the op, or if no backend
    does.
    """
    if op not in OPS:
        raise BackendError(f"There is no op {op!r}; a backend can be asked for: {', '.join(OPS)}.")
    device = torch.device(device)
    if requested != "auto":
        backend = get(requested)
        why_not = backend.supports(op, recipe_or_spec, device, shape)
        if why_not is None:
            return Selection(backend, "requested by name", ())
        others = _describe_alternatives(op, recipe_or_spec, device, shape, skip=requested)
        raise BackendError(
            f"Backend {requested!r} was asked for {op} with {recipe_or_spec} on {device}"
            f"{_format_shape(shape)} and cannot do it: {why_not}. {others}"
        )
    # Reasons are collected even when a backend is found: plans show why a faster one was not taken.
    rejected: list[tuple[str, str]] = []
    for name in names():
        backend = _backends[name]
        why_not = backend.supports(op, recipe_or_spec, device, shape) or backend.why_not_auto(device)
        if why_not is None:
            reason = "the only one registered" if len(_backends) == 1 else "the first in order of preference that can"
            return Selection(backend, reason, tuple(rejected))
        rejected.append((name, why_not))
    raise BackendError(
        f"No backend can do {op} with {recipe_or_spec} on {device}{_format_shape(shape)}: "
        + "; ".join(f"{name}: {why}" for name, why in rejected)
        + ". Choose another recipe or device, or keep this GEMM in BF16."
    )


def _format_shape(shape: Sequence[int | None] | None) -> str:
    return "" if shape is None else f" for shape ({', '.join('?' if size is None else str(size) for size in shape)})"


def _describe_alternatives(
    op: str, what: Recipe | CastSpec, device: torch.device, shape: Sequence[int | None] | None, skip: str
) -> str:
    """The backends that support the op, and why the others do not, as sentences."""
    answers = [(name, _backends[name].supports(op, what, device, shape)) for name in names() if name != skip]
    able = [name for name, why_not in answers if why_not is None]
    parts = [f"{name}: {why_not}" for name, why_not in answers if why_not is not None]
    fix = f"Use backend='auto' or {', '.join(map(repr, able))}." if able else "No other backend can either."
    return " ".join([fix, *(f"({part})" for part in parts)])


def quantize(x: Tensor, spec: CastSpec, backend: str = "auto") -> Quantized:
    """Cast x to FP8 on the best backend for its device, or on the named one: see
    ``octavo.fp8.arithmetic.cast.quantize``. Raises BackendError if the named backend does not exist or does not support
    this cast, CastError if x cannot be cast.
    """
    chosen = select("quantize", recipe_or_spec=spec, device=x.device, shape=x.shape, requested=backend)
    return chosen.backend.quantize(x, spec)
