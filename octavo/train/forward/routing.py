"""Mixtures of experts in training: the routers' load-balancing loss, and how evenly the experts are used.

The loss is transformers' own for the family (Switch Transformer, equations 4 to 6), over all layers of one micro-batch
and its tokens without padding: E * sum over experts of (choices per token) * (mean routing probability). It equals k if
the k choices of all tokens and their probabilities are spread evenly. A step minimizes

    cross-entropy + router_aux_loss_coef * sum over micro-batches and ranks of (its tokens / the step's tokens) * loss

so the factors add up to 1 for every split of the global batch, and all tokens have the same weight. (The loss of a
whole global batch would need all routing before the first backward.) Where ranks share a row, see
`train.forward.balance`.

Loads are counted on the device, from the indices with which an expert module is called, and read once per step.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octavo.config import Config
from octavo.fp8 import observe
from octavo.fp8.moe import is_experts
from octavo.parallel import World
from octavo.train.errors import TrainError
from octavo.train.forward.forward import real


def aux_loss_coef(cfg: Config, model: nn.Module) -> float:
    """Return the coefficient of the load-balancing loss: `train.router_aux_loss_coef`, by default the checkpoint's.

    If it is 0, the loss is not computed. Raises TrainError if it is set but the model has no such loss.
    """
    setting = cfg.train.router_aux_loss_coef
    whole = getattr(model, "config", None)
    config = whole.get_text_config() if whole is not None and hasattr(whole, "get_text_config") else whole
    default = getattr(config, "router_aux_loss_coef", None)
    experts = any(is_experts(module) for module in model.modules())
    if experts and default is not None and _has_aux_loss(model):
        return float(default if setting is None else setting)
    if setting:
        why = (
            "computes no load-balancing loss in this version of transformers"
            if experts
            else "is not a mixture of experts and has no router"
        )
        raise TrainError(f"train.router_aux_loss_coef is {setting:g}, but {type(model).__name__} {why}. Remove the key")
    return 0.0


def _has_aux_loss(model: nn.Module) -> bool:
    """True if the model returns an `aux_loss` for output_router_logits=True.

    Not every version names that argument in the signature, but the module of the model's class has the loss function.
    """
    known = inspect.signature(model.forward).parameters
    file = inspect.getmodule(type(model))
    return "output_router_logits" in known or (
        hasattr(file, "load_balancing_loss_func") and any(p.kind is p.VAR_KEYWORD for p in known.values())
    )


class ExpertLoad:
    """Counts the (token, choice) pairs of each expert of each layer in one step, without padding."""

    def __init__(self, model: nn.Module) -> None:
        self._counts: list[Tensor] | None = None
        self._real: Tensor | None = None
        self._images: Tensor | None = None  # mask of image tokens, in models with separate experts for them
        layers = {name: module for name, module in model.named_modules() if is_experts(module)}
        self._names = tuple(layers)
        self._experts = [module._parameters["gate_up_proj"].shape[0] for module in layers.values()]
        for layer, module in enumerate(layers.values()):
            module.register_forward_pre_hook(partial(self._count, layer), with_kwargs=True)

    @property
    def layers(self) -> int:
        return len(self._names)

    def begin(self, device: torch.device) -> None:
        """Start counting from zero."""
        # The last entry counts indices that name no expert.
        self._counts = [torch.zeros(experts + 1, device=device) for experts in self._experts]

    def batch(self, batch: dict[str, Any], device: torch.device, part: slice = slice(None)) -> None:
        """Set the micro-batch of the next forwards; ``part`` is the slice of its tokens on this rank."""
        if self._counts is not None:
            mask = real(batch)
            if not batch["meta"].tokens:  # a placeholder row, which keeps a rank in step, does not count
                mask = torch.zeros_like(batch["input_ids"])
            self._real = None if mask is None else mask[:, part].to(device, torch.float32).reshape(-1)
            kinds = batch.get("moe_mm_token_type_ids")
            here = None if kinds is None else kinds[:, part].to(device).reshape(-1).bool()
            self._images = here if here is not None and bool(here.any()) else None

    @torch._disable_dynamo  # Dynamo would trace a condition of the host into the block
    def _count(self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._counts is None or not module.training:
            return
        if observe.phase() != observe.Phase(counted=True, recompute=False):
            return
        inputs = [*args, *kwargs.values()]
        index = inputs[1] if len(inputs) > 1 else None
        if not isinstance(index, Tensor) or index.is_floating_point():
            return
        count, real = self._counts[layer], self._real
        if real is not None and self._images is not None:
            real = real[self._images if ".vision_moe." in self._names[layer] else ~self._images]
        experts = count.shape[0] - 1
        flat = index.reshape(-1)
        bucket = torch.where((flat >= 0) & (flat < experts), flat, experts)
        if real is not None and real.shape[0] == index.shape[0]:
            weight = real.unsqueeze(1).expand(index.shape).reshape(-1)
        else:
            weight = torch.ones_like(bucket, dtype=torch.float32)
        count.scatter_add_(0, bucket, weight)  # integers below 2^24 in fp32: exact in any order

    def end(self, world: World) -> dict[str, Any]:
        """Stop counting, and return the figures of the step over all ranks. Collective call.

        expert_load_max, expert_load_min   the largest and smallest share of a layer's pairs for one expert, over all
                                           layers; both are 1 / E if the load is even
        experts_idle                       number of experts without a token, over all layers
        experts                            the same figures by layer: {"max", "min", "idle"}
        """
        assert self._counts is not None
        counts, self._counts, self._real, self._images = self._counts, None, None, None
        flat = world.sum(torch.cat([count[:-1] for count in counts]).double()).cpu()
        table = {}
        for name, pairs in zip(self._names, flat.split(self._experts), strict=True):
            share = pairs / pairs.sum().clamp(min=1)
            table[name] = {"max": float(share.max()), "min": float(share.min()), "idle": int((pairs == 0).sum())}
        return {
            "expert_load_max": max(row["max"] for row in table.values()),
            "expert_load_min": min(row["min"] for row in table.values()),
            "experts_idle": sum(row["idle"] for row in table.values()),
            "experts": table,
        }
