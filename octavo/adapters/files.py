"""Reads and writes PEFT's adapter folders.

    adapter_model.safetensors   base_model.model.<module>.lora_A.weight [r, K], .lora_B.weight [N, r],
                                .lora_magnitude_vector [N] (DoRA)
    adapter_config.json         LoraConfig's fields; base_model_name_or_path: the stock model's folder
    sealed.json                 for an adapter of a sealed model: the key's fingerprint (octavo.base.seal_note)

The folder does not depend on the precision of the base. PEFT loads it on the stock model; :func:`load` on a stock or an
FP8 model, because it registers the layers for FP8, which PEFT does not store.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialized
from safetensors.torch import save_file
from torch import Tensor, nn

from octavo import fp8
from octavo.adapters import experts
from octavo.adapters.errors import AdapterError
from octavo.adapters.inject import DTYPES, NAME, adapted_layers, adapter_parameters, copy_config, inject, state_name
from octavo.adapters.targets import UNADAPTABLE, names_lost_by_peft
from octavo.base import atomic_write, encryption, safe_read, target_folder
from octavo.base.encryption.anonymous_file import plain_path
from octavo.base.safe_read import COUNT, FINITE, FLAG, ValueCheck
from octavo.base.seal_note import NOTE, Note, note_bytes, read_note
from octavo.base.wording import count_noun
from octavo.fp8.weights import distribute_like, full, is_whole
from octavo.models.folder import headers
from octavo.models.folder.folder import find_pickles

if TYPE_CHECKING:
    from peft import LoraConfig

    from octavo.config import LoraSection
    from octavo.fp8.policy import Row

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Files of a folder that may be replaced: PEFT's files, and others that users commonly add to an adapter.
_REPLACEABLE = (CONFIG, WEIGHTS, NOTE, encryption.LIST, "README.md", ".gitattributes")

# Fields of LoraConfig that are supported or do not affect the computation.
_SUPPORTED_FIELDS = {
    *("r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "use_rslora", "use_dora"),
    *("layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "target_parameters"),
    *("peft_type", "task_type", "peft_version", "base_model_name_or_path", "revision", "auto_mapping"),
    *("inference_mode", "init_lora_weights", "loftq_config", "eva_config", "corda_config", "runtime_config"),
    *("megatron_core", "qalora_group_size", "lora_ga_config"),
}
_NAMES = ValueCheck(
    lambda value: isinstance(value, str) or (isinstance(value, list) and all(isinstance(name, str) for name in value)),
    "text or a list of names",
)
_LAYERS = ValueCheck(
    lambda value: all(type(index) is int for index in (value if isinstance(value, list) else [value])),
    "a number or a list of numbers",
)
_SCHEMA = {
    "r": COUNT, "lora_alpha": FINITE, "lora_dropout": FINITE, "rank_pattern": {...: COUNT},
    "alpha_pattern": {...: FINITE}, "target_modules": _NAMES, "exclude_modules": _NAMES, "target_parameters": _NAMES,
    "layers_pattern": _NAMES, "layers_to_transform": _LAYERS, "use_rslora": FLAG, "use_dora": FLAG,
}  # fmt: skip
_REASONS = {
    "modules_to_save": "it replaces whole modules of the base with trained copies. Merge it into the base first",
    "bias": "it trains biases of the base. Merge it into the base with PEFT first",
    "lora_bias": "B has a bias there, which Octavo's layers do not add",
    "fan_in_fan_out": "it is for weights stored as [K, N] (GPT-2's Conv1D)",
    "layer_replication": "it builds a model of more layers than the base has",
    "megatron_config": "it is for Megatron's own layers",
    "trainable_token_indices": "it trains rows of the embeddings",
}
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")  # initializations that change the base
Log = Callable[[str], None]


# --- writing ----------------------------------------------------------------------------------------------------------


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the adapters' values by their names in PEFT's files, sharing memory with the parameters as in a state
    dict. For a sharded model all ranks must call it together, and get whole tensors.

    Raises AdapterError for a model without adapters.
    """
    state = {state_name(name): full(p.detach()) for name, p in adapter_parameters(model)}
    if not state:
        raise AdapterError("the model has no adapters; octavo.adapters.attach attaches some.")
    return state


