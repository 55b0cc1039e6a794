"""Suffixes of file names, which decide how a file is opened. Every list of several data suffixes is defined here; the
reader of each format of rows is in the table of `octavo.data.formats.registry`."""

from __future__ import annotations

PARQUET = (".parquet",)
JSON_LINES = (".jsonl", ".ndjson")
JSON = (".json",)
CSV = (".csv", ".tsv")
TAR = (".tar",)
ARROW = (".arrow",)  # in a folder that `datasets` saved
TEXT = (".txt", ".md")  # a file is a document of phase pretrain
ROWS = (*PARQUET, *JSON_LINES, *JSON, *CSV, *TAR)
#: of all files that a configuration may name: a path with such a suffix is not a repository's name
ALL_FILES = (*ROWS, *TEXT, *ARROW, ".safetensors", ".yaml", ".yml")
