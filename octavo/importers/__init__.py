"""Translates configurations of other frameworks: ``translate(["their.yaml"], "ours.yaml")`` returns the file and the
outcome of every key. No torch is imported here.
"""

from octavo.importers.common.key_outcomes import HEADINGS, Row
from octavo.importers.detect import FRAMEWORKS
from octavo.importers.errors import TranslateError
from octavo.importers.report import lost_line, markdown, to_json
from octavo.importers.translation import Translation, translate

__all__ = [
    "FRAMEWORKS",
    "HEADINGS",
    "Row",
    "TranslateError",
    "Translation",
    "lost_line",
    "markdown",
    "to_json",
    "translate",
]
