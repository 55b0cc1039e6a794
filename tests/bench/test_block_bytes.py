"""The bytes of a compiled decoder block (benchmarks/block_bytes.py), which need no GPU, against the stored ones."""

from __future__ import annotations

import json

import pytest

from benchmarks import block_bytes
from benchmarks.hot_path import ROOT

STORED = ROOT.parent / "benchmarks/results/block_bytes.json"


@pytest.mark.long
def test_fused_block_moves_at_most_eighty_activations():
    """Each norm is written once at most; Inductor's count differs a little between versions of torch."""
    rows = {row["candidate"]: row for row in json.loads(STORED.read_text())["rows"]}
    counted = block_bytes.count(block_bytes.CANDIDATES["blockwise fused"])
    assert counted["sum"] <= 80 and counted["sum"] == pytest.approx(rows["blockwise fused"]["sum"], abs=0.5)
    assert counted["calls"] == rows["blockwise fused"]["calls"] and counted["moved"] == rows["blockwise fused"]["moved"]
    kernels = rows["blockwise fused"]["kernels"]
    assert sum(kernels.values()) == pytest.approx(rows["blockwise fused"]["generated"], abs=0.1)
    # As fused for a GPU: one kernel for both gradients of a norm reads dy of each layer, x and the residual's gradient.
    backward = {name: size for name, size in kernels.items() if name.startswith("backward: ")}
    norms = [size for name, size in backward.items() if "layernorm" in name and size > 1]
    assert sorted(norms) == pytest.approx([5, 6], abs=0.1)
    assert kernels["forward: block + post_attention_layernorm + self_attn.o_proj"] == pytest.approx(3, abs=0.1)
    assert counted["sum"] + 10 < counted["sum_on_cpu"] == pytest.approx(rows["blockwise fused"]["sum_on_cpu"], abs=0.5)
    assert rows["bf16"]["sum"] < counted["sum"] < rows["blockwise"]["sum"] - 20
