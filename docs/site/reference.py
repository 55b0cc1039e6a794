"""A hook of mkdocs: two pages made of what the commands and the configuration say of themselves."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from octavo.cli.main import COMMANDS, main
from octavo.config import SCHEMA_FILE

SCHEMA = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))


def commands() -> str:
    """What `octavo COMMAND --help` prints, of every command."""
    page = ["# Commands", "What `octavo COMMAND --help` prints.", "| command | |\n|---|---|"]
    page[-1] += "".join(f"\n| [{name}](#octavo-{name}) | {what} |" for name, what in COMMANDS.items())
    for name in COMMANDS:
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown), mock.patch.dict(os.environ, COLUMNS="100"):
            main([name, "--help"])
        page += [f"## octavo {name}", f"```text\n{shown.getvalue().strip()}\n```"]
    return "\n\n".join(page)


def configuration() -> str:
    """Every key of the configuration, from its JSON schema."""
    page = ["# Configuration", "Every key of a YAML file, as `octavo schema` has it."]
    head = "| key | value | default | meaning |\n|---|---|---|---|"
    top = {"The top": {"properties": SCHEMA["properties"]}}
    sections = {key: SCHEMA["$defs"][ref] for key, value in SCHEMA["properties"].items() if (ref := _ref(value))}
    inner = {name: found for name, found in SCHEMA["$defs"].items() if found not in sections.values()}
    for title, section in (top | sections | inner).items():
        rows = "".join(f"\n| {_row(key, said)} |" for key, said in section["properties"].items())
        page += [f"## {title}", section.get("description", ""), head + rows]
    return "\n\n".join(page)


def _row(key: str, said: dict[str, Any]) -> str:
    default = f"`{json.dumps(said['default'])}`" if said.get("default") is not None else ""
    cells = (f"`{key}`", ", ".join(_values(said)), default, said.get("description", ""))
    return " | ".join(cell.replace("|", "\\|") for cell in cells)


def _ref(said: dict[str, Any]) -> str | None:
    """The section that a key holds."""
    return next((s["$ref"].rpartition("/")[2] for s in (said, *said.get("anyOf", ())) if "$ref" in s), None)


def _values(said: dict[str, Any]) -> Iterator[str]:
    for option in said.get("anyOf", [said]):
        if (section := _ref(option)) is not None:
            key = next((key for key, value in SCHEMA["properties"].items() if _ref(value) == section), section)
            yield f"[{key}](#{key.lower()})"
        elif "enum" in option:
            yield from (f"`{value}`" for value in option["enum"])
        elif "items" in option:
            yield "a list of " + ", ".join(_values(option["items"]))
        elif option.get("type") != "null":
            yield {"object": "a mapping", "array": "a list", "string": "text"}.get(option["type"], option["type"])


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, content in {"commands": commands(), "configuration": configuration()}.items():
        files.append(File.generated(config, f"reference/{name}.md", content=content))
    return files
