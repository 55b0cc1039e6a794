"""Experts with frozen codes, grouped and one by one, stored both ways: those of their values, bit for bit."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from octavo import fp8
from octavo.fp8.moe.experts import PROJECTIONS
from octavo.fp8.proof import Proof
from octavo.fp8.weights import codes_of_frozen, fp8_rows

E, H, I = 5, 160, 32  # noqa: E741
HOW = ("grouped", "dgrad in BF16", "fwd in BF16", "saved")
RECIPES = {"row": "rowwise", "block": "blockwise", "tensor": "tensorwise"}


class Plain(nn.Module):
    """As Hugging Face keeps experts: [E, outputs, inputs], or transposed."""

    is_transposed = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, shape in zip(PROJECTIONS, ((E, 2 * I, H), (E, H, I)), strict=True):
            values = torch.randn(shape) * torch.exp2(torch.randint(-3, 3, (E, shape[1], 1)).float()) / 8
            values = values.mT.contiguous() if self.is_transposed else values
            setattr(self, name, nn.Parameter(values.bfloat16(), requires_grad=False))
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for e in range(E):
            share = ((top_k_index == e) * top_k_weights).sum(-1, keepdim=True).to(hidden_states.dtype)
            first, second = self.gate_up_proj[e], self.down_proj[e]
            if not self.is_transposed:
                first, second = first.t(), second.t()
            gate, up = (hidden_states @ first).chunk(2, -1)
            out = out + (self.act_fn(gate) * up) @ second * share
        return out


class Transposed(Plain):
    is_transposed = True


def built(cls: type[Plain], kind: str, codes: bool = True) -> nn.ModuleDict:
    module = cls()
    for name in PROJECTIONS:
        weight = fp8.freeze_weight(getattr(module, name), kind, transposed=cls.is_transposed)
        assert weight.shape == getattr(module, name).shape
        setattr(module, name, weight if codes else nn.Parameter(weight.dequantize().contiguous(), requires_grad=False))
    return nn.ModuleDict({"experts": module})


def routed(tokens: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, H, generator=g).bfloat16().requires_grad_()
    index = torch.rand(tokens, E - 1, generator=g).argsort(1)[:, :2]  # nobody asks the last one
    return x, index, torch.rand(tokens, 2, generator=g).bfloat16()


CASES = [(kind, how) for how in HOW for kind in RECIPES] + [("tensor", "one by one")]
WAYS = [(Transposed if i % 2 else Plain, *case) for i, case in enumerate(CASES)] + [(Transposed, *CASES[-1])]


@pytest.mark.parametrize(("cls", "kind", "how"), WAYS)
def test_frozen_experts_match_dequantized_values(cls: type[Plain], kind: str, how: str) -> None:
    """One by one they run on every backend under delayed scaling alone, which takes codes of a tensor."""
    settings = {
        "one by one": {"recipe": "delayed"},
        "dgrad in BF16": {"dgrad": "bf16"},
        "fwd in BF16": {"fwd": "bf16"},
        "saved": {"activations": "fp8"},
    }.get(how, {})
    found = []
    for codes in (True, False):
        model = built(cls, kind, codes)
        before = fp8.fingerprint(model)
        plan = fp8.plan(model, fp8.Policy(**{"recipe": RECIPES[kind], **settings}))
        assert all(r.fp8 and (r.row.codes is not None) is codes for r in plan.rows)
        fp8.apply(model, plan)
        x, index, share = routed()
        proof = Proof(plan)
        with fp8.count_gemms() as counts:
            y = model["experts"](x, index, share)
            y.sum().backward()
        proof.observe(counts, {"foundation": 1})
        found.append((y.detach(), x.grad))
        assert fp8.fingerprint(model) == before and (not codes or fp8.weight_cache_bytes(model) == 0)
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("cls", [Plain, Transposed])
@pytest.mark.parametrize("kind", RECIPES)
def test_one_expert_at_a_time_in_high_precision(cls: type[Plain], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stock loop over experts dequantizes the expert that it uses, and no other."""
    model, (x, index, share) = built(cls, kind), routed()
    want = built(cls, kind, codes=False)["experts"](x, index, share)
    stock, shapes = fp8_rows.dequantize, []
    monkeypatch.setattr(fp8_rows, "dequantize", lambda q, *a: shapes.append(tuple(q.data.shape)) or stock(q, *a))
    assert torch.equal(model["experts"](x, index, share), want)
    assert set(shapes) == {(2 * I, H), (H, I)}
    fp8.apply(model, fp8.plan(model, RECIPES[kind]))
    with fp8.high_precision(model):
        assert torch.equal(model["experts"](x, index, share), want)


@pytest.mark.parametrize("cls", [Plain, Transposed])
def test_frozen_experts_move_as_codes(cls: type[Plain]) -> None:
    model = built(cls, "block")
    fp8.apply(model, fp8.plan(model, "blockwise"))
    before, (x, index, share) = fp8.fingerprint(model), routed()
    y = model["experts"](x, index, share)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.to("cpu", torch.bfloat16)):
        assert fp8.fingerprint(twin) == before
        assert torch.equal(twin["experts"](x, index, share), y)
    with pytest.raises(RuntimeError, match=r"Call fp8.dequantize_weights\(model\)"):
        model.float()
    state = fp8.fp8_state_dict(model)
    assert state["experts.gate_up_proj"].shape == (E, 2 * I, H)  # as the GEMM multiplies, however it is stored
    assert state["experts.gate_up_proj_scale_inv"].shape == (E, 1, 2)
    other = built(cls, "block")
    codes_of_frozen(other["experts"].down_proj).data.view(torch.uint8).zero_()
    fp8.load_fp8_state_dict(other, state)
    assert fp8.fingerprint(other) == before
    values = fp8.dequantize_weights(other)["experts"].gate_up_proj
    assert values.is_contiguous() and torch.equal(values, built(cls, "block", codes=False)["experts"].gate_up_proj)
