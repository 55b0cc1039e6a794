"""Initialization of MPT: LLM-Foundry's `init_config`, or one standard deviation for all weights.

    kaiming_normal_   gain / sqrt(fan_in), which in every layer here but down_proj is d_model; relu: gain sqrt(2)
    baseline_         init_std
    small_init_       sqrt(2 / (5 d_model))                                  (Nguyen and Salazar, 2019)
    neox_init_        like small_init_, with outputs of blocks divided by n_layers / sqrt(10)

Layers that write into the residual stream (out_proj, down_proj) are divided by sqrt(2 n_layers), or by the number in
`init_div_is_residual`. Embeddings are drawn like other weights, or with `emb_init_std`. Norms are initialized to one,
biases to zero. If `initializer_range` is set (by transformers, or by `model.init_std`), it is the standard deviation of
every matrix, as in transformers' class.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from octavo.models.custom.mpt.configuration import MPTConfig
from octavo.models.errors import ModelError

RESIDUAL = "writes_residual"
"""The attribute of a linear layer that writes into the residual stream."""


def init_std(config: MPTConfig, module: nn.Linear | nn.Embedding) -> float:
    """Return the standard deviation of a layer's weights. Raises ModelError for an unknown scheme, and for fields that
    do not give a finite non-negative number."""
    try:
        deviation = _compute_std(config, module)
    except (TypeError, ValueError, ZeroDivisionError) as cause:  # from a field of the wrong type
        if isinstance(cause, ModelError):
            raise
        raise ModelError(
            f"init_config {config.init_config} gives no standard deviation of weights ({cause}). Correct it."
        ) from cause
    if not 0 <= deviation < math.inf:
        raise ModelError(
            f"init_config {config.init_config} gives weights a standard deviation of {deviation}. Correct it."
        )
    return deviation


def _compute_std(config: MPTConfig, module: nn.Linear | nn.Embedding) -> float:
    if config.initializer_range is not None:
        return config.initializer_range
    init = config.init_config
    assert init is not None  # complete since MPTConfig.__post_init__
    if init["emb_init_uniform_lim"] is not None:
        raise ModelError(f"init_config.emb_init_uniform_lim is {init['emb_init_uniform_lim']}: {_KNOWN_SCHEMES}")
    if isinstance(module, nn.Embedding) and init["emb_init_std"] is not None:
        return float(init["emb_init_std"])
    return _scheme_std(config, init, module) / _divisor(config, init, module)


def _scheme_std(config: MPTConfig, init: Mapping[str, Any], module: nn.Linear | nn.Embedding) -> float:
    """Return the standard deviation by the scheme of `init_config`, before the division for residual layers."""
    name = init["name"]
    if name == "kaiming_normal_":
        if init["fan_mode"] != "fan_in":
            raise ModelError(
                f"init_config.fan_mode is {init['fan_mode']!r}; only fan_in is supported for kaiming_normal_."
            )
        gain = nn.init.calculate_gain(init["init_nonlinearity"], init["init_gain"])
        return gain / math.sqrt(module.weight.shape[1])
    if name == "baseline_":
        if init["init_std"] is None:
            raise ModelError("init_config.name is baseline_, which requires init_config.init_std.")
        return float(init["init_std"])
    if name in ("small_init_", "neox_init_"):
        return math.sqrt(2 / (5 * config.d_model))
    raise ModelError(f"init_config.name is {name!r}: {_KNOWN_SCHEMES}")


def _divisor(config: MPTConfig, init: Mapping[str, Any], module: nn.Module) -> float:
    """Return the divisor of the standard deviation of layers that write into the residual stream; 1 for others."""
    stated = init["init_div_is_residual"]
    if not getattr(module, RESIDUAL, False) or stated is False:
        return 1.0
    if init["name"] == "neox_init_":
        return config.n_layers / math.sqrt(10)
    return math.sqrt(2 * config.n_layers) if stated is True else float(stated)


_KNOWN_SCHEMES = (
    "supported schemes are kaiming_normal_, baseline_, small_init_ and neox_init_, all of them normal. Use one of "
    "them, or set model.init_std."
)
