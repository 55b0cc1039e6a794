"""Experts distributed over ranks against one process that has the tokens of all ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from octavo import fp8
from octavo.fp8.optim import gradient_norm
from octavo.parallel import Layout, World, WorldError, shard
from octavo.parallel.experts import distribute_experts
from octavo.train.step.update import _clip_gradients
from tests import ranks
from tests.fp8.moe.expert_modules import FAMILIES, H
from tests.parallel.differences import worst_difference

E, TOKENS, TOP_K = 8, 11, 2


class Layer(nn.Module):
    """Indices replace the router; the norm is a parameter that is not distributed."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H)
        self.experts = FAMILIES[family](E)

    def forward(self, x: Tensor, index: Tensor, share: Tensor) -> Tensor:
        return x + self.experts(self.norm(x), index, share)


class Model(nn.Module):
    def __init__(self, family: str) -> None:
        super().__init__()
        self.layer = Layer(family)

    def forward(self, *given: Tensor) -> Tensor:
        return self.layer(*given)


class Layers:
    def layers(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        return [(name, m) for name, m in model.named_modules() if isinstance(m, Layer)]


def _model(family: str, recipe: str | None) -> nn.Module:
    torch.manual_seed(0)
    model = Model(family)
    if recipe is not None:
        fp8.apply(model, fp8.plan(model, fp8.Policy(recipe=recipe, param=family == "qwen3_moe")))
    return model


def _tokens(case: str, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, index and share of a rank. ``one rank``: all choices are the first experts; ``none``: rank 1 has
    none."""
    g = torch.Generator().manual_seed(10 + rank)
    tokens = 0 if case == "no tokens" and rank == 1 else TOKENS + 3 * rank
    x = torch.randn(tokens, H, generator=g)
    used = 2 if case == "two experts" else E
    index = torch.rand(tokens, used, generator=g).argsort(1)[:, :TOP_K]
    if case == "uneven":
        index[: tokens // 2, 0] = E  # a place without an expert
    return x, index, torch.rand(tokens, TOP_K, generator=g)


def _run(model: nn.Module, given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output and the gradients of tokens and shares."""
    x, index, share = given[0].clone().requires_grad_(), given[1], given[2].clone().requires_grad_()
    y = model(x, index, share)
    aim = torch.randn(H, generator=torch.Generator().manual_seed(1))
    (y * aim).sum().backward()
    assert x.grad is not None and share.grad is not None
    return y.detach(), x.grad, share.grad


def _gap(want: Tensor, mine: Tensor) -> float:
    return float((want - mine).abs().max() / want.abs().max())


def _compare(world: World, cases: dict[str, tuple[str, str | None, str]]) -> dict[str, list]:
    """By case: how far this rank's part of outputs and gradients of tokens is from that of one process (0: it is the
    same to the bit), and how far the gradients of weights, and their norm, are from its."""
    out = {}
    for name, (family, recipe, case) in cases.items():
        whole, dealt = _model(family, recipe), _model(family, recipe)
        shard(dealt, Layers(), world)
        each = [_tokens(case, rank) for rank in range(world.size)]
        want = _run(whole, tuple(torch.cat(parts) for parts in zip(*each, strict=True)))
        local = _run(dealt, each[world.rank])
        before = sum(len(x) for x, _, _ in each[: world.rank])
        own = slice(before, before + len(each[world.rank][0]))
        tokens = [0.0 if torch.equal(a[own], b) else _gap(a[own], b) for a, b in zip(want, local, strict=True)]
        norm, wanted = (float(gradient_norm(model.parameters())) for model in (dealt, whole))
        limited = float(_clip_gradients(list(dealt.parameters()), 0.5 * wanted))
        out[name] = [tokens, worst_difference(dealt, whole, factor=0.5), norm / wanted, limited / wanted]
    return out


CASES = {
    "fp8": ("qwen3_moe", "blockwise", "uneven"),
    "rows": ("qwen3_vl_moe", "rowwise", "two experts"),
    "high": ("qwen3_vl_moe", None, "no tokens"),
    "turned": ("gpt_oss", "blockwise", "no tokens"),
    "turned high": ("gpt_oss", None, "two experts"),
    "mixed": ("mixtral", "mxfp8", "even"),
}


def test_rows_are_in_the_order_of_one_process():
    """Outputs and gradients of tokens are those of one process bit for bit, so its casts were; gradients of weights are
    sums of the same rows."""
    for actual in ranks.run(_compare, 2, CASES, expert=2):
        for name, (tokens, gap, *norms) in actual.items():
            assert not any(tokens) and gap < 2e-6 and norms == pytest.approx([1, 1], rel=1e-6), (
                name,
                tokens,
                gap,
                norms,
            )


@pytest.mark.long
@pytest.mark.parametrize("axes", [{"expert": 4}, {"expert": 2}, {"replicate": 2, "expert": 2}], ids=str)
def test_four_ranks_agree_for_all_layouts(axes: dict[str, int]):
    """Where two ranks have an expert, each has other rows than one process. Products in fp32 then round otherwise;
    casts for wgrad have blocks of 128 rows, so in FP8 gradients of weights are as close as sums of FP8 are."""
    for actual in ranks.run(_compare, 4, CASES, **axes):
        for name, (tokens, gap, *norms) in actual.items():
            close = 0.05 if CASES[name][1] is not None and axes["expert"] < 4 else 2e-6
            limit = 0 if axes["expert"] == 4 else 1e-6
            assert max(tokens) <= limit and gap < close, (name, tokens, gap)
            assert norms == pytest.approx([1, 1], rel=close), (name, norms)


@pytest.mark.parametrize(
    ("model", "ranks_", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2)), 2, "Sequential has no experts that are stacked in one parameter"),
        (lambda: _model("mixtral", None), 3, "its 8 experts are not a multiple of the 3 ranks"),
        (lambda: _model("mixtral", "delayed"), 2, "delayed hybrid keeps an amax history per expert"),
        (lambda: _with_norm(), 2, "its parameter norm.bias is shared by all experts"),
        (
            lambda: _with_own_order(),
            2,
            "layer.experts cannot be distributed over ranks: our forward of experts differs",
        ),
    ],
    ids=["no experts", "number", "delayed", "more than experts", "another forward"],
)
def test_experts_that_cannot_be_distributed_are_rejected(model, ranks_: int, message: str):
    world = World(0, ranks_, mesh=object(), layout=Layout(shard=ranks_, expert=ranks_), experts=object())
    with pytest.raises(WorldError, match=message):
        distribute_experts(model(), world)


def _with_norm() -> nn.Module:
    model = _model("mixtral", None)
    model.layer.experts.norm = nn.LayerNorm(H)
    return model


def _with_own_order() -> nn.Module:
    model = _model("mixtral", None)
    experts = model.layer.experts
    stock = type(experts)

    class Doubled(stock):
        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            return 2 * super().forward(hidden_states, top_k_index, top_k_weights)

    experts.__class__ = Doubled
    return model
