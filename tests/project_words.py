"""Counts of words that the project's English avoids, of names that say nothing, of ``Any``, of comments.

    python -m tests.project_words                  # the counts by kind of file, next to the limits
    python -m tests.project_words octavo/data      # each place in these files or folders, with its line
    python -m tests.project_words --lower          # write today's counts as the limits; refuses one that rose

The limits are in ``tests/project_words.json``; ``tests/test_project_words.py`` fails where a count is above its limit.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIMITS = Path(__file__).with_suffix(".json")

#: Words and turns of phrase -> what is written instead. A key is a regular expression.
WORDS = {
    "beside": "with, next to, compared with",
    "alone": "only",
    "behind": "after, in",
    "nobody|somebody|anybody|whoever|whosoever": "the caller, the user, no caller, unused",
    "told|hears?|heard": "is reported, receives, is passed",
    "stands?|stood|lies|lay": "is",
    "(?:that|those) of": "repeat the noun",
    "dear|dearer|dearest": "expensive, most expensive",
    "midst": "during",
    "learnt|[Mm]isspelt|likeliest": "learned, misspelled, most likely",
    "anew": "again",
    "in vain": "failed",
    "go(?:es)? by": "uses",
    "belongs? into": "belongs in",
    "[Ww]hat of an?": "begin with the noun or a verb",
    "thereof|therein|wherein|whereof|whither|hence|forthwith": "plain words",
}
#: Names of functions that end like a participle, and do not say what the function does; and verbs that end alike.
PARTICIPLE, VERBS = re.compile(r"[a-z]{2,}ed$"), ("embed", "need", "feed", "seed", "shed", "proceed", "speed")
#: Local names that do not name the thing they hold.
NAMES = {"found", "made", "given", "told", "asked", "kept", "own", "more", "there"}
NAMES |= {"say", "tell", "said", "mine", "theirs", "ours", "every", "several", "same", "former"}
#: Turns of phrase in docstrings, comments and texts, by the pattern that finds them.
PHRASES = {
    "None without": r"\(None: |\(0: without|\bNone without\b",
    "a rate with 'a'": r"\b(?:bytes?|rows?|[MGK]i?B|frames?|tokens|once|scale|answers?)"
    r" an? (?:step|second|row|token|line|file|layer|block|rank|image|core)\b",
    "The same, ...": r"\AThe same\b",
    "of its own": r"\bof (?:its|their) own\b",
}
#: A test's name says subject, verb and object: it does not begin with a clause.
CLAUSE = re.compile(r"test_(?:what|where|whose|which|who|that|nobody|beside|without|of|by)_")
PER = 10_000
#: The most of a word in 10,000 words of pages; the limits of the other words are their counts.
PAGE_GOALS = {"beside": 1.0, "alone": 3.0, "behind": 3.0}
LONG_FUNCTION = 25  # lines of a function, its docstring not counted, beyond which it says why somewhere
KERNELS = "octavo/fp8/kernels/triton_kernels/"
KERNEL_COMMENTS = 0.08  # the least share of lines with a comment in KERNELS


class Place(NamedTuple):
    """One use: kind of text, what, file, line."""

    kind: str
    what: str
    file: str
    line: int
    text: str


def sources(under: Sequence[Path] = (ROOT / "octavo",)) -> list[Path]:
    """The Python files of the package, or those under some paths; not the examples, which are a link."""
    files = [f for path in under for f in ([path] if path.suffix == ".py" else sorted(path.rglob("*.py")))]
    return [f for f in files if "examples" not in f.relative_to(ROOT).parts]


def pages(under: Sequence[Path] = (ROOT,)) -> list[Path]:
    """README, the changelog, CONTRIBUTING and the documentation."""
    listed = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    return [f for f in listed if any(f == path or path in f.parents for path in under)]


#: One pass over a text tells whether any of the words is in it: most texts have none.
ANY = re.compile(rf"\b(?:{'|'.join(WORDS)})\b")
ANY_PHRASE = re.compile("|".join(PHRASES.values()))


def words_in(kind: str, text: str, file: str, first: int) -> Iterator[Place]:
    if not ANY.search(text):
        return
    for word in WORDS:
        for match in re.finditer(rf"\b(?:{word})\b", text):
            line = text.count("\n", 0, match.start())
            yield Place(kind, word, file, first + line, text.split("\n")[line].strip())


def phrases_in(kind: str, text: str, file: str, first: int) -> Iterator[Place]:
    if not ANY_PHRASE.search(text):
        return
    for phrase, pattern in PHRASES.items():
        for match in re.finditer(pattern, text):
            line = text.count("\n", 0, match.start())
            yield Place(kind, phrase, file, first + line, text.split("\n")[line].strip())


def prose(path: Path) -> str:
    """A page without its blocks and spans of code, with as many lines."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), text, flags=re.S | re.M)
    return re.sub(r"`[^`\n]*`", "`code`", text)


