"""Fixtures: a folder of small images, generated data sets, and the processors of tiny models."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AddedToken

from octavo.config import Dataset
from octavo.data import Encoder, Source, read
from tests.data.chat_templates import TEMPLATES


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return `models(family)`, which returns the processor of a tiny model of the family."""
    from octavo.models import load_processor
    from octavo.models.tiny import tiny

    cache: dict[str, Any] = {}

    def processor(family: str) -> Any:
        if family not in cache:
            cache[family] = load_processor(tiny.write(family, tmp_path_factory.mktemp("tiny") / family, size="mini"))
        return cache[family]

    return processor


@pytest.fixture(scope="module")
def processors(models: Callable[[str], Any]) -> dict[str, Any]:
    """Map a family to a processor whose tokenizer has the thinking marks as tokens that are not special."""
    by_family = {family: copy.copy(models(family)) for family in ("qwen3", "qwen3_vl")}
    for processor in by_family.values():
        processor.tokenizer = copy.deepcopy(processor.tokenizer)
        processor.tokenizer.add_tokens([AddedToken(mark, special=False) for mark in ("<think>", "</think>")])
        processor.embedding_rows = None  # only for models with images
    return by_family


@pytest.fixture
def encoder(processors: dict[str, Any]) -> Callable[..., Any]:
    """Return `encoder(template, args, ...)`: the encoder of a tiny model whose template is one of `TEMPLATES` or a
    given text."""

    def make_encoder(template: str, args: Any = (), kind: Any = Encoder, **options: Any) -> Any:
        processor = copy.copy(processors["qwen3" if template == "qwen3" else "qwen3_vl"])
        processor.tokenizer = copy.copy(processor.tokenizer)
        processor.chat_template = processor.tokenizer.chat_template = TEMPLATES.get(template, template)
        processor.template_args = dict(args)
        return kind(processor, 512, **options)

    return make_encoder


class Folder:
    """Writes data files and images into a temporary folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def image(self, name: str = "a.png", size: tuple[int, int] = (16, 16), color: Any = (200, 30, 60)) -> str:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, color).save(self.path / name)
        return name

    def json(self, rows: Any, name: str = "rows.json") -> Path:
        path = self.path / name
        text = "\n".join(json.dumps(r) for r in rows) if name.endswith(".jsonl") else json.dumps(rows)
        path.write_text(text)
        return path

    @staticmethod
    def llava(*texts: str, **fields: Any) -> dict[str, Any]:
        """Make a LLaVA row with alternating human and gpt turns."""
        messages = [{"from": ("human", "gpt")[n % 2], "value": text} for n, text in enumerate(texts)]
        return {"id": "r", "conversations": messages, **fields}

    def read(self, rows: Any, name: str = "rows.json", kind: str = "conversations", **fields: Any) -> Source:
        path = self.json(rows, name) if not isinstance(rows, Path) else rows
        return read(Dataset.model_construct(path=str(path), **fields), kind)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)
