"""Columns of JSON text in Arrow tables: the type that `datasets` uses for values of several types, and parquet's JSON.

From version 4 on `datasets` gives a column, or a field of it, the type `Json()` if its type differs between rows, such
as a `content` that is a text in one row and a list of parts in another. In Arrow it is the extension type `arrow.json`,
and the metadata of the schema lists the features. Each such value is parsed, which restores the rows as JSON had them.

In one respect this cannot be reversed: `datasets` stores a text that is itself valid JSON unchanged. The answers "5",
"true" and '{"a": 1}' would come back as a number, a flag and an object. So under a key that holds text, the stored text
is taken, unless it is another value that the key allows (:data:`_ALLOWED`). Remaining ambiguities are resolved as
`datasets` does: the stored text "x" with its quotation marks is x, and null is null.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from octavo.base.safe_read import Unreadable, parse_json

ChunkSampler = Mapping[str, Any] | list[Any] | bool
"""Where JSON texts are: True for the value itself, a mapping for the fields of a struct, [places of an entry]."""

_EXTENSION = "arrow.json"
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
#: numbers that are not valid JSON, which `datasets` still takes for JSON: 007, 5.
_ODD_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]*)?")
_NAMES: ContextVar[Mapping[str, str]] = ContextVar("ours", default=MappingProxyType({}))
_TURN_KEYS = ({"role", "content"}, {"from", "value"})


def _is_parts(value: object, text: str) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(isinstance(entry, dict) and "type" in entry for entry in value)
    )


def _is_turns(value: object, text: str) -> bool:
    turns = value if isinstance(value, list) else [value]
    return bool(turns) and all(isinstance(entry, dict) and any(keys <= entry.keys() for keys in _TURN_KEYS)
                               for entry in turns)  # fmt: skip


def _is_answers(value: object, text: str) -> bool:
    """Return True for a list of answers. A list with spaces between its entries was a text: `datasets` writes
    none."""
    is_answer_list = (
        isinstance(value, list) and bool(value) and all(type(entry) in (str, int, float) for entry in value)
    )
    return is_answer_list and not any(map(str.isspace, _STRING.sub("", text)))


def _no_value(value: object, text: str) -> bool:
    return False


_ALLOWED: dict[str, Callable[[object, str], bool]] = {
    "content": _is_parts,
    **dict.fromkeys(("prompt", "completion", "chosen", "rejected"), _is_turns),
    "answer": _is_answers,
    **dict.fromkeys(
        ("value", "text", "texts", "instruction", "input", "output", "system", "reasoning_content", "reasoning",
         "thinking"),
        _no_value,
    ),
}  # fmt: skip
"""Keys that hold a text -> predicate whether a stored JSON value is another value that the key allows."""


@contextmanager
def use_column_names(ours: Mapping[str, str]) -> Iterator[None]:
    """In the block, columns with these names (file's name -> Octavo's name) are read by the rules of the new name."""
    before = _NAMES.set(ours)
    try:
        yield
    finally:
        _NAMES.reset(before)


def octavo_name(column: str) -> str:
    return _NAMES.get().get(column, column)


def places_in(schema: pa.Schema) -> dict[str, ChunkSampler]:
    """Column -> places of its JSON texts, for columns that have any."""
    try:
        hash(schema)
    except TypeError:  # older versions of pyarrow cannot hash a schema with metadata
        return _places_in(schema)
    return _known_places(schema)


@lru_cache(maxsize=256)
def _known_places(schema: pa.Schema) -> dict[str, ChunkSampler]:
    return _places_in(schema)


def _places_in(schema: pa.Schema) -> dict[str, ChunkSampler]:
    features = _read_features(schema)
    places = {field.name: _field_places(field, features.get(field.name)) for field in schema}
    return {name: place for name, place in places.items() if place}


def _read_features(schema: pa.Schema) -> dict[str, Any]:
    """Return the features that `datasets` stored; {} if they are missing or damaged, because the types imply the
    same."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return {}
    return features if isinstance(features, dict) else {}


def _field_places(field: pa.Field, feature: object) -> ChunkSampler:
    if (field.metadata or {}).get(b"ARROW:extension:name") == _EXTENSION.encode():
        return True  # versions of pyarrow without this type only keep its name in the metadata
    return _type_places(field.type, feature)


def _type_places(kind: pa.DataType, feature: object) -> ChunkSampler:
    if isinstance(kind, pa.BaseExtensionType):
        return kind.extension_name == _EXTENSION
    if pa.types.is_dictionary(kind):
        return _type_places(kind.value_type, feature)
    if pa.types.is_struct(kind):
        inner = feature if isinstance(feature, dict) else {}
        places = {field.name: _field_places(field, inner.get(field.name)) for field in kind}
        return {name: place for name, place in places.items() if place}
    if isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType):
        if isinstance(feature, dict):  # List(...) or Sequence(...); older versions wrote a list of one
            feature = feature.get("feature")
        elif isinstance(feature, list):
            feature = feature[0] if feature else None
        place = _field_places(kind.value_field, feature)
        return [place] if place else False
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return text and isinstance(feature, dict) and feature.get("_type") == "Json"


def parse_values(value: Any, places: ChunkSampler, where: str, key: str) -> Any:
    """Parse the JSON texts in a value; `key` is its key in the row. Raises `Unreadable`."""
    if places is True:
        return _value(value, where, key) if isinstance(value, str) else value
    if isinstance(places, list) and isinstance(value, list):
        return [parse_values(entry, places[0], where, key) for entry in value]
    if isinstance(places, Mapping) and isinstance(value, dict):
        fields = ((name, parse_values(entry, places.get(name, False), where, name)) for name, entry in value.items())
        return {name: entry for name, entry in fields if entry is not None}
    return value


def _value(text: str, where: str, key: str) -> Any:
    try:
        value = parse_json(text, where, Unreadable, None)
    except Unreadable:
        if _ODD_NUMBER.fullmatch(text):  # it was a text, because no number is written so
            return text
        raise
    if value is None or isinstance(value, str):
        return value
    if key in _ALLOWED:
        return value if _ALLOWED[key](value, text) else text
    # Under other keys: 1.50 and -0 were texts, because the numbers are written 1.5 and 0.
    return text if isinstance(value, int | float) and json.dumps(value) != text else value
