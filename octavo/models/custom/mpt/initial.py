"""How the weights of an MPT begin: LLM-Foundry's `init_config`, or one standard deviation for all.

    kaiming_normal_   gain / sqrt(fan_in), which in every layer here but down_proj is d_model; relu: gain sqrt(2)
    baseline_         init_std
    small_init_       sqrt(2 / (5 d_model))                                  (Nguyen and Salazar, 2019)
    neox_init_        the same, outputs of blocks divided by n_layers / sqrt(10)

Layers that write into the residual stream (out_proj, down_proj) are divided by sqrt(2 n_layers), else by
`init_div_is_residual`. Embeddings are drawn as other weights, or with `emb_init_std`. Norms begin at one, biases at
zero. Where `initializer_range` is given (transformers writes it, and `model.init_std` sets it), every matrix has that
one, as in transformers' class.
"""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from octavo.models.custom.mpt.configuration import MPTConfig
from octavo.models.errors import ModelError

RESIDUAL = "writes_residual"
"""The attribute of a linear layer that writes into the residual stream."""


def spread(config: MPTConfig, module: nn.Linear | nn.Embedding) -> float:
    """The standard deviation of its weights. Raises ModelError for a scheme that is not known, and for fields that give
    no number from 0."""
    try:
        found = _spread(config, module)
    except (TypeError, ValueError, ZeroDivisionError) as cause:  # of a field of another kind
        if isinstance(cause, ModelError):
            raise
        raise ModelError(f"init_config {config.init_config} gives no spread of weights ({cause}). Mend it.") from cause
    if not 0 <= found < math.inf:
        raise ModelError(f"init_config {config.init_config} gives weights a spread of {found}. Mend it.")
    return found


def _spread(config: MPTConfig, module: nn.Linear | nn.Embedding) -> float:
    if config.initializer_range is not None:
        return config.initializer_range
    init: Any = config.init_config
    if init["emb_init_uniform_lim"] is not None:
        raise ModelError(f"init_config.emb_init_uniform_lim is {init['emb_init_uniform_lim']}: {_NORMAL}")
    if isinstance(module, nn.Embedding) and init["emb_init_std"] is not None:
        return float(init["emb_init_std"])
    return _scheme(config, init, module) / _divided(config, init, module)


def _scheme(config: MPTConfig, init: dict[str, Any], module: nn.Linear | nn.Embedding) -> float:
    name = init["name"]
    if name == "kaiming_normal_":
        if init["fan_mode"] != "fan_in":
            raise ModelError(f"init_config.fan_mode is {init['fan_mode']!r}, and kaiming_normal_ goes by fan_in here.")
        gain = nn.init.calculate_gain(init["init_nonlinearity"], init["init_gain"])
        return gain / math.sqrt(module.weight.shape[1])
    if name == "baseline_":
        if init["init_std"] is None:
            raise ModelError("init_config.name is baseline_, which needs init_config.init_std.")
        return float(init["init_std"])
    if name in ("small_init_", "neox_init_"):
        return math.sqrt(2 / (5 * config.d_model))
    raise ModelError(f"init_config.name is {name!r}: {_NORMAL}")


def _divided(config: MPTConfig, init: dict[str, Any], module: nn.Module) -> float:
    by = init["init_div_is_residual"]
    if not getattr(module, RESIDUAL, False) or by is False:
        return 1.0
    if init["name"] == "neox_init_":
        return config.n_layers / math.sqrt(10)
    return math.sqrt(2 * config.n_layers) if by is True else float(by)


_NORMAL = (
    "weights are drawn by kaiming_normal_, baseline_, small_init_ or neox_init_, all of them normal. Name one of "
    "them, or give model.init_std."
)
