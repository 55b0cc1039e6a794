"""How the names of files end, and so what they are taken for before they are opened. Who asks for several endings of
data asks here; how each kind of rows is read is the table of `octavo.data.formats.registry`."""

from __future__ import annotations

PARQUET = (".parquet",)
JSON_LINES = (".jsonl", ".ndjson")
JSON = (".json",)
CSV = (".csv", ".tsv")
TAR = (".tar",)
ARROW = (".arrow",)  # of a folder that `datasets` saved
ROWS = (*PARQUET, *JSON_LINES, *JSON, *CSV, *TAR)
#: of all that a configuration names, none of which is a repository
NAMED = (*ROWS, *ARROW, ".safetensors", ".yaml", ".yml")
