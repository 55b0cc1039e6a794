"""README is short, its commands and those in docs/commands.md are accepted, and its files and code work as typed."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from octavo import fp8
from octavo.base.model_families import tiny_families
from octavo.bench import SUITES
from octavo.cli import arguments
from octavo.cli.main import COMMANDS, main
from octavo.config import Config, LoraSection, load_config_text, override
from octavo.config.sections.rl import PreferenceSection, RlSection
from octavo.models.structure import shapes

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMAND_PAGE = (ROOT / "docs/commands.md").read_text(encoding="utf-8")
BLOCK = re.compile(r'^```(\w+)(?: title="[^"]+")?\n(.*?)^```', re.MULTILINE | re.DOTALL)
SECTIONS = {name: field.annotation for name, field in Config.model_fields.items()}
SECTIONS |= {"lora": LoraSection, "rl": RlSection, "preference": PreferenceSection}  # optional sections
JOBS = ("sft", "lora", "preferences", "rl", "pretraining", "export")
#: values that the command checks, not the parser
NAMES = {"suite": [[suite] for suite in SUITES], "family": tiny_families(), "shape": shapes.SHAPES}


def blocks(language: str, page: str = README) -> list[str]:
    return [text for name, text in BLOCK.findall(page) if name == language]


def command_lines(page: str) -> list[str]:
    """The lines of `sh` blocks, and the commands in code in the text."""
    lines = [line for text in blocks("sh", page) for line in text.splitlines()]
    return [*lines, *re.findall(r"`((?:octavo|make|pip) [^`]+)`", BLOCK.sub("", page))]


def words(text: str) -> list[str]:
    """What a reader of a page reads: everything between white space that has a letter or a digit, in prose, cells of
    tables, headings, code and texts of links and pictures. Addresses of links, fences, comments of HTML and marks such
    as `#`, `|`, `-` are not read."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"\]\([^)\s]*\)", "]", re.sub(r"^```.*$", "", text, flags=re.MULTILINE))
    return [word for word in text.replace("|", " ").split() if re.search(r"\w", word)]


def parse_command(line: str, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """Return the parsed arguments of a command without running it."""
    _, command, *rest = shlex.split(line, comments=True)
    assert command in COMMANDS
    parsed: list[Namespace] = []
    with monkeypatch.context() as patch:
        patch.setattr(importlib.import_module(f"octavo.cli.{command}"), "run", lambda args: parsed.append(args) or 0)
        assert main([command, *rest]) == 0, line
    return parsed[0]


def test_words_of_a_page() -> None:
    assert words("# A b\n\n| c | [d e](f.md) |\n|---|---|\n") == ["A", "b", "c", "[d", "e]"]
    assert words("```sh\nls -l x\n```\n![y](z.png) <!-- no -->- w") == ["ls", "-l", "x", "![y]", "w"]


def test_readme_is_short() -> None:
    assert len(words(README)) <= 700
    commands = {" ".join(shlex.split(line, comments=True)) for line in command_lines(README)}
    assert len(commands) <= 12, sorted(commands)
    first_screen = README.split("\n|")[0]
    for phrase in ("Train vision-language and language models in FP8, and measure what it costs you.", "make demo"):
        assert phrase in first_screen
    for fact in ("Ada", "Hopper", "Blackwell", "Python >= 3.11", "Apache-2.0", "make test", "pip install ."):
        assert fact in README


def test_commands_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    quick, full = load_config_text(blocks("yaml")[0]), load_config_text(blocks("yaml", _page("sft"))[1])
    seen = set()
    jobs = [(load_config_text(blocks("yaml", _page(job))[0]), _page(job)) for job in JOBS]
    for config, page in ((quick, README), (full, COMMAND_PAGE), *jobs):
        for line in (line for line in command_lines(page) if re.match(r"octavo (?!COMMAND)\w+ ", line)):
            args = parse_command(re.sub(r"\bN\b", "8", line), monkeypatch)  # a number that a page leaves open
            seen.add(line.split()[1])
            for name, known in NAMES.items():
                assert getattr(args, name, None) is None or getattr(args, name) in known, line
            if hasattr(args, "overrides"):
                override(config, arguments.overrides(args))
    unlisted = set(COMMANDS) - seen - {"demo", "doctor", "digits", "text", "schema", "encrypt", "decrypt", "unseal"}
    assert not unlisted, f"add them to the table of docs/commands.md: {sorted(unlisted)}"
    for target in re.findall(r"make (\w+)", "\n".join(command_lines(README))):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), target
    with pytest.raises(AssertionError):  # an option that does not exist
        parse_command("octavo plan my.yaml --cards 80GB", monkeypatch)


def _page(name: str) -> str:
    return (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")


def test_quick_starts_are_valid_configurations() -> None:
    (text,) = blocks("yaml")
    assert load_config_text(text).run.dir == "runs/my"
    tree = ast.parse(blocks("python")[0])
    (config,) = [n.value for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id == "config"]
    value = ast.literal_eval(config)
    assert "data" not in value  # the rows are passed
    value["data"] = {"train": [{"path": "rows.jsonl"}]}
    assert load_config_text(_yaml(value)).run.dir == "runs/python"


def _yaml(value: object) -> str:
    import io

    stream = io.StringIO()
    YAML().dump(value, stream)
    return stream.getvalue()


def test_python_names_exist() -> None:
    tree = ast.parse(blocks("python")[1])
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") == "fp8"}
    assert {"plan", "apply", "count_gemms"} <= used and all(hasattr(fp8, name) for name in used)


#: a comparison of few runs, whatever its verdict
SHORTER = {"compare": ["train.steps=2", "data.eval.0.max_samples=4", "--forks", "0"], "train": []}


def run_lines(lines: Sequence[str]) -> None:
    for line in lines:
        program, command, *rest = shlex.split(line, comments=True)
        assert program == "octavo", line
        assert main([command, *rest, *SHORTER.get(command, [])]) in ({0, 1, 3} if command == "compare" else {0}), line


@pytest.mark.long
@pytest.mark.usefixtures("no_pages")
def test_quick_starts_run_as_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (text,) = blocks("yaml")
    Path("my.yaml").write_text(text, encoding="utf-8")
    run_lines([line for line in command_lines(README) if line.startswith("octavo ")])
    assert Path("runs/my/proof.json").is_file() and Path("served/config.json").is_file()
    Path("quick.py").write_text(blocks("python")[0], encoding="utf-8")
    done = subprocess.run([sys.executable, "quick.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path("runs/python/proof.json").is_file()


def tracked_texts() -> list[tuple[str, str]]:
    """Path and text of every tracked file that is text; without git, of the files of the project's folders."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True)
    names = listed.stdout.decode().split("\0") if listed.returncode == 0 else []
    names = [*filter(None, names)] or [
        str(path.relative_to(ROOT))
        for folder in ("octavo", "docs", "tests", "examples", "benchmarks")
        for path in (ROOT / folder).rglob("*.*")
    ]
    names += [name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile") if name not in names]
    texts = []
    for name in names:
        path = ROOT / name
        if path.is_file() and not path.is_symlink() and b"octavo" in (data := path.read_bytes()) and b"\0" not in data:
            texts.append((name, data.decode("utf-8", "replace")))
    return texts


FROM_PYPI = re.compile(
    r"""pip3?\s+install\b[^\n`#&;]*?[\s'"](octavo)(\[[\w,]+\])?(?=[\s'"`;,.)=<>~]|$)""", re.MULTILINE
)


