"""The ``model`` section of LLM-Foundry: an architecture, written as a model's folder with its own names of fields.

Defaults are LLM-Foundry's (``models/utils/config_defaults.py``, ``models/mpt/configuration_mpt.py``), and all are
written out: a program that only reads config.json would assume others (stock MPT has ALiBi and no biases).
"""

from __future__ import annotations

import json
from typing import Any

from octavo.importers.common.draft import Draft
from octavo.importers.common.prefixed_keys import Under

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
#: fields that change what is computed, and that octavo/models/custom/mpt refuses: key -> (values that mean off, why)
_LACKS: dict[str, tuple[tuple[Any, ...], str]] = {
    "rope": ((False,), "Octavo's MPT has learned positions, ALiBi or none, no rotary ones"),
    "attn_type": (("multihead_attention",), "Octavo's MPT has as many heads of keys as of queries"),
    "sliding_window_size": ((-1,), "every token sees all before it"),
    "norm_type": (("low_precision_layernorm", "layernorm"), "Octavo's MPT has layer norms, with a bias unless no_bias"),
}  # fmt: skip
#: the same, of keys that are not written into config.json where they are off
_OTHERS = {
    "attn_config.kv_n_heads": "Octavo's MPT has as many heads of keys as of queries",
    "attn_config.kv_dim": "keys are as wide as the model",
    "attn_config.attn_logit_softcapping": "a cap of scores is not implemented",
    "attn_config.attn_temperature_tuning": "a scale of scores by position is not implemented",
    "attn_config.nope": "layers without positions are not implemented",
    "attn_config.reuse_kv_layer_idx": "keys of another layer are not implemented",
    "attn_config.flex_attn_mod_list": "masks of one's own are not implemented",
    "attn_config.prefix_lm": "a prefix that sees both ways is not implemented",
    "block_overrides": "all blocks are alike",
    "final_logit_softcapping": "a cap of logits is not implemented",
    "residual_modification": "a block adds what it computes",
    "residual_coeff": "a block adds what it computes",
}


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
    config["ffn_config"] = _ffn(draft, name)
    i = Under(draft, "model.init_config.")
    config["init_config"] = {field: _taken(draft, i, field, usual, name) for field, usual in INIT.items()}
    for key in draft.under("model.init_config."):
        if key not in draft.rows:
            draft.none(key, why="weights are drawn as the family draws them (model.init_std)")
    _others(draft, config, name)
    draft.files["config.json"] = json.dumps(config, indent=2) + "\n"
    draft.put("model.path", name, "model.name", why="the architecture that the file described, in its config.json")
    draft.put("model.init", "random", why="it began with random weights")
    draft.note(f"{name} needs a tokenizer next to config.json: copy the files of tokenizer.name there")


def _field(draft: Draft, u: Under, field: str, usual: Any, name: str) -> Any:
    value = _taken(draft, u, field, usual, name)
    if field in _LACKS and value not in _LACKS[field][0]:
        _refused(draft, u(field), value, _LACKS[field][1], name)
    return value


def _refused(draft: Draft, key: str, value: Any, why: str, name: str) -> None:
    """What would be another model without it: config.json says it, so that the model is refused, not changed."""
    draft.none(key, why=why)
    field = key.removeprefix("model.")
    draft.note(f"{name}/config.json asks for {field}: {value!r:.80}, which Octavo refuses when it trains: {why}")


def _others(draft: Draft, config: dict[str, Any], name: str) -> None:
    """Fields that are off where they are absent: what is on is written, and refused."""
    for key, why in _OTHERS.items():
        present = [one for one in (f"model.{key}", *draft.under(f"model.{key}.")) if draft.value(one) not in _OFF]
        draft.read_keys.add(f"model.{key}")
        for one in draft.under(f"model.{key}"):
            if one not in present:
                draft.same(one, why="off")
        if not present:
            continue
        inner = {one.removeprefix(f"model.{key}."): draft.value(one) for one in present}
        value = draft.value(present[0]) if present == [f"model.{key}"] else inner
        section, _, field = key.rpartition(".")
        (config[section] if section else config)[field] = value
        for one in present:
            _refused(draft, one, draft.value(one), why, name)


_OFF: tuple[Any, ...] = (None, False, [], {}, "")


def _taken(draft: Draft, u: Under, field: str, usual: Any, name: str) -> Any:
    if field in _WHOLE:
        value: Any = u.whole(field)
    elif field in _FLAGS:
        value = u.flag(field)
    elif field in _WORDS or isinstance(usual, str):
        value = u.text(field)
    elif field == "emb_init_uniform_lim":  # a number, or two
        value = pair if len(pair := draft.numbers(u(field))) == 2 else u.number(field)
    elif field in ("logit_scale", "init_div_is_residual"):  # a number or a word
        value = draft.scalar(u(field))
    else:
        value = u.number(field)
    if value is None:
        return usual
    if field not in _LACKS or value in _LACKS[field][0]:
        draft.put_outside(f"{name}/config.json: {u(field).removeprefix('model.')}", value, u(field))
    return value


def _ffn(draft: Draft, name: str) -> dict[str, Any]:
    """`te_ln_mlp` becomes `mptmlp` with the GELU of Transformer Engine, which is the tanh form."""
    f = Under(draft, "model.ffn_config.")
    older = "model.ffn_config_defaults.ffn_type"
    word = f.text("ffn_type") or draft.text(older) or FFN["ffn_type"]
    config = {**FFN, "ffn_type": word}
    if word == "te_ln_mlp":
        why = (
            "there one kernel of Transformer Engine computes norm_2 and the MLP, with GELU fixed (its tanh form) and "
            "other names in state dicts; here norm and MLP are layers of their own names, and fp8.fuse: on fuses what "
            "can be"
        )
        draft.put("fp8.fuse", "on", f("ffn_type"), older, why=why)
        config |= {"ffn_type": "mptmlp", "ffn_act_fn": {"name": "gelu", "approximate": "tanh"}}
        f.dead("ffn_act_fn", *_inner(draft, f, "ffn_act_fn"), why="te_ln_mlp has GELU fixed")
    elif word != "mptmlp":
        _refused(draft, f("ffn_type"), word, "Octavo's MPT has mptmlp: up, an activation and down", name)
    else:
        f.same("ffn_type", why="up, an activation and down")
    if (width := f.whole("ffn_hidden_size")) is not None:
        config["ffn_hidden_size"] = width
        draft.put_outside(f"{name}/config.json: ffn_config.ffn_hidden_size", width, f("ffn_hidden_size"))
    act = draft.mapping(f("ffn_act_fn")) if word != "te_ln_mlp" else {}
    if act:
        config["ffn_act_fn"] = act
        draft.put_outside(
            f"{name}/config.json: ffn_config.ffn_act_fn",
            act,
            f("ffn_act_fn"),
            *[f(key) for key in _inner(draft, f, "ffn_act_fn")],
        )
    # Keys of other kinds of MLP are in the same section, so what was not read above is reported here.
    for other in draft.under(f.prefix):
        if other not in draft.rows:
            draft.none(other, why="of other MLPs than mptmlp")
    return config


def _inner(draft: Draft, u: Under, field: str) -> list[str]:
    return [key.removeprefix(u.prefix) for key in draft.under(u(f"{field}."))]
