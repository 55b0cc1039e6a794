"""Why a family is described and planned only, and does not train here.

Which ones train is in :mod:`octavo.base.model_families`; why another does not is in the inputs of its forward, or,
where these do not say it, in its record.
"""

from __future__ import annotations

import inspect

from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PreTrainedConfig

from octavo.base.model_families import RECORDS
from octavo.models.structure.skeleton import is_audio_config, is_vision_config

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
    record = RECORDS.get(config.model_type)
    if record is not None:
        return record.why_not or None
    if not is_vision_config(config):
        return "how sound comes to its tower is not known to Octavo" if is_audio_config(config) else None
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
