"""Determines why a family is only described and planned, and cannot be trained.

:mod:`octavo.base.model_families` lists the families that train. The reason why another family does not train comes from
the arguments of its forward or, if these do not show it, from its record.
"""

from __future__ import annotations

import inspect

from transformers import PreTrainedConfig

from octavo.base.model_families import RECORDS
from octavo.models.structure.skeleton import image_text_class, is_audio_config, is_vision_config

_KNOWN_INPUTS = {
    *("input_ids", "labels", "attention_mask", "position_ids", "inputs_embeds", "mm_token_type_ids"),
    *("pixel_values", "image_grid_thw", "image_sizes", "batch_num_images", "pixel_attention_mask", "token_type_ids"),
    *("moe_mm_token_type_ids", "past_key_values", "cache", "cache_position", "rope_deltas", "per_layer_inputs"),
    *("use_cache", "logits_to_keep", "return_dict", "mm_encoder_outputs", "interpolate_pos_encoding"),
    *("vision_feature_layer", "vision_feature_select_strategy", "vision_aspect_ratio", "downsample_mode"),
    *("second_per_grid_ts", "router_labels", "self", "kwargs"),
}
"""Arguments in batches of at least one trained family, and arguments of a forward that are not inputs."""
_SOUND = ("audio", "input_features", "feature_attention", "input_values", "chunk_sample")


def why_not_trained(config: PreTrainedConfig) -> str | None:
    """Return why a model of this configuration can be planned but not trained, as the end of a sentence, or None if it
    can be trained. All text-only decoders can be trained."""
    record = RECORDS.get(config.model_type)
    if record is not None:
        return record.why_not or None
    if not is_vision_config(config):
        return "Octavo does not know how sound enters its tower" if is_audio_config(config) else None
    arguments = inspect.signature(image_text_class(type(config)).forward).parameters
    unknown = [
        name
        for name in arguments
        if name not in _KNOWN_INPUTS and not name.startswith(("output_", *_SOUND)) and "video" not in name
    ]
    if unknown:
        return f"its forward takes {', '.join(unknown[:3])}, which no family that trains here has"
    if sound := next((name for name in arguments if name.startswith(_SOUND)), None):
        return f"it takes sounds ({sound}), and Octavo does not know how they enter its tower"
    return "Octavo knows neither its image processor nor how its images are cut"
