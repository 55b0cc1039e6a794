"""Cast tables: names keep the casts that they were saved with, in every combination of words, and damage is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from octavo.base.recipe_specs import CURRENT_SCALING, SPECS
from octavo.fp8.arithmetic.recipe import RECIPES, CastTable, Recipe, RecipeError, recipe
from octavo.fp8.self_check.reference_checks import kernel_checks
from tests.fp8.changed_recipe import change_recipe


def saved() -> dict[str, Any]:
    return json.loads(json.dumps(CastTable().to_json()))


@pytest.mark.parametrize("name", RECIPES)
def test_table_of_this_version_has_its_recipes(name: str) -> None:
    table = CastTable.from_json(saved())
    lent = () if SPECS[name].delayed else CURRENT_SCALING
    for form in (None, *SPECS[name].formats):
        for word in ("fp8", "bf16", *lent):
            r = recipe(name, form, wgrad=word)
            assert table.recipe(name, form, wgrad=word) == CastTable().recipe(name, form, wgrad=word) == r
            assert table.gemm_precisions(r) == r.gemm_precisions() and not table.describe_changes(
                CastTable(), [table.words(r)]
            )
    assert table.to_json() == saved()


def test_name_keeps_its_casts_if_a_later_version_changes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    table, words = saved(), ({}, {"fwd": "bf16"}, {"format": "hybrid"}, {"wgrad": "rowwise"})
    before = [recipe("blockwise", **word) for word in words]
    lent = recipe("tensorwise", wgrad="blockwise")
    change_recipe(monkeypatch)
    later = CastTable.from_json(table)
    assert [later.recipe("blockwise", **word) for word in words] == before
    assert later.recipe("tensorwise", wgrad="blockwise") == lent != recipe("tensorwise", wgrad="blockwise")
    assert later.gemm_precisions(before[0]) == dict.fromkeys(("fwd", "dgrad", "wgrad"), "fp8")
    assert later.gemm_precisions(lent)["wgrad"] == "blockwise"
    assert later.describe_changes(CastTable(), map(later.words, (*before, recipe("rowwise")))) == [
        "blockwise (e4m3): wgrad x e4m3 128x128 pow2 (now e4m3 128x1 pow2)",
        "blockwise (hybrid): wgrad x e4m3 128x128 pow2 (now e4m3 128x1 pow2)",
    ]
    assert later.to_json() == table


def test_casts_that_no_recipe_has_are_spelled_out() -> None:
    """As of 0.5.0, whose blockwise had the casts of blockwise_1d: in hybrid no word of this version says that."""
    names = {f"blockwise {form}": saved()[f"blockwise_1d {form}"] for form in ("e4m3", "hybrid")}
    table = CastTable.from_json(names)
    assert table.recipe("blockwise").summary() == "blockwise e4m3 wgrad=blockwise_1d"
    hybrid = table.recipe("blockwise", "hybrid")
    assert hybrid.summary() == "blockwise hybrid wgrad=e5m2 128x1 pow2 @ e4m3 128x1 pow2"
    assert table.words(hybrid) == ("blockwise", "hybrid", "fp8", "fp8", "fp8")
    kernels = [
        kernel_checks(r, "wgrad", "triton", torch.device("cpu")) for r in (hybrid, recipe("blockwise", "hybrid"))
    ]
    assert kernels[0].keys() != kernels[1].keys(), "a check of one is no check of the other"
    # Of two names with these casts, the one that has them in every version.
    lent = table.recipe("tensorwise", wgrad="blockwise_1d")
    assert table.gemm_precisions(lent)["wgrad"] == "blockwise_1d"
    assert not table.describe_changes(CastTable(), [table.words(lent)])


def test_table_without_a_name_has_the_casts_of_this_version() -> None:
    table = saved()
    del table["blockwise e4m3"], table["blockwise hybrid"]
    table["gone e4m3"] = table["rowwise e4m3"]  # a recipe that this version lacks: no layer uses it
    later = CastTable.from_json(table)
    assert later.recipe("blockwise") == recipe("blockwise")
    assert later.to_json().keys() == {*table, "blockwise e4m3", "blockwise hybrid"}


def test_casts_that_a_gemm_borrows_have_the_default_format_of_the_table() -> None:
    table = saved()
    earlier = {"rowwise hybrid": table.pop("rowwise hybrid"), **table}
    borrowed = CastTable.from_json(earlier).recipe("tensorwise", wgrad="rowwise").wgrad
    assert borrowed == recipe("rowwise", "hybrid").wgrad != recipe("rowwise").wgrad


def test_amax_history_is_part_of_the_table() -> None:
    table = saved()
    table["delayed hybrid"]["history"] = 4
    later = CastTable.from_json(table)
    r = later.recipe("delayed")
    assert r.delayed is not None and r.delayed.length == 4
    assert later.describe_changes(CastTable(), [later.words(r)]) == ["delayed (hybrid): amax history of 4 (now 16)"]
    for length in (0, 10**12, True):
        table["delayed hybrid"]["history"] = length
        with pytest.raises(
            RecipeError, match="'delayed hybrid': Delayed: length=.* must be an integer from 1 to 65,536"
        ):
            CastTable.from_json(table)


KEY = "blockwise e4m3"
DAMAGED = [
    ({KEY: {"fwd": "e4m3 1x128"}}, f"'{KEY}' must have fwd, dgrad, wgrad and, with delayed scaling, history; got"),
    ({KEY: {"forward": ""}}, f"'{KEY}' must have fwd, dgrad, wgrad and, with delayed scaling, history; got"),
    ({KEY: []}, f"'{KEY}' must have fwd, dgrad, wgrad and, with delayed scaling, history; got"),
    ({"blockwise": {}}, "'blockwise' is not a recipe and a format, such as 'blockwise e4m3'"),
    ({"blockwise e5m2": {}}, "'blockwise e5m2' is not a recipe and a format"),
    ([], "must map recipes to their casts, got"),
]
GEMMS = [
    ("fwd", "e4m3 1x128 pow2", f"'{KEY}': fwd must have two casts, as in 'CAST @ CAST', got 'e4m3 1x128 pow2'"),
    ("fwd", None, f"'{KEY}': fwd must have two casts, as in 'CAST @ CAST', got None"),
    ("wgrad", "e4m3 1x128 pow2 @ e4m3 128 pow2", f"'{KEY}': wgrad: 'e4m3 128 pow2' is not a cast"),
    ("dgrad", "e4m3 128x128 pow2 @ e4m3 128x128 pow2", f"'{KEY}': .* dy of dgrad has blocks of 128x128"),
    ("history", 4, f"'{KEY}' has a history, which only delayed scaling has"),
    ("bgrad", "", f"'{KEY}' must have fwd, dgrad, wgrad and, with delayed scaling, history; got"),
]


@pytest.mark.parametrize(("table", "message"), DAMAGED)
def test_damaged_table_is_reported_with_its_key(table: object, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        CastTable.from_json(table)


@pytest.mark.parametrize(("gemm", "text", "message"), GEMMS)
def test_damaged_casts_are_reported_with_key_and_gemm(gemm: str, text: object, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        CastTable.from_json({KEY: {**saved()[KEY], gemm: text}})


def test_table_defines_no_new_names() -> None:
    with pytest.raises(RecipeError, match="recipe 'gone' does not exist"):
        CastTable({"gone e4m3": Recipe("gone", "e4m3", None, None, None)}).recipe("gone")
