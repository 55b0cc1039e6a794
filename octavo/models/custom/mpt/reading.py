"""Reads a folder of model_type `mpt`: resolves missing fields, and checks that config.json and tensors agree.

Two programs write such folders, with opposite defaults of important fields:

    field absent          transformers' MptConfig    LLM-Foundry's MPTConfig
    attn_config.alibi     true                       false
    no_bias               true                       false
    initializer_range     0.02                       not a field: init_config

A field that is present is used. A missing one has transformers' default, unless the file has a field that only
LLM-Foundry writes (`ffn_config`, `init_config`, `fc_type`, `auto_map`, or its class in `architectures`). The names of
tensors, if there are any, must then agree: learned positions, biases and norms of q and k exist if and only if
config.json has them. A folder that contradicts itself is an error.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from octavo.models.custom.mpt.configuration import MPTConfig
from octavo.models.errors import ModelError
from octavo.models.folder import headers

FOUNDRY_FIELDS = ("ffn_config", "init_config", "fc_type", "auto_map")
CLASSES = ("MPTForCausalLM", "MPTModel", "MPTForSequenceClassification")
WTE = "transformer.wte.weight"
_TE_NAME = re.compile(r"\.ffn\.(layer_norm_(weight|bias)|fc[12]_(weight|bias|_extra_state))$")


def read(folder: Path, raw: Mapping[str, Any]) -> MPTConfig:
    """Return the configuration of a folder; `raw`: its config.json. Raises ModelError if its tensors contradict it, and
    ValueError for fields that are not implemented."""
    fields = {key: value for key, value in raw.items() if key not in ("auto_map", "model_type")}
    attention = fields.get("attn_config")
    if attention is not None and not isinstance(attention, dict):
        raise ModelError(f"{folder}/config.json: attn_config is {attention!r:.80}; it must be an object.")
    if not _is_from_foundry(raw):
        fields = {
            "no_bias": True,
            "initializer_range": 0.02,
            **fields,
            "attn_config": {"alibi": True, **(attention or {})},
        }
    config = MPTConfig.from_dict(fields)
    if why := find_disagreement(config, _tensor_names(folder)):
        raise ModelError(f"{folder}: {why}")
    return config


def _is_from_foundry(raw: Mapping[str, Any]) -> bool:
    named = raw.get("architectures")
    return any(key in raw for key in FOUNDRY_FIELDS) or (
        isinstance(named, list) and any(one in CLASSES for one in named)
    )


def _tensor_names(folder: Path) -> set[str]:
    """Return names of a folder's tensors; unreadable files are skipped here and reported when weights are loaded."""
    names: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        try:
            names |= {entry.name for entry in headers.read(file).entries}
        except (headers.HeaderError, OSError):
            continue
    return names


def find_disagreement(config: MPTConfig, names: Collection[str]) -> str | None:
    """Return how tensors of these names contradict a configuration, with the fix, or None if they agree or are not a
    full model."""
    # First names of layers that Octavo's MPT does not have; then the layers that depend on a field.
    if fused := sorted(name for name in names if _TE_NAME.search(name)):
        return (
            f"{fused[0]} is of TransformerEngine's LayerNormMLP (ffn_type: te_ln_mlp). Rename in each block "
            "ffn.layer_norm_weight and _bias to norm_2.weight and .bias, ffn.fc1_weight and _bias to "
            "ffn.up_proj.weight and .bias, ffn.fc2_weight and _bias to ffn.down_proj.weight and .bias, and drop "
            "_extra_state; config.json may keep te_ln_mlp, whose activation it names."
        )
    if separate := sorted(name for name in names if name.endswith((".attn.Wq.weight", ".ffn.gate_proj.weight"))):
        return (
            f"{separate[0]} is of a layer that Octavo's MPT does not have: q, k and v are one Wqkv, and the MLP has no "
            "gate."
        )
    if WTE not in names:
        return None
    attention = config.attn_config
    assert attention is not None  # complete since MPTConfig.__post_init__
    parts = (
        ("wpe.weight", "learned positions", config.learned_pos_emb, "learned_pos_emb (and attn_config.alibi: false)"),
        ("norm_1.bias", "biases", not config.no_bias, "no_bias: false"),
        (
            "q_ln.weight",
            "norms of queries and keys",
            attention["qk_ln"] or attention["qk_gn"],
            "attn_config.qk_ln or qk_gn",
        ),
    )
    for end, what, wanted, key in parts:
        present = any(name.endswith(f".{end}") for name in names)
        if present != bool(wanted):
            says = "the tensors have " + (what if present else f"no {what}")
            other = "set" if present else "do not set"
            return (
                f"config.json says {'with' if wanted else 'without'} {what}, and {says} (*.{end}): {other} {key} there."
            )
    return None


def ignored_by_stock(config: MPTConfig) -> list[str]:
    """Return the fields of config.json that transformers' MPT would silently ignore for this model."""
    attention, ffn = config.attn_config, config.ffn_config
    assert isinstance(attention, dict) and isinstance(ffn, dict)
    ignored = {
        "learned_pos_emb": config.learned_pos_emb,
        "attn_config.alibi": not config.alibi,
        "attn_config.alibi_bias_max": config.alibi and attention["alibi_bias_max"] != 8,
        "no_bias": not config.no_bias,
        "attn_config.qk_ln": attention["qk_ln"],
        "attn_config.qk_gn": attention["qk_gn"],
        "expansion_ratio": config.hidden != 4 * config.d_model,
        "ffn_config.ffn_act_fn": ffn["ffn_act_fn"] != {"name": "gelu", "approximate": "none"},
        "logit_scale": config.factor != 1,
        "resid_pdrop": config.resid_pdrop != attention["attn_pdrop"],
        "emb_pdrop": config.emb_pdrop,
    }
    return [name for name, is_ignored in ignored.items() if is_ignored]


def why_too_long(config: MPTConfig, length: int) -> str | None:
    """Return why the model does not take rows of `length` tokens, as the end of a sentence with the fix, or None if it
    does."""
    if length <= config.max_seq_len:
        return None
    if config.alibi:
        return (
            f"is an MPT of max_seq_len {config.max_seq_len}. ALiBi itself has no limit: raise max_seq_len in "
            "config.json, which transformers' class also enforces, or lower train.seq_length."
        )
    if config.learned_pos_emb:
        return f"is an MPT of {config.max_seq_len} learned positions (max_seq_len). Lower train.seq_length."
    return f"is an MPT of max_seq_len {config.max_seq_len}. Lower train.seq_length, or raise it in config.json."
