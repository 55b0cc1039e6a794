"""Judges the JSON files of a folder before its weights are converted.

A conversion copies bytes and builds no model, so it also takes families that transformers does not have. But a folder
with a damaged file would be restored with it after days of training.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from octavo.models.folder.folder import companions, read_json
from octavo.models.structure.skeleton import is_known_family, stock_config

CONFIG = "config.json"


def judge_settings(folder: Path, log: Callable[[str], None]) -> bool:
    """Raise ModelError, naming the file, for a config.json that describes no model of its family, and for other
    settings that are not JSON objects. Returns whether config.json was judged: a folder may have none, or a family that
    transformers does not know, about which `log` receives a note."""
    is_judged = False
    if os.path.lexists(folder / CONFIG):
        raw = read_json(folder / CONFIG)
        is_judged = is_known_family(raw) and "auto_map" not in raw
        if is_judged:
            stock_config(folder)
        else:
            log(f"{folder / CONFIG} {_why_not_judged(raw)}: it is copied without a check")
    for file in companions(folder):
        if file.suffix == ".json":
            read_json(file)
    return is_judged


def _why_not_judged(raw: Mapping[str, object]) -> str:
    if "auto_map" in raw:
        return "names code of its folder (auto_map)"
    named = raw.get("model_type")
    return f"has model_type {named!r:.80}, which transformers does not know" if named else "has no model_type"
