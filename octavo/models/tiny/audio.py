"""Small checkpoints of families that take audio: dimensions, special tokens, processor files."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig, Qwen2AudioConfig

from octavo.models.tiny.parts import Checkpoints, Ids, decoder_fields
from octavo.models.tiny.special_tokens import CHATML_TOKENS, SpecialTokens, chatml_template

CHECKPOINTS = Checkpoints()

SECONDS = 1  # length of the longest sound: 100 frames, 50 positions in the tower, 25 tokens
BINS = 32

_EXTRACTOR: dict[str, Any] = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": BINS,
    "sampling_rate": 16000,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": SECONDS,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
    "processor_class": "Qwen2AudioProcessor",
}
_FILES = {
    "preprocessor_config.json": _EXTRACTOR,
    "processor_config.json": {"processor_class": "Qwen2AudioProcessor"},
}
_TOKENS = SpecialTokens(  # its template takes sounds as others take images
    (*CHATML_TOKENS, "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),
    chatml_template("<|audio_bos|><|AUDIO|><|audio_eos|>\n").replace("image", "audio"),
    eos="<|im_end|>",
    pad="<|endoftext|>",
)


@CHECKPOINTS.add(_TOKENS, _FILES)
def qwen2_audio(size: str, vocab: int, ids: Ids) -> PreTrainedConfig:
    sound = {
        "model_type": "qwen2_audio_encoder",
        "d_model": 64,
        "encoder_layers": 3 if size == "small" else 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 256 if size == "small" else 128,
        "num_mel_bins": BINS,
        "max_source_positions": 50 * SECONDS,
        "initializer_range": 0.06,
    }
    decoder = decoder_fields(size, vocab, model_type="qwen2", tie_word_embeddings=False)
    return Qwen2AudioConfig(audio_config=sound, text_config=decoder, audio_token_index=ids["<|AUDIO|>"])
