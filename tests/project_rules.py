"""The rules of the layout, each a function of a tree of sources that gives a sentence for whatever breaks it.

Sources are read, never run, but for tables whose words a rule looks for. ``tests/test_project.py`` holds the rules on
this tree, and on one with a violation planted.
"""

from __future__ import annotations

import ast
import copy
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from octavo.base import suffixes
from octavo.base.model_families import RECORDS
from octavo.base.recipe_specs import NAMES
from tests.project_levels import FILES, FP8_FILES, INIT_LINES, LEVELS, UNCOUNTED, UNMEASURED
from tests.project_words import comments_in

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "octavo"

LEVEL_OF = {name: -i for i, level in enumerate(LEVELS["octavo"]) for name in level}
FP8_PACKAGES = {name for level in LEVELS["octavo.fp8"] for name in level}
# Who knows that a parameter may be a DTensor, and the words and modules by which one sees that a file does.
SHARDS = (
    "octavo.fp8.weights.shards",
    "octavo.fp8.weights.fp8_",
    "octavo.fp8.optim.",
    "octavo.parallel",
    "octavo.checkpoint",
)
OF_SHARDS = {"DTensor", "is_dtensor", "fully_shard", "FSDPModule", "full_tensor", "distribute_tensor", "_local_tensor"}
OF_SHARDS |= {"to_local", "placements", "device_mesh", "DeviceMesh", "init_device_mesh"}
SHARD_MODULES = tuple(
    f"torch.distributed.{name}" for name in ("tensor", "_tensor", "fsdp", "device_mesh", "_composable")
)
# Who imports the files of its own folder by name, when they are asked for: its edges are to all of them.
LOADERS = {"octavo.cli.main", "octavo.bench.suites", "octavo.fp8.kernels.triton_kernels"}
# Who runs a user's file in a process of its own, and asks which others that has imported.
STRANGERS = {"octavo.rl.rewards.worker"}
BY_TEXT = {"importlib.import_module", "importlib.__import__", "importlib.util.find_spec", "sys.modules"}
BY_TEXT |= {"__import__", "exec", "eval", "runpy.run_module", "pkgutil.resolve_name"}
# One word that looks like a module and is none: a file that users keep.
NO_MODULES = {"octavo.schema.json"}
# Who may name a vendor's devices (a module, or a package with all in it), each with its reason.
NAMES_DEVICES = {
    "octavo.base.accelerator": "it asks for all others",
    "octavo.fp8.kernels": "kernels are written for one vendor's devices",
    "octavo.fp8.measuring.timing": "the clock of kernels: it holds a stream busy while they are queued",
    "octavo.train.step.cuda_graphs": "CUDA graphs",
    "octavo.generation.decode_cuda_graph": "CUDA graphs",
    "octavo.bench.suite_step.step": "CUDA graphs, with which its candidates are compared",
    "octavo.bench.suite_step.candidates": "CUDA graphs",
    "octavo.fp8.planning.file_form": "a key of plan files: the toolkit that torch was built with",
    "octavo.doctor.other_vendors": "it tells of each vendor's machines",
}
VENDORS = ("cuda", "hip", "xpu", "npu", "mps", "hpu", "mtia")
OF_VENDORS = tuple(f"torch.{stem}{vendor}" for stem in ("", "backends.", "version.") for vendor in VENDORS)
# Subject -> (words of which no two are listed by hand, the modules that may: the table from which others are derived).
LISTED_ONCE: dict[str, tuple[frozenset[str], tuple[str, ...]]] = {
    "recipes": (frozenset(NAMES), ("octavo.base.recipe_specs",)),
    "families": (
        frozenset(RECORDS),
        (
            "octavo.base.model_families",
            "octavo.importers.frameworks.llama_factory",  # names of theirs
            "octavo.importers.frameworks.mindspeed_data",
        ),
    ),
    "endings of data": (frozenset(suffixes.ROWS) | {".arrow"}, ("octavo.base.suffixes",)),
}
# What models may import of FP8: names that users have, globs of names, and weights that are FP8 in a folder.
MODELS_KNOW = ("octavo.fp8", "octavo.fp8.policy", "octavo.fp8.weights")
# Third-party packages that only some packages may import; a type may be named by all.
KEPT_IN = {
    "transformers": {"models", "data", "checkpoint", "adapters", "rl", "sealing", "bench", "loading"},
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
    """Modules by dotted name with their sources, and the scripts of benchmarks/ likewise; :meth:`planted` is the same
    with other sources for some of them."""

    def __init__(self) -> None:
        self.sources: dict[str, str] = {}
        self.packages: set[str] = set()
        for path in sorted(PACKAGE.rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if parts[-1] == "__init__":
                self.packages.add(name)
            self.sources[name] = path.read_text(encoding="utf-8")
        self.files = {name: File(name, self) for name in self.sources}
        self.scripts = {
            ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text(encoding="utf-8")
            for path in sorted((ROOT / "benchmarks").rglob("*.py"))
        }

    def planted(self, sources: dict[str, str]) -> Tree:
        other = copy.copy(self)
        scripts = {name: text for name, text in sources.items() if name.startswith("benchmarks.")}
        sources = {name: text for name, text in sources.items() if name not in scripts}
        other.scripts = self.scripts | scripts
        other.sources = self.sources | sources
        other.files = self.files | {name: File(name, other) for name in sources}
        return other

    def of(self, sources: dict[str, str]) -> Tree:
        """Modules with these sources only; one within which others are is a package."""
        other = copy.copy(self)
        other.sources, other.packages = sources, {name.rpartition(".")[0] for name in sources} & sources.keys()
        other.files = {name: File(name, other) for name in sources}
        return other

    def module_of(self, name: str) -> str:
        """The longest beginning of a dotted name that is a module here; "" if none is."""
        while name and name not in self.sources:
            name = name.rpartition(".")[0]
        return name

    def inside(self, module: str) -> set[str]:
        """The modules of this tree that a module imports."""
        return {name for _, name in self.files[module].imports if name in self.sources} - {module}

    def offers(self, name: str) -> bool:
        """Whether a dotted name is a module or a name at the top of one."""
        module = self.module_of(name)
        rest = name.removeprefix(module).split(".")
        return len(rest) == 1 or (len(rest) == 2 and rest[1] in self.files[module].top)


class File:
    """What a module says: the names it binds and uses, its imports, and its strings but for docstrings."""

    def __init__(self, module: str, tree: Tree) -> None:
        self.parsed = ast.parse(tree.sources[module])
        self.nodes = list(ast.walk(self.parsed))
        self.folder = module if module in tree.packages else module.rpartition(".")[0]
        docs = {id(n.value) for n in self.nodes if isinstance(n, ast.Expr)}
        self.texts = [
            (n.lineno, n.value, id(n))
            for n in self.nodes
            if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in docs
        ]
        stated, bound = [], [("__import__", "__import__"), ("exec", "exec"), ("eval", "eval")]
        for node in self.nodes:
            if isinstance(node, ast.Import):
                stated += [(node.lineno, a.name) for a in node.names]
                bound += [(a.asname, a.name) if a.asname else (a.name.split(".")[0],) * 2 for a in node.names]
            elif isinstance(node, ast.ImportFrom):
                up = self.folder.split(".")[: len(self.folder.split(".")) - node.level + 1] if node.level else []
                stem = ".".join([*up, *([node.module] if node.module else [])])
                stated += [(node.lineno, f"{stem}.{a.name}") for a in node.names]
                bound += [(a.asname or a.name, f"{stem}.{a.name}") for a in node.names]
        # Every dotted name that begins with an imported one, whatever was imported under that word: (node, full name).
        self.used = list(self._used(bound))
        #: imports wherever they stand, also lazy, for type checkers, by attribute and by text: (line, module or name)
        self.imports: list[tuple[int, str]] = []
        for line, name in [*stated, *((n.lineno, name) for n, name in self.used if name.startswith("octavo."))]:
            self.imports.append((line, tree.module_of(name) or name))
        self.named = {name for _, name in stated} | {name for _, name in self.used}
        self.loads = list(self._loads())
        for line, text in self.loads:
            if text is None and module in LOADERS:
                siblings = [name for name in tree.sources if name.rpartition(".")[0] == self.folder]
                self.imports += [(line, name) for name in siblings if not name.endswith(".__main__")]
            elif text is not None:
                self.imports.append((line, text))
        self.top = {name for node in self.parsed.body for name in _binds(node)}
        #: lines under `if TYPE_CHECKING:`, whose imports name a type and load nothing
        self.typed: set[int] = set()
        for node in self.nodes:
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                self.typed.update(range(node.body[0].lineno, (node.body[-1].end_lineno or 0) + 1))

    def _used(self, bound: list[tuple[str, str]]) -> Iterator[tuple[ast.expr, str]]:
        names: dict[str, set[str]] = {}
        for word, name in bound:
            names.setdefault(word, set()).add(name)
        for node in self.nodes:
            at, attributes = node, []
            while isinstance(at, ast.Attribute):
                attributes.append(at.attr)
                at = at.value
            if isinstance(at, ast.Name) and isinstance(at.ctx, ast.Load):
                for name in names.get(at.id, ()):
                    yield node, ".".join([name, *reversed(attributes)])

    def _loads(self) -> Iterator[tuple[int, str | None]]:
        """What is imported, or looked up among modules, by text: (line, the text; None where it is not plain)."""
        told = {}
        for node in self.nodes:
            match node:
                case ast.Call(
                    func=ast.Attribute(value=who, attr="get" | "pop"), args=[ast.Constant(value=str(text)), *_]
                ):
                    told[id(who)] = text
                case ast.Subscript(value=who, slice=ast.Constant(value=str(text))):
                    told[id(who)] = text
                case ast.Compare(left=ast.Constant(value=str(text)), comparators=[who]):
                    told[id(who)] = text
            match node:
                case ast.Call(func=who, args=[ast.Constant(value=str(text)), *_]):
                    told[id(who)] = text
        return ((node.lineno, told.get(id(node))) for node, name in self.used if name in BY_TEXT)


def _binds(node: ast.stmt) -> set[str]:
    """The names that a statement at the top of a module makes."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {a.asname or a.name for a in node.names}
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def imports_down(tree: Tree) -> list[str]:
    """Rule 1, between packages: only downward, never sideways; third-party packages where they belong."""
    wrong = []
    for module in tree.sources:
        here = package_of(module)
        for line, name in tree.files[module].imports:
            top = name.split(".")[0]
            only_typed = line in tree.files[module].typed
            if here is not None and top in KEPT_IN and here not in KEPT_IN[top] and not only_typed:
                wrong.append(f"{module}:{line} imports {name}, which only {sorted(KEPT_IN[top])} may")
            there = package_of(name) if name in tree.sources else None
            if here is None or there is None or there == here or {here, there} <= {"fp8", "arithmetic"}:
                continue
            if LEVEL_OF[there] >= LEVEL_OF[here]:
                wrong.append(f"{module}:{line} imports {name}: {here} may not look up or sideways to {there}")
            if here == "models" and there == "fp8" and name not in MODELS_KNOW:
                wrong.append(f"{module}:{line} imports {name}: models may import only {', '.join(MODELS_KNOW)}")
    return wrong


def subpackages_import_down(tree: Tree) -> list[str]:
    """Rule 1, inside the packages of :data:`LEVELS`: a subpackage imports only from lower levels, and nothing through
    the package itself."""
    return [line for package in LEVELS.keys() - {"octavo"} for line in imports_up(tree, package, LEVELS[package])]


def imports_up(tree: Tree, package: str, levels: list[set[str]]) -> list[str]:
    """What breaks the order of one package."""
    level_of = {name: -i for i, level in enumerate(levels) for name in level}
    inside = [module for module in tree.sources if module.startswith(f"{package}.")]
    places = {module: module.removeprefix(f"{package}.").split(".")[0] for module in inside}
    for module, name in places.items():
        if name not in level_of and module == f"{package}.{name}" and module not in tree.packages:
            places[module] = "*"
    wrong = [f"{m} is in no level of {package}" for m, place in places.items() if place not in level_of]
    for module, here in places.items():
        for name in sorted(tree.inside(module)):
            there = places.get(name)
            if name == package:
                wrong.append(f"{module} imports {name}, which is above it")
            elif there is not None and there != here and level_of.get(there, 0) >= level_of.get(here, 0):
                wrong.append(f"{module} imports {name}: {here} may not look up or sideways to {there}")
    return wrong


def circles(tree: Tree) -> list[str]:
    """Rule 1, within packages and everywhere: groups of modules that import each other."""
    # A package's __init__ imports its files; a file that imports its own package closes a circle.
    return _circles({module: tree.inside(module) for module in tree.sources})


def circles_of_scripts(tree: Tree) -> list[str]:
    """Rule 1, in benchmarks/: scripts that import each other, by whichever of their folders they find each other."""
    return _circles({name: _scripts_of(name, tree) for name in tree.scripts})


def _scripts_of(script: str, tree: Tree) -> set[str]:
    """The scripts that a script imports."""
    stated: list[str] = []
    for node in ast.walk(ast.parse(tree.scripts[script])):
        if isinstance(node, ast.Import):
            stated += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            stated += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    folders = [f"{script.rpartition('.')[0]}.", "benchmarks.", ""]
    return {folder + name for folder in folders for name in stated if folder + name in tree.scripts} - {script}


def _circles(imports: dict[str, set[str]]) -> list[str]:
    """The strongly connected components of more than one module, by Tarjan."""
    groups: list[str] = []
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(module: str) -> None:
        number[module] = low[module] = len(number)
        stack.append(module)
        for name in sorted(imports[module]):
            if name not in number:
                visit(name)
            if name in stack:
                low[module] = min(low[module], low[name])
        if low[module] == number[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                groups.append("circle: " + ", ".join(sorted(group)))

    for module in imports:
        if module not in number:
            visit(module)
    return groups


def few_files(tree: Tree) -> list[str]:
    """Rule 2: a package has few files."""
    files: dict[str, int] = {}
    for module in tree.sources:
        folder = module if module in tree.packages else module.rpartition(".")[0]
        files[folder] = files.get(folder, 0) + 1
    limits = {package: FP8_FILES if f"{package}.".startswith("octavo.fp8.") else FILES for package in files}
    counted = {package: number for package, number in files.items() if package not in UNCOUNTED}
    return _within("files", counted, limits)


def short_inits(tree: Tree) -> list[str]:
    """Rule 2: an ``__init__`` is short."""
    lines = {package: tree.sources[package].count("\n") for package in tree.packages - UNMEASURED}
    return _within("lines in its __init__", lines, dict.fromkeys(lines, INIT_LINES))


def _within(what: str, numbers: dict[str, int], limits: dict[str, int]) -> list[str]:
    """Packages with more of something than they may have."""
    return [f"{name} has {n} {what}, and {limits[name]} at most" for name, n in numbers.items() if n > limits[name]]


def inits(tree: Tree) -> list[str]:
    """Rule 2: a package inside fp8 has an ``__init__`` of at most 40 lines: a sentence and the names it offers. That of
    fp8 may be longer, and ends in a ``__getattr__`` for old names, which type checkers do not see. :data:`LOADERS`
    import what others name."""
    wrong = []
    for name in tree.packages - LOADERS:
        if not (name + ".").startswith("octavo.fp8."):
            continue
        lines, said = (tree.sources[name].count("\n"), 5) if name != "octavo.fp8" else (0, 15)
        doc, *body = tree.files[name].parsed.body or [ast.Pass()]
        if name == "octavo.fp8":
            body = [node for node in body if ast.unparse(node) != "from typing import TYPE_CHECKING"]
        imports = [n for n in body if isinstance(n, ast.ImportFrom) and f"{n.module}.".startswith(f"{name}.")]
        offered = [a.asname or a.name for n in imports for a in n.names]
        match body[len(imports) :]:
            case []:
                listed = []
            case [ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List(elts=elements)), *rest] if (
                not rest or name == "octavo.fp8" and _only_old_names(rest)
            ):
                listed = [e.value for e in elements if isinstance(e, ast.Constant)]
            case _:
                listed = None
        documented = 0 < len((ast.get_docstring(tree.files[name].parsed) or "").splitlines()) <= said
        if not documented or lines > 40 or listed is None or sorted(listed) != sorted(set(offered)):
            wrong.append(f"{name}: it holds one sentence and the names it offers, listed in __all__, and nothing else")
    return wrong


def _only_old_names(nodes: list[ast.stmt]) -> bool:
    """Whether statements are a ``__getattr__`` at run time and nothing else."""
    match nodes:
        case [ast.If(test=test, body=[ast.FunctionDef(name="__getattr__")], orelse=[])]:
            return ast.unparse(test) == "not TYPE_CHECKING"
    return False


def reach_inside(tree: Tree) -> list[str]:
    """Rule 3: from outside, ``octavo.fp8`` or one of its packages is imported, never a file in it, by attribute too."""
    return [
        f"{module}:{line} imports {name}; take it from {'.'.join(name.split('.')[:3])}"
        for module in tree.sources
        if not f"{module}.".startswith("octavo.fp8.")
        for line, name in tree.files[module].imports
        if name.startswith("octavo.fp8.") and name.count(".") > 2
    ]


def know_shards(tree: Tree) -> list[str]:
    """Rule 4: few files know DTensor and FSDP2, by name, attribute or text; the others ask whether a weight is whole
    here. A state dict that nobody reads is asked for because FSDP2 reshards then: ``weights.reshard`` does that."""
    wrong = []
    for module, file in tree.files.items():
        if module.startswith(SHARDS):
            continue
        found = {name for name in file.named if f"{name}.".startswith(tuple(f"{m}." for m in SHARD_MODULES))}
        found |= {text for _, text, _ in file.texts if text in OF_SHARDS or text.startswith(SHARD_MODULES)}
        for node in file.nodes:
            match node:
                case ast.Name(id=word) | ast.Attribute(attr=word) | ast.alias(name=word) if word in OF_SHARDS:
                    found.add(word)
                case ast.Expr(value=ast.Call(func=ast.Attribute(attr="state_dict"))):
                    found.add("state_dict() without reading it")
        wrong += [f"{module} names {word}; ask octavo.fp8.weights" for word in sorted(found)]
    return wrong


def names_no_device(tree: Tree) -> list[str]:
    """Nobody names a vendor's devices but :data:`NAMES_DEVICES`: not by torch's modules, methods and attributes for
    them, nor by a type of device as text. All others ask ``octavo.base.accelerator``. Words of a sentence, and longer
    ones such as the keys of a configuration, are free."""
    wrong = []
    for module, file in tree.files.items():
        if f"{module}.".startswith(tuple(f"{name}." for name in NAMES_DEVICES)):
            continue
        found = {name for name in file.named if f"{name}.".startswith(tuple(f"{stem}." for stem in OF_VENDORS))}
        for node in file.nodes:
            match node:
                case ast.Attribute(attr=word) if word.removeprefix("is_") in VENDORS and word.startswith("is_"):
                    found.add(f".{word}")
                case ast.Call(func=ast.Attribute(attr=word)) if word in VENDORS:
                    found.add(f".{word}()")
        found |= {repr(text) for _, text, _ in file.texts if re.fullmatch(rf"({'|'.join(VENDORS)})(:\d*)?", text)}
        wrong += [f"{module} names {word}; ask octavo.base.accelerator" for word in sorted(found)]
    return wrong


def names_as_text(tree: Tree) -> list[str]:
    """Rule 5: no module is named by a string, which breaks in silence when files move. A sentence may name what is
    there; code in a string, one word and the beginning of one may not."""
    wrong = []
    for module, file in tree.files.items():
        if not any("octavo" in text for _, text, _ in file.texts):
            continue
        parts = [pair for n in file.nodes if isinstance(n, ast.JoinedStr) for pair in itertools.pairwise(n.values)]
        begun = {id(left) for left, right in parts if isinstance(right, ast.FormattedValue)}
        for line, text, node in file.texts:
            names = re.findall(r"(?<![\w/.-])octavo[./][\w./]*", text)
            if not names or text in NO_MODULES:
                continue
            code = " " not in text or re.search(r"\b(from|import) octavo[./]", text)
            cut = node in begun and text.endswith(names[-1])
            stale = [n for n in names if not tree.offers(n.rstrip("./").removesuffix(".py").replace("/", "."))]
            if code or cut or stale:
                wrong.append(f"{module}:{line} names {stale or names} as text")
    return wrong


def loaded_by_text(tree: Tree) -> list[str]:
    """Rules 1 and 5: who imports by text, or looks among modules, names another project's, plainly; :data:`LOADERS`
    alone import files of this one so, those of their folder; :data:`STRANGERS` look among a user's."""
    return [
        f"{module}:{line} loads {text or 'a module whose name is made at run time'}; import it"
        for module, file in tree.files.items()
        for line, text in file.loads
        if (module not in LOADERS | STRANGERS if text is None else text.startswith(".") or "octavo" in text)
    ]


def lists_of_names(tree: Tree) -> list[str]:
    """Rule 5 of the layout outside fp8: no two words of a subject of :data:`LISTED_ONCE` are listed outside of its
    table: in a tuple, list, set, dict (keys or values) or ``Literal``, nested or not; in alternatives of a pattern or a
    condition; in a text that is nothing but such words. A sentence may name them."""
    return [
        f"{module}:{line} lists {subject}: {', '.join(sorted(listed))}; derive them from {' or '.join(allowed)}"
        for subject, (words, allowed) in LISTED_ONCE.items()
        for module, file in tree.files.items()
        if not f"{module}.".startswith(tuple(f"{name}." for name in allowed))
        and not words.isdisjoint(word for _, text, _ in file.texts for word in _words_of(text))
        for line, listed in _lists(file, words)
    ]


def _words_of(text: str) -> list[str]:
    return [word for word in re.split(r"[\s,;|/]+", text) if word]


def _lists(file: File, words: frozenset[str]) -> Iterator[tuple[int, set[str]]]:
    """(line, words) of each outermost expression that lists two or more of the words."""
    inside: set[int] = set()
    for node in file.nodes:  # parents come before what is inside them
        if id(node) not in inside and isinstance(
            node, ast.Tuple | ast.List | ast.Set | ast.Dict | ast.BoolOp | ast.MatchOr | ast.BinOp
        ):
            listed = words.intersection(_texts_in(node))
            if len(listed) > 1:
                inside |= {id(n) for n in ast.walk(node)}
                yield node.lineno, listed
    for line, listed in _branches(file, words):
        yield line, listed
    for line, text, node_id in file.texts:  # without docstrings
        listed = set(_words_of(text))
        if len(listed) > 1 and listed <= words and node_id not in inside:
            yield line, listed


def _branches(file: File, words: frozenset[str]) -> Iterator[tuple[int, set[str]]]:
    """(line, words) where one value is compared with several of the words by if, elif and case, in one function."""
    for function in (node for node in file.nodes if isinstance(node, ast.FunctionDef)):
        compared: dict[str, set[str]] = {}
        for node in ast.walk(function):
            match node:
                case ast.If(test=ast.Compare(left=value, ops=[ast.Eq()], comparators=[ast.Constant(value=str(word))])):
                    compared.setdefault(ast.dump(value), set()).add(word)
                case ast.Match(subject=value):
                    arms = [c.pattern for c in node.cases if isinstance(c.pattern, ast.MatchValue)]
                    compared.setdefault(ast.dump(value), set()).update(t for arm in arms for t in _texts_in(arm))
        for texts in compared.values():
            if len(texts & words) > 1:
                yield function.lineno, texts & words


def _texts_in(node: ast.AST) -> Iterator[str]:
    """The texts that an expression consists of, without those in calls and in what is computed of others."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.Tuple() | ast.List() | ast.Set() | ast.Dict() | ast.Starred() | ast.MatchOr() | ast.MatchValue():
            pass
        case ast.BoolOp() | ast.Compare() | ast.UnaryOp() | ast.BinOp(op=ast.Add() | ast.BitOr()):
            pass
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            yield from _texts_in(inner)
            return
        case _:
            return
    for child in ast.iter_child_nodes(node):
        yield from _texts_in(child)


#: A Triton kernel of more lines than these says what its arguments are and what its phases do.
LONG_KERNEL = 40
PHASE = 15  # lines of a kernel's body, at most, from one comment to the next


def kernels_are_explained(tree: Tree) -> list[str]:
    """Rule 7: a Triton kernel of more than :data:`LONG_KERNEL` lines says once what its arguments are, with shapes, and
    has a comment at each phase: at least one in :data:`PHASE` lines.

    An argument is explained by a comment on its line or by its name in the docstring. Three kinds need neither: a
    constant, a size of one capital letter, and a name that shares a word with an explained argument before it
    (``q_batch``, ``q_row``).
    """
    wrong = []
    for module in tree.files:
        if ".jit" not in tree.sources[module]:
            continue
        comments = {line: text for line, text in comments_in(tree.sources[module]).items() if "fmt:" not in text}
        for kernel in tree.files[module].nodes:
            if isinstance(kernel, ast.FunctionDef) and _is_kernel(kernel) and _lines(kernel) > LONG_KERNEL:
                wrong += [f"{module}.{kernel.name}: {fault}" for fault in _unexplained(kernel, comments)]
    return wrong


def _is_kernel(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator).startswith("triton.jit") for decorator in function.decorator_list)


def _lines(node: ast.FunctionDef | ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def _unexplained(kernel: ast.FunctionDef, comments: dict[int, str]) -> Iterator[str]:
    doc = ast.get_docstring(kernel) or ""
    signature = [comments.get(arg.lineno, "") for arg in kernel.args.args]
    if "[" not in doc + "".join(signature):
        yield "no argument has a shape"
    words: set[str] = set()
    for arg, comment in zip(kernel.args.args, signature, strict=True):
        constant = arg.annotation is not None and "constexpr" in ast.unparse(arg.annotation)
        parts = set(arg.arg.split("_"))
        if comment or re.search(rf"\b{arg.arg}\b", doc) or parts & words:
            words |= parts
        elif not constant and not re.fullmatch("[A-Z]", arg.arg):
            yield f"the argument {arg.arg} has no comment"
    first, last = kernel.body[0].lineno + (_lines(kernel.body[0]) if doc else 0), kernel.lineno + _lines(kernel)
    marks = sorted(line for line in comments if first <= line < last)
    for before, after in itertools.pairwise([first - 1, *marks, last]):
        if after - before > PHASE + 1:
            yield f"no comment from line {before + 1} to line {after - 1}"
