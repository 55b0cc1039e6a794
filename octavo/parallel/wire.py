"""Communication: counts the bytes that a rank receives in each collective, and selects what is sent as FP8 codes.

Each of n ranks receives, independently of the algorithm:

=============== ====================================================================================
all_gather      (n - 1) x what a rank sends
reduce_scatter  (n - 1) x a shard: the other ranks' terms of its own shard
all_reduce      a reduce-scatter and a gather of n equal pieces: 2 (n - 1) x a piece
all_to_all      the parts that other ranks send to it
broadcast       the tensor, except on the source rank
=============== ====================================================================================

:class:`CommCounter` counts the bytes of the collectives in a context; :mod:`octavo.train.estimate.step_time` predicts
them.

:func:`enable_fp8_exchange` (`train.exchange: fp8`) makes ranks exchange FP8 codes where a layer's recipe casts the
values row by row with power-of-two scales anyway (:mod:`octavo.fp8.dense.wire`): the output of attention before o_proj
if ranks share rows, the rows dispatched to experts before gate_up_proj, and the gradients of their results before
down_proj. Everything else is sent in its own dtype.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.fp8 import Linear, moe
from octavo.fp8.dense import WIRE_FORMAT_KEY, WireFormat
from octavo.parallel.errors import WorldError
from octavo.parallel.world import World

# A smaller all-reduce is of a step's statistics (counts, losses, norms), not of its gradients.
SMALL_REDUCE_BYTES = 1024

_OPS = {
    "all_gather": ("allgather_", "_allgather_base_", "all_gather_into_tensor", "all_gather_into_tensor_out"),
    "reduce_scatter": ("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor"),
    "all_reduce": ("allreduce_", "all_reduce", "all_reduce_"),
    "all_to_all": ("alltoall_", "alltoall_base_", "all_to_all_single"),
    "broadcast": ("broadcast_", "broadcast"),
}
_GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)
_SENDS_NOTHING = ("wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_")
_COLLECTIVE_OF_OP = {op: collective for collective, ops in _OPS.items() for op in ops}

# If an attention module has no other children, the attention output is the unchanged input of o_proj.
_ATTENTION_CHILDREN = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "rotary_emb"}
NO_CODED_EXCHANGE = (
    "train.exchange is fp8, but no layer casts exchanged values row by row with power-of-two scales. Use a recipe "
    "such as blockwise or mxfp8 in all three GEMMs of o_proj (with heads of whole blocks) or of experts, or set "
    "train.exchange: stored"
)


def all_reduce_bytes(size: int, ranks: int) -> int:
    """Return the bytes that each rank receives in an all-reduce of `size` bytes."""
    return 2 * (ranks - 1) * -(-size // ranks)


class CommCounter(TorchDispatchMode):
    """Context manager that counts the bytes that this rank receives in the collectives of this thread.

    ``bytes``: collective -> bytes; ``calls``: collective -> calls. All-reduces of less than :data:`SMALL_REDUCE_BYTES`
    bytes, of integers (amaxes of blocks that two ranks share) and of fp64 (counts) count as "figures". Backward is
    counted if it runs in the same thread, as on a CPU. Raises NotImplementedError for a collective without a rule.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented  # DTensor calls collectives on plain tensors, which are dispatched here too
        namespace = getattr(func, "namespace", "")
        if namespace in ("c10d", "_c10d_functional"):
            self._count(func._opname, args)
        return func(*args, **(kwargs or {}))

    def _count(self, op: str, args: Sequence[Any]) -> None:
        if op in _SENDS_NOTHING:
            return
        if op not in _COLLECTIVE_OF_OP:
            raise NotImplementedError(f"the collective {op} has no rule for its bytes; add one to octavo.parallel.wire")
        collective, group = _COLLECTIVE_OF_OP[op], _group(args)
        size, sent = group.size(), _tensors(args)
        if collective == "all_gather":  # the result comes first among c10d's arguments
            received = (size - 1) * _nbytes(sent[-1])
        elif collective == "reduce_scatter":
            received = (size - 1) * (_nbytes(sent[0]) // (size if op == "reduce_scatter_tensor" else 1))
        elif collective == "all_reduce":
            received = all_reduce_bytes(_nbytes(sent[0]), size)
            if _nbytes(sent[0]) < SMALL_REDUCE_BYTES or sent[0].dtype not in _GRADIENTS:
                collective = "figures"
        elif collective == "broadcast":
            received = _nbytes(sent[0])
        else:
            received = _all_to_all_bytes(args, group)
        self.bytes[collective] += received
        self.calls[collective] += 1


def _all_to_all_bytes(args: Sequence[Any], group: dist.ProcessGroup) -> int:
    """Return the bytes received from other ranks in an all-to-all, with split sizes or in equal parts."""
    tensors, rank, size = _tensors(args), group.rank(), group.size()
    splits = next((a for a in args if isinstance(a, list | tuple) and a and isinstance(a[0], int)), None)
    if splits is None:
        return _nbytes(tensors[0]) * (size - 1) // size
    row = math.prod(tensors[0].shape[1:]) * tensors[0].element_size()
    return row * (sum(splits) - splits[rank])


def _group(args: Sequence[Any]) -> dist.ProcessGroup:
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(arg)
            except RuntimeError:  # a ReduceOp is a ScriptObject too
                continue
    name = next(arg for arg in reversed(args) if isinstance(arg, str))
    return dist.distributed_c10d._resolve_process_group(cast("dist.distributed_c10d.GroupName", name))


def _tensors(args: Sequence[Any]) -> list[Tensor]:
    """Return all tensors among the arguments and in their lists, in order."""
    out: list[Tensor] = []
    for arg in args:
        out += [arg] if isinstance(arg, Tensor) else _tensors(arg) if isinstance(arg, list | tuple) else []
    return out


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def predicted_collectives(received: Mapping[str, int]) -> dict[str, int]:
    """Return the collectives that the estimate predicts, without "figures" and collectives of 0 bytes."""
    return {name: size for name, size in received.items() if name != "figures" and size}


def enable_fp8_exchange(model: nn.Module, world: World, head_dim: int) -> tuple[int, int]:
    """Make the layers of a sharded model exchange FP8 codes; return how many attention and expert modules do.

    Raises WorldError if ranks share rows or experts but no layer can exchange codes.
    """
    outputs = experts = 0
    for module in model.modules():
        if moe.EXCHANGE in module.__dict__ and isinstance(module, moe.Experts):
            exchange = module.__dict__[moe.EXCHANGE].with_codes(module)
            module.__dict__[moe.EXCHANGE] = exchange
            experts += exchange.rows is not None or exchange.gradients is not None
        elif world.layout.context > 1 and isinstance(output := getattr(module, "o_proj", None), Linear):
            coding = WireFormat.for_inputs(output.recipe, head_dim)
            if coding is not None and {name for name, _ in module.named_children()} <= _ATTENTION_CHILDREN:
                module.__dict__[WIRE_FORMAT_KEY] = coding
                outputs += 1
    if not outputs and not experts and (world.layout.context > 1 or world.layout.expert > 1):
        raise WorldError(NO_CODED_EXCHANGE)
    return outputs, experts
