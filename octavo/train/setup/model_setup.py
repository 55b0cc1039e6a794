"""Assembles the model of a run: loaded, frozen, converted to FP8, with its adapters and critic.

One process reads weights first. Several ranks prepare a model without values, shard it and then fill it: each rank
reads the rows of its shards (`models.load_deferred`, `parallel.load_into_shards`), or draws all random numbers, which
come from one generator, and keeps its rows (`models.init_deferred`). DoRA needs the norms of rows first, so with DoRA
every rank has the whole model until it is sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from octavo import fp8, models
from octavo.config import Config
from octavo.fp8.blocks import grouped_attention
from octavo.fp8.delayed import move_scaling
from octavo.fp8.memory import ChunkedHead, synchronize_per_layer
from octavo.models.folder.quantization import read_quantization
from octavo.train.errors import TrainError
from octavo.train.forward import critic
from octavo.train.forward.forward import chunked_head, model_dtype
from octavo.train.setup import frozen_base
from octavo.train.setup.resolve_config import random_init

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LowerHalves = dict[str, torch.Tensor]


def assemble_model(
    cfg: Config,
    device: torch.device,
    plan: fp8.Plan,
    family: models.Family,
    log: Callable[[str], None] = lambda text: None,
    ranks: int = 1,
    later_plans: Iterable[fp8.Plan] = (),
) -> tuple[PreTrainedModel, LowerHalves, models.DeferredModel | models.DeferredInit | None]:
    """Return (model, lower halves, source of weights) of a configuration.

    The model is loaded, frozen and converted to FP8 as planned, with the adapters of `lora` and PPO's critic.
    `later_plans` are plans to which the run will switch. The optimizer keeps the lower halves of fp32 weights. The
    source fills a model without values after sharding; it is None if the model has values.

    Raises ModelError, PlanError and AdapterError.
    """
    # Freezing precedes FP8 (a frozen layer has no wgrad), which precedes adapters (they wrap FP8 layers). Dropout is
    # switched off twice: before FP8, because a fused block has none, and in the adapters.
    lower_halves: LowerHalves = {}
    unread_weights = None if ranks == 1 else _defer_weights(cfg, device, log)
    if unread_weights is None:
        model, lower_halves = load_weights(cfg, device, log)
    else:
        model = unread_weights.model
    frozen_base.freeze(model, family, cfg)
    frozen_base.switch_off_dropout(model, cfg)
    if cfg.lora is None and model_dtype(cfg) == torch.bfloat16:
        _cast_to_bf16(model, log)
    fp8.apply(model, plan, later_plans)
    move_scaling(model, device)
    if cfg.lora is not None:
        from octavo import adapters

        adapters.attach(model, family, cfg.lora, log, seed=cfg.run.seed, device=device)
    if critic.is_enabled(cfg):
        critic.attach(model, cfg, device)
    frozen_base.switch_off_dropout(model, cfg)
    return model, lower_halves, unread_weights


def _cast_to_bf16(model: nn.Module, log: Callable[[str], None]) -> None:
    """Convert trained weights to BF16 if the optimizer keeps their lower bits (`optimizer.master`).

    This includes weights that a family keeps in fp32 (routers of Ernie 4.5 VL, which computes with them in fp32).
    """
    in_fp32 = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p.dtype == torch.float32]
    for _, parameter in in_fp32:
        parameter.data = parameter.data.to(torch.bfloat16)
    if in_fp32:
        log(
            f"note: {len(in_fp32)} weights that this family keeps in fp32 are BF16 (optimizer.master): "
            f"{in_fp32[0][0]}, ..."
        )


def _defer_weights(
    cfg: Config, device: torch.device, log: Callable[[str], None]
) -> models.DeferredModel | models.DeferredInit | None:
    """Return the model before its weights are read, or None if they are needed immediately."""
    if cfg.lora is not None and cfg.lora.dora:
        return None
    if (seed_and_std := random_init(cfg)) is not None:
        _log_random_init(cfg, log)
        split = cfg.optimizer.master == "bf16+16"
        return models.init_deferred(
            cfg.model.path, torch.float32 if split else model_dtype(cfg), device, *seed_and_std, split=split
        )
    if cfg.optimizer.master == "bf16+16" and cfg.lora is None:
        _log_dequantized(cfg, log)
        return models.load_deferred(cfg.model.path, device=device, split=True, log=log)
    return models.load_deferred(cfg.model.path, model_dtype(cfg), device, **_fp8_load_options(cfg, log), log=log)


def load_weights(cfg: Config, device: torch.device, log: Callable[[str], None]) -> tuple[PreTrainedModel, LowerHalves]:
    """Return (model in the optimizer's dtype, quantized while it is read if requested; lower halves of fp32 weights if
    the optimizer keeps them)."""
    path = cfg.model.path
    if (seed_and_std := random_init(cfg)) is not None:
        _log_random_init(cfg, log)
        if cfg.optimizer.master == "bf16+16":
            return models.split_model(models.init_model(path, torch.float32, "cpu", *seed_and_std), device)
        return models.init_model(path, model_dtype(cfg), device, *seed_and_std), {}
    if cfg.optimizer.master == "bf16+16" and cfg.lora is None:
        _log_dequantized(cfg, log)
        return models.load_split(path, device=device, log=log)
    return models.load(path, dtype=model_dtype(cfg), device=device, **_fp8_load_options(cfg, log), log=log), {}


def _log_random_init(cfg: Config, log: Callable[[str], None]) -> None:
    std = "" if cfg.model.init_std is None else f", standard deviation {cfg.model.init_std:g}"
    log(f"note: weights are random (run.seed {cfg.run.seed}{std}); none are read from {cfg.model.path}")


def _fp8_load_options(cfg: Config, log: Callable[[str], None]) -> dict[str, Any]:
    """Return loading options for FP8 if the folder has codes or quantization is requested."""
    quantization, kinds = _log_dequantized(cfg, log), cfg.model.load_in_fp8.kinds
    if not kinds and quantization is None:
        return {}
    return {"load_in_fp8": kinds or None, "keep_fp8": frozen_base.keeps_codes(cfg)}


def _log_dequantized(cfg: Config, log: Callable[[str], None]) -> models.Quantization | None:
    """Return the folder's quantization, or None if it has none; `log` receives a line if its codes are dequantized."""
    quantization = read_quantization(cfg.model.path)
    if quantization is not None and not frozen_base.keeps_codes(cfg):
        why = "model.keep_fp8 is false" if cfg.lora is not None else "codes are only kept with adapters (lora)"
        log(
            f"note: {cfg.model.path} is in FP8 ({quantization}); its weights are dequantized while they are read: {why}"
        )
    return quantization


