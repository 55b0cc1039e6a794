"""Small checkpoints of real architectures, one function for each family: text-only families and the first ones that
take images. The others are in :mod:`octavo.models.tiny.vision`, shared parts in :mod:`octavo.models.tiny.parts`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from transformers import (
    InternVLConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from octavo.models.custom.mpt import MPTConfig
from octavo.models.custom.onevision import LLaVAOneVision1_5_Config
from octavo.models.tiny import audio as audio_families
from octavo.models.tiny import special_tokens
from octavo.models.tiny import vision as vision_families
from octavo.models.tiny.parts import (
    PAIRS,
    PATCH,
    PATCHES,
    QWEN3_FILES,
    Checkpoints,
    Ids,
    decoder_fields,
    moe_decoder_fields,
    processor_files,
    qwen_vision_fields,
    rope_fields,
    vision_ids,
)
from octavo.models.tiny.special_tokens import CHATML_TOKENS, SpecialTokens, chatml_template

_CHECKPOINTS = Checkpoints()


def _qwen3_parts(size: str, decoder: dict[str, Any], tied: bool, ids: Ids) -> dict[str, Any]:
    """Return the fields of a Qwen3-VL configuration, dense or MoE."""
    depth, mlp, deepstack = (4, 256, [1, 2]) if size == "small" else (2, 128, [0])
    tower = {"num_position_embeddings": 64, "deepstack_visual_indexes": deepstack}
    return {
        "text_config": {**decoder, "rope_parameters": {**rope_fields(32), "mrope_interleaved": True}},
        "vision_config": qwen_vision_fields(decoder["hidden_size"], depth=depth, intermediate_size=mlp, **tower),
        "tie_word_embeddings": tied,
        **vision_ids(ids),
    }


@_CHECKPOINTS.add(special_tokens.QWEN_VL, QWEN3_FILES)
def qwen3_vl(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    return Qwen3VLConfig(**_qwen3_parts(size, decoder_fields(size, vocab, head_dim=32), True, ids))


@_CHECKPOINTS.add(special_tokens.QWEN_VL, QWEN3_FILES)
def qwen3_vl_moe(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    decoder = {**moe_decoder_fields(size, vocab), "tie_word_embeddings": False}
    return Qwen3VLMoeConfig(**_qwen3_parts(size, decoder, False, ids))


@_CHECKPOINTS.add(
    special_tokens.QWEN_VL,
    processor_files("Qwen2_5_VLProcessor", "Qwen2VLImageProcessor", PAIRS, "Qwen2VLVideoProcessor"),
)
def qwen2_5_vl(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    decoder = decoder_fields(size, vocab)
    decoder["rope_parameters"] = rope_fields(decoder["hidden_size"] // decoder["num_attention_heads"])
    decoder["bos_token_id"], decoder["eos_token_id"] = ids["<|endoftext|>"], ids["<|im_end|>"]
    tower = {"depth": 3 if size == "small" else 2, "window_size": 16, "fullatt_block_indexes": [1]}
    vision = qwen_vision_fields(decoder["hidden_size"], intermediate_size=172, **tower)  # ragged, as the published 3420
    return Qwen2_5_VLConfig(text_config=decoder, vision_config=vision, tie_word_embeddings=True, **vision_ids(ids))


INTERNVL_IMAGE = 16  # pixels of a tile: 4x4 patches, pixel shuffle to 4 tokens
_INTERNVL = SpecialTokens(
    (*CHATML_TOKENS, "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
    chatml_template("<IMG_CONTEXT>", "<video>\\n"),
    eos="<|im_end|>",
    pad="<|endoftext|>",
    names={
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
)
_INTERNVL_FILES = processor_files(
    "InternVLProcessor",
    "GotOcr2ImageProcessor",
    {
        "size": {"height": INTERNVL_IMAGE, "width": INTERNVL_IMAGE},
        "crop_to_patches": True,
        "min_patches": 1,
        "max_patches": 4,
    },
    "InternVLVideoProcessor",
    image_seq_length=4,
)


@_CHECKPOINTS.add(_INTERNVL, _INTERNVL_FILES)
def internvl(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    decoder = decoder_fields(size, vocab, model_type="qwen3", head_dim=32, tie_word_embeddings=True)
    vision = {
        "hidden_size": 64,
        "num_hidden_layers": 3 if size == "small" else 2,
        "num_attention_heads": 4,
        "attention_bias": True,
        "intermediate_size": 256 if size == "small" else 128,
        "image_size": [INTERNVL_IMAGE, INTERNVL_IMAGE],
        "patch_size": [PATCH, PATCH],
        "initializer_range": 0.06,
    }
    return InternVLConfig(
        text_config=decoder,
        vision_config=vision,
        image_token_id=ids["<IMG_CONTEXT>"],
        image_seq_length=4,
        downsample_ratio=0.5,
        tie_word_embeddings=True,
    )


@_CHECKPOINTS.add(
    special_tokens.QWEN_VL,
    processor_files(
        "Qwen2_5_VLProcessor",
        "Qwen2VLImageProcessor",
        {**PATCHES, "temporal_patch_size": 1},
        "Qwen2VLVideoProcessor",
    ),
)
def llavaonevision1_5(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    decoder = decoder_fields(size, vocab, head_dim=32)
    depth, mlp = (4, 256) if size == "small" else (2, 128)
    vision = qwen_vision_fields(decoder["hidden_size"], depth=depth, intermediate_size=mlp, embed_dim=64)
    vision |= {"text_hidden_size": vision.pop("out_hidden_size"), "temporal_patch_size": 1}
    return LLaVAOneVision1_5_Config(text_config=decoder, vision_config=vision, **vision_ids(ids))


@_CHECKPOINTS.add(special_tokens.QWEN)
def qwen3(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    return Qwen3Config(**decoder_fields(size, vocab, head_dim=32, tie_word_embeddings=True))


@_CHECKPOINTS.add(special_tokens.QWEN)
def qwen3_moe(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    return Qwen3MoeConfig(**moe_decoder_fields(size, vocab), tie_word_embeddings=True)


# Llama 2: the system text goes inside the first user turn; an answer ends with </s>.
_LLAMA_TEMPLATE = (
    "{% set state = namespace(system='') %}{% for message in messages %}"
    "{% if message['content'] is string %}{% set text = message['content'] %}"
    "{% else %}{% set text = message['content'] | map(attribute='text') | join('') %}{% endif %}"
    "{% if message['role'] == 'system' %}{% set state.system = '<<SYS>>\n' + text + '\n<</SYS>>\n\n' %}"
    "{% elif message['role'] == 'user' %}{{ bos_token + '[INST] ' + state.system + text + ' [/INST]' }}"
    "{% set state.system = '' %}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + text + eos_token }}"
    "{% else %}{{ raise_exception('unknown role ' + message['role']) }}{% endif %}{% endfor %}"
)
_LLAMA = SpecialTokens(("<unk>", "<s>", "</s>"), _LLAMA_TEMPLATE, eos="</s>", pad="<unk>", bos="<s>")


@_CHECKPOINTS.add(_LLAMA)
def llama(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    decoder = decoder_fields(size, vocab, bos_token_id=ids["<s>"], eos_token_id=ids["</s>"], tie_word_embeddings=False)
    return LlamaConfig(**decoder)


@_CHECKPOINTS.add(special_tokens.QWEN)
def mpt(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    """Like LLM-Foundry's mpt-1b: learned positions, biases, and its initialization."""
    return MPTConfig(
        d_model=128 if size == "small" else 64,
        n_heads=4,
        n_layers=4 if size == "small" else 2,
        max_seq_len=1024,
        vocab_size=vocab,
    )


CHECKPOINTS = Checkpoints(_CHECKPOINTS | audio_families.CHECKPOINTS | vision_families.CHECKPOINTS)
"""The small checkpoints of all families."""


def tiny_config(family: str, size: str = "mini", vocab: int = 512) -> PreTrainedConfig:
    """Return the configuration of a family without a tokenizer, for benchmarks: special tokens get the last ids of the
    vocabulary."""
    ids: dict[str, int] = defaultdict(lambda: vocab - 1 - len(ids))
    return CHECKPOINTS[family].config(size, vocab, ids)
