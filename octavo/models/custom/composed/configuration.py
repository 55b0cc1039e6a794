"""config.json of a composed model: transformers' configurations of its image encoder and of its decoder, and the token
of images. The layout is Octavo's own: `model_type: octavo_vlm` for image encoders that take images of any size,
`octavo_llava` for those that take images of one size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, Self, cast

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, DINOv3ViTConfig, LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from octavo.base.model_families import leading_tokens

IMAGE_TOKEN = "<image>"
"""The token that features of an image replace, in all composed models."""


class Tower(NamedTuple):
    """The classes of an image encoder, and the field with the width of its merger's output."""

    config: type[PreTrainedConfig]
    model: type[PreTrainedModel]
    width: str


TOWERS: Mapping[str, Tower] = {
    tower.config.model_type: tower
    for tower in (
        Tower(Qwen2VLVisionConfig, Qwen2VisionTransformerPretrainedModel, "hidden_size"),
        Tower(Qwen2_5_VLVisionConfig, Qwen2_5_VisionTransformerPretrainedModel, "out_hidden_size"),
        Tower(Qwen3VLVisionConfig, Qwen3VLVisionModel, "out_hidden_size"),
    )
}
"""`model_type` of an image encoder -> its classes. Its merger (a norm, 2 x 2 patches to one, two linear layers) is the
projector."""


class ProjectorKind(NamedTuple):
    """A projector of two linear layers with GELU between them.

    merge   neighbouring features that become one, in each direction
    norm    a LayerNorm of each feature ("each") or of the merged ones ("merged")
    widens  the layer between has the width of the merged features, not the decoder's
    eps     of the norm
    """

    merge: int = 1
    norm: Literal["", "each", "merged"] = ""
    widens: bool = False
    eps: float = 1e-6


PROJECTORS: Mapping[str, ProjectorKind] = {
    "mlp2": ProjectorKind(),
    "norm_mlp2": ProjectorKind(norm="each"),
    "merge_mlp2": ProjectorKind(2, "each", widens=True),
    "pixel_shuffle_mlp2": ProjectorKind(2, "merged", eps=1e-5),
}
"""Projectors by name: LLaVA-1.5's; the same after a LayerNorm; Qwen2-VL's merger; InternVL's."""


class ComposedConfig(PreTrainedConfig):
    """What both layouts have in common."""

    sub_configs = {"text_config": AutoConfig, "vision_config": AutoConfig}
    has_no_defaults_at_init = True  # its parts have none, so transformers compares a saved file with nothing

    text_config: dict | PreTrainedConfig | None = None
    vision_config: dict | PreTrainedConfig | None = None
    image_token_id: int = 0
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: object) -> None:
        if self.vision_config is None or self.text_config is None:
            raise ValueError("a composed model needs vision_config and text_config")
        if isinstance(self.vision_config, dict):
            self.vision_config = self._read_vision(self.vision_config)
        if isinstance(self.text_config, dict):
            self.text_config = AutoConfig.for_model(**self.text_config)
        super().__post_init__(**kwargs)
        self.tie_word_embeddings = bool(self.text.tie_word_embeddings)

    @classmethod
    def of_default_parts(cls) -> Self:
        """Return a configuration of transformers' default parts, for a survey of families."""
        raise NotImplementedError

    @staticmethod
    def _read_vision(fields: dict) -> PreTrainedConfig:
        """Return the configuration of an image encoder. Raises ValueError for one that the layout does not take."""
        return AutoConfig.for_model(**fields)

    @property
    def text(self) -> PreTrainedConfig:
        """`text_config`, converted to an object by `__post_init__`."""
        return cast(PreTrainedConfig, self.text_config)

    @property
    def vision(self) -> PreTrainedConfig:
        """`vision_config`, converted to an object by `__post_init__`."""
        return cast(PreTrainedConfig, self.vision_config)


@strict
class OctavoVlmConfig(ComposedConfig):
    """Configuration of a model whose image encoder takes images of any size.

    Raises ValueError for an image encoder that is not in :data:`TOWERS`, one whose merger has another width than the
    decoder, and one with features for the decoder's first layers (DeepStack), which decoders of text do not take.
    """

    model_type = "octavo_vlm"

    def __post_init__(self, **kwargs: object) -> None:
        super().__post_init__(**kwargs)
        width, wanted = getattr(self.vision, TOWERS[self.vision.model_type].width), self.text.hidden_size
        if width != wanted:
            raise ValueError(f"vision_config has a merger of width {width}, and the decoder has width {wanted}")
        if getattr(self.vision, "deepstack_visual_indexes", None):
            raise ValueError("vision_config has deepstack_visual_indexes, but the decoder takes no such features")

    @classmethod
    def of_default_parts(cls) -> Self:
        text = LlamaConfig()
        return cls(text_config=text, vision_config=Qwen2_5_VLVisionConfig(out_hidden_size=text.hidden_size))

    @staticmethod
    def _read_vision(fields: dict) -> PreTrainedConfig:
        kind = str(fields.get("model_type"))
        if kind not in TOWERS:
            raise ValueError(f"vision_config has model_type {kind:.80}; expected one of {', '.join(TOWERS)}")
        return TOWERS[kind].config(**{key: value for key, value in fields.items() if key != "model_type"})


@strict
class OctavoLlavaConfig(ComposedConfig):
    """Configuration of a model whose image encoder takes images of one size.

    projector             a name in :data:`PROJECTORS`
    vision_feature_layer  the hidden state of the image encoder that is the feature

    Tokens of the image encoder before the patches (class token, registers) are dropped. Raises ValueError for an
    unknown projector, a grid of patches that it cannot merge, and a layer that the image encoder does not have.
    """

    model_type = "octavo_llava"

    projector: str = "mlp2"
    vision_feature_layer: int = -2

    def __post_init__(self, **kwargs: object) -> None:
        super().__post_init__(**kwargs)
        if self.projector not in PROJECTORS:
            raise ValueError(f"projector is {self.projector!r:.80}; expected one of {', '.join(PROJECTORS)}")
        for name in ("image_size", "patch_size", "num_hidden_layers"):
            if type(value := getattr(self.vision, name, None)) is not int or value < 1:
                raise ValueError(f"vision_config has {name} {value!r:.80}; expected a number above 0")
        layer, layers = self.vision_feature_layer, self.vision.num_hidden_layers
        if type(layer) is not int or layer == 0 or not -layers - 1 <= layer <= layers:
            raise ValueError(f"vision_feature_layer is {layer!r:.80}, and vision_config has {layers} layers")
        if self.side % self.merge:
            raise ValueError(f"projector {self.projector} cannot merge {self.side} x {self.side} patches in pairs")

    @classmethod
    def of_default_parts(cls) -> Self:
        return cls(text_config=LlamaConfig(), vision_config=DINOv3ViTConfig(num_register_tokens=4))

    @property
    def leading_tokens(self) -> int:
        """Tokens of the image encoder before the patches."""
        return leading_tokens(self.vision)

    @property
    def side(self) -> int:
        """Patches of an image in each direction."""
        return cast(int, self.vision.image_size // self.vision.patch_size)

    @property
    def merge(self) -> int:
        """Features of the image encoder that become one, in each direction."""
        return PROJECTORS[self.projector].merge

    @property
    def image_tokens(self) -> int:
        """Tokens of an image."""
        return (self.side // self.merge) ** 2
