"""The one place where a backend is chosen.

A backend is a set of kernels: the casts and the three GEMMs. :func:`select` goes through the backends in order of
preference and returns the first that can do what is asked, with the reason, and with what was rejected and why. One
asked for by name is met or raises; nothing falls back in silence. The choice is made once and kept for the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from octavo.fp8.cast import CastSpec, Quantized
from octavo.fp8.recipe import Recipe

__all__ = ["OPS", "Backend", "BackendError", "Selection", "get", "names", "quantize", "register", "select"]

OPS = ("quantize", "fwd", "dgrad", "wgrad")
"""What a backend can be asked for: a cast, or one of the three GEMMs with its casts."""


class BackendError(RuntimeError):
    """No backend can do what was asked; the message says what each one lacks."""


class Backend(Protocol):
    """What a file in ``kernels/`` offers. GEMM operands are 2-D; scales are always dequant multipliers."""

    name: str

    def supports(
        self, op: str, what: CastSpec | Recipe, device: torch.device, shape: Sequence[int] | None
    ) -> str | None:
        """None if this backend can do ``op``, else why not. ``shape``: of x for a cast, (M, N, K) for a GEMM."""
        ...

    def quantize(self, x: Tensor, spec: CastSpec) -> Quantized:
        """As ``octavo.fp8.cast.quantize``, bit for bit."""
        ...

    def gemm_fwd(self, x_q: Quantized, w_q: Quantized, out_dtype: torch.dtype) -> Tensor:
        """y [M, N] = x [M, K] @ w [N, K].T"""
        ...

    def gemm_dgrad(self, dy_q: Quantized, w_q: Quantized, out_dtype: torch.dtype) -> Tensor:
        """dx [M, K] = dy [M, N] @ w [N, K]"""
        ...

    def gemm_wgrad(self, dy_q: Quantized, x_q: Quantized, out_dtype: torch.dtype) -> Tensor:
        """dw [N, K] = dy [M, N].T @ x [M, K]"""
        ...


class Selection(NamedTuple):
    """A choice: the backend, why it, and the (name, reason) of each one that was passed over."""

    backend: Backend
    reason: str
    rejected: tuple[tuple[str, str], ...]


_backends: dict[str, Backend] = {}


def register(backend: Backend) -> None:
    """Add a backend; the latest is preferred, so the reference, first to come, is the last resort.

    Raises:
        BackendError: if the name is taken, or "auto".
    """
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
    shape: Sequence[int] | None = None,
    requested: str = "auto",
) -> Selection:
    """Choose the backend for one op.

    Args:
        op: one of :data:`OPS`.
        recipe_or_spec: the CastSpec of a quantize, the Recipe of a GEMM.
        device: where it will run.
        shape: of x for quantize; (M, N, K) for a GEMM. None: unknown yet.
        requested: "auto", or the name of the backend that must do it.

    Raises:
        BackendError: unknown op or backend; the requested backend cannot do it; none can.
    """
    if op not in OPS:
        raise BackendError(f"There is no op {op!r}; a backend can be asked for: {', '.join(OPS)}.")
    device = torch.device(device)
    if requested != "auto":
        backend = get(requested)
        lack = backend.supports(op, recipe_or_spec, device, shape)
        if lack is None:
            return Selection(backend, "requested by name", ())
        others = _lacks(op, recipe_or_spec, device, shape, skip=requested)
        raise BackendError(
            f"Backend {requested!r} was asked for {op} with {recipe_or_spec} on {device}"
            f"{_of(shape)} and cannot do it: {lack}. {others}"
        )
    rejected: list[tuple[str, str]] = []
    for name in names():
        lack = _backends[name].supports(op, recipe_or_spec, device, shape)
        if lack is None:
            reason = "the only one registered" if len(_backends) == 1 else "the first in order of preference that can"
            return Selection(_backends[name], reason, tuple(rejected))
        rejected.append((name, lack))
    raise BackendError(
        f"No backend can do {op} with {recipe_or_spec} on {device}{_of(shape)}: "
        + "; ".join(f"{name}: {why}" for name, why in rejected)
        + ". Choose another recipe or device, or keep this GEMM in BF16."
    )


def _of(shape: Sequence[int] | None) -> str:
    return "" if shape is None else f" for shape {tuple(shape)}"


def _lacks(op: str, what: Recipe | CastSpec, device: torch.device, shape: Sequence[int] | None, skip: str) -> str:
    """What the other backends could do instead, as a sentence."""
    found = [(name, _backends[name].supports(op, what, device, shape)) for name in names() if name != skip]
    able = [name for name, lack in found if lack is None]
    parts = [f"{name}: {lack}" for name, lack in found if lack is not None]
    cure = f"Use backend='auto' or {', '.join(map(repr, able))}." if able else "No other backend can either."
    return " ".join([cure, *(f"({part})" for part in parts)])


def quantize(x: Tensor, spec: CastSpec, backend: str = "auto") -> Quantized:
    """Cast x to FP8 on the best backend for its device, or on the one named (see ``octavo.fp8.cast.quantize``).

    Raises:
        BackendError: the named backend does not exist or cannot do this cast.
        CastError: x cannot be cast at all.
    """
    chosen = select("quantize", recipe_or_spec=spec, device=x.device, shape=x.shape, requested=backend)
    return chosen.backend.quantize(x, spec)
