"""The tokens that end answers: those at which generation stops, and the one that the model learns in training.

A chat template ends each answer with a token (`<|im_end|>`), which the model learns as part of the answer. Generation
stops at the tokens of generation_config.json. In the folder of a base model the two differ: generation stops only at
`<|endoftext|>`, so a model that has learned the template continues until `max_new_tokens`. Octavo therefore stops at
both, and writes both to the folders that it exports.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.base import encryption
from octavo.models.errors import ForeignTokenizerError, ModelError, VocabularySizeError
from octavo.models.folder import chat
from octavo.models.folder.folder import find_file, parts_of, read_json
from octavo.models.processors.processors import load_for_chat, load_tokenizer

SETTINGS = "generation_config.json"
_ANSWER = "Octavo"  # a word that templates do not change
_QUESTION = ("user", "What is this?")
#: the second conversation is for templates that require a system message
_CONVERSATIONS = ((_QUESTION, ("assistant", _ANSWER)), (("system", "Be brief."), _QUESTION, ("assistant", _ANSWER)))
#: keys of config.json that become generation settings in transformers if a folder has no generation_config.json
_FROM_CONFIG = ("bos_token_id", "pad_token_id", "decoder_start_token_id")


@dataclass(frozen=True)
class EndToken:
    """A token that ends answers: its number in the vocabulary and its text."""

    id: int
    text: str

    def __str__(self) -> str:
        return f"{self.text} ({self.id})"


def answer_end_token(processor: Any, stops: Sequence[int] = ()) -> EndToken | None:
    """Return the token with which the chat template of a processor or a tokenizer ends an answer, and which a model
    learns.

    Returns None if there is no chat template, if the template does not end answers with a token of the vocabulary (GLM:
    the token of the next turn ends them), and if the text after an answer already contains one of `stops` (Phi-3's
    template ends the last answer with `<|end|>` and `<|endoftext|>`).
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    if not getattr(processor, "chat_template", None):
        return None
    tail = _text_after_answer(processor).rstrip()
    named = {str(token): number for number, token in tokenizer.added_tokens_decoder.items()}
    named |= {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens}
    written = [text for text in sorted(named, key=len, reverse=True) if text.strip() and text in tail]
    if any(named[text] in stops for text in written):
        return None
    return next((EndToken(named[text], text) for text in written if tail.endswith(text)), None)


def _text_after_answer(processor: Any) -> str:
    """Return the text that the template writes after an answer, or "" if it rejects all conversations."""
    in_parts = any(getattr(processor, name, None) is not None for name in ("image_processor", "sound_limits"))
    for turns in _CONVERSATIONS:
        for parts in (in_parts, not in_parts):  # the template of a tokenizer without its processor may require parts
            messages = [
                {"role": role, "content": [{"type": "text", "text": text}] if parts else text} for role, text in turns
            ]
            try:
                written = chat.render(processor, messages)
            except ModelError:  # this template may accept a different conversation
                continue
            before, answer, tail = written.rpartition(_ANSWER)
            if answer:
                return tail
    return ""


def stop_ids(settings: Any, processor: Any) -> list[int]:
    """Return the tokens that end an answer: the tokens in a model's generation `settings` (else the tokenizer's end
    token), and the token with which the chat template ends answers."""
    tokenizer = getattr(processor, "tokenizer", processor)
    ids = _as_list(getattr(settings, "eos_token_id", None)) or _as_list(tokenizer.eos_token_id)
    learned = answer_end_token(processor, ids)
    return ids if learned is None else [*ids, learned.id]


def stated_stop_ids(folder: Path) -> list[int]:
    """Return the tokens that end an answer according to a model folder's generation_config.json or, if it is missing,
    config.json, as in transformers. Raises ModelError for a file that is not a JSON object."""
    file = find_file(folder, SETTINGS)
    if os.path.lexists(file):
        return _as_list(read_json(file).get("eos_token_id"))
    raw = read_json(_decoder_folder(folder) / "config.json")
    text, ends = raw.get("text_config"), raw.get("eos_token_id")
    return _as_list(text.get("eos_token_id") if ends is None and isinstance(text, dict) else ends)


def required_stop_ids(folder: Path, learned: EndToken, tokenizer: Any | None = None) -> list[int]:
    """Return the tokens that a folder's settings must contain so that other programs stop where Octavo does
    (:func:`stop_ids`): the existing ones, or if there are none the end token of the `tokenizer` (loaded if None), and
    the `learned` one. Raises ModelError."""
    stated = stated_stop_ids(folder)
    if not stated:
        stated = _as_list((load_tokenizer(folder) if tokenizer is None else tokenizer).eos_token_id)
    return list(dict.fromkeys([*stated, learned.id]))


def missing_end_token(folder: Path, processor: Any | None = None) -> EndToken | None:
    """Return the token with which the chat template ends answers, if the folder's settings do not stop at it, else
    None.

    processor  of the folder; loaded if None

    Also returns None for a folder whose tokenizer cannot be loaded, which `octavo verify` reports. Raises
    ForeignTokenizerError for a tokenizer of a different model, VocabularySizeError for such a config.json, and
    ModelError as :func:`stated_stop_ids`.
    """
    if processor is None:
        try:
            processor = load_for_chat(folder)
        except (ForeignTokenizerError, VocabularySizeError):  # the folder that is written could not be loaded either
            raise
        except ModelError:  # weights can be written without a tokenizer
            return None
    tokenizer = getattr(processor, "tokenizer", processor)
    # transformers uses only the settings file if there is one, else the defaults of the configuration's class.
    default_ids = [] if os.path.lexists(find_file(folder, SETTINGS)) else _as_list(tokenizer.eos_token_id)
    return answer_end_token(processor, stated_stop_ids(folder) or default_ids)


def add_end_token(source: Path, written: Path, encrypted: encryption.Folder | None = None) -> EndToken | None:
    """Add the token of :func:`missing_end_token` to those that end answers in the generation_config.json of `written`,
    a folder that is being written from `source`, and return it. The file is created if it is missing. Raises
    ModelError."""
    learned = missing_end_token(source)
    if learned is None:
        return None
    # read from the source: an encrypted folder cannot be read until its list of files is written
    file = find_file(written, SETTINGS)
    if os.path.lexists(file):
        settings = read_json(find_file(source, SETTINGS))
    else:
        file = _decoder_folder(written) / SETTINGS
        raw = read_json(_decoder_folder(source) / "config.json")
        settings = {key: raw[key] for key in _FROM_CONFIG if raw.get(key) is not None}
    settings["eos_token_id"] = required_stop_ids(source, learned)
    encryption.write_file(file, (json.dumps(settings, indent=2) + "\n").encode(), encrypted)
    return learned


def _decoder_folder(folder: Path) -> Path:
    """Return the folder of the language model, which has the generation settings."""
    parts = parts_of(folder)
    return folder / parts[0] if parts else folder


def _as_list(value: Any) -> list[int]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
