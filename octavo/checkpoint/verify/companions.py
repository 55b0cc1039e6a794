"""Checks the files of a folder other than weights and config.json: each file that a loader reads is read and used once.

Tokenizer, processor and chat template are loaded as Octavo itself loads them (`models.load_processor`), and the
template renders a question. The names of all other files are reported, so that "No problems found" is not taken to
include them; servers read some of them (templates in additional_chat_templates/, hf_quant_config.json of ModelOpt).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from octavo import models
from octavo.base import encryption, safe_read
from octavo.base.model_families import trains_on
from octavo.checkpoint.checksums import MARKER, is_changed, read_note, sha256
from octavo.checkpoint.stock_model import StockModel
from octavo.checkpoint.verify.findings import Findings
from octavo.models.errors import ForeignTokenizerError, ModelError, NoEndTokenError, VocabularySizeError
from octavo.models.folder import chat
from octavo.models.folder.folder import companions, read_companion
from octavo.models.processors import stop_tokens
from octavo.models.processors.vocabulary import check_rows_on_disk, check_vocabulary

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_READ_ELSEWHERE = ("config.json", "adapter_config.json", MARKER, encryption.LIST)
_QUESTION = "What is in the picture?"


def check_files(folder: Path, findings: Findings) -> tuple[str, ...]:
    """Check the entries of the folder that have no finding yet: each must be a regular file or folder, inside the
    folder, with a printable name. Returns the names that no check has read: all except weights, settings and
    companions."""
    companion_names = {file.name for file in companions(folder)}
    failed = {finding.file for finding in findings}
    unread, encrypted = [], []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        name, path = entry.name, Path(entry.path)
        if not name.isprintable():
            findings.fail("name", name)
        if name in failed:  # an earlier check has reported this file
            continue
        try:
            kind = safe_read.describe_file_type(path)
        except OSError as error:
            findings.fail("link/broken", name, target=os.readlink(path), why=error.strerror)
            continue
        if (target := safe_read.link_target_outside(path, folder)) is not None:
            findings.warn("link/outside", name, target=target)
        if kind not in (None, "a folder") or (kind is not None and name in _READ_ELSEWHERE):
            findings.fail("special", name, what=kind)
        elif name not in (*companion_names, *_READ_ELSEWHERE) and ".safetensors" not in name:
            unread.append(name + "/" * (kind is not None))
        elif kind is None and encryption.is_encrypted(path):
            encrypted.append(name)
    if encrypted:
        findings.warn("encrypted", encrypted[0], count=len(encrypted), folder=folder)
    return tuple(unread)


def check_companions(folder: Path, raw: Mapping[str, Any], stock: StockModel | None, findings: Findings) -> None:
    """Check the files that a server needs with the weights: tokenizer, chat template and, for models of images or
    audio, the processor. `raw`: config.json."""
    before = len(findings.items)
    check_companion_files(folder, findings)
    damaged = len(findings.items) > before or _reports_generation_config(findings)
    tokenizer = any((folder / name).is_file() for name in _TOKENIZERS)
    if not tokenizer:
        findings.warn("no-tokenizer", folder=folder, files=", ".join(_TOKENIZERS[:2]))
    processor = any((folder / n).is_file() for n in ("preprocessor_config.json", "processor_config.json"))
    if not processor and any(key in raw for key in ("vision_config", "audio_config")):
        findings.warn("companions/processor", folder=folder)
    # Without a model config.json is wrong, which was reported; nothing else is loaded with it.
    if damaged or stock is None or not (tokenizer or (folder / "tokenizer_config.json").is_file()):
        if not _names_template(folder):
            findings.warn("companions/template", folder=folder)
        return
    kind = "" if stock is None else stock.model.config.model_type
    part = "image" if trains_on(kind, "images") else "audio" if trains_on(kind, "sound") else None
    with findings.collect_errors("tokenizer.json", "companion"):
        try:
            loaded: Any = models.load_processor(folder) if part and processor else models.load_tokenizer(folder)
        except NoEndTokenError:  # which Octavo needs for padding, and servers do not
            findings.warn("no-end-token", "tokenizer.json", folder=folder)
            return
        except VocabularySizeError:  # reported as the shape of the embedding; the tokenizer cannot be judged
            return
        _check_ids(loaded, stock, folder, findings)
        if not loaded.chat_template:
            findings.warn("companions/template", folder=folder)
        else:
            _check_template(loaded, folder, part, findings)
            _check_end_token(loaded, folder, findings)


def check_companion_files(folder: Path, findings: Findings) -> None:
    """Read every companion of a folder and report those that are not what their name says."""
    failed = {finding.file for finding in findings}
    for file in companions(folder):
        if file.name in failed:  # generation_config.json, which was checked with config.json
            continue
        with findings.collect_errors(file.name, "companion"):
            read_companion(file)


def _reports_generation_config(findings: Findings) -> bool:
    """Whether generation_config.json is damaged: Octavo then loads no tokenizer from the folder."""
    return any(finding.kind.startswith("generation-config") for finding in findings)


def _names_template(folder: Path) -> bool:
    config = folder / "tokenizer_config.json"
    return any((folder / name).is_file() for name in _TEMPLATES) or (
        config.is_file() and b'"chat_template"' in safe_read.read_bytes(config, ModelError)
    )


def _check_ids(loaded: Any, stock: StockModel | None, folder: Path, findings: Findings) -> None:
    """Report tokens without a row in the embeddings and letters without a token. Media tokens may have no row, because
    some families do not look them up. Such tokens that every conversation contains are a failure."""
    embeddings = None if stock is None else stock.model.get_input_embeddings()
    if stock is None or embeddings is None:
        return
    assert isinstance(embeddings.weight, Tensor)
    rows = embeddings.weight.shape[0]
    without_row = set(loaded.image_token_ids if getattr(stock.model, "media_outside", False) else ())
    tokenizer = getattr(loaded, "tokenizer", loaded)
    try:
        check_rows_on_disk(len(tokenizer), rows, folder)
    except VocabularySizeError:  # reported as the shape of the embedding; the tokenizer cannot be judged by it
        return
    largest = max((number for number in tokenizer.get_vocab().values() if number not in without_row), default=-1)
    if largest >= rows:
        findings.warn("token-ids", "tokenizer.json", largest=largest, rows=rows)
    try:
        check_vocabulary(loaded, rows, folder)
    except ForeignTokenizerError as error:
        findings.fail("foreign-tokenizer", "tokenizer.json", text=str(error))
    if letters := models.missing_letters(loaded, folder):
        findings.warn("letters", "tokenizer.json", count=len(letters), first=", ".join(letters[:12]))


def _check_end_token(loaded: Any, folder: Path, findings: Findings) -> None:
    """Warn if generation does not stop at the token that ends answers in the chat template.

    vLLM and SGLang also stop at the end token of the tokenizer, transformers only at tokens in generation_config.json.
    """
    if _reports_generation_config(findings):
        return
    with findings.collect_errors("generation_config.json", "generation-config"):
        end = stop_tokens.missing_end_token(folder, loaded)
        if end is None:
            return
        stated = stop_tokens.stated_stop_ids(folder)
        tokenizer = getattr(loaded, "tokenizer", loaded)
        kind = "end-token-of-tokenizer" if end.id == tokenizer.eos_token_id else "end-token"
        findings.warn(
            kind,
            "generation_config.json",
            end=end,
            stated=stated,
            ends=stop_tokens.required_stop_ids(folder, end, tokenizer),
        )


def _check_template(loaded: Any, folder: Path, part: str | None, findings: Findings) -> None:
    """Render a question with the chat template, as text or as a list of parts with an image or audio (`part`) first.

    It is enough if one of the two forms works, because templates differ in the form that they accept.
    """
    words = [{"role": "user", "content": _QUESTION}]
    first = [] if part is None else [{"type": part}]
    parts = [{"role": "user", "content": [*first, {"type": "text", "text": _QUESTION}]}]
    try:
        chat.check_template(loaded, folder)
    except ModelError as error:
        findings.fail("template", "chat template", problem=str(error))
        return
    problem = ""
    for messages in (parts, words) if part else (words, parts):
        try:
            if _QUESTION in chat.render(loaded, messages, add_generation_prompt=True):
                return
            problem = problem or "the rendered text does not contain the question"
        except ModelError as error:
            problem = problem or str(error)
    findings.fail("template", "chat template", problem=problem)


def check_checksums(folder: Path, quick: bool, findings: Findings) -> None:
    """Compare files with the SHA-256 that an export recorded for them; `quick` skips shards."""
    if not (folder / MARKER).is_file():
        return
    sums: dict[str, str] = {}
    with findings.collect_errors(MARKER, "export-note"):
        note = read_note(folder)
        sums = note["sha256"]
        if is_changed(note):
            findings.fail("export-note/changed", MARKER)
    for name, noted in sums.items():
        file = folder / name
        shard = name.endswith(".safetensors")
        if not os.path.lexists(file):
            findings.fail("sum/missing", name)
        elif not (shard and quick) and file.is_file() and sha256(file) != noted:
            (findings.fail if shard else findings.warn)("sum/shard" if shard else "sum/other", name)
