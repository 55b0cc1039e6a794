"""The groups of parameters that FSDP2 gathers together: the parameters of a block, or of the root.

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
from octavo.train.estimate.memory.states import Held
from octavo.train.estimate.step_time.wire import Group


def groups(
    cfg: Config, held: Iterable[Held], plan: fp8.Plan, reached: Collection[str], layout: Layout
) -> tuple[Group, ...]:
    """Return the groups of this layout.

    For ``reached`` see :func:`octavo.train.estimate.memory.states.backward_reaches`.
    """
    dealt = states.experts_of(plan) if layout.expert > 1 else frozenset()
    held, plan = states.dealt(held, plan, layout.expert)
    coded = {states.weight_name(row): row for row in states.fp8_weights(plan)}
    backward = _in_backward(held, reached)
    sizes: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])  # bytes: gathered, reduced
    for p in held:
        name, shape = stock_name(p.name), p.shape or (1,)
        ranks = layout.sharded // (layout.expert if name in dealt else 1)
        casts = states.casts_of(coded[name]) if name in coded else [p.codes] if p.codes is not None else []
        turned = p.turned or (name in coded and len(shape) == 3 and shape[1:] != coded[name].shape)
        each = states.sent_width(cfg, p.width(cfg)) * p.elements(ranks)
        sums = sizes[p.block, ranks]
        if casts:
            sums[0] += states.shard_of_codes((shape[0], *(shape[1:][::-1] if turned else shape[1:])), casts, ranks)
        else:
            sums[0] += each
        sums[1] += each if p.trained else 0
    return tuple(
        Group(block, ranks, gathered, reduced, block in backward)
        for (block, ranks), (gathered, reduced) in sizes.items()
    )


def _in_backward(held: Iterable[Held], reached: Collection[str]) -> frozenset[str]:
    """The blocks that are gathered again for backward; the root stays gathered.

    They are the blocks that the backward reaches and the one before them in forward order (a frozen tower's last),
    which FSDP2 prefetches without need.
    """
    blocks = list(dict.fromkeys(p.block for p in held if p.block))
    trained = {p.block for p in held if p.trained}
    visited = [b for b in blocks if b in trained or any(name.startswith(f"{b}.") for name in reached)]
    ahead = blocks[: blocks.index(visited[0])][-1:] if visited else []
    return frozenset(visited + ahead)