def page_places(path: Path) -> list[Place]:
    return list(words_in("pages", prose(path), str(path.relative_to(ROOT)), 1))


def source_places(path: Path) -> list[Place]:
    """Words in comments, docstrings and texts, names, ``Any``, long functions without a comment, ``# fmt: skip``."""
    text = path.read_text(encoding="utf-8")
    file = str(path.relative_to(ROOT))
    lines = text.split("\n")
    places: list[Place] = []

    def add(kind: str, what: str, line: int) -> None:
        places.append(Place(kind, what, file, line, lines[line - 1].strip()))

    comments = comments_in(text)
    for line, comment in comments.items():
        places += words_in("comments", comment, file, line)
        places += phrases_in("comments", comment, file, line)
        if "fmt: skip" in comment:
            add("formatter", "fmt: skip", line)
    said = {
        line for line, comment in comments.items() if not re.match(r"#\s*(noqa|type:|fmt:|pragma|ruff:|mypy:)", comment)
    }
    docs: set[int] = set()
    for node in _nodes(ast.parse(text)):
        if isinstance(node, ast.Expr):
            docs.add(id(node.value))
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                kind = "docstrings" if id(node) in docs else "texts"
                # A text without a space is a key, a path or a pattern, not a sentence.
                if kind == "docstrings" or " " in node.value:
                    places += words_in(kind, node.value, file, node.lineno)
                    places += phrases_in(kind, node.value, file, node.lineno)
        elif isinstance(node, ast.Name):
            if node.id in NAMES and isinstance(node.ctx, ast.Store):
                add("names", node.id, node.lineno)
        elif isinstance(node, ast.arg):
            if node.arg in NAMES:
                add("names", node.arg, node.lineno)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if not isinstance(node, ast.AsyncFunctionDef) and node.name.strip("_").lower() in NAMES:
                add("names", node.name.strip("_").lower(), node.lineno)
            if not isinstance(node, ast.ClassDef):
                for what, kind in _faults_of_function(node, said):
                    add(kind, what, node.lineno)
        for annotation in _annotations(node):
            for _ in (n for n in ast.walk(annotation) if isinstance(n, ast.Name) and n.id == "Any"):
                add("types", "Any", annotation.lineno)
    return places


def _faults_of_function(node: ast.FunctionDef | ast.AsyncFunctionDef, said: set[int]) -> Iterator[tuple[str, str]]:
    """(what, kind of text) for a function; `said` are the lines with a comment for readers."""
    if PARTICIPLE.search(node.name) and not node.name.endswith(VERBS):
        yield "participles", "functions"
    assert node.end_lineno is not None
    length = node.end_lineno - node.lineno + 1
    if length > LONG_FUNCTION:
        documented = ast.get_docstring(node, clean=False)
        length -= documented.count("\n") + 1 if documented else 0
    if length > LONG_FUNCTION and not said.intersection(range(node.lineno, node.end_lineno + 1)):
        yield node.name, "long functions without a comment"


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """What ``ast.walk`` yields but for operators and contexts, which are half of it; in a fifth of its time."""
    todo = [tree]
    while todo:
        node = todo.pop()
        yield node
        for value in vars(node).values():
            if isinstance(value, list):
                todo += [one for one in value if isinstance(one, ast.AST)]
            elif isinstance(value, ast.AST) and not isinstance(value, _NO_TEXT):
                todo.append(value)


_NO_TEXT = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop)


def comments_in(text: str) -> dict[int, str]:
    """Line -> its comment, of a source. ``tokenize`` finds the same in twenty times the time."""
    comments, line, at = {}, 1, 0
    for match in _COMMENT_OR_STRING.finditer(text):
        if match[0][0] == "#":
            line, at = line + text.count("\n", at, match.start()), match.start()
            comments[line] = match[0]
    return comments


