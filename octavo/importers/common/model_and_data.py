"""Settings that all frameworks have: the model, adapters, frozen components, packing, and FP8 if it is not set."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.base.hub import is_name
from octavo.base.model_families import video_families
from octavo.importers.common.draft import Draft, choice, globs
from octavo.importers.errors import TranslateError
from octavo.importers.source.root_folder import get_mapping, get_positive_int

_SEES = re.compile(
    r"(vl\b|[-_]vl[-_.\d]|vision|llava|vila|internvl|pixtral|smolvlm|idefics|mllama|gemma-3-(4|12|27)b|gemma-?(4|3n)|"
    r"minicpm-[vo]|glm-4\.[0-9]+v|qvq|omni|qwen-?3\.[5-9]|llama-?4|mistral-small-(3\.[1-9]|4)|ministral-3|"
    r"magistral-small-2509|kimi-k(2\.[5-9]|3)|step-?3|multimodal|paligemma|molmo|ovis|[-_]ocr\b)",
    re.IGNORECASE,
)
#: maximum number of data sets of one file
_MOST_SETS = 1000
#: side of an image token in pixels: two by two patches of 16 or 14
_SIDES = {r"qwen-?3([-_]?vl|\.[5-9])": 32, r"qwen-?2(\.?5)?[-_]?vl": 28}
#: components that training can freeze, in Octavo's order
TOWERS = ("image_encoder", "foundation")
COMPONENTS = ("image_encoder", "image_projector", "foundation")


def set_model_path(draft: Draft, *keys: str, why: str = "") -> str | None:
    """Set model.path from the first of these keys that is present, or to a placeholder."""
    for key in keys:
        if word := draft.text(key):
            draft.set("model.path", draft.path(word), key, why=why)
            return word
    draft.set("model.path", "/path/to/model", why="FILL IN: no key names a model")
    draft.add_note("FILL IN: set model.path to a Hugging Face folder or a hub name")
    return None


def read_config(draft: Draft, path: str | None) -> dict[str, Any]:
    """Return config.json of a model folder, or {} if the folder is not on this machine."""
    if path is None or is_name(path, draft.root):
        return {}
    return draft.folder.json(path, "config.json")


def has_vision(draft: Draft, path: str | None) -> bool:
    """Return whether a model has a vision tower, by its config.json if that is on this machine, otherwise by its name,
    with a note."""
    if path is None:
        return False
    config = read_config(draft, path)
    if config:
        return any(key in config for key in ("vision_config", "vision_tower_cfg", "mm_vision_tower"))
    by_name = _SEES.search(path) is not None
    draft.add_note(
        f"{path} is not on this machine; judging by its name it {'accepts images' if by_name else 'is a text model'}"
    )
    return by_name


def video_family(draft: Draft, path: str | None) -> str | None:
    """Return the family of a model that Octavo can train on videos, by `model_type` of config.json if that is on this
    machine, otherwise by the model's name; or None."""
    families = video_families()
    if model_type := str(read_config(draft, path).get("model_type") or ""):
        return next((name for name in families if model_type.startswith(name)), None)
    named = (name for name, video in families.items() if path and re.search(video.hub_name, path, re.IGNORECASE))
    return next(named, None)


_COPY = re.compile(r"([-_.](mcore|dcp|mm|hf|megatron|torch_dist|converted|(tp|pp|ep|etp|vpp)_?\d+))+$")


def is_same_model(path: str, model: str) -> bool:
    """Return whether a checkpoint in another layout seems by its name to be a copy of a model folder:
    ``ckpt/mm/Qwen3-VL-8B-dcp`` for ``Qwen/Qwen3-VL-8B``."""
    names = []
    for text in (path, model):
        words = [word for word in text.lower().split("/") if word and word != "release"]
        names.append(re.sub(r"[-_.]", "", _COPY.sub("", words[-1])) if words else "")
    return bool(names[0]) and names[0] == names[1]


def image_token_side(draft: Draft, path: str | None) -> int | None:
    """Return the side of an image token in pixels, for models with a variable number of tokens per image, or None if
    unknown."""
    vision = get_mapping(read_config(draft, path), "vision_config")
    if (patch := get_positive_int(vision, "patch_size")) and (merged := get_positive_int(vision, "spatial_merge_size")):
        return patch * merged
    return next((side for name, side in _SIDES.items() if path and re.search(name, path, re.IGNORECASE)), None)


