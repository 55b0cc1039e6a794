"""Parses the words of a launch script: quotes, variables, substitutions. `parser` reads the commands.

A recursive-descent parser in one pass: only bounded look-ahead is scanned twice, so the time is linear in the length,
and the depth is bounded.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod

from octavo.importers.errors import TranslateError
from octavo.importers.shell.syntax import (
    Arithmetic,
    Item,
    Literal,
    Parameter,
    Part,
    ShellSyntaxError,
    ShellWord,
    Substitution,
    Unfollowed,
)

#: maximum nesting of constructs; maximum words and parts of words of one script with all sourced files
DEPTH, WORDS = 50, 200_000
_UNCLOSED = "{}:{}: a quote begins here and never ends. Close it."
_SHOWN = 200  # maximum characters of a command in a report
_SUM = 4000  # maximum characters of an arithmetic expression; a longer one is parsed as commands
_PLAIN = re.compile(r"[^ \t\n;&|<>()\\'\"`$]+")
_QUOTED = re.compile(r"[^\"\\$`]+")
_BRACED = re.compile(r"[^}\"'\\$`]+")
_BRACED_IN_QUOTES = re.compile(r"[^}\"\\$`]+")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@#*?$!-]")
_PARAMETER = re.compile(r"(#?)([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?:\[([^\]\n{}]{0,200})\])?")
#: operators of ``${name...}`` whose argument is a pattern
PATTERNS = ("#", "##", "%", "%%")
_OPERATOR = re.compile(r":?[-=?+]|##?|%%?|//?|\^\^?|,,?|:|@")
_BACKQUOTED = re.compile(r"`((?:[^`\\]|\\.)*)`", re.DOTALL)
_BRACKET = re.compile(r"[()]")


class WordParser(ABC):
    """Parses words.

    source  name of the file in errors
    budget  the rest of WORDS, shared by all parsers of a script
    line    number of the first line; with ``fixed`` of all lines
    """

    def __init__(self, text: str, source: str, budget: list[int], line: int = 1, fixed: bool = False) -> None:
        self.text, self.source, self.budget = text, source, budget
        self.at, self.end = 0, len(text)
        self.first, self.fixed = line, fixed
        self.counted, self.lines = 0, line
        self.depth = 0
        self.documents: list[tuple[str, bool, bool]] = []  # (delimiter, tabs are cut, text is raw)
        self.leaves = 0

    # ---- where it is

    def line(self, at: int | None = None) -> int:
        """Return the line of a position. Positions must not decrease from call to call."""
        if self.fixed:
            return self.first
        at = self.at if at is None else at
        if at > self.counted:
            self.lines += self.text.count("\n", self.counted, at)
            self.counted = at
        return self.lines

    def shown(self, start: int, end: int) -> str:
        text = " ".join(self.text[start : min(end, start + 2 * _SHOWN)].replace("\\\n", " ").split())
        return text if len(text) <= _SHOWN and end <= start + 2 * _SHOWN else text[:_SHOWN] + " ..."

    def wrong(self, what: str = "") -> ShellSyntaxError:
        next_text = self.text[self.at : self.at + 20].split("\n")[0]
        return ShellSyntaxError(
            self.line(), what or (f"unexpected {next_text!r}" if next_text else "the line or file ends")
        )

    def spend(self) -> None:
        self.budget[0] -= 1
        if self.budget[0] < 0:
            raise TranslateError(
                f"{self.source}:{self.line()}: over {WORDS} words are in it and the files that it sources. A launch "
                "script has fewer: give the one that starts the training."
            )

    def enter(self) -> None:
        """Enter a construct. The caller decreases ``depth`` again, except after an error, which ends the parsing."""
        self.depth += 1
        if self.depth > DEPTH:
            raise TranslateError(
                f"{self.source}:{self.line()}: over {DEPTH} constructs are nested here. Write the value, or the "
                "command."
            )

    @abstractmethod
    def items(self, ends: frozenset[str]) -> list[Item]:
        """Parse the commands of ``$(...)``, up to a reserved word of ``ends`` or a closing bracket."""

    # ---- words

    def word(self) -> ShellWord:
        self.spend()
        start, text = self.at, self.text
        parts: list[Part] = []
        word = ShellWord(parts, self.line())
        while self.at < self.end:
            c = text[self.at]
            if parts:
                self.spend()
            # A word ends at the first character that no branch takes.
            if plain := _PLAIN.match(text, self.at):
                parts.append(Literal(plain[0], False, self.line()))
                self.at = plain.end()
            elif c == "\\":
                self.escape(parts, self.text[self.at + 1 : self.at + 2])
            elif c == "'":
                parts.append(self.single())
            elif c == '"':
                self.double(parts)
            elif c == "`":
                parts.append(self.backquoted(False))
            elif c == "$":
                self.dollar(parts, False)
            elif c in "<>" and text.startswith("(", self.at + 1):
                parts.append(self.process())
            else:
                break
        if self.at == start:
            raise self.wrong()
        return word

    def escape(self, parts: list[Part], letter: str) -> None:
        if letter != "\n":
            parts.append(Literal(letter or "\\", True, self.line()))
        self.at += 2

    def single(self) -> Literal:
        end, line = self.text.find("'", self.at + 1), self.line()
        if end < 0:
            raise TranslateError(_UNCLOSED.format(self.source, line))
        literal = Literal(self.text[self.at + 1 : end], True, line)
        self.at = end + 1
        return literal

    def double(self, parts: list[Part]) -> None:
        """Parse a text in double quotes; an empty one becomes one empty part."""
        begun, count = self.line(), len(parts)
        self.at += 1
        while self.at < self.end and self.text[self.at] != '"':
            self.within_quotes(parts, _QUOTED)
        if self.at >= self.end:
            raise TranslateError(_UNCLOSED.format(self.source, begun))
        self.at += 1
        if len(parts) == count:
            parts.append(Literal("", True, begun))

    def within_quotes(self, parts: list[Part], plain: re.Pattern[str]) -> None:
        c = self.text[self.at]
        self.spend()
        if match := plain.match(self.text, self.at):
            parts.append(Literal(match[0], True, self.line()))
            self.at = match.end()
        elif c == "\\":
            letter = self.text[self.at + 1 : self.at + 2]
            if letter and letter in '"\\$`\n' or (letter == "}" and plain is not _QUOTED):
                self.escape(parts, letter)
            else:
                parts.append(Literal("\\", True, self.line()))
                self.at += 1
        elif c == "$":
            self.dollar(parts, True)
        elif c == "`":
            parts.append(self.backquoted(True))
        else:
            parts.append(Literal(c, True, self.line()))
            self.at += 1

    def dollar(self, parts: list[Part], quoted: bool) -> None:
        text, start = self.text, self.at
        if text.startswith("$((", start):
            self.at += 1
            line = self.line()
            if (sum_ := self.brackets()) is not None:
                parts.append(Arithmetic(sum_, quoted, line, self.shown(start, self.at)))
                return
            self.at = start
        if text.startswith("$(", start):
            line = self.line()
            self.at += 2
            before, pending = self.leaves, self.documents
            self.documents = []
            commands = self.items(frozenset())
            self.leaves, self.documents = before, pending
            if text[self.at : self.at + 1] != ")":
                raise self.wrong("$( is not closed")
            self.at += 1
            parts.append(Substitution(commands, quoted, line, self.shown(start, self.at)))
        elif text.startswith("${", start):
            self.enter()
            parts.append(self.parameter(quoted))
            self.depth -= 1
        elif text.startswith("$[", start) and (end := text.find("]", start, start + _SUM)) >= 0:  # obsolete arithmetic
            self.at = end + 1
            parts.append(Unfollowed(quoted, self.line(start), self.shown(start, self.at)))
        elif not quoted and text.startswith("$'", start):
            parts.append(self.ansi())
        elif not quoted and text.startswith('$"', start):
            self.at += 1
            self.double(parts)
        elif match := _NAME.match(text, start + 1):
            self.at = match.end()
            parts.append(Parameter(match[0], quoted, self.line(start), f"${match[0]}"))
        else:
            self.at += 1
            parts.append(Literal("$", True, self.line(start)))

    def parameter(self, quoted: bool) -> Part:
        """``${...}``."""
        start, line = self.at, self.line()
        self.at += 2
        match = _PARAMETER.match(self.text, self.at)
        part: Unfollowed | Parameter = Unfollowed(quoted, line, "")
        if match and self.text[self.at : self.at + 2] == "#}":
            match = None
            part = Parameter("#", quoted, line, "$#")
            self.at += 1
        if match:
            self.at = match.end()
            operator = _OPERATOR.match(self.text, self.at)
            if operator or self.text.startswith("}", self.at):
                part = Parameter(
                    match[2], quoted, line, "", operator[0] if operator else "", None, match[3], bool(match[1])
                )
                self.at = operator.end() if operator else self.at
        argument = ShellWord([], line)
        # In "${name##*/}" the quotes around it do not quote the pattern.
        patterned = isinstance(part, Parameter) and part.operator in PATTERNS
        while self.at < self.end and self.text[self.at] != "}":
            self.braced(argument.parts, quoted and not patterned)
        if self.at >= self.end:
            raise self.wrong("${ is not closed")
        self.at += 1
        part.written = self.shown(start, self.at)
        if isinstance(part, Parameter):
            part.argument = argument if part.operator else None
            if part.index is not None and part.index not in ("@", "*"):
                inner = type(self)(str(part.index), self.source, self.budget, line, True)
                part.index = inner.quoted_text()
        elif argument.parts and not isinstance(part, Unfollowed):
            raise self.wrong()
        return part

    def braced(self, parts: list[Part], quoted: bool) -> None:
        """Parse a piece of the operand in ``${...}``."""
        c = self.text[self.at]
        if c == '"':
            self.double(parts)
        elif quoted:
            self.within_quotes(parts, _BRACED_IN_QUOTES)
        elif c == "'":
            parts.append(self.single())
        elif c == "\\":
            self.escape(parts, self.text[self.at + 1 : self.at + 2])
        elif match := _BRACED.match(self.text, self.at):
            parts.append(Literal(match[0], False, self.line()))
            self.at = match.end()
        elif c == "$":
            self.dollar(parts, False)
        else:
            parts.append(self.backquoted(False))

    def quoted_text(self) -> ShellWord:
        """Parse the whole text as in double quotes, with quotes as plain characters."""
        word = ShellWord([], self.line())
        while self.at < self.end:
            self.within_quotes(word.parts, _QUOTED)
        return word

    def ansi(self) -> Part:
        """Parse ``$'...'``; one with escapes is not followed."""
        start, line = self.at, self.line()
        match = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL).match(self.text, start)
        if match is None:
            raise TranslateError(_UNCLOSED.format(self.source, line))
        self.at = match.end()
        return Unfollowed(True, line, self.shown(start, self.at)) if "\\" in match[1] else Literal(match[1], True, line)

    def backquoted(self, quoted: bool) -> Part:
        start, line = self.at, self.line()
        match = _BACKQUOTED.match(self.text, start)
        if match is None:
            raise TranslateError(_UNCLOSED.format(self.source, line))
        self.at = match.end()
        escaped = r"\\([`\\$\"])" if quoted else r"\\([`\\$])"
        inner = type(self)(re.sub(escaped, r"\1", match[1]), self.source, self.budget, line, self.fixed)
        inner.depth = self.depth
        commands = inner.items(frozenset())
        if inner.at < inner.end:
            raise inner.wrong()
        return Substitution(commands, quoted, line, self.shown(start, self.at))

    def process(self) -> Part:
        """``<(commands)``."""
        start, line = self.at, self.line()
        self.at += 2
        self.items(frozenset())
        if self.text[self.at : self.at + 1] != ")":
            raise self.wrong()
        self.at += 1
        return Unfollowed(True, line, self.shown(start, self.at))

    def brackets(self) -> ShellWord | None:
        """Parse ``((expression))`` from its first bracket; returns None, and consumes nothing, for other syntax."""
        start, depth = self.at, 0
        for match in _BRACKET.finditer(self.text, start, start + _SUM):
            depth += 1 if match[0] == "(" else -1
            if depth == 1 and match[0] == ")" and self.text[match.end() : match.end() + 1] != ")":
                return None
            if not depth:
                inner = type(self)(
                    self.text[start + 2 : match.start() - 1], self.source, self.budget, self.line(), self.fixed
                )
                inner.depth = self.depth
                inner.enter()
                word = inner.quoted_text()
                self.spend()
                self.at = match.end()
                return word
        return None
