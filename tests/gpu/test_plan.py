"""The measured plan on a GPU: FP8 layers are faster than BF16, and cached measurements are reproducible."""

import pytest
import torch
from torch import nn

from octavo import fp8
from octavo.fp8.measuring.cases import HIGH
from octavo.fp8.measuring.timing import time_calls
from octavo.fp8.proof import predict

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

TOKENS = {"foundation": 8192, "image_encoder": 4096, "lm_head": 8192}


class Block(nn.Module):
    """The projections of a decoder layer (Qwen3-8B) or a tower (Qwen3-VL), without the modules between them."""

    def __init__(self, width, kv, inner):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(width, width, bias=False), nn.Linear(width, kv, bias=False)
        self.up_proj, self.down_proj = nn.Linear(width, inner), nn.Linear(inner, width)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 8)
        self.visual = nn.ModuleList([Block(1152, 1152, 4304)])
        self.layers = nn.ModuleList(Block(4096, 1024, 12288) for _ in range(2))
        self.lm_head = nn.Linear(4096, 1024, bias=False)


@pytest.fixture(scope="module")
def model():
    with torch.device("meta"):
        return Net()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return fp8.MeasurementCache(tmp_path_factory.mktemp("cache") / "m.json")


@pytest.fixture(scope="module")
def found(model, cache):
    return fp8.measure(model, "auto", None, TOKENS, device="cuda", cache=cache)


def test_no_planned_layer_is_slower_than_bf16(model, found):
    plan = fp8.plan(model, "auto", tokens=TOKENS, measurements=found, micro_steps=4)
    print("\n" + plan.table())
    prediction = predict(plan)
    print("\n".join(prediction.sentences()))
    for row in plan.rows:
        if row.times is not None:
            assert row.times.planned <= row.times.high
            assert not row.fp8 or row.times.planned < row.times.high
    assert prediction.gain >= 0


def test_candidates_are_healthy_or_give_reason(found):
    for case, measured in found.cases.items():
        for name, entry in measured.entries.items():
            print(case, name, entry.rejected or f"{1e3 * entry.seconds:.3f} ms, host {1e3 * entry.host:.3f} ms")
        healthy = [n for n, e in measured.entries.items() if e.rejected is None]
        assert HIGH in healthy and len(healthy) > 1


def test_machine_is_measured_once(model, cache, found):
    def refuses(case, calls, device):
        raise AssertionError(f"{case} was measured again")

    again = fp8.measure(model, "auto", None, TOKENS, device="cuda", cache=cache, timer=refuses)
    assert again == found and not again.machine.emulated and again.machine.sm >= (8, 9)


def test_ranking_is_reproducible(model, found):
    """The large MLP layer, planned and in BF16, as the run would call them."""
    plan = fp8.plan(model, "auto", tokens=TOKENS, measurements=found)
    row = next(r for r in plan.rows if r.name == "layers.0.up_proj")
    if not row.fp8:
        pytest.skip(f"planned in high precision here: {row.reason}")
    stock = nn.Linear(4096, 12288, device="cuda")
    actual = nn.Sequential(nn.Linear(4096, 12288, device="cuda"))
    fp8.apply(actual, fp8.plan(actual, row.recipe.name))
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def call(module):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = module(x)
        torch.autograd.grad(y, [x, *module.parameters()], torch.ones_like(y))

    times = time_calls({"bf16": lambda: call(stock), "fp8": lambda: call(actual)}, "cuda")
    assert times["fp8"].device < 1.05 * times["bf16"].device


def test_saved_plan_is_reused_on_same_gpu(model, found, tmp_path):
    plan = fp8.plan(model, "auto", tokens=TOKENS, measurements=found)
    again = fp8.load_plan(fp8.save_plan(plan, tmp_path / "plan.json"), model)

    def fates(p):
        return [(r.recipe, {g: s.backend.name for g, s in r.selections.items()}) for r in p.rows]

    assert fates(again) == fates(plan)


def test_high_precision_runs_stock_layer():
    layer = nn.Sequential(nn.Linear(512, 512, device="cuda", dtype=torch.bfloat16))
    x = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16)
    stock = layer(x)
    fp8.apply(layer, fp8.plan(layer, "blockwise"))
    with fp8.high_precision(layer):
        assert torch.equal(layer(x), stock)
    assert not torch.equal(layer(x), stock)
