"""Expert parallel: the experts of each layer dealt to the ranks of the mesh's axis "expert", a part of them each.

A module of experts then has parameters [E, ...] of which rank r of n holds those of the experts from r E / n on, as
DTensors ``Shard(0)`` on that axis; FSDP2 shards these over the rest of the mesh, in a group of the module's own, and
gathers over that rest alone. Both cuts are between experts, and both are in the DTensor: so whoever saves, counts or
adds up sees E experts, and checkpoints load on any other number of ranks.

Tokens go to the experts (:mod:`octavo.fp8.moe.exchange`), whether these compute in FP8 or not. An expert's gradient is
the sum over the ranks that have it, of the rows that came to them from all others: the one that one process has.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from octavo.fp8 import moe
from octavo.fp8.weights import is_frozen, part_of
from octavo.parallel.errors import WorldError
from octavo.parallel.layout import Layout
from octavo.parallel.world import World


def deal(model: nn.Module, world: World) -> list[nn.Module]:
    """Deal the experts of all layers to the ranks of ``world.experts``, in place; the modules that hold them.

    All ranks hold the same weights, or none. Raises WorldError as :func:`check_experts`, and for experts that are not
    known to give the same when rows are laid out by expert.
    """
    found = check_experts(model, world.layout, lambda name, module: getattr(module, "scaled_late", None))
    for name, module in found.items():
        if not isinstance(module, moe.Experts) and (why := _gives_other(module)):
            raise _refused(world.layout, name, f"{why}. Set parallel.expert: 1")
    for module in found.values():
        _deal(module, world.experts)
    return list(found.values())


def check_experts(
    model: nn.Module, layout: Layout, late: Callable[[str, nn.Module], str | None]
) -> dict[str, nn.Module]:
    """The modules of experts of a model, which may be on the meta device, by their names. ``late``: the name of the
    delayed recipe of a module, or None.

    Raises WorldError for a model without experts, and where they cannot be dealt to ranks, with what to do about it.
    """
    found = {name: module for name, module in model.named_modules() if moe.is_experts(module)}
    if not found:
        raise WorldError(
            f"parallel.expert: {layout.expert} was asked for, but {type(model).__name__} has no experts that are "
            "stacked in one parameter (gate_up_proj, down_proj). Set parallel.expert: 1"
        )
    for name, module in found.items():
        if why := _why_not(module, layout.sharded, late(name, module)):
            raise _refused(layout, name, why)
    return found


def _refused(layout: Layout, name: str, why: str) -> WorldError:
    return WorldError(f"parallel.expert: {layout.expert} was asked for, but {name} cannot be dealt to ranks: {why}")


def _why_not(module: nn.Module, over: int, late: str | None) -> str | None:
    """Why these experts cannot be dealt out where so many ranks share them, with what to do about it; None if they
    can."""
    experts = module._parameters["gate_up_proj"].shape[0]  # type: ignore[union-attr]
    own = {f"{name}{more}" for name in moe.PROJECTIONS for more in ("", "_bias")}
    if other := sorted(name for name, _ in module.named_parameters() if name not in own):
        return f"its parameter {other[0]} belongs to no expert alone. Set parallel.expert: 1"
    if experts % over:
        return (
            f"its {experts} experts are no multiple of the {over} ranks (shard x context) that share a copy of the "
            "model, and each rank must hold whole experts. Use parallel.replicate for more copies of fewer ranks"
        )
    if any(is_frozen(parameter) for parameter in module.parameters()):
        return "its weights are frozen in FP8, which are gathered as codes. Set parallel.expert: 1"
    if late is not None:
        return f"{late} keeps a history of each expert. Use another fp8.recipe for it"
    if not isinstance(module, moe.Experts) and (why := moe.why_not(module)) is not None:
        return f"{why}. Set parallel.expert: 1"
    return None


def _gives_other(module: nn.Module) -> str | None:
    meta = any(p.is_meta for p in module.parameters())
    return moe.stand_in_matches(module) if meta else moe.matches_stock(module)


def _deal(module: nn.Module, mesh: DeviceMesh | None) -> None:
    assert mesh is not None
    axis = mesh["expert"]
    for name, parameter in list(module._parameters.items()):
        if parameter is not None:
            setattr(module, name, nn.Parameter(_own(parameter, axis), requires_grad=parameter.requires_grad))
    if not isinstance(module, moe.Experts):
        moe.by_rows(module)
    module.__dict__[moe.EXCHANGE] = moe.Exchange(axis.get_group(), axis.size())


def _own(parameter: Tensor, axis: DeviceMesh) -> DTensor:
    """The part of a parameter [E, ...] that this rank has, as one of the whole."""
    each = parameter.shape[0] // axis.size()
    first = axis.get_local_rank() * each
    part = part_of(parameter, first, first + each)
    found = DTensor.from_local(part, axis, [Shard(0)], run_check=False)
    found._local_tensor = part  # of which torch takes a view, and a view of FP8 codes would be their values
    return found


def rest_of(mesh: DeviceMesh) -> DeviceMesh:
    """The axes of the mesh of experts over which FSDP2 works."""
    names = mesh.mesh_dim_names
    assert names is not None
    return mesh[names[:-1]] if len(names) > 2 else mesh[names[0]]