def set_video(draft: Draft, family: str | None, phase: str, keys: dict[str, str], defaults: dict[str, float]) -> None:
    """Translate the settings of video frames.

    keys    Octavo's name -> the source key
    defaults   the defaults of the other framework

    The source keys bound the pixels of each frame, as Octavo does for Qwen2.5-VL; for Qwen3-VL Octavo bounds all frames
    of a video together.
    """
    present_keys = [key for key in keys.values() if key in draft.source_keys]
    accepts_video = phase != "pretrain"
    if not accepts_video or family is None:
        draft.mark_unsupported(
            *present_keys,
            why=VIDEO_REASON if accepts_video else "phase pretrain accepts no videos",
            affects_training=False,
        )
        return
    budget = video_families()[family].budget
    for target, key in keys.items():
        value = draft.number(key, defaults.get(target))
        if target.endswith("pixels") and budget != "frame":
            total = "data.video.max_pixels covers all frames of a video: multiply this value by the number of frames"
            draft.mark_unsupported(key, why=total if budget == "video" else "each frame is one tile of a fixed size")
        elif value or (value == 0 and target.endswith("pixels")):
            draft.set(f"data.video.{target}", value if target == "fps" else max(1, int(value)), key)


#: keys of LLaMA-Factory's video reader, which MindSpeed-MM uses too, and their defaults
VIDEO_KEYS = {"fps": "fps", "max_frames": "maxlen", "max_pixels": "max_pixels", "min_pixels": "min_pixels"}
VIDEO_DEFAULTS = {"fps": 2.0, "max_frames": 128, "max_pixels": 256 * 256, "min_pixels": 16 * 16}


def mark_last_answer_loss(draft: Draft, key: str) -> None:
    """Record that a loss on the last answer only must be set in the rows."""
    draft.mark_unsupported(
        key,
        why="all answers have loss; weight: 0 removes it from an earlier answer of a row, and data.split_turns makes "
        "each answer a separate row",
    )


def set_lora(
    draft: Draft,
    rank: int,
    alpha: float,
    dropout: float,
    targets: list[str],
    *,
    keys: dict[str, str],
    exclude: Sequence[str] = (),
) -> None:
    """Set adapters. ``targets``: components or names of modules; ``exclude``: components whose modules get no adapters
    even if a name matches."""
    draft.set("lora.rank", rank, keys.get("rank", ""))
    draft.set("lora.alpha", float(alpha), keys.get("alpha", ""))
    _set_dropout(draft, dropout, keys.get("dropout", ""))
    named = [word for word in targets if word not in COMPONENTS]
    chosen = [word for word in targets if word in COMPONENTS] + globs(named)
    draft.set("lora.targets", chosen, keys.get("targets", ""))
    if named and exclude:
        draft.set("lora.exclude", list(exclude), why="these components may have modules of the same names")


def _set_dropout(draft: Draft, share: float, key: str) -> None:
    """Translate the dropout of adapters. Phase preference has none: the policy would have it but not the reference.

    TRL's trainers for DPO, KTO, ORPO and CPO switch all dropout off (``disable_dropout`` is true by default), and so do
    LLaMA-Factory's and ms-swift's; Megatron's have no such switch."""
    if draft.settings["train.phase"].value != "preference":
        draft.set("lora.dropout", float(share), key)
    elif not share:
        draft.mark_default(key, why="off")
    elif "megatron" in draft.command or draft.flag("disable_dropout") is False:
        draft.mark_unsupported(
            key, why="dropout is off in phase preference: the policy would have it, but not the reference"
        )
    else:
        draft.mark_ignored(
            key, why="the framework's trainer disables it: the policy would have dropout, but not the reference"
        )
        draft.mark_default("disable_dropout", why="all dropout is off in phase preference")


def set_freeze(draft: Draft, frozen: Mapping[str, tuple[str, ...]]) -> None:
    """Set model.freeze. ``frozen``: component -> the keys that freeze it."""
    names = [name for name in COMPONENTS if name in frozen]
    if names:
        keys = [key for name in names for key in frozen[name]]
        draft.set("model.freeze", names, *keys)


def set_lora_variants(draft: Draft, keys: dict[str, str], rslora: str = "", dora: str = "") -> None:
    """Translate the flags of rsLoRA and DoRA."""
    if rslora and draft.flag(rslora):
        draft.set("lora.rslora", True, rslora)
    if dora and draft.flag(dora):
        draft.set("lora.dora", True, dora)


def set_packing(draft: Draft, *keys: str, why: str = "") -> None:
    """Enable packing."""
    draft.set("data.packing", True, *keys, why=why or "samples of a pack do not attend to each other")


def translate_packing(draft: Draft, phase: str, key: str) -> bool:
    """Translate the packing flag, whose meaning depends on the phase. Returns whether rows are packed."""
    on = draft.flag(key)
    if phase == "sft" and on:
        set_packing(draft, key)
        return True
    if phase == "pretrain":
        draft.mark_default(key, why="documents are concatenated and split at seq_length (data.join)")
    elif on:
        draft.mark_unsupported(key, why="preference pairs are not packed")
    else:
        draft.mark_default(key, why="each row is one sample")
    return False


