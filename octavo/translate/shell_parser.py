"""The grammar of the shell as far as launch scripts use it: from a text to the tree of `shell_syntax`.

A parser by recursive descent over the text, in one pass: no part is scanned again but bounded look-ahead, so time is
linear in the length, and the depth is bounded. Like a shell, it reads command by command: where one cannot be read, those
before it stand, and the rest of the file is reported.
"""

from __future__ import annotations

import re

from octavo.translate.given import TranslateError
from octavo.translate.shell_syntax import (
    AndOr,
    Arithmetic,
    ArithmeticCommand,
    Assignment,
    Case,
    Condition,
    Function,
    Group,
    If,
    Item,
    Literal,
    Loop,
    Node,
    Parameter,
    Part,
    Pipeline,
    Program,
    ShellSyntaxError,
    ShellWord,
    Simple,
    Substitution,
    Unfollowed,
)

#: constructs within each other; words, and parts of words, of one script with all that it sources
DEPTH, WORDS = 50, 200_000
_SHOWN = 200  # letters of a command in a report
_SUM = 4000  # letters of an arithmetic expression; what is longer is read as commands
_UNCLOSED = "{}:{}: a quote begins here and never ends. Close it."
_END = r"(?=[\s;&|()<>]|$)"
_RESERVED = re.compile(
    r"(?:if|then|else|elif|fi|for|while|until|do|done|case|esac|function|select|time|coproc|in|\{|\}|!|\[\[)" + _END
)
_CLOSERS = frozenset(("then", "else", "elif", "fi", "do", "done", "esac", "}", "in"))
_BLANK = re.compile(r"(?:[ \t]|\\\n)*(?:#[^\n]*)?")
_SPACE = re.compile(r"(?:[ \t]|\\\n)*")
_PLAIN = re.compile(r"[^ \t\n;&|<>()\\'\"`$]+")
_QUOTED = re.compile(r"[^\"\\$`]+")
_BRACED = re.compile(r"[^}\"'\\$`]+")
_BRACED_IN_QUOTES = re.compile(r"[^}\"\\$`]+")
_ASSIGN = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]\n]{0,200})\])?(\+?)=")
_REDIRECTION = re.compile(r"(?:\d*|\{[A-Za-z_]\w{0,100}\})(<<<|<<-|<<|<>|<&|>&|>>|>\||<(?!\()|>(?!\())|(&>>|&>)")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@#*?$!-]")
_PARAMETER = re.compile(r"(#?)([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?:\[([^\]\n{}]{0,200})\])?")
_OPERATOR = re.compile(r":?[-=?+]|##?|%%?|//?|\^\^?|,,?|:|@")
_BACKQUOTED = re.compile(r"`((?:[^`\\]|\\.)*)`", re.DOTALL)
_PLACEHOLDER = re.compile(r"<[^<>|&;()\n]{1,100}>(?=[ \t;)\n]|$)")
_FUNCTION = re.compile(r"[^ \t\n;&|<>()\\'\"`$=#][^ \t\n;&|<>()\\'\"`$=]*(?=[ \t]*\([ \t]*\))")
#: their arguments may be assignments, arrays too
DECLARATIONS = frozenset(("export", "declare", "typeset", "local", "readonly"))