def asks_pypi(name: str, text: str) -> list[str]:
    """Lines that install a package "octavo" from PyPI, where the name is not the project's. An installed Octavo may
    name its own extras in its messages: pip takes the package that is installed."""
    own = name.startswith(("octavo/", "tests/"))
    return [match[0] for match in FROM_PYPI.finditer(text) if not (own and match[2])]


def test_the_name_on_pypi_is_not_installed_anywhere() -> None:
    texts = tracked_texts()
    assert {"README.md", "docs/data.md"} <= {name for name, _ in texts}
    wrong = {
        name: lines for name, text in texts if (lines := asks_pypi(name, text)) and name != "tests/cli/test_readme.py"
    }
    assert not wrong, f"write `pip install .`, or '.[extra]', in a clone: {wrong}"


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("docs/a.md", "pip install octavo", True),
        ("octavo/a.py", '"pip install --upgrade octavo"', True),
        ("docs/a.md", "`pip install 'octavo[math]'`", True),
        ("octavo/a.py", "pip install 'octavo[math]'", False),
        ("docs/a.md", "pip install '.[math]' in Octavo's folder", False),
        ("docs/a.md", "pip install . && octavo demo", False),
        ("docs/a.md", "pip install .  # the command octavo", False),
    ],
)
def test_installing_from_pypi_is_seen(name: str, text: str, found: bool) -> None:
    assert bool(asks_pypi(name, text)) == found
