"""The ``model`` section of LLM-Foundry: an architecture, written as a model's folder with its own names of fields.

Defaults are LLM-Foundry's (``models/utils/config_defaults.py``, ``models/mpt/configuration_mpt.py``), and all are
written out: a reader of config.json alone would guess others (stock MPT has ALiBi and no biases).
"""

from __future__ import annotations

import json
from typing import Any

from octavo.translate.draft import Draft
from octavo.translate.keys import Under

#: field -> LLM-Foundry's default
FIELDS: dict[str, Any] = {
    "d_model": 2048, "n_heads": 16, "n_layers": 24, "expansion_ratio": 4, "max_seq_len": 2048, "vocab_size": 50368,
    "resid_pdrop": 0.0, "emb_pdrop": 0.0, "learned_pos_emb": True, "no_bias": False, "logit_scale": None,
    "embedding_fraction": 1.0, "norm_type": "low_precision_layernorm", "norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
ATTENTION: dict[str, Any] = {
    "attn_type": "multihead_attention", "attn_pdrop": 0.0, "qk_ln": False, "qk_gn": False, "clip_qkv": None,
    "softmax_scale": None, "alibi": False, "alibi_bias_max": 8, "rope": False, "sliding_window_size": -1,
}  # fmt: skip
INIT: dict[str, Any] = {
    "name": "kaiming_normal_", "fan_mode": "fan_in", "init_nonlinearity": "relu", "init_div_is_residual": True,
    "emb_init_std": None, "emb_init_uniform_lim": None, "init_std": None, "init_gain": 0.0,
}  # fmt: skip
_WHOLE = ("d_model", "n_heads", "n_layers", "max_seq_len", "vocab_size", "alibi_bias_max", "sliding_window_size")
_FLAGS = ("learned_pos_emb", "no_bias", "tie_word_embeddings", "qk_ln", "qk_gn", "alibi", "rope")
_WORDS = ("norm_type", "attn_type", "logit_scale")
#: what Octavo's MPT does not have: key -> (the value that it has, why)
_LACKS = {
    "rope": (False, "Octavo's MPT has learned positions, ALiBi or none, no rotary ones"),
    "attn_type": ("multihead_attention", "Octavo's MPT has as many heads of keys as of queries"),
    "qk_gn": (False, "there is qk_ln, and no group norm of queries and keys"),
    "sliding_window_size": (-1, "every token sees all before it"),
    "embedding_fraction": (1.0, "gradients of embeddings are whole"),
    "resid_pdrop": (0.0, "no dropout in the residual stream"), "emb_pdrop": (0.0, "no dropout of embeddings"),
    "attn_pdrop": (0.0, "no dropout of attention"),
}  # fmt: skip
_NORMS = ("low_precision_layernorm", "layernorm")


def folder(draft: Draft, name: str) -> None:
    """The keys of the architecture become ``NAME/config.json``; model.path names that folder."""
    u = Under(draft, "model.")
    config: dict[str, Any] = {"model_type": "mpt", "architectures": ["MPTForCausalLM"]}
    for field, usual in FIELDS.items():
        config[field] = _field(draft, u, field, usual, name)
    a = Under(draft, "model.attn_config.")
    config["attn_config"] = {field: _field(draft, a, field, usual, name) for field, usual in ATTENTION.items()}
    if config["attn_config"]["alibi"] and config["learned_pos_emb"]:
        config["learned_pos_emb"] = False
        u.dead("learned_pos_emb", why="alibi is on, which sets it to false there")
    config["ffn_config"] = {"ffn_type": _ffn(draft)}
    i = Under(draft, "model.init_config.")
    config["init_config"] = {field: _taken(draft, i, field, usual, name) for field, usual in INIT.items()}
    for key in draft.under("model.init_config."):
        if key not in draft.rows:
            draft.none(key, why="weights are drawn as the family draws them (model.init_std)")
    u.none("residual_modification", "residual_coeff", why="the residual stream is a plain sum")
    draft.files["config.json"] = json.dumps(config, indent=2) + "\n"
    draft.put("model.path", name, "model.name", why="the architecture that the file described, in its config.json")
    draft.put("model.init", "random", why="it began with random weights")
    draft.note(f"{name} needs a tokenizer beside config.json: copy those files there (tokenizer.name says whose)")


def _field(draft: Draft, u: Under, field: str, usual: Any, name: str) -> Any:
    value = _taken(draft, u, field, usual, name)
    if field in _LACKS and value != _LACKS[field][0]:
        u.none(field, why=_LACKS[field][1])
        return value
    if field == "norm_type" and value not in _NORMS:
        u.none(field, why=f"{value}: Octavo's MPT has layer norms, with or without a bias as no_bias says")
    return value


def _taken(draft: Draft, u: Under, field: str, usual: Any, name: str) -> Any:
    if field in _WHOLE:
        value: Any = u.whole(field)
    elif field in _FLAGS:
        value = u.flag(field)
    elif field in _WORDS or isinstance(usual, str):
        value = u.text(field)
    else:
        value = draft.value(u(field)) if field in ("emb_init_uniform_lim", "init_div_is_residual") else u.number(field)
    if value is None:
        return usual
    if field not in _LACKS or value == _LACKS[field][0]:
        draft.told(f"{name}/config.json: {u(field).removeprefix('model.')}", value, u(field))
    return value


def _ffn(draft: Draft) -> str:
    f = Under(draft, "model.ffn_config.")
    key = "ffn_type" if f.has("ffn_type") or not draft.has("model.ffn_config_defaults.ffn_type") else None
    word = (f.text("ffn_type") if key else draft.text("model.ffn_config_defaults.ffn_type")) or "mptmlp"
    if word == "te_ln_mlp":
        why = (
            "there one kernel of Transformer Engine computes norm_2 and the MLP, with GELU fixed and other names in "
            "state "
            "dicts; here norm and MLP are layers of their own names, and fp8.fuse: on fuses what can be"
        )
        draft.put("fp8.fuse", "on", f("ffn_type"), "model.ffn_config_defaults.ffn_type", why=why)
        return "mptmlp"
    if word != "mptmlp":
        f.none("ffn_type", why=f"{word}: Octavo's MPT has mptmlp, up, GELU and down")
        return word
    f.same("ffn_type", why="up, GELU and down")
    for other in draft.under(f.prefix):
        draft.none(other, why="of other MLPs than mptmlp")
    return word
