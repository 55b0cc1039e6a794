"""The layout is a test: who may import whom, what the lowest level may need, and what must not be in the repository.

Each rule is a function of a tree of sources; the tests below hold it on this one, and on one with a violation planted.
"""

from __future__ import annotations

import ast
import copy
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "octavo"

# Packages by level, the highest first. A package imports from lower levels only: never upward, never sideways.
LEVELS = [
    {"cli"},
    {"rl", "report", "doctor", "bench"},
    {"train"},
    {"parallel", "checkpoint", "adapters"},
    {"models", "data"},
    {"fp8"},
    {"config", "environment", "atomic", "arithmetic"},
]
LEVEL_OF = {package: -i for i, level in enumerate(LEVELS) for package in level}
# The packages of octavo.fp8, the lowest first; within one, files form no circle.
FP8_LEVELS = [
    {"arithmetic"},
    {"kernels", "observe"},
    {"weights"},
    {"dense"},
    {"blocks", "memory", "optim"},
    {"moe"},
    {"policy"},
    {"measuring"},
    {"planning"},
    {"proof"},
]
FP8_LEVEL_OF = {package: i for i, level in enumerate(FP8_LEVELS) for package in level}
# Who knows that a parameter may be a DTensor.
SHARDS = (
    "octavo.fp8.weights.shards",
    "octavo.fp8.weights.fp8_",
    "octavo.fp8.optim.",
    "octavo.parallel",
    "octavo.checkpoint",
)
OF_SHARDS = {"DTensor", "is_dtensor", "fully_shard", "FSDPModule", "full_tensor", "distribute_tensor", "_local_tensor"}
# Third-party packages that only some packages may import.
KEPT_IN = {
    "transformers": {"models", "data", "checkpoint", "adapters", "rl", "bench"},
    "peft": {"adapters"},
    "triton": {"fp8"},
    "argparse": {"cli"},
}


def package_of(module: str) -> str | None:
    """The package of ``octavo.<package>...``; octavo itself has none, and fp8's arithmetic lies below all others."""
    parts = module.split(".")
    if parts[0] != "octavo" or len(parts) < 2 or parts[1] in {"__main__", "__init__"}:
        return None
    return "arithmetic" if parts[1:3] == ["fp8", "arithmetic"] else parts[1]


