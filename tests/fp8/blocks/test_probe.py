"""A trial of a module is shared by modules that are alike, and only by these."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from octavo.fp8 import planning
from octavo.fp8.blocks import rmsnorm
from octavo.fp8.blocks.probe import cache_trial, share_trials


class Norm(nn.Module):
    def __init__(self, k: int = 8, eps: float = 1e-6, offset: float = 0.0, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(k, dtype=dtype))
        self.variance_epsilon, self.offset, self.config = eps, offset, _CONFIG

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return ((self.offset + self.weight) * scaled.to(x.dtype)).to(x.dtype)


class Other(Norm):
    pass


_CONFIG = object()


def _counted() -> tuple[list[nn.Module], Callable[[nn.Module], str | None]]:
    tried: list[nn.Module] = []

    @cache_trial
    def ask(module: nn.Module) -> str | None:
        assert torch.get_num_threads() == 1
        tried.append(module)
        return f"no. {len(tried)}"

    return tried, ask


def test_equal_modules_share_one_trial() -> None:
    tried, ask = _counted()
    threads = torch.get_num_threads()
    first, alike = nn.Sequential(Norm(), nn.SiLU()), nn.Sequential(Norm(), nn.SiLU())
    with share_trials():
        assert ask(first) == ask(alike) == "no. 1" and tried == [first]
    assert ask(alike) == "no. 2", "a verdict is forgotten with the plan that asked for it"
    with share_trials():
        assert ask(first) == "no. 3"
    assert torch.get_num_threads() == threads


def test_different_modules_run_separate_trials() -> None:
    tried, ask = _counted()
    configured, hooked, trained = Norm(), Norm(), Norm().eval()
    configured.config = object()
    hooked.register_forward_hook(lambda *_: None)
    small, original = Norm(16), Norm()
    original.register_buffer("table", torch.zeros(2))
    different = [Norm(), small, Norm(eps=1e-5), Norm(offset=1.0), Norm(dtype=torch.bfloat16), Other()]
    different += [configured, hooked, trained, original, nn.Sequential(Norm()), nn.Sequential(Norm(eps=1e-5))]
    with share_trials():
        assert len({ask(module) for module in different}) == len(different) == len(tried)


def test_plan_tries_each_kind_once(monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(
        rmsnorm, "_run_stock", lambda *given, real=rmsnorm._run_stock: calls.append(given) or real(*given)
    )
    norms = nn.ModuleDict({f"norm{i}": Norm(offset=float(i == 2)) for i in range(6)})
    results = planning.plan_blocks(norms, (), on=False, saving=("foundation",))
    assert [block.saves for block in results] == [True, True, False, True, True, True]
    assert "Gemma" in results[2].why and len(calls) == 2
