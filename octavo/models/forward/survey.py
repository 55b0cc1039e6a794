"""A survey of all models of images or audio and text in the installed transformers: which are supported, and why not.

A model is built from the default of its configuration class, on the meta device; a released model is described from its
folder. `octavo doctor --families` prints the table, which is also in docs/families.md.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import transformers
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    PreTrainedConfig,
)

from octavo.models.custom.composed import ComposedConfig
from octavo.models.custom.register import is_custom
from octavo.models.errors import ModelError
from octavo.models.folder.folder import silence_transformers, wrap_errors
from octavo.models.forward.packed import why_not_packed
from octavo.models.structure.describe import Family, describe
from octavo.models.structure.skeleton import empty
from octavo.models.structure.structure import Undescribed
from octavo.models.structure.support import why_not_trained

TRAINS, PLANNED, REFUSED, UNBUILT = "trains", "planned only", "refused", "not built"
SUPPORT_LEVELS = (TRAINS, PLANNED, REFUSED, UNBUILT)
COLUMNS = ("model type", "tower", "projector", "decoder", "blocks", "image token", "here")


@dataclass(frozen=True)
class FamilySupport:
    """One family: its support (one of :data:`SUPPORT_LEVELS`), the reason if it is limited, and the names of its parts,
    which are empty if the family is not described. ``image_token``: in the default configuration."""

    model_type: str
    here: str
    why: str = ""
    tower: str = ""
    audio: tuple[str, ...] = ()
    projector: tuple[str, ...] = ()
    decoder: str = ""
    blocks: tuple[str, ...] = ()
    image_token: int | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        """The values of :data:`COLUMNS`."""
        token = "" if self.image_token is None else str(self.image_token)
        towers = ", ".join(filter(None, (self.tower, *self.audio)))
        names = (towers, ", ".join(self.projector), self.decoder, ", ".join(self.blocks))
        return (self.model_type, *names, token, self.here + (f": {self.why}" if self.why else ""))

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def survey() -> Iterator[FamilySupport]:
    """Yield the families sorted by name, including those that Octavo registers with transformers. Takes a few seconds,
    mostly for importing their code."""
    classes = config_classes()
    for model_type in sorted(classes):
        with silence_transformers():
            yield survey_family(classes[model_type])


def config_classes() -> dict[str, type[PreTrainedConfig]]:
    """Return model_type -> configuration class for all families."""
    classes = {config.model_type: config for config in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING}
    return classes | {c.model_type: c for c in MODEL_FOR_MULTIMODAL_LM_MAPPING if "audio_config" in c.sub_configs}


def summary(families: Sequence[FamilySupport]) -> str:
    """Return the number of families with each kind of support, as a sentence."""
    counts = Counter(one.here for one in families)
    parts = ", ".join(f"{here} {counts[here]}" for here in SUPPORT_LEVELS)
    by_octavo = sum(is_custom(one.model_type) for one in families)
    known = f"transformers {transformers.__version__}, {by_octavo} implemented by Octavo"
    return f"{len(families)} families of images, sound and text ({known}): {parts}."


def survey_family(config_class: type[PreTrainedConfig]) -> FamilySupport:
    """Survey one family with its default configuration."""
    name = config_class.model_type
    try:
        config = full_default_config(config_class)
        model = empty(config)
        family = describe(model)
    except Undescribed as error:
        return FamilySupport(name, REFUSED, error.why)
    except ModelError as error:
        if error.__cause__ is not None:  # transformers' own
            return FamilySupport(name, UNBUILT, _short(error.__cause__))
        return FamilySupport(name, REFUSED, _without_name(str(error), name).removeprefix("is ").rstrip("."))
    why = why_not_trained(config)
    if not family.has_vision and not family.has_audio:
        return FamilySupport(name, TRAINS, "a text-only decoder", *_parts(family))
    if why is not None:
        return FamilySupport(name, PLANNED, why, *_parts(family))
    packed = why_not_packed(model)
    return FamilySupport(
        name, TRAINS, "" if packed is None else f"not packed, {_without_name(packed, name)}", *_parts(family)
    )


def full_default_config(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """Return the default configuration with all sub-configurations, including those that are None by default, such as
    Gemma 4's tower. Raises ModelError if the class has no default."""
    with wrap_errors(f"no default configuration of {config_class.__name__}"):
        if issubclass(config_class, ComposedConfig):
            return config_class.of_default_parts()
        config = config_class()
        left = {
            name: part()
            for name, part in config.sub_configs.items()
            if getattr(config, name, None) is None and issubclass(part, PreTrainedConfig)
        }
        return config_class(**left) if left else config


def _parts(family: Family) -> tuple[str, tuple[str, ...], tuple[str, ...], str, tuple[str, ...], int | None]:
    """Return the fields of :class:`FamilySupport` from ``tower`` on; the audio projector is listed with the audio
    tower, except modules inside it."""
    audio_projector, projector = (
        tuple(glob.removesuffix(".**") for glob in family.components.get(name, ()))
        for name in ("audio_projector", "image_projector")
    )
    outside = (name for name in audio_projector if not name.startswith(f"{family.audio_tower}."))
    audio = tuple(filter(None, (family.audio_tower, *outside)))
    blocks = tuple(glob.removesuffix(".*") for glob in family.layer_globs)
    return family.tower, audio, projector, family.language_model, blocks, family.image_token_id


def _without_name(sentence: str, name: str) -> str:
    """Return a sentence about a family without the leading name of the family."""
    return sentence.removeprefix(f"model_type {name!r} ")


def _short(error: BaseException) -> str:
    """Return the first sentence of an error of transformers, shortened to fit a line."""
    text = " ".join(str(error).split()).partition(". ")[0]
    return f"{type(error).__name__}: {textwrap.shorten(text, 90, placeholder=' ...')}"
