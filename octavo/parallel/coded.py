"""What ranks exchange as FP8 codes (`train.exchange: fp8`): outputs of attention and rows of experts.

Of each layer what its FP8 recipe casts row by row with powers of two anyway (:mod:`octavo.fp8.dense.wire`): the output
of attention before o_proj where ranks share a row, the rows that go to experts before gate_up_proj, and the gradients
of their results before down_proj. All else travels as it is.
"""

from __future__ import annotations

from torch import nn

from octavo.fp8 import Experts, Linear, moe
from octavo.fp8.dense import CODING, Coding
from octavo.parallel.errors import WorldError
from octavo.parallel.world import World

# What a module of attention may consist of, for its output to be the input of o_proj as it is.
_KNOWN = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "rotary_emb"}
SENDS_NO_CODES = (
    "train.exchange is fp8, and no layer casts what ranks exchange row by row with powers of two: that needs a recipe "
    "such as blockwise or mxfp8, in all three GEMMs of o_proj (with heads of whole blocks) or of experts. Set "
    "train.exchange: stored"
)


def send_codes(model: nn.Module, world: World, head_dim: int) -> tuple[int, int]:
    """Let layers of a model that is sharded exchange codes; how many of attention and of experts do.

    Raises WorldError where none does, though ranks share rows or experts.
    """
    outputs = experts = 0
    for module in model.modules():
        if moe.EXCHANGE in module.__dict__ and isinstance(module, Experts):
            found = module.__dict__[moe.EXCHANGE].coded(module)
            module.__dict__[moe.EXCHANGE] = found
            experts += found.rows is not None or found.gradients is not None
        elif world.layout.context > 1 and isinstance(getattr(module, "o_proj", None), Linear):
            coding = Coding.of_x(module.o_proj.recipe, head_dim)  # type: ignore[union-attr]
            if coding is not None and {name for name, _ in module.named_children()} <= _KNOWN:
                module.__dict__[CODING] = coding
                outputs += 1
    if not outputs and not experts and (world.layout.context > 1 or world.layout.expert > 1):
        raise WorldError(SENDS_NO_CODES)
    return outputs, experts
