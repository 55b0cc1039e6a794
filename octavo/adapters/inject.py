"""PEFT's layers in a model: :func:`inject` adds them, the other functions list, name and switch them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from octavo import fp8
from octavo.adapters import experts
from octavo.adapters.errors import AdapterError

if TYPE_CHECKING:
    from peft import LoraConfig

NAME = "default"  # PEFT's name of the adapter that is trained, saved and merged
SECOND = "second"  # the name of a second adapter of the same layers (:func:`octavo.adapters.attach_second`)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_KINDS = ("lora_A", "lora_B", "lora_magnitude_vector")


def inject(
    model: nn.Module, config: LoraConfig, names: tuple[str, ...], dtype: torch.dtype, seed: int, adapter: str = NAME,
    device: torch.device | None = None,
) -> None:  # fmt: skip
    """Wrap the layers ``names`` with PEFT, linear ones in Octavo's class, and freeze all parameters except adapters.
    ``device``: the device of adapters whose base is on the meta device (by default the meta device). Raises
    AdapterError if PEFT wraps different layers."""
    from peft import inject_adapter_in_model

    from octavo.adapters.layer import Linear

    config._register_custom_module({fp8.Linear: Linear, nn.Linear: Linear})
    experts.sort_parameters(model)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), _keep_drawn_values(device):
        # Only the CPU's generator, on which PEFT draws: torch.manual_seed would set the generators of all devices.
        torch.default_generator.manual_seed(seed)
        warnings.filterwarnings("ignore", category=FutureWarning)  # between PEFT and transformers
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # a second adapter is intended
        inject_adapter_in_model(config, model, adapter)
    adapted = set(adapted_layers(model))
    if adapted != set(names):
        differing = sorted(adapted ^ set(names))
        raise AdapterError(
            f"PEFT adapted different layers: {len(differing)} of them differ from the targets, first {differing[0]}. "
            "This version of PEFT matches names in an unknown way; use another version."
        )
    experts.replace_forwards(model)
    _set_dora_magnitudes(model, adapter)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter_parameter(name))
        if _belongs_to(adapter, name) and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


_MOVE = "_move_adapter_to_device_of_base_layer"  # PEFT's method, which is replaced while adapters are created


@contextmanager
def _keep_drawn_values(device: torch.device | None) -> Iterator[None]:
    """Keep the values that PEFT draws for new adapters on ``device`` while the block runs, although PEFT then moves
    them to the device of their base, which may be the meta device. With None they are moved to their base's device."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    stock = BaseTunerLayer._move_adapter_to_device_of_base_layer
    drawn: list[tuple[nn.Module, str, torch.Tensor]] = []

    def move(self: Any, adapter_name: str, on: torch.device | None = None) -> None:
        stock(self, adapter_name, on or device)
        for kind in self.adapter_layer_names:
            container = getattr(self, kind)
            if isinstance(container, nn.ModuleDict) and adapter_name in container:
                owner = container[adapter_name]
                drawn.extend((owner, leaf, p.detach()) for leaf, p in owner._parameters.items() if p is not None)

    setattr(BaseTunerLayer, _MOVE, move)
    try:
        yield
    finally:
        setattr(BaseTunerLayer, _MOVE, stock)
    for owner, leaf, values in drawn if device is not None else ():
        parameter = owner._parameters[leaf]
        if parameter is not None and parameter.is_meta:
            owner._parameters[leaf] = nn.Parameter(values)


def _set_dora_magnitudes(model: nn.Module, adapter: str) -> None:
    """Set DoRA's magnitudes to fp32 norms: PEFT computes them in the weight's dtype, and BF16 rounds by up to 0.4 %."""
    from octavo.adapters.layer import Linear

    for module in model.modules():
        if isinstance(module, Linear) and module.use_dora.get(adapter, False):
            layer: Any = module
            layer.lora_magnitude_vector[adapter].weight = nn.Parameter(layer.norms(adapter))


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return stock name -> PEFT's layer, for modules and for parameters of experts, in model order."""
    layers: dict[str, Any] = {}
    for name, module in model.named_modules():
        if not (hasattr(module, "lora_A") and hasattr(module, "base_layer")):
            continue
        stock, parameter = experts.stock_name(name), getattr(module, "parameter_name", None)
        layers[stock if parameter is None else f"{stock}.{parameter}"] = module
    return layers


def is_adapter_parameter(name: str) -> bool:
    """Return whether a parameter of this name belongs to an adapter that :func:`attach` or :func:`attach_second`
    added."""
    return _belongs_to(NAME, name) or is_second_parameter(name)


def is_second_parameter(name: str) -> bool:
    """Return whether a parameter of this name belongs to a second adapter."""
    return _belongs_to(SECOND, name)


def _belongs_to(adapter: str, name: str) -> bool:
    return any(f".{kind}.{adapter}." in f".{name}" for kind in _KINDS)


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Return the parameters of the adapters of a model, by name, without a second adapter's."""
    return ((name, p) for name, p in model.named_parameters() if _belongs_to(NAME, name))


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Disable all adapters while the block runs, for the reference model of RL. `requires_grad` is not
    changed. With activation checkpointing, do not run the backward of a graph from inside after the context: blocks
    would be recomputed with adapters. Raises AdapterError for a model without adapters."""
    layers = list(adapted_layers(model).values())
    if not layers:
        raise AdapterError("the model has no adapters to disable.")
    before = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer._disable_adapters = was


@contextmanager
def use_second_adapter(model: nn.Module) -> Iterator[None]:
    """Activate the second adapter instead of the first while the block runs. Run the backward inside, too: blocks with
    activation checkpointing are recomputed with the adapters that are active then. `requires_grad` is not changed.
    Raises AdapterError without a second adapter."""
    layers = [layer for layer in adapted_layers(model).values() if SECOND in layer.lora_A]
    if not layers:
        raise AdapterError("the model has no second adapter; octavo.adapters.attach_second attaches one.")
    before = [layer._active_adapter for layer in layers]
    try:
        for layer in layers:
            layer._active_adapter = [SECOND]
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer._active_adapter = was


def state_name(name: str) -> str:
    """Return a parameter's name in PEFT's files."""
    name = name.replace(f".{NAME}.", ".")
    if name.endswith("lora_magnitude_vector.weight"):
        name = name.removesuffix(".weight")
    return f"base_model.model.{name}"


def copy_config(config: LoraConfig) -> LoraConfig:
    """Return a copy of a LoraConfig without its registered classes."""
    twin = copy.copy(config)
    twin._custom_modules = None
    return twin
