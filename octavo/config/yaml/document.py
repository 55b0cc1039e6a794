"""Reads YAML 1.2 text as plain values, with the line of every key.

ruamel.yaml parses the structure; scalars are read here by the YAML 1.2 core schema, so that ``3e-4`` is a number,
``off`` and ``no`` are words, and a ``%YAML 1.1`` header cannot change that. Only mappings, lists and scalars are built:
a tag (``!!python/...``) is reported as a problem.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from octavo.config.yaml.problems import Place, Problem, dotted

Path = tuple[str | int, ...]

_NULL = re.compile(r"(null|Null|NULL|~|)")
_BOOL = re.compile(r"(true|True|TRUE|false|False|FALSE)")
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"([-+]?)\.(inf|Inf|INF|nan|NaN|NAN)")

#: a longer scalar is text: Python refuses to parse such integers, and no field takes them
_MAX_SCALAR = 1000

#: limits far above real configurations: characters of a text, values in it (an alias counts each time, because aliases
#: let a small file describe a huge one), levels of nesting
MAX_CHARACTERS = 1_000_000
MAX_VALUES = 10_000
MAX_LEVELS = 32


@dataclass
class Document:
    """One YAML text: its ``value``, the :class:`Place` of every path in it, and the problems of the text itself.

    ``broken``: the text could not be read as a mapping, so a search for further problems would report false ones.
    """

    value: dict[str, Any] = field(default_factory=dict)
    places: dict[Path, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    broken: bool = False


def scalar(text: str) -> Any:
    """Parse a plain (unquoted) YAML 1.2 scalar: null, bool, int, float or the text itself."""
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text[0] in "tT"
    if len(text) > _MAX_SCALAR:
        return text
    if _INT.fullmatch(text):
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    if _FLOAT.fullmatch(text):
        return float(text)
    if special := _SPECIAL.fullmatch(text):
        return float(special[1] + special[2])
    return text


def read_text(text: str, source: str, fix: str | None = None) -> Document:
    """Read one YAML mapping. Never raises for bad text: problems are in ``.problems``. ``fix``: the fix to report if
    the file is not a mapping, by default the fix for a run's configuration."""
    reader = _Reader(source)
    document = reader.document
    if len(text) > MAX_CHARACTERS:
        reason = f"the text is too long for a configuration ({len(text):,} characters)"
        return _mark_broken(document, source, None, reason, f"name a YAML file of at most {MAX_CHARACTERS:,}")
    try:
        node = reader.yaml.compose(text)
        value = {} if node is None else reader.build(node, ())
    except MarkedYAMLError as error:
        return _mark_broken(document, source, *_describe_syntax_error(error, text))
    except ReaderError as error:
        line, reason = text.count("\n", 0, error.position) + 1, f"the character {chr(error.character)!r}"
        return _mark_broken(document, source, line, f"{reason} is not allowed in YAML", "remove it")
    except (YAMLError, RecursionError, ValueError) as error:  # ValueError: what ruamel's own reading of numbers raises
        return _mark_broken(document, source, None, f"cannot be read as YAML ({error})", "simplify the file")
    if node is None:
        instead = fix or "write at least `model`, `data` and `train`, or `extends: other.yaml`"
        return _mark_broken(document, source, None, "the file is empty", instead)
    if not isinstance(value, dict):
        reason = f"the top level of the file is {'a list' if isinstance(value, list) else 'a single value'}"
        instead = fix or "write a mapping: `model:`, `data:`, `train:` at the left margin"
        return _mark_broken(document, source, node.start_mark.line + 1, reason, instead)
    document.value = value
    return document


def read_value(text: str, source: str) -> tuple[Any, list[Problem]]:
    """Return the value of an override, and its problems. Quotes, ``[`` and ``{`` begin YAML; anything else is a plain
    scalar.

    So ``fp8.rules.0.match=**.layers.0.**`` and ``data.system=Answer: briefly`` need no second layer of quotes.
    """
    text = text.strip()
    if text[:1] not in ("[", "{", "'", '"'):
        return scalar(text), []
    reader = _Reader(source)
    try:
        value = reader.build(reader.yaml.compose(text), ())
    except MarkedYAMLError as error:
        _, reason, fix = _describe_syntax_error(error, text)
        return None, [Problem(Place(source), "", f"the value is not YAML: {reason}", fix)]
    except (YAMLError, RecursionError, ValueError) as error:
        return None, [Problem(Place(source), "", f"the value is not YAML ({error})")]
    return value, [Problem(Place(source), p.key, p.reason, p.fix) for p in reader.document.problems]


class _TooLargeError(ValueError):
    pass


class _Composer(Composer):
    """Stops at :data:`MAX_VALUES`: composing takes 30 microseconds a value, before any value can be checked."""

    nodes = 0

    def __init__(self, loader: Any = None) -> None:
        super().__init__(loader)
        self.warn_double_anchors = False  # YAML allows it, and a warning would not name the file

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.nodes += 1
        if self.nodes > 2 * MAX_VALUES:  # keys are nodes too
            raise _TooLargeError(f"it holds more than {MAX_VALUES:,} values")
        return super().compose_node(parent, index)


