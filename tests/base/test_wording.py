"""Counts in messages."""

from __future__ import annotations

import pytest

from octavo.base.wording import count_noun


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (0, "file", "0 files"), (1, "tensor", "1 tensor"), (2, "FP8 weight", "2 FP8 weights"),
        (1, "micro-batch", "1 micro-batch"), (3, "micro-batch", "3 micro-batches"), (2, "index", "2 indexes"),
    ],
)  # fmt: skip
def test_nouns_agree_with_their_number(number: int, noun: str, text: str) -> None:
    assert count_noun(number, noun) == text
