"""The tree of a launch script: what `parser` builds and `shell` evaluates. Lines are counted from 1; 0 is a line
of another file (one that is sourced)."""

from __future__ import annotations

from dataclasses import dataclass, field


class ShellSyntaxError(Exception):
    """Where a shell would stop reading: ``line`` and ``what``. It never leaves the reader of scripts."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(what)
        self.line, self.what = line, what


# ---- parts of a word


@dataclass(slots=True)
class Literal:
    """Text. ``quoted``: no pattern, no braces in it mean anything."""

    text: str
    quoted: bool
    line: int


@dataclass(slots=True)
class Parameter:
    """``$name``, or ``${name[index]operator argument}``. ``index`` is ``@``, ``*``, a word, or None; ``length`` is
    ``${#name}``."""

    name: str
    quoted: bool
    line: int
    written: str
    operator: str = ""
    argument: ShellWord | None = None
    index: str | ShellWord | None = None
    length: bool = False


@dataclass(slots=True)
class Substitution:
    """``$(commands)`` and backquotes."""

    commands: list[Item]
    quoted: bool
    line: int
    written: str


@dataclass(slots=True)
class Arithmetic:
    """``$((expression))``; the expression's parts are those of a quoted text."""

    expression: ShellWord
    quoted: bool
    line: int
    written: str


@dataclass(slots=True)
class Unfollowed:
    """What only a run gives: ``${!name}``, ``<(command)``, and the like."""

    quoted: bool
    line: int
    written: str


Part = Literal | Parameter | Substitution | Arithmetic | Unfollowed


@dataclass(slots=True)
class ShellWord:
    parts: list[Part]
    line: int

    @property
    def literal(self) -> str | None:
        """The text of a word in which nothing is expanded and nothing is quoted."""
        if len(self.parts) == 1 and isinstance(self.parts[0], Literal) and not self.parts[0].quoted:
            return self.parts[0].text
        return None


@dataclass(slots=True)
class Assignment:
    """``name=value``, ``name+=value``, ``name[index]=value``; ``elements`` are those of an array."""

    name: str
    line: int
    append: bool = False
    index: str | None = None
    value: ShellWord | None = None
    elements: list[ShellWord] | None = None


# ---- commands


@dataclass(slots=True)
class Simple:
    assignments: list[Assignment]
    words: list[ShellWord | Assignment]
    line: int
    redirected: bool = False


@dataclass(slots=True)
class AndOr:
    first: Node
    rest: list[tuple[str, Node]]


@dataclass(slots=True)
class Pipeline:
    """``negated``: an odd number of ``!``."""

    commands: list[Node]
    negated: bool


@dataclass(slots=True)
class Group:
    """``{ ... }``, or ``( ... )`` where ``subshell``."""

    items: list[Item]
    subshell: bool


@dataclass(slots=True)
class If:
    clauses: list[tuple[list[Item], list[Item]]]
    otherwise: list[Item]
    line: int
    headings: list[str]


@dataclass(slots=True)
class Loop:
    """``for name in words`` where ``words`` is a list; any other loop has None there."""

    name: str | None
    words: list[ShellWord] | None
    condition: list[Item]
    body: list[Item]
    line: int
    heading: str
    leaves: bool  # break or continue is in it
    arithmetic: ShellWord | None = None  # of for (( ... ))


@dataclass(slots=True)
class Case:
    """Each clause: its patterns, its commands, and whether it falls through to the next."""

    subject: ShellWord
    clauses: list[tuple[list[ShellWord], list[Item], bool]]
    line: int
    heading: str


@dataclass(slots=True)
class Function:
    name: str
    body: Node
    line: int
    heading: str


@dataclass(slots=True)
class Condition:
    """``[[ ... ]]``: words, and signs as texts."""

    words: list[ShellWord | str]
    line: int


@dataclass(slots=True)
class ArithmeticCommand:
    """``(( ... ))``."""

    expression: ShellWord
    line: int


Node = Simple | AndOr | Pipeline | Group | If | Loop | Case | Function | Condition | ArithmeticCommand


@dataclass(slots=True)
class Item:
    """One entry of a list of commands. ``text`` is its source, on one line and cut to a length for reports."""

    node: Node
    line: int
    text: str
    background: bool = False


@dataclass(slots=True)
class Program:
    """The commands up to the first that a shell could not read; ``stopped`` is that (line, text, why)."""

    items: list[Item] = field(default_factory=list)
    stopped: tuple[int, str, str] | None = None
