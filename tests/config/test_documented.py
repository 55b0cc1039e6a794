"""Every configuration key is on a page of the documentation or in an example.

A page counts where it writes the key in full (`train.z_loss`) or under its section (a YAML block, or a table whose rows
name the keys of the section), so that a search for the key finds its description.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from pydantic import BaseModel
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from octavo.config import Config
from octavo.config.error_texts import _inner

ROOT = Path(__file__).resolve().parents[2]
#: pages about the project itself, not for users
INTERNAL = ("architecture.md", "lab.md", "lab", "decisions", "reference", "site")


def keys(section: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the dotted keys of a section and its subsections; entries of lists have no index."""
    for name, field in section.model_fields.items():
        inner = _inner(field.annotation)
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from keys(inner, (*above, name))
        else:
            yield ".".join((*above, name))


def pages() -> list[Path]:
    return [p for p in sorted((ROOT / "docs").rglob("*.md")) if p.relative_to(ROOT / "docs").parts[0] not in INTERNAL]


def paths(value: object, above: str = "") -> Iterator[str]:
    """Yield the dotted paths of a YAML value, without the indices of lists."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from paths(inner, f"{above}.{name}".lstrip("."))
    elif isinstance(value, list):
        for inner in value:
            yield from paths(inner, above)
    yield above


def in_yaml(text: str) -> set[str]:
    try:
        return set(paths(YAML(typ="safe").load(text)))
    except (YAMLError, ValueError):
        return set()


@pytest.fixture(scope="module")
def written() -> tuple[set[str], str]:
    """Return the dotted paths in examples and YAML blocks, and the text of README and pages."""
    text = "\n".join(p.read_text(encoding="utf-8") for p in [ROOT / "README.md", *pages()])
    blocks = re.findall(r"^```ya?ml\n(.*?)^```", text, flags=re.S | re.M)
    examples = [p.read_text(encoding="utf-8") for p in sorted((ROOT / "examples").rglob("*.yaml"))]
    return set().union(*map(in_yaml, [*blocks, *examples])), text


def documented(key: str, in_blocks: set[str], text: str) -> bool:
    if key in in_blocks or re.search(rf"(?<![\w.]){re.escape(key)}(?![\w])", text):
        return True
    # `weight` of data.train.0.weight is a setting of every data set: pages write it in code, without its list
    return bool(re.search(rf"`[^`\n]*\b{re.escape(key.rsplit('.', 1)[-1])}\b[^`\n]*`", text))


def test_every_key_is_documented(written):
    missing = [key for key in keys(Config) if not documented(key, *written)]
    assert not missing, "on no page of docs/ and in no example: " + ", ".join(missing)


def test_documented_keys_are_recognized():
    assert documented("train.z_loss", set(), "Set `train.z_loss`.") and documented("rl.top_p", set(), "`top_p: 0.9`")
    assert documented("run.keep", {"run.keep"}, "") and not documented("rl.top_p", set(), "top_p without code")
