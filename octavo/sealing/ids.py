"""Numbers of tokens in configurations: `image_token_id`, `eos_token_id`, lists of suppressed ones."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from octavo.sealing.inputs import tokens

_KEYS = re.compile(r"(^|_)(token_ids?|token_index|suppress_tokens|bad_words_ids|force_words_ids)$|^forced_decoder_ids$")


def with_ids(raw: Any, vocab: np.ndarray, back: bool = False, key: str = "") -> Any:
    """JSON of a configuration with the numbers of tokens that it names in the sealed vocabulary."""
    if isinstance(raw, dict):
        return {name: with_ids(value, vocab, back, str(name)) for name, value in raw.items()}
    if isinstance(raw, list):
        return [with_ids(value, vocab, back, key) for value in raw]
    if _KEYS.search(key) and type(raw) is int:
        return int(tokens(np.asarray([raw]), vocab, back)[0])
    return raw


def named_ids(raw: Any, key: str = "") -> set[int]:
    """The numbers of tokens that a configuration names."""
    if isinstance(raw, dict):
        return set().union(*(named_ids(value, str(name)) for name, value in raw.items()))
    if isinstance(raw, list):
        return set().union(*(named_ids(value, key) for value in raw))
    return {raw} if _KEYS.search(key) and type(raw) is int and raw >= 0 else set()