def save(
    model: nn.Module, directory: str | Path, base: str | Path, state: Mapping[str, Tensor] | None = None,
    encrypt: bool = False,
) -> Path:  # fmt: skip
    """Write the adapters of a model as PEFT's folder ``directory``; ``base`` is the stock model's folder or name.

    The folder is written atomically: an existing adapter stays until the new one replaces it
    (:mod:`octavo.base.atomic_write`). On several ranks, get ``state`` from :func:`adapter_state` on all of them, and
    call this on one. ``encrypt``: encrypt every file (:mod:`octavo.base.encryption`).

    Raises AdapterError if the directory contains files that do not belong to an adapter, or cannot be written, and for
    values that are not finite.
    """
    final = Path(directory)
    values = dict(state) if state is not None else adapter_state(model)
    if bad := fp8.find_nonfinite(values.items()):
        raise AdapterError(
            f"{bad[0]} holds NaN or infinity ({count_noun(len(bad), 'tensor')}): the adapter is not written."
        )
    text = json.dumps(_config_document(model, str(base)), indent=2, sort_keys=True) + "\n"
    if final.exists() and (not final.is_dir() or [f for f in target_folder.contents(final) if f not in _REPLACEABLE]):
        what = "it is a file" if not final.is_dir() else "it contains " + ", ".join(target_folder.contents(final)[:3])
        raise AdapterError(f"{final} exists and is not an adapter folder ({what}); choose another.")
    try:
        with atomic_write.new_folder(final, AdapterError) as temporary:
            encrypted = encryption.Folder(temporary) if encrypt else None
            cpu = {name: value.cpu().contiguous() for name, value in values.items()}
            if encrypted is not None:
                encrypted.put(temporary / WEIGHTS, serialized(cpu, metadata={"format": "pt"}))
            else:
                save_file(cpu, temporary / WEIGHTS, metadata={"format": "pt"})
            encryption.write_file(temporary / CONFIG, text.encode(), encrypted)
            if (note := read_note(base, AdapterError)) is not None:  # the sealed base may be gone when it is unsealed
                encryption.write_file(temporary / NOTE, note_bytes(Note("adapter", note.key)), encrypted)
            if encrypted is not None:
                encrypted.write_list()
            atomic_write.sync_tree(temporary)
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"the adapter cannot be written to {final}: {error}") from error
    return final


def _config_document(model: nn.Module, base: str) -> dict[str, object]:
    """Return the content of adapter_config.json: LoraConfig's fields, with sets sorted."""
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict) or NAME not in configs:
        raise AdapterError("the model has no adapters; octavo.adapters.attach attaches some.")
    config = copy_config(configs[NAME])
    config.base_model_name_or_path, config.inference_mode = base, True
    return {key: _to_json(value) for key, value in config.to_dict().items()}


def _to_json(value: Any) -> Any:
    if isinstance(value, set | frozenset | tuple):
        return sorted(value)
    if isinstance(value, dict):
        return {key: _to_json(inner) for key, inner in value.items()}
    return getattr(value, "value", value)  # the text of an enumeration member


# --- reading ----------------------------------------------------------------------------------------------------------


