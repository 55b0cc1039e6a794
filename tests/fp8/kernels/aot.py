"""Compile every Triton kernel ahead of time, without a GPU, and report the results.

    python -m tests.fp8.kernels.aot [--arch 90 ...] [--only TEXT] [--first] [--jobs N] [--json FILE] [--help]

from the root of the repository. Each module of ``forms/`` lists those of one file of kernels in ``variants()``. One
line a form and architecture:
registers a thread, shared memory a program, bytes of local memory a thread (spilled registers; they cost bandwidth),
the tensor core instruction (wgmma: Hopper; tcgen05: Blackwell of data centres; mma: all others), how many instructions
a thread executes and how many in one step of each loop with products (read from the machine code, see ``sass``),
and how wide the accesses to global memory are. The exit code is 1 if a form does not compile, needs more shared memory
than the architecture has, spills more bytes than it may (:class:`Variant`), if its products wait for each other
(serialised), or if it stores single bytes to shared memory and has ``max.NaN`` (:data:`BYTES_AFTER_NAN`); 2, with a
sentence, if the words mean nothing. ``--json`` writes the rows, and which Triton compiled them.
The reports that are kept, one a version of Triton (make them again when a kernel changes; until then the long test
compiles all forms and not one of each kernel)::

    python -m tests.fp8.kernels.aot --jobs 2 --json benchmarks/results/aot_triton_3_6.json

``--first`` takes one form of each kernel, ``--only`` those whose name contains TEXT. Pointers are taken to be aligned
to 16 bytes, as PyTorch allocates, and an integer of type ``"i32:16"`` to be a multiple of 16.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.fp8.kernels import forms, sass
from tests.fp8.kernels.forms import Variant

ARCHS = (89, 90, 100, 120)
"""Ada, Hopper, Blackwell in data centres, Blackwell in workstations."""

# Shared memory that one program may have, in bytes (CUDA C++ Programming Guide, technical specifications).
SHARED = {89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
_TENSOR_CORE = (("tcgen05.mma", "tcgen05"), ("wgmma.mma_async", "wgmma"), ("mma.sync", "mma"))
_ACCESS = re.compile(r"\b(ld|st)\.global(?:\.[A-Za-z0-9_:]+)*?(?:\.v(\d))?\.[bufs](\d+)\b")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_NAN = re.compile(r"\b(?:max|min)(?:\.ftz)?\.NaN\b")
_BYTE_STORE = re.compile(r"\bst\.shared(?:::\w+)?(?:\.v\d)?\.[bsu]8\b")
BYTES_AFTER_NAN: dict[str, str] = {}
"""Kernels that may have ``max.NaN`` together with stores of single bytes to shared memory, and why. Triton (up to 3.8,
as far as is known) writes wrong bytes for some of them: issue 11111."""
_ROOT = Path(__file__).parents[3]
_SELF = "tests.fp8.kernels.aot"  # __name__ is "__main__" where this is the command


def report(archs: Sequence[int] = ARCHS, first: bool = False, only: str = "", jobs: int = 1) -> list[dict[str, Any]]:
    """Compile and look: one dictionary a form and architecture, in the order of modules.

    Keys: ``name``, ``kernel``, ``module``, ``arch``, ``error`` (None, or why it failed), and unless it failed
    ``registers``, ``spill`` and ``shared`` (bytes), ``tensor_core``, ``executed`` (instructions a thread), ``steps``
    (of them in a step of each loop with products), ``serialised``, ``bytes_after_nan`` (:data:`BYTES_AFTER_NAN`),
    ``loads`` and ``stores`` (access width in bytes -> number of instructions). In a process whose kernels belong to the
    interpreter, another process does the work.

    Raises:
        ValueError: an architecture that is not in :data:`ARCHS`, ``only`` that matches nothing, fewer than one job, or
            no triton.
    """
    if importlib.util.find_spec("triton") is None:
        raise ValueError("Compiling Triton kernels needs triton, which is not installed; pip install triton.")
    if jobs < 1:
        raise ValueError(f"{jobs} jobs compile nothing; --jobs takes a number of processes from 1 on.")
    unknown = [arch for arch in archs if arch not in ARCHS]
    if unknown:
        raise ValueError(f"There is no architecture {unknown[0]} to compile for; use {', '.join(map(str, ARCHS))}.")
    work = _chosen(archs, first, only)
    if not work:
        raise ValueError(f"No kernel has a form whose name contains {only!r}; leave out --only to see all names.")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return _elsewhere(archs, first, only, jobs)
    if jobs == 1:
        return [_compiled(*item) for item in work]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return list(pool.map(_compiled, *zip(*work, strict=True), chunksize=4))


def faults(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a sentence for each row with a fault."""
    results = []
    for row in rows:
        where = f"{row['module']}: {row['name']} for sm_{row['arch']}"
        if row["error"] is not None:
            results.append(f"{where} does not compile: {row['error']}")
        elif row["spill"] > row["allowed"]:
            results.append(f"{where} spills {row['spill']} bytes a thread, more than {row['allowed']}")
        elif row["shared"] > SHARED[row["arch"]]:
            results.append(f"{where} needs {row['shared']} bytes of shared memory, there are {SHARED[row['arch']]}")
        elif row["serialised"]:
            results.append(f"{where} is serialised: each of its products waits for the one before it")
        elif row["bytes_after_nan"] and row["kernel"] not in BYTES_AFTER_NAN:
            results.append(f"{where} stores single bytes to shared memory and has max.NaN: issue 11111 of Triton")
    return results


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the report as text, one line per form and architecture."""
    head = ("kernel", "sm", "regs", "spill", "shared", "tensor core", "executed", "steps", "loads", "stores")
    lines = [head, *(_line(row) for row in rows)]
    width = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, width, strict=True)).rstrip() for line in lines)


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    if row["error"] is not None:
        return (row["name"], str(row["arch"]), "-", "-", "-", "FAILED", "", "", "", "")
    wide = [" ".join(f"{n}x{b}B" for b, n in row[kind].items()) for kind in ("loads", "stores")]
    numbers = (str(row[key]) for key in ("arch", "registers", "spill", "shared"))
    counts = (str(row["executed"]), " ".join(map(str, row["steps"])))
    return (row["name"], *numbers, row["tensor_core"] or "-", *counts, *wide)


def _modules() -> list[str]:
    return [f"{forms.__name__}.{results.name}" for results in pkgutil.iter_modules(forms.__path__)]


@cache
def _variants(module: str) -> list[Variant]:
    results: list[Variant] = importlib.import_module(module).variants()
    return results


def _chosen(archs: Sequence[int], first: bool, only: str) -> list[tuple[str, int, int]]:
    """(module, index of the variant, architecture) of what is asked for; ``first``: once a kernel and architecture."""
    chosen, recorded = [], set()
    for module in _modules():
        for i, variant in enumerate(_variants(module)):
            if only not in variant.name:
                continue
            for arch in (a for a in archs if a in variant.architectures):
                if not first or (variant.kernel.__name__, arch) not in recorded:
                    recorded.add((variant.kernel.__name__, arch))
                    chosen.append((module, i, arch))
    return chosen


def _compiled(module: str, index: int, arch: int) -> dict[str, Any]:
    """One row of the report."""
    variant = _variants(module)[index]
    row = {"name": variant.name, "kernel": variant.kernel.__name__, "module": module.rpartition(".")[2], "arch": arch}
    try:
        compiled = _compile(variant, arch)
        if not variant.fused and "fma.rn.f32" in compiled.asm["ptx"]:
            raise ValueError("it must round products and sums apart, and has fma instructions")
        return {**row, "error": None, "allowed": variant.spill, **_examined(compiled)}
    except Exception as error:  # any failure of the compiler belongs into the report, beside the forms that compile
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return {**row, "error": f"{type(error).__name__}: {lines[-1] if lines else 'without a message'}"}


def _compile(variant: Variant, arch: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = variant.kernel.arg_names
    stray = [name for name in (*variant.signature, *variant.constants) if name not in names]
    if stray:
        raise ValueError(f"variant {variant.name!r} describes {stray[0]!r}, which is no argument of its kernel")
    missing = [name for name in names if name not in variant.signature and name not in variant.constants]
    if missing:
        raise ValueError(f"variant {variant.name!r} says nothing of the argument {missing[0]!r}")
    signature = {name: variant.signature.get(name, "constexpr").removesuffix(":16") for name in names}
    constants = {name: variant.constants[name] for name in names if name not in variant.signature}
    aligned = [n for n, kind in variant.signature.items() if kind.startswith("*") or kind.endswith(":16")]
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, "maxnreg": variant.maxnreg}
    options["enable_fp_fusion"] = variant.fused
    source = ASTSource(variant.kernel, signature, constants, attrs)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def _examined(compiled: Any) -> dict[str, Any]:
    ptx = compiled.asm["ptx"]
    registers, stack, _, local = _usage(compiled.asm["cubin"])
    listing = sass.disassembled(compiled.asm["cubin"])
    results: dict[str, Counter[int]] = {"ld": Counter(), "st": Counter()}
    for kind, vector, bits in _ACCESS.findall(ptx):
        results[kind][int(vector or 1) * int(bits) // 8] += 1
    return {
        "registers": registers,
        "spill": stack + local,
        "shared": compiled.metadata.shared,
        "tensor_core": next((name for text, name in _TENSOR_CORE if text in ptx), None),
        "executed": listing.executed(),
        "steps": [len(step) for step in listing.steps()],
        "serialised": listing.serialised(),
        "bytes_after_nan": bytes_after_nan(ptx),
        "loads": dict(sorted(results["ld"].items(), reverse=True)),
        "stores": dict(sorted(results["st"].items(), reverse=True)),
    }


def bytes_after_nan(ptx: str) -> bool:
    """Whether a kernel has an instruction that keeps NaN in a maximum, and stores of single bytes to shared memory."""
    return _NAN.search(ptx) is not None and _BYTE_STORE.search(ptx) is not None


def _usage(cubin: bytes) -> tuple[int, ...]:
    """(registers, stack, static shared, local) of the one function in a cubin, by the tool that comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True)
    match = _USAGE.search(done.stdout)
    if match is None:
        raise RuntimeError(f"{tool.name} -res-usage gave no usage: {(done.stdout + done.stderr).strip()[-200:]!r}")
    return tuple(int(number) for number in match.groups())