def disable_fp8_if_unset(draft: Draft) -> None:
    """Disable FP8 if no key requested it, so that the run stays the same."""
    if not any(target.startswith(("fp8.", "model.load_in_fp8")) for target in draft.settings):
        draft.set("fp8.recipe", "off", why="the source did not use FP8; blockwise is Octavo's default")
        draft.add_note(
            "the source did not use FP8, so fp8.recipe is off; remove that line (or set --fp8-recipe blockwise) to "
            "train in FP8"
        )


def set_quantized_base(draft: Draft, key: str, bits: int) -> None:
    """Translate a quantized base: 8 bits become FP8 codes, which are also the closest to 4 bits."""
    if bits == 8:
        draft.set("model.load_in_fp8", "rowwise", key, why="8 bits; GEMMs run in FP8 with one scale per row")
    else:
        why = "a 4-bit base is not implemented; model.load_in_fp8 stores one byte per parameter, twice as much as QLoRA"
        draft.mark_unsupported(key, why=why)
        draft.set("model.load_in_fp8", "rowwise", why=f"instead of {bits} bits, which Octavo does not implement")


def add_dataset(draft: Draft, group: str, number: int, path: str, *keys: str, hub: bool = True, why: str = "") -> str:
    """Set the path of a data set. Returns the prefix of its other keys."""
    if number >= _MOST_SETS:
        raise TranslateError(
            f"it has more than {_MOST_SETS:,} data sets. Join them into fewer files, or name the folder."
        )
    at = f"data.{group}.{number}"
    draft.set(f"{at}.path", draft.path(path, hub=hub), *keys, why=why)
    draft.dataset_paths[at] = path
    return at


def set_streaming(draft: Draft, at: str, key: str, why: str = "") -> bool:
    """Stream a data set if possible, and return whether it is. A single JSON list, which a .json file is unless it is
    on this machine and begins otherwise, has no rows that could be read one by one."""
    path = draft.dataset_paths.get(at, "")
    begins = draft.folder.first_character(path)
    if begins == "[" or (not begins and path.endswith(".json")):
        reason = f"{path} is one JSON list, which is read into the cache; JSONL (one object per line) can be streamed"
        draft.mark_unsupported(key, why=reason, affects_training=False)
        return False
    draft.set(f"{at}.stream", True, key, why=why)
    return True


def set_attention_kernel(draft: Draft, key: str, known: Mapping[str, str], packed: bool) -> None:
    """Translate the name of an attention kernel; ``org/name`` is a kernel from the hub."""
    word = draft.text(key) or ""
    if "/" in word:
        if match := re.search(r"flash-attn-?([23])", word):
            set_attention(draft, key, f"flash_attention_{match[1]}", packed)
        else:
            draft.mark_unsupported(
                key, why="a kernel from the hub; with model.attention: sdpa torch selects a kernel at each call"
            )
    elif name := choice(draft, key, known):
        set_attention(draft, key, name, packed)


def set_attention(draft: Draft, key: str, name: str, packed: bool) -> None:
    """Set model.attention, to an equivalent kernel if packing does not support the requested one."""
    why = ""
    if packed and name.startswith("flash_attention"):
        name, why = "sdpa", "packs use torch's flash attention automatically"
    elif packed and name == "eager":
        name, why = "sdpa", "packs need no mask to separate samples"
    elif name == "flex" and not packed:
        name, why = "sdpa", "flex is only used with packing"
    draft.set("model.attention", name, key, why=why)


def set_template_flags(draft: Draft, *keys: str) -> None:
    """Translate variables of the chat template such as `enable_thinking`. A variable that the template does not read is
    an error in Octavo, so the template is searched if the model's folder is on this machine."""
    for key in keys:
        if (value := draft.flag(key)) is not None:
            _set_template_variable(draft, key, key.rpartition(".")[2], value)


def _set_template_variable(draft: Draft, key: str, name: str, value: bool) -> None:
    source = draft.settings["model.path"].source
    names = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json") if source else ()
    read = [draft.folder.text(str(source[0].value), file) for file in names]
    texts = [text for text in read if text is not None]
    if texts and not any(name in text for text in texts):
        draft.mark_ignored(key, why="the chat template of this model does not read this variable")
        return
    before = draft.settings.get("data.template_args")
    draft.set("data.template_args", {**(before.value if before else {}), name: value}, key,
              why="chat template variable")  # fmt: skip
    if not texts:
        draft.add_note(f"data.template_args: remove {name} if the model's chat template does not read it")


TEMPLATE_REASON = "the chat template comes from the model folder; templates cannot be selected by name"
VIDEO_REASON = (
    "training on video needs Qwen3-VL, Qwen2.5-VL or InternVL (data.video); other models reject rows with videos"
)