def read_config(directory: str | Path) -> LoraConfig:
    """Return the LoraConfig of an adapter's folder, if Octavo implements it exactly.

    Raises AdapterError for a folder that is not an adapter, JSON that cannot be read, another kind of adapter (IA3,
    prompt tuning, ...) and fields whose effect Octavo does not implement.
    """
    folder = Path(directory)
    file = folder / CONFIG
    if not folder.is_dir() or not os.path.lexists(file):
        raise AdapterError(f"{folder} is not an adapter folder: it has no {CONFIG}, which PEFT and octavo train write.")
    raw = safe_read.read_json(file, AdapterError)
    safe_read.check_schema(raw, _SCHEMA, file, AdapterError)
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise AdapterError(
            f"{folder} is an adapter of type {kind!r}, but Octavo supports only LoRA (with rsLoRA and DoRA). Merge it "
            "into its base with PEFT, and use the merged model."
        )
    from peft import LoraConfig

    fields = {f.name: f for f in dataclasses.fields(LoraConfig)}
    stock = LoraConfig().to_dict()
    for key, value in raw.items():
        if key in _SUPPORTED_FIELDS or not value or (key in stock and _to_json(stock[key]) == value) or value == "none":
            continue
        why = _REASONS.get(key, "Octavo does not know its effect on the adapter")
        raise AdapterError(f"{file}: {key}={json.dumps(value)[:80]} is not supported: {why}.")
    start = raw.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_BASE_CHANGING_INITS):
        raise AdapterError(
            f"{file}: init_lora_weights={start!r} means that the adapter is for a base that this initialization "
            "changed. Save it as plain LoRA with PEFT: save_pretrained(..., "
            "path_initial_model_for_weight_conversion=...)."
        )
    # The installed LoraConfig checks the values; patterns and numbers that it accepts and fails on later are checked
    # here.
    known = {k: v for k, v in raw.items() if k in fields and k in _SUPPORTED_FIELDS and k not in ("runtime_config",)}
    for key in ("loftq_config", "eva_config", "corda_config", "lora_ga_config"):  # only about its initialisation
        known.pop(key, None)
    try:
        tables = (raw.get("rank_pattern") or {}), (raw.get("alpha_pattern") or {})
        for pattern in (raw.get("target_modules"), raw.get("exclude_modules"), *tables[0], *tables[1]):
            re.compile(pattern if isinstance(pattern, str) else "")
        config: Any = LoraConfig(**{**known, "init_lora_weights": True, "inference_mode": False})
        numbers = [config.r, config.lora_alpha, *config.rank_pattern.values(), *config.alpha_pattern.values()]
        wrong = [n for n in numbers if isinstance(n, bool) or not isinstance(n, int | float) or n <= 0]
        if wrong or not 0 <= config.lora_dropout < 1:
            raise ValueError(f"r, lora_alpha and their patterns must be positive, lora_dropout in [0, 1): {numbers}")
    except (TypeError, ValueError, AttributeError, re.error) as error:
        raise AdapterError(f"{file} is not a valid LoRA configuration: {error}") from error
    return config


def read_state(directory: str | Path) -> dict[str, Tensor]:
    """Return the tensors of an adapter's folder. Raises AdapterError for pickles, files that cannot be read, NaN and
    infinity."""
    folder = Path(directory)
    file = folder / WEIGHTS
    if not os.path.lexists(file):
        pickled = [name for name in find_pickles(folder) if name.startswith(("adapter_model", "pytorch_model"))]
        raise AdapterError(
            f"{folder} contains {pickled[0]}, a pickle, which may run code when it is read. Convert it to safetensors: "
            "if you trust it, load it with PEFT and save it with save_pretrained."
            if pickled
            else f"{folder} has no {WEIGHTS}: the adapter is incomplete."
        )
    try:
        headers.read(file)
        with plain_path(file) as plain, safe_open(plain, framework="pt") as tensors:
            state = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    except (headers.HeaderError, SafetensorError, OSError) as error:
        raise AdapterError(
            f"{file} cannot be read: {error}. It was truncated, or is not a safetensors file."
        ) from error
    for name, value in state.items():
        if value.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            raise AdapterError(f"{file}: {name} is {value.dtype}; adapters are fp32, bf16 or fp16.")
        if fp8.find_nonfinite([(name, value)]):
            raise AdapterError(f"{file}: {name} holds NaN or infinity; the adapter is broken.")
    return state