def reduce_saved_activations(
    model: PreTrainedModel, family: models.Family, plan: fp8.Plan, cfg: Config, log: Callable[[str], None]
) -> None:
    """Reduce the activations that blocks keep for backward, besides the inputs of FP8 layers: attention without
    repeated key-value heads, recomputation, offloading."""
    if any(plan.policy.activations_of(component) == "fp8" for component in family.components):
        try:
            models.use_attention(model, grouped_attention)
        except models.ModelError as error:  # attention then keeps more, which is not an error
            log(f"note: attention keeps as much as in high precision: {error}")
    blocks = family.layers(model)
    recompute = dict(cfg.train.recompute)
    for component, mode in recompute.items():
        component_blocks = [(name, block) for name, block in blocks if family.component_of(name) == component]
        if not component_blocks and mode == recompute["foundation"]:  # one value was given for all components
            continue
        if not component_blocks and mode != "none":
            raise TrainError(
                f"train.recompute.{component}: {mode}, but this {family.name} has no {component}. Remove it"
            )
        try:
            fp8.activation_checkpointing(component_blocks, mode)
        except ValueError as error:
            raise TrainError(f"train.recompute.{component}: {error}") from error
    if cfg.train.offload_activations:
        fp8.offload_activations(blocks)
    if cfg.train.synchronize_per_layer:
        synchronize_per_layer(blocks)


def make_chunked_head(model: nn.Module, cfg: Config, log: Callable[[str], None]) -> ChunkedHead | None:
    """Return the head that computes losses without full logits, or None if it is off or not possible; `log` then
    receives the reason."""
    if cfg.train.logits == "full":
        return None
    head = chunked_head(model)
    if isinstance(head, str):
        log(f"note: full logits are computed, not chunks (train.logits): {head}")
        return None
    return head
