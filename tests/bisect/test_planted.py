"""Faults planted into real training are found: a layer with outliers, a GEMM with a wrong scale after 20 steps, and a
broken backend.
"""

from __future__ import annotations

import json

import pytest
import torch

from octavo import bisect
from octavo.config import load_config_text
from octavo.fp8.arithmetic.cast import dequantize
from octavo.fp8.dense import gemms
from octavo.fp8.kernels import registry
from octavo.fp8.kernels.reference import ReferenceBackend
from octavo.models.tiny import tiny
from octavo.train.loop import loop

FIRST, DOWN = (f"model.layers.{n}.mlp.down_proj" for n in range(2))
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bisect")
    tiny.write("qwen3", folder / "text", size="mini")
    rows = [{"text": f"{a} plus {b} is {a + b}. " * 6} for a in range(12) for b in range(6)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture
def search(place, tmp_path):
    def run(*overrides: str, **options):
        text = f"""
model: {{path: {place / "text"}}}
fp8: {{recipe: tensorwise}}
data: {{train: [{{path: {place / "rows.jsonl"}}}]}}
train: {{phase: pretrain, steps: 16, seq_length: 64, micro_batch: 4, global_batch: 4, lr: 5e-3, warmup: 2}}
run: {{dir: {tmp_path / "run"}, threads: 1}}
"""
        return bisect.bisect(load_config_text(text, overrides), tmp_path / "search", **options)

    return run


def test_layer_with_outliers_is_found(search, monkeypatch):
    """An outlier reduces the range of codes for all values that share its scale: the tensor, or its row."""
    real = gemms.fwd

    def fwd(site, way, given, x_q, *rest):
        if site.name == FIRST and site.recipe.fwd is not None:
            x = dequantize(x_q)
            x[0, 0] = 1e7 * x.abs().max()
            x_q = site.selections["fwd"].backend.quantize(x, site.recipe.fwd.a)
            x_q.data.view(torch.uint8)[0, 0] = 0  # only its effect on the scale remains
        return real(site, way, given, x_q, *rest)

    monkeypatch.setattr(gemms, "fwd", fwd)
    answer = search()
    assert [candidate.words for culprits in answer.sets for candidate in culprits] == [f"fwd of {FIRST}"]
    assert answer.how == f"{FIRST} in rowwise"


def test_fault_after_20_steps_is_found(search, monkeypatch):
    now, real = [0], (loop.lr_at, gemms.fwd)

    def lr_at(number, **settings):
        now[0] = number
        return real[0](number, **settings)

    def fwd(site, *rest):
        y, w_q = real[1](site, *rest)
        bad = site.name == DOWN and site.recipe.fwd is not None and now[0] > 20
        return (300 * y if bad else y), w_q

    monkeypatch.setattr(loop, "lr_at", lr_at)
    monkeypatch.setattr(gemms, "fwd", fwd)
    answer = search("train.steps=28")
    assert [candidate.words for candidate in answer.out] == [f"fwd of {DOWN}"] and answer.steps > 20


class Broken(ReferenceBackend):
    name = "broken"

    def gemm_fwd(self, a, b, dtype, bias=None):
        return super().gemm_fwd(a, b, dtype, bias).flip(0)


def test_broken_backend_is_found(search, monkeypatch):
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    registry.register(Broken())
    answer = search("fp8.backend=broken")
    assert [candidate.words for candidate in answer.out] == ["backend: broken"]
    assert answer.works.fp8.backend == "reference" and answer.works.fp8.recipe == "tensorwise"
