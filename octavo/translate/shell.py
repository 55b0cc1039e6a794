"""A launch script, read and never run: its variables, and the words of each command with their lines.

What is understood is what published launch scripts are made of: assignments, ``${NAME:-default}``, arrays of flags
(``ARGS=(--lr 1e-4)``, ``ARGS+=(...)``, ``${ARGS[@]}``), sums (``$((64 / n))``, ``$(expr 16 / $n)``), files that are
sourced and lie here, quotes, comments and lines that go on behind a backslash. What a script would have to be run for
stays open: a variable that it does not set, ``$(command)``, and whatever stands within ``if``, ``for``, ``case`` or a
function, which is listed and not taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from octavo.translate.given import TranslateError
from octavo.translate.sums import reckon

_UNCLOSED = "{}:{}: a quote begins here and never ends. Close it."
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGN = re.compile(r"([A-Za-z_]\w*)(\+?=)(.*)", re.DOTALL)
_BEGIN = {"if": "fi", "for": "done", "while": "done", "until": "done", "case": "esac", "{": "}"}
_OPENERS = {"then", "else", "elif", "do"}
_EXPR = re.compile(r"expr\s+([^|;&<>]+)")
#: files that source each other: how deep they are followed, and how many are read
_DEEP, _FILES = 4, 64
#: defaults within defaults; and letters that all variables together become
_NESTED, _LETTERS = 50, 1 << 24
#: gives the text of a file that a script sources, by the path that it names; None: it is not here
Look = Callable[[str], str | None]
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


@dataclass
class _Spent:
    """What the readers of a script and of the files that it sources have used of the bounds above."""

    files: int = 0
    letters: int = 0


class _Reader:
    def __init__(self, text: str, known: Mapping[str, str], source: str, look: Look | None = None) -> None:
        self.text, self.at, self.line, self.source = text, 0, 1, source
        self.look, self.nested, self.spent = look, 0, _Spent()
        self.reading: tuple[str, ...] = (text,)
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
                whole_command = self.text[self.at : end + 1] or "`"
                self.printed(whole_command.strip("`"), whole_command, text, missing)
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
            written = " ".join(self.text[begun : self.at].split())
            if written.startswith("((") and written.endswith("))"):
                self.sum(written[2:-2], f"${written}", text, missing)
            else:
                self.printed(written[1:-1], f"${written}", text, missing)
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
            self.spend(sum(len(word.text) + 1 for word in self.arrays.get(name, ())))
            return [*self.arrays.get(name, []), *([] if name in self.arrays else [Word("", self.line, (name,))])]
        value = self.scalars.get(name)
        if rest[:2] in (":-", ":=") and value is not None and not value.text and not value.open:
            value = None  # set, and empty
        if value is None and (rest[:2] in (":-", ":=") or rest[:1] in ("-", "=")):
            value = self.within(rest.lstrip(":")[1:])
        elif rest and rest[:2] not in (":-", ":=", ":?") and rest[:1] not in ("-", "=", "?"):
            missing.append("${" + inside + "}")
            text.append(missing[-1])
            return None
        if value is None:
            missing.append(name)
            text.append(f"${name}")
            return None
        self.spend(len(value.text))
        text.append(value.text)
        missing += value.open
        return None

    def spend(self, letters: int) -> None:
        """Raises TranslateError for a script whose variables hold each other, twice and twice again."""
        self.spent.letters += letters
        if self.spent.letters > _LETTERS:
            raise TranslateError(f"{self.source}:{self.line}: its variables become over {_LETTERS} letters here. Write "
                                 "what they stand for.")  # fmt: skip

    def within(self, text: str) -> Word:
        """What a text becomes when the variables within it are followed."""
        if self.nested == _NESTED:
            raise TranslateError(f"{self.source}:{self.line}: over {_NESTED} defaults stand within each other here. "
                                 "Write the value.")  # fmt: skip
        inner = _Reader(text, {}, self.source)
        inner.scalars, inner.arrays = self.scalars, self.arrays
        inner.line, inner.nested, inner.spent = self.line, self.nested + 1, self.spent
        words = [word for part in inner.statement() for word in part]
        return Word(" ".join(word.text for word in words), self.line, tuple(n for w in words for n in w.open))

    def sum(self, inside: str, written: str, text: list[str], missing: list[str]) -> None:
        """``$((...))``: names of variables may stand bare in it. Open is what it needs and the script does not set."""
        begun = self.within(f'"{inside}"')
        needed: list[str] = list(begun.open)

        def value(found: re.Match[str]) -> str:
            known = self.scalars.get(found[0])
            if known is None or known.open:
                needed.extend((found[0],) if known is None else known.open)
                return found[0]
            return known.text.strip()

        filled = begun.text if begun.open else _NAME.sub(value, begun.text)
        self.worked_out(None if needed else reckon(filled), needed, written, text, missing)

    def printed(self, command: str, written: str, text: list[str], missing: list[str]) -> None:
        """``$(...)`` and backquotes: the one command that is followed is expr, which prints a sum."""
        found = _EXPR.fullmatch(command.strip())
        inside = self.within(f'"{found[1]}"') if found else None
        result = reckon(inside.text.replace("\\", "")) if inside and not inside.open else None
        self.worked_out(result, list(inside.open) if inside else [], written, text, missing)

    @staticmethod
    def worked_out(value: int | None, needed: list[str], written: str, text: list[str], missing: list[str]) -> None:
        if value is not None:
            text.append(str(value))
            return
        missing += dict.fromkeys(needed) or [written]
        text.append(written)

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
        if first in ("source", ".") and self.sourced(parts):
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

    def sourced(self, parts: list[list[Word]]) -> bool:
        """Whether a file that the script sources was read in its place; its lines are not those of this one."""
        words = [word for part in parts[1:] for word in part]
        if self.look is None or len(words) != 1 or words[0].open:
            return False
        if len(self.reading) > _DEEP or self.spent.files == _FILES:
            return False
        text = self.look(words[0].text)
        if text is None or text in self.reading:  # one that sources itself has no end
            return False
        self.spent.files += 1
        inner = _Reader(text, {}, words[0].text, self.look)
        inner.scalars, inner.arrays, inner.forced, inner.spent = self.scalars, self.arrays, self.forced, self.spent
        inner.reading = (*self.reading, text)
        script = inner.run()
        self.script.commands += [[Word(w.text, 0, w.open) for w in command] for command in script.commands]
        self.script.exported |= {name: Word(w.text, 0, w.open) for name, w in script.exported.items()}
        line = parts[0][0].line
        self.script.unread += [(line, f"{words[0].text}: {what}", why) for _, what, why in script.unread]
        return True

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


def read(text: str, known: Mapping[str, str], source: str, look: Look | None = None) -> Script:
    """``known``: values of variables that whoever asks gives; they win over the script's own. ``look``: finds files
    that it sources. Raises TranslateError for a quote that never ends."""
    return _Reader(text, known, source, look).run()