def load(model: nn.Module, directory: str | Path, log: Log = lambda text: None, dtype: str = "fp32") -> tuple[str, ...]:
    """Attach the adapter of a folder to a stock or an FP8 model. Returns the names of the adapted layers.

    dtype: fp32 or bf16, the dtype of A and B. Only the adapters require gradients afterwards; dropout is as in the
    configuration, in training mode.

    Raises AdapterError, before the model is changed, as :func:`read_config` does, for pickles, tensors that are missing
    or that no target needs, shapes that do not fit the model, and targets that cannot have an adapter.
    """
    if adapted_layers(model):
        raise AdapterError("the model has adapters already and supports only one set. Load the model again.")
    config, state = read_config(directory), read_state(directory)
    names = _check_fit(model, config, state, Path(directory))
    resolved: Any = copy_config(config)  # PEFT's types do not allow sets, which it accepts and stores
    expert_parameters = experts.expert_parameters(model)
    resolved.target_modules = {name for name in names if name not in expert_parameters}
    resolved.target_parameters = [name for name in names if name in expert_parameters] or None
    resolved.exclude_modules = resolved.layers_to_transform = resolved.layers_pattern = None
    inject(model, resolved, names, DTYPES[dtype], seed=0)
    load_adapter_state(model, state, where=str(directory))
    log(f"adapter {directory}: rank {config.r}, alpha {config.lora_alpha:g}, on {count_noun(len(names), 'layer')}")
    return names


def load_adapter_state(model: nn.Module, state: Mapping[str, Tensor], where: str = "the state") -> None:
    """Copy values, by PEFT's names, to the adapters of a model; for a sharded model each rank takes its part.

    Raises AdapterError, before anything is written, for names that are missing or unknown, and for other shapes.
    """
    parameters_by_name = {state_name(name): p for name, p in adapter_parameters(model)}
    _check_tensors(
        where,
        {name: tuple(p.shape) for name, p in parameters_by_name.items()},
        {n: tuple(v.shape) for n, v in state.items()},
    )
    with torch.no_grad():
        for name, parameter in parameters_by_name.items():
            value = state[name].to(parameter.device, parameter.dtype)
            parameter.copy_(value if is_whole(parameter) else distribute_like(value, parameter))


def _check_tensors(where: str, wanted: Mapping[str, tuple[int, ...]], present: Mapping[str, tuple[int, ...]]) -> None:
    missing, extra = sorted(wanted.keys() - present.keys()), sorted(present.keys() - wanted.keys())
    mismatched = [name for name in sorted(wanted.keys() & present.keys()) if wanted[name] != present[name]]
    wrong = []
    for names, what in ((missing, "missing"), (extra, "unknown to the model")):
        if names:
            listed = f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
            wrong.append(f"{count_noun(len(names), 'tensor')} {what}: {listed}")
    for name in mismatched[:3]:
        wrong.append(f"{name} is {list(present[name])} where the model takes {list(wanted[name])}")
    if wrong:
        raise AdapterError(f"{where} does not fit this model: {'; '.join(wrong)}. It was trained on another base.")


