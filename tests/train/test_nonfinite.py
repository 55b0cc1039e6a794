"""Finding the layer that made the first value that is not finite."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octavo.train.step.nonfinite import find_first_source


class Overflow(nn.Module):
    """exp overflows for what its neighbours can hold."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 1e4).exp()


class RootOfZero(nn.Module):
    """Finite forward, infinite gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 0).sqrt()


def source(middle: nn.Module) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), middle, nn.Linear(4, 4))
    x = torch.rand(2, 4) + 1
    return find_first_source(model, lambda: model(x).sum().backward())


def test_the_forward_that_overflows_is_named():
    model = nn.Sequential(nn.Linear(4, 4), Overflow(), nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    found = find_first_source(model, lambda: model(torch.ones(2, 4)).sum().backward())
    assert found == "the forward of 1 (Overflow) produced the first value that is not finite"


def test_the_backward_that_overflows_is_named():
    assert source(RootOfZero()) == "the backward of 1 (RootOfZero) produced the first value that is not finite"


def test_a_healthy_model_is_not_blamed():
    assert source(nn.Identity()).startswith("no layer produced one when the step was repeated")


class InPlace(nn.Module):
    """Edits its neighbour's output, which backward hooks forbid."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.root = nn.Linear(4, 4), RootOfZero()

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        y += 1
        return self.root(y)


def test_a_model_that_edits_outputs_in_place_is_searched_without_backward_hooks():
    assert source(InPlace()).startswith("the gradient of 1.inner.")


def test_hooks_are_gone_afterwards():
    model = nn.Sequential(nn.Linear(4, 4))
    find_first_source(model, lambda: None)
    assert not any(m._forward_hooks or m._backward_hooks for m in model.modules())
