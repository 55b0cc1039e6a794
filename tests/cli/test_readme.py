"""The commands of README.md are accepted by the parser, its YAML is a valid configuration, and its Python names
exist."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from argparse import Namespace
from pathlib import Path

import pytest

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
FENCED = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
BLOCKS = dict(FENCED)
LINES = [
    *re.findall(r"`((?:octavo|make) [^`]+)`", README),
    *re.findall(r"^(?:octavo|make) .*", BLOCKS["sh"], re.MULTILINE),
]
SECTIONS = {name: field.annotation for name, field in Config.model_fields.items()}
SECTIONS |= {"lora": LoraSection, "rl": RlSection, "preference": PreferenceSection}  # optional sections
#: values that the command checks, not the parser
NAMES = {"suite": [[suite] for suite in SUITES], "family": tiny_families(), "shape": shapes.SHAPES}


def parse_command(line: str, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """Return the parsed arguments of a command without running it."""
    _, command, *words = shlex.split(line, comments=True)
    assert command in COMMANDS
    parsed: list[Namespace] = []
    with monkeypatch.context() as patch:
        patch.setattr(importlib.import_module(f"octavo.cli.{command}"), "run", lambda args: parsed.append(args) or 0)
        assert main([command, *words]) == 0, line
    return parsed[0]


def test_commands_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config_text(BLOCKS["yaml"])
    seen = set()
    for line in (line for line in LINES if line.startswith("octavo")):
        args = parse_command(line, monkeypatch)
        seen.add(line.split()[1])
        for name, known in NAMES.items():
            assert getattr(args, name, None) is None or getattr(args, name) in known, line
        if hasattr(args, "overrides"):
            override(config, arguments.overrides(args))
    assert len(seen) > 10 and {"plan", "train", "compare", "generate", "export"} < seen
    for target in re.findall(r"^.*?make (\w+)", "\n".join(x for x in LINES if x.startswith("make")), re.MULTILINE):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), target
    with pytest.raises(AssertionError):  # an option that does not exist
        parse_command("octavo plan my.yaml --cards 80GB", monkeypatch)


def test_configuration_is_valid() -> None:
    config = load_config_text(BLOCKS["yaml"])
    assert len(FENCED) == len(BLOCKS) == 3  # one block per language, since only one is checked
    assert config.run.dir == "runs/my" and config.fp8.recipe == "blockwise"


def test_python_names_exist() -> None:
    tree = ast.parse(BLOCKS["python"])
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") == "fp8"}
    assert {"plan", "apply"} < used and all(hasattr(fp8, name) for name in used)


def test_keys_in_coming_from_exist() -> None:
    """Checks `section: {key: ..., key}` and `section.key` in the Octavo column of docs/coming_from.md."""
    page = (ROOT / "docs/coming_from.md").read_text(encoding="utf-8")
    named = set()
    for cells in (line.split(" | ") for line in page.splitlines() if line.startswith("| ")):
        for code in re.findall(r"`([^`]+)`", cells[1]):
            if found := re.fullmatch(r"(\w+): \{(.*)\}", code):
                inner = re.sub(r"[\[{].*?[\]}]", "", found[2])
                named |= {(found[1], key) for key in re.findall(r"(?:^|, )(\w+)", inner)}
            elif found := re.fullmatch(r"(model|data|train|lora|optimizer|preference|rl|run|fp8)\.([a-z_]+)\b.*", code):
                named.add((found[1], found[2]))
    wrong = [f"{s}.{k}" for s, k in named if k not in SECTIONS[s].model_fields and not (s == "fp8" and hasattr(fp8, k))]
    assert len(named) > 40 and not wrong, wrong
