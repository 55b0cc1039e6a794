"""Recognizes the framework of a file, by keys that only one framework has."""

from __future__ import annotations

import fnmatch
from types import ModuleType

from octavo.base.wording import nearest
from octavo.config.yaml.problems import brief
from octavo.importers.errors import TranslateError
from octavo.importers.frameworks import axolotl, llama_factory, llm_foundry, loongforge, mindspeed, ms_swift, vila
from octavo.importers.source.files import KEYS
from octavo.importers.source.keys import SourceConfig

_MODULES = (llm_foundry, loongforge, mindspeed, vila, llama_factory, axolotl, ms_swift)
#: name -> its module, in the order of the help text
FRAMEWORKS: dict[str, ModuleType] = {module.NAME: module for module in _MODULES}
#: alternative names
ALIASES = {"coat": "vila", "nvila": "vila", "composer": "llm-foundry", "mosaicml": "llm-foundry", "swift": "ms-swift",
        "mindspeed": "mindspeed-mm", "llamafactory": "llama-factory", "llama_factory": "llama-factory"}  # fmt: skip


def framework_by_name(name: str) -> ModuleType:
    """Return the framework with a name that the user gave. Raises TranslateError that suggests the nearest name."""
    word = name.lower().replace("_", "-")
    word = ALIASES.get(word, word)
    if word in FRAMEWORKS:
        return FRAMEWORKS[word]
    close = nearest(word, [*FRAMEWORKS, *ALIASES])
    hint = f"Did you mean {close}? " if close else ""
    raise TranslateError(f"--from {name}: no such framework. {hint}Choose from {', '.join(FRAMEWORKS)}.")


def detect_framework(source_config: SourceConfig) -> ModuleType:
    """Return the framework with the most marks in a file, at least two. Raises TranslateError if no or several
    frameworks could have written it, with the keys that were found."""
    seen: dict[str, list[str]] = {}
    keys = source_config.keys
    for name, module in FRAMEWORKS.items():
        marks = [mark for mark in module.MARKS if mark in keys or ("*" in mark and fnmatch.filter(keys, mark))]
        marks += [word for word in getattr(module, "COMMANDS", ()) if word in source_config.words] * 2
        seen[name] = marks
    ranked = sorted(seen, key=lambda name: -len(seen[name]))
    best, second = ranked[0], ranked[1]
    if len(seen[best]) >= 2 and len(seen[best]) > len(seen[second]):
        return FRAMEWORKS[best]
    first, rest = [brief(key, 60) for key in sorted(keys)[:12]], " ..." if len(keys) > 12 else ""
    if not seen[best] or len(seen[best]) < 2:
        if config_file := next((text for _, text, why in source_config.unread if why == KEYS), None):
            raise TranslateError(
                f"this script trains from {config_file}: pass both files: octavo import {config_file} SCRIPT."
            )
        raise TranslateError(
            f"the framework of this file was not recognized; its keys are {', '.join(first)}{rest}. Name it with "
            f"--from NAME: {', '.join(FRAMEWORKS)}."
        )
    candidates = [f"{name} ({', '.join(seen[name])})" for name in ranked if len(seen[name]) == len(seen[best])]
    raise TranslateError(
        f"several frameworks could have written this file: {'; '.join(candidates)}. Name one with --from NAME."
    )