class Parser:
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

    def program(self) -> Program:
        """Raises TranslateError for a quote that never ends, and beyond the bounds."""
        items: list[Item] = []
        whole = start = 0  # commands of lines that ended, as a shell carries out whole lines
        try:
            while True:
                self.newlines()
                whole, start = len(items), self.at
                if self.at >= self.end:
                    return Program(items)
                while self.at < self.end and self.text[self.at] != "\n":
                    self.item(items, frozenset())
                    self.blank()
        except ShellSyntaxError as error:
            text = self.shown(start, min(self.end, start + 4 * _SHOWN))
            return Program(items[:whole], (error.line, text, f"a shell stops reading here: {error.what}"))

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
        """One construct deeper; ``depth`` is taken back by the caller, and by nobody after an error, which ends it all."""
        self.depth += 1
        if self.depth > DEPTH:
            raise TranslateError(f"{self.source}:{self.line()}: over {DEPTH} constructs are within each other here. "
                                 "Write the value, or the command.")  # fmt: skip

    def blank(self) -> None:
        self.at = _BLANK.match(self.text, self.at).end()  # type: ignore[union-attr]

    def newlines(self) -> None:
        while True:
            self.blank()
            if self.text[self.at : self.at + 1] != "\n":
                return
            self.newline()

    def newline(self) -> None:
        """The end of a line; here-documents that it announced follow."""
        self.at += 1
        for delimiter, tabs, raw in self.documents:
            self.document(delimiter, tabs, raw)
        self.documents.clear()

    def document(self, delimiter: str, tabs: bool, raw: bool) -> None:
        ending = re.compile("^" + ("\t*" if tabs else "") + re.escape(delimiter) + "$", re.MULTILINE)
        at = self.at
        while (found := ending.search(self.text, at)) is not None:
            before = self.text[max(self.at, found.start() - 200) : found.start()]
            joined = before[:-1] if before.endswith("\n") else ""
            if raw or (len(joined) - len(joined.rstrip("\\"))) % 2 == 0:
                self.at = min(found.end() + 1, self.end)
                return
            at = found.end() + 1  # the line before goes on in this one
            if at > self.end:
                break
        self.at = self.end

    def reserved(self) -> str:
        found = _RESERVED.match(self.text, self.at)
        return found[0] if found else ""

    def expect(self, word: str) -> None:
        self.newlines()
        if self.reserved() != word:
            raise self.wrong(f"{word} was expected, not {self.text[self.at : self.at + 20].split(chr(10))[0]!r}")
        self.at += len(word)

    # ---- lists

    def items(self, ends: frozenset[str]) -> list[Item]:
        """Commands up to a reserved word of ``ends``, a closing bracket or ``;;``, which the caller checks."""
        found: list[Item] = []
        self.enter()
        while True:
            self.newlines()
            if self.at >= self.end or self.text[self.at] == ")" or self.terminator():
                break
            if ends and self.reserved() in ends:
                break
            self.item(found, ends)
        self.depth -= 1
        return found

    def terminator(self) -> str:
        for sign in (";;&", ";;", ";&"):
            if self.text.startswith(sign, self.at):
                return sign
        return ""

    def item(self, into: list[Item], ends: frozenset[str]) -> None:
        start, line = self.at, self.line()
        node = self.and_or()
        item = Item(node, line, self.shown(start, self.at))
        into.append(item)
        self.blank()
        c = self.text[self.at : self.at + 1]
        if c == "&" or (c == ";" and not self.terminator()):
            item.background = c == "&"
            self.at += 1
        elif c in ("", "\n") or (ends and self.reserved() in ends):
            return
        elif not self.depth or not (c == ")" or self.terminator()):
            raise self.wrong()

    def and_or(self) -> Node:
        first, rest = self.pipeline(), []
        while True:
            self.blank()
            sign = self.text[self.at : self.at + 2]
            if sign not in ("&&", "||"):
                return AndOr(first, rest) if rest else first
            self.at += 2
            self.newlines()
            rest.append((sign, self.pipeline()))

    def pipeline(self) -> Node:
        negated, commands = False, []
        while (word := self.reserved()) in ("!", "time"):
            self.at += len(word)
            negated ^= word == "!"
            self.blank()
            if word == "time" and self.text.startswith("-p ", self.at):
                self.at += 3
                self.blank()
        while True:
            commands.append(self.command())
            self.blank()
            if self.text[self.at : self.at + 1] != "|" or self.text.startswith("||", self.at):
                break
            self.at += 2 if self.text.startswith("|&", self.at) else 1
            self.newlines()
        return commands[0] if len(commands) == 1 and not negated else Pipeline(commands, negated)

    # ---- commands

    def command(self) -> Node:
        self.spend()
        word = self.reserved()
        if word in _CLOSERS and word != "in":
            raise self.wrong(f"{word} closes nothing")
        compound = getattr(self, f"_{_COMPOUND[word]}", None) if word in _COMPOUND else None
        if compound is None and self.text[self.at : self.at + 1] != "(":
            return self.function() or self.simple()
        node = compound() if compound else self._brackets()
        self.blank()
        while self.redirection():
            self.blank()
        return node

    def _if(self) -> Node:
        line, clauses, headings = self.line(), [], []
        word = "if"
        while word in ("if", "elif"):
            start = self.at
            self.at += len(word)
            condition = self.items(frozenset(("then",)))
            headings.append(self.shown(start, self.at))
            self.expect("then")
            clauses.append((condition, self.items(frozenset(("elif", "else", "fi")))))
            word = self.reserved()
        otherwise: list[Item] = []
        if word == "else":
            self.at += 4
            otherwise = self.items(frozenset(("fi",)))
        self.expect("fi")
        return If(clauses, otherwise, line, headings)

    def _while(self) -> Node:
        start, line, before = self.at, self.line(), self.leaves
        self.at += 5
        condition = self.items(frozenset(("do",)))
        heading = self.shown(start, self.at)
        body = self.body()
        return Loop(None, None, condition, body, line, heading, self.leaves > before)

    def _for(self) -> Node:
        start, line, before = self.at, self.line(), self.leaves
        self.at += len(self.reserved())
        self.blank()
        name, words, arithmetic = None, None, None
        if self.text.startswith("((", self.at):
            arithmetic = self.brackets()
        else:
            if not (found := re.compile(r"[A-Za-z_]\w*").match(self.text, self.at)):
                raise self.wrong()
            name, self.at = found[0], found.end()
            self.newlines()
            if self.reserved() == "in":
                self.at += 2
                words = []
                self.blank()
                while self.text[self.at : self.at + 1] not in ("", "\n", ";"):
                    words.append(self.word())
                    self.blank()
        heading = self.shown(start, self.at)
        self.blank()
        if self.text[self.at : self.at + 1] == ";":
            self.at += 1
        is_select = self.text.startswith("select", start)
        body = self.body()
        leaves = self.leaves > before
        return Loop(name, None if is_select else words, [], body, line, heading, leaves, arithmetic)

    def body(self) -> list[Item]:
        self.newlines()
        braces = self.reserved() == "{"
        self.expect("{" if braces else "do")
        found = self.items(frozenset(("}" if braces else "done",)))
        self.expect("}" if braces else "done")
        return found

    def _case(self) -> Node:
        start, line, clauses = self.at, self.line(), []
        self.at += 4
        self.blank()
        subject = self.word()
        heading = self.shown(start, self.at)
        self.expect("in")
        while True:
            self.newlines()
            if self.reserved() == "esac":
                self.at += 4
                return Case(subject, clauses, line, heading)
            if self.text[self.at : self.at + 1] == "(":
                self.at += 1
                self.blank()
            patterns = [self.word()]
            self.blank()
            while self.text[self.at : self.at + 1] == "|":
                self.at += 1
                self.blank()
                patterns.append(self.word())
                self.blank()
            if self.text[self.at : self.at + 1] != ")":
                raise self.wrong()
            self.at += 1
            commands = self.items(frozenset(("esac",)))
            sign = self.terminator()
            self.at += len(sign)
            if not sign and self.reserved() != "esac":
                raise self.wrong()
            clauses.append((patterns, commands, sign not in ("", ";;")))

    def _braces(self) -> Node:
        self.at += 1
        found = self.items(frozenset(("}",)))
        self.expect("}")
        return Group(found, False)

    def _condition(self) -> Node:
        line, words = self.line(), []
        self.at += 2
        while True:
            self.newlines()
            if self.at >= self.end:
                raise self.wrong()
            if re.compile(r"\]\]" + _END).match(self.text, self.at):
                self.at += 2
                return Condition(words, line)
            if self.text[self.at] in "()<>&|;":
                words.append(self.text[self.at])
                self.at += 1
            else:
                words.append(self.word())

    def _coproc(self) -> Node:
        self.at += 6
        self.blank()
        return Group([Item(self.command(), self.line(), "coproc")], True)

    def _brackets(self) -> Node:
        """``(( sum ))``, or ``( commands )``."""
        line = self.line()
        if self.text.startswith("((", self.at) and (sum_ := self.brackets()) is not None:
            return ArithmeticCommand(sum_, line)
        self.at += 1
        found = self.items(frozenset())
        if self.text[self.at : self.at + 1] != ")":
            raise self.wrong()
        self.at += 1
        return Group(found, True)

    def _function(self) -> Node:
        start = self.at
        self.at += 8
        self.blank()
        found = re.compile(r"[^ \t\n;&|<>()\\'\"`$]+").match(self.text, self.at)
        if found is None:
            raise self.wrong()
        self.at = found.end()
        self.blank()
        if brackets := re.compile(r"\([ \t]*\)").match(self.text, self.at):
            self.at = brackets.end()
        return self.defined(found[0], start)

    def function(self) -> Node | None:
        """``name() ...``, if one begins here."""
        found = _FUNCTION.match(self.text, self.at)
        if found is None:
            return None
        start = self.at
        self.at = self.text.index(")", found.end()) + 1
        return self.defined(found[0], start)

    def defined(self, name: str, start: int) -> Node:
        line, heading = self.line(start), self.shown(start, self.at)
        self.newlines()
        if self.text[self.at : self.at + 1] != "(" and self.reserved() not in _COMPOUND:
            raise self.wrong()
        before = self.leaves
        self.enter()
        body = self.command()
        self.depth -= 1
        self.leaves = before
        return Function(name, body, line, heading)

    def simple(self) -> Node:
        node = Simple([], [], self.line())
        declares = False
        while True:
            self.blank()
            c = self.text[self.at : self.at + 1]
            if c in ("", "\n", ";", "|", ")") or (c == "&" and not self.text.startswith("&>", self.at)):
                break
            if (c.isdigit() or c in "<>&{") and self.redirection():
                node.redirected = True
                continue
            if (declares or not node.words) and (found := _ASSIGN.match(self.text, self.at)):
                (node.words if declares else node.assignments).append(self.assignment(found))
                continue
            node.words.append(self.word())
            if len(node.words) == 1:
                name = node.words[0].literal  # type: ignore[union-attr]
                declares = name in DECLARATIONS
                self.leaves += name in ("break", "continue")
        if (
            not node.words
            and not node.assignments
            and self.text[self.at : self.at + 1] not in ("", "\n", ";", "|", "&", ")")
        ):
            raise self.wrong()
        return node

    def assignment(self, found: re.Match[str]) -> Assignment:
        node = Assignment(found[1], self.line(), bool(found[3]), found[2])
        self.spend()
        self.at = found.end()
        c = self.text[self.at : self.at + 1]
        if c == "(":
            self.at += 1
            node.elements = []
            while True:
                self.newlines()
                if self.text[self.at : self.at + 1] == ")":
                    self.at += 1
                    break
                node.elements.append(self.placeholder() or self.word())
        elif c == "<":
            node.value = self.placeholder()
        elif c not in ("", " ", "\t", "\n", ";", "&", "|", ")", "<", ">"):
            node.value = self.word()
        return node

    def placeholder(self) -> ShellWord | None:
        """``<your address>``, which published scripts have where a value is to be written in: a shell would stop there."""
        found = _PLACEHOLDER.match(self.text, self.at)
        if found is None:
            return None
        self.at = found.end()
        return ShellWord([Unfollowed(True, self.line(), found[0])], self.line())

    def redirection(self) -> bool:
        """Whether one was here; what it reads and writes is no part of the words."""
        found = _REDIRECTION.match(self.text, self.at)
        if found is None:
            return False
        sign, self.at = found[1] or found[2], found.end()
        self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
        start = self.at
        word = self.word()
        if sign in ("<<", "<<-"):
            raw = any(not isinstance(part, Literal) or part.quoted for part in word.parts)
            written = self.text[start : self.at]
            literal = all(isinstance(part, Literal) for part in word.parts)
            text = "".join(p.text for p in word.parts if isinstance(p, Literal)) if literal else written
            self.documents.append((text, sign == "<<-", raw and literal))
        return True

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
        while self.at < self.end and self.text[self.at] != "}":
            self.braced(argument.parts, quoted)
        if self.at >= self.end:
            raise self.wrong("${ is not closed")
        self.at += 1
        part.written = self.shown(start, self.at)
        if isinstance(part, Parameter):
            part.argument = argument if part.operator else None
            if part.index is not None and part.index not in ("@", "*"):
                inner = Parser(str(part.index), self.source, self.budget, line, True)
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
        inner = Parser(re.sub(escaped, r"\1", found[1]), self.source, self.budget, line, self.fixed)
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
                inner = Parser(
                    self.text[start + 2 : found.start() - 1], self.source, self.budget, self.line(), self.fixed
                )
                inner.depth = self.depth
                inner.enter()
                word = inner.quoted_text()
                self.spend()
                self.at = found.end()
                return word
        return None


_BRACKET = re.compile(r"[()]")
_COMPOUND = {"if": "if", "while": "while", "until": "while", "for": "for", "select": "for", "case": "case", "{": "braces",
             "[[": "condition", "function": "function", "coproc": "coproc"}  # fmt: skip
