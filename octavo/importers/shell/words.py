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
    UnknownExpansion,
)

#: maximum nesting of constructs; maximum words and parts of words of one script with all sourced files
MAX_DEPTH, MAX_WORDS = 50, 200_000
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
    budget  the rest of MAX_WORDS, shared by all parsers of a script
    line    number of the first line; with ``fixed`` of all lines
    """

    def __init__(self, text: str, source: str, budget: list[int], line: int = 1, fixed: bool = False) -> None:
        self.text, self.source, self.budget = text, source, budget
        self.at, self.end = 0, len(text)
        self.first, self.fixed = line, fixed
        self.counted, self.lines = 0, line
        self.depth = 0
        self.documents: list[tuple[str, bool, bool]] = []  # (delimiter, tabs are cut, text is raw)
        self.num_breaks = 0

    # ---- where it is

    def line_at(self, at: int | None = None) -> int:
        """Return the line of a position. Positions must not decrease from call to call."""
        if self.fixed:
            return self.first
        at = self.at if at is None else at
        if at > self.counted:
            self.lines += self.text.count("\n", self.counted, at)
            self.counted = at
        return self.lines

    def excerpt(self, start: int, end: int) -> str:
        text = " ".join(self.text[start : min(end, start + 2 * _SHOWN)].replace("\\\n", " ").split())
        return text if len(text) <= _SHOWN and end <= start + 2 * _SHOWN else text[:_SHOWN] + " ..."

    def syntax_error(self, what: str = "") -> ShellSyntaxError:
        next_text = self.text[self.at : self.at + 20].split("\n")[0]
        return ShellSyntaxError(
            self.line_at(), what or (f"unexpected {next_text!r}" if next_text else "the line or file ends")
        )

    def count_word(self) -> None:
        self.budget[0] -= 1
        if self.budget[0] < 0:
            raise TranslateError(
                f"{self.source}:{self.line_at()}: over {MAX_WORDS} words are in it and the files that it sources. A "
                "launch script has fewer: give the one that starts the training."
            )

    def enter_construct(self) -> None:
        """Enter a construct. The caller decreases ``depth`` again, except after an error, which ends the parsing."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TranslateError(
                f"{self.source}:{self.line_at()}: over {MAX_DEPTH} constructs are nested here. Write the value, or the "
                "command."
            )

    @abstractmethod
    def parse_items(self, ends: frozenset[str]) -> list[Item]:
        """Parse the commands of ``$(...)``, up to a reserved word of ``ends`` or a closing bracket."""

    # ---- words

    def parse_word(self) -> ShellWord:
        self.count_word()
        start, text = self.at, self.text
        parts: list[Part] = []
        word = ShellWord(parts, self.line_at())
        while self.at < self.end:
            c = text[self.at]
            if parts:
                self.count_word()
            # A word ends at the first character that no branch takes.
            if plain := _PLAIN.match(text, self.at):
                parts.append(Literal(plain[0], False, self.line_at()))
                self.at = plain.end()
            elif c == "\\":
                self.parse_escape(parts, self.text[self.at + 1 : self.at + 2])
            elif c == "'":
                parts.append(self.parse_single_quotes())
            elif c == '"':
                self.parse_double_quotes(parts)
            elif c == "`":
                parts.append(self.parse_backquotes(False))
            elif c == "$":
                self.parse_dollar(parts, False)
            elif c in "<>" and text.startswith("(", self.at + 1):
                parts.append(self.parse_process_substitution())
            else:
                break
        if self.at == start:
            raise self.syntax_error()
        return word

    def parse_escape(self, parts: list[Part], letter: str) -> None:
        if letter != "\n":
            parts.append(Literal(letter or "\\", True, self.line_at()))
        self.at += 2

    def parse_single_quotes(self) -> Literal:
        end, line = self.text.find("'", self.at + 1), self.line_at()
        if end < 0:
            raise TranslateError(_UNCLOSED.format(self.source, line))
        literal = Literal(self.text[self.at + 1 : end], True, line)
        self.at = end + 1
        return literal

    def parse_double_quotes(self, parts: list[Part]) -> None:
        """Parse a text in double quotes; an empty one becomes one empty part."""
        begun, count = self.line_at(), len(parts)
        self.at += 1
        while self.at < self.end and self.text[self.at] != '"':
            self.parse_quoted_part(parts, _QUOTED)
        if self.at >= self.end:
            raise TranslateError(_UNCLOSED.format(self.source, begun))
        self.at += 1
        if len(parts) == count:
            parts.append(Literal("", True, begun))

    def parse_quoted_part(self, parts: list[Part], plain: re.Pattern[str]) -> None:
        c = self.text[self.at]
        self.count_word()
        if match := plain.match(self.text, self.at):
            parts.append(Literal(match[0], True, self.line_at()))
            self.at = match.end()
        elif c == "\\":
            letter = self.text[self.at + 1 : self.at + 2]
            if letter and letter in '"\\$`\n' or (letter == "}" and plain is not _QUOTED):
                self.parse_escape(parts, letter)
            else:
                parts.append(Literal("\\", True, self.line_at()))
                self.at += 1
        elif c == "$":
            self.parse_dollar(parts, True)
        elif c == "`":
            parts.append(self.parse_backquotes(True))
        else:
            parts.append(Literal(c, True, self.line_at()))
            self.at += 1

    def parse_dollar(self, parts: list[Part], quoted: bool) -> None:
        text, start = self.text, self.at
        if text.startswith("$((", start):
            self.at += 1
            line = self.line_at()
            if (sum_ := self.parse_arithmetic()) is not None:
                parts.append(Arithmetic(sum_, quoted, line, self.excerpt(start, self.at)))
                return
            self.at = start
        if text.startswith("$(", start):
            line = self.line_at()
            self.at += 2
            before, pending = self.num_breaks, self.documents
            self.documents = []
            commands = self.parse_items(frozenset())
            self.num_breaks, self.documents = before, pending
            if text[self.at : self.at + 1] != ")":
                raise self.syntax_error("$( is not closed")
            self.at += 1
            parts.append(Substitution(commands, quoted, line, self.excerpt(start, self.at)))
        elif text.startswith("${", start):
            self.enter_construct()
            parts.append(self.parse_parameter(quoted))
            self.depth -= 1
        elif text.startswith("$[", start) and (end := text.find("]", start, start + _SUM)) >= 0:  # obsolete arithmetic
            self.at = end + 1
            parts.append(UnknownExpansion(quoted, self.line_at(start), self.excerpt(start, self.at)))
        elif not quoted and text.startswith("$'", start):
            parts.append(self.parse_ansi_quotes())
        elif not quoted and text.startswith('$"', start):
            self.at += 1
            self.parse_double_quotes(parts)
        elif match := _NAME.match(text, start + 1):
            self.at = match.end()
            parts.append(Parameter(match[0], quoted, self.line_at(start), f"${match[0]}"))
        else:
            self.at += 1
            parts.append(Literal("$", True, self.line_at(start)))

    def parse_parameter(self, quoted: bool) -> Part:
        """``${...}``."""
        start, line = self.at, self.line_at()
        self.at += 2
        match = _PARAMETER.match(self.text, self.at)
        part: UnknownExpansion | Parameter = UnknownExpansion(quoted, line, "")
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
            self.parse_operand(argument.parts, quoted and not patterned)
        if self.at >= self.end:
            raise self.syntax_error("${ is not closed")
        self.at += 1
        part.written = self.excerpt(start, self.at)
        if isinstance(part, Parameter):
            part.argument = argument if part.operator else None
            if part.index is not None and part.index not in ("@", "*"):
                inner = type(self)(str(part.index), self.source, self.budget, line, True)
                part.index = inner.parse_quoted_text()
        elif argument.parts and not isinstance(part, UnknownExpansion):
            raise self.syntax_error()
        return part

    def parse_operand(self, parts: list[Part], quoted: bool) -> None:
        """Parse a piece of the operand in ``${...}``."""
        c = self.text[self.at]
        if c == '"':
            self.parse_double_quotes(parts)
        elif quoted:
            self.parse_quoted_part(parts, _BRACED_IN_QUOTES)
        elif c == "'":
            parts.append(self.parse_single_quotes())
        elif c == "\\":
            self.parse_escape(parts, self.text[self.at + 1 : self.at + 2])
        elif match := _BRACED.match(self.text, self.at):
            parts.append(Literal(match[0], False, self.line_at()))
            self.at = match.end()
        elif c == "$":
            self.parse_dollar(parts, False)
        else:
            parts.append(self.parse_backquotes(False))

    def parse_quoted_text(self) -> ShellWord:
        """Parse the whole text as in double quotes, with quotes as plain characters."""
        word = ShellWord([], self.line_at())
        while self.at < self.end:
            self.parse_quoted_part(word.parts, _QUOTED)
        return word

    def parse_ansi_quotes(self) -> Part:
        """Parse ``$'...'``; one with escapes is not followed."""
        start, line = self.at, self.line_at()
        match = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL).match(self.text, start)
        if match is None:
            raise TranslateError(_UNCLOSED.format(self.source, line))
        self.at = match.end()
        return (
            UnknownExpansion(True, line, self.excerpt(start, self.at))
            if "\\" in match[1]
            else Literal(match[1], True, line)
        )

    def parse_backquotes(self, quoted: bool) -> Part:
        start, line = self.at, self.line_at()
        match = _BACKQUOTED.match(self.text, start)
        if match is None:
            raise TranslateError(_UNCLOSED.format(self.source, line))
        self.at = match.end()
        escaped = r"\\([`\\$\"])" if quoted else r"\\([`\\$])"
        inner = type(self)(re.sub(escaped, r"\1", match[1]), self.source, self.budget, line, self.fixed)
        inner.depth = self.depth
        commands = inner.parse_items(frozenset())
        if inner.at < inner.end:
            raise inner.syntax_error()
        return Substitution(commands, quoted, line, self.excerpt(start, self.at))

    def parse_process_substitution(self) -> Part:
        """``<(commands)``."""
        start, line = self.at, self.line_at()
        self.at += 2
        self.parse_items(frozenset())
        if self.text[self.at : self.at + 1] != ")":
            raise self.syntax_error()
        self.at += 1
        return UnknownExpansion(True, line, self.excerpt(start, self.at))

    def parse_arithmetic(self) -> ShellWord | None:
        """Parse ``((expression))`` from its first bracket; returns None, and consumes nothing, for other syntax."""
        start, depth = self.at, 0
        for match in _BRACKET.finditer(self.text, start, start + _SUM):
            depth += 1 if match[0] == "(" else -1
            if depth == 1 and match[0] == ")" and self.text[match.end() : match.end() + 1] != ")":
                return None
            if not depth:
                inner = type(self)(
                    self.text[start + 2 : match.start() - 1], self.source, self.budget, self.line_at(), self.fixed
                )
                inner.depth = self.depth
                inner.enter_construct()
                word = inner.parse_quoted_text()
                self.count_word()
                self.at = match.end()
                return word
        return None
