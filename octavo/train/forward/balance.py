"""The routers' load-balancing loss over a row whose tokens several ranks share.

transformers' loss (Switch Transformer, equations 4 to 6) over the N rows of all layers, without padding, is

    E * sum over experts e of F_e P_e       F_e = choices of e / N, P_e = sum of its probabilities / N

a product of two sums over tokens. So it is not the mean of the losses of each rank's tokens. Choices have no gradient:
with F_e and N summed over the ranks, the loss is a sum over tokens, of which each rank computes its part::

    E * sum over e of F_e (sum of its probabilities over this rank's tokens) / N

The parts and their gradients add up to the loss and the gradients of one process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from octavo.parallel import Context
from octavo.train.errors import TrainError


def local_part(output: Any, model: nn.Module, real: Tensor | None, context: Context) -> Tensor:
    """Return this rank's part of the loss, a scalar. `real` [t] is 1 for tokens and 0 for padding, or None if there is
    no padding. Collective call of the context.

    Raises TrainError if the model does not return router logits.
    """
    logits = getattr(output, "router_logits", None)
    config: Any = model.config
    choices = getattr(config.get_text_config(), "num_experts_per_tok", None)
    if not isinstance(logits, tuple) or not logits or choices is None:
        raise TrainError(
            f"{type(model).__name__} returned no router logits, from which the load-balancing loss is computed where "
            "ranks share a row. Set train.router_aux_loss_coef: 0, or parallel.context: 1"
        )
    experts, device = logits[0].shape[-1], logits[0].device
    weight = torch.ones(logits[0].shape[0], device=device) if real is None else real.to(device, torch.float32)
    chosen = torch.zeros(experts + 1, dtype=torch.float64, device=device)  # the last entry counts rows
    probabilities = torch.zeros(experts, device=device)
    for layer in logits:
        routing = layer.to(device).softmax(-1)
        picked = routing.topk(choices, -1).indices.flatten()
        chosen[:-1].scatter_add_(0, picked, weight.double().repeat_interleave(choices))
        probabilities = probabilities + (routing.float() * weight[:, None]).sum(0)
    chosen[-1] = weight.sum() * len(logits)
    counts, rows = context.sum(chosen).float().split([experts, 1])
    return experts * (counts / rows * probabilities / rows).sum()
