"""A launch script, read and never run: its variables, and the words of each command with their lines.

What is understood is what published launch scripts are made of: assignments, ``${NAME:-default}``, arrays of flags
(``ARGS=(--lr 1e-4)``, ``ARGS+=(...)``, ``${ARGS[@]}``), quotes, comments and lines that go on behind a backslash. What
a script would have to be run for stays open: a variable that it does not set, ``$(command)``, arithmetic, and whatever
stands within ``if``, ``for``, ``case`` or a function, which is listed and not taken.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo.translate.given import TranslateError

_UNCLOSED = "{}:{}: a quote begins here and never ends. Close it."
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGN = re.compile(r"([A-Za-z_]\w*)(\+?=)(.*)", re.DOTALL)
_BEGIN = {"if": "fi", "for": "done", "while": "done", "until": "done", "case": "esac", "{": "}"}
_OPENERS = {"then", "else", "elif", "do"}
_PREFIXES = ("export", "declare", "local", "readonly", "env", "nohup", "exec", "set", "time")


@dataclass(frozen=True)
class Word:
    """A word of a command, its line, and the names of variables that nothing sets."""

    text: str
    line: int
    open: tuple[str, ...] = ()


@dataclass
class Script:
    """``commands``: words of each; ``exported``: what it gives to the environment; ``unread``: (line, text, why)."""

    commands: list[list[Word]] = field(default_factory=list)
    exported: dict[str, Word] = field(default_factory=dict)
    unread: list[tuple[int, str, str]] = field(default_factory=list)


class _Reader:
    def __init__(self, text: str, known: Mapping[str, str], source: str) -> None:
        self.text, self.at, self.line, self.source = text, 0, 1, source
        self.scalars: dict[str, Word] = {name: Word(value, 0) for name, value in known.items()}
        self.forced = frozenset(known)
        self.arrays: dict[str, list[Word]] = {}
        self.script = Script()
        self.blocks: list[str] = []

    def run(self) -> Script:
        while self.at < len(self.text):
            words = self.statement()
            if words:
                self.take(words)
        return self.script

    # ---- words

    def statement(self) -> list[list[Word]]:
        """The words up to the end of a command; each with what it expands to (an array of flags: several)."""
        found: list[list[Word]] = []
        while self.at < len(self.text):
            c = self.text[self.at]
            if c == "\n":
                self.at, self.line = self.at + 1, self.line + 1
                break
            if c in ";&|":
                self.at += 1
                break
            if c == "\\" and self.text[self.at : self.at + 2] == "\\\n":
                self.at, self.line = self.at + 2, self.line + 1
            elif c in " \t\r":
                self.at += 1
            elif c == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif c in "<>":
                self.redirection()
            elif c in "()":
                self.at += 1
                found.append([Word(c, self.line)])
            else:
                word = self.word()
                if not (word[0].text.isdigit() and self.text[self.at : self.at + 1] in ("<", ">")):  # 2>&1
                    found.append(word)
        return found

    def redirection(self) -> None:
        while self.at < len(self.text) and self.text[self.at] in "<>&":
            self.at += 1
        while self.at < len(self.text) and self.text[self.at] in " \t":
            self.at += 1
        if self.at < len(self.text) and self.text[self.at] not in "\n;|":
            self.word()

    def word(self) -> list[Word]:
        line, text, missing, whole = self.line, [], [], None
        begun = self.at
        while self.at < len(self.text):
            c = self.text[self.at]
            if c in " \t\r\n;|<>" or (c == ")" and self.at > begun) or (c == "&"):
                break
            if c == "(":
                if text and text[-1].endswith("="):  # NAME=( ... )
                    self.at += 1
                    return [Word("".join(text) + "(", line), *self.array()]
                break
            if c == "\\":
                if self.text[self.at : self.at + 2] == "\\\n":
                    self.line += 1
                else:
                    text.append(self.text[self.at + 1 : self.at + 2])
                self.at += 2
            elif c == "'":
                end = self.text.find("'", self.at + 1)
                if end < 0:
                    raise TranslateError(_UNCLOSED.format(self.source, self.line))
                text.append(self.text[self.at + 1 : end])
                self.line += text[-1].count("\n")
                self.at = end + 1
            elif c == '"':
                self.at += 1
                self.quoted(text, missing)
            elif c == "`":
                end = self.text.find("`", self.at + 1)
                missing.append(self.text[self.at : end + 1] or "`")
                self.at = len(self.text) if end < 0 else end + 1
            elif c == "$":
                whole = self.variable(text, missing) or whole
            else:
                text.append(c)
                self.at += 1
            if c == "=" and text == [*"".join(text)] and not missing:
                text = ["".join(text)]
        if whole is not None and not "".join(text):
            return whole
        return [Word("".join(text), line, tuple(dict.fromkeys(missing)))]

    def quoted(self, text: list[str], missing: list[str]) -> None:
        begun = self.line
        while self.at < len(self.text) and self.text[self.at] != '"':
            c = self.text[self.at]
            if c == "\\" and self.text[self.at + 1 : self.at + 2] in ('"', "\\", "$", "`", "\n"):
                if self.text[self.at + 1] != "\n":
                    text.append(self.text[self.at + 1])
                else:
                    self.line += 1
                self.at += 2
            elif c == "$":
                whole = self.variable(text, missing)
                if whole:
                    text.append(" ".join(word.text for word in whole))
                    missing += [name for word in whole for name in word.open]
            else:
                self.line += c == "\n"
                text.append(c)
                self.at += 1
        if self.at >= len(self.text):
            raise TranslateError(_UNCLOSED.format(self.source, begun))
        self.at += 1

    def variable(self, text: list[str], missing: list[str]) -> list[Word] | None:
        """``$NAME``, ``${NAME}``, ``${NAME:-default}``: added to the text; ``${NAME[@]}``: given back as words."""
        self.at += 1
        if self.text.startswith("(", self.at):
            begun, depth = self.at, 0
            while self.at < len(self.text):
                depth += {"(": 1, ")": -1}.get(self.text[self.at], 0)
                self.at += 1
                if not depth:
                    break
            missing.append("$" + " ".join(self.text[begun : self.at].split()))
            text.append(missing[-1])
            return None
        if self.text.startswith("{", self.at):
            end, depth = self.at, 0
            while end < len(self.text):
                depth += {"{": 1, "}": -1}.get(self.text[end], 0)
                end += 1
                if not depth:
                    break
            inside, self.at = self.text[self.at + 1 : end - 1], end
        else:
            found = _NAME.match(self.text, self.at) or re.compile(r"[0-9@#*?$!-]").match(self.text, self.at)
            if found is None:
                text.append("$")
                return None
            inside, self.at = found[0], found.end()
        name, rest = inside, ""
        if matched := re.match(r"(\w+)(.*)", inside, re.DOTALL):
            name, rest = matched[1], matched[2]
        if rest in ("[@]", "[*]") or (name in self.arrays and not rest):
            return [*self.arrays.get(name, []), *([] if name in self.arrays else [Word("", self.line, (name,))])]
        value = self.scalars.get(name)
        if value is None and rest[:2] in (":-", ":=") or (value is None and rest[:1] in ("-", "=")):
            inner = _Reader(rest.lstrip(":")[1:], {}, self.source)
            inner.scalars, inner.arrays = self.scalars, self.arrays
            words = [word for part in inner.statement() for word in part]
            value = Word(" ".join(word.text for word in words), self.line, tuple(n for w in words for n in w.open))
        elif rest and rest[:2] not in (":-", ":=", ":?") and rest[:1] not in ("-", "=", "?"):
            missing.append("${" + inside + "}")
            text.append(missing[-1])
            return None
        if value is None:
            missing.append(name)
            text.append(f"${name}")
            return None
        text.append(value.text)
        missing += value.open
        return None

    def array(self) -> list[Word]:
        """The words up to the closing bracket, comments left out."""
        found: list[Word] = []
        while self.at < len(self.text):
            c = self.text[self.at]
            if c == ")":
                self.at += 1
                break
            if c == "\n":
                self.at, self.line = self.at + 1, self.line + 1
            elif c == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif c in " \t\r":
                self.at += 1
            elif self.text[self.at : self.at + 2] == "\\\n":
                self.at, self.line = self.at + 2, self.line + 1
            else:
                before = self.at
                found += self.word()
                self.at += self.at == before
        return found

    # ---- statements

    def take(self, parts: list[list[Word]]) -> None:
        first = parts[0][0].text
        if first in _BEGIN or (len(parts) > 2 and parts[1][0].text == "("):
            self.blocks.append(_BEGIN.get(first, "}"))
            self.leave(parts, "the condition is not judged")
            return
        if self.blocks:
            if first == self.blocks[-1]:
                self.blocks.pop()
            elif first in _OPENERS and len(parts) > 1:
                self.leave(parts[1:], "it stands in a condition, a loop or a function")
            elif first not in _OPENERS:
                self.leave(parts, "it stands in a condition, a loop or a function")
            return
        exported = first == "export"
        while parts and parts[0][0].text in _PREFIXES:
            parts = parts[1:]
        rest = list(parts)
        while rest and (found := _ASSIGN.fullmatch(rest[0][0].text)):
            only = len(rest) == 1 or all(_ASSIGN.fullmatch(part[0].text) for part in rest)
            self.assign(found[1], found[2], found[3], rest[0], exported or not only)
            rest = rest[1:]
        if rest and not exported:
            self.script.commands.append([word for part in rest for word in part])

    def assign(self, name: str, sign: str, value: str, part: list[Word], exported: bool) -> None:
        if value == "(" or (len(part) > 1 and value.endswith("(")):
            self.arrays[name] = [*(self.arrays.get(name, []) if sign == "+=" else []), *part[1:]]
            return
        word = Word(value, part[0].line, part[0].open)
        if name not in self.forced:
            self.scalars[name] = word
        if exported:
            self.script.exported[name] = self.scalars[name] if name in self.forced else word

    def leave(self, parts: list[list[Word]], why: str) -> None:
        text = " ".join(word.text for part in parts for word in part)
        self.script.unread.append((parts[0][0].line, text, why))


def read(text: str, known: Mapping[str, str], source: str) -> Script:
    """``known``: values of variables that whoever asks gives; they win over the script's own. Raises TranslateError for
    a quote that never ends."""
    return _Reader(text, known, source).run()
