"""What plans and the values around them look like in a debugger, in print and in a notebook."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
import torch
from torch import nn

from octavo import fp8
from octavo.fp8.measuring import Machine
from octavo.fp8.proof import Proof


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(*[nn.Linear(256, 256) for _ in range(3)])


def test_plan_repr_is_one_line_and_str_is_table(model: nn.Module) -> None:
    plan = fp8.plan(model, fp8.Policy("blockwise", rules=(fp8.Rule("0", recipe="off"),)))
    assert repr(plan) == "Plan(blockwise e4m3: 2 of 3 layers in FP8, GEMMs fwd/dgrad/wgrad)"
    assert str(plan) == f"{plan}" == plan.table()
    assert repr(fp8.plan(model, "off")) == "Plan(high precision: 0 of 3 layers in FP8)"
    forward = fp8.plan(model, fp8.Policy("rowwise", dgrad="bf16", wgrad="bf16"))
    assert repr(forward).endswith("3 of 3 layers in FP8, GEMMs fwd)")


def test_reprs_are_one_line(model: nn.Module) -> None:
    policy = fp8.Policy("blockwise", rules=(fp8.Rule("0", recipe="off", steps=(1, 10)),))
    plans = fp8.schedule(model, fp8.plan(model, policy), 20)
    assert repr(plans.main.rows[1]) == "PlanRow(1: blockwise e4m3 on reference; the whole model)"
    assert repr(plans) == (
        "Schedule(steps 1 to 10 blockwise e4m3: 2 of 3 layers in FP8, GEMMs fwd/dgrad/wgrad; "
        "steps 11 to 20 blockwise e4m3: 3 of 3 layers in FP8, GEMMs fwd/dgrad/wgrad)"
    )
    assert repr(policy) == "Policy(recipe='blockwise', rules=(Rule(match='0', recipe='off', steps=(1, 10)),))"
    assert eval(repr(policy), vars(fp8)) == policy
    assert repr(fp8.Policy(components={"foundation": "rowwise"})) == (
        "Policy(recipe='off', components={'foundation': ComponentPolicy(recipe='rowwise')})"
    )
    assert repr(Proof(plans.main)).endswith("not reached yet: foundation)")
    assert repr(fp8.Measurements(Machine("cpu", torch="2.9"))) == "Measurements(0 cases on cpu, torch 2.9)"
    fp8.apply(model, plans.main)
    with fp8.count_gemms() as counts:
        model(torch.randn(4, 256))
    assert repr(counts) == "GemmCounts(3 GEMMs of 3 layers)"


class Cells(HTMLParser):
    """The texts of the cells of a table and of the items of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_notebook_table_escapes_names(model: nn.Module) -> None:
    plan = fp8.plan(nn.ModuleDict({"<b>&": model}), "blockwise")
    text, cells = plan._repr_html_(), Cells()
    cells.feed(text)
    assert "<b>" not in text and "&lt;b&gt;&amp;" in text
    assert cells.tags.count("tr") == 2 and cells.tags.count("th") == cells.tags.count("td") == 7
    assert "<b>&.{0..2}" in cells.texts and "blockwise e4m3" in cells.texts
    assert "FP8: 3 of 3 linear layers, with 197,376 of 197,376 parameters" in cells.texts
