"""What all frameworks name in some way: the model, adapters, what is frozen, packing, and FP8 where there was none."""

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
#: data sets of one file
_MOST_SETS = 1000
#: pixels of the side of a token: patches of 16 or 14, two by two
_SIDES = {r"qwen-?3([-_]?vl|\.[5-9])": 32, r"qwen-?2(\.?5)?[-_]?vl": 28}
#: what training freezes by component, in Octavo's order
TOWERS = ("image_encoder", "foundation")
COMPONENTS = ("image_encoder", "image_projector", "foundation")


def model(draft: Draft, *keys: str, why: str = "") -> str | None:
    """The first of these keys that is there becomes model.path; a file without one is left to be filled in."""
    for key in keys:
        if word := draft.text(key):
            draft.put("model.path", draft.path(word), key, why=why)
            return word
    draft.put("model.path", "/path/to/model", why="to be filled in: no key named a model")
    draft.note("model.path is to be filled in: a folder of Hugging Face, or a name of the hub")
    return None


def config_of(draft: Draft, path: str | None) -> dict[str, Any]:
    """config.json of a model's folder, where it lies here."""
    if path is None or is_name(path, draft.root):
        return {}
    return draft.folder.json(path, "config.json")


def sees(draft: Draft, path: str | None) -> bool:
    """Whether a model has a vision tower: its config.json says so where it lies here; elsewhere its name is judged,
    which is noted."""
    if path is None:
        return False
    config = config_of(draft, path)
    if config:
        return any(key in config for key in ("vision_config", "vision_tower_cfg", "mm_vision_tower"))
    found = _SEES.search(path) is not None
    draft.note(f"{path} is not here, so by its name it {'sees images' if found else 'is a text model'}")
    return found


def filmed(draft: Draft, path: str | None) -> str | None:
    """The family of a model whose videos train here, by `model_type` of config.json where it is here, else by the
    model's name; None for any other."""
    families = video_families()
    if kind := str(config_of(draft, path).get("model_type") or ""):
        return next((name for name in families if kind.startswith(name)), None)
    named = (name for name, video in families.items() if path and re.search(video.hub_name, path, re.IGNORECASE))
    return next(named, None)


_COPY = re.compile(r"([-_.](mcore|dcp|mm|hf|megatron|torch_dist|converted|(tp|pp|ep|etp|vpp)_?\d+))+$")


def same_model(path: str, model: str) -> bool:
    """Whether a checkpoint of another layout is by its name a copy of a model's folder: ``ckpt/mm/Qwen3-VL-8B-dcp`` of
    ``Qwen/Qwen3-VL-8B``."""
    names = []
    for text in (path, model):
        words = [word for word in text.lower().split("/") if word and word != "release"]
        names.append(re.sub(r"[-_.]", "", _COPY.sub("", words[-1])) if words else "")
    return bool(names[0]) and names[0] == names[1]


def token_side(draft: Draft, path: str | None) -> int | None:
    """Pixels of the side of an image's token, for models that count an image's tokens; None where it is not known."""
    vision = section(config_of(draft, path), "vision_config")
    if (patch := whole(vision, "patch_size")) and (merged := whole(vision, "spatial_merge_size")):
        return patch * merged
    return next((side for name, side in _SIDES.items() if path and re.search(name, path, re.IGNORECASE)), None)


def video(draft: Draft, family: str | None, phase: str, keys: dict[str, str], usual: dict[str, float]) -> None:
    """Frames of videos: ``keys`` are ours -> theirs, ``usual`` what they take where nothing is said. Theirs bounds the
    pixels of each frame, as Octavo does of Qwen2.5-VL; of Qwen3-VL it bounds all frames of a video together."""
    theirs = [key for key in keys.values() if key in draft.given]
    taken = phase != "pretrain"
    if not taken or family is None:
        draft.none(*theirs, why=VIDEO if taken else "phase pretrain takes no videos", apart=True)
        return
    budget = video_families()[family].budget
    for ours, key in keys.items():
        value = draft.number(key, usual.get(ours))
        if ours.endswith("pixels") and budget != "frame":
            whole = "data.video.max_pixels counts all frames of a video together: this, times the frames of yours"
            draft.none(key, why=whole if budget == "video" else "every frame is one tile of a fixed size")
        elif value or (value == 0 and ours.endswith("pixels")):
            draft.put(f"data.video.{ours}", value if ours == "fps" else max(1, int(value)), key)


