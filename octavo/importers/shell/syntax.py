"""The syntax tree of a launch script, which `parser` builds and `interpreter` evaluates. Lines are counted from 1; 0 is
a line of another file (one that is sourced)."""

from __future__ import annotations

from dataclasses import dataclass, field


class ShellSyntaxError(Exception):
    """A shell would stop reading here, at ``line`` because of ``what``. Raised and caught within this package."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(what)
        self.line, self.what = line, what


# ---- parts of a word


@dataclass(slots=True)
class Literal:
    """Text. ``quoted``: patterns and braces in it have no meaning."""

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
    """``$((expression))``; the expression is parsed like quoted text."""

    expression: ShellWord
    quoted: bool
    line: int
    written: str


@dataclass(slots=True)
class UnknownExpansion:
    """An expansion that is only known when the script runs: ``${!name}``, ``<(command)`` and the like."""

    quoted: bool
    line: int
    written: str


Part = Literal | Parameter | Substitution | Arithmetic | UnknownExpansion


@dataclass(slots=True)
class ShellWord:
    parts: list[Part]
    line: int

    @property
    def literal(self) -> str | None:
        """The text of a word without expansions and quotes; None for other words."""
        if len(self.parts) == 1 and isinstance(self.parts[0], Literal) and not self.parts[0].quoted:
            return self.parts[0].text
        return None


@dataclass(slots=True)
class Assignment:
    """``name=value``, ``name+=value``, ``name[index]=value``, or ``name=(elements)``."""

    name: str
    line: int
    append: bool = False
    index: str | None = None
    value: ShellWord | None = None
    elements: list[ShellWord] | None = None


# ---- commands


@dataclass(slots=True)
class SimpleCommand:
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
    """``for name in words`` if ``words`` is a list; other loops have None."""

    name: str | None
    words: list[ShellWord] | None
    condition: list[Item]
    body: list[Item]
    line: int
    heading: str
    has_break: bool  # break or continue is in it
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
    """``[[ ... ]]``: words, and operators as strings."""

    words: list[ShellWord | str]
    line: int


@dataclass(slots=True)
class ArithmeticCommand:
    """``(( ... ))``."""

    expression: ShellWord
    line: int


Node = SimpleCommand | AndOr | Pipeline | Group | If | Loop | Case | Function | Condition | ArithmeticCommand


@dataclass(slots=True)
class Item:
    """One entry of a list of commands. ``text`` is its source, on one line and cut to a length for reports."""

    node: Node
    line: int
    text: str
    background: bool = False


@dataclass(slots=True)
class Program:
    """The commands before the first syntax error; ``stopped``: (line, text, why) of the error."""

    items: list[Item] = field(default_factory=list)
    stopped: tuple[int, str, str] | None = None
