"""Configurations of other frameworks, translated: ``translate(["their.yaml"], "ours.yaml")`` gives the file, and what
became of every key. No torch is imported here.
"""

from octavo.translate.detect import FRAMEWORKS
from octavo.translate.given import TranslateError
from octavo.translate.report import lost_line, markdown, plain
from octavo.translate.rows import HEADINGS, Row
from octavo.translate.translation import Translation, translate

__all__ = [
    "FRAMEWORKS",
    "HEADINGS",
    "Row",
    "TranslateError",
    "Translation",
    "lost_line",
    "markdown",
    "plain",
    "translate",
]