class _Reader:
    def __init__(self, source: str):
        self.yaml = YAML(typ="safe", pure=True)
        self.yaml.Composer = _Composer
        self.source = source
        self.document = Document()
        self.count = 0
        self.open: set[int] = set()

    def build(self, node: Node, path: Path) -> Any:
        self.count += 1
        if self.count > MAX_VALUES:
            raise _TooLargeError(f"it describes more than {MAX_VALUES:,} values")
        if len(path) > MAX_LEVELS:
            raise _TooLargeError(f"it is nested in more than {MAX_LEVELS} levels")
        self.document.places.setdefault(path, self.place(node))
        if isinstance(node, ScalarNode):
            return self.leaf(node, path)
        if id(node) in self.open:
            self.problem(node, path, "an alias refers to a value that contains it", "write the value out")
            return None
        self.open.add(id(node))
        try:
            if isinstance(node, SequenceNode):
                self.check_tag(node, path, "seq")
                return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]
            assert isinstance(node, MappingNode)
            self.check_tag(node, path, "map")
            return self.mapping(node, path)
        finally:
            self.open.discard(id(node))

    def mapping(self, node: MappingNode, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        lines: dict[str, int] = {}
        merges: list[tuple[Node, Node]] = []
        for key, child in node.value:
            name = self.key(key, path)
            if name is None:
                continue
            if name == "<<" and key.style is None:
                merges.append((key, child))
            elif name in result:
                self.problem(key, (*path, name), f"the key appears twice (first on line {lines[name]})", "keep one")
            else:
                lines[name] = key.start_mark.line + 1
                self.document.places[(*path, name)] = self.place(key)
                result[name] = self.build(child, (*path, name))
        for key, child in merges:
            self.merge(key, child, path, result)
        return result

    def merge(self, key: Node, child: Node, path: Path, result: dict[str, Any]) -> None:
        """``<<: *base`` sets the keys that are not written explicitly."""
        sources = child.value if isinstance(child, SequenceNode) else [child]
        for source in sources:
            if not isinstance(source, MappingNode):
                self.problem(key, path, "`<<` merges mappings only", "point it at a mapping: `<<: *name`")
                continue
            before = set(result)
            missing = [(k, v) for k, v in source.value if not (isinstance(k, ScalarNode) and k.value in before)]
            part = MappingNode(source.tag, missing, source.start_mark, source.end_mark)
            result.update(self.mapping(part, path))

    def key(self, node: Node, path: Path) -> str | None:
        if not isinstance(node, ScalarNode):
            self.problem(node, path, "a key must be a word", "quote it if it holds brackets or braces")
            return None
        if node.style is None and not isinstance(scalar(node.value), str):
            self.problem(node, (*path, node.value or "?"), "a key must be a word", "remove it")
            return None
        return str(node.value)

    def leaf(self, node: ScalarNode, path: Path) -> Any:
        plain = node.style is None
        expected_tag = self.yaml.resolver.resolve(ScalarNode, node.value, (plain, not plain))
        if node.tag != expected_tag:
            self.wrong_tag(node, path, "remove it; quote the value if it is meant as text")
            return None
        return scalar(node.value) if plain else str(node.value)

    def check_tag(self, node: Node, path: Path, kind: str) -> None:
        if node.tag != f"tag:yaml.org,2002:{kind}":
            self.wrong_tag(node, path, "remove it")

    def wrong_tag(self, node: Node, path: Path, fix: str) -> None:
        shown = str(node.tag).replace("tag:yaml.org,2002:", "!!")
        self.problem(node, path, f"the tag {shown} is not used here", fix)

    def place(self, node: Node) -> Place:
        return Place(self.source, node.start_mark.line + 1, node.start_mark.column + 1)

    def problem(self, node: Node, path: Path, reason: str, fix: str) -> None:
        self.document.problems.append(Problem(self.place(node), dotted(path), reason, fix))


def _mark_broken(document: Document, source: str, line: int | None, reason: str, fix: str) -> Document:
    document.problems.append(Problem(Place(source, line), "", reason, fix))
    document.broken = True
    return document


def _describe_syntax_error(error: MarkedYAMLError, text: str) -> tuple[int | None, str, str]:
    """Return (line, reason, fix) for an error of the YAML parser."""
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else None
    problem = str(error.problem or error.context or "cannot be read as YAML")
    lines = text.splitlines()
    line_text = lines[mark.line] if mark and mark.line < len(lines) else ""
    if "'\\t'" in problem or (line_text.strip() and "\t" in line_text[: len(line_text) - len(line_text.lstrip())]):
        return line, "a tab is used for indentation", "indent with spaces"
    if "undefined alias" in problem:
        return line, f"{problem} (an unquoted * begins an alias)", 'put a glob in quotes: "**.layers.0.**"'
    if "another document" in problem:
        return line, "a second document begins (---)", "keep one document per file"
    if "mapping values are not allowed" in problem:
        return (
            line,
            "a `:` where no key is allowed",
            "check this line's indentation, or quote the text that contains it",
        )
    if "could not find expected ':'" in problem:
        # The mark is where the parser gave up; the context is the line that began a key.
        key_line = error.context_mark.line + 1 if error.context_mark else line
        return key_line, "a line without `:`", "write `key: value`"
    return line, problem, "check brackets, quotes and indentation on and above this line"
