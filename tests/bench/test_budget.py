"""The budget of a step: by a clock that parts move on themselves, each gets what it spent, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.gpu import report
from octavo.bench import Bench, record
from octavo.bench.profiles.budget import HEAD, OPTIMIZER, PARTS, Budget, measure_parts
from octavo.bench.record import Result, Row
from octavo.bench.suite_step.candidates import parse
from octavo.bench.suite_step.step import Step
from octavo.fp8.blocks.gated_mlp import GatedMlp

now = [0.0]


class Spend(torch.autograd.Function):
    """Takes ``seconds`` forward, and twice that backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        now[0] += seconds
        ctx.seconds = seconds
        return x * 1

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        now[0] += 2 * ctx.seconds
        return dy, None


class Slow(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Spend.apply(super().forward(x), 1.0)


class SomeNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Spend.apply(x, 10.0)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.k_norm = Slow(4, 4), Slow(4, 4), SomeNorm()

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return Spend.apply(self.q(x) + self.k_norm(self.k(x)), 100.0), None


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = Slow(4, 4), SomeNorm()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp, self.norm = Attention(), Mlp(), SomeNorm()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.norm(x))[0]
        return Spend.apply(x + self.mlp(x), 1000.0)


def test_parts_add_up_to_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.bench.profiles.budget.time.perf_counter", lambda: now[0])
    block, budget = Block(), Budget(torch.device("cpu"))
    head = budget.wrap(HEAD, lambda x: Spend.apply(x, 10_000.0).sum())

    def update() -> None:
        now[0] += 7.0

    update_it = budget.wrap(OPTIMIZER, update)

    def step() -> None:
        head(block(torch.ones(2, 4, requires_grad=True))).backward()
        update_it()

    with measure_parts(block, budget):
        found = [budget.step(step) for _ in range(2)]
    # q, k and the whole MLP (1 + 10); attention less what is in it; of norms those of the block and of k
    expected = dict(zip(PARTS, (3 * 13.0, 3 * 100.0, 30_000.0, 3 * 20.0, 7.0, 3000.0), strict=True))
    assert found == [expected, expected]
    assert not any("forward" in m.__dict__ for m in block.modules()), "it stays behind"


def test_timing_by_part_does_not_change_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights move alike, and gated MLPs run fused: hooks inside them would take them apart."""
    fused: list[bool] = []
    ask = GatedMlp._can_fuse
    monkeypatch.setattr(GatedMlp, "_can_fuse", lambda *args: fused.append(ask(*args)) or fused[-1])
    twins = []
    for _ in range(2):
        torch.manual_seed(0)
        twins.append(Step(Bench(torch.device("cpu"), small=True), 1, 24, parse("blockwise fused", "fp32")))
    cut, plain = twins
    parts = cut.parts(steps=1)
    plain()
    assert list(parts) == list(PARTS) and min(parts.values()) > 0
    pairs = zip(cut.model.state_dict().values(), plain.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert fused and all(fused) and cut.loss is plain.loss and cut.update == cut.optimizer.step
    assert Step(Bench(torch.device("cpu"), small=True), 1, 24, parse("fp32 compiled", "fp32")).parts() == {}


def test_parts_are_printed_with_shares_and_saved() -> None:
    half = dict.fromkeys(PARTS, 0.0) | {"linears": 0.003, "rest": 0.001}
    found = Result("cpu", True, rows=[Row("step", "tiny", "blockwise", 0.1, parts=half), Row("step", "tiny", "c", 1)])
    head, line = record.budget_table(found)
    assert head == ("case", "candidate", "step", *PARTS)
    assert line[2:4] == ("4.000 ms", "3.000 ms 75 %") and line[-1] == "1.000 ms 25 %"
    assert found.to_json()["rows"][0]["parts"] == half
    assert any("3.000 ms 75 %" in line for line in report.page(found))
    assert record.budget_table(Result("cpu", True, rows=found.rows[1:])) == []
