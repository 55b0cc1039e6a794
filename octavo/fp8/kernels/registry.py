"""The one place where a backend is chosen.

A backend is a set of kernels: casts, GEMMs, and what else it can do. :func:`select` goes through the backends in order
of preference and returns the first that can do what is asked, with the reason, and with what was rejected and why. One
asked for by name is met or raises; nothing falls back in silence. The choice is made once and kept for the backward.
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
from octavo.fp8.arithmetic.moments import Agree
from octavo.fp8.arithmetic.recipe import Recipe
from octavo.fp8.kernels import layout
from octavo.fp8.kernels.groups import Groups

GEMMS = (*layout.CONTRACTED, *(f"grouped_{op}" for op in layout.CONTRACTED))
OPS = ("quantize", "dequantize", *GEMMS, "rmsnorm", "swiglu", "swiglu_backward", "adamw")
"""What a backend can be asked for: casts, the three GEMMs with their casts, the same for groups of experts, the two
elementwise layers that emit quantized outputs, and the optimizer's step."""


class BackendError(Fp8Error, RuntimeError):
    """No backend can do what was asked; the message says what each one lacks."""


class Backend:
    """A set of kernels: subclass it, override what it can do, and ``register`` an instance. One file, one line.

    Operands of GEMMs are two-dimensional, scales are always dequant multipliers. What the casts return has the logical
    shape of their input, whatever it looks like in memory; how it should lie there for a GEMM that contracts dimension
    ``contract`` of it is the business of :mod:`octavo.fp8.kernels.layout`. Groups of experts are those of
    :mod:`octavo.fp8.kernels.groups`. M, N, K are tokens, outputs and inputs; R rows of all experts; E experts.
    """

    name: str
    cuts_results = False
    """Whether its GEMMs write results in a multiple of 16 columns, of which the real ones are copied out."""

    def version(self) -> str:
        """What measurements of this backend depend on, such as ``"triton 3.6.0"``."""
        return f"torch {torch.__version__}"

    def auto_unsupported(self, device: torch.device) -> str | None:
        """None if automatic choice may take it on this device, else why it serves there only when asked by name."""
        return None

    def supports(
        self, op: str, what: CastSpec | Recipe, device: torch.device, shape: Sequence[int | None] | None
    ) -> str | None:
        """None if this backend can do ``op``, else why not.

        ``what``: a CastSpec for quantize and dequantize, else the Recipe. ``shape``: of x for a cast; (M, N, K) for a
        GEMM, with None for what is not known yet (the tokens of a plan); None: nothing is known.
        """
        return f"it has no {op}"

    def quantize(self, x: Tensor, spec: CastSpec, contract: int = 1) -> Quantized:
        """As ``octavo.fp8.arithmetic.cast.quantize``, bit for bit, for a GEMM that contracts dimension ``contract`` of
        the [product of leading dimensions, last] matrix that x is."""
        raise self._missing("quantize")

    def quantize_both(self, x: Tensor, row: CastSpec, col: CastSpec) -> tuple[Quantized, Quantized]:
        """(x under ``row`` for a contraction of dimension 1, x under ``col`` for one of dimension 0), x read once
        where the backend can."""
        return self.quantize(x, row, 1), self.quantize(x, col, 0)

    def quantize_with_scale(
        self, x: Tensor, scale: Tensor, spec: CastSpec, amax: Tensor | None = None, contract: int = 1
    ) -> Quantized:
        """As ``octavo.fp8.arithmetic.cast.quantize_with_scale``, bit for bit."""
        raise self._missing("quantize")

    def quantize_both_with_scale(
        self, x: Tensor, scale: Tensor, spec: CastSpec, amax: Tensor | None = None
    ) -> tuple[Quantized, Quantized]:
        """The same codes for a contraction of dimension 1 and for one of dimension 0, x read once where the backend
        can."""
        return self.quantize_with_scale(x, scale, spec, amax, 1), self.quantize_with_scale(x, scale, spec, amax, 0)

    def dequantize(self, q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
        """As ``octavo.fp8.arithmetic.cast.dequantize``, bit for bit."""
        raise self._missing("dequantize")

    def scales_for(self, q: Quantized, contract: int) -> Quantized:
        """q, which many GEMMs will contract along ``contract``, with its scales in their order."""
        return q if q.data.dim() != 2 else layout.scales_for(q, contract)

    def laid_for(self, q: Quantized, contract: int) -> Quantized:
        """As :meth:`scales_for`, with the codes too in the layout of that contraction."""
        lies = q.data.dim() == 2 and layout.lies(q, contract)
        return self.scales_for(q if lies else self.relay(q, contract), contract)

    def relay(self, q: Quantized, contract: int) -> Quantized:
        """q [rows, columns], or weights of experts [E, N, K], with its codes copied to where they lie for a contraction
        of dimension ``contract`` of each matrix."""
        return layout.relay(q, contract)

    def gemm_fwd(self, x_q: Quantized, w_q: Quantized, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """y [M, N] = x [M, K] @ w [N, K].T + bias [N], the bias added in fp32 before the one rounding."""
        raise self._missing("fwd")

    def gemm_decode(self, x_q: Quantized, w_q: Quantized, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """As :meth:`gemm_fwd` where no gradient follows, as in decoding: a backend may have a product for few rows."""
        return self.gemm_fwd(x_q, w_q, out_dtype, bias)

    def gemm_dgrad(self, dy_q: Quantized, w_q: Quantized, out_dtype: torch.dtype) -> Tensor:
        """dx [M, K] = dy [M, N] @ w [N, K]"""
        raise self._missing("dgrad")

    def gemm_wgrad(self, dy_q: Quantized, x_q: Quantized, out_dtype: torch.dtype) -> Tensor:
        """dw [N, K] = dy [M, N].T @ x [M, K]"""
        raise self._missing("wgrad")

    def quantize_rows(self, x: Tensor, spec: CastSpec, groups: Groups, contract: int = 1) -> Quantized:
        """Cast the rows of all experts x [R, K], each expert's rows as if they were alone.

        ``scale`` is [R / r, K / c] for finite blocks (r, c), [R, 1] for (1, -1), [E, K] for (-1, 1), [E, 1] for
        (-1, -1). Padding rows get zero codes; a block without real elements gets the scale 1.
        """
        raise self._missing("grouped_fwd")

    def quantize_rows_both(
        self, x: Tensor, row: CastSpec, col: CastSpec, groups: Groups
    ) -> tuple[Quantized, Quantized]:
        """(the rows of all experts under ``row`` for a contraction of dimension 1, under ``col`` for one of dimension
        0), x read once where the backend can."""
        return self.quantize_rows(x, row, groups, 1), self.quantize_rows(x, col, groups, 0)

    def quantize_experts(self, w: Tensor, spec: CastSpec, contract: int = 1) -> Quantized:
        """Cast weights [E, N, K] (any strides), each expert as if it were alone; ``scale`` is [E, N / r, K / c]."""
        raise self._missing("grouped_fwd")

    def grouped_fwd(
        self, x_q: Quantized, w_q: Quantized, groups: Groups, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """y [R, N]: each expert's rows x [R, K] times its w [E, N, K] transposed, plus its bias [E, N]. Padding rows
        hold anything finite."""
        raise self._missing("grouped_fwd")

    def grouped_dgrad(self, dy_q: Quantized, w_q: Quantized, groups: Groups, out_dtype: torch.dtype) -> Tensor:
        """dx [R, K]: each expert's rows dy [R, N] times its w [E, N, K]. Padding rows hold anything finite."""
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
        the codes are those of y.to(``low``), which autocast hands to the next layer (None: those of y).
        """
        raise self._missing("rmsnorm")

    def swiglu_quantize(
        self, gate: Tensor, up: Tensor, row: CastSpec | None, col: CastSpec | None
    ) -> tuple[Tensor, Quantized | None, Quantized | None]:
        """(h, h under ``row``, h under ``col``) of h = silu(gate) * up [M, I], in fp32, rounded once to gate's dtype;
        the codes are those of the rounded h."""
        raise self._missing("swiglu")

    def swiglu_codes(
        self, gate: Tensor, up: Tensor, row: CastSpec | None, col: CastSpec | None
    ) -> tuple[Quantized | None, Quantized | None]:
        """The codes of :meth:`swiglu_quantize` where nobody reads h itself, which need not be written then."""
        return self.swiglu_quantize(gate, up, row, col)[1:]

    def swiglu_backward_quantize(
        self, dh: Tensor, gate: Tensor, up: Tensor, row: CastSpec | None, col: CastSpec | None
    ) -> tuple[Quantized | None, Quantized | None, Quantized | None, Quantized | None]:
        """(dgate under row, dgate under col, dup under row, dup under col): the gradients of h = silu(gate) * up,
        computed in fp32, rounded to gate's dtype, cast; never written in 16 bits. None for None."""
        raise self._missing("swiglu_backward")

    def adamw(
        self, pieces: Sequence[Piece], hyper: Hyper, factor: float | Tensor | None, agree: Agree | None = None
    ) -> None:
        """One step of AdamW, in place: see ``octavo.fp8.arithmetic.adamw.reference``."""
        raise self._missing("adamw")

    def _missing(self, op: str) -> BackendError:
        return BackendError(f"Backend {self.name!r} has no {op}. Ask select() for one that has.")


class GemmOnlyBackend(Backend):
    """A backend of GEMMs that takes its casts from others: from the one that :func:`select` chooses for the cast.

    A subclass names its GEMMs in ``ops`` and says by :meth:`why_not_here` and :meth:`why_not_casts` what it cannot do.
    """

    ops: tuple[str, ...] = tuple(layout.CONTRACTED)
    cuts_results = True

    def why_not_here(self, device: torch.device) -> str | None:
        """Why none of its kernels runs on this device, None if some may."""
        return None

    def why_not_casts(
        self, op: str, a: CastSpec, b: CastSpec, device: torch.device, shape: Sequence[int | None] | None
    ) -> str | None:
        """Why it cannot do ``op`` of operands cast like this, None if it can."""
        raise NotImplementedError

    def supports(
        self, op: str, what: CastSpec | Recipe, device: torch.device, shape: Sequence[int | None] | None
    ) -> str | None:
        if op in ("quantize", "dequantize"):
            return "it has no casts of its own, it takes those of another backend"
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

    def relay(self, q: Quantized, contract: int) -> Quantized:
        return self._cast_backend(q.spec, q.data).relay(q, contract)

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
    """Who casts, remembered, since every cast of every step asks. ``registered`` forgets it with a new backend."""
    return select(op, recipe_or_spec=spec, device=device, shape=shape).backend


class Selection(NamedTuple):
    """A choice: the backend, why it, and the (name, reason) of each one that was passed over."""

    backend: Backend
    reason: str
    rejected: tuple[tuple[str, str], ...]


_backends: dict[str, Backend] = {}


def register(backend: Backend) -> None:
    """Add a backend; the latest is preferred, so the reference, first to come, is the last resort. Raises BackendError
    if the name is taken, or "auto"."""
    if backend.name in _backends or backend.name == "auto":
        raise BackendError(f"A backend named {backend.name!r} cannot be registered: the name is taken. Choose another.")
    _backends[backend.name] = backend


def names() -> tuple[str, ...]:
    """The registered backends, the preferred first."""
    return tuple(reversed(_backends))


def get(name: str) -> Backend:
    """The backend of that name, or a BackendError that lists the names there are."""
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
        shape: of x for quantize; (M, N, K) for a GEMM, None in place of what is unknown. None: all unknown.
        requested: "auto", or the name of the backend that must do it.

    Raises BackendError for an unknown op or backend, where the requested backend cannot do it, and where none can.
    """
    if op not in OPS:
        raise BackendError(f"There is no op {op!r}; a backend can be asked for: {', '.join(OPS)}.")
    device = torch.device(device)
    if requested != "auto":
        backend = get(requested)
        why_not = backend.supports(op, recipe_or_spec, device, shape)
        if why_not is None:
            return Selection(backend, "requested by name", ())
        others = _instead(op, recipe_or_spec, device, shape, skip=requested)
        raise BackendError(
            f"Backend {requested!r} was asked for {op} with {recipe_or_spec} on {device}"
            f"{_of(shape)} and cannot do it: {why_not}. {others}"
        )
    rejected: list[tuple[str, str]] = []
    for name in names():
        backend = _backends[name]
        why_not = backend.supports(op, recipe_or_spec, device, shape) or backend.auto_unsupported(device)
        if why_not is None:
            reason = "the only one registered" if len(_backends) == 1 else "the first in order of preference that can"
            return Selection(backend, reason, tuple(rejected))
        rejected.append((name, why_not))
    raise BackendError(
        f"No backend can do {op} with {recipe_or_spec} on {device}{_of(shape)}: "
        + "; ".join(f"{name}: {why}" for name, why in rejected)
        + ". Choose another recipe or device, or keep this GEMM in BF16."
    )


def _of(shape: Sequence[int | None] | None) -> str:
    return "" if shape is None else f" for shape ({', '.join('?' if size is None else str(size) for size in shape)})"


def _instead(
    op: str, what: Recipe | CastSpec, device: torch.device, shape: Sequence[int | None] | None, skip: str
) -> str:
    """What the other backends could do instead, as a sentence."""
    found = [(name, _backends[name].supports(op, what, device, shape)) for name in names() if name != skip]
    able = [name for name, why_not in found if why_not is None]
    parts = [f"{name}: {why_not}" for name, why_not in found if why_not is not None]
    fix = f"Use backend='auto' or {', '.join(map(repr, able))}." if able else "No other backend can either."
    return " ".join([fix, *(f"({part})" for part in parts)])


def quantize(x: Tensor, spec: CastSpec, backend: str = "auto") -> Quantized:
    """Cast x to FP8 on the best backend for its device, or on the one named (see
    ``octavo.fp8.arithmetic.cast.quantize``). Raises BackendError where the named backend does not exist or cannot do
    this cast, CastError where x cannot be cast at all.
    """
    chosen = select("quantize", recipe_or_spec=spec, device=x.device, shape=x.shape, requested=backend)
    return chosen.backend.quantize(x, spec)
