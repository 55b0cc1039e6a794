"""Export a configuration as resolved YAML that loads again, and the JSON schema for editors."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import RoundTripRepresenter

from octavo.config.config import Config
from octavo.config.load import plain
from octavo.config.yaml.document import scalar

SCHEMA_FILE = Path(__file__).with_name("octavo.schema.json")


class _Representer(RoundTripRepresenter):
    """Quotes every text that Octavo's YAML reader would read back as another value."""

    def represent_text(self, text: str) -> ScalarNode:
        # Unquoted, a line or control character is folded or dropped; in double quotes it is escaped.
        needs_quotes = not isinstance(scalar(text), str) or not text.isprintable()
        return self.represent_scalar("tag:yaml.org,2002:str", text, style='"' if needs_quotes else None)


_Representer.add_representer(str, _Representer.represent_text)


def to_yaml(config: Config) -> str:
    """Return the resolved configuration with every default. Loading it returns an equal :class:`Config`, except for a
    word of an older version, which is written in its current form."""
    return "".join(_lines(plain(config)))


def _lines(tree: dict[str, Any]) -> Iterator[str]:
    """Yield the mapping in block style. Entries are dumped one by one and cached, because the configurations of a
    process share most of them."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield _dump_entry(json.dumps({key: 0})).removesuffix(" 0\n") + "\n"
            yield from (f"  {line}" for line in _lines(value))
        else:
            yield from _dump_entry(json.dumps({key: value})).splitlines(keepends=True)


@functools.lru_cache(maxsize=4096)
def _dump_entry(entry: str) -> str:
    yaml = YAML()
    yaml.Representer = _Representer
    yaml.width = 4096
    yaml.allow_unicode = True
    out = io.StringIO()
    yaml.dump(json.loads(entry), out)
    return out.getvalue()


def json_schema() -> dict[str, Any]:
    """Return the JSON schema (2020-12) of a configuration file.

    A file may omit keys that a file which it extends sets, so nothing outside list entries is required here;
    :func:`octavo.config.load_config` checks the merged result.
    """
    schema = Config.model_json_schema()
    for name, part in schema["$defs"].items():
        if name not in ("Dataset", "Rule"):
            part.pop("required", None)
    schema.pop("required", None)
    schema["properties"] = {
        "extends": {
            "title": "Extends",
            "description": "File or files, relative to this one, that this one is merged over: mappings merge, "
            "lists and values replace.",
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}],
        },
        **schema["properties"],
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Octavo configuration"}


def schema_text() -> str:
    """Return the schema as the text of the file ``octavo.schema.json``."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"
