"""A hook of mkdocs: links of the pages work in the repository and on the site.

Pages link to each other and to files of the repository by relative paths, as a reader of the repository needs them. On
the site README.md is the first page and docs/X.md is X. Other linked files keep their paths: pages outside docs/ become
pages, other files are copied. So no link leaves the site, and a link to a missing file fails the build.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
HOME = "README.md"
OUTSIDE = (HOME, "CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md", "tests/README.md")  # pages outside docs/
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(?=[)#])")


def _in_repository(uri: str) -> str:
    """The path in the repository of the page that the site calls `uri`."""
    if uri == "index.md":
        return HOME
    return f"docs/{uri}" if (ROOT / "docs" / uri).is_file() else uri


def _on_site(path: str) -> str:
    """The name on the site of a file of the repository; for a folder, of the page that describes it."""
    if (ROOT / path).is_dir():
        path = f"{path}/README.md"
    return "index.md" if path == HOME else path.removeprefix("docs/")


def _linked(text: str, page: str) -> Iterator[str]:
    """Files of the repository that the page `page` links to."""
    for match in LINK.finditer(text):
        yield posixpath.normpath(posixpath.join(posixpath.dirname(page), match[0]))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    named = {path: None for page in (*OUTSIDE, *pages) for path in _linked((ROOT / page).read_text("utf-8"), page)}
    for path in (*OUTSIDE, *named):
        uri = _on_site(path)
        if files.get_file_from_path(uri) is None and (ROOT / _in_repository(uri)).is_file():
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / _in_repository(uri))))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = page.file.src_uri
    origin = posixpath.dirname(_in_repository(here))

    def to_site(match: re.Match[str]) -> str:
        target = _on_site(posixpath.normpath(posixpath.join(origin, match[0])))
        return posixpath.relpath(target, posixpath.dirname(here) or ".")

    return LINK.sub(to_site, markdown)
