"""Settings that all frameworks have in some form: the model, adapters, frozen components, packing, and missing FP8."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.base.hub import is_name
from octavo.base.model_families import video_families
from octavo.importers.common.draft import Draft, choice, globs
from octavo.importers.errors import TranslateError
from octavo.importers.source.root_folder import section, whole

_SEES = re.compile(
    r"(vl\b|[-_]vl[-_.\d]|vision|llava|vila|internvl|pixtral|smolvlm|idefics|mllama|gemma-3-(4|12|27)b|gemma-?(4|3n)|"
    r"minicpm-[vo]|glm-4\.[0-9]+v|qvq|omni|qwen-?3\.[5-9]|llama-?4|mistral-small-(3\.[1-9]|4)|ministral-3|"
    r"magistral-small-2509|kimi-k(2\.[5-9]|3)|step-?3|multimodal|paligemma|molmo|ovis|[-_]ocr\b)",
    re.IGNORECASE,
)
#: maximum number of data sets of one file
_MOST_SETS = 1000
#: pixels of the side of an image token: two by two patches of 16 or 14
_SIDES = {r"qwen-?3([-_]?vl|\.[5-9])": 32, r"qwen-?2(\.?5)?[-_]?vl": 28}
#: components that training can freeze, in Octavo's order
TOWERS = ("image_encoder", "foundation")
COMPONENTS = ("image_encoder", "image_projector", "foundation")


def model(draft: Draft, *keys: str, why: str = "") -> str | None:
    """Set model.path from the first of these keys that is present; without one it is left to be filled in."""
    for key in keys:
        if word := draft.text(key):
            draft.put("model.path", draft.path(word), key, why=why)
            return word
    draft.put("model.path", "/path/to/model", why="to be filled in: no key named a model")
    draft.note("model.path is to be filled in: a folder of Hugging Face, or a name of the hub")
    return None


def config_of(draft: Draft, path: str | None) -> dict[str, Any]:
    """Return config.json of a model's folder; {} if the folder is not on this machine."""
    if path is None or is_name(path, draft.root):
        return {}
    return draft.folder.json(path, "config.json")


def sees(draft: Draft, path: str | None) -> bool:
    """Whether a model has a vision tower, by its config.json if that is on this machine; otherwise by its name, with a
    note."""
    if path is None:
        return False
    config = config_of(draft, path)
    if config:
        return any(key in config for key in ("vision_config", "vision_tower_cfg", "mm_vision_tower"))
    by_name = _SEES.search(path) is not None
    draft.note(f"{path} is not here, so by its name it {'sees images' if by_name else 'is a text model'}")
    return by_name


def filmed(draft: Draft, path: str | None) -> str | None:
    """Return the family of a model that Octavo trains with videos, by `model_type` of config.json if that is on this
    machine, else by the model's name; None for other models."""
    families = video_families()
    if kind := str(config_of(draft, path).get("model_type") or ""):
        return next((name for name in families if kind.startswith(name)), None)
    named = (name for name, video in families.items() if path and re.search(video.hub_name, path, re.IGNORECASE))
    return next(named, None)


_COPY = re.compile(r"([-_.](mcore|dcp|mm|hf|megatron|torch_dist|converted|(tp|pp|ep|etp|vpp)_?\d+))+$")


def same_model(path: str, model: str) -> bool:
    """Whether a checkpoint in another layout seems by its name to be a copy of a model's folder:
    ``ckpt/mm/Qwen3-VL-8B-dcp`` for ``Qwen/Qwen3-VL-8B``."""
    names = []
    for text in (path, model):
        words = [word for word in text.lower().split("/") if word and word != "release"]
        names.append(re.sub(r"[-_.]", "", _COPY.sub("", words[-1])) if words else "")
    return bool(names[0]) and names[0] == names[1]


def token_side(draft: Draft, path: str | None) -> int | None:
    """Return the pixels of the side of an image token, for models with a variable number of tokens per image; None if
    unknown."""
    vision = section(config_of(draft, path), "vision_config")
    if (patch := whole(vision, "patch_size")) and (merged := whole(vision, "spatial_merge_size")):
        return patch * merged
    return next((side for name, side in _SIDES.items() if path and re.search(name, path, re.IGNORECASE)), None)


