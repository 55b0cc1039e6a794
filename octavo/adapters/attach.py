"""Putting adapters beside the layers of a model, in place, by PEFT: the model keeps its class, modules their objects.

What was ``X.weight`` becomes ``X.base_layer.weight``, beside ``X.lora_A.default.weight`` [r, K] and
``X.lora_B.default.weight`` [N, r] (``X.lora_magnitude_vector.default.weight`` [N] for DoRA). FP8 layers, stock layers
over frozen FP8 weights and stock layers in BF16 get the same wrapper (:mod:`octavo.adapters.layer`), experts PEFT's own
with another forward (:mod:`octavo.adapters.experts`).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from octavo import fp8
from octavo.adapters import experts
from octavo.adapters.errors import AdapterError
from octavo.adapters.targets import split, taken_over, targets_of

if TYPE_CHECKING:
    from octavo.config.sections import LoraSection
    from octavo.models import Family

__all__ = ["DTYPES", "NAME", "adapter_parameters", "attach", "attached", "check", "disabled", "is_adapter_parameter"]

NAME = "default"  # PEFT's name of the one adapter
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_PARTS = (f"lora_A.{NAME}.", f"lora_B.{NAME}.", f"lora_magnitude_vector.{NAME}.")
Say = Callable[[str], None]


def attach(
    model: nn.Module,
    family: Family | None,
    lora: LoraSection,
    say: Say = lambda text: None,
    seed: int = 0,
) -> tuple[str, ...]:
    """Give every target of ``lora`` an adapter that changes nothing yet (B = 0), and let adapters alone be trained.

    Call it after :func:`octavo.fp8.apply` (and ``fuse``), before sharding. With ``lora.adapter`` the adapters are
    filled from that folder, whose rank, alpha and targets must be the configured ones. A depends on ``seed``, the
    targets and the rank alone: it is the same on every rank, beside any base, and no generator of the process moves.

    Returns the names of the targets. Raises AdapterError, before the model is changed, for targets as
    :func:`~octavo.adapters.targets.targets_of` says, dropout or DoRA with experts, DoRA with dropout, a model that has
    adapters, and a folder that does not fit.
    """
    config = _config(lora)
    names = _prepared(model, family, lora, config, say)
    state = None
    if lora.adapter is not None:
        from octavo.adapters.files import continued

        state = continued(lora, model, names)
    inject(model, config, names, DTYPES[lora.dtype], seed)
    if state is not None:
        from octavo.adapters.files import load_adapter_state

        load_adapter_state(model, state, where=str(lora.adapter))
    say(_summary(model, lora, names))
    return names


def check(model: nn.Module, family: Family | None, lora: LoraSection) -> tuple[str, ...]:
    """The names that :func:`attach` would give adapters, and its errors; nothing is attached. A model on the meta
    device will do, so that a plan can say what a run would, before the base is read."""
    names = _prepared(model, family, lora, _config(lora), lambda text: None)
    if lora.adapter is not None:
        from octavo.adapters.files import continued

        continued(lora, model, names)
    return names


def _config(lora: LoraSection) -> Any:
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise AdapterError(f"LoRA needs peft, which cannot be imported ({error}). pip install peft") from error
    alpha: Any = int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha  # PEFT computes with either
    return LoraConfig(
        r=lora.rank,
        lora_alpha=alpha,
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        bias="none",
        task_type="CAUSAL_LM",
    )


def _prepared(model: nn.Module, family: Family | None, lora: LoraSection, config: Any, say: Say) -> tuple[str, ...]:
    """The names of the targets, all that can be refused being refused; ``config`` gets them."""
    if attached(model):
        raise AdapterError("the model has adapters already, and takes one set. Load it again, or go on with these.")
    names = targets_of(model, family, lora.targets, lora.exclude)
    modules, parameters = split(model, names)
    experts.refuse(parameters, lora)
    for name in dict.fromkeys(parameter.rpartition(".")[0] for parameter in parameters):
        lack = experts.obstacle(model.get_submodule(name))
        if lack:
            raise AdapterError(f'{name} cannot have adapters: {lack}. Leave it out: lora.exclude: ["**.experts"]')
    if lora.dora and lora.dropout:
        raise AdapterError(
            f"lora.dora with lora.dropout={lora.dropout} would need the base layer's product of the dropped input as "
            "well, a second quantization and GEMM of every layer. Set lora.dropout: 0, or lora.dora: false."
        )
    config.target_modules, config.target_parameters = set(modules), parameters or None
    lost = set(taken_over(model, config))
    if lost:
        first = min(lost)
        say(
            f"LoRA leaves out {len(lost)} layers ({first}, ...): for model type {model.config.model_type!r} PEFT reads "  # type: ignore[union-attr]
            "such names as those of experts in older checkpoints, and would load the adapter into the wrong weights"
        )
        names = tuple(name for name in names if name not in lost)
        config.target_modules = set(modules) - lost
        if not names:
            raise AdapterError(f"nothing is left to adapt: PEFT cannot address {first} in this model type.")
    return names


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
    from octavo.adapters.layer import Linear, row_norms

    for module in model.modules():
        if isinstance(module, Linear) and module.use_dora.get(NAME, False):
            held: Any = module
            a, b = held.lora_A[NAME].weight, held.lora_B[NAME].weight
            norms = row_norms(held.get_base_layer().weight, a, b, held.scaling[NAME])
            held.lora_magnitude_vector[NAME].weight = nn.Parameter(norms)


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


def _summary(model: nn.Module, lora: LoraSection, names: tuple[str, ...]) -> str:
    own = sum(p.numel() for _, p in adapter_parameters(model))
    base = sum(p.numel() for p in model.parameters()) - own
    kinds = dict.fromkeys(name.rpartition(".")[2] for name in names)
    form = " ".join(word for word, on in (("rsLoRA", lora.rslora), ("DoRA", lora.dora)) if on) or "LoRA"
    return (
        f"{form}: rank {lora.rank}, alpha {lora.alpha:g} beside {len(names)} layers ({', '.join(kinds)}): "
        f"{own:,} parameters in {lora.dtype} train, {own / base:.2%} of the base's {base:,}"
        + (f", from {lora.adapter}" if lora.adapter else "")
    )


def state_name(name: str) -> str:
    """A parameter's name as PEFT's files have it."""
    name = name.replace(f".{NAME}.", ".")
    if name.endswith("lora_magnitude_vector.weight"):
        name = name.removesuffix(".weight")
    return f"base_model.model.{name}"


def whole(tensor: Tensor) -> Tensor:
    """A parameter's values, gathered from all ranks if it is sharded (which all ranks must then ask for)."""
    full = getattr(tensor.detach(), "full_tensor", None)
    return tensor.detach() if full is None else full()


def copied(config: Any) -> Any:
    """A copy of a LoraConfig without the classes that are registered with it."""
    twin = copy.copy(config)
    twin._custom_modules = None
    return twin