_COMMENT_OR_STRING = re.compile(
    r"""
    \#[^\n]*
    | \"{3} (?:\\.|[^\\])*? \"{3} | '{3} (?:\\.|[^\\])*? '{3}
    | " (?:\\.|[^"\\\n])* "      | ' (?:\\.|[^'\\\n])* '
    """,
    re.S | re.X,
)


def _annotations(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
        yield node.annotation
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
        yield node.returns


def test_name_places(path: Path) -> list[Place]:
    """Tests whose name begins with a clause: names say subject, verb and object."""
    lines = path.read_text(encoding="utf-8").split("\n")
    file = str(path.relative_to(ROOT))
    return [
        Place("names of tests", "a clause", file, number, line.strip())
        for number, line in enumerate(lines, 1)
        if re.match(rf"\s*(?:async )?def {CLAUSE.pattern}", line)
    ]


def comment_lines(paths: Sequence[Path]) -> tuple[int, int]:
    """(lines with a comment, lines that are not blank) of some files; docstrings are lines, not comments."""
    commented = total = 0
    for path in paths:
        text = path.read_text(encoding="utf-8")
        total += sum(1 for line in text.split("\n") if line.strip())
        commented += len(comments_in(text))
    return commented, total


def page_words() -> int:
    return sum(len(re.findall(r"[A-Za-z][A-Za-z'-]*", prose(path))) for path in pages())


def counts() -> dict[str, dict[str, int]]:
    """Kind of text -> what -> how many."""
    counted: dict[str, Counter[str]] = {}
    places = [place for path in pages() for place in page_places(path)]
    places += [place for path in sources() for place in source_places(path)]
    places += [place for path in sorted((ROOT / "tests").rglob("test_*.py")) for place in test_name_places(path)]
    scripts = [place for path in sources([ROOT / "benchmarks"]) for place in source_places(path)]
    for place in [*places, *(place._replace(kind=f"benchmarks: {place.kind}") for place in scripts)]:
        what = "functions" if "long functions" in place.kind else place.what
        counted.setdefault(place.kind, Counter())[what] += 1
    return {kind: dict(sorted(found.items())) for kind, found in sorted(counted.items())}


def risen(today: dict[str, dict[str, int]], limits: dict[str, dict[str, int]]) -> list[str]:
    """What is counted more often than its limit allows."""
    return [
        f"{kind}: {what!r} {number} times, and {limit} at most; write: {WORDS.get(what, 'see the docstring')}"
        for kind, numbers in today.items()
        for what, number in numbers.items()
        if number > (limit := limits.get(kind, {}).get(what, 0))
    ]


def main(words: Sequence[str]) -> int:
    limits = json.loads(LIMITS.read_text(encoding="utf-8")) if LIMITS.exists() else None
    if words and words[0] != "--lower":
        under = [Path(word).resolve() for word in words]
        places = [p for f in sources([u for u in under if u.suffix != ".md"]) for p in source_places(f)]
        places += [p for f in pages(under) for p in page_places(f)]
        places += [p for f in sources(under) if f.name.startswith("test_") for p in test_name_places(f)]
        for place in places:
            print(f"{place.file}:{place.line}: {place.kind}: {place.what}: {place.text}")
        for (kind, what), number in sorted(Counter((p.kind, p.what) for p in places).items()):
            if not kind.startswith("long"):
                print(f"{number:5} {kind}: {what}")
        return 0
    today = counts()
    if words:
        if limits is not None and (wrong := risen(today, limits)):
            print("\n".join(wrong), file=sys.stderr)
            return 1
        LIMITS.write_text(json.dumps(today, indent=1) + "\n", encoding="utf-8")
        return 0
    total = page_words()
    for kind, numbers in today.items():
        for what, number in numbers.items():
            rate = f", {number / total * PER:.1f} in {PER:,} words" if kind == "pages" else ""
            print(f"{kind}: {what}: {number} of {(limits or {}).get(kind, {}).get(what, 0)}{rate}")
    for name, paths in {"octavo": sources(), "triton_kernels": sources([ROOT / KERNELS])}.items():
        commented, lines = comment_lines(paths)
        print(f"comments: {commented / lines:.1%} of {lines:,} lines of {name} that are not blank")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
