"""Copies, pickles in other processes, keyword calls, replaced forwards and wrappers of FP8 layers."""

import copy
import functools
import pickle
import sys
import warnings
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from octavo import fp8
from octavo.fp8.weights import versions


def layer(n=32, k=64, recipe="blockwise", **kwargs):
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(k, n, **kwargs))
    return fp8.apply(m, fp8.plan(m, recipe))


def test_unpickled_model_detects_optimizer_steps(monkeypatch):
    """In another process, where no model was created and optimizers are not observed yet."""
    sent = pickle.dumps(layer(bias=False))
    monkeypatch.setattr(versions, "_installed", False)
    monkeypatch.setattr(sys.modules["torch.optim.optimizer"], "_global_optimizer_post_hooks", OrderedDict())
    m, x = pickle.loads(sent), torch.ones(2, 64)
    optimizer = torch.optim.AdamW(m.parameters(), lr=0.1, fused=True)
    before = m(x)
    before.sum().backward()
    optimizer.step()
    assert not torch.equal(m(x), before), "the codes of the old weight were used again"


def test_the_stock_keyword_is_accepted():
    m, x = layer(), torch.randn(3, 64)
    assert torch.equal(m[0](input=x), m[0](x))


def hooked(module):
    stock = module.forward
    module.forward = lambda *args, **kwargs: stock(*args, **kwargs)


def test_replaced_forward_stays_in_high_precision():
    m = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    hooked(m[1])
    plan = fp8.plan(m, "blockwise")
    assert [r.fp8 for r in plan.rows] == [True, False] and "forward was replaced" in plan.rows[1].reason
    fp8.apply(m, plan)
    assert type(m[1]) is nn.Linear
    with fp8.count_gemms() as counts:
        m(torch.randn(2, 32))
    assert counts["1", "fwd", fp8.HIGH] == 1
    with fp8.count_gemms() as compiled:
        torch.compile(m, backend="aot_eager")(torch.randn(2, 32))
    assert compiled.calls == counts.calls
    with pytest.raises(fp8.PlanError, match="forward was replaced"):
        fp8.plan(nn.Sequential(m[1]), "blockwise")


def test_forward_replaced_after_plan_is_rejected():
    m = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    plan = fp8.plan(m, "blockwise")
    hooked(m[1])
    with pytest.raises(fp8.PlanError, match=r"the forward of '1' was replaced.*Apply the plan first"):
        fp8.apply(m, plan)
    assert type(m[0]) is nn.Linear
    with pytest.raises(TypeError, match="has a forward set on the instance"):
        fp8.Linear.convert(m[1], layer()[0]._site)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copy_counts_high_precision_layers(copied):
    m = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    twin = copied(fp8.apply(m, fp8.plan(m, fp8.Policy(rules=(fp8.Rule("1", recipe="off"),)))))
    with fp8.count_gemms() as counts:
        twin(torch.randn(2, 32)).sum().backward()
    assert counts["1", "fwd", fp8.HIGH] == counts["1", "wgrad", fp8.HIGH] == 1


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise", "rowwise", "delayed"])
def test_selective_checkpointing_may_save_the_products(recipe):
    def save_mm(ctx, op, *args, **kwargs):
        saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    m = nn.Sequential(layer(64, 64, recipe)[0], nn.GELU(), nn.Linear(64, 64))
    plain = copy.deepcopy(m)
    x = torch.randn(4, 64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    contexts = functools.partial(create_selective_checkpoint_contexts, save_mm)
    checkpoint(m, x, use_reentrant=False, context_fn=contexts).square().sum().backward()
    plain(y).square().sum().backward()
    assert torch.equal(x.grad, y.grad) and torch.equal(m[0].weight.grad, plain[0].weight.grad)


@pytest.mark.parametrize("recipe", fp8.RECIPES)
def test_shapes_can_be_traced_on_the_meta_device(recipe):
    m = layer(32, 64, recipe).to("meta")
    x = torch.randn(2, 5, 64, device="meta", requires_grad=True)
    y = m(x)
    assert y.is_meta and y.shape == (2, 5, 32)
    y.sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("n,k", [(0, 64), (32, 0)])
@pytest.mark.parametrize("recipe", fp8.RECIPES)
def test_layers_without_outputs_or_inputs(recipe, n, k):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nn.Linear says that it initialises nothing
        stock = nn.Sequential(nn.Linear(k, n))
    m = fp8.apply(copy.deepcopy(stock), fp8.plan(stock, recipe))
    x = torch.randn(2, 3, k, requires_grad=True)
    y = m(x)
    assert torch.equal(y, stock(x))
    y.sum().backward()
    assert x.grad.shape == x.shape and m[0].weight.grad.shape == (n, k)


def test_linear_rejects_invalid_arguments():
    x, w = torch.randn(2, 64), torch.randn(32, 64)
    with pytest.raises(fp8.RecipeError, match="recipe None does not exist"):
        fp8.linear(x, w, recipe=None)
    for weight, bias in ((w[0], None), (w, torch.zeros(31)), (w, torch.zeros(1, 32))):
        with pytest.raises(RuntimeError, match="takes a weight .N, K. and a bias .N."):
            fp8.linear(x, weight, bias)


def test_a_compiled_model_computes_the_same():
    m, x = layer(64, 64), torch.randn(4, 64)
    compiled = torch.compile(nn.Sequential(m, nn.GELU()), backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(x), nn.functional.gelu(m(x)))