def video(draft: Draft, family: str | None, phase: str, keys: dict[str, str], usual: dict[str, float]) -> None:
    """Translate the settings of video frames.

    keys    Octavo's name -> the source key
    usual   the defaults of the other framework

    The source keys bound the pixels of each frame, as Octavo does for Qwen2.5-VL; for Qwen3-VL Octavo bounds all frames
    of a video together.
    """
    theirs = [key for key in keys.values() if key in draft.source_keys]
    taken = phase != "pretrain"
    if not taken or family is None:
        draft.none(*theirs, why=VIDEO if taken else "phase pretrain accepts no videos", apart=True)
        return
    budget = video_families()[family].budget
    for ours, key in keys.items():
        value = draft.number(key, usual.get(ours))
        if ours.endswith("pixels") and budget != "frame":
            whole = "data.video.max_pixels counts all frames of a video together: multiply this by your frames"
            draft.none(key, why=whole if budget == "video" else "every frame is one tile of a fixed size")
        elif value or (value == 0 and ours.endswith("pixels")):
            draft.put(f"data.video.{ours}", value if ours == "fps" else max(1, int(value)), key)


#: keys of LLaMA-Factory's video reader, which MindSpeed-MM uses too, and their defaults
FILM = {"fps": "fps", "max_frames": "maxlen", "max_pixels": "max_pixels", "min_pixels": "min_pixels"}
FILMED = {"fps": 2.0, "max_frames": 128, "max_pixels": 256 * 256, "min_pixels": 16 * 16}


def last_answer(draft: Draft, key: str) -> None:
    """Report that a loss only on the last answer is set in the rows."""
    draft.none(
        key,
        why="loss is on every answer; weight: 0 in earlier answers of a row removes it from them, and "
        "data.split_turns makes each answer a separate row",
    )


def lora(
    draft: Draft,
    rank: int,
    alpha: float,
    dropout: float,
    targets: list[str],
    *,
    keys: dict[str, str],
    but: Sequence[str] = (),
) -> None:
    """Set adapters. ``targets``: components, or names of modules; ``but``: components whose modules get no adapters
    even if a name matches."""
    draft.put("lora.rank", rank, keys.get("rank", ""))
    draft.put("lora.alpha", float(alpha), keys.get("alpha", ""))
    _dropout(draft, dropout, keys.get("dropout", ""))
    named = [word for word in targets if word not in COMPONENTS]
    chosen = [word for word in targets if word in COMPONENTS] + globs(named)
    draft.put("lora.targets", chosen, keys.get("targets", ""))
    if named and but:
        draft.put("lora.exclude", list(but), why="modules with the same names may be there")


def _dropout(draft: Draft, share: float, key: str) -> None:
    """Translate the dropout of adapters. Phase preference has none: it would be in the policy and not in its reference.

    TRL's trainers for DPO, KTO, ORPO and CPO switch all dropout off (``disable_dropout`` is true by default), and so do
    LLaMA-Factory's and ms-swift's; Megatron's have no such switch."""
    if draft.settings["train.phase"].value != "preference":
        draft.put("lora.dropout", float(share), key)
    elif not share:
        draft.same(key, why="off")
    elif "megatron" in draft.command or draft.flag("disable_dropout") is False:
        draft.none(key, why="dropout is off in phase preference: it would be in the policy, and not in its reference")
    else:
        draft.dead(key, why="switched off by their trainer: a policy with dropout is compared with a reference without")
        draft.same("disable_dropout", why="all dropout is off in phase preference")


def freeze(draft: Draft, frozen: Mapping[str, tuple[str, ...]]) -> None:
    """Set model.freeze. ``frozen``: component -> the keys that freeze it."""
    names = [name for name in COMPONENTS if name in frozen]
    if names:
        keys = [key for name in names for key in frozen[name]]
        draft.put("model.freeze", names, *keys)


def adapt(draft: Draft, keys: dict[str, str], rslora: str = "", dora: str = "") -> None:
    """Translate the flags of rsLoRA and DoRA."""
    if rslora and draft.flag(rslora):
        draft.put("lora.rslora", True, rslora)
    if dora and draft.flag(dora):
        draft.put("lora.dora", True, dora)


def packing(draft: Draft, *keys: str, why: str = "") -> None:
    """Turn packing on."""
    draft.put("data.packing", True, *keys, why=why or "samples of a row never see each other")


def packs(draft: Draft, phase: str, key: str) -> bool:
    """Translate the one flag for packing, whose meaning depends on the phase. Returns whether rows are packed."""
    on = draft.flag(key)
    if phase == "sft" and on:
        packing(draft, key)
        return True
    if phase == "pretrain":
        draft.same(key, why="documents are joined and cut to seq_length (data.join)")
    elif on:
        draft.none(key, why="pairs are rows of one batch")
    else:
        draft.same(key, why="a row is a sample")
    return False


