"""Who steps pieces of parameters on a device, all with the bits of
:func:`octavo.fp8.arithmetic.adamw.reference_step`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octavo.fp8.arithmetic import adamw
from octavo.fp8.arithmetic.adamw import Hyper, Piece, Scalars
from octavo.fp8.arithmetic.cast import CastSpec
from octavo.fp8.arithmetic.moments import MaxOverRanks
from octavo.fp8.kernels.registry import select
from octavo.fp8.optim import cpu
from octavo.fp8.self_check.reference_checks import adamw_checks
from octavo.fp8.self_check.untested import run_checks

Engine = Callable[[Sequence[Piece], Hyper, "float | Tensor | None", "MaxOverRanks | None"], None]


def select_engine(device: torch.device) -> Engine:
    """What steps pieces on `device`: :func:`step_on_cpu`, a backend's kernel where there is one, else
    :func:`reference`.
    Raises SelfCheckError for a kernel that computes otherwise than the reference in a version that was not tested."""
    if device.type == "cpu":
        return step_on_cpu
    backend = select("adamw", recipe_or_spec=CastSpec(), device=device).backend
    run_checks(adamw_checks(backend.name, device), device)
    return backend.adamw


def step_on_cpu(
    pieces: Sequence[Piece], hyper: Hyper, factor: float | Tensor | None, agree: MaxOverRanks | None
) -> None:
    """:func:`reference` bit for bit, in the cache: see :mod:`octavo.fp8.optim.cpu`."""
    if hyper.states == "coat":
        adamw.reference_step(pieces, hyper, factor, agree)
        return
    chunks = [(piece, *ends) for piece in pieces for ends in adamw._chunks(piece, adamw.CPU_CHUNK)]
    if factor is not None and not isinstance(factor, Tensor):
        factor = adamw._fp32(factor)
    cpu.run([(p, Scalars.compute(hyper, p.step), first, last) for p, first, last in chunks], hyper, factor)
    adamw._step_edges(adamw.find_edges(pieces), hyper, factor, agree)
