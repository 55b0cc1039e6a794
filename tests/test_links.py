"""Every link of README, docs, examples and the changelog leads to a file that is tracked, and to a heading in it; two
pages stay short."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md", "tests/README.md")
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
]
LINK = re.compile(r"\]\((?!\w+:)([^)\s]+)\)")


def prose(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """What GitHub and the site call the headings of a page."""
    found, seen = set(), Counter[str]()
    for heading in re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
        found.add(f"{slug}_{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def lost(page: Path, text: str) -> list[str]:
    """The links of a page that lead nowhere."""
    found = []
    for link in LINK.findall(prose(text)):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or not target.is_relative_to(ROOT):
            found.append(f"{page.name}: {link}: no such file")
        elif anchor and anchor not in anchors(text if target == page else target.read_text(encoding="utf-8")):
            found.append(f"{page.name}: {link}: no such heading")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert not (found := lost(page, page.read_text(encoding="utf-8"))), "\n".join(found)


def test_a_dead_link_is_found() -> None:
    page = ROOT / "docs" / "data.md"
    text = "# Rows\n[a](gone.md) [b](plan.md#gone) [c](#rows) [d](plan.md#who-decides) [e](../../x) [f](#no)\n"
    assert [line.split(": ")[1] for line in lost(page, text)] == ["gone.md", "plan.md#gone", "../../x", "#no"]


def test_every_page_has_its_place_on_the_site() -> None:
    """What mkdocs would say only where it is installed; two pages are made as the site is built."""

    class Loader(yaml.SafeLoader):
        """mkdocs.yml names a function of Python's, which only mkdocs needs."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
    config = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)
    placed = re.findall(r"'([\w/.]+\.md)'", str(config["nav"]))
    made = {"reference/commands.md", "reference/configuration.md"}
    here = {str(page.relative_to(ROOT)).removeprefix("docs/") for page in PAGES} - {"README.md"} | {"index.md"}
    assert sorted(placed) == sorted(here | made)


@pytest.mark.parametrize("folder", ["decisions", "lab"])
def test_an_index_lists_the_pages_of_its_folder(folder: str) -> None:
    index = (ROOT / "docs" / folder / "index.md").read_text(encoding="utf-8")
    pages = {page.name for page in (ROOT / "docs" / folder).glob("*.md")} - {"index.md"}
    assert pages and pages <= set(LINK.findall(index))


def test_the_page_on_architecture_is_short() -> None:
    """It lists packages and trips; decisions, measurements and reference have pages of their own."""
    assert (ROOT / "docs/architecture.md").stat().st_size <= 10_000


def test_the_changelog_of_a_release_is_a_list_of_linked_lines() -> None:
    """At most 40 changes, a line each, with a link to a page; and a line for each known fault."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.split(r"^## ", text, flags=re.MULTILINE)[1]
    changes, _, faults = newest.partition("Known faults")
    lines = [line for line in changes.splitlines() if line.startswith("- ")]
    assert 0 < len(lines) <= 40 and not re.search(r"^  ", newest, re.MULTILINE)
    assert [line for line in lines if not LINK.search(line)] == []
    assert re.search(r"^- ", faults, re.MULTILINE)
