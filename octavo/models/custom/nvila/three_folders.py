"""The original layout of VILA and NVILA: one folder each for decoder, tower and projector, and a top-level
configuration.

    config.json       how images are cut and which layer of the tower is read
    llm/              config.json, weights, tokenizer
    vision_tower/     config.json, weights, preprocessor_config.json
    mm_projector/     config.json, weights

The parts are found by folder names, because the paths in config.json are from the author's machine. If folders name
Python code (`auto_map`), only their configuration and weights are read; the code never runs.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from octavo.base import safe_read
from octavo.models.custom.nvila.configuration import PROJECTORS, NvilaConfig, NvilaLiteConfig
from octavo.models.custom.nvila.templates import TEMPLATES, vila_1_5_template
from octavo.models.errors import ModelError
from octavo.models.folder.folder import PARTS, check_sizes, check_weight_files, read_json

SENTINEL, IMAGE, VIDEO = MEDIA = ("<vila/sentinel>", "<image>", "<vila/video>")
#: `model_type` of config.json above the three folders
IN_THREE_FOLDERS = ("llava_llama", "vila")
#: how images are cut -> line breaks that the prompt writes after each tile
_CUTS = {"dynamic": 1, "dynamic_s2": 0, "resize": 0}
_PUBLISHED = "448,896,1344"
_ENCODER = "llava.model.encoders.BasicImageEncoder"
#: fields of config.json -> the accepted values; others change the arithmetic and would silently give wrong results
_ACCEPTED = {
    "mm_vision_select_layer": (-2,),
    "mm_vision_select_feature": ("cls_patch",),
    "mm_use_im_start_end": (False, None),
    "s2": (False, None),
    "ps3": (False, None),
}


def read_three_folders(folder: Path) -> NvilaLiteConfig:
    """Read the configuration of a model in three folders. Raises ModelError for values that Octavo's model code does
    not implement."""
    # Every field that changes the arithmetic is checked before any field is used.
    raw = {part: read_json(folder / part / "config.json") for part in PARTS}
    top = read_json(folder / "config.json")
    for file in (folder, *(folder / part for part in PARTS)):
        check_sizes(file / "config.json")
    cut = _image_cut(top)
    _check_value(folder, "image_aspect_ratio", cut, _CUTS)
    for key, known in _ACCEPTED.items():
        _check_value(folder, key, top.get(key, known[0]), known)
    text, vision = dict(raw["llm"]), dict(raw["vision_tower"])
    _check_value(folder / "llm", "model_type", text.get("model_type"), ("qwen2", "llama"))
    for part in (text, vision):
        for key in ("auto_map", "_name_or_path", "architectures"):
            part.pop(key, None)
    vision["vision_use_head"] = _has_head(folder, vision)
    has_scales, side = cut == "dynamic_s2", vision.get("image_size")
    _check_value(folder, "dynamic_s2", bool(top.get("dynamic_s2", has_scales)), (has_scales,))
    _check_value(
        folder, "vision_resolution", top.get("vision_resolution") or -1, (-1, side)
    )  # the size of the position table
    scales = _scales(folder, top) if has_scales else ()
    image = _image_token(folder, text)
    projector = raw["mm_projector"].get("mm_projector_type", top.get("mm_projector_type"))
    _check_value(folder / "mm_projector", "mm_projector_type", projector, PROJECTORS)
    return (NvilaConfig if scales else NvilaLiteConfig)(
        text_config=text,
        vision_config=vision,
        projector_type=projector,
        image_token_id=image,
        video_token_id=image + 1,
        newlines=_count_line_breaks(folder, top, cut) + _CUTS[cut],
        min_tiles=top.get("min_tiles") or 1,
        max_tiles=1 if cut == "resize" else top.get("max_tiles") or 12,
        s2_scales=scales,
        name_or_path=str(folder),
    )


def check_parts(folder: Path, model_type: str) -> None:
    """Raise ModelError for a model of one of :data:`IN_THREE_FOLDERS` with missing folders."""
    missing = [part for part in PARTS if not (folder / part / "config.json").is_file()]
    if missing:
        raise ModelError(
            f"{folder} has model_type {model_type!r}, which Octavo reads only from VILA's three folders "
            f"({', '.join(PARTS)}), but {folder / missing[0]} has no config.json. Download the full model."
        )


def add_media_tokens(tokenizer: Any) -> None:
    """Add the missing tokens of media to a tokenizer, with the next ids, like VILA's loading code."""
    tokenizer.add_tokens([token for token in MEDIA if token not in tokenizer.get_vocab()], special_tokens=True)


