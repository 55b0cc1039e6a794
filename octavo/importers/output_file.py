"""The output file: settings as YAML with comments on their origin, checked by Octavo's own rules."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from octavo.config import ConfigError, Problem, load_config_text
from octavo.config.sections.all_sections import Sections
from octavo.config.yaml.document import scalar
from octavo.config.yaml.problems import brief
from octavo.importers.common.key_outcomes import Setting

_PLAIN = re.compile(r"[A-Za-z0-9_./~@+-][A-Za-z0-9_./~@+ -]*")
_SURROGATE_PAIR = re.compile(r"\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}")
_COMMENT_COLUMN = 48  # column at which comments begin


def nest_settings(settings: dict[str, Setting]) -> dict[str, Any]:
    """Convert dotted keys (``data.train.0.path``) to nested mappings and lists."""
    root: dict[str, Any] = {}
    for target, setting in settings.items():
        node: Any = root
        *heads, last = target.split(".")
        for head, next_key in zip(heads, [*heads[1:], last], strict=True):
            container: Any = [] if next_key.isdecimal() else {}
            if isinstance(node, list):
                while len(node) <= int(head):
                    node.append({})
                node = node[int(head)]
            else:
                if not isinstance(node.get(head), dict | list):
                    node[head] = container
                node = node[head]
        node[last] = setting
    return root


def render_yaml(settings: dict[str, Setting], head: list[str]) -> str:
    """Return the whole file: comments at the top, then sections in the order of Octavo's schema."""
    tree = nest_settings(settings)
    order = list(Sections.model_fields)
    lines = [f"# {line}".rstrip() for line in head]
    for section in sorted(tree, key=order.index):
        lines += [f"{section}:", *_mapping_lines(tree[section], 2)]
    return "\n".join(lines) + "\n"


def _mapping_lines(tree: dict[str, Any], indent: int) -> list[str]:
    lines = []
    for key, value in tree.items():
        if isinstance(value, Setting):
            lines.append(_commented_line(f"{' ' * indent}{key}: {format_value(value.value)}", value))
        elif isinstance(value, list):
            lines.append(f"{' ' * indent}{key}:")
            for entry in value:
                inner = _mapping_lines(entry, indent + 4)
                lines += [f"{' ' * (indent + 2)}- {inner[0].lstrip()}", *inner[1:]]
        else:
            lines += [f"{' ' * indent}{key}:", *_mapping_lines(value, indent + 2)]
    return lines


def _commented_line(line: str, setting: Setting) -> str:
    comment = describe_origin(setting)
    return f"{line.ljust(_COMMENT_COLUMN)}  # {comment}" if comment else line


def describe_origin(setting: Setting) -> str:
    """Return the origin of a value: the source keys with their values, or the default there; and the reason."""
    source = ", ".join(f"{entry.key}: {brief(_value_text(entry.value), 60)}" for entry in setting.source)
    parts = [source or ("" if setting.why else "the framework's default"), setting.why]
    return brief("; ".join(part for part in parts if part), 220)


def _value_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str) if not isinstance(value, str) else value


def format_value(value: Any) -> str:
    """Return a value as YAML that reads back as itself."""
    if isinstance(value, str):
        return (
            value
            if _PLAIN.fullmatch(value) and scalar(value) == value and value.strip() == value
            else _SURROGATE_PAIR.sub(_yaml_escape, json.dumps(value))
        )
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, float):
        return repr(round(value, 12)) if value else "0.0"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{format_value(str(key))}: {format_value(inner)}" for key, inner in value.items()) + "}"
    return "[" + ", ".join(format_value(inner) for inner in value) + "]"


def _yaml_escape(pair: re.Match[str]) -> str:
    """Return the YAML escape of a character that JSON writes as a surrogate pair."""
    character = json.loads('"' + pair[0] + '"')
    return f"\\U{ord(character):08x}"


def find_problems(content: str, out: Path) -> tuple[Problem, ...]:
    """Return the problems for which Octavo would refuse the file."""
    try:
        load_config_text(content, source=out.name, base=out.parent)
    except ConfigError as error:
        return error.problems
    return ()