class Tree:
    """Modules by dotted name with their sources; :meth:`planted` is the same with other sources for some of them."""

    def __init__(self) -> None:
        self.sources: dict[str, str] = {}
        self.packages: set[str] = set()
        for path in sorted(PACKAGE.rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if parts[-1] == "__init__":
                self.packages.add(name)
            self.sources[name] = path.read_text(encoding="utf-8")
        self.parsed = {name: ast.parse(source) for name, source in self.sources.items()}
        self.imports = {name: list(self._imports(name)) for name in self.sources}

    def planted(self, sources: dict[str, str]) -> Tree:
        other = copy.copy(self)
        other.sources = self.sources | sources
        other.parsed = self.parsed | {name: ast.parse(source) for name, source in sources.items()}
        other.imports = self.imports | {name: list(other._imports(name)) for name in sources}
        return other

    def _imports(self, module: str) -> Iterator[tuple[int, str]]:
        """Every import, wherever it stands, lazy ones and those for type checkers included: (line, module or name)."""
        package = module if module in self.packages else module.rpartition(".")[0]
        for node in ast.walk(self.parsed[module]):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                up = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                stem = ".".join([*up, *([node.module] if node.module else [])])
                for alias in node.names:
                    yield node.lineno, f"{stem}.{alias.name}" if f"{stem}.{alias.name}" in self.sources else stem

    def inside(self, module: str) -> set[str]:
        """The modules of this tree that a module imports."""
        return {name for _, name in self.imports[module] if name in self.sources} - {module}


def imports_down(tree: Tree) -> list[str]:
    """Rule 1, between packages: only downward, never sideways; third-party packages where they belong."""
    wrong = []
    for module in tree.sources:
        here = package_of(module)
        for line, name in tree.imports[module]:
            top = name.split(".")[0]
            if here is not None and top in KEPT_IN and here not in KEPT_IN[top]:
                wrong.append(f"{module}:{line} imports {name}, which only {sorted(KEPT_IN[top])} may")
            there = package_of(name) if name in tree.sources else None
            if here is None or there is None or there == here or {here, there} <= {"fp8", "arithmetic"}:
                continue
            if LEVEL_OF[there] >= LEVEL_OF[here]:
                wrong.append(f"{module}:{line} imports {name}: {here} may not look up or sideways to {there}")
            if here == "models" and there == "fp8" and name not in ("octavo.fp8", "octavo.fp8.policy"):
                wrong.append(f"{module}:{line} imports {name}: models knows of FP8 octavo.fp8 and fp8.policy")
    return wrong


def fp8_imports_down(tree: Tree) -> list[str]:
    """Rule 1, inside fp8: a package imports only from lower levels, and nothing through octavo.fp8."""
    wrong = []
    for module in tree.sources:
        here = module.split(".")[2] if module.startswith("octavo.fp8.") else None
        if here is None:
            continue
        if here not in FP8_LEVEL_OF:
            wrong.append(f"{module} lies in no package of fp8")
            continue
        for name in sorted(tree.inside(module)):
            there = name.split(".")[2] if name.startswith("octavo.fp8.") else None
            if name == "octavo.fp8" or (there != here and FP8_LEVEL_OF.get(there or "", -1) >= FP8_LEVEL_OF[here]):
                wrong.append(f"{module} imports {name}: {here} may not look up or sideways")
    return wrong


def circles(tree: Tree) -> list[str]:
    """Rule 1, within packages and everywhere: groups of modules that import each other."""
    found: list[str] = []
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(module: str) -> None:  # Tarjan's strongly connected components
        number[module] = low[module] = len(number)
        stack.append(module)
        for name in sorted(tree.inside(module)):
            # A package's __init__ imports its files; a file that imports its own package closes a circle.
            if name not in number:
                visit(name)
            if name in stack:
                low[module] = min(low[module], low[name])
        if low[module] == number[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                found.append("circle: " + ", ".join(sorted(group)))

    for module in tree.sources:
        if module not in number:
            visit(module)
    return found


def inits(tree: Tree) -> list[str]:
    """Rule 2: a package inside fp8 has an ``__init__`` of at most 40 lines: a sentence and the names it offers."""
    wrong = []
    for name in tree.packages:
        if not name.startswith("octavo.fp8.") or name == "octavo.fp8.kernels.triton_kernels":
            continue
        body = tree.parsed[name].body
        allowed = [
            isinstance(n, ast.ImportFrom)
            or (isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__")
            or (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
            for n in body
        ]
        lines = tree.sources[name].count("\n")
        if ast.get_docstring(tree.parsed[name]) is None or not all(allowed) or lines > 40:
            wrong.append(f"{name}: {lines} lines; it holds one sentence and the names it offers, nothing else")
    return wrong


def reach_inside(tree: Tree) -> list[str]:
    """Rule 3: from outside, ``octavo.fp8`` or one of its packages is imported, never a file in it."""
    return [
        f"{module}:{line} imports {name}; take it from {'.'.join(name.split('.')[:3])}"
        for module in tree.sources
        if not module.startswith("octavo.fp8")
        for line, name in tree.imports[module]
        if name.startswith("octavo.fp8.") and name.count(".") > 2
    ]


def know_shards(tree: Tree) -> list[str]:
    """Rule 4: few files know DTensor and FSDP2; the others ask whether a weight is whole here."""
    wrong = []
    for module, parsed in tree.parsed.items():
        if module.startswith(SHARDS):
            continue
        for node in ast.walk(parsed):
            if isinstance(node, ast.Name):
                word = node.id
            elif isinstance(node, ast.Attribute):
                word = node.attr
            elif isinstance(node, ast.alias):
                word = node.name.rpartition(".")[2]
            else:
                continue
            if word in OF_SHARDS:
                wrong.append(f"{module} names {word}; ask octavo.fp8.weights.is_whole")
    return wrong


def names_as_text(tree: Tree) -> list[str]:
    """Rule 5: no module is named by a string, which breaks in silence when files move."""
    return [
        f"{module}:{node.lineno} names {node.value!r} as text"
        for module, parsed in tree.parsed.items()
        for node in ast.walk(parsed)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith("octavo.fp8.")
        and node.value in tree.sources
    ]


@pytest.fixture(scope="module")
def tree() -> Tree:
    return Tree()


RULES = (imports_down, fp8_imports_down, circles, inits, reach_inside, know_shards, names_as_text)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_layout_keeps(rule, tree: Tree) -> None:
    assert not rule(tree), "\n".join(rule(tree))


@pytest.mark.parametrize(
    ("rule", "planted"),
    [
        (imports_down, {"octavo.models.freeze": "def f():\n    from octavo.train import build"}),
        (imports_down, {"octavo.data.digits": "import transformers.models\nimport triton"}),
        (imports_down, {"octavo.models.freeze": "from octavo.fp8 import planning"}),
        (fp8_imports_down, {"octavo.fp8.dense.linear": "from octavo.fp8.blocks import mlp"}),
        (fp8_imports_down, {"octavo.fp8.kernels.groups": "from octavo.fp8.observe.counts import GemmCounts"}),
        (
            fp8_imports_down,
            {"octavo.fp8.weights.cache": "if TYPE_CHECKING:\n    from octavo.fp8.dense.gemms import Site"},
        ),
        (fp8_imports_down, {"octavo.fp8.stray": ""}),
        (circles, {"octavo.fp8.dense.inputs": "def f():\n    from octavo.fp8.dense import gemms"}),
        (circles, {"octavo.fp8.arithmetic.formats": "if TYPE_CHECKING:\n    from octavo.fp8.arithmetic import cast"}),
        (inits, {"octavo.fp8.dense": '"""A sentence."""\nx = 1\n'}),
        (inits, {"octavo.fp8.dense": '"""A sentence."""\n' + "from octavo.fp8.dense.linear import Linear\n" * 41}),
        (reach_inside, {"octavo.train.step": "from octavo.fp8.dense.linear import Linear"}),
        (reach_inside, {"octavo.train.step": "def f():\n    from octavo.fp8.weights import cache"}),
        (know_shards, {"octavo.fp8.dense.linear": "from octavo.fp8.weights.shards import is_dtensor"}),
        (know_shards, {"octavo.train.step": "def f(w):\n    return w.full_tensor()"}),
        (names_as_text, {"octavo.fp8.blocks.mlp": "WATCHERS = ('octavo.fp8.observe.counts',)"}),
    ],
    ids=lambda x: x.__name__ if callable(x) else "",
)
def test_a_planted_violation_is_found(rule, planted: dict[str, str], tree: Tree) -> None:
    assert rule(tree.planted(planted))


def test_no_package_of_fp8_hides_a_public_function_or_grows_too_large() -> None:
    from octavo import fp8

    packages = [p for p in (PACKAGE / "fp8").iterdir() if (p / "__init__.py").is_file()]
    assert {p.name for p in packages} == set(FP8_LEVEL_OF) and not {p.name for p in packages} & set(fp8.__all__)
    large = {p.name: n for p in packages if (n := len(list(p.glob("*.py")))) > 12}
    assert not large, f"a package of more than 12 files is two: {large}"


PATH = [
    "octavo/cli/train.py",
    "octavo/train/loop.py",
    "octavo/train/build.py",
    "octavo/train/step.py",
    "octavo/fp8/dense/linear.py",
    "octavo/fp8/dense/gemms.py",
    "octavo/fp8/arithmetic/cast.py",
]


@pytest.mark.parametrize(("here", "there"), list(itertools.pairwise(PATH)))
def test_each_file_of_the_newcomers_path_names_the_next(here: str, there: str) -> None:
    """In a docstring, by file or as a module."""
    nodes = ast.walk(ast.parse((ROOT / here).read_text(encoding="utf-8")))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    doc = "\n".join(ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented))
    module = there.removesuffix(".py").replace("/", ".")
    assert there.removeprefix("octavo/") in doc or module in doc, f"{here} does not lead on to {there}"
    assert all(name.removeprefix("octavo/") in (ROOT / "docs/architecture.md").read_text() for name in PATH)


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
    files = sorted(PACKAGE.rglob("*.py"))
    long = [f"{p.relative_to(ROOT)}: {n} lines" for p in files if (n := p.read_text().count("\n")) > 500]
    assert not long, "a file that wants two summaries is two files:\n" + "\n".join(long)


def test_documents_name_files_that_are_there() -> None:
    """Paths and links of the pages; a table may say of which version its paths are."""
    lost = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = re.sub(r"\| file \(paths as of .*?\n\n", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        named = re.findall(r"(?<![\w/.])(?:tests|octavo|benchmarks|examples|docs)/[\w./-]*\w", text)
        links = [str(page.parent / link) for link in re.findall(r"\]\((?!http)([^)#]+)", text)]
        lost += [f"{page.name}: {name}" for name in [*named, *links] if not (ROOT / name).exists()]
    assert not lost, "\n".join(lost)


def test_results_of_uncommitted_changes_are_named() -> None:
    """docs/results.md says that result files name their commit, and which of them are not of it alone."""
    said = (ROOT / "docs/results.md").read_text(encoding="utf-8").partition("## ")[0]
    files = (ROOT / "benchmarks/results").glob("*.json")
    assert {file.name for file in files if '"dirty": true' in file.read_text()} == set(re.findall(r"\w+\.json", said))
