"""config.json of MPT: LLM-Foundry's fields with LLM-Foundry's meaning, each implemented or refused.

transformers has a class for the same `model_type` that reads a few of them (:mod:`octavo.models.custom.mpt.reading`
lists them and the meaning of missing fields). All fields are written to a saved folder, so that no reader depends on
defaults.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

ATTENTION: Mapping[str, Any] = {
    "attn_type": "multihead_attention",
    "attn_impl": "torch",
    "attn_pdrop": 0,
    "alibi": False,
    "alibi_bias_max": 8,
    "clip_qkv": None,
    "qk_ln": False,
    "qk_gn": False,
    "softmax_scale": None,
}
"""Fields of `attn_config` and their defaults. `attn_impl` names a kernel and is ignored: Octavo chooses the kernel."""

FFN: Mapping[str, Any] = {"ffn_type": "mptmlp", "ffn_hidden_size": None, "ffn_act_fn": None}
INIT: Mapping[str, Any] = {
    "name": "kaiming_normal_",
    "fan_mode": "fan_in",
    "init_nonlinearity": "relu",
    "init_div_is_residual": True,
    "init_gain": 0.0,
    "init_std": None,
    "emb_init_std": None,
    "emb_init_uniform_lim": None,
}

UNSUPPORTED_ATTENTION: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "attn_type": (("multihead_attention",), "heads that share keys and values are not implemented"),
    "kv_n_heads": ((None,), "heads that share keys and values are not implemented"),
    "kv_dim": ((None,), "keys of another width are not implemented"),
    "fused_qkv": ((True,), "q, k and v are one layer, Wqkv; join the three weights to one"),
    "rope": ((False,), "rotary positions are not implemented; a Llama has them"),
    "sliding_window_size": ((-1, None), "sliding windows are not implemented"),
    "attn_logit_softcapping": ((None,), "a cap of scores is not implemented"),
    "attn_temperature_tuning": ((None,), "a scale of scores by position is not implemented"),
    "nope": ((False, None), "layers without positions are not implemented"),
    "reuse_kv_layer_idx": ((None,), "keys of another layer are not implemented"),
    "flex_attn_mod_list": ((None, []), "custom masks are not implemented"),
    "prefix_lm": ((False, None), "a prefix with bidirectional attention is not implemented"),
    "attn_uses_sequence_id": (
        (False, None),
        "samples of a pack never see each other under data.packing (with data.join: false); set it to false",
    ),
}
"""Fields of `attn_config` that change the attention -> (accepted values, reason why others are not supported)."""

ROPE_FIELDS = ("rope_theta", "rope_impl", "rope_dail_config", "rope_hf_config")
UNSUPPORTED_FIELDS: Mapping[str, str] = {
    "block_overrides": "all blocks are alike",
    "final_logit_softcapping": "a cap of logits is not implemented",
    "residual_modification": "a block adds what it computes",
}
"""Top-level fields that change the computation and must be null, with the reason."""

NORMS = ("layernorm", "low_precision_layernorm")
ACTIVATIONS = ("gelu", "relu", "silu")
FUSED, PLAIN = "te_ln_mlp", "mptmlp"


@strict
class MPTConfig(PreTrainedConfig):
    """The fields of LLM-Foundry's `MPTConfig` with its defaults, and two fields of transformers: `layer_norm_epsilon`
    (LLM-Foundry's `norm_eps`) and `initializer_range`, which, if set, replaces `init_config`.

    `attn_config`, `ffn_config` and `init_config` are dicts that are completed with defaults. ALiBi disables learned
    positions, as in LLM-Foundry. `te_ln_mlp` is TransformerEngine's name for norm_2 and an MLP with the tanh form of
    GELU: it becomes `mptmlp` with that activation.

    Raises ValueError, naming the field, for values that Octavo does not implement.
    """

    model_type = "mpt"
    attribute_map = {
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "max_position_embeddings": "max_seq_len",
    }

    d_model: int = 2048
    n_heads: int = 16
    n_layers: int = 24
    expansion_ratio: int | float = 4
    max_seq_len: int = 2048
    vocab_size: int = 50368
    resid_pdrop: float | int = 0.0
    emb_pdrop: float | int = 0.0
    learned_pos_emb: bool = True
    attn_config: dict | None = None
    ffn_config: dict | None = None
    init_config: dict | None = None
    init_device: str = "cpu"
    logit_scale: float | int | str | None = None
    no_bias: bool = False
    embedding_fraction: float | int = 1.0
    norm_type: str = "low_precision_layernorm"
    norm_eps: float | None = None
    layer_norm_epsilon: float | None = None
    fc_type: str | dict = "torch"
    use_pad_tok_in_ffn: bool = True
    use_cache: bool = False
    initializer_range: float | None = None
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**{key: value for key, value in kwargs.items() if key not in UNSUPPORTED_FIELDS})
        for key, why in UNSUPPORTED_FIELDS.items():
            if kwargs.get(key) is not None:
                raise ValueError(f"{key} is {kwargs[key]!r:.80}: {why}. {_FIX}")
        self.attn_config = _with_defaults(
            "attn_config", self.attn_config, ATTENTION, (*UNSUPPORTED_ATTENTION, *ROPE_FIELDS)
        )
        self.ffn_config = _with_defaults("ffn_config", self.ffn_config, FFN, ("fc_type",))
        self.init_config = _with_defaults("init_config", self.init_config, INIT, ("verbose",))
        _check_attention(self.attn_config)
        self.ffn_config = _normalize_mlp(self.ffn_config)
        self.learned_pos_emb = self.learned_pos_emb and not self.alibi
        self._check()

    @property
    def alibi(self) -> bool:
        assert isinstance(self.attn_config, dict)
        return bool(self.attn_config["alibi"])

    @property
    def eps(self) -> float:
        """Epsilon of all norms."""
        return 1e-5 if self.norm_eps is None else self.norm_eps

    @property
    def hidden(self) -> int:
        """The width inside an MLP."""
        assert isinstance(self.ffn_config, dict)
        width = self.ffn_config["ffn_hidden_size"]
        return int(self.d_model * self.expansion_ratio) if width is None else width

    @property
    def factor(self) -> float:
        """The factor of the logits."""
        if self.logit_scale == "inv_sqrt_d_model":
            return self.d_model**-0.5
        return 1.0 if self.logit_scale is None else float(self.logit_scale)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, without `initializer_range` if it is None: transformers' class accepts only a number."""
        fields = super().to_dict()
        if fields.get("initializer_range") is None:
            fields.pop("initializer_range", None)
        return fields

    def to_diff_dict(self) -> dict[str, Any]:
        """Return every field that affects the computation, including those with default values."""
        declared = {name: value for name, value in self.to_dict().items() if name in type(self).__annotations__}
        return super().to_diff_dict() | declared

    def _check(self) -> None:
        # The checks below rely on complete and normalized `attn_config` and `ffn_config`.
        assert self.attn_config is not None and self.ffn_config is not None
        for name in ("d_model", "n_heads", "n_layers", "max_seq_len", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be an integer of at least 1. {_FIX}")
        if self.d_model % self.n_heads:
            raise ValueError(f"d_model is {self.d_model}, which {self.n_heads} heads (n_heads) do not divide. {_FIX}")
        if self.hidden != self.d_model * self.expansion_ratio and self.ffn_config["ffn_hidden_size"] is None:
            raise ValueError(
                f"d_model {self.d_model} times expansion_ratio {self.expansion_ratio} is not an integer. {_FIX}"
            )
        if self.norm_type.lower() not in NORMS:
            raise ValueError(f"norm_type is {self.norm_type!r}; it must be {' or '.join(NORMS)}. {_FIX}")
        epsilons = {eps for eps in (self.norm_eps, self.layer_norm_epsilon) if eps is not None}
        if len(epsilons) > 1:
            raise ValueError(
                f"norm_eps is {self.norm_eps} and layer_norm_epsilon {self.layer_norm_epsilon}, but both are the "
                f"epsilon of all norms. {_FIX}"
            )
        self.norm_eps = self.layer_norm_epsilon = epsilons.pop() if epsilons else 1e-5
        if self.norm_eps < 0:
            raise ValueError(f"norm_eps (layer_norm_epsilon) is {self.norm_eps}; it must not be negative. {_FIX}")
        for key, fc_type in (("fc_type", self.fc_type), ("ffn_config.fc_type", self.ffn_config.get("fc_type"))):
            kind = fc_type.get("name", "torch") if isinstance(fc_type, dict) else fc_type
            if kind not in ("torch", "te") and not (kind is None and "." in key):
                raise ValueError(f"{key} is {kind!r}; only torch and te are supported. {_FIX}")
        wrong = isinstance(self.logit_scale, str) and self.logit_scale != "inv_sqrt_d_model"
        if wrong or not math.isfinite(self.factor) or not self.factor:
            raise ValueError(
                f"logit_scale is {self.logit_scale!r}; it must be a nonzero number or inv_sqrt_d_model. {_FIX}"
            )
        if not 0 < self.embedding_fraction <= 1:
            raise ValueError(
                f"embedding_fraction is {self.embedding_fraction}; it must be above 0 and at most 1. {_FIX}"
            )
        shares = {"resid_pdrop": self.resid_pdrop, "emb_pdrop": self.emb_pdrop,
                  "attn_pdrop": self.attn_config["attn_pdrop"]}  # fmt: skip
        if out_of_range := {key: share for key, share in shares.items() if not 0 <= share < 1}:
            raise ValueError(
                f"{', '.join(f'{key} is {share}' for key, share in out_of_range.items())}; dropout must be at least 0 "
                f"and below 1. {_FIX}"
            )


_FIX = "Correct config.json if it does not describe the weights"


def _with_defaults(
    name: str, stated: dict[str, Any] | None, known: Mapping[str, Any], others: tuple[str, ...]
) -> dict[str, Any]:
    """Complete a nested dict with defaults. Raises ValueError for an unknown field, which may change the computation.
    Generic fields that transformers writes to `attn_config` are dropped."""
    generic = PreTrainedConfig().to_dict()
    fields = {key: value for key, value in (stated or {}).items() if key in known or key not in generic}
    if unknown := [key for key in fields if key not in known and key not in others]:
        raise ValueError(
            f"{name}.{unknown[0]} is {fields[unknown[0]]!r:.80}, which Octavo does not support; known fields are "
            f"{', '.join(known)}. Remove the field if it has no effect"
        )
    return {**known, **fields}


def _check_attention(attention: dict[str, Any]) -> None:
    for key, (accepted, why) in UNSUPPORTED_ATTENTION.items():
        if key in attention and attention[key] not in accepted:
            raise ValueError(f"attn_config.{key} is {attention[key]!r:.80}: {why}. {_FIX}")
    for key in ("alibi", "qk_ln", "qk_gn"):
        if not isinstance(attention[key], bool):
            raise ValueError(f"attn_config.{key} is {attention[key]!r:.80}; it must be true or false. {_FIX}")
    if attention["qk_ln"] and attention["qk_gn"]:
        raise ValueError(f"attn_config has both qk_ln and qk_gn, but queries have one norm. {_FIX}")
    for key in ("clip_qkv", "softmax_scale", "alibi_bias_max", "attn_pdrop"):
        value = attention[key]
        unset = value is None and key in ("clip_qkv", "softmax_scale")
        if not unset and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
            raise ValueError(f"attn_config.{key} is {value!r:.80}; it must be a number of at least 0. {_FIX}")
    if float(attention["attn_pdrop"]).is_integer():
        attention["attn_pdrop"] = int(attention["attn_pdrop"])  # transformers' class does not accept integral floats


def _normalize_mlp(ffn: dict[str, Any]) -> dict[str, Any]:
    """Return the normalized `ffn_config` of an MLP of two layers. Raises ValueError for others."""
    # A missing activation is GELU; the rest of this function fixes the form of "gelu".
    act = ffn["ffn_act_fn"] or {"name": "gelu"}
    if not isinstance(act, dict) or "name" not in act:
        raise ValueError(f"ffn_config.ffn_act_fn is {act!r:.80}; it must be an object with a name, "
                         f'{{"name": "gelu"}}. {_FIX}')  # fmt: skip
    act = dict(act)
    if ffn["ffn_type"] == FUSED:
        if act != {"name": "gelu"}:
            raise ValueError(f"ffn_config: {FUSED} has the GELU of TransformerEngine, but ffn_act_fn is {act}. {_FIX}")
        ffn, act = {**ffn, "ffn_type": PLAIN}, {"name": "gelu", "approximate": "tanh"}
    if ffn["ffn_type"] != PLAIN:
        raise ValueError(
            f"ffn_config.ffn_type is {ffn['ffn_type']!r:.80}; only {PLAIN} and {FUSED} are implemented, not gated "
            f"MLPs or experts. {_FIX}"
        )
    if act["name"] == "gelu":
        act.setdefault("approximate", "none")
    if (
        act["name"] not in ACTIVATIONS
        or set(act) - {"name", "approximate"}
        or act.get("approximate") not in (("none", "tanh") if act["name"] == "gelu" else (None,))
    ):
        raise ValueError(f"ffn_config.ffn_act_fn is {act}; there are {', '.join(ACTIVATIONS)}, gelu with approximate "
                         f"none or tanh. {_FIX}")  # fmt: skip
    width = ffn["ffn_hidden_size"]
    if width is not None and (type(width) is not int or width < 1):
        raise ValueError(f"ffn_config.ffn_hidden_size is {width!r:.80}; it must be an integer of at least 1. {_FIX}")
    return {**ffn, "ffn_act_fn": act}
