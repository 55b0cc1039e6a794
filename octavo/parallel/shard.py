"""FSDP2 sharding: every block of the model is a shard group, and the root has all other parameters. With copies of the
model (the mesh's axis "replicate") each copy is sharded over its own ranks, and every rank trains on different rows.

Differences from plain FSDP2:

- Gradients are *summed* over ranks, not averaged. Octavo divides losses by the count of the global batch before
  backward (`train.forward.losses`), so the sum over all ranks and copies is already the gradient of one process.
- Everything outside blocks (embeddings, final norm, projector, lm_head) stays in the root's group. So tied embeddings
  and lm_head are in one group, which FSDP2 requires for a shared parameter.
- Frozen and trainable parameters may share a block; only the gradients of trainable ones are reduced.
- Parameters are gathered in their own dtype, FP8 weights (`fp8.param`) as codes and scales: a rank computes with the
  same bits as one process. With ``gather_dtype=torch.bfloat16`` weights are gathered and gradients summed in BF16,
  which halves the bytes of fp32 and computes the forward of a BF16 model. Shards keep their dtype for updates and
  checkpoints; FP8 weights are still sent as codes, and get BF16 gradients.
- Experts that are distributed over ranks are a separate group in each block (:mod:`octavo.parallel.experts`).
- Two blocks are gathered at a time: the current one and the next.

Every rank must run every block in every step, forward and backward, because collectives are matched by order. A vision
tower therefore always runs: `octavo.models.forward.unused_towers.attach_dummy_image` gives ranks without an image a
dummy.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from itertools import pairwise
from typing import Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from octavo.parallel.experts import distribute_experts, fsdp_mesh
from octavo.parallel.world import World, WorldError


class HasLayers(Protocol):
    """The part of a model's description that `shard` uses (`models.Family` has it)."""

    def layers(self, model: nn.Module) -> list[tuple[str, nn.Module]]: ...


def shard(
    model: nn.Module,
    family: HasLayers,
    world: World,
    reshard_after_forward: bool = True,
    gather_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Shard `model` in place over the ranks of `world` and return it. Does nothing in one process.

    Call after freezing and `fp8.apply`, and before the optimizer is created: parameters become DTensors, split along
    dim 0 over the last axis of the mesh, and keep their names. All ranks must hold the same weights (same file, same
    seed), or none (then `fill` reads them).

    reshard_after_forward  free a block's gathered weights after its forward and gather them again for backward; False
                           keeps them, which is faster but needs memory for the full model on each rank between the two
    gather_dtype           the dtype in which ranks send weights and gradients, or None for the dtype of each; the
                           caller's forward must expect it

    Raises WorldError if the description finds no block, or if two blocks share a parameter.
    """
    if world.mesh is None:
        return model
    blocks = family.layers(model)
    if not blocks:
        raise WorldError(
            f"{type(model).__name__} cannot be sharded over {world.size} ranks: its description names no repeating "
            "blocks. Run it in one process, or add its blocks to layer_globs in octavo/models/structure/describe.py"
        )
    _check_unshared(model, blocks)
    # Inputs of blocks are not cast: they include positions that a model computes in fp32 on purpose.
    policy = MixedPrecisionPolicy(param_dtype=gather_dtype, reduce_dtype=gather_dtype, cast_forward_inputs=False)
    if world.experts is not None:
        expert_mesh = fsdp_mesh(world.experts)
        for module in distribute_experts(model, world):
            fully_shard(module, mesh=expert_mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    for _, block in blocks:
        fully_shard(block, mesh=world.mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    # Logits are a view of their GEMM's output. FSDP2 warns that an in-place write would lose its hook; users cannot
    # change that, and Octavo's losses do not write to logits in place.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(FSDP" + type(model).__name__)
    # Backward starts with the root's weights, so they stay gathered, as FSDP2 does by default for the root.
    fully_shard(model, mesh=world.mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Dividing by 1 gives a sum. A plain factor would need a pre-multiplied sum, which Gloo does not support.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    _set_prefetch([name for name, _ in blocks], dict(blocks))
    return model


def _set_prefetch(names: list[str], blocks: Mapping[str, nn.Module]) -> None:
    """Prefetch the next block of a list at the start of a block's forward, so that its weights arrive during the
    computation. FSDP2 would start too late when the host waits for the device (for the row counts of
    each rank's experts, or the boundaries of images). In backward FSDP2 prefetches by itself."""
    for name, following in pairwise(names):
        block = blocks[name]
        if name.rpartition(".")[0] == following.rpartition(".")[0] and isinstance(block, FSDPModule):
            block.set_modules_to_forward_prefetch([m for m in blocks[following].modules() if isinstance(m, FSDPModule)])


def _check_unshared(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> None:
    """Raise WorldError if blocks share a parameter; FSDP2 would fail only in the first forward."""
    owner: dict[int, str] = {}
    inside = {
        f"{name}.{inner}": name for name, block in blocks for inner, _ in block.named_parameters(remove_duplicate=False)
    }
    for name, parameter in model.named_parameters(remove_duplicate=False):
        group = inside.get(name, "the root")
        if owner.setdefault(id(parameter), group) != group:
            raise WorldError(
                f"the parameter {name} is shared between {owner[id(parameter)]} and {group}, but a parameter must "
                "belong to one shard group. Untie it, or run in one process"
            )