def _elsewhere(archs: Sequence[int], first: bool, only: str, jobs: int) -> list[dict[str, Any]]:
    """Return the report of a separate process without the interpreter."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report.json")
        words = ["--json", str(file), "--jobs", str(jobs), "--only", only, *(["--first"] if first else [])]
        for arch in archs:
            words += ["--arch", str(arch)]
        command = [sys.executable, "-m", _SELF, *words]
        done = subprocess.run(command, env=environ, cwd=_ROOT, capture_output=True, text=True)
        if not file.exists():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ValueError(last) if done.returncode == 2 else RuntimeError(f"compiling ahead of time failed: {last}")
        rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["rows"]
    for row in rows:
        for kind in ("loads", "stores"):
            if kind in row:
                row[kind] = {int(width): count for width, count in row[kind].items()}
    return rows


class _WithoutDocstrings(ast.NodeTransformer):
    """Drops strings that are statements."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str) else node


def code_of(text: str) -> str:
    """A file of Python without its comments and docstrings, and in one layout."""
    return ast.unparse(_WithoutDocstrings().visit(ast.parse(text)))


def source() -> str:
    """A digest of what a report is made of: the kernels, their forms, and how they are compiled, all as `code_of`."""
    kernels = (_ROOT / "octavo" / "fp8" / "kernels" / "triton_kernels").glob("*.py")
    here = Path(__file__).parent
    files = [*kernels, *here.glob("forms/*.py"), here / "aot.py", here / "sass.py"]
    texts = {str(file.relative_to(_ROOT)): code_of(file.read_text(encoding="utf-8")) for file in files}
    return hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()