def no_fp8(draft: Draft) -> None:
    """Turn FP8 off if no key requested it, so that the run stays the same."""
    if not any(target.startswith(("fp8.", "model.load_in_fp8")) for target in draft.settings):
        draft.put("fp8.recipe", "off", why="no FP8 there; blockwise is Octavo's default")
        draft.note(
            "there was no FP8: fp8.recipe is off; remove that line (or set --fp8-recipe blockwise) to train in FP8"
        )


def eight_bits(draft: Draft, key: str, bits: int) -> None:
    """Translate a quantized base: 8 bits become FP8 codes; 4 bits have no equivalent, and FP8 codes are the nearest."""
    if bits == 8:
        draft.put("model.load_in_fp8", "rowwise", key, why="8 bits, multiplied in FP8 with a scale for each row")
    else:
        why = "there is no 4-bit base; model.load_in_fp8 keeps it at a byte a parameter, twice QLoRA's"
        draft.none(key, why=why)
        draft.put("model.load_in_fp8", "rowwise", why=f"instead of {bits} bits, which Octavo lacks")


def dataset(draft: Draft, of: str, number: int, path: str, *keys: str, hub: bool = True, why: str = "") -> str:
    """Set the path of a data set. Returns the prefix of its other keys."""
    if number >= _MOST_SETS:
        raise TranslateError(f"it names over {_MOST_SETS:,} data sets. Join them into fewer files, or name the folder.")
    at = f"data.{of}.{number}"
    draft.put(f"{at}.path", draft.path(path, hub=hub), *keys, why=why)
    draft.sets[at] = path
    return at


def stream(draft: Draft, at: str, key: str, why: str = "") -> bool:
    """Stream a data set if possible; returns whether it is. A single JSON list, which a .json file is unless it is on
    this machine and begins otherwise, has no rows that could be read one by one."""
    path = draft.sets.get(at, "")
    begins = draft.folder.begins(path)
    if begins == "[" or (not begins and path.endswith(".json")):
        reason = f"{path} is one JSON list, which is read into the cache; JSONL (an object per line) can be streamed"
        draft.none(key, why=reason, apart=True)
        return False
    draft.put(f"{at}.stream", True, key, why=why)
    return True


def kernel(draft: Draft, key: str, known: Mapping[str, str], packed: bool) -> None:
    """Translate the name of an attention kernel; ``org/name`` is a kernel of the hub."""
    word = draft.text(key) or ""
    if "/" in word:
        if match := re.search(r"flash-attn-?([23])", word):
            attend(draft, key, f"flash_attention_{match[1]}", packed)
        else:
            draft.none(key, why="a kernel of the hub; torch chooses one at each call (model.attention: sdpa)")
    elif name := choice(draft, key, known):
        attend(draft, key, name, packed)


def attend(draft: Draft, key: str, name: str, packed: bool) -> None:
    """Set model.attention, to an equivalent kernel if packs do not support the given one."""
    why = ""
    if packed and name.startswith("flash_attention"):
        name, why = "sdpa", "packs use torch's flash attention automatically"
    elif packed and name == "eager":
        name, why = "sdpa", "packs are separated without a mask"
    elif name == "flex" and not packed:
        name, why = "sdpa", "flex is only for packs"
    draft.put("model.attention", name, key, why=why)


def thinking(draft: Draft, *keys: str) -> None:
    """Translate variables of the chat template such as `enable_thinking`. A variable that the template does not read is
    an error in Octavo, so the template is searched if the model's folder is on this machine."""
    for key in keys:
        if (value := draft.flag(key)) is not None:
            _variable(draft, key, key.rpartition(".")[2], value)


def _variable(draft: Draft, key: str, name: str, value: bool) -> None:
    source = draft.settings["model.path"].source
    names = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json") if source else ()
    read = [draft.folder.text(str(source[0].value), file) for file in names]
    texts = [text for text in read if text is not None]
    if texts and not any(name in text for text in texts):
        draft.dead(key, why="the chat template of this model does not read this variable")
        return
    before = draft.settings.get("data.template_args")
    draft.put("data.template_args", {**(before.value if before else {}), name: value}, key,
              why="a variable of the chat template")  # fmt: skip
    if not texts:
        draft.note(f"data.template_args: remove {name} if the model's chat template does not read it")


TEMPLATE = "the chat template comes from the model's folder; templates selected by name have no equivalent"
VIDEO = "videos train only with Qwen3-VL, Qwen2.5-VL and InternVL (data.video); other models refuse rows with videos"