#: keys of LLaMA-Factory's reader of videos, which MindSpeed-MM has too, and what they are where nothing is said
FILM = {"fps": "fps", "max_frames": "maxlen", "max_pixels": "max_pixels", "min_pixels": "min_pixels"}
FILMED = {"fps": 2.0, "max_frames": 128, "max_pixels": 256 * 256, "min_pixels": 16 * 16}


def last_answer(draft: Draft, key: str) -> None:
    """Loss on the last answer of a row alone is said by the rows here."""
    draft.none(key, why="loss falls on every answer; weight: 0 in earlier answers of a row takes it off them, and "
               "data.split_turns teaches each answer as a row of its own")  # fmt: skip


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
    """Adapters: ``targets`` are components, or names of modules; ``but``: components whose modules of these names get
    none."""
    draft.put("lora.rank", rank, keys.get("rank", ""))
    draft.put("lora.alpha", float(alpha), keys.get("alpha", ""))
    _dropout(draft, dropout, keys.get("dropout", ""))
    named = [word for word in targets if word not in COMPONENTS]
    found = [word for word in targets if word in COMPONENTS] + globs(named)
    draft.put("lora.targets", found, keys.get("targets", ""))
    if named and but:
        draft.put("lora.exclude", list(but), why="modules of the same names may be there")


def _dropout(draft: Draft, share: float, key: str) -> None:
    """The adapters' dropout, which phase preference has not: it would be in the policy and not in its reference.

    TRL's trainers of DPO, KTO, ORPO and CPO switch all dropout off (``disable_dropout`` is true where nothing is said),
    and so do LLaMA-Factory's and ms-swift's; Megatron's have no such switch."""
    if draft.settings["train.phase"].value != "preference":
        draft.put("lora.dropout", float(share), key)
    elif not share:
        draft.same(key, why="off")
    elif "megatron" in draft.command or draft.flag("disable_dropout") is False:
        draft.none(key, why="dropout is off in phase preference: it would be in the policy, and not in its reference")
    else:
        draft.dead(key, why="switched off by their trainer: a policy with dropout is compared with a reference without")
        draft.same("disable_dropout", why="all dropout is off in phase preference")


def freeze(draft: Draft, frozen: dict[str, tuple[str, ...]]) -> None:
    """component -> the keys that freeze it."""
    names = [name for name in COMPONENTS if name in frozen]
    if names:
        keys = [key for name in names for key in frozen[name]]
        draft.put("model.freeze", names, *keys)


def adapt(draft: Draft, keys: dict[str, str], rslora: str = "", dora: str = "") -> None:
    """rsLoRA and DoRA."""
    if rslora and draft.flag(rslora):
        draft.put("lora.rslora", True, rslora)
    if dora and draft.flag(dora):
        draft.put("lora.dora", True, dora)


def packing(draft: Draft, *keys: str, why: str = "") -> None:
    draft.put("data.packing", True, *keys, why=why or "samples of a row never see each other")


def packs(draft: Draft, phase: str, key: str) -> bool:
    """Whether rows are packed, which one flag says there; what it means in each phase."""
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
    """Where nothing asked for FP8, the run stays in high precision, so that it is the run it was."""
    if not any(target.startswith(("fp8.", "model.load_in_fp8")) for target in draft.settings):
        draft.put("fp8.recipe", "off", why="no FP8 there; blockwise is Octavo's usual")
        draft.note(
            "there was no FP8: fp8.recipe is off; remove that line (or give --fp8-recipe blockwise) to train in FP8"
        )


