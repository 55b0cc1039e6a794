"""FSDP2 over the ranks: every block of the model is one shard group, the rest is the root's. With copies of the model
(the mesh's axis "replicate") each copy is sharded over its own ranks, and every rank has data of its own.

What is particular here:

- Gradients are *summed* over ranks, not averaged. Octavo's losses are divided by the count of the whole global batch
  before backward (`train.forward.losses`), so the sum over ranks, of all copies, is already the gradient that one
  process would have.
- Whatever is no block (embeddings, final norm, projector, lm_head) stays in the root's group. So tied embeddings
  and lm_head are always in one group, which FSDP2 demands of a shared parameter.
- Frozen and trainable parameters may share a block; only trainable ones take part in the gradient's reduction.
- Parameters are gathered in their own dtype, FP8 weights (`fp8.param`) as codes and scales: what a rank computes with
  is bit for bit what one process has. With ``gather=torch.bfloat16`` values are gathered, and gradients summed, in
  BF16: half the bytes of fp32, and a forward that computes as a BF16 model does. Shards stay as they are, with what is
  added up in them and saved; FP8 weights send their codes as ever, and BF16 gradients.
- Experts that are dealt to ranks are a group of their own in each block (:mod:`octavo.parallel.experts`).
- Two blocks are whole at a time: the one that computes and the next.

Every rank must run every block in every step, forward and backward alike: collectives are matched by order. A vision
tower therefore always runs; `octavo.models.forward.unused_towers.attach_dummy_image` sees to it on ranks without an
image.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from itertools import pairwise
from typing import Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from octavo.parallel.experts import deal, rest_of
from octavo.parallel.world import World, WorldError


class HasLayers(Protocol):
    """What `shard` asks of a model's description (`models.Family` is one)."""

    def layers(self, model: nn.Module) -> list[tuple[str, nn.Module]]: ...


def shard(
    model: nn.Module,
    family: HasLayers,
    world: World,
    reshard_after_forward: bool = True,
    gather: torch.dtype | None = None,
) -> nn.Module:
    """Shard `model` in place over the ranks of `world` and return it; one process: nothing happens.

    Call after freezing and after `fp8.apply`, before the optimizer is made: parameters become DTensors, split along
    dim 0 over the last axis of the mesh, under their old names. All ranks must hold the same weights (same file, same
    seed), or none (`fill` gives them). `reshard_after_forward` frees a block's gathered weights after its forward and
    gathers them again for backward; False keeps them: faster, and the memory of the whole model on each rank between
    the two. `gather`: the dtype of values and gradients on their way between ranks; None is their own. The caller's
    forward must expect it.

    Raises WorldError if the description finds no block, or two blocks share a parameter.
    """
    if world.mesh is None:
        return model
    blocks = family.layers(model)
    if not blocks:
        raise WorldError(
            f"{world.size} ranks were asked to share {type(model).__name__}, but its description names no repeating "
            "block to shard. Run it in one process, or add its blocks to layer_globs in "
            "octavo/models/structure/describe.py"
        )
    _check_unshared(model, blocks)
    # Inputs of blocks are left alone: positions that a model computes in fp32 on purpose are among them.
    way = MixedPrecisionPolicy(param_dtype=gather, reduce_dtype=gather, cast_forward_inputs=False)
    if world.experts is not None:
        rest = rest_of(world.experts)
        for module in deal(model, world):
            fully_shard(module, mesh=rest, reshard_after_forward=reshard_after_forward, mp_policy=way)
    for _, block in blocks:
        fully_shard(block, mesh=world.mesh, reshard_after_forward=reshard_after_forward, mp_policy=way)
    # Logits are a view of their GEMM's output. FSDP2 warns of that, because writing into them would lose its hook; a
    # user can do nothing about it, and Octavo's losses write into no logits.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(FSDP" + type(model).__name__)
    # The root's weights are wanted again right at the start of backward: FSDP2's default keeps them gathered.
    fully_shard(model, mesh=world.mesh, mp_policy=way)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Divide by 1 = sum. Gloo has no pre-multiplied sum, which a plain factor would ask for; NCCL does
            # not mind.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    _fetch_ahead([name for name, _ in blocks], dict(blocks))
    return model


def _fetch_ahead(names: list[str], blocks: Mapping[str, nn.Module]) -> None:
    """As a block's forward begins, the next one of its list is asked for: weights are on their way while it computes,
    also where the host then waits for the device (to know how many rows go to each rank's experts, or where images
    end) and could not ask in time. In backward FSDP2 does so by itself."""
    for name, after in pairwise(names):
        block = blocks[name]
        if name.rpartition(".")[0] == after.rpartition(".")[0] and isinstance(block, FSDPModule):
            block.set_modules_to_forward_prefetch([m for m in blocks[after].modules() if isinstance(m, FSDPModule)])


def _check_unshared(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> None:
    """A parameter of a block must live in that block alone; FSDP2 would only say so in the first forward."""
    owner: dict[int, str] = {}
    inside = {
        f"{name}.{inner}": name for name, block in blocks for inner, _ in block.named_parameters(remove_duplicate=False)
    }
    for name, parameter in model.named_parameters(remove_duplicate=False):
        home = inside.get(name, "the root")
        if owner.setdefault(id(parameter), home) != home:
            raise WorldError(
                f"the parameter {name} is shared between {owner[id(parameter)]} and {home}; a shard group must own "
                "its parameters alone. Untie it, or run in one process"
            )
