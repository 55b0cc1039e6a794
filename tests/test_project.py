"""The layout is a test: who may import whom, what the lowest level may need, and what must not be in the repository.

The rules are in ``project_rules.py``; the tests below hold them on this tree, and on one with a violation planted.
"""

from __future__ import annotations

import ast
import gc
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project_levels import LEVELS
from tests.project_rules import (
    FP8_PACKAGES,
    NAMES_DEVICES,
    PACKAGE,
    ROOT,
    Tree,
    circles,
    circles_of_scripts,
    few_files,
    imports_down,
    imports_up,
    inits,
    kernels_are_explained,
    know_shards,
    lists_of_names,
    loaded_by_text,
    names_as_text,
    names_no_device,
    package_of,
    reach_inside,
    short_inits,
    subpackages_import_down,
)


@pytest.fixture(scope="module")
def tree() -> Tree:
    """All sources, read without looking for garbage among a million nodes, none of which are."""
    gc.disable()
    try:
        return Tree()
    finally:
        gc.freeze()
        gc.enable()


RULES = (
    imports_down,
    subpackages_import_down,
    circles,
    circles_of_scripts,
    few_files,
    short_inits,
    inits,
    reach_inside,
    know_shards,
    names_as_text,
    loaded_by_text,
    names_no_device,
    lists_of_names,
    kernels_are_explained,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_layout_keeps(rule, tree: Tree) -> None:
    assert not rule(tree), "\n".join(rule(tree))


FACE = "from octavo.fp8.dense.linear import Linear\n"


def kernel(arguments: str, body: str) -> dict[str, str]:
    """A module with a Triton kernel, whose file has no such kernel otherwise."""
    head = "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"
    return {"octavo.fp8.kernels.triton_kernels.launch": f"{head}def kernel(\n{arguments}):\n{body}"}


PHASES = ("    # Load, and why.\n" + "    tl.debug_barrier()\n" * 14) * 3


@pytest.mark.parametrize(
    ("rule", "planted"),
    [
        (imports_down, {"octavo.models.structure.freeze": "def f():\n    from octavo.train.setup import build"}),
        (imports_down, {"octavo.data.builtin.digits": "import transformers.models\nimport triton"}),
        (imports_down, {"octavo.train.step.step": "if not TYPE_CHECKING:\n    import transformers"}),
        (imports_down, {"octavo.models.structure.freeze": "from octavo.fp8 import planning"}),
        (subpackages_import_down, {"octavo.fp8.dense.linear": "from octavo.fp8.blocks import mlp"}),
        (subpackages_import_down, {"octavo.fp8.kernels.groups": "from octavo.fp8.observe.counts import GemmCounts"}),
        (
            subpackages_import_down,
            {"octavo.fp8.weights.cache": "if TYPE_CHECKING:\n    from octavo.fp8.dense.gemms import LayerGemms"},
        ),
        (subpackages_import_down, {"octavo.fp8.stray": ""}),
        (subpackages_import_down, {"octavo.data.formats.tar": "def f():\n    from octavo.data.storage import cache"}),
        (subpackages_import_down, {"octavo.train.run_dir.run_dir": "from octavo.train.step.step import Stepper"}),
        (
            subpackages_import_down,
            {"octavo.rl.rewards.entry": "from octavo.rl.objectives import policy_losses as policy"},
        ),
        (circles, {"octavo.fp8.dense.inputs": "def f():\n    from octavo.fp8.dense import gemms"}),
        (circles, {"octavo.fp8.arithmetic.formats": "if TYPE_CHECKING:\n    from octavo.fp8.arithmetic import cast"}),
        (imports_down, {"octavo.models.structure.freeze": "from octavo import fp8\nfp8.optim.groups(w)"}),
        (imports_down, {"octavo.data.builtin.digits": "importlib.import_module('triton')\nimport importlib"}),
        (
            subpackages_import_down,
            {"octavo.fp8.dense.swap": "from importlib import import_module as i\ni('octavo.fp8.moe')"},
        ),
        (circles, {"octavo.cli.train": "from octavo.cli.main import COMMANDS"}),
        (circles, {"octavo.bench.suite_moe": "import octavo.bench as b"}),
        (circles, {"octavo.fp8.kernels.layout": "def f():\n    from octavo.fp8.kernels import backends"}),
        (circles_of_scripts, {"benchmarks.studies.unit": "def f():\n    from units import bare"}),
        (circles_of_scripts, {"benchmarks.host": "import benchmarks.rows", "benchmarks.rows": "import host"}),
        (circles_of_scripts, {"benchmarks.gpu.jobs": "from benchmarks.gpu import runner"}),
        (few_files, {f"octavo.parallel.more_{number}": "" for number in range(14)}),
        (few_files, {f"octavo.fp8.policy.more_{number}": "" for number in range(12)}),
        (short_inits, {"octavo.parallel": "x = 1\n" * 41}),
        (loaded_by_text, {"octavo.train.step.step": "import importlib\nimportlib.import_module('octavo.cli')"}),
        (loaded_by_text, {"octavo.train.step.step": "import importlib as i\ni.import_module('.build', __package__)"}),
        (loaded_by_text, {"octavo.train.step.step": "from importlib import import_module as i\ni(name)"}),
        (loaded_by_text, {"octavo.train.step.step": "__import__('octavo.fp8')"}),
        (loaded_by_text, {"octavo.train.step.step": "from sys import modules\nmodules['octavo.fp8']"}),
        (loaded_by_text, {"octavo.train.step.step": "import sys\nm = sys.modules.get('octavo.fp8')"}),
        (loaded_by_text, {"octavo.train.step.step": "import sys\nm = sys.modules[name]"}),
        (inits, {"octavo.fp8.dense": '"""A sentence."""\nx = 1\n'}),
        (inits, {"octavo.fp8.dense": f'"""A sentence."""\n{FACE * 41}__all__ = ["Linear"]'}),
        (inits, {"octavo.fp8.dense": f"{FACE}__all__ = ['Linear']"}),
        (inits, {"octavo.fp8.dense": '"""' + "A\nlong story.\n" * 4 + f'"""\n{FACE}__all__ = ["Linear"]'}),
        (inits, {"octavo.fp8.dense": f'"""A sentence."""\n{FACE}'}),
        (inits, {"octavo.fp8.dense": f'"""A sentence."""\n{FACE}__all__ = ["Linear", "linear"]'}),
        (inits, {"octavo.fp8.dense": f'"""A sentence."""\n{FACE}__all__ = sorted(["Linear"])'}),
        (inits, {"octavo.fp8.dense": '"""A sentence."""\nfrom octavo.fp8.dense import linear  # its effect'}),
        (inits, {"octavo.fp8.dense": '"""A sentence."""\nfrom torch import nn\n__all__ = ["nn"]'}),
        (reach_inside, {"octavo.train.step.step": "from octavo.fp8.dense.linear import Linear"}),
        (reach_inside, {"octavo.train.step.step": "def f():\n    from octavo.fp8.weights import cache"}),
        (reach_inside, {"octavo.train.step.step": "from octavo import fp8\nfp8.dense.gemms.LayerGemms"}),
        (reach_inside, {"octavo.train.step.step": "from octavo.fp8 import dense as d\nd.gemms.LayerGemms"}),
        (reach_inside, {"octavo.train.step.step": "import octavo.fp8\noctavo.fp8.dense.gemms.LayerGemms"}),
        (know_shards, {"octavo.fp8.dense.linear": "from octavo.fp8.weights.shards import is_dtensor"}),
        *(
            (know_shards, {"octavo.train.step.step": says})
            for says in (
                "def f(w):\n    return w.full_tensor()",
                "getattr(w, 'full_tensor')",
                "hasattr(w, '_local_tensor')",
                "w.to_local()",
                "w.placements",
                "w.device_mesh",
                "import torch.distributed.tensor as dt",
                "import torch\ntorch.distributed.fsdp.register",
                "from torch.distributed import fsdp",
                "from torch import distributed as d\nd.tensor.empty(1)",
                "type(w).__name__ == 'DTensor'",
                "sys.modules.get('torch.distributed.tensor')",
                "model.state_dict(keep_vars=True)",
            )
        ),
        *(
            (names_no_device, {"octavo.train.step.step": says})
            for says in (
                "import torch\ntorch.cuda.synchronize()",
                "import torch as t\nx: t.cuda.Event",
                "from torch import cuda",
                "from torch.cuda import Stream as S",
                "import torch\ntorch.backends.cuda.matmul",
                "import torch\ntorch.version.hip",
                "import torch\ntorch.xpu.empty_cache()",
                "def f(x):\n    return x.is_cuda",
                "x = y.cuda(0)",
                "x = y.device.type == 'cuda'",
                "x = f'cuda:{rank}'",
                "x = getattr(torch, 'npu')",
                "x = 'cuda:0'",
            )
        ),
        *(
            (names_as_text, {"octavo.fp8.blocks.mlp": says})
            for says in (
                "WATCHERS = ('octavo.fp8.observe.counts',)",
                "x = 'octavo.fp8.long_gone'",
                "x = 'octavo.fp8'",
                "x = 'octavo.train.setup.build'",
                "x = 'octavo.fp8.observe.counts.GemmCounts'",
                "x = 'octavo.fp8.'",
                "x = f'octavo.fp8.{name}'",
                "x = f'see octavo.fp8.{name}'",
                "x = 'octavo/fp8/dense/linear.py'",
                "x = 'from octavo.fp8 import dense'",
                "x = 'call octavo.fp8.long_gone'",
                "x = 'it is in octavo/fp8/long_gone.py, line 1'",
            )
        ),
        *(
            (lists_of_names, {"octavo.train.step.step": says})
            for says in (
                "RECIPES = ('rowwise', 'mxfp8')",
                "x = ['off', *('rowwise', 'blockwise')]",
                "x = name in {'tensorwise', 'delayed'}",
                "x = {'row': 'rowwise', 'block': 'blockwise'}",
                "x = {'rowwise': 1, 'mxfp8': 2}",
                "x = (('rowwise', 1), ('mxfp8', 2))",
                "x: Literal['off', 'rowwise', 'blockwise']",
                "x = name == 'rowwise' or name == 'mxfp8'",
                "x = name != 'rowwise' and not name == 'mxfp8'",
                "match name:\n    case 'rowwise' | 'mxfp8':\n        pass",
                "x = 'rowwise mxfp8'.split()",
                "x = 'rowwise,mxfp8'",
                "x = ('rowwise',) + ('mxfp8',)",
                "x: Literal['rowwise'] | Literal['mxfp8']",
                "def f(r):\n    if r == 'rowwise':\n        return 1\n    elif r == 'mxfp8':\n        return 2",
                "def f(r):\n    match r:\n        case 'rowwise':\n            x\n        case 'mxfp8':\n            y",
                "x = model_type in ('qwen3_vl', 'internvl')",
                "x = path.suffix in {'.parquet', '.jsonl'}",
            )
        ),
        (kernels_are_explained, kernel("    x,  # [M, K] fp32\n    y,\n    M,\n", PHASES)),
        (kernels_are_explained, kernel("    x,  # fp32\n    M,\n", PHASES)),
        (kernels_are_explained, kernel("    x,  # [M, K] fp32\n    M,\n", PHASES + "    tl.debug_barrier()\n" * 3)),
    ],
    ids=lambda x: x.__name__ if callable(x) else "",
)
def test_a_planted_violation_is_found(rule, planted: dict[str, str], tree: Tree) -> None:
    found = tree.planted(planted)
    if rule in (
        know_shards,
        lists_of_names,
        names_no_device,
    ):  # they look at each file for itself, and test_the_layout_keeps at all of them
        found.files = {name: found.files[name] for name in planted}
    assert rule(found)


def test_words_that_name_no_device_may_be_said(tree: Tree) -> None:
    said = """\"torch.cuda in a docstring, and 'cuda'\"
x = "cuda_graphs", "the GPU, cuda:0 or another", "peak_cuda", cfg.train.cuda_graphs, machine.cuda
"""
    found = tree.planted({"octavo.train.step.step": said})
    found.files = {"octavo.train.step.step": found.files["octavo.train.step.step"]}
    assert not names_no_device(found)


def test_one_recipe_may_be_named_and_a_sentence_name_several(tree: Tree) -> None:
    said = """\"rowwise, mxfp8\"
x = 'rowwise', "use rowwise or mxfp8", {"recipe": "rowwise"}, f(x, "mxfp8"), ("off", "auto")
"""
    planted = tree.planted({"octavo.train.step.step": said})
    planted.files = {"octavo.train.step.step": planted.files["octavo.train.step.step"]}
    assert not lists_of_names(planted)


def test_who_may_name_devices_is_there_and_does(tree: Tree) -> None:
    for name in NAMES_DEVICES:
        own = [text for module, text in tree.sources.items() if f"{module}.".startswith(f"{name}.")]
        assert any(word in text for text in own for word in ("cuda", "npu"))


def test_what_is_text_may_be_said(tree: Tree) -> None:
    said = """\"octavo.fp8.long_gone in a docstring\"
x = "run octavo train FILE", "python -m octavo", "octavo::cast", "octavo.schema.json", "see octavo.fp8.linear."
y = importlib.import_module("deep_gemm"), "torch._dynamo" in sys.modules, model.state_dict()
"""
    planted = tree.planted({"octavo.fp8.blocks.mlp": said})
    assert not [*names_as_text(planted), *loaded_by_text(planted), *know_shards(planted)]


@pytest.mark.parametrize(
    "planted",
    [
        kernel("    x,  # [M, K] fp32\n    x_row,\n    M,\n    BLOCK: tl.constexpr,\n", PHASES),
        kernel("    x,\n", '    """Add to x [M] fp32."""\n' + PHASES),
        kernel("    x,\n", "    tl.debug_barrier()\n" * 37),  # a short one
        {"octavo.fp8.kernels.triton_kernels.launch": "def f(x):\n" + "    x\n" * 50},
    ],
)
def test_kernels_that_are_explained(planted: dict[str, str], tree: Tree) -> None:
    assert not kernels_are_explained(tree.planted(planted))


def test_no_package_of_fp8_hides_a_public_function() -> None:
    from octavo import fp8

    assert not FP8_PACKAGES & set(fp8.__all__)


def test_levels_are_of_packages_that_are_there(tree: Tree) -> None:
    """All packages of octavo, all subpackages of a package that is sorted into them, and single files."""
    tops = {package_of(name) for name in tree.sources} - {None}
    assert tops == set().union(*LEVELS["octavo"])
    for package in LEVELS.keys() - {"octavo"}:
        if package in tree.packages:
            named = {f"{package}.{name}" for name in set().union(*LEVELS[package]) - {"*"}}
            inside = {name for name in tree.packages if name.rpartition(".")[0] == package}
            assert inside <= named <= tree.sources.keys(), package


SMALL = {
    "octavo.p": "from octavo.p import top\nfrom octavo.p.high import a",
    "octavo.p.top": "from octavo.p.high import a\nfrom octavo.p import other",
    "octavo.p.other": "from octavo.p import errors",
    "octavo.p.high": "from octavo.p.high.a import x",
    "octavo.p.high.a": "from octavo.p.low.b import y\nfrom octavo.config import Config\nfrom octavo.p.high import c",
    "octavo.p.high.c": "",
    "octavo.p.side": "",
    "octavo.p.side.d": "from octavo.p.low import b",
    "octavo.p.low": "",
    "octavo.p.low.b": "from octavo.p import errors",
    "octavo.p.errors": "",
}


@pytest.mark.parametrize(
    ("planted", "says"),
    [
        ({}, ""),
        ({"octavo.p.low.b": "def f():\n    from octavo.p.high import a"}, "low may not look up or sideways to high"),
        ({"octavo.p.high.a": "from octavo.p.side import d"}, "high may not look up or sideways to side"),
        ({"octavo.p.high.a": "from octavo.p import other"}, "high may not look up or sideways to *"),
        ({"octavo.p.high.a": "from octavo import p\np.x"}, "octavo.p.high.a imports octavo.p, which is above it"),
        ({"octavo.p.errors": "from octavo.p import other"}, "errors may not look up or sideways to *"),
        ({"octavo.p.far": "", "octavo.p.far.e": ""}, "octavo.p.far.e is in no level of octavo.p"),
    ],
    ids=lambda value: "",
)
def test_the_order_of_a_packages_files_and_subpackages(planted: dict[str, str], says: str, tree: Tree) -> None:
    small = tree.of(SMALL | planted)
    wrong = imports_up(small, "octavo.p", [{"*"}, {"high", "side"}, {"low"}, {"errors"}])
    assert bool(wrong) == bool(says) and says in "\n".join(wrong)


PATH = [
    "octavo/cli/train.py",
    "octavo/train/loop/loop.py",
    "octavo/train/setup/build.py",
    "octavo/train/step/step.py",
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
    (r"\b(TODO|FIXME|XXX)\b", "finish it, or write it down in docs/lab/"),
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


def test_results_of_uncommitted_changes_are_named() -> None:
    """docs/results.md says that result files name their commit, and which of them are not of it alone."""
    said = (ROOT / "docs/results.md").read_text(encoding="utf-8").partition("## ")[0]
    files = (ROOT / "benchmarks/results").glob("*.json")
    assert {file.name for file in files if '"dirty": true' in file.read_text()} == set(re.findall(r"\w+\.json", said))
