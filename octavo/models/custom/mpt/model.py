"""MPT: a decoder with learned positions or ALiBi, LayerNorm before attention and MLP, and the embeddings as head.

    x = wte[token] (+ wpe[position])
    block:  x = x + attn(norm_1(x));  x = x + down_proj(act(up_proj(norm_2(x))))
    logits = wte . (norm_f(x) * logit_scale)

Either all layers except the head, including norms, have biases, or none has (`no_bias`). In attention q, k and v are
clamped to `clip_qkv`, then q and k are normalized over all heads (`qk_ln`) or per head (`qk_gn`). Names are those on
disk. `low_precision_layernorm` and `layernorm` are both torch's LayerNorm, which autocast computes in fp32; LLM-Foundry
computes the former in 16 bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GenericForSequenceClassification, GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import can_return_tuple

from octavo.models.attention import alibi
from octavo.models.custom.mpt.configuration import MPTConfig
from octavo.models.custom.mpt.initial import RESIDUAL, init_std


def eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float,
    dropout: float = 0.0, **_: object,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(q k^T * scaling + mask) v of [B, H, T, D], as [B, T, H, D], and its weights."""
    scores = query @ key.mT * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.dropout(scores.softmax(-1, dtype=torch.float32).to(query.dtype), dropout)
    return (weights @ value).transpose(1, 2), weights


def _norm(config: MPTConfig, width: int) -> nn.LayerNorm:
    return nn.LayerNorm(width, config.eps, bias=not config.no_bias)


class MPTAttention(nn.Module):
    def __init__(self, config: MPTConfig, layer_idx: int) -> None:
        super().__init__()
        options = config.attn_config
        assert options is not None  # complete since MPTConfig.__post_init__
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        self.heads, self.head_dim = config.n_heads, config.d_model // config.n_heads
        self.scaling = self.head_dim**-0.5 if options["softmax_scale"] is None else options["softmax_scale"]
        self.clip, self.dropout = options["clip_qkv"], options["attn_pdrop"]
        self.Wqkv = nn.Linear(config.d_model, 3 * config.d_model, bias=not config.no_bias)
        self.out_proj = nn.Linear(config.d_model, config.d_model, bias=not config.no_bias)
        setattr(self.out_proj, RESIDUAL, True)
        self.norm_width = self.head_dim if options["qk_gn"] else config.d_model
        if options["qk_ln"] or options["qk_gn"]:
            self.q_ln, self.k_ln = _norm(config, self.norm_width), _norm(config, self.norm_width)

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, past_key_values: Cache | None = None, **kwargs: Any
    ) -> Tensor:
        rows, length = hidden_states.shape[:2]
        qkv = self.Wqkv(hidden_states)
        if self.clip:
            qkv = qkv.clamp(-self.clip, self.clip)
        q, k, v = qkv.chunk(3, -1)
        if hasattr(self, "q_ln"):
            q, k = (
                norm(x.unflatten(-1, (-1, self.norm_width))).to(v.dtype) for norm, x in ((self.q_ln, q), (self.k_ln, k))
            )
        q, k, v = (x.reshape(rows, length, self.heads, self.head_dim).transpose(1, 2) for x in (q, k, v))
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        dropped = self.dropout if self.training else 0.0
        out, _ = attend(self, q, k, v, attention_mask, dropout=dropped, scaling=self.scaling, **kwargs)
        return self.out_proj(out.reshape(rows, length, -1))


class MPTMLP(nn.Module):
    def __init__(self, config: MPTConfig) -> None:
        super().__init__()
        assert config.ffn_config is not None  # complete since MPTConfig.__post_init__
        act = config.ffn_config["ffn_act_fn"]
        kinds: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "silu": nn.SiLU}
        self.up_proj = nn.Linear(config.d_model, config.hidden, bias=not config.no_bias)
        self.act = nn.GELU(act["approximate"]) if act["name"] == "gelu" else kinds[act["name"]]()
        self.down_proj = nn.Linear(config.hidden, config.d_model, bias=not config.no_bias)
        setattr(self.down_proj, RESIDUAL, True)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.up_proj(x)))


