"""PEFT's layers around a model's own: put there by :func:`inject`, and found and named again afterwards."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from octavo import fp8
from octavo.adapters import experts
from octavo.adapters.errors import AdapterError

NAME = "default"  # PEFT's name of the one adapter
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_PARTS = (f"lora_A.{NAME}.", f"lora_B.{NAME}.", f"lora_magnitude_vector.{NAME}.")


def inject(model: nn.Module, config: Any, names: tuple[str, ...], dtype: torch.dtype, seed: int) -> None:
    """Let PEFT put its layers around ``names``, ours for linear ones, and freeze all that is no adapter."""
    from peft import inject_adapter_in_model

    from octavo.adapters.layer import Linear

    config._register_custom_module({fp8.Linear: Linear, nn.Linear: Linear})
    experts.in_order(model)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # Of the generators only the CPU's: torch.manual_seed would set those of all devices, and PEFT draws on the CPU.
        torch.default_generator.manual_seed(seed)
        warnings.filterwarnings("ignore", category=FutureWarning)  # between PEFT and transformers
        inject_adapter_in_model(config, model, NAME)
    found = set(attached(model))
    if found != set(names):
        odd = sorted(found ^ set(names))
        raise AdapterError(
            f"PEFT adapted other layers than it was given: {len(odd)} differ, first {odd[0]}. This version of PEFT "
            "matches names in a way that Octavo does not know; use another."
        )
    experts.adopt(model)
    _measure_rows(model)
    for name, parameter in model.named_parameters():
        adapts = is_adapter_parameter(name)
        parameter.requires_grad_(adapts)
        if adapts and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def _measure_rows(model: nn.Module) -> None:
    """DoRA's magnitudes as fp32 norms: PEFT measures them in the weight's dtype, which BF16 rounds by up to 0.4 %."""
    from octavo.adapters.layer import Linear

    for module in model.modules():
        if isinstance(module, Linear) and module.use_dora.get(NAME, False):
            held: Any = module
            held.lora_magnitude_vector[NAME].weight = nn.Parameter(held.norms(NAME))


def attached(model: nn.Module) -> dict[str, Any]:
    """Stock name -> PEFT's layer, of modules and of parameters of experts, in model order."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if not (hasattr(module, "lora_A") and hasattr(module, "base_layer")):
            continue
        stock, parameter = experts.stock_name(name), getattr(module, "parameter_name", None)
        found[stock if parameter is None else f"{stock}.{parameter}"] = module
    return found


def is_adapter_parameter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter, by the names that :func:`attach` gives."""
    return any(f".{part}" in f".{name}" for part in _PARTS)


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of the adapters of a model, by name."""
    return ((name, p) for name, p in model.named_parameters() if is_adapter_parameter(name))


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes as its base does: the reference that RL compares with. What is trained stays as it
    is. Do not build a graph inside and run its backward outside where blocks recompute: they would recompute with
    adapters."""
    layers = list(attached(model).values())
    if not layers:
        raise AdapterError("the model has no adapters that could be disabled.")
    before = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer._disable_adapters = was


def state_name(name: str) -> str:
    """A parameter's name as PEFT's files have it."""
    name = name.replace(f".{NAME}.", ".")
    if name.endswith("lora_magnitude_vector.weight"):
        name = name.removesuffix(".weight")
    return f"base_model.model.{name}"


def copied(config: Any) -> Any:
    """A copy of a LoraConfig without the classes that are registered with it."""
    twin = copy.copy(config)
    twin._custom_modules = None
    return twin
