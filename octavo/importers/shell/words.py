"""Words of a launch script: quotes, variables, substitutions. `parser` reads the commands that they make up.

A parser by recursive descent over the text, in one pass: nothing is scanned again but bounded look-ahead, so time is
linear in the length, and the depth is bounded.
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

#: constructs within each other; words, and parts of words, of one script with all that it sources
DEPTH, WORDS = 50, 200_000
_UNCLOSED = "{}:{}: a quote begins here and never ends. Close it."
_SHOWN = 200  # letters of a command in a report
_SUM = 4000  # letters of an arithmetic expression; what is longer is read as commands
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
    """``source`` names the file in errors; ``line`` is the first line's number, and the only one where ``fixed``;
    ``budget`` is what is left of WORDS, shared by all parsers of a script."""

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
        """The line of a position at or after all that were asked for."""
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
        found = self.text[self.at : self.at + 20].split("\n")[0]
        return ShellSyntaxError(self.line(), what or (f"unexpected {found!r}" if found else "the line or file ends"))

    def spend(self) -> None:
        self.budget[0] -= 1
        if self.budget[0] < 0:
            raise TranslateError(
                f"{self.source}:{self.line()}: over {WORDS} words are in it and the files that it sources. A launch "
                "script has fewer: give the one that starts the training."
            )

    def enter(self) -> None:
        """One construct deeper; the caller takes ``depth`` back, but after an error, which ends the reading."""
        self.depth += 1
        if self.depth > DEPTH:
            raise TranslateError(f"{self.source}:{self.line()}: over {DEPTH} constructs are within each other here. "
                                 "Write the value, or the command.")  # fmt: skip

    @abstractmethod
    def items(self, ends: frozenset[str]) -> list[Item]:
        """Commands up to a reserved word of ``ends`` or a closing bracket: those of ``$(...)``."""

    # ---- words

    def word(self) -> ShellWord:
        self.spend()
        start, parts, text = self.at, [], self.text
        word = ShellWord(parts, self.line())
        while self.at < self.end:
            c = text[self.at]
            if parts:
                self.spend()
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
        found = Literal(self.text[self.at + 1 : end], True, line)
        self.at = end + 1
        return found

    def double(self, parts: list[Part]) -> None:
        """A text in double quotes; nothing in it is one empty part."""
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
        if found := plain.match(self.text, self.at):
            parts.append(Literal(found[0], True, self.line()))
            self.at = found.end()
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
        elif text.startswith("$[", start) and (end := text.find("]", start, start + _SUM)) >= 0:  # a sum of old
            self.at = end + 1
            parts.append(Unfollowed(quoted, self.line(start), self.shown(start, self.at)))
        elif not quoted and text.startswith("$'", start):
            parts.append(self.ansi())
        elif not quoted and text.startswith('$"', start):
            self.at += 1
            self.double(parts)
        elif found := _NAME.match(text, start + 1):
            self.at = found.end()
            parts.append(Parameter(found[0], quoted, self.line(start), f"${found[0]}"))
        else:
            self.at += 1
            parts.append(Literal("$", True, self.line(start)))

    def parameter(self, quoted: bool) -> Part:
        """``${...}``."""
        start, line = self.at, self.line()
        self.at += 2
        found = _PARAMETER.match(self.text, self.at)
        part: Part = Unfollowed(quoted, line, "")
        if found and self.text[self.at : self.at + 2] == "#}":
            found = None
            part = Parameter("#", quoted, line, "$#")
            self.at += 1
        if found:
            self.at = found.end()
            operator = _OPERATOR.match(self.text, self.at)
            if operator or self.text.startswith("}", self.at):
                part = Parameter(
                    found[2], quoted, line, "", operator[0] if operator else "", None, found[3], bool(found[1])
                )
                self.at = operator.end() if operator else self.at
        argument = ShellWord([], line)
        # in "${name##*/}" the quotes around it do not quote the pattern
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
        """A piece of what follows an operator in ``${...}``."""
        c = self.text[self.at]
        if c == '"':
            self.double(parts)
        elif quoted:
            self.within_quotes(parts, _BRACED_IN_QUOTES)
        elif c == "'":
            parts.append(self.single())
        elif c == "\\":
            self.escape(parts, self.text[self.at + 1 : self.at + 2])
        elif found := _BRACED.match(self.text, self.at):
            parts.append(Literal(found[0], False, self.line()))
            self.at = found.end()
        elif c == "$":
            self.dollar(parts, False)
        else:
            parts.append(self.backquoted(False))

    def quoted_text(self) -> ShellWord:
        """All of this text as if it stood in double quotes, with quotes that mean nothing."""
        word = ShellWord([], self.line())
        while self.at < self.end:
            self.within_quotes(word.parts, _QUOTED)
        return word

    def ansi(self) -> Part:
        """``$'...'``; one with escapes is not followed."""
        start, line = self.at, self.line()
        found = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL).match(self.text, start)
        if found is None:
            raise TranslateError(_UNCLOSED.format(self.source, line))
        self.at = found.end()
        return Unfollowed(True, line, self.shown(start, self.at)) if "\\" in found[1] else Literal(found[1], True, line)

    def backquoted(self, quoted: bool) -> Part:
        start, line = self.at, self.line()
        found = _BACKQUOTED.match(self.text, start)
        if found is None:
            raise TranslateError(_UNCLOSED.format(self.source, line))
        self.at = found.end()
        escaped = r"\\([`\\$\"])" if quoted else r"\\([`\\$])"
        inner = type(self)(re.sub(escaped, r"\1", found[1]), self.source, self.budget, line, self.fixed)
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
        """``((expression))`` from its first bracket; None, and nothing is taken, where it is another thing."""
        start, depth = self.at, 0
        for found in _BRACKET.finditer(self.text, start, start + _SUM):
            depth += 1 if found[0] == "(" else -1
            if depth == 1 and found[0] == ")" and self.text[found.end() : found.end() + 1] != ")":
                return None
            if not depth:
                inner = type(self)(
                    self.text[start + 2 : found.start() - 1], self.source, self.budget, self.line(), self.fixed
                )
                inner.depth = self.depth
                inner.enter()
                word = inner.quoted_text()
                self.spend()
                self.at = found.end()
                return word
        return None
