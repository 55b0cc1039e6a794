"""English, names and types: what tests/project_words.py counts is at most what its limits allow."""

from __future__ import annotations

import io
import json
import tokenize

import pytest

from tests import project_words


@pytest.fixture(scope="module")
def today() -> dict[str, dict[str, int]]:
    return project_words.counts()


def test_no_count_has_risen(today):
    wrong = project_words.risen(today, json.loads(project_words.LIMITS.read_text(encoding="utf-8")))
    assert not wrong, "\n".join([*wrong, "python -m tests.project_words FILE shows where"])


@pytest.mark.parametrize(
    ("source", "kind", "what"),
    [
        ("# no file beside this one\n", "comments", "beside"),
        ('"""A list beside another."""\n', "docstrings", "beside"),
        ('raise ValueError(f"{x} is beside {y}")\n', "texts", "beside"),
        ('"""The scale, None without."""\n', "docstrings", "None without"),
        ('raise ValueError(f"{n} bytes a row, {x}")\n', "texts", "a rate with 'a'"),
        ('"""The same, for rows."""\n', "docstrings", "The same, ..."),
        ("# a stream of its own\n", "comments", "of its own"),
        ("say = print\n", "names", "say"),
        ("found = 1\n", "names", "found"),
        ("for own, _ in pairs:\n    pass\n", "names", "own"),
        ("def _kept():\n    pass\n", "names", "kept"),
        ("class Found:\n    pass\n", "names", "found"),
        ("def f(told):\n    pass\n", "names", "told"),
        ("def f(x: dict[str, Any]) -> None:\n    pass\n", "types", "Any"),
        ("def _rolled():\n    pass\n", "functions", "participles"),
        ("x = [1]  # fmt: skip\n", "formatter", "fmt: skip"),
        ("def f():\n" + "    x = 1\n" * 26, "long functions without a comment", "f"),
        ("def f():\n    # noqa: E501\n" + "    x = 1\n" * 26, "long functions without a comment", "f"),
    ],
)
def test_what_is_counted(source, kind, what, tmp_path, monkeypatch):
    monkeypatch.setattr(project_words, "ROOT", tmp_path)
    file = tmp_path / "planted.py"
    file.write_text(source, encoding="utf-8")
    assert [(p.kind, p.what) for p in project_words.source_places(file)] == [(kind, what)]


@pytest.mark.parametrize(
    "source",
    [
        'NAME = "beside"\n',  # a key, not a sentence
        "x.found = 1\n",
        "def embed():\n    pass\n",
        "def f():\n    # a reason\n" + "    x = 1\n" * 26,
        'def f():\n    """Doc.\n' + "    more\n" * 26 + '    """\n    return 1\n',
    ],
)
def test_what_is_not_counted(source, tmp_path, monkeypatch):
    monkeypatch.setattr(project_words, "ROOT", tmp_path)
    file = tmp_path / "planted.py"
    file.write_text(source, encoding="utf-8")
    assert project_words.source_places(file) == []


def test_comments_are_those_that_tokenize_finds():
    source = (
        "a = '# no'  # 1\n"
        'b = "\\"# no"  # 2 \'"\n'
        "c = r'\\'  # 3\n"
        '"""\n# no \' "\n"""  # 6\n'
        "d = f\"{a['#']}\"  # 7\n"
        "e = (  # 8\n    'x'  # 9\n    '# no')\n"
        "g = 'a\\\n# no'\n"
    )
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    assert project_words.comments_in(source) == {t.start[0]: t.string for t in tokens if t.type == tokenize.COMMENT}
    assert sorted(project_words.comments_in(source)) == [1, 2, 3, 6, 7, 8, 9]


def test_names_of_tests_that_begin_with_a_clause_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(project_words, "ROOT", tmp_path)
    file = tmp_path / "test_planted.py"
    file.write_text("def test_what_is_read():\n    pass\n\n\ndef test_rows_are_read():\n    pass\n", encoding="utf-8")
    assert [(p.kind, p.line) for p in project_words.test_name_places(file)] == [("names of tests", 1)]


def test_pages_are_below_the_goals(today):
    words = project_words.page_words()
    rates = {word: today["pages"].get(word, 0) / words * project_words.PER for word in project_words.PAGE_GOALS}
    assert all(rates[word] <= goal for word, goal in project_words.PAGE_GOALS.items()), rates


def test_code_in_pages_is_not_prose(tmp_path, monkeypatch):
    monkeypatch.setattr(project_words, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("`beside`\n```\nbeside\n```\none beside two\n", encoding="utf-8")
    assert [(p.what, p.line) for p in project_words.page_places(page)] == [("beside", 5)]


def test_kernels_have_comments():
    commented, lines = project_words.comment_lines(project_words.sources([project_words.ROOT / project_words.KERNELS]))
    assert commented >= project_words.KERNEL_COMMENTS * lines, f"{commented} of {lines} lines of the kernels"
