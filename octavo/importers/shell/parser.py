"""Parses the part of the shell's grammar that launch scripts use, to the tree of `syntax`."""

from __future__ import annotations

import re

from octavo.importers.shell.syntax import (
    AndOr,
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
    Pipeline,
    Program,
    ShellSyntaxError,
    ShellWord,
    Simple,
    Unfollowed,
)
from octavo.importers.shell.words import WordParser

_SHOWN_LINES = 800  # maximum characters of unreadable text in a report
_END = r"(?=[\s;&|()<>]|$)"
_RESERVED = re.compile(
    r"(?:if|then|else|elif|fi|for|while|until|do|done|case|esac|function|select|time|coproc|in|\{|\}|!|\[\[)" + _END
)
_CLOSERS = frozenset(("then", "else", "elif", "fi", "do", "done", "esac", "}", "in"))
_BLANK = re.compile(r"(?:[ \t]|\\\n)*(?:#[^\n]*)?")
_SPACE = re.compile(r"(?:[ \t]|\\\n)*")
_ASSIGN = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]\n]{0,200})\])?(\+?)=")
_REDIRECTION = re.compile(r"(?:\d*|\{[A-Za-z_]\w{0,100}\})(<<<|<<-|<<|<>|<&|>&|>>|>\||<(?!\()|>(?!\())|(&>>|&>)")
_PLACEHOLDER = re.compile(r"<[^<>|&;()\n]{1,100}>(?=[ \t;)\n]|$)")
_FUNCTION = re.compile(r"[^ \t\n;&|<>()\\'\"`$=#][^ \t\n;&|<>()\\'\"`$=]*(?=[ \t]*\([ \t]*\))")
#: commands whose arguments may be assignments, including arrays
DECLARATIONS = frozenset(("export", "declare", "typeset", "local", "readonly"))
_COMPOUND = {"if": "if", "while": "while", "until": "while", "for": "for", "select": "for", "case": "case",
             "{": "braces", "[[": "condition", "function": "function", "coproc": "coproc"}  # fmt: skip


class Parser(WordParser):
    """Parses commands. Like a shell it reads whole lines: :meth:`program` returns those before a syntax error."""

    def program(self) -> Program:
        """Parse the text. Raises TranslateError for a quote that never ends, and beyond the bounds."""
        items: list[Item] = []
        whole = start = 0  # number of commands in complete lines: a shell executes whole lines
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
            text = self.shown(start, min(self.end, start + _SHOWN_LINES))
            return Program(items[:whole], (error.line, text, f"a shell stops reading here: {error.what}"))

    def blank(self) -> None:
        self.at = _BLANK.match(self.text, self.at).end()  # type: ignore[union-attr]

    def newlines(self) -> None:
        while True:
            self.blank()
            if self.text[self.at : self.at + 1] != "\n":
                return
            self.newline()

    def newline(self) -> None:
        """Pass the end of a line, and the here-documents that follow it."""
        self.at += 1
        for delimiter, tabs, raw in self.documents:
            self.document(delimiter, tabs, raw)
        self.documents.clear()

    def document(self, delimiter: str, tabs: bool, raw: bool) -> None:
        ending = re.compile("^" + ("\t*" if tabs else "") + re.escape(delimiter) + "$", re.MULTILINE)
        at = self.at
        while (match := ending.search(self.text, at)) is not None:
            before = self.text[max(self.at, match.start() - 200) : match.start()]
            joined = before[:-1] if before.endswith("\n") else ""
            if raw or (len(joined) - len(joined.rstrip("\\"))) % 2 == 0:
                self.at = min(match.end() + 1, self.end)
                return
            at = match.end() + 1  # the previous line ends in a backslash and continues in this one
            if at > self.end:
                break
        self.at = self.end

    def reserved(self) -> str:
        match = _RESERVED.match(self.text, self.at)
        return match[0] if match else ""

    def expect(self, word: str) -> None:
        self.newlines()
        if self.reserved() != word:
            raise self.wrong(f"{word} was expected, not {self.text[self.at : self.at + 20].split(chr(10))[0]!r}")
        self.at += len(word)

    # ---- lists

    def items(self, ends: frozenset[str]) -> list[Item]:
        """Parse commands up to a reserved word of ``ends``, a closing bracket or ``;;``, which the caller checks."""
        commands: list[Item] = []
        self.enter()
        while True:
            self.newlines()
            if self.at >= self.end or self.text[self.at] == ")" or self.terminator():
                break
            if ends and self.reserved() in ends:
                break
            self.item(commands, ends)
        self.depth -= 1
        return commands

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
        first = self.pipeline()
        rest: list[tuple[str, Node]] = []
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
        # Three forms: for NAME in WORDS, for NAME (over "$@"), for ((...)).
        name, words, arithmetic = None, None, None
        if self.text.startswith("((", self.at):
            arithmetic = self.brackets()
        else:
            if not (match := re.compile(r"[A-Za-z_]\w*").match(self.text, self.at)):
                raise self.wrong()
            name, self.at = match[0], match.end()
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
        commands = self.items(frozenset(("}" if braces else "done",)))
        self.expect("}" if braces else "done")
        return commands

    def _case(self) -> Node:
        start, line = self.at, self.line()
        clauses: list[tuple[list[ShellWord], list[Item], bool]] = []
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
            sign = self.terminator()  # the last clause needs none; ;& and ;;& fall through
            self.at += len(sign)
            if not sign and self.reserved() != "esac":
                raise self.wrong()
            clauses.append((patterns, commands, sign not in ("", ";;")))

    def _braces(self) -> Node:
        self.at += 1
        commands = self.items(frozenset(("}",)))
        self.expect("}")
        return Group(commands, False)

    def _condition(self) -> Node:
        line = self.line()
        words: list[ShellWord | str] = []
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
        commands = self.items(frozenset())
        if self.text[self.at : self.at + 1] != ")":
            raise self.wrong()
        self.at += 1
        return Group(commands, True)

    def _function(self) -> Node:
        start = self.at
        self.at += 8
        self.blank()
        match = re.compile(r"[^ \t\n;&|<>()\\'\"`$]+").match(self.text, self.at)
        if match is None:
            raise self.wrong()
        self.at = match.end()
        self.blank()
        if brackets := re.compile(r"\([ \t]*\)").match(self.text, self.at):
            self.at = brackets.end()
        return self.defined(match[0], start)

    def function(self) -> Node | None:
        """Parse ``name() ...``; None if no function begins here."""
        match = _FUNCTION.match(self.text, self.at)
        if match is None:
            return None
        start = self.at
        self.at = self.text.index(")", match.end()) + 1
        return self.defined(match[0], start)

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
            # After the first word, NAME=VALUE is only an assignment for commands such as export.
            if (declares or not node.words) and (match := _ASSIGN.match(self.text, self.at)):
                (node.words if declares else node.assignments).append(self.assignment(match))
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

    def assignment(self, match: re.Match[str]) -> Assignment:
        node = Assignment(match[1], self.line(), bool(match[3]), match[2])
        self.spend()
        self.at = match.end()
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
        """Parse ``<your address>``, which published scripts have instead of a value. A shell would stop there."""
        match = _PLACEHOLDER.match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        return ShellWord([Unfollowed(True, self.line(), match[0])], self.line())

    def redirection(self) -> bool:
        """Parse a redirection; its operands are not words of the command. Returns whether there was one."""
        match = _REDIRECTION.match(self.text, self.at)
        if match is None:
            return False
        sign, self.at = match[1] or match[2], match.end()
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