class MPTBlock(GradientCheckpointingLayer):
    def __init__(self, config: MPTConfig, layer_idx: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = _norm(config, config.d_model), _norm(config, config.d_model)
        self.attn = MPTAttention(config, layer_idx)
        self.ffn = MPTMLP(config)
        self.resid_attn_dropout = nn.Dropout(config.resid_pdrop)
        self.resid_ffn_dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        hidden_states = hidden_states + self.resid_attn_dropout(self.attn(self.norm_1(hidden_states), **kwargs))
        return hidden_states + self.resid_ffn_dropout(self.ffn(self.norm_2(hidden_states)))


class MPTPreTrainedModel(PreTrainedModel):
    config_class = MPTConfig
    config: MPTConfig
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MPTBlock"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize linear layers and embeddings with :mod:`octavo.models.custom.mpt.initial`."""
        if not isinstance(module, nn.Linear | nn.Embedding):
            super()._init_weights(module)
        elif not module.weight.is_meta:  # loaded models are built on meta and do not need init_config
            init.normal_(module.weight, std=init_std(self.config, module))
            bias: Tensor | None = getattr(module, "bias", None)
            if bias is not None:
                init.zeros_(bias)


class MPTModel(MPTPreTrainedModel):
    """Embeddings, blocks and the last norm."""

    def __init__(self, config: MPTConfig) -> None:
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.d_model)
        if config.learned_pos_emb:
            self.wpe = nn.Embedding(config.max_seq_len, config.d_model)
        self.emb_drop = nn.Dropout(config.emb_pdrop)
        self.blocks = nn.ModuleList(MPTBlock(config, index) for index in range(config.n_layers))
        self.norm_f = _norm(config, config.d_model)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.wte

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.wte = value  # type: ignore[assignment]

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return the hidden states [B, T, C] after the last norm.

        position_ids   [B, T]: positions of the tokens in their samples, or None to count from the first token after
        padding on the left cache          the name of `past_key_values` from transformers 5.24 on

        Raises ValueError for a row beyond the last learned position.
        """
        past_key_values = past_key_values if cache is None else cache
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds")
        x = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache is None:
            use_cache = self.config.use_cache
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        length, past = x.shape[1], 0 if past_key_values is None else past_key_values.get_seq_length()
        counted = position_ids is None
        if position_ids is None:
            position_ids = _count_positions(attention_mask, past, length, x.device)
        if self.config.learned_pos_emb:
            limit = self.config.max_seq_len
            if (counted or past_key_values is not None) and past + length > limit:
                raise ValueError(
                    f"a row has {past + length} tokens, but this MPT has {limit} learned positions (max_seq_len). "
                    "Shorten the row"
                )
            x = x + self.wpe(position_ids)
        if self.config.embedding_fraction != 1:
            share = self.config.embedding_fraction
            x = x * share + x.detach() * (1 - share)
        x = self.emb_drop(x)
        # by position, here and below: transformers 5.24 renamed `past_key_values` to `cache`
        mask = create_causal_mask(self.config, x, attention_mask, past_key_values, position_ids)
        masking = self._add_bias(mask, x, past)
        for block in self.blocks:
            x = block(x, past_key_values=past_key_values, **masking)
        return BaseModelOutputWithPast(self.norm_f(x), past_key_values)

    def _add_bias(self, mask: Any, x: Tensor, past: int) -> dict[str, Any]:
        """Return the attention arguments: the mask with ALiBi's bias, computed once for all layers; for a packed row,
        whose mask is not a tensor, the slopes."""
        if not self.config.alibi:
            return {"attention_mask": mask}
        name = self.config._attn_implementation
        assert self.config.attn_config is not None
        slope = alibi.slopes(self.config.n_heads, self.config.attn_config["alibi_bias_max"], x.device)
        if name not in ("sdpa", "eager") and not name.startswith("octavo_"):
            raise ValueError(f"attention {name!r} does not support a bias, which ALiBi needs. Use sdpa or eager")
        if mask is not None and not isinstance(mask, Tensor):
            return {"attention_mask": mask, "alibi_slopes": slope}
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        keys = past + x.shape[1] if mask is None else mask.shape[-1]
        return {"attention_mask": alibi.causal(slope, past, x.shape[1], keys, dtype, mask)}


def _count_positions(mask: Tensor | None, past: int, length: int, device: torch.device) -> Tensor:
    """Return positions of tokens, [B or 1, T], counted from the first token after padding on the left."""
    if mask is not None and mask.dim() == 2:
        return (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
    return torch.arange(past, past + length, device=device)[None]


class MPTForCausalLM(MPTPreTrainedModel, GenerationMixin):
    """The generating model, with LLM-Foundry's class name."""

    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}

    def __init__(self, config: MPTConfig) -> None:
        super().__init__(config)
        self.transformer = MPTModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits [B, T, V] of all tokens or of `logits_to_keep` (a number of last tokens, or indices), and with
        `labels` the loss; for other arguments see `MPTModel.forward`. `logit_scale` multiplies the input of the head,
        which has no bias, instead of its output: so losses that never materialize the logits are scaled too."""
        output = self.transformer(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
            past_key_values=past_key_values, inputs_embeds=inputs_embeds, use_cache=use_cache, cache=cache,
        )  # fmt: skip
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden = output.last_hidden_state[:, keep]
        logits = self.lm_head(hidden if self.config.factor == 1 else hidden * self.config.factor)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=logits.shape[-1], **kwargs)
        return CausalLMOutputWithPast(loss, logits, output.past_key_values)


class MPTForSequenceClassification(GenericForSequenceClassification, MPTPreTrainedModel):
    """The model that scores texts; `score` has no bias."""

    base_model_prefix = "transformer"
