"""What stands in a folder beside weights and config.json: every file that a loader reads is read, and used once.

Tokenizer, processor and chat template are loaded as Octavo itself loads them (`models.load_processor`), and the
template writes a question. The names of what else is there are told, so that nobody takes "nothing is wrong" for a word
about them; servers read some of it (templates in additional_chat_templates/, hf_quant_config.json of ModelOpt).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo import models
from octavo.base import encryption, safe_read
from octavo.base.model_families import trains_on
from octavo.checkpoint.checksums import MARKER, is_changed, read_note, sha256
from octavo.checkpoint.stock_model import Stock
from octavo.checkpoint.verify.findings import Findings
from octavo.models.errors import ModelError
from octavo.models.folder import chat
from octavo.models.folder.folder import companions, read_companion
from octavo.models.processors import stop_tokens
from octavo.models.processors.vocabulary import check_vocabulary

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_READ = ("config.json", "adapter_config.json", MARKER, encryption.LIST)
_QUESTION = "What is in the picture?"


def check_files(folder: Path, found: Findings) -> tuple[str, ...]:
    """Every entry of the folder that nothing was found wrong with yet: regular files and folders, inside it, with names
    that can be shown. Returns the names of those that were not read: not weights, settings or what stands beside."""
    beside = {file.name for file in companions(folder)}
    failed = {finding.file for finding in found}
    unread, encrypted = [], []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        name, path = entry.name, Path(entry.path)
        if not name.isprintable():
            found.fail("name", name)
        if name in failed:
            continue
        try:
            kind = safe_read.kind_of(path)
        except OSError as error:
            found.fail("link/broken", name, target=os.readlink(path), why=error.strerror)
            continue
        if (target := safe_read.outside(path, folder)) is not None:
            found.warn("link/outside", name, target=target)
        if kind not in (None, "a folder") or (kind is not None and name in _READ):
            found.fail("special", name, what=kind)
        elif name not in (*beside, *_READ) and ".safetensors" not in name:
            unread.append(name + "/" * (kind is not None))
        elif kind is None and encryption.is_encrypted(path):
            encrypted.append(name)
    if encrypted:
        found.warn("encrypted", encrypted[0], count=len(encrypted), folder=folder)
    return tuple(unread)


def check_companions(folder: Path, raw: Mapping[str, Any], stock: Stock | None, found: Findings) -> None:
    """Tokenizer, chat template and, for models of images or sound, the processor: what a server needs beside weights.
    `raw`: what config.json says."""
    before = len(found.items)
    read_all(folder, found)
    damaged = len(found.items) > before
    tokenizer = any((folder / name).is_file() for name in _TOKENIZERS)
    if not tokenizer:
        found.warn("companions/tokenizer", folder=folder, files=", ".join(_TOKENIZERS[:2]))
    made = any((folder / n).is_file() for n in ("preprocessor_config.json", "processor_config.json"))
    if not made and any(key in raw for key in ("vision_config", "audio_config")):
        found.warn("companions/processor", folder=folder)
    if damaged or not (tokenizer or (folder / "tokenizer_config.json").is_file()):
        if not _names_template(folder):
            found.warn("companions/template", folder=folder)
        return
    kind = "" if stock is None else stock.model.config.model_type
    part = "image" if trains_on(kind, "images") else "audio" if trains_on(kind, "sound") else None
    with found.failing("tokenizer.json", "companion"):
        loaded: Any = models.load_processor(folder) if part and made else models.load_tokenizer(folder)
        _check_ids(loaded, stock, folder, found)
        if not loaded.chat_template:
            found.warn("companions/template", folder=folder)
        else:
            _write_question(loaded, folder, part, found)
            _check_end(loaded, folder, found)


def read_all(folder: Path, found: Findings) -> None:
    """Every companion of a folder, found to be what its name says."""
    for file in companions(folder):
        with found.failing(file.name, "companion"):
            read_companion(file)


def _names_template(folder: Path) -> bool:
    config = folder / "tokenizer_config.json"
    return any((folder / name).is_file() for name in _TEMPLATES) or (
        config.is_file() and b'"chat_template"' in safe_read.read_bytes(config, ModelError)
    )


def _check_ids(loaded: Any, stock: Stock | None, folder: Path, found: Findings) -> None:
    """That the model has a row of embeddings for each token that it looks up, which some families do not for media, and
    that letters have tokens. Raises ModelError for tokens of every conversation that are beyond the embedding."""
    embeddings = None if stock is None else stock.model.get_input_embeddings()
    if stock is None or embeddings is None:
        return
    rows = embeddings.weight.shape[0]
    never = set(loaded.image_token_ids if getattr(stock.model, "media_outside", False) else ())
    tokenizer = getattr(loaded, "tokenizer", loaded)
    largest = max((number for number in tokenizer.get_vocab().values() if number not in never), default=-1)
    if largest >= rows:
        found.warn("token-ids", "tokenizer.json", largest=largest, rows=rows)
    check_vocabulary(loaded, rows, folder)
    if letters := models.missing_letters(loaded, folder):
        found.warn("letters", "tokenizer.json", count=len(letters), first=", ".join(letters[:12]))


def _check_end(loaded: Any, folder: Path, found: Findings) -> None:
    """That generation stops at the token by which the chat template ends answers. vLLM and SGLang stop at the end token
    of the tokenizer too, transformers at those of generation_config.json only."""
    with found.failing("generation_config.json"):
        end = stop_tokens.unstated_end(folder, loaded)
        if end is None:
            return
        stated = stop_tokens.stated_ends(folder)
        tokenizer = getattr(loaded, "tokenizer", loaded)
        kind = "end-token-of-tokenizer" if end.id == tokenizer.eos_token_id else "end-token"
        found.warn(
            kind, "generation_config.json", end=end, stated=stated, ends=stop_tokens.ends_with(folder, end, tokenizer)
        )


def _write_question(loaded: Any, folder: Path, part: str | None, found: Findings) -> None:
    """The template at work: a question in plain words or, where it wants them, in parts, behind an image or a sound
    (`part`)."""
    words = [{"role": "user", "content": _QUESTION}]
    first = [] if part is None else [{"type": part}]
    parts = [{"role": "user", "content": [*first, {"type": "text", "text": _QUESTION}]}]
    try:
        chat.check_template(loaded, folder)
    except ModelError as error:
        found.fail("template", "chat template", said=str(error))
        return
    said = ""
    for messages in (parts, words) if part else (words, parts):
        try:
            if _QUESTION in chat.render(loaded, messages, add_generation_prompt=True):
                return
            said = said or "the text that it writes lacks the question"
        except ModelError as error:
            said = said or str(error)
    found.fail("template", "chat template", said=said)


def check_sums(folder: Path, quick: bool, found: Findings) -> None:
    """The SHA-256 that an export noted of the files that it wrote; `quick` leaves out those of shards."""
    if not (folder / MARKER).is_file():
        return
    sums: dict[str, str] = {}
    with found.failing(MARKER, "export-note"):
        note = read_note(folder)
        sums = note["sha256"]
        if is_changed(note):
            found.fail("export-note/changed", MARKER)
    for name, noted in sums.items():
        file = folder / name
        shard = name.endswith(".safetensors")
        if not os.path.lexists(file):
            found.fail("sum/missing", name)
        elif not (shard and quick) and file.is_file() and sha256(file) != noted:
            (found.fail if shard else found.warn)("sum/shard" if shard else "sum/other", name)
