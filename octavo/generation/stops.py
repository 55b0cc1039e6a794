"""What ends a completion: a token, or a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from octavo.models.processors import stop_tokens

_SPARE = 8
"""Tokens looked at beyond the bytes of the longest text: special tokens hold none."""


@dataclass(frozen=True)
class Stops:
    """`ids`: tokens that end a completion · `texts`: those that end it when they appear · `tokenizer`: decodes."""

    ids: np.ndarray
    texts: tuple[str, ...]
    tokenizer: Any

    @classmethod
    def of(cls, model: Any, processor: Any, texts: tuple[str, ...]) -> Stops:
        """The tokens of the model's generation settings (or the tokenizer's end), and the one by which the chat
        template of `processor`, a processor or a tokenizer, ends answers (`endings.stop_ids`)."""
        ids = stop_tokens.stop_ids(getattr(model, "generation_config", None), processor)
        return cls(np.array(ids, dtype=np.int64), tuple(texts), getattr(processor, "tokenizer", processor))

    def by_token(self, tokens: np.ndarray) -> np.ndarray:
        """bool [B]: which tokens [B] end their completion."""
        return np.isin(tokens, self.ids)

    @cached_property
    def reach(self) -> int:
        """Tokens at the end of a completion that are looked at for a text: a token is a byte at least."""
        return max((len(text.encode()) for text in self.texts), default=0) + _SPARE

    def by_text(self, tokens: Sequence[int]) -> bool:
        """Whether the last tokens of a completion, `reach` of them or all, hold one of the texts."""
        tail = self.tokenizer.decode(tokens, skip_special_tokens=False)
        return any(text in tail for text in self.texts)
