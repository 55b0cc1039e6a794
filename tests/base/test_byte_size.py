"""Sizes in messages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from octavo.base.byte_size import format_bytes


@pytest.mark.parametrize(
    ("size", "text", "binary_text"),
    [
        (0, "0 B", "0 B"), (999, "999 B", "999 B"), (1000, "1 KB", "0.977 KiB"), (1024, "1.02 KB", "1 KiB"),
        (412_000, "412 KB", "402 KiB"), (999_499, "999 KB", "976 KiB"), (999_500, "1 MB", "976 KiB"),
        (162_345_678, "162 MB", "155 MiB"), (269_060_552, "269 MB", "257 MiB"), (15e9, "15 GB", "14 GiB"),
        (2**40, "1.1 TB", "1 TiB"), (12345e12, "12,345 TB", "11,228 TiB"), (-412_000, "-412 KB", "-402 KiB"),
    ],
)  # fmt: skip
def test_sizes_have_three_digits_and_a_fitting_unit(size, text, binary_text):
    assert (format_bytes(size), format_bytes(size, binary=True)) == (text, binary_text)


def test_messages_format_sizes_in_one_place():
    """No message divides bytes by 10^6 or 2^30 and rounds: 0.4 MB became "0 MB". `gb` has columns of one decimal, and
    the tables of `octavo bench` name the unit in their head."""
    allowed = {"octavo/train/estimate/memory/fit.py", "octavo/bench/record.py", "octavo/report/run/page_parts.py"}
    rounded = re.compile(r"/ ?(?:1e[69]|2 ?\*\* ?[23]0|GIB)(?::\.\d[fg])?\} [MG]i?B")
    root = Path(__file__).resolve().parents[2]
    files = {
        str(file.relative_to(root)) for file in (root / "octavo").rglob("*.py") if rounded.search(file.read_text())
    }
    assert files <= allowed
