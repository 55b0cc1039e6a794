"""The groups of parameters that FSDP2 gathers together: one per block, and one for the root.

FSDP2 splits a parameter along its first dimension into equal numbers of rows and pads the last, so all ranks send the
same amount. Experts are first distributed over the `parallel.expert` ranks, then split over the remaining ranks, and
form separate groups. The model may be on the meta device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

from octavo import fp8
from octavo.adapters.experts import stock_name
from octavo.config import Config
from octavo.parallel import Layout
from octavo.train.estimate.memory import states
from octavo.train.estimate.memory.states import ParameterInfo
from octavo.train.estimate.step_time.wire import Group


def groups(
    cfg: Config, parameters: Iterable[ParameterInfo], plan: fp8.Plan, reached: Collection[str], layout: Layout
) -> tuple[Group, ...]:
    """Return the groups of this layout.

    For ``reached`` see :func:`octavo.train.estimate.memory.states.reached_by_backward`.
    """
    sharded_experts = states.expert_parameters(plan) if layout.expert > 1 else frozenset()
    parameters, plan = states.shard_experts(parameters, plan, layout.expert)
    fp8_rows = {states.weight_name(row): row for row in states.fp8_weights(plan)}
    backward = _in_backward(parameters, reached)
    sizes: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])  # bytes: gathered, reduced
    for p in parameters:
        name, shape = stock_name(p.name), p.shape or (1,)
        ranks = layout.sharded // (layout.expert if name in sharded_experts else 1)
        casts = states.weight_casts(fp8_rows[name]) if name in fp8_rows else [p.codes] if p.codes is not None else []
        transposed = p.transposed or (name in fp8_rows and len(shape) == 3 and shape[1:] != fp8_rows[name].shape)
        value_bytes = states.sent_width(cfg, p.width(cfg)) * p.elements(ranks)
        totals = sizes[p.block, ranks]
        if casts:
            inner = shape[1:][::-1] if transposed else shape[1:]
            totals[0] += states.shard_code_bytes((shape[0], *inner), casts, ranks)
        else:
            totals[0] += value_bytes
        totals[1] += value_bytes if p.trained else 0
    return tuple(
        Group(block, ranks, gathered, reduced, block in backward)
        for (block, ranks), (gathered, reduced) in sizes.items()
    )


def _in_backward(parameters: Iterable[ParameterInfo], reached: Collection[str]) -> frozenset[str]:
    """Return the blocks that are gathered again for backward; the root stays gathered.

    These are the blocks that backward reaches, and the block before them in forward order (the last block of a frozen
    tower), which FSDP2 prefetches although it is not needed.
    """
    blocks = list(dict.fromkeys(p.block for p in parameters if p.block))
    trained = {p.block for p in parameters if p.trained}
    reached_blocks = [b for b in blocks if b in trained or any(name.startswith(f"{b}.") for name in reached)]
    prefetched = blocks[: blocks.index(reached_blocks[0])][-1:] if reached_blocks else []
    return frozenset(reached_blocks + prefetched)
