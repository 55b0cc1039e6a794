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
    SimpleCommand,
    UnknownExpansion,
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
    """Parses commands. Like a shell it reads whole lines: :meth:`parse_program` returns those before a syntax error."""

    def parse_program(self) -> Program:
        """Parse the text. Raises TranslateError for a quote that never ends, and beyond the bounds."""
        items: list[Item] = []
        whole = start = 0  # number of commands in complete lines: a shell executes whole lines
        try:
            while True:
                self.skip_newlines()
                whole, start = len(items), self.at
                if self.at >= self.end:
                    return Program(items)
                while self.at < self.end and self.text[self.at] != "\n":
                    self.parse_item(items, frozenset())
                    self.skip_blank()
        except ShellSyntaxError as error:
            text = self.excerpt(start, min(self.end, start + _SHOWN_LINES))
            return Program(items[:whole], (error.line, text, f"a shell stops reading here: {error.what}"))

    def skip_blank(self) -> None:
        self.at = _BLANK.match(self.text, self.at).end()  # type: ignore[union-attr]

    def skip_newlines(self) -> None:
        while True:
            self.skip_blank()
            if self.text[self.at : self.at + 1] != "\n":
                return
            self.end_line()

    def end_line(self) -> None:
        """Pass the end of a line, and the here-documents that follow it."""
        self.at += 1
        for delimiter, tabs, raw in self.documents:
            self.skip_here_document(delimiter, tabs, raw)
        self.documents.clear()

    def skip_here_document(self, delimiter: str, tabs: bool, raw: bool) -> None:
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

    def reserved_word(self) -> str:
        match = _RESERVED.match(self.text, self.at)
        return match[0] if match else ""

    def expect(self, word: str) -> None:
        self.skip_newlines()
        if self.reserved_word() != word:
            raise self.syntax_error(f"{word} was expected, not {self.text[self.at : self.at + 20].split(chr(10))[0]!r}")
        self.at += len(word)

    # ---- lists

    def parse_items(self, ends: frozenset[str]) -> list[Item]:
        """Parse commands up to a reserved word of ``ends``, a closing bracket or ``;;``, which the caller checks."""
        commands: list[Item] = []
        self.enter_construct()
        while True:
            self.skip_newlines()
            if self.at >= self.end or self.text[self.at] == ")" or self.case_terminator():
                break
            if ends and self.reserved_word() in ends:
                break
            self.parse_item(commands, ends)
        self.depth -= 1
        return commands

    def case_terminator(self) -> str:
        for sign in (";;&", ";;", ";&"):
            if self.text.startswith(sign, self.at):
                return sign
        return ""

    def parse_item(self, into: list[Item], ends: frozenset[str]) -> None:
        start, line = self.at, self.line_at()
        node = self.parse_and_or()
        item = Item(node, line, self.excerpt(start, self.at))
        into.append(item)
        self.skip_blank()
        c = self.text[self.at : self.at + 1]
        if c == "&" or (c == ";" and not self.case_terminator()):
            item.background = c == "&"
            self.at += 1
        elif c in ("", "\n") or (ends and self.reserved_word() in ends):
            return
        elif not self.depth or not (c == ")" or self.case_terminator()):
            raise self.syntax_error()

    def parse_and_or(self) -> Node:
        first = self.parse_pipeline()
        rest: list[tuple[str, Node]] = []
        while True:
            self.skip_blank()
            sign = self.text[self.at : self.at + 2]
            if sign not in ("&&", "||"):
                return AndOr(first, rest) if rest else first
            self.at += 2
            self.skip_newlines()
            rest.append((sign, self.parse_pipeline()))

    def parse_pipeline(self) -> Node:
        negated, commands = False, []
        while (word := self.reserved_word()) in ("!", "time"):
            self.at += len(word)
            negated ^= word == "!"
            self.skip_blank()
            if word == "time" and self.text.startswith("-p ", self.at):
                self.at += 3
                self.skip_blank()
        while True:
            commands.append(self.parse_command())
            self.skip_blank()
            if self.text[self.at : self.at + 1] != "|" or self.text.startswith("||", self.at):
                break
            self.at += 2 if self.text.startswith("|&", self.at) else 1
            self.skip_newlines()
        return commands[0] if len(commands) == 1 and not negated else Pipeline(commands, negated)

    # ---- commands

    def parse_command(self) -> Node:
        self.count_word()
        word = self.reserved_word()
        if word in _CLOSERS and word != "in":
            raise self.syntax_error(f"{word} closes nothing")
        compound = getattr(self, f"_{_COMPOUND[word]}", None) if word in _COMPOUND else None
        if compound is None and self.text[self.at : self.at + 1] != "(":
            return self.parse_function() or self.parse_simple()
        node = compound() if compound else self._parenthesis()
        self.skip_blank()
        while self.parse_redirection():
            self.skip_blank()
        return node

    def _if(self) -> Node:
        line, clauses, headings = self.line_at(), [], []
        word = "if"
        while word in ("if", "elif"):
            start = self.at
            self.at += len(word)
            condition = self.parse_items(frozenset(("then",)))
            headings.append(self.excerpt(start, self.at))
            self.expect("then")
            clauses.append((condition, self.parse_items(frozenset(("elif", "else", "fi")))))
            word = self.reserved_word()
        otherwise: list[Item] = []
        if word == "else":
            self.at += 4
            otherwise = self.parse_items(frozenset(("fi",)))
        self.expect("fi")
        return If(clauses, otherwise, line, headings)

    def _while(self) -> Node:
        start, line, before = self.at, self.line_at(), self.num_breaks
        self.at += 5
        condition = self.parse_items(frozenset(("do",)))
        heading = self.excerpt(start, self.at)
        body = self.parse_body()
        return Loop(None, None, condition, body, line, heading, self.num_breaks > before)

    def _for(self) -> Node:
        start, line, before = self.at, self.line_at(), self.num_breaks
        self.at += len(self.reserved_word())
        self.skip_blank()
        # Three forms: for NAME in MAX_WORDS, for NAME (over "$@"), for ((...)).
        name, words, arithmetic = None, None, None
        if self.text.startswith("((", self.at):
            arithmetic = self.parse_arithmetic()
        else:
            if not (match := re.compile(r"[A-Za-z_]\w*").match(self.text, self.at)):
                raise self.syntax_error()
            name, self.at = match[0], match.end()
            self.skip_newlines()
            if self.reserved_word() == "in":
                self.at += 2
                words = []
                self.skip_blank()
                while self.text[self.at : self.at + 1] not in ("", "\n", ";"):
                    words.append(self.parse_word())
                    self.skip_blank()
        heading = self.excerpt(start, self.at)
        self.skip_blank()
        if self.text[self.at : self.at + 1] == ";":
            self.at += 1
        is_select = self.text.startswith("select", start)
        body = self.parse_body()
        has_break = self.num_breaks > before
        return Loop(name, None if is_select else words, [], body, line, heading, has_break, arithmetic)

    def parse_body(self) -> list[Item]:
        self.skip_newlines()
        braces = self.reserved_word() == "{"
        self.expect("{" if braces else "do")
        commands = self.parse_items(frozenset(("}" if braces else "done",)))
        self.expect("}" if braces else "done")
        return commands

    def _case(self) -> Node:
        start, line = self.at, self.line_at()
        clauses: list[tuple[list[ShellWord], list[Item], bool]] = []
        self.at += 4
        self.skip_blank()
        subject = self.parse_word()
        heading = self.excerpt(start, self.at)
        self.expect("in")
        while True:
            self.skip_newlines()
            if self.reserved_word() == "esac":
                self.at += 4
                return Case(subject, clauses, line, heading)
            if self.text[self.at : self.at + 1] == "(":
                self.at += 1
                self.skip_blank()
            patterns = [self.parse_word()]
            self.skip_blank()
            while self.text[self.at : self.at + 1] == "|":
                self.at += 1
                self.skip_blank()
                patterns.append(self.parse_word())
                self.skip_blank()
            if self.text[self.at : self.at + 1] != ")":
                raise self.syntax_error()
            self.at += 1
            commands = self.parse_items(frozenset(("esac",)))
            sign = self.case_terminator()  # the last clause needs none; ;& and ;;& fall through
            self.at += len(sign)
            if not sign and self.reserved_word() != "esac":
                raise self.syntax_error()
            clauses.append((patterns, commands, sign not in ("", ";;")))

    def _braces(self) -> Node:
        self.at += 1
        commands = self.parse_items(frozenset(("}",)))
        self.expect("}")
        return Group(commands, False)

    def _condition(self) -> Node:
        line = self.line_at()
        words: list[ShellWord | str] = []
        self.at += 2
        while True:
            self.skip_newlines()
            if self.at >= self.end:
                raise self.syntax_error()
            if re.compile(r"\]\]" + _END).match(self.text, self.at):
                self.at += 2
                return Condition(words, line)
            if self.text[self.at] in "()<>&|;":
                words.append(self.text[self.at])
                self.at += 1
            else:
                words.append(self.parse_word())

    def _coproc(self) -> Node:
        self.at += 6
        self.skip_blank()
        return Group([Item(self.parse_command(), self.line_at(), "coproc")], True)

    def _parenthesis(self) -> Node:
        """``(( sum ))``, or ``( commands )``."""
        line = self.line_at()
        if self.text.startswith("((", self.at) and (sum_ := self.parse_arithmetic()) is not None:
            return ArithmeticCommand(sum_, line)
        self.at += 1
        commands = self.parse_items(frozenset())
        if self.text[self.at : self.at + 1] != ")":
            raise self.syntax_error()
        self.at += 1
        return Group(commands, True)

    def _function(self) -> Node:
        start = self.at
        self.at += 8
        self.skip_blank()
        match = re.compile(r"[^ \t\n;&|<>()\\'\"`$]+").match(self.text, self.at)
        if match is None:
            raise self.syntax_error()
        self.at = match.end()
        self.skip_blank()
        if brackets := re.compile(r"\([ \t]*\)").match(self.text, self.at):
            self.at = brackets.end()
        return self.parse_definition(match[0], start)

    def parse_function(self) -> Node | None:
        """Parse ``name() ...``; None if no function begins here."""
        match = _FUNCTION.match(self.text, self.at)
        if match is None:
            return None
        start = self.at
        self.at = self.text.index(")", match.end()) + 1
        return self.parse_definition(match[0], start)

    def parse_definition(self, name: str, start: int) -> Node:
        line, heading = self.line_at(start), self.excerpt(start, self.at)
        self.skip_newlines()
        if self.text[self.at : self.at + 1] != "(" and self.reserved_word() not in _COMPOUND:
            raise self.syntax_error()
        before = self.num_breaks
        self.enter_construct()
        body = self.parse_command()
        self.depth -= 1
        self.num_breaks = before
        return Function(name, body, line, heading)

    def parse_simple(self) -> Node:
        node = SimpleCommand([], [], self.line_at())
        declares = False
        while True:
            self.skip_blank()
            c = self.text[self.at : self.at + 1]
            if c in ("", "\n", ";", "|", ")") or (c == "&" and not self.text.startswith("&>", self.at)):
                break
            if (c.isdigit() or c in "<>&{") and self.parse_redirection():
                node.redirected = True
                continue
            # After the first word, NAME=VALUE is only an assignment for commands such as export.
            if (declares or not node.words) and (match := _ASSIGN.match(self.text, self.at)):
                (node.words if declares else node.assignments).append(self.parse_assignment(match))
                continue
            node.words.append(self.parse_word())
            if len(node.words) == 1:
                name = node.words[0].literal  # type: ignore[union-attr]
                declares = name in DECLARATIONS
                self.num_breaks += name in ("break", "continue")
        if (
            not node.words
            and not node.assignments
            and self.text[self.at : self.at + 1] not in ("", "\n", ";", "|", "&", ")")
        ):
            raise self.syntax_error()
        return node

    def parse_assignment(self, match: re.Match[str]) -> Assignment:
        node = Assignment(match[1], self.line_at(), bool(match[3]), match[2])
        self.count_word()
        self.at = match.end()
        c = self.text[self.at : self.at + 1]
        if c == "(":
            self.at += 1
            node.elements = []
            while True:
                self.skip_newlines()
                if self.text[self.at : self.at + 1] == ")":
                    self.at += 1
                    break
                node.elements.append(self.parse_placeholder() or self.parse_word())
        elif c == "<":
            node.value = self.parse_placeholder()
        elif c not in ("", " ", "\t", "\n", ";", "&", "|", ")", "<", ">"):
            node.value = self.parse_word()
        return node

    def parse_placeholder(self) -> ShellWord | None:
        """Parse ``<your address>``, which published scripts have instead of a value. A shell would stop there."""
        match = _PLACEHOLDER.match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        return ShellWord([UnknownExpansion(True, self.line_at(), match[0])], self.line_at())

    def parse_redirection(self) -> bool:
        """Parse a redirection; its operands are not words of the command. Returns whether there was one."""
        match = _REDIRECTION.match(self.text, self.at)
        if match is None:
            return False
        sign, self.at = match[1] or match[2], match.end()
        self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
        start = self.at
        word = self.parse_word()
        if sign in ("<<", "<<-"):
            raw = any(not isinstance(part, Literal) or part.quoted for part in word.parts)
            written = self.text[start : self.at]
            literal = all(isinstance(part, Literal) for part in word.parts)
            text = "".join(p.text for p in word.parts if isinstance(p, Literal)) if literal else written
            self.documents.append((text, sign == "<<-", raw and literal))
        return True
