"""Expands the words of a launch script and keeps its variables; `interpreter` executes the commands."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.importers.errors import TranslateError
from octavo.importers.shell.arithmetic import evaluate
from octavo.importers.shell.syntax import (
    Arithmetic,
    Function,
    Literal,
    Parameter,
    Part,
    ShellWord,
    SimpleCommand,
    Substitution,
)
from octavo.importers.shell.values import MAX_UNSURE_LINES, Variable, Word, WordSplitter, join_pieces
from octavo.importers.shell.words import PATTERNS

#: maximum characters of all expansions together, where each word and each piece counts as WORD_COST; maximum executed
#: commands; maximum nesting of commands
MAX_CHARACTERS, MAX_STEPS, MAX_NESTING = 1 << 24, 200_000, 90
WORD_COST = 32
_NAME = re.compile(r"[A-Za-z_]\w*")
_NUMBER = re.compile(r"[0-9]+")
_TERM = re.compile(r"-?[0-9]+|[-+*/%()]")
_BRACES = re.compile(r"\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}")
_EXTENDED = re.compile(r"[@!+*?]\(")
#: variables that a shell sets itself, whatever a script assigns
_SHELL_VARIABLES = (
    "LINENO", "RANDOM", "SRANDOM", "SECONDS", "EPOCHSECONDS", "EPOCHREALTIME", "BASHPID", "PPID", "UID",
    "EUID", "GROUPS", "FUNCNAME", "DIRSTACK", "BASH_COMMAND", "HISTCMD",
)  # fmt: skip
_CHANGES = re.compile(
    r"([A-Za-z_]\w*)(?:\[[^\]]*\])?\s*(?:(?:[-+*/%&|^]|<<|>>)?=(?!=)|\+\+|--)|(?:\+\+|--)\s*([A-Za-z_]\w*)"
)


@dataclass
class Usage:
    """The use of the bounds above by a script."""

    letters: int = 0
    steps: int = 0


class Expander:
    """Variables, with a journal of former values for :meth:`undo`, and expansions of words."""

    def __init__(self, known: Mapping[str, str], source: str) -> None:
        self.source = source
        self.usage = Usage()
        self.variables: dict[str, Variable] = {name: Variable([Word(text, 0)]) for name, text in known.items()}
        self.forced = frozenset(known)
        self.readonly: set[str] = set()
        self.positional: list[Word] | None = None
        self.ifs_is_default = True  # IFS has its default
        self.case_sensitive = True  # patterns are case-sensitive: nocasematch is off
        self.journal: list[tuple[Any, ...]] = []
        self.open_journals = 0  # number of open journals
        self.functions: dict[str, tuple[tuple[Function, ...], bool]] = {}  # name -> candidates, whether certain
        self.undone_functions: dict[str, list[tuple[tuple[Function, ...], bool]]] = {}
        self.num_changes = 0
        self.current_line = 0  # the line of the current command

    # ---- variables

    def store_variable(self, name: str, value: Variable | None) -> None:
        """Set a variable; None removes it."""
        self.num_changes += 1
        if self.open_journals:
            self.journal.append((self.variables, name, self.variables.get(name)))
        if value is None:
            self.variables.pop(name, None)
        else:
            self.variables[name] = value
        if name == "IFS":
            self.ifs_is_default = False

    def extend_in_place(self, name: str, into: list[Word], added: Sequence[Word]) -> None:
        """Append in place, so that the time does not depend on the existing length."""
        self.num_changes += 1
        if self.open_journals:
            self.journal.append((into, len(into), name))
        into.extend(added)

    def undo(self, mark: int) -> dict[str, None]:
        """Undo all changes since ``mark``. Returns the names of changed variables."""
        names: dict[str, None] = {}
        while len(self.journal) > mark:
            where, key, before = self.journal.pop()
            if isinstance(where, list):
                del where[key:]
                names[before] = None
                continue
            now = where.get(key)
            if before is None:
                where.pop(key, None)
            else:
                where[key] = before
            if where is self.variables:
                names[key] = None
            elif where is self.functions and now is not None:
                self.undone_functions.setdefault(key, []).append(now)
        return names

    def mark_unsure(self, names: Iterable[str], line: int) -> None:
        """Record that a line that was not followed may have set these variables."""
        for name in names:
            previous = self.variables.get(name)
            if name in self.forced:
                continue
            if previous is None:
                previous = Variable(unknown=True)
            lines = previous.unsure if line in previous.unsure else (*previous.unsure, line)[:MAX_UNSURE_LINES]
            self.store_variable(name, Variable(previous.pieces, previous.items, previous.unknown, lines, previous.lost))

    def mark_unknown(self, names: Iterable[str]) -> None:
        """Record that the values of these variables are only known when the script runs."""
        for name in names:
            if name not in self.forced and name not in self.readonly:
                self.store_variable(name, Variable(unknown=True, lost=True))

    def charge(self, letters: int) -> None:
        """Count characters. Raises TranslateError for a script whose variables grow exponentially."""
        self.usage.letters += letters + 1
        if self.usage.letters > MAX_CHARACTERS:
            raise TranslateError(
                f"{self.source}:{self.current_line}: its variables exceed {MAX_CHARACTERS} characters here. Write the "
                "values."
            )

    # ---- words

    def join(self, pieces: Sequence[Word], line: int) -> Word:
        self.charge(WORD_COST * len(pieces))
        return join_pieces(pieces, line)

    def expand_word(self, word: ShellWord) -> list[Word]:
        """Expand a word of a command to no, one or several words."""
        if (text := word.literal) is not None:
            return self.expand_braces(text, word.line)
        into = WordSplitter(word.line)
        bare = "".join(p.text if isinstance(p, Literal) and not p.quoted else "\0" for p in word.parts)
        if "{" in bare and _BRACES.search(bare):  # several words, which are not followed
            into.open.append("{...}")
        for part in word.parts:
            if isinstance(part, Literal):
                into.add(part.text, part.line)
                continue
            values = self.expand_part(part)
            for number, value in enumerate(values):
                if number:
                    into.close()
                for piece in value:
                    self.charge(len(piece.text))
                    if part.quoted or piece.whole:
                        into.add(piece.text, piece.line, piece)
                    elif not self.ifs_is_default:  # a script that sets IFS
                        into.add(piece.text, piece.line, Word("", 0, (*piece.open, "IFS"), piece.unsure))
                    else:
                        into.split(piece)
                if part.quoted and not value:
                    into.add("", part.line)
                elif value and not part.quoted and not any(piece.text for piece in value):
                    unsure = tuple(line for piece in value for line in piece.unsure)
                    if unsure:  # empty now, but a line that was not followed may set it
                        name = part.name if isinstance(part, Parameter) else part.written
                        into.add(f"${name}", part.line, Word("", part.line, (name,), unsure))
        into.close()
        self.charge(WORD_COST * len(into.words))
        return into.words

    def expand_words(self, words: Iterable[ShellWord]) -> list[Word]:
        """Expand all words of a command or of an array."""
        expanded: list[Word] = []
        for word in words:
            fields = self.expand_word(word)
            if not fields and expanded and expanded[-1].text.startswith("--"):
                expanded[-1] = replace(expanded[-1], bare=True)
            expanded += fields
        return expanded

    @staticmethod
    def expand_braces(text: str, line: int) -> list[Word]:
        """Expand ``{a,b}`` to two words; more complex braces are left open."""
        if "{" not in text or not _BRACES.search(text):
            return [Word(text, line)]
        head, _, rest = text.partition("{")
        inside, closed, tail = rest.partition("}")
        if closed and "." not in inside and "{" not in inside and "{" not in tail:
            return [Word(f"{head}{middle}{tail}", line) for middle in inside.split(",")]
        return [Word(text, line, (text,))]

    def expand_pieces(self, word: ShellWord | None, splits: bool = False) -> list[Word]:
        """Expand a word without splitting: an assigned value or an arithmetic expression. With ``splits``: a default
        that will be split later, except its quoted parts."""
        pieces: list[Word] = []
        for part in word.parts if word else ():
            if isinstance(part, Literal):
                pieces.append(Word(part.text, part.line, whole=splits and part.quoted))
                continue
            for number, value in enumerate(self.expand_part(part)):
                if number:
                    pieces.append(Word(" ", part.line))
                if splits and part.quoted:
                    pieces += [replace(piece, whole=True) for piece in value or [Word("", part.line)]]
                elif splits:
                    pieces += value
                else:
                    pieces += [replace(piece, whole=False) if piece.whole else piece for piece in value]
        self.charge(sum(len(piece.text) + WORD_COST for piece in pieces))
        return pieces

    def expand_text(self, word: ShellWord | None) -> Word:
        if word is None or not word.parts:
            return Word("", self.current_line)
        return self.join(self.expand_pieces(word), word.line)

    def expand_part(self, part: Part) -> list[list[Word]]:
        """Return the values of a part, each as pieces: one value, or one for each element of an array."""
        if isinstance(part, Parameter):
            return self.expand_parameter(part)
        if isinstance(part, Arithmetic):
            return [[self.expand_arithmetic(part)]]
        if isinstance(part, Substitution):
            return [self.expand_substitution(part)]
        return [[self.unknown_word(part)]]

    @staticmethod
    def unknown_word(part: Any, *names: str) -> Word:
        return Word(part.written, part.line, names or (part.written,))

    # ---- ${...}

    def expand_parameter(self, part: Parameter) -> list[list[Word]]:
        if part.name in ("@", "*") or part.index in ("@", "*"):
            return self.expand_elements(part)
        value = self.lookup(part)
        if part.length:
            whole = self.join(value, part.line) if value is not None else None
            if whole is None or whole.open or part.operator:
                return [[self.unknown_word(part, part.name)]]
            return [[Word(str(len(whole.text)), part.line, (), whole.unsure)]]
        # With a colon an empty value counts as unset.
        sign, colon = part.operator.lstrip(":"), part.operator.startswith(":")
        if not part.operator:
            return [[Word(f"${part.name}", part.line, (part.name,))] if value is None else value]
        if not sign or sign not in "-=?+":
            return [self.strip_pattern(part, value)]
        variable = self.variables.get(part.name)
        absent = value is None or (variable is not None and self.is_unset(variable) and part.index is None)
        if colon and value is not None and not any(piece.text or piece.open for piece in value):
            absent = True
        unsure = tuple(
            dict.fromkeys([*(variable.unsure if variable else ()), *(n for p in value or () for n in p.unsure)])
        )
        if sign == "+":
            if value is None or any(piece.open for piece in value):
                return [[self.unknown_word(part, part.name)]]
            return [self.mark_pieces_unsure([] if absent else self.expand_default(part), unsure, part.line)]
        if not absent:
            return [value or []]
        if sign == "?" or (variable is not None and variable.lost):
            return [[Word(f"${part.name}", part.line, (part.name,))]]
        pieces = self.mark_pieces_unsure(self.expand_default(part), unsure, part.line)
        if sign == "=" and part.index is None:
            self.assign(part.name, pieces)
        return [pieces]

    def expand_default(self, part: Parameter) -> list[Word]:
        """Return the default in ``${name:-default}``. A value that ``=`` assigns is split like any value."""
        return self.expand_pieces(part.argument, not part.quoted and part.operator.lstrip(":") in ("-", "+"))

    @staticmethod
    def mark_pieces_unsure(pieces: list[Word], unsure: tuple[int, ...], line: int) -> list[Word]:
        """Return the pieces marked as unsure, because they depend on unsure lines."""
        if not unsure:
            return pieces
        return [replace(p, unsure=(*p.unsure, *unsure)[:MAX_UNSURE_LINES]) for p in pieces or [Word("", line)]]

    @staticmethod
    def is_unset(variable: Variable) -> bool:
        return variable.pieces is None and not variable.items and not variable.unknown

    def lookup(self, part: Parameter) -> list[Word] | None:
        """Return the pieces of a scalar or of one element; None if they are unknown."""
        name = part.name
        if name.isdigit():
            if name == "0" or self.positional is None:
                return None
            if len(name) > 6:
                return []
            before = self.positional[: int(name) - 1]
            self.charge(WORD_COST * len(before))
            if any(word.open for word in before):  # an open word may be any number of words
                return [Word(f"${name}", part.line, (name,))]
            unsure = tuple(dict.fromkeys(line for word in before for line in word.unsure))[:MAX_UNSURE_LINES]
            pieces = self.positional[int(name) - 1 : int(name)]
            if not unsure:
                return pieces
            return [replace(w, unsure=(*w.unsure, *unsure)) for w in pieces or [Word("", part.line)]]
        if name == "#" and self.positional is not None:
            if any(word.open for word in self.positional):
                return [Word("$#", part.line, ("#",))]
            unsure = tuple(dict.fromkeys(line for word in self.positional for line in word.unsure))[:MAX_UNSURE_LINES]
            return [Word(str(len(self.positional)), part.line, (), unsure)]
        variable = self.variables.get(name)
        if variable is None or variable.unknown:
            return None
        index = self.expand_text(part.index).text if isinstance(part.index, ShellWord) else "0"
        if variable.items is not None:
            if not _NUMBER.fullmatch(index):
                return None
            self.charge(WORD_COST * min(int(index[:7]), len(variable.items)))
            if any(word.open for word in variable.items[: int(index[:7]) + 1]):
                return None
            pieces = variable.items[int(index[:7]) : int(index[:7]) + 1]
        elif index != "0":
            return None
        else:
            pieces = variable.pieces or []
        if variable.unsure:
            return [Word(p.text, p.line, p.open, variable.unsure) for p in pieces or [Word("", part.line)]]
        return pieces

    def expand_elements(self, part: Parameter) -> list[list[Word]]:
        """Expand ``$@``, ``${NAME[@]}`` and the forms with ``*``."""
        star = "*" in (part.name, part.index)
        variable = self.variables.get(part.name) if part.name not in ("@", "*") else Variable(items=self.positional)
        items: list[Word] | None = None
        if variable is not None and not variable.unknown:
            items = variable.items
            if items is None and part.name not in ("@", "*"):
                items = [self.join(variable.pieces, part.line)] if variable.pieces is not None else []
        if items is None or part.operator:
            if items is not None or part.operator.lstrip(":")[:1] != "-":
                return [[self.unknown_word(part, part.name)]]
            return [self.expand_default(part)]
        if variable is not None and variable.unsure:
            items = [Word(w.text, w.line, w.open, variable.unsure) for w in items or [Word("", part.line)]]
        if part.length:
            known = not any(word.open or word.unsure for word in items)
            return [[Word(str(len(items)), part.line) if known else self.unknown_word(part, part.name)]]
        self.charge(WORD_COST * len(items))
        if star and part.quoted and not self.ifs_is_default and len(items) > 1:  # by the first letter of IFS
            return [[self.unknown_word(part, "IFS")]]
        if star and part.quoted:
            return [[piece for word in items for piece in (word, Word(" ", word.line))][:-1]]
        return [[word] for word in items]

    def strip_pattern(self, part: Parameter, value: list[Word] | None) -> list[Word]:
        """Expand ``${name%pattern}`` and ``${name#pattern}``; other operators are left open."""
        whole = self.join(value, part.line) if value else None
        pattern = glob_pattern(self, part.argument, 1) if part.operator in PATTERNS else None
        if whole is None or whole.open or pattern is None or len(whole.text) > 300:
            return [self.unknown_word(part)]
        text, places = whole.text, range(len(whole.text) + 1)
        if part.operator[0] == "#":
            order = places if part.operator == "#" else reversed(places)
            cut = next((text[at:] for at in order if pattern.fullmatch(text[:at])), text)
        else:
            order = reversed(places) if part.operator == "%" else places
            cut = next((text[:at] for at in order if pattern.fullmatch(text[at:])), text)
        self.charge(len(text) ** 2)
        return [Word(cut, whole.line, (), whole.unsure)]

    # ---- assignments

    def assign(self, name: str, pieces: list[Word], append: bool = False, line: int | None = None) -> None:
        """Assign to a scalar, or to the first element of an array."""
        if name in self.forced or name in self.readonly:
            return
        if name in _SHELL_VARIABLES:
            self.mark_unknown([name])
            return
        previous = self.variables.get(name)
        if previous is not None and previous.items is not None:
            first = [*previous.items[:1], *pieces] if append else pieces
            items = [self.join(first, self.current_line), *previous.items[1:]]
            self.charge(WORD_COST * len(items))
            self.store_variable(name, Variable(items=items, unsure=previous.unsure))
        elif append and previous is not None and previous.pieces is not None:
            self.extend_in_place(name, previous.pieces, pieces)
        elif append and (previous is None or previous.unknown):
            lines = previous.unsure if previous else ()
            self.store_variable(name, Variable([Word(f"${name}", self.current_line, (name,)), *pieces], unsure=lines))
        else:
            lines = previous.unsure if append and previous is not None else ()
            self.store_variable(name, Variable(list(pieces), unsure=lines))

    def assign_array(self, name: str, items: list[Word], append: bool) -> None:
        if name in self.forced or name in self.readonly:
            return
        previous = self.variables.get(name)
        if append and previous is not None and previous.items is not None:
            self.extend_in_place(name, previous.items, items)
        elif append and previous is not None and previous.pieces is not None:
            first = self.join(previous.pieces, self.current_line)
            self.store_variable(name, Variable(items=[first, *items], unsure=previous.unsure))
        elif append and (previous is None or previous.unknown):
            lines = previous.unsure if previous else ()
            first = Word(f"${name}", self.current_line, (name,))
            self.store_variable(name, Variable(items=[first, *items], unsure=lines))
        else:
            lines = previous.unsure if append and previous is not None else ()
            self.store_variable(name, Variable(items=list(items), unsure=lines))

    # ---- arithmetic, and the output of commands

    def expand_arithmetic(self, part: Arithmetic) -> Word:
        """Evaluate ``$((...))``, in which names of variables need no ``$``."""
        whole = self.expand_text(part.expression)
        value, needed, unsure = self.evaluate_arithmetic(whole)
        if value is None:
            return self.unknown_word(part, *needed)
        return Word(str(value), part.line, (), unsure)

    def evaluate_arithmetic(self, whole: Word) -> tuple[int | None, list[str], tuple[int, ...]]:
        """Return (value or None, names that it would need, lines that may change it). Variables that the expression
        assigns become unknown."""
        needed, unsure = list(whole.open), list(whole.unsure)
        if self.mark_assigned_unknown(whole.text):
            return None, needed, ()

        def lookup(match: re.Match[str]) -> str:
            variable = self.variables.get(match[0])
            pieces = variable.items[:1] if variable and variable.items else variable.pieces if variable else None
            if pieces is None:
                if variable is None or variable.unknown:
                    needed.append(match[0])
                else:  # unset, but a line that was not followed may set it
                    unsure.extend(variable.unsure)
                return "0"
            known = self.join(pieces, 0) if pieces else Word("0", 0)
            needed.extend(known.open)
            unsure.extend([*known.unsure, *(variable.unsure if variable else ())])
            return known.text.strip() if _NUMBER.fullmatch(known.text.strip()) else f"({known.text.strip() or 0})"

        filled = whole.text if whole.open else _NAME.sub(lookup, whole.text[:400])
        return (None if needed else evaluate(filled)), needed, tuple(dict.fromkeys(unsure))[:MAX_UNSURE_LINES]

    def mark_assigned_unknown(self, text: str) -> list[str]:
        """Return the names that an arithmetic expression assigns, and mark them as unknown."""
        signs = any(sign in text for sign in ("=", "++", "--"))
        if len(text) > 4000 and signs:
            names = _NAME.findall(text)
        else:
            names = [match[1] or match[2] for match in _CHANGES.finditer(text)] if signs else []
        self.mark_unknown(names)
        return names

    def expand_substitution(self, part: Substitution) -> list[Word]:
        """Evaluate ``$(...)`` with expr or echo; other commands are not followed."""
        node = part.commands[0].node if len(part.commands) == 1 and not part.commands[0].background else None
        if not isinstance(node, SimpleCommand) or node.assignments or not node.words:
            return [self.unknown_word(part)]
        name = node.words[0].literal if isinstance(node.words[0], ShellWord) else None
        if name not in ("expr", "echo"):
            return [self.unknown_word(part)]
        words = [field for word in node.words[1:] if isinstance(word, ShellWord) for field in self.expand_word(word)]
        missing = [name for word in words for name in word.open]
        unsure = tuple(dict.fromkeys(line for word in words for line in word.unsure))[:MAX_UNSURE_LINES]
        text = " ".join(word.text for word in words)
        if missing or node.redirected:
            return [self.unknown_word(part, *dict.fromkeys(missing))]
        if name == "expr":
            value = evaluate(text) if all(_TERM.fullmatch(word.text) for word in words) else None
            return [Word(str(value), part.line, (), unsure) if value is not None else self.unknown_word(part)]
        if not text.startswith("-") and not any(sign in text for sign in "\\*?["):
            return [Word(text.rstrip("\n"), part.line, (), unsure)]
        return [self.unknown_word(part)]


def glob_pattern(expander: Expander, word: ShellWord | None, stars: int, cased: bool = True) -> re.Pattern[str] | None:
    """Convert a shell pattern to a regular expression; None if it is not followed. Unquoted variables are patterns."""
    written: list[str] = []
    for part in word.parts if word else ():
        if isinstance(part, Literal) and part.quoted:
            written.append(re.escape(part.text))
            continue
        values = [[Word(part.text, 0)]] if isinstance(part, Literal) else expander.expand_part(part)
        for piece in (piece for value in values for piece in value):
            if piece.open or piece.unsure:
                return None
            if part.quoted:
                written.append(re.escape(piece.text))
            elif any(sign in piece.text for sign in "[\\") or "**" in piece.text or _EXTENDED.search(piece.text):
                return None
            else:
                written.append("".join({"*": ".*", "?": "."}.get(c, re.escape(c)) for c in piece.text))
    text = "".join(written)
    flags = re.DOTALL if cased else re.DOTALL | re.IGNORECASE
    return re.compile(text, flags) if text.count(".*") <= stars and len(text) < 2000 else None
