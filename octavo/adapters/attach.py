"""Attaches adapters to the layers of a model in place, with PEFT: the model keeps its class and its module objects.

``X.weight`` becomes ``X.base_layer.weight``, with the new parameters ``X.lora_A.default.weight`` [r, K] and
``X.lora_B.default.weight`` [N, r] (and ``X.lora_magnitude_vector.default.weight`` [N] for DoRA). FP8 layers, stock
layers with frozen FP8 weights and stock layers in BF16 get the same wrapper (:mod:`octavo.adapters.layer`), experts get
PEFT's wrapper with another forward (:mod:`octavo.adapters.experts`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from octavo.adapters import experts
from octavo.adapters.errors import AdapterError
from octavo.adapters.files import load_adapter_state, read_continued
from octavo.adapters.inject import DTYPES, NAME, SECOND, adapted_layers, adapter_parameters, copy_config, inject
from octavo.adapters.targets import names_lost_by_peft, resolve_targets, split_targets
from octavo.base.wording import count_noun

if TYPE_CHECKING:
    from octavo.config import LoraSection
    from octavo.models import Family

Log = Callable[[str], None]


def attach(
    model: nn.Module, family: Family | None, lora: LoraSection, log: Log = lambda text: None, seed: int = 0,
    device: torch.device | None = None,
) -> tuple[str, ...]:  # fmt: skip
    """Attach an adapter with B = 0, which has no effect yet, to every target of ``lora``; only adapters stay trainable.

    Call it after :func:`octavo.fp8.apply` (and ``fuse``), before sharding. With ``lora.adapter`` the adapters are
    loaded from that folder, whose rank, alpha and targets must match the configuration. A depends only on ``seed``, the
    targets and the rank: it is the same on every rank and for every base, and no generator of the process is changed.
    `device`: the device of adapters whose base is on the meta device; by default they are on the meta device, too.

    Returns the names of the targets. Raises AdapterError, before the model is changed, for targets that
    :func:`~octavo.adapters.targets.resolve_targets` refuses, dropout or DoRA with experts, DoRA with dropout, a model
    that has adapters, and a folder that does not fit.
    """
    config = _lora_config(lora)
    names = _select_targets(model, family, lora, config, log)
    state = None if lora.adapter is None else read_continued(lora, model, names)
    inject(model, config, names, DTYPES[lora.dtype], seed, device=device)
    if state is not None:
        load_adapter_state(model, state, where=str(lora.adapter))
    log(_summary(model, lora, names))
    return names


def attach_second(model: nn.Module, lora: LoraSection, seed: int = 0, device: torch.device | None = None) -> None:
    """Attach a second trainable adapter, also with B = 0, to the layers that :func:`attach` adapted: a second
    model on the same base (PPO's critic). It is active only inside :func:`octavo.adapters.inject.use_second_adapter`,
    and is not in the files of the first. Raises AdapterError without a first adapter.
    """
    configs = getattr(model, "peft_config", {})
    if NAME not in configs:
        raise AdapterError("a second adapter requires a first one; call attach before attach_second.")
    layers = adapted_layers(model)
    inject(model, copy_config(configs[NAME]), tuple(layers), DTYPES[lora.dtype], seed, SECOND, device)
    for layer in layers.values():
        layer._active_adapter = [NAME]  # PEFT activated the new one


def check(model: nn.Module, family: Family | None, lora: LoraSection) -> tuple[str, ...]:
    """Return the names of the targets of :func:`attach`, or raise its errors, without attaching anything. The model may
    be on the meta device, so that a plan can report the errors of a run before the base is read."""
    names = _select_targets(model, family, lora, _lora_config(lora), lambda text: None)
    if lora.adapter is not None:
        read_continued(lora, model, names)
    return names


def _lora_config(lora: LoraSection) -> Any:
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise AdapterError(f"LoRA needs peft, which cannot be imported ({error}). pip install peft") from error
    alpha: Any = int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha  # PEFT accepts both
    return LoraConfig(
        r=lora.rank,
        lora_alpha=alpha,
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        bias="none",
        task_type="CAUSAL_LM",
    )


def _select_targets(
    model: nn.Module, family: Family | None, lora: LoraSection, config: Any, log: Log
) -> tuple[str, ...]:
    """Return the names of the targets, which are also set in ``config``. Raises every error of :func:`attach` that does
    not depend on a folder."""
    if adapted_layers(model):
        raise AdapterError(
            "the model has adapters already and supports only one set. Load the model again, or use these."
        )
    names = resolve_targets(model, family, lora.targets, lora.exclude)
    modules, parameters = split_targets(model, names)
    # Errors come before `config` is changed, which `attach` passes to PEFT.
    experts.check_settings(parameters, lora)
    for name in dict.fromkeys(parameter.rpartition(".")[0] for parameter in parameters):
        reason = experts.why_not(model.get_submodule(name))
        if reason:
            raise AdapterError(f'{name} cannot have adapters: {reason}. Exclude it: lora.exclude: ["**.experts"]')
    if lora.dora and lora.dropout:
        raise AdapterError(
            f"lora.dora with lora.dropout={lora.dropout} would need the base layer's product of the dropped input as "
            "well, a second quantization and GEMM of every layer. Set lora.dropout: 0, or lora.dora: false."
        )
    config.target_modules, config.target_parameters = set(modules), parameters or None
    skipped = set(names_lost_by_peft(model, config))
    if skipped:
        first, many = min(skipped), count_noun(len(skipped), "layer")
        log(
            f"LoRA leaves out {many} (first {first}): for model type {model.config.model_type!r} PEFT "  # type: ignore[union-attr]
            "treats their names as names of experts in older checkpoints and would load the adapter into wrong weights"
        )
        names = tuple(name for name in names if name not in skipped)
        config.target_modules = set(modules) - skipped
        if not names:
            raise AdapterError(f"no layer is left to adapt: PEFT cannot address {first} in this model type.")
    return names


def _summary(model: nn.Module, lora: LoraSection, names: tuple[str, ...]) -> str:
    trained = sum(p.numel() for _, p in adapter_parameters(model))
    base = sum(p.numel() for p in model.parameters()) - trained
    kinds = dict.fromkeys(name.rpartition(".")[2] for name in names)
    form = " ".join(word for word, on in (("rsLoRA", lora.rslora), ("DoRA", lora.dora)) if on) or "LoRA"
    return (
        f"{form}: rank {lora.rank}, alpha {lora.alpha:g} on {count_noun(len(names), 'layer')} ({', '.join(kinds)}): "
        f"{trained:,} parameters in {lora.dtype} train, {trained / base:.2%} of the base's {base:,}"
        + (f", from {lora.adapter}" if lora.adapter else "")
    )
