"""The floor plan is a test: who may import whom, what the ground may need, and what must not be in the repository."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "octavo"

# Rooms by floor, the roof first. A room may import from lower floors only: never upward, never sideways.
FLOORS = [
    {"cli"},
    {"rl", "report", "doctor", "bench"},
    {"train"},
    {"parallel", "checkpoint", "adapters"},
    {"models", "data"},
    {"fp8"},
    {"config", "environment", "atomic", "ground"},
]
FLOOR_OF = {room: i for i, floor in enumerate(FLOORS) for room in floor}
GROUND_FP8 = {"formats", "cast", "recipe", "metrics"}
# Third-party packages that only some rooms may import.
KEPT_IN = {
    "transformers": {"models", "data", "checkpoint", "adapters", "rl", "bench"},
    "peft": {"adapters"},
    "triton": {"fp8"},
    "argparse": {"cli"},
}


def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py"))


def room_of(dotted: str) -> str | None:
    """The room of ``octavo.<room>...``; the package's own front door has none."""
    parts = dotted.split(".")
    if parts[0] != "octavo" or len(parts) < 2 or parts[1] in {"__main__", "__init__"}:
        return None
    if parts[1] == "fp8" and len(parts) > 2 and parts[2] in GROUND_FP8:
        return "ground"
    return parts[1]


def imports(path: Path) -> list[tuple[int, str]]:
    """Every module that a file imports at run time, wherever the import stands; type-checking blocks are left out."""
    package = (
        path.relative_to(ROOT).with_suffix("").parts[:-1]
        if path.name != "__init__.py"
        else path.relative_to(ROOT).parts[:-1]
    )
    tree = ast.parse(path.read_text(encoding="utf-8"))
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in node.body
        for inner in ast.walk(child)
    }
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join([*base, *([node.module] if node.module else [])])
            found.append((node.lineno, stem))
            found += [(node.lineno, f"{stem}.{alias.name}") for alias in node.names]
    return found


def is_module(dotted: str) -> bool:
    path = ROOT.joinpath(*dotted.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    here_name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    here = room_of(here_name)
    wrong = []
    for line, name in imports(path):
        top = name.split(".")[0]
        if top in KEPT_IN and here not in KEPT_IN[top]:
            wrong.append(f"{path.name}:{line} imports {name}, which only {sorted(KEPT_IN[top])} may")
        there = room_of(name) if is_module(name) else None
        if here is None or there is None or there == here or {here, there} <= {"fp8", "ground"}:
            continue
        if FLOOR_OF[there] <= FLOOR_OF[here]:
            wrong.append(f"{path.name}:{line} imports {name}: {here} may not look up or sideways to {there}")
        if here == "models" and there == "fp8" and not name.startswith("octavo.fp8.topology") and name != "octavo.fp8":
            wrong.append(f"{path.name}:{line} imports {name}: models knows nothing of FP8 but fp8.topology")
    assert not wrong, "\n".join(wrong)


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print('\\n'.join(sorted(m.split('.')[0] for m in sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(out.stdout.split())


def test_fp8_needs_torch_alone() -> None:
    extra = loaded_by("import octavo.fp8") & {
        "transformers",
        "pydantic",
        "ruamel",
        "rich",
        "sklearn",
        "PIL",
        "safetensors",
    }
    assert not extra, f"import octavo.fp8 brought {sorted(extra)}"


def test_config_needs_no_torch() -> None:
    extra = loaded_by("import octavo.config, octavo.cli.main") & {"torch", "transformers", "numpy", "sklearn"}
    assert not extra, f"import octavo.config brought {sorted(extra)}"


def tracked() -> list[Path]:
    out = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if out.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in out.stdout.split("\n") if name and (ROOT / name).is_file()]


FORBIDDEN = [
    (r"trust_remote_code\s*=\s*True", "remote code stays off"),
    (r"weights_only\s*=\s*False", "no pickle from user files"),
    (r"from transformers import \*", "imports every model, torchvision ones too"),
    (r"skipif\(\s*True", "a disabled test rots"),
    (r"\b(TODO|FIXME|XXX)\b", "finish it, or write it down in docs/lab.md"),
    (r"(?<![\w/.])/(?:work|root|home|opt)/[\w.-]+", "a path of somebody's machine"),
]


def test_nothing_forbidden_is_tracked() -> None:
    found = []
    for path in tracked():
        if path == Path(__file__) or path.suffix in {".png", ".jpg", ".safetensors"}:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        for pattern, why in FORBIDDEN:
            for match in re.finditer(pattern, text):
                line = text.count("\n", 0, match.start()) + 1
                found.append(f"{path.relative_to(ROOT)}:{line}: {match.group(0)!r}: {why}")
    assert not found, "\n".join(found)


def test_files_end_before_they_tire() -> None:
    long = [f"{p.relative_to(ROOT)}: {n} lines" for p in modules() if (n := p.read_text().count("\n")) > 500]
    assert not long, "a file that wants two summaries is two files:\n" + "\n".join(long)
