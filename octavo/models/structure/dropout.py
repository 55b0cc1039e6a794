"""Disables all forms of dropout of a model, in place.

Log-probabilities of two models, or of one model at two times, can be compared only if neither draws random numbers.
`model.eval()` would also disable what training needs (amax histories, recomputation), so the probabilities are set to 0
instead. They are stored in three places:

    nn.Dropout variants       `p` of each module: embeddings, residuals, PEFT's `lora_dropout`
    module attributes         `attention_dropout`, which stock attention passes to a function; `drop_prob` of stochastic
                              depth; `jitter_noise` of routers
    configurations            `layerdrop`, which some models read in each forward
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedConfig

from octavo.models.errors import ModelError

_DROPOUT_NAME = re.compile("drop|jitter|stochastic_depth")  # names of attributes that hold a probability

# The routers of Phi-3.5-MoE sample the expert of each token in training. Their `router_jitter_noise` is also a
# threshold in evaluation, so setting it to 0 would change the model.
_RANDOM_ROUTERS = ("PhimoeTopKRouter",)


def disable_dropout(model: nn.Module) -> tuple[str, ...]:
    """Set every dropout probability of a model and its adapters to 0.

    Returns the probabilities that this and earlier calls changed in the model, for example ``attention_dropout 0.5 (28
    modules)``. The configuration objects of the model are changed; the config.json that is copied from its folder keeps
    its values.

    Raises ModelError for routers that sample experts in training, which no setting disables.
    """
    counts: Counter[tuple[str, float]] = Counter(getattr(model, _RECORD, {}))
    configs: dict[int, PreTrainedConfig] = {}
    for path, module in model.named_modules():
        if type(module).__name__ in _RANDOM_ROUTERS:
            raise ModelError(
                f"{path} ({type(module).__name__}) samples the expert of each token in training, which no "
                "setting disables: log-probabilities of two such models cannot be compared. Use train.phase: sft"
            )
        if isinstance(module, _DropoutNd) and module.p > 0:
            counts[_dropout_name(path), float(module.p)] += 1
            module.p = 0.0
        for name, value in _probabilities(vars(module)):
            counts[name, value] += 1
            setattr(module, name, 0.0)
        if isinstance(config := vars(module).get("config"), PreTrainedConfig):
            configs[id(config)] = config
    for config in configs.values():
        _disable_in_config(config)
    if counts:
        setattr(model, _RECORD, dict(counts))
    return disabled_dropout(model)


_RECORD = "_octavo_dropout_off"


def disabled_dropout(model: nn.Module) -> tuple[str, ...]:
    """Return the probabilities that :func:`disable_dropout` set to 0 in this model, as text; empty if there were
    none."""
    counts: dict[tuple[str, float], int] = getattr(model, _RECORD, {})
    return tuple(f"{name} {p:g} ({n} module{'s' * (n > 1)})" for (name, p), n in counts.items())


def _probabilities(attributes: Mapping[str, object]) -> list[tuple[str, float]]:
    """Return the attributes with a dropout name whose value is a probability above 0."""
    return [
        (name, value)
        for name, value in attributes.items()
        if isinstance(value, float) and 0 < value <= 1 and _DROPOUT_NAME.search(name)
    ]


def _dropout_name(path: str) -> str:
    """Return the part of a module's path that names the dropout: `lora_dropout` of `q_proj.lora_dropout.default`."""
    parts = path.split(".")
    return next((part for part in reversed(parts) if _DROPOUT_NAME.search(part)), parts[-1] or "dropout")


def _disable_in_config(config: PreTrainedConfig) -> None:
    for name, _ in _probabilities(vars(config)):
        setattr(config, name, 0.0)
    for inner in [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]:
        _disable_in_config(inner)
