"""An image encoder for images of any size, of a composed model: the towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

Its folder has a whole vision-language model, of which only the tower is read, or the tower only. The tower's
merger (a norm, 2 x 2 patches to one, two linear layers) is the projector: it gets the decoder's width and new weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from octavo.models.custom.composed import TOWERS, OctavoVlmConfig, OctavoVlmForConditionalGeneration
from octavo.models.errors import ModelError
from octavo.models.folder.folder import check_sizes, check_weight_files, read_json, wrap_errors
from octavo.models.structure.skeleton import read_config

WHOLE = {**{kind.removesuffix("_vision"): kind for kind in TOWERS}, "qwen3_vl_moe": "qwen3_vl_vision"}
"""`model_type` of a vision-language model -> the `model_type` of its tower."""
MERGER = "merge_mlp2"
"""The projector that Qwen's towers have."""
_PROJECTOR = re.compile(r"(merger|deepstack_merger_list)\.")
_SIZES = {"patch_size": "patch_size", "merge_size": "spatial_merge_size", "temporal_patch_size": "temporal_patch_size"}


@dataclass(frozen=True)
class GridEncoder:
    """An image encoder, read without its weights. `settings`: of its image processor."""

    folder: Path
    config: PreTrainedConfig
    settings: Mapping[str, object]
    is_whole: bool

    tokens = None  # of an image: they depend on its size
    projector = MERGER

    @property
    def why(self) -> str:
        """Why the composed model has its shape, as the end of a sentence."""
        kind = self.config.model_type
        return f"Octavo's shape (model_type octavo_vlm), because {kind} takes images of any size (grid_thw)"

    def build(self, text: PreTrainedConfig, image_token_id: int) -> OctavoVlmForConditionalGeneration:
        """Return the composed model without weights."""
        fields = {**self.config.to_dict(), TOWERS[self.config.model_type].width: text.hidden_size}
        if "deepstack_visual_indexes" in fields:
            fields["deepstack_visual_indexes"] = []  # features for the first layers of Qwen3-VL's own decoder
        config = OctavoVlmConfig(vision_config=fields, text_config=text, image_token_id=image_token_id)
        with torch.device("meta"):
            return OctavoVlmForConditionalGeneration(config)

    def place(self, model: PreTrainedModel, dtype: torch.dtype, seed: int | None) -> None:
        """Give the model's tower the weights of the folder, or with a seed random ones. Raises ModelError."""
        config = cast(OctavoVlmConfig, model.config).vision
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed or 0)
            tower = TOWERS[config.model_type].model._from_config(config).to(dtype)
        if seed is None:
            self._load(tower)
        cast(nn.Module, model.model).visual = tower

    @staticmethod
    def projector_of(model: PreTrainedModel) -> nn.Module:
        """Return the projector of the composed model."""
        return model.get_submodule("model.visual.merger")

    def _load(self, tower: PreTrainedModel) -> None:
        prefix = re.compile(r"(model\.)?visual\." if self.is_whole else "")
        wanted = {name for name in tower.state_dict() if not _PROJECTOR.match(name)}
        values = {}
        with wrap_errors(f"the image encoder of {self.folder} cannot be read"):
            for header in check_weight_files(self.folder):
                with safe_open(self.folder / header.file, framework="pt") as file:
                    for entry in header.entries:
                        if (match := prefix.match(entry.name)) and (name := entry.name[match.end() :]) in wanted:
                            values[name] = file.get_tensor(entry.name)
        shapes = {name: tuple(value.shape) for name, value in tower.state_dict().items()}
        wrong = sorted(name for name in wanted if name not in values or tuple(values[name].shape) != shapes[name])
        if wrong:
            raise ModelError(f"{self.folder}: {wrong[0]} of the image encoder is missing or has another shape")
        tower.load_state_dict(values, strict=False)

    def processor_files(self) -> dict[str, dict[str, object]]:
        """Return the files of the composed model's processor."""
        stated = str(self.settings.get("image_processor_type") or "Qwen2VLImageProcessor")
        name = stated.removesuffix("Pil").removesuffix("Fast")
        common = {"processor_class": "Qwen2VLProcessor"}
        return {
            "preprocessor_config.json": {**self.settings, "image_processor_type": name, **common},
            "processor_config.json": dict(common),
        }


def read_grid_encoder(
    folder: Path, settings: Mapping[str, object], image_size: int | None, problems: list[str]
) -> GridEncoder | None:
    """Read the tower of a folder whose `model_type` is in :data:`WHOLE` or in `TOWERS`. Adds a sentence to `problems`
    for each thing that keeps it from being composed, and returns None if there is any."""
    before, file = len(problems), folder / "config.json"
    raw = read_json(file)
    kind = WHOLE.get(str(raw.get("model_type")), str(raw.get("model_type")))
    is_whole = raw.get("model_type") in WHOLE
    try:
        check_sizes(file)
        with wrap_errors(f"{file} cannot be used"):
            fields = read_config(folder).vision_config.to_dict() if is_whole else raw
            config = TOWERS[kind].config(**{key: value for key, value in fields.items() if key != "model_type"})
    except ModelError as error:
        problems.append(str(error).removesuffix("."))
        return None
    if image_size is not None:
        problems.append(f"--image-size: {kind} takes images of any size; limit them with data.max_pixels")
    for name, of_config in _SIZES.items():
        stated, needed = settings.get(name), getattr(config, of_config)
        if stated is not None and stated != needed:
            problems.append(f"{folder}/preprocessor_config.json has {name} {stated}, but config.json requires {needed}")
    return GridEncoder(folder, config, settings, is_whole) if len(problems) == before else None
