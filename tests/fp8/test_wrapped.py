"""Layers in the hands of others: copies, pickles in other processes, keyword calls, replaced forwards, wrappers."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

from octavo import fp8


def layer(n=32, k=64, recipe="blockwise", **kwargs):
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(k, n, **kwargs))
    return fp8.apply(m, fp8.plan(m, recipe))


UNPICKLED = """
import sys, torch
m = torch.load(sys.stdin.buffer, weights_only=False)
x = torch.ones(2, 64)
optimizer = torch.optim.AdamW(m.parameters(), lr=0.1, fused=True)
before = m(x)
before.sum().backward()
optimizer.step()
assert not torch.equal(m(x), before), "the codes of the old weight were used again"
"""


def test_a_model_that_arrives_by_pickle_notices_optimizer_steps():
    file = io.BytesIO()
    torch.save(layer(bias=False), file)
    done = subprocess.run([sys.executable, "-c", UNPICKLED], input=file.getvalue(), capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()


def test_the_stock_keyword_is_accepted():
    m, x = layer(), torch.randn(3, 64)
    assert torch.equal(m[0](input=x), m[0](x))


def hooked(module):
    stock = module.forward
    module.forward = lambda *args, **kwargs: stock(*args, **kwargs)


def test_a_forward_replaced_on_the_instance_stays_in_high_precision_and_says_so():
    m = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    hooked(m[1])
    plan = fp8.plan(m, "blockwise")
    assert [r.fp8 for r in plan.rows] == [True, False] and "forward was replaced" in plan.rows[1].reason
    fp8.apply(m, plan)
    assert type(m[1]) is nn.Linear
    with fp8.count_gemms() as counts:
        m(torch.randn(2, 32))
    assert counts["1", "fwd", fp8.HIGH] == 1
    with pytest.raises(fp8.PlanError, match="forward was replaced"):
        fp8.plan(nn.Sequential(m[1]), "blockwise")


def test_a_forward_replaced_after_the_plan_is_an_error_before_anything_is_changed():
    m = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    plan = fp8.plan(m, "blockwise")
    hooked(m[1])
    with pytest.raises(fp8.PlanError, match=r"'1' got a forward of its own.*Apply the plan first"):
        fp8.apply(m, plan)
    assert type(m[0]) is nn.Linear
    with pytest.raises(TypeError, match="forward of its own on the instance"):
        fp8.Linear.convert(m[1], layer()[0]._site)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_copy_counts_what_stays_in_high_precision(copied):
    m = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    twin = copied(fp8.apply(m, fp8.plan(m, fp8.Policy(rules=(fp8.Rule("1", recipe="off"),)))))
    with fp8.count_gemms() as counts:
        twin(torch.randn(2, 32)).sum().backward()
    assert counts["1", "fwd", fp8.HIGH] == counts["1", "wgrad", fp8.HIGH] == 1
