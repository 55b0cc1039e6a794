"""Small checkpoints of families that take images, one function for each: dimensions, special tokens, processor files.

The first of them are in :mod:`octavo.models.tiny.configs`, shared parts in :mod:`octavo.models.tiny.parts`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

from transformers import (
    Ernie4_5_VLMoeConfig,
    Gemma3Config,
    Glm4vConfig,
    Glm4vMoeConfig,
    Glm46VConfig,
    GlmOcrConfig,
    LlavaConfig,
    LlavaOnevisionConfig,
    Mistral3Config,
    PreTrainedConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    SmolVLMConfig,
)

from octavo.models.custom.composed import OctavoLlavaConfig, OctavoVlmConfig
from octavo.models.custom.nvila import NvilaConfig, NvilaLiteConfig
from octavo.models.custom.nvila.templates import TEMPLATES
from octavo.models.tiny import special_tokens
from octavo.models.tiny.parts import (
    AREAS,
    PAIRS,
    PATCH,
    PATCHES,
    QWEN3_FILES,
    Checkpoints,
    Ids,
    decoder_fields,
    image_file,
    moe_decoder_fields,
    processor_files,
    qwen_vision_fields,
    rope_fields,
    vision_ids,
)
from octavo.models.tiny.special_tokens import CHATML_TOKENS, SpecialTokens, chatml_template, role_template

CHECKPOINTS = Checkpoints()

TILE = 16
"""Pixels of a tile, in each direction, in families that cut images into tiles: 4 x 4 patches."""
TILES = [[TILE, TILE], [TILE, 2 * TILE], [2 * TILE, TILE], [2 * TILE, 2 * TILE]]
TOKENS = (TILE // PATCH // 2) ** 2
"""Tokens of a tile in families that merge 2 x 2 patches."""
_SQUARE = {"height": TILE, "width": TILE}


def _depth(size: str) -> int:
    return 3 if size == "small" else 2


def _tower(size: str, **fields: object) -> dict[str, Any]:
    """Return the fields of a vision transformer for tiles of one size, or for whole images."""
    return {
        "hidden_size": 64,
        "intermediate_size": 256 if size == "small" else 128,
        "num_hidden_layers": _depth(size),
        "num_attention_heads": 4,
        "image_size": TILE,
        "patch_size": PATCH,
        **fields,
    }


def _siglip(size: str) -> dict[str, Any]:
    return _tower(size, model_type="siglip_vision_model", vision_use_head=False)


_MISTRAL3 = SpecialTokens(
    ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]", "[IMG_BREAK]",
     "[IMG_END]", "<pad>"),
    "{{ bos_token }}" + role_template(
        system="[SYSTEM_PROMPT]TEXT[/SYSTEM_PROMPT]", user="[INST]TEXT[/INST]", assistant="TEXT</s>", image="[IMG]"
    ),
    eos="</s>", pad="<pad>", bos="<s>",
)  # fmt: skip
_MISTRAL3_FILES = processor_files(
    "PixtralProcessor",
    "PixtralImageProcessor",
    {"size": {"longest_edge": 8 * TILE}, "patch_size": PATCH},
    patch_size=PATCH,
    spatial_merge_size=2,
)


@CHECKPOINTS.add(_MISTRAL3, _MISTRAL3_FILES)
def mistral3(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    decoder = decoder_fields(size, vocab, model_type="mistral", head_dim=32, sliding_window=None)
    return Mistral3Config(
        text_config=decoder,
        vision_config=_tower(size, model_type="pixtral", image_size=8 * TILE, initializer_range=0.06),
        image_token_index=ids["[IMG]"],
        spatial_merge_size=2,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )


_LLAVA_TURNS = role_template(system="TEXT ", user="USER: TEXT ", assistant="ASSISTANT: TEXT</s>", image="<image>\n")
_LLAVA = SpecialTokens(
    ("<unk>", "<s>", "</s>", "<image>", "<pad>"),
    "{{ bos_token }}" + _LLAVA_TURNS + "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}",
    eos="</s>",
    pad="<pad>",
    bos="<s>",
    names={"image_token": "<image>"},
)
_LLAVA_FILES = processor_files(
    "LlavaProcessor",
    "CLIPImageProcessor",
    {"size": {"shortest_edge": TILE}, "crop_size": _SQUARE},
    patch_size=PATCH,
    vision_feature_select_strategy="default",
    num_additional_image_tokens=1,
)


@CHECKPOINTS.add(_LLAVA, _LLAVA_FILES)
def llava(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    """As in LLaVA-1.5: CLIP's features before its last layer, without the class token. That layer gets no gradient."""
    return LlavaConfig(
        text_config=decoder_fields(size, vocab, model_type="llama", head_dim=32),
        vision_config={**_tower(size, model_type="clip_vision_model"), "num_hidden_layers": _depth(size) + 1},
        image_token_index=ids["<image>"],
        image_seq_length=(TILE // PATCH) ** 2,
        tie_word_embeddings=False,
    )


_LLAVA_ONEVISION = SpecialTokens(
    (*CHATML_TOKENS, "<image>", "<video>"),
    chatml_template("<image>\n"),
    eos="<|im_end|>",
    pad="<|endoftext|>",
    names={"image_token": "<image>", "video_token": "<video>"},
)
_LLAVA_ONEVISION_FILES = processor_files(
    "LlavaOnevisionProcessor",
    "LlavaOnevisionImageProcessor",
    {"size": _SQUARE, "image_grid_pinpoints": TILES},
    "LlavaOnevisionVideoProcessor",
    num_image_tokens=4 * TOKENS,
    vision_feature_select_strategy="full",
    vision_aspect_ratio="anyres_max_9",
)


@CHECKPOINTS.add(_LLAVA_ONEVISION, _LLAVA_ONEVISION_FILES)
def llava_onevision(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    return LlavaOnevisionConfig(
        text_config=decoder_fields(size, vocab, model_type="qwen2"),
        vision_config=_siglip(size),
        image_token_index=ids["<image>"],
        video_token_index=ids["<video>"],
        image_grid_pinpoints=TILES,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )


_CELLS = tuple(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5))
_SMOLVLM = SpecialTokens(
    ("<|im_start|>", "<|im_end|>", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
     *_CELLS),
    "<|im_start|>" + role_template(
        system="System: TEXT<end_of_utterance>\n", user="User: TEXT<end_of_utterance>\n",
        assistant="Assistant:TEXT<end_of_utterance>\n", image="<image>",
    ) + "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
    eos="<end_of_utterance>", pad="<|im_end|>", bos="<|im_start|>",
    names={
        "image_token": "<image>", "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>", "end_of_utterance_token": "<end_of_utterance>",
    },
)  # fmt: skip
_SMOLVLM_FILES = processor_files(
    "SmolVLMProcessor",
    "SmolVLMImageProcessor",
    {"size": {"longest_edge": 2 * TILE}, "max_image_size": {"longest_edge": TILE}, "do_image_splitting": True},
    "SmolVLMVideoProcessor",
    image_seq_len=TOKENS,
)


@CHECKPOINTS.add(_SMOLVLM, _SMOLVLM_FILES)
def smolvlm(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    decoder = decoder_fields(size, vocab, model_type="llama", head_dim=32)
    decoder["pad_token_id"] = ids["<|im_end|>"]
    return SmolVLMConfig(
        text_config=decoder,
        vision_config=_tower(size, initializer_range=0.06),
        image_token_id=ids["<image>"],
        scale_factor=2,
        tie_word_embeddings=False,
    )


_GEMMA3 = SpecialTokens(
    ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>",
     "<image_soft_token>"),
    "{{ bos_token }}" + role_template(
        system="<start_of_turn>user\nTEXT<end_of_turn>\n", user="<start_of_turn>user\nTEXT<end_of_turn>\n",
        assistant="<start_of_turn>model\nTEXT<end_of_turn>\n", image="<start_of_image>",
    ) + "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
    eos="<end_of_turn>", pad="<pad>", bos="<bos>",
    names={
        "image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
    },
)  # fmt: skip
_GEMMA3_FILES = processor_files(
    "Gemma3Processor", "Gemma3ImageProcessor", {"size": _SQUARE, "do_pan_and_scan": False}, image_seq_length=TOKENS
)


@CHECKPOINTS.add(_GEMMA3, _GEMMA3_FILES)
def gemma3(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    """Two layers of three have a sliding window of 32 tokens."""
    decoder = decoder_fields(size, vocab, head_dim=32, query_pre_attn_scalar=32, sliding_window=32)
    depth = decoder["num_hidden_layers"]
    decoder["layer_types"] = ["full_attention" if n % 3 == 1 else "sliding_attention" for n in range(depth)]
    return Gemma3Config(
        text_config=decoder,
        vision_config=_siglip(size),
        mm_tokens_per_image=TOKENS,
        boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"],
        image_token_index=ids["<image_soft_token>"],
    )


_GLM4V = SpecialTokens(
    ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|begin_of_image|>",
     "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>", "<|image|>", "<|video|>"),
    "[gMASK]<sop>" + role_template(
        system="<|system|>\nTEXT", user="<|user|>\nTEXT", assistant="<|assistant|>\nTEXT<|endoftext|>",
        image="<|begin_of_image|><|image|><|end_of_image|>",
    ) + "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
    eos="<|endoftext|>", pad="<|endoftext|>",
    names={"image_token": "<|image|>", "video_token": "<|video|>"},
)  # fmt: skip
_GLM_IMAGES = {  # GLM counts the area of both frames of a pair
    **PAIRS,
    "size": {name: 2 * area for name, area in AREAS.items()},
}
_GLM4V_FILES = processor_files("Glm4vProcessor", "Glm4vImageProcessor", _GLM_IMAGES, "Glm4vVideoProcessor")
_GLM46V_FILES = processor_files("Glm46VProcessor", "Glm46VImageProcessor", _GLM_IMAGES, "Glm46VVideoProcessor")


def _glm_parts(size: str, decoder: dict[str, Any], ids: Ids, part: float = 0.5) -> dict[str, Any]:
    """Return the fields of a GLM. `part`: the fraction of each head with a rotary embedding."""
    head = decoder["hidden_size"] // decoder["num_attention_heads"]
    decoder["rope_parameters"] = rope_fields(int(part * head), partial_rotary_factor=part)
    tower = {"depth": _depth(size), "intermediate_size": 128, "image_size": TILE}
    return {
        "text_config": decoder,
        "vision_config": qwen_vision_fields(decoder["hidden_size"], **tower),
        **_media_ids(ids, image="<|image|>", video="<|video|>"),
        **_mark_ids(ids, "<|begin_of_{}|>", "<|end_of_{}|>"),
    }


@CHECKPOINTS.add(_GLM4V, _GLM4V_FILES)
def glm4v(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    return Glm4vConfig(**_glm_parts(size, decoder_fields(size, vocab), ids))


@CHECKPOINTS.add(_GLM4V, _GLM46V_FILES)
def glm46v(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    return Glm46VConfig(**_glm_parts(size, decoder_fields(size, vocab), ids))


@CHECKPOINTS.add(_GLM4V, _GLM46V_FILES)
def glm_ocr(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    return GlmOcrConfig(**_glm_parts(size, decoder_fields(size, vocab), ids, part=1.0))


@CHECKPOINTS.add(_GLM4V, _GLM4V_FILES)
def glm4v_moe(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    """A dense layer, then a layer with eight routed experts and a shared one."""
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 64}
    decoder = {**decoder_fields(size, vocab, **experts, first_k_dense_replace=1), "num_hidden_layers": 2}
    return Glm4vMoeConfig(**_glm_parts(size, decoder, ids))


_QWEN2_FILES = processor_files("Qwen2VLProcessor", "Qwen2VLImageProcessor", PAIRS, "Qwen2VLVideoProcessor")


@CHECKPOINTS.add(special_tokens.QWEN_VL, _QWEN2_FILES)
def qwen2_vl(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    """In its tower's configuration `embed_dim` is the tower's width, and `hidden_size` is the decoder's."""
    decoder = decoder_fields(size, vocab)
    decoder["rope_parameters"] = rope_fields(decoder["hidden_size"] // decoder["num_attention_heads"])
    tower = qwen_vision_fields(decoder["hidden_size"], depth=_depth(size), embed_dim=64, mlp_ratio=2)
    tower["hidden_size"] = tower.pop("out_hidden_size")
    return Qwen2VLConfig(text_config=decoder, vision_config=tower, tie_word_embeddings=True, **vision_ids(ids))


_COMPOSED_FILES = processor_files("Qwen2VLProcessor", "Qwen2VLImageProcessor", PAIRS)


@CHECKPOINTS.add(_LLAVA, _COMPOSED_FILES)
def octavo_vlm(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    """Qwen2.5-VL's tower and a Llama, as LoongForge composes them."""
    decoder = decoder_fields(size, vocab, model_type="llama", head_dim=32)
    tower = qwen_vision_fields(decoder["hidden_size"], depth=_depth(size), intermediate_size=96)
    tower |= {"model_type": "qwen2_5_vl_vision", "window_size": 16, "fullatt_block_indexes": [1]}
    return OctavoVlmConfig(text_config=decoder, vision_config=tower, image_token_id=ids["<image>"])


_COMPOSED_TILE_FILES = processor_files(
    "LlavaProcessor",
    "SiglipImageProcessor",
    {"size": _SQUARE},
    patch_size=2 * PATCH,
    vision_feature_select_strategy="full",
    num_additional_image_tokens=0,
)


@CHECKPOINTS.add(_LLAVA, _COMPOSED_TILE_FILES)
def octavo_llava(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    """DINOv3 with registers, InternVL's pixel shuffle and a Llama. The last layer of the tower gets no gradient, and
    neither does its token of masked patches."""
    tower = _tower(size, model_type="dinov3_vit", num_register_tokens=2, pos_embed_rescale=None)
    return OctavoLlavaConfig(
        text_config=decoder_fields(size, vocab, model_type="llama", head_dim=32),
        vision_config={**tower, "num_hidden_layers": _depth(size) + 1},
        image_token_id=ids["<image>"],
        projector="pixel_shuffle_mlp2",
    )


def _qwen3_5_parts(size: str, decoder: dict[str, Any], ids: Ids) -> dict[str, Any]:
    """Return the fields of a Qwen3.5 model, in which every layer except the last is recurrent (Gated DeltaNet)."""
    depth = decoder["num_hidden_layers"]
    linear = {"key_head_dim": 32, "value_head_dim": 32, "num_key_heads": 2, "num_value_heads": 4}
    decoder |= {f"linear_{name}": value for name, value in linear.items()}
    decoder["layer_types"] = ["linear_attention"] * (depth - 1) + ["full_attention"]
    decoder["rope_parameters"] = {**rope_fields(16, partial_rotary_factor=0.5), "mrope_interleaved": True}
    tower = {"depth": _depth(size), "intermediate_size": 128, "num_position_embeddings": 64}
    return {
        "text_config": decoder,
        "vision_config": qwen_vision_fields(decoder["hidden_size"], **tower),
        "tie_word_embeddings": False,
        **vision_ids(ids),
    }


@CHECKPOINTS.add(special_tokens.QWEN_VL, QWEN3_FILES)
def qwen3_5(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    return Qwen3_5Config(**_qwen3_5_parts(size, decoder_fields(size, vocab, head_dim=32), ids))


@CHECKPOINTS.add(special_tokens.QWEN_VL, QWEN3_FILES)
def qwen3_5_moe(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    return Qwen3_5MoeConfig(
        **_qwen3_5_parts(size, moe_decoder_fields(size, vocab, shared_expert_intermediate_size=64), ids)
    )


_ERNIE4_5_VL = SpecialTokens(
    ("<unk>", "<|begin_of_sentence|>", "<|end_of_sentence|>", "<|IMAGE_START|>", "<|IMAGE_END|>",
     "<|IMAGE_PLACEHOLDER|>", "<|VIDEO_START|>", "<|VIDEO_END|>", "<|VIDEO_PLACEHOLDER|>"),
    "{{ bos_token }}" + role_template(
        system="TEXT\n", user="User: TEXT\n", assistant="Assistant:TEXT<|end_of_sentence|>",
        image="<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
    ) + "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
    eos="<|end_of_sentence|>", pad="<unk>", bos="<|begin_of_sentence|>",
    names={
        f"{kind}_{name}": f"<|{kind.upper()}_{mark}|>"
        for kind in ("image", "video")
        for name, mark in (("token", "PLACEHOLDER"), ("start_token", "START"), ("end_token", "END"))
    },
)  # fmt: skip
_ERNIE4_5_VL_FILES = processor_files(
    "Ernie4_5_VLMoeProcessor",
    "Ernie4_5_VLMoeImageProcessor",
    {**PATCHES, "temporal_patch_size": 1},
    "Ernie4_5_VLMoeVideoProcessor",
    {"temporal_patch_size": 2, "draw_on_frames": False},  # pairs of frames; drawing times on them needs a font
)


@CHECKPOINTS.add(_ERNIE4_5_VL, _ERNIE4_5_VL_FILES)
def ernie4_5_vl_moe(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    """A dense layer, then a layer with separate experts for tokens of text and of images."""
    decoder = decoder_fields(size, vocab, num_hidden_layers=2)
    half = decoder["hidden_size"] // decoder["num_attention_heads"] // 2
    decoder |= {
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_intermediate_size": [64, 32],
        "mlp_layer_types": ["dense", "sparse"],
        # height, width, time, in the published proportions up to rounding
        "rope_parameters": rope_fields(2 * half, mrope_section=[half * 3 // 8, half * 3 // 8, half // 4]),
    }
    tower = qwen_vision_fields(decoder["hidden_size"], depth=_depth(size), intermediate_size=128)
    for name in ("out_hidden_size", "temporal_patch_size"):
        del tower[name]
    return Ernie4_5_VLMoeConfig(
        text_config=decoder,
        vision_config=tower,
        tie_word_embeddings=True,
        **_media_ids(ids, image="<|IMAGE_PLACEHOLDER|>", video="<|VIDEO_PLACEHOLDER|>"),
        **_mark_ids(ids, "<|{}_START|>", "<|{}_END|>", str.upper),
    )


class _MediaIds(TypedDict):
    image_token_id: int
    video_token_id: int


class _MarkIds(TypedDict):
    image_start_token_id: int
    image_end_token_id: int
    video_start_token_id: int
    video_end_token_id: int


def _media_ids(ids: Ids, image: str, video: str) -> _MediaIds:
    return {"image_token_id": ids[image], "video_token_id": ids[video]}


def _mark_ids(ids: Ids, start: str, end: str, case: Callable[[str], str] = str) -> _MarkIds:
    """Return the ids of the tokens around images and videos, by the names of configuration fields."""
    image, video = case("image"), case("video")
    return {
        "image_start_token_id": ids[start.format(image)],
        "image_end_token_id": ids[end.format(image)],
        "video_start_token_id": ids[start.format(video)],
        "video_end_token_id": ids[end.format(video)],
    }


_NVILA = SpecialTokens(
    (*CHATML_TOKENS, "[BOS]", "[PAD]", "<vila/sentinel>", "<image>", "<vila/video>"),
    TEMPLATES["qwen2"],
    eos="<|im_end|>",
    pad="[PAD]",
)
# as published: only the tower's processor
_NVILA_FILES = image_file(image_processor_type="SiglipImageProcessor", size=_SQUARE, rescale_factor=1 / 255, resample=3)


def _nvila(size: str, ids: Ids, **fields: object) -> dict[str, Any]:
    """Return the fields of an NVILA model. As in the published model, the embedding table ends before the tokens of
    media and the width of the tower's MLP is ragged. The last layer of the tower never runs."""
    ragged = 272 if size == "small" else 144  # 16 * 17, 16 * 9
    return {
        "text_config": decoder_fields(size, ids["<vila/sentinel>"], model_type="qwen2", tie_word_embeddings=False),
        "vision_config": {**_siglip(size), "num_hidden_layers": _depth(size) + 1, "intermediate_size": ragged},
        "image_token_id": ids["<image>"],
        "video_token_id": ids["<vila/video>"],
        "newline_token_id": ids["Ċ"],
        **fields,
    }


@CHECKPOINTS.add(_NVILA, _NVILA_FILES)
def nvila(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    """Two scales: a tile, and from 2 x 2 to 6 tiles."""
    return NvilaConfig(**_nvila(size, ids, s2_scales=[TILE, 2 * TILE], max_tiles=6))


@CHECKPOINTS.add(_NVILA, _NVILA_FILES)
def nvila_lite(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    """A tile of 4 x 4 patches, padded to 6 x 6, becomes 4 tokens of 3 x 3 patches."""
    return NvilaLiteConfig(**_nvila(size, ids, max_tiles=4))