def find_template(folder: Path, tokenizer: Any) -> str | None:
    """Return the chat template that VILA's code has for such a folder, or None if it uses the tokenizer's. Raises
    ModelError for a template that Octavo does not have."""
    top = read_json(folder / "config.json")
    name = top.get("chat_template")
    if name is None and _image_cut(top) == "resize" and "image_encoder" not in top:
        name = vila_1_5_template(tokenizer.get_vocab())
    if name is not None and name not in TEMPLATES:
        raise ModelError(
            f"{folder}/config.json names the chat template {name!r:.80} of VILA's code, but Octavo has only "
            f"{', '.join(TEMPLATES)}. Write it as {folder}/llm/chat_template.jinja."
        )
    return None if name is None else TEMPLATES[name]


def _image_cut(top: dict[str, Any]) -> Any:
    return top.get("image_aspect_ratio") or "resize"


def _count_line_breaks(folder: Path, top: dict[str, Any], cut: str) -> int:
    """Return the number of line breaks that the image encoder appends to each image. VILA 1.5 has no encoder and
    none."""
    stated = top.get("image_encoder")
    if stated is None:
        return 0 if cut == "resize" else 1
    if isinstance(stated, str):
        stated = safe_read.parse_json(stated, folder / "config.json", ModelError)
    for key, known in (("_target_", (_ENCODER,)), ("start_tokens", (None,)), ("end_tokens", ("\n", None))):
        _check_value(folder, f"image_encoder.{key}", stated.get(key, known[0]), known)
    return int(stated.get("end_tokens", "\n") is not None)


def _scales(folder: Path, top: dict[str, Any]) -> tuple[int, ...]:
    """Return the sides of dynamic S2, the smallest first; features of all are resized to the largest."""
    stated = top.get("s2_scales") or _PUBLISHED
    if not isinstance(stated, str) or not re.fullmatch(r"\d{1,5}( *, *\d{1,5})*", stated):
        raise ModelError(
            f"{folder}/config.json gives s2_scales {stated!r:.80}, which must be sides in pixels, such as "
            f"{_PUBLISHED!r}. Correct the field."
        )
    scales = tuple(sorted(map(int, stated.split(","))))
    key = "s2_resize_output_to_scale_idx"
    # VILA uses the smallest scale if the field is missing.
    _check_value(folder, key, top.get(key), (-1, len(scales) - 1))
    return scales


def _has_head(folder: Path, vision: dict[str, Any]) -> bool:
    """Return whether the tower has a pooling head: older configurations do not have the field, so the weights are
    inspected."""
    if "vision_use_head" in vision or not list((folder / "vision_tower").glob("*.safetensors")):
        return bool(vision.get("vision_use_head", False))
    headers = check_weight_files(folder / "vision_tower")
    return any(entry.name.startswith("vision_model.head.") for header in headers for entry in header.entries)


def _image_token(folder: Path, text: dict[str, Any]) -> int:
    """Return the id of `<image>`: the tokenizer's, or the second one after the table of embeddings, which has rows for
    the tokens before media."""
    file = folder / "llm" / "tokenizer_config.json"
    known = (read_json(file) if file.exists() else {}).get("added_tokens_decoder") or {}
    ids = [int(number) for number, token in known.items() if token.get("content") == IMAGE]
    return ids[0] if ids else int(text["vocab_size"]) + MEDIA.index(IMAGE)


def _check_value(folder: Path, key: str, value: object, known: Collection[object]) -> None:
    if value not in known:
        raise ModelError(
            f"{folder}/config.json gives {key} {value!r:.80}, but Octavo's NVILA supports only "
            f"{' or '.join(map(repr, known))}."
        )