def _text(rows: Sequence[dict[str, Any]]) -> str:
    """The report as JSON, a line a row."""
    listed = ",\n".join(json.dumps(row) for row in rows)
    head = f'"triton": "{importlib.metadata.version("triton")}", "source": "{source()}"'
    return f'{{{head}, "rows": [\n{listed}\n]}}\n'


def _asked(words: Sequence[str]) -> tuple[list[int], bool, str, int, Path | None]:
    """(architectures, first, only, jobs, file for JSON) of the command line.

    Raises:
        ValueError: a word that is not known, that lacks its value, or whose value means nothing.
    """
    archs: list[int] = []
    inputs = {"--only": "", "--jobs": "1", "--json": ""}
    first = False
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--first":
            first = True
        elif word in (*inputs, "--arch") and rest:
            value = rest.pop(0)
            if word != "--arch":
                inputs[word] = value
            elif value.removeprefix("sm_").isdecimal():
                archs.append(int(value.removeprefix("sm_")))
            else:
                known = ", ".join(map(str, ARCHS))
                raise ValueError(f"--arch takes a number such as 90 or sm_90, not {value!r}; there are {known}.")
        else:
            raise ValueError(f"aot does not know {word!r}, or it lacks its value; --help says what there is.")
    if not inputs["--jobs"].isdecimal():
        raise ValueError(f"--jobs takes a number of processes from 1 on, not {inputs['--jobs']!r}.")
    file = Path(inputs["--json"]) if inputs["--json"] else None
    if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
        raise ValueError(f"--json takes a file in a folder that exists, not {inputs['--json']!r}.")
    return archs, first, inputs["--only"], int(inputs["--jobs"]), file


def main(words: Sequence[str]) -> int:
    """The command line above: 0 if all is well, 1 with the list of faults, 2 for words that mean nothing."""
    if {"--help", "-h"} & set(words):
        print((__doc__ or "").strip())
        return 0
    try:
        archs, first, only, jobs, file = _asked(words)
        rows = report(archs or ARCHS, first, only, jobs)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if file is not None:
        file.write_text(_text(rows), encoding="utf-8")
    wrong = faults(rows)
    print(table(rows))
    print("\n".join([f"{len(rows)} compiled, {len(wrong)} at fault", *wrong]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
