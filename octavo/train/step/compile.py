"""``train.compile``: the repeating blocks under torch.compile, each on its own.

Blocks of one kind share their compiled code: what differs between them (weights, numbers of layers) is no part of it,
so a model of 36 blocks is compiled as fast as one of two. Only ``forward`` is compiled. Hooks on a block, as FSDP2's
that gather its weights, stay outside, and so do names, state dicts and the code between blocks.

A compiled graph knows no layer's name, so what has to be counted by layer runs eagerly: the first step that reaches a
component (the proof that its FP8 GEMMs are those of the plan) and the steps that take health figures. The kernels and
casts are the same; what Inductor fuses between them rounds to BF16 less often, so losses agree closely but not bit for
bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from octavo import models
from octavo.train.errors import TrainError


def compile_blocks(model: nn.Module, family: models.Family, twice: bool = False) -> int:
    """Let every block of the model run compiled from now on, in place; how many there are. ``twice``: a step goes
    backward twice through one graph, as clipped updates in backward do.

    Call it last, when blocks are converted, recomputed and sharded: what a block's class does then is compiled.

    Raises TrainError for a model without blocks. What the compiler itself cannot do shows at the first compiled step,
    as a TrainError too (:func:`step`).
    """
    blocks = family.layers(model)
    if not blocks:
        raise TrainError(
            f"train.compile: true was asked, but {family.name} names no repeating blocks to compile. Use compile: false"
        )
    if twice:  # or compiled code reuses the memory of what the forward saved, and refuses a graph that is retained
        from torch._functorch import config

        config.donated_buffer = False
    for _, block in blocks:
        block.forward = torch.compile(block.forward)
    return len(blocks)


@contextmanager
def step(eager: bool) -> Iterator[None]:
    """Around the forwards and backwards of one step of a compiled model; ``eager``: without the compiled code.

    Raises TrainError where the compiler fails.
    """
    import torch._dynamo

    stance = torch.compiler.set_stance("force_eager" if eager else "default")
    try:
        with stance:
            yield
    except torch._dynamo.exc.TorchDynamoException as error:
        reason = " ".join(str(error).split())
        raise TrainError(
            f"train.compile: true was asked, but a block cannot be compiled: {reason[:300]}. On a CPU torch.compile "
            "needs a C++ compiler, on a GPU Triton and a C compiler; install them, or use compile: false"
        ) from error
