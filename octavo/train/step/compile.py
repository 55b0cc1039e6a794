"""``train.compile``: each repeating block under torch.compile.

Blocks of one kind share their compiled code, which does not contain what differs between them (weights, layer numbers).
So a model of 36 blocks compiles as fast as one of two. Only ``forward`` is compiled. Hooks on a block, such as FSDP2's
that gather its weights, stay outside, as do names, state dicts and the code between blocks.

A compiled graph does not know layer names, so steps that count by layer run eagerly: the first step that reaches a
component (the proof that its FP8 GEMMs match the plan) and steps with health figures. Kernels and casts are the same;
what Inductor fuses between them rounds to BF16 less often, so losses agree closely but not bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from octavo import models
from octavo.train.errors import TrainError


def compile_blocks(model: nn.Module, family: models.Family, twice: bool = False) -> int:
    """Compile every block of the model in place; return their number. ``twice``: a step runs backward twice through one
    graph, as clipped updates in backward do.

    Call it last, after converting, recomputation and sharding, because it compiles the forward that a block then has.

    Raises TrainError for a model without blocks. Errors of the compiler appear in the first compiled step, also as a
    TrainError (:func:`step`).
    """
    blocks = family.layers(model)
    if not blocks:
        raise TrainError(
            f"train.compile: true needs repeating blocks, but {family.name} names none. Use compile: false"
        )
    if twice:  # otherwise compiled backward reuses saved tensors' memory, and refuses a retained graph
        from torch._functorch import config

        config.donated_buffer = False
    for _, block in blocks:
        block.forward = torch.compile(block.forward)
    return len(blocks)


@contextmanager
def step(eager: bool) -> Iterator[None]:
    """Context for the forwards and backwards of one step of a compiled model; ``eager``: run without compiled code.

    Raises TrainError if the compiler fails.
    """
    import torch._dynamo

    stance = torch.compiler.set_stance("force_eager" if eager else "default")
    try:
        with stance:
            yield
    except torch._dynamo.exc.TorchDynamoException as error:
        reason = " ".join(str(error).split())
        raise TrainError(
            f"train.compile: a block cannot be compiled: {reason[:300]}. On a CPU torch.compile "
            "needs a C++ compiler, on a GPU Triton and a C compiler; install them, or use compile: false"
        ) from error
