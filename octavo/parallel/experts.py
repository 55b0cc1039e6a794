"""Expert parallelism: the experts of each layer are distributed over the ranks of the mesh's axis "expert".

The parameters [E, ...] of an expert module become DTensors ``Shard(0)`` on that axis: rank r of n holds the experts
from r E / n on. FSDP2 shards these over the other axes of the mesh, one group per module, and gathers only over them.
Both splits are along the expert dimension, and the DTensor records both: code that saves, counts or sums parameters
sees E experts, and checkpoints load on any number of ranks.

Tokens are dispatched to the experts by :mod:`octavo.fp8.moe.exchange`, as FP8 codes or in their own dtype. An expert's
gradient is the sum over the ranks that hold it, for the rows they received from all ranks: the same gradient as in one
process.
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


def distribute_experts(model: nn.Module, world: World) -> list[nn.Module]:
    """Distribute the experts of all layers over the ranks of ``world.experts``, in place; return their modules.

    All ranks hold the same weights, or none. Raises WorldError as :func:`check_experts` does, and for experts whose
    results could differ if rows are grouped by expert.
    """
    modules = check_experts(model, world.layout, lambda name, module: getattr(module, "scaled_late", None))
    for name, module in modules.items():
        if not isinstance(module, moe.Experts) and (why := _difference_from_stock(module)):
            raise _distribution_error(world.layout, name, f"{why}. Set parallel.expert: 1")
    for module in modules.values():
        _distribute(module, world.experts)
    return list(modules.values())


def check_experts(
    model: nn.Module, layout: Layout, delayed_recipe: Callable[[str, nn.Module], str | None]
) -> dict[str, nn.Module]:
    """Return name -> expert module of a model, which may be on the meta device.

    ``delayed_recipe(name, module)`` returns the name of a module's delayed recipe, or None. Raises WorldError, with the
    fix, for a model without experts and for experts that cannot be distributed.
    """
    modules = {name: module for name, module in model.named_modules() if moe.is_experts(module)}
    if not modules:
        raise WorldError(
            f"parallel.expert is {layout.expert}, but {type(model).__name__} has no experts that are stacked in one "
            "parameter (gate_up_proj, down_proj). Set parallel.expert: 1"
        )
    for name, module in modules.items():
        if why := _obstacle(module, layout.sharded, delayed_recipe(name, module)):
            raise _distribution_error(layout, name, why)
    return modules


def _distribution_error(layout: Layout, name: str, why: str) -> WorldError:
    return WorldError(f"parallel.expert is {layout.expert}, but {name} cannot be distributed over ranks: {why}")


def _obstacle(module: nn.Module, ranks: int, delayed: str | None) -> str | None:
    """Return the reason why these experts cannot be distributed over ``ranks``, with the fix, or None if they can."""
    experts = module._parameters["gate_up_proj"].shape[0]  # type: ignore[union-attr]
    by_expert = {f"{name}{suffix}" for name in moe.PROJECTIONS for suffix in ("", "_bias")}
    if shared := sorted(name for name, _ in module.named_parameters() if name not in by_expert):
        return f"its parameter {shared[0]} is shared by all experts. Set parallel.expert: 1"
    if experts % ranks:
        return (
            f"its {experts} experts are not a multiple of the {ranks} ranks (shard x context) that share a copy of the "
            "model, and each rank must hold whole experts. Use parallel.replicate for more copies of fewer ranks"
        )
    if any(is_frozen(parameter) for parameter in module.parameters()):
        return "its weights are frozen in FP8 and must be gathered as codes. Set parallel.expert: 1"
    if delayed is not None:
        return f"{delayed} keeps an amax history per expert. Use another fp8.recipe for it"
    if not isinstance(module, moe.Experts) and (why := moe.why_not(module)) is not None:
        return f"{why}. Set parallel.expert: 1"
    return None


def _difference_from_stock(module: nn.Module) -> str | None:
    """Return how results would differ if rows are grouped by expert, or None if they are the same."""
    meta = any(p.is_meta for p in module.parameters())
    return moe.stand_in_matches(module) if meta else moe.matches_stock(module)


def _distribute(module: nn.Module, mesh: DeviceMesh | None) -> None:
    assert mesh is not None
    axis = mesh["expert"]
    for name, parameter in list(module._parameters.items()):
        if parameter is not None:
            setattr(module, name, nn.Parameter(_local_part(parameter, axis), requires_grad=parameter.requires_grad))
    if not isinstance(module, moe.Experts):
        moe.enable_row_forward(module)
    module.__dict__[moe.EXCHANGE] = moe.Exchange(axis.get_group(), axis.size())


def _local_part(parameter: Tensor, axis: DeviceMesh) -> DTensor:
    """Return this rank's experts of a parameter [E, ...], as a DTensor of the full parameter."""
    num_local = parameter.shape[0] // axis.size()
    first = axis.get_local_rank() * num_local
    part = part_of(parameter, first, first + num_local)
    dtensor = DTensor.from_local(part, axis, [Shard(0)], run_check=False)
    # from_local takes a view of the part, and viewing FP8 codes would dequantize them.
    dtensor._local_tensor = part
    return dtensor


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the submesh over which FSDP2 shards experts: all axes except the last, "expert"."""
    names = mesh.mesh_dim_names
    assert names is not None
    return mesh[names[:-1]] if len(names) > 2 else mesh[names[0]]