def _check_fit(model: nn.Module, config: LoraConfig, state: Mapping[str, Tensor], where: Path) -> tuple[str, ...]:
    """Return the targets of a folder in model order. Raises AdapterError unless its tensors are exactly the tensors
    that the targets need."""
    # PEFT resolves the names, so that the same modules are adapted as in PEFT; the shapes are then checked exactly.
    from peft.tuners.tuners_utils import check_target_module_exists

    rows = {row.name: row for row in fp8.describe_layers(model)}
    expert_parameters = experts.expert_parameters(model)
    matched: list[str] = []
    if config.target_modules == "all-linear":
        matched = [
            n for n, row in rows.items() if row.kind in ("linear", "router") and row.name not in expert_parameters
        ]
    elif config.target_modules:
        matched = [name for name, _ in model.named_modules() if name and check_target_module_exists(config, name)]
    for wanted in config.target_parameters or ():
        matched += [name for name in expert_parameters if name == wanted or name.endswith("." + wanted)]
    for name in matched:
        row = rows.get(name)
        if row is None or row.kind not in ("linear", "experts"):
            kind = row.kind if row is not None else _module_kind(model, name)
            why = UNADAPTABLE.get(kind, "it is not a linear layer")
            raise AdapterError(f"{where} adapts {name} ({kind}), which cannot have an adapter: {why}.")
    parameters = [name for name in matched if name in expert_parameters]
    if parameters and (config.lora_dropout or config.use_dora):
        raise AdapterError(
            f"{where} adapts experts ({parameters[0]}) with lora_dropout={config.lora_dropout} and "
            f"use_dora={config.use_dora}, and PEFT supports neither for them. Set lora_dropout to 0 in {CONFIG}."
        )
    skipped = names_lost_by_peft(model, config) if not isinstance(config.target_modules, str) else ()
    if skipped:
        raise AdapterError(
            f"{where} was trained with experts as separate modules ({skipped[0]}), as in older transformers. Load it "
            "with PEFT on this version's model and save it again."
        )
    wanted_shapes: dict[str, tuple[int, ...]] = {}
    for name in dict.fromkeys(matched):
        wanted_shapes |= _adapter_shapes(name, rows[name], config, expert_parameters, matched)
    _check_tensors(str(where), wanted_shapes, {name: tuple(value.shape) for name, value in state.items()})
    return tuple(name for name in rows if name in set(matched))


def _module_kind(model: nn.Module, name: str) -> str:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return "parameter"
    return "embedding" if isinstance(module, nn.Embedding) else type(module).__name__


def _adapter_shapes(
    name: str, row: Row, config: Any, expert_parameters: Mapping[str, nn.Parameter], matched: list[str]
) -> dict[str, tuple[int, ...]]:
    from peft.utils.other import get_pattern_key

    key = get_pattern_key(config.rank_pattern.keys(), name)
    rank = config.rank_pattern.get(key, config.r)
    out, into = row.shape
    if name in expert_parameters:
        # PEFT nests the wrappers of one module, its first parameter innermost (:func:`experts.in_order`).
        container = name.rpartition(".")[0]
        others = [n for n in expert_parameters if n in matched and n.rpartition(".")[0] == container]
        depth = len(others) - 1 - others.index(name)
        prefix = container + ".base_layer" * depth
        return {
            f"base_model.model.{prefix}.lora_A.weight": (rank * row.experts, into),
            f"base_model.model.{prefix}.lora_B.weight": (out, rank * row.experts),
        }
    shapes: dict[str, tuple[int, ...]] = {
        f"base_model.model.{name}.lora_A.weight": (rank, into),
        f"base_model.model.{name}.lora_B.weight": (out, rank),
    }
    if config.use_dora:
        shapes[f"base_model.model.{name}.lora_magnitude_vector"] = (out,)
    return shapes


def read_continued(lora: LoraSection, model: nn.Module, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the tensors of ``lora.adapter``. Raises AdapterError if its settings differ from ``lora``."""
    assert lora.adapter is not None
    folder = Path(lora.adapter)
    config, state = read_config(folder), read_state(folder)
    settings = {"rank": lora.rank, "alpha": lora.alpha, "rslora": lora.rslora, "dora": lora.dora}
    saved = {"rank": config.r, "alpha": config.lora_alpha, "rslora": config.use_rslora, "dora": config.use_dora}
    for key, value in settings.items():
        if saved[key] != value:
            raise AdapterError(
                f"lora.{key} is {value}, but the adapter {folder} has {saved[key]}. Set lora.{key}: {saved[key]}"
            )
    if config.rank_pattern or config.alpha_pattern:
        raise AdapterError(f"{folder} has separate ranks or alphas for some layers, which `lora` cannot express.")
    adapted = set(_check_fit(model, config, state, folder))
    if adapted != set(names):
        differing = sorted(adapted ^ set(names))
        raise AdapterError(
            f"lora.targets selects {count_noun(len(names), 'layer')}, but the adapter {folder} has {len(adapted)}; "
            f"{len(differing)} differ, first {differing[0]}. Use the adapter's targets."
        )
    return state
