"""Writes the ``model`` section of LLM-Foundry, which describes an architecture, as the config.json of a model folder.

All defaults of LLM-Foundry (``models/utils/config_defaults.py``, ``models/mpt/configuration_mpt.py``) are written
explicitly, because a program that only reads config.json assumes others (stock MPT has ALiBi and no biases).
"""

from __future__ import annotations

import json
from typing import Any

from octavo.importers.common.draft import Draft
from octavo.importers.common.prefixed_keys import PrefixedDraft

#: field -> LLM-Foundry's default
FIELDS: dict[str, Any] = {
    "d_model": 2048, "n_heads": 16, "n_layers": 24, "expansion_ratio": 4, "max_seq_len": 2048, "vocab_size": 50368,
    "resid_pdrop": 0.0, "emb_pdrop": 0.0, "learned_pos_emb": True, "no_bias": False, "logit_scale": None,
    "embedding_fraction": 1.0, "norm_type": "low_precision_layernorm", "norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
ATTENTION: dict[str, Any] = {
    "attn_type": "multihead_attention", "attn_pdrop": 0, "qk_ln": False, "qk_gn": False, "clip_qkv": None,
    "softmax_scale": None, "alibi": False, "alibi_bias_max": 8, "rope": False, "sliding_window_size": -1,
}  # fmt: skip
INIT: dict[str, Any] = {
    "name": "kaiming_normal_", "fan_mode": "fan_in", "init_nonlinearity": "relu", "init_div_is_residual": True,
    "emb_init_std": None, "emb_init_uniform_lim": None, "init_std": None, "init_gain": 0.0,
}  # fmt: skip
FFN: dict[str, Any] = {"ffn_type": "mptmlp", "ffn_hidden_size": None, "ffn_act_fn": {"name": "gelu"}}
_WHOLE = ("d_model", "n_heads", "n_layers", "max_seq_len", "vocab_size", "alibi_bias_max", "sliding_window_size")
_FLAGS = ("learned_pos_emb", "no_bias", "tie_word_embeddings", "qk_ln", "qk_gn", "alibi", "rope")
_WORDS = ("norm_type", "attn_type")
#: fields that octavo/models/custom/mpt does not implement: key -> (accepted values, reason)
_LACKS: dict[str, tuple[tuple[Any, ...], str]] = {
    "rope": ((False,), "Octavo's MPT supports learned positions, ALiBi or none, not rotary embeddings"),
    "attn_type": (("multihead_attention",), "Octavo's MPT has as many key heads as query heads"),
    "sliding_window_size": ((-1,), "sliding-window attention is not implemented"),
    "norm_type": (("low_precision_layernorm", "layernorm"), "Octavo's MPT has layer norms, with a bias unless no_bias"),
}  # fmt: skip
#: the same for keys that are only written to config.json if they are on
_OTHERS = {
    "attn_config.kv_n_heads": "Octavo's MPT has as many key heads as query heads",
    "attn_config.kv_dim": "keys have the width of the model",
    "attn_config.attn_logit_softcapping": "soft-capping of attention scores is not implemented",
    "attn_config.attn_temperature_tuning": "position-dependent scaling of attention scores is not implemented",
    "attn_config.nope": "layers without positions are not implemented",
    "attn_config.reuse_kv_layer_idx": "reusing the keys of another layer is not implemented",
    "attn_config.flex_attn_mod_list": "custom attention masks are not implemented",
    "attn_config.prefix_lm": "prefix language modeling is not implemented",
    "block_overrides": "all blocks have the same configuration",
    "final_logit_softcapping": "soft-capping of logits is not implemented",
    "residual_modification": "residual scaling is not implemented",
    "residual_coeff": "residual scaling is not implemented",
}


def write_config(draft: Draft, name: str) -> None:
    """Write the keys of the architecture to ``NAME/config.json`` and set model.path to that folder."""
    u = PrefixedDraft(draft, "model.")
    config: dict[str, Any] = {"model_type": "mpt", "architectures": ["MPTForCausalLM"]}
    for field, default in FIELDS.items():
        config[field] = _read_field(draft, u, field, default, name)
    a = PrefixedDraft(draft, "model.attn_config.")
    config["attn_config"] = {field: _read_field(draft, a, field, default, name) for field, default in ATTENTION.items()}
    if config["attn_config"]["alibi"] and config["learned_pos_emb"]:
        config["learned_pos_emb"] = False
        u.mark_ignored("learned_pos_emb", why="LLM-Foundry sets it to false if alibi is on")
    config["ffn_config"] = _build_ffn_config(draft, name)
    i = PrefixedDraft(draft, "model.init_config.")
    config["init_config"] = {field: _read_value(draft, i, field, default, name) for field, default in INIT.items()}
    for key in draft.keys_under("model.init_config."):
        if key not in draft.rows:
            draft.mark_unsupported(key, why="the model family defines the initialization (model.init_std)")
    _mark_other_fields(draft, config, name)
    draft.files["config.json"] = json.dumps(config, indent=2) + "\n"
    draft.set("model.path", name, "model.name", why="its config.json has the architecture that the file describes")
    draft.set("model.init", "random", why="the source starts from random weights")
    draft.add_note(f"{name} needs a tokenizer next to config.json: copy the files of tokenizer.name into the folder")


def _read_field(draft: Draft, u: PrefixedDraft, field: str, default: Any, name: str) -> Any:
    value = _read_value(draft, u, field, default, name)
    if field in _LACKS and value not in _LACKS[field][0]:
        _mark_rejected(draft, u(field), value, _LACKS[field][1], name)
    return value


def _mark_rejected(draft: Draft, key: str, value: Any, why: str, name: str) -> None:
    """Report a field that is not implemented; it is written to config.json, so that loading fails instead of building a
    different model."""
    draft.mark_unsupported(key, why=why)
    field = key.removeprefix("model.")
    draft.add_note(f"{name}/config.json has {field}: {value!r:.80}, which Octavo rejects when training starts: {why}")


def _mark_other_fields(draft: Draft, config: dict[str, Any], name: str) -> None:
    """Write the fields of ``_OTHERS`` that are on, and report them as not implemented."""
    for key, why in _OTHERS.items():
        present = [
            present_key
            for present_key in (f"model.{key}", *draft.keys_under(f"model.{key}."))
            if draft.value(present_key) not in _OFF
        ]
        draft.read_keys.add(f"model.{key}")
        for present_key in draft.keys_under(f"model.{key}"):
            if present_key not in present:
                draft.mark_default(present_key, why="off")
        if not present:
            continue
        inner = {present_key.removeprefix(f"model.{key}."): draft.value(present_key) for present_key in present}
        value = draft.value(present[0]) if present == [f"model.{key}"] else inner
        section, _, field = key.rpartition(".")
        (config[section] if section else config)[field] = value
        for present_key in present:
            _mark_rejected(draft, present_key, draft.value(present_key), why, name)


_OFF: tuple[Any, ...] = (None, False, [], {}, "")


def _read_value(draft: Draft, u: PrefixedDraft, field: str, default: Any, name: str) -> Any:
    if field in _WHOLE:
        value: Any = u.integer(field)
    elif field in _FLAGS:
        value = u.flag(field)
    elif field in _WORDS or isinstance(default, str):
        value = u.text(field)
    elif field == "emb_init_uniform_lim":  # a number, or two
        value = pair if len(pair := draft.numbers(u(field))) == 2 else u.number(field)
    elif field in ("logit_scale", "init_div_is_residual"):  # a number or a word
        value = draft.scalar(u(field))
    else:
        value = u.number(field)
    if value is None:
        return default
    if field not in _LACKS or value in _LACKS[field][0]:
        draft.set_outside(f"{name}/config.json: {u(field).removeprefix('model.')}", value, u(field))
    return value


def _build_ffn_config(draft: Draft, name: str) -> dict[str, Any]:
    """Return ffn_config; `te_ln_mlp` becomes `mptmlp` with the tanh form of GELU that Transformer Engine uses."""
    f = PrefixedDraft(draft, "model.ffn_config.")
    older = "model.ffn_config_defaults.ffn_type"
    word = f.text("ffn_type") or draft.text(older) or FFN["ffn_type"]
    config = {**FFN, "ffn_type": word}
    if word == "te_ln_mlp":
        why = (
            "one Transformer Engine kernel computes norm_2 and the MLP, with the tanh form of GELU and different names "
            "in state dicts; Octavo has separate norm and MLP layers, and fp8.fuse: on fuses them if possible"
        )
        draft.set("fp8.fuse", "on", f("ffn_type"), older, why=why)
        config |= {"ffn_type": "mptmlp", "ffn_act_fn": {"name": "gelu", "approximate": "tanh"}}
        f.mark_ignored("ffn_act_fn", *_inner_keys(draft, f, "ffn_act_fn"), why="te_ln_mlp always uses GELU")
    elif word != "mptmlp":
        _mark_rejected(
            draft, f("ffn_type"), word, "Octavo's MPT only has mptmlp: up projection, activation, down projection", name
        )
    else:
        f.mark_default("ffn_type", why="up projection, activation, down projection")
    if (width := f.integer("ffn_hidden_size")) is not None:
        config["ffn_hidden_size"] = width
        draft.set_outside(f"{name}/config.json: ffn_config.ffn_hidden_size", width, f("ffn_hidden_size"))
    act = draft.mapping(f("ffn_act_fn")) if word != "te_ln_mlp" else {}
    if act:
        config["ffn_act_fn"] = act
        draft.set_outside(
            f"{name}/config.json: ffn_config.ffn_act_fn",
            act,
            f("ffn_act_fn"),
            *[f(key) for key in _inner_keys(draft, f, "ffn_act_fn")],
        )
    # The section also has keys of other kinds of MLP; those not read above are reported here.
    for other_key in draft.keys_under(f.prefix):
        if other_key not in draft.rows:
            draft.mark_unsupported(other_key, why="only for MLPs other than mptmlp")
    return config


def _inner_keys(draft: Draft, u: PrefixedDraft, field: str) -> list[str]:
    return [key.removeprefix(u.prefix) for key in draft.keys_under(u(f"{field}."))]
