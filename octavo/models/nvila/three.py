"""The original layout of VILA and NVILA: one folder each for decoder, tower and projector, and a configuration above.

    config.json       how images are cut and which layer of the tower is read
    llm/              config.json, weights, tokenizer
    vision_tower/     config.json, weights, preprocessor_config.json
    mm_projector/     config.json, weights

The parts are found by the names of their folders: the paths in config.json lead to the disk of whoever wrote it.
Folders that name Python code beside this (`auto_map`) are read by what they hold; their code never runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.models.errors import ModelError
from octavo.models.folder import PARTS, check_sizes, read_json
from octavo.models.nvila.configuration import NvilaConfig, NvilaLiteConfig

SENTINEL, IMAGE, VIDEO = MEDIA = ("<vila/sentinel>", "<image>", "<vila/video>")
#: how images are cut -> line breaks at the end of each tile, with several scales of each image
_CUTS = {"dynamic": 2, "dynamic_s2": 1, "resize": 1}
_SCALES = "448,896,1344"


def read_three(folder: Path) -> NvilaLiteConfig:
    """The configuration of a folder of three. Raises ModelError for what Octavo's model code does not compute."""
    raw = {part: read_json(folder / part / "config.json") for part in PARTS}
    top = read_json(folder / "config.json")
    for file in (folder, *(folder / part for part in PARTS)):
        check_sizes(file / "config.json")
    cut = top.get("image_aspect_ratio", "resize")
    _one_of(folder, "image_aspect_ratio", cut, _CUTS)
    _one_of(folder, "mm_vision_select_layer", top.get("mm_vision_select_layer", -2), (-2,))
    _one_of(folder, "mm_vision_select_feature", top.get("mm_vision_select_feature", "cls_patch"), ("cls_patch",))
    text, vision = dict(raw["llm"]), dict(raw["vision_tower"])
    _one_of(folder / "llm", "model_type", text.get("model_type"), ("qwen2", "llama"))
    for part in (text, vision):
        for key in ("auto_map", "_name_or_path", "architectures"):
            part.pop(key, None)
    newlines = _CUTS[cut]
    if cut == "resize" and "image_encoder" not in top:  # VILA 1.5 came before the encoders that end an image
        newlines = 0
    image = _image_token(folder, text)
    stated = str(top.get("s2_scales") or _SCALES) if cut == "dynamic_s2" else ""
    scales = tuple(int(scale) for scale in stated.split(",") if scale)
    return (NvilaConfig if scales else NvilaLiteConfig)(
        text_config=text,
        vision_config=vision,
        projector_type=raw["mm_projector"].get("mm_projector_type", top.get("mm_projector_type")),
        image_token_id=image,
        video_token_id=image + 1,
        newlines=newlines,
        min_tiles=top.get("min_tiles") or 1,
        max_tiles=1 if cut == "resize" else top.get("max_tiles") or 12,
        s2_scales=scales,
        tie_word_embeddings=bool(text.get("tie_word_embeddings", False)),
        name_or_path=str(folder),
    )


def add_media(tokenizer: Any) -> None:
    """Give a tokenizer the tokens of media that it lacks, which take the next ids, as VILA does when it loads one."""
    tokenizer.add_tokens([token for token in MEDIA if token not in tokenizer.get_vocab()], special_tokens=True)


def _image_token(folder: Path, text: dict[str, Any]) -> int:
    """The id of `<image>`: the tokenizer's, or the second behind the table, whose rows are the tokens before media."""
    file = folder / "llm" / "tokenizer_config.json"
    known = (read_json(file) if file.exists() else {}).get("added_tokens_decoder") or {}
    found = [int(number) for number, token in known.items() if token.get("content") == IMAGE]
    return found[0] if found else int(text["vocab_size"]) + MEDIA.index(IMAGE)


def _one_of(folder: Path, key: str, found: Any, known: Any) -> None:
    if found not in known:
        raise ModelError(
            f"{folder}/config.json gives {key} {found!r:.80}, and Octavo's NVILA computes "
            f"{' or '.join(map(repr, known))} alone."
        )
