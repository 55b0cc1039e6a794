"""The permutation of each axis, by the names of modules: one table.

A rule has a pattern for a parameter's name and the axes of its weight; biases and other parameters with one axis have
the first of these. The words of an axis, joined by + for consecutive segments:

    -        not permuted
    vocab    rows of the embedding table and of the output projection
    res      channels of the decoder's residual stream; `own`: of the residual stream of the parameter's part (the
             decoder or a tower)
    q, kv    heads of this attention (key-value heads, and query heads within their groups)
    @NAME    a separate permutation, named after the parent of the parameter's module (`@mlp`: of this MLP);
             @@NAME after the grandparent, @PART@NAME after the parent's part PART
    q?, kv?  for norms of queries and keys: these heads if all are normalized together, - if each is separately
    lk, lv   key heads and value heads of a recurrence, like kv and q
    K*WORD   K consecutive segments, like the channels of K merged patches; 0*: as many as fit
    WORD^    one segment whose items have several positions each, as many as fit
    patch    values of a patch of pixels (all axes of a convolution after the first are one)
    bins     frequency bins of a spectrogram
    experts  experts of this layer

The first matching pattern decides. A parameter without a match cannot be sealed, and is refused by name.
"""

from __future__ import annotations

import re

_HEAD = ("lm_head", "embed_out", "output_layer")
_RULES: tuple[tuple[str, str], ...] = (
    # Between tower and decoder ---------------------------------------------------------------------------------------
    (r"(merger|deepstack_merger_list\.\d+|merger_list\.\d+)\.(norm|ln_q)", "0*tower"),  # Qwen, LLaVA-OneVision-1.5
    (r"(merger|deepstack_merger_list\.\d+|merger_list\.\d+)\.(linear_fc1|mlp\.0)", "@merger, 0*tower"),
    (r"(merger|deepstack_merger_list\.\d+|merger_list\.\d+)\.(linear_fc2|mlp\.2)", "res, @merger"),
    (r"visual\.downsample", "@down, tower, -, -"),  # GLM
    (r"visual\.merger\.proj", "@glm, @@down"),
    (r"visual\.merger\.post_projection_norm", "@glm"),
    (r"visual\.merger\.(gate|up)_proj", "@wide, @glm"),
    (r"visual\.merger\.down_proj", "res, @wide"),
    (r"multi_modal_projector\.layer_norm", "0*tower"),  # InternVL
    (r"multi_modal_projector\.norm", "0*tower"),  # Mistral 3, composed models
    (r"multi_modal_projector\.patch_merger\.merging_layer", "tower, tower^"),
    (r"multi_modal_projector\.linear_1", "@projector, 0*tower"),
    (r"multi_modal_projector\.linear_2", "res, @projector"),
    (r"multi_modal_projector\.mm_input_projection_weight", "tower, res"),  # Gemma 3
    (r"multi_modal_projector\.mm_soft_emb_norm", "tower"),
    (r"multi_modal_projector\.linear", "res, ear"),  # Qwen2-Audio
    (r"connector\.modality_projection\.proj", "res, 0*tower"),  # SmolVLM
    (r"mm_projector\.layers\.1:LayerNorm", "0*tower"),  # NVILA: 2 x 2 patches, or 3 x 3 by one layer more
    (r"mm_projector\.layers\.2:Linear", "@first, 0*tower"),
    (r"mm_projector\.layers\.4:Linear", "res, @first"),
    (r"mm_projector\.layers\.4:LayerNorm", "@first"),
    (r"mm_projector\.layers\.5:Linear", "@second, @first"),
    (r"mm_projector\.layers\.7:Linear", "res, @second"),
    (r"resampler_model\.spatial_linear\.fc1", "@a, 0*tower"),  # Ernie
    (r"resampler_model\.spatial_linear\.fc2", "@b, @a"),
    (r"resampler_model\.spatial_linear\.ln", "@b"),
    (r"resampler_model\.temporal_linear\.fc1", "@a, 2*@@spatial_linear@b"),
    (r"resampler_model\.temporal_linear\.fc2", "@b, @a"),
    (r"resampler_model\.temporal_linear\.ln", "@b"),
    (r"resampler_model\.mlp", "res, @temporal_linear@b"),
    (r"resampler_model\.after_norm", "res"),
    (r"image_newline", "res"),
    # The first layers of a tower -------------------------------------------------------------------------------------
    (r"(patch_embed\.proj|patch_embedding|patch_embeddings(\.projection)?|patch_conv)", "own, patch"),
    (r"audio_tower\.conv1", "@first, bins, -"),
    (r"audio_tower\.conv2", "own, @first, -"),
    (r"(pos_embed|position_embedding|embed_positions|wpe)", "-, own"),
    (r"mask_token:Dinov2WithRegistersEmbeddings", "-, own"),
    (r"(position_embeddings|cls_token|mask_token|register_tokens)", "-, -, own"),
    (r"(class_embedding|lambda_?[12])", "own"),
    (r"class_pos_emb", "-, -"),
    # Attention -------------------------------------------------------------------------------------------------------
    (r"linear_attn\.in_proj_qkv", "lk + lk + lv, own"),  # Gated DeltaNet: heads of keys, each shared by some of values
    (r"linear_attn\.conv1d", "lk + lk + lv, -, -"),
    (r"linear_attn\.in_proj_z", "lv, own"),
    (r"linear_attn\.in_proj_[ab]", "lv, own"),
    (r"linear_attn\.(dt_bias|A_log)", "lv"),
    (r"linear_attn\.norm", "-"),
    (r"linear_attn\.out_proj", "own, lv"),
    (r"(attn|self_attn|attention)\.q_proj", "q, own"),
    (r"(attn|self_attn|attention)\.[kv]_proj", "kv, own"),
    (r"(attn|self_attn|attention)\.(o_proj|out_proj|proj|projection_layer)", "own, q"),
    (r"(attn|self_attn|attention)\.(qkv|Wqkv|qkv_proj)", "q + kv + kv, own"),
    (r"(attn|self_attn|attention)\.q_(norm|ln)", "q?"),
    (r"(attn|self_attn|attention)\.k_(norm|ln)", "kv?"),
    (r"self_attn\.sinks", "q"),
    # MLPs and experts ------------------------------------------------------------------------------------------------
    (r"experts\.gate_up_proj", "experts, @width + @width, own"),
    (r"experts\.down_proj", "experts, own, @width"),
    (r"(gate|router)\.(moe_statics\.)?e_score_correction_bias", "experts"),
    (r"(gate|router)", "experts, own"),
    (r"shared_expert_gate", "-, own"),
    (r"(gate_proj|up_proj|fc1|linear_fc1|w1|w3)", "@mlp, own"),
    (r"gate_up_proj", "@mlp + @mlp, own"),
    (r"(down_proj|fc2|linear_fc2|w2)", "own, @mlp"),
    # Ends and norms --------------------------------------------------------------------------------------------------
    (r"(embed_tokens|wte)", "vocab, own"),
    (rf"({'|'.join(_HEAD)})", "vocab, res"),
    (r"([A-Za-z_]*norm[A-Za-z_]*\d*|norm_[12f]|ln_pre|ln|ln_f|layernorm_(before|after))", "own"),
)
RULES = tuple((re.compile(rf"(?:.*\.)?{pattern}"), axes) for pattern, axes in _RULES)


def find_rule(name: str, kind: str) -> str | None:
    """Return the axes of a parameter (its name without `.weight` and `.bias`) in a module of class `kind`, or None."""
    return next(
        (axes for pattern, axes in RULES if pattern.fullmatch(name) or pattern.fullmatch(f"{name}:{kind}")), None
    )