def eight_bits(draft: Draft, key: str, bits: int) -> None:
    """A base in 8 bits becomes FP8 codes; one in 4 has no equivalent, and the codes are what comes nearest."""
    if bits == 8:
        draft.put(
            "model.load_in_fp8", "rowwise", key, why="8 bits that are multiplied in FP8, with a scale for each row"
        )
    else:
        why = "there is no 4-bit base; model.load_in_fp8 keeps it at a byte a parameter, twice QLoRA's"
        draft.none(key, why=why)
        draft.put("model.load_in_fp8", "rowwise", why=f"in the place of {bits} bits, which Octavo lacks")


def dataset(draft: Draft, of: str, number: int, path: str, *keys: str, hub: bool = True, why: str = "") -> str:
    """A data set's path; gives the prefix of its further keys."""
    if number >= _MOST_SETS:
        raise TranslateError(f"it names over {_MOST_SETS:,} data sets. Join them in fewer files, or name their folder.")
    at = f"data.{of}.{number}"
    draft.put(f"{at}.path", draft.path(path, hub=hub), *keys, why=why)
    draft.sets[at] = path
    return at


def stream(draft: Draft, at: str, key: str, why: str = "") -> bool:
    """Rows of a data set that are read where they are; gives whether they can be. One JSON list (as a file that ends in
    .json is, unless it is here and begins otherwise) has no rows that could be read one by one."""
    path = draft.sets.get(at, "")
    begins = draft.folder.begins(path)
    if begins == "[" or (not begins and path.endswith(".json")):
        found = f"{path} is one JSON list, which is read into the cache; JSONL (an object a line) can be streamed"
        draft.none(key, why=found, apart=True)
        return False
    draft.put(f"{at}.stream", True, key, why=why)
    return True


def kernel(draft: Draft, key: str, known: Mapping[str, str], packed: bool) -> None:
    """The kernel of attention by its name there; ``org/name`` is one of the hub."""
    word = draft.text(key) or ""
    if "/" in word and not (found := re.search(r"flash-attn-?([23])", word)):
        draft.none(key, why="a kernel of the hub; torch chooses one at each call (model.attention: sdpa)")
    elif "/" in word:
        attend(draft, key, f"flash_attention_{found[1]}", packed)
    elif name := choice(draft, key, known):
        attend(draft, key, name, packed)


def attend(draft: Draft, key: str, name: str, packed: bool) -> None:
    """model.attention, or what does the same where packs would not have it."""
    why = ""
    if packed and name.startswith("flash_attention"):
        name, why = "sdpa", "packs take torch's flash attention by themselves"
    elif packed and name == "eager":
        name, why = "sdpa", "packs are told apart without a mask"
    elif name == "flex" and not packed:
        name, why = "sdpa", "flex is for packs here"
    draft.put("model.attention", name, key, why=why)


def thinking(draft: Draft, *keys: str) -> None:
    """`enable_thinking` and its kind are variables of the chat template, and one that a template does not read is an
    error here; so the template is looked at where the model's folder is here."""
    for key in keys:
        if (found := draft.flag(key)) is not None:
            _variable(draft, key, key.rpartition(".")[2], found)


def _variable(draft: Draft, key: str, name: str, found: bool) -> None:
    source = draft.settings["model.path"].source
    names = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json") if source else ()
    read = [draft.folder.text(str(source[0].value), file) for file in names]
    texts = [text for text in read if text is not None]
    if texts and not any(name in text for text in texts):
        draft.dead(key, why="the chat template of this model reads no such variable")
        return
    before = draft.settings.get("data.template_args")
    draft.put("data.template_args", {**(before.value if before else {}), name: found}, key,
              why="a variable of the chat template")  # fmt: skip
    if not texts:
        draft.note(f"data.template_args: remove {name} if the model's chat template does not read it")


TEMPLATE = "the chat template is that of the model's folder; a template of another name there has no equivalent"
VIDEO = "videos train of Qwen3-VL, Qwen2.5-VL and InternVL alone (data.video); of other models they are refused, by row"
