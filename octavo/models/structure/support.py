"""Which families of images train here, and why others are described and planned alone: one table.

A description (:mod:`octavo.models.structure.families`) says what a model is made of, which suffices to plan and to
measure it. To train it, the data side must make what its forward takes: its image processor wrapped
(:mod:`octavo.models.processors.image`), its inputs joined to batches, its masks and positions known to the collation. A
family that was taught all that is entered in :data:`TRAINED`; what keeps another from it, and no signature shows, in
:data:`WAITS`.
"""

from __future__ import annotations

import inspect

from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PreTrainedConfig

from octavo.models.structure.skeleton import is_audio_config, is_vision_config

TRAINED = (
    *("qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "internvl", "qwen3_5", "qwen3_5_moe"),
    *("mistral3", "llava_onevision", "smolvlm", "gemma3", "ernie4_5_vl_moe", "llavaonevision1_5"),
    *("glm4v", "glm46v", "glm4v_moe", "glm_ocr", "nvila", "nvila_lite", "qwen2_vl"),
)
"""`model_type` of the families whose images become batches here, and that train."""

TRAINED_WITH_SOUND = ("qwen2_audio",)
"""The same of families of sound."""

TWO_WAYS = ("gemma3",)
"""Those of :data:`TRAINED` whose images attend to themselves both ways: in rows of one sample alone, not in packs."""
WAITS = {"paligemma": "its prompt attends both ways, images and words, and no family that trains here asks for that"}
"""`model_type` -> why it is not trained, as the end of a sentence, where the inputs of its forward do not say it."""

_MADE = {
    *("input_ids", "labels", "attention_mask", "position_ids", "inputs_embeds", "mm_token_type_ids"),
    *("pixel_values", "image_grid_thw", "image_sizes", "batch_num_images", "pixel_attention_mask", "token_type_ids"),
    *("moe_mm_token_type_ids", "past_key_values", "cache", "cache_position", "rope_deltas", "per_layer_inputs"),
    *("use_cache", "logits_to_keep", "return_dict", "mm_encoder_outputs", "interpolate_pos_encoding"),
    *("vision_feature_layer", "vision_feature_select_strategy", "vision_aspect_ratio", "downsample_mode"),
    *("second_per_grid_ts", "router_labels", "self", "kwargs"),
}
"""What batches of some family have, and what a forward takes besides that is no input."""
_SOUND = ("audio", "input_features", "feature_attention", "input_values", "chunk_sample")


def why_not_trained(config: PreTrainedConfig) -> str | None:
    """Why a model of this configuration is planned and not trained here, as the end of a sentence; None where it
    trains, as every text-only decoder does."""
    kind = config.model_type
    if kind in (*TRAINED, *TRAINED_WITH_SOUND):
        return None
    if not is_vision_config(config):
        return "how sound comes to its tower is not known to Octavo" if is_audio_config(config) else None
    if kind in WAITS:
        return WAITS[kind]
    taken = inspect.signature(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)].forward).parameters
    more = [
        name
        for name in taken
        if name not in _MADE and not name.startswith(("output_", *_SOUND)) and "video" not in name
    ]
    if more:
        return f"its forward takes {', '.join(more[:3])}, which no family that trains here has"
    if sound := next((name for name in taken if name.startswith(_SOUND)), None):
        return f"it takes sounds ({sound}), and how they come to its tower is not known to Octavo"
    return "its image processor and the cuts of its images are not known to Octavo"
