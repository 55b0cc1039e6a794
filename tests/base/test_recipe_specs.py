"""The table of recipes: values derived from it, and adding a recipe with one line."""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import octavo.bisect.find_culprits  # so that the process below has all that it imports from elsewhere
import octavo.train.estimate.memory.states  # noqa: F401
from octavo import fp8
from octavo.base import recipe_specs
from octavo.base.recipe_specs import SPECS
from octavo.fp8.blocks import compiled as compiled_blocks
from octavo.fp8.dense import compiled as compiled_layers
from octavo.fp8.weights import FROZEN
from tests.project_rules import ROOT

# Blocks of 1 x 128 on both operands of every GEMM, so that a weight has codes in two layouts.
LINE = """\
    RecipeSpec(
        "tilewise", ((1, 128), (1, 128), (1, 128), (128, 1), (128, 1), (128, 1)), "pow2", ("e4m3", "hybrid"), rank=-1
    ),
"""
LAST = '    RecipeSpec("delayed"'


def test_derived_lists_of_recipes() -> None:
    assert recipe_specs.NAMES == ("tensorwise", "rowwise", "blockwise", "blockwise_1d", "mxfp8", "delayed")
    assert recipe_specs.RANKED == ("blockwise", "mxfp8", "rowwise", "tensorwise", "delayed", "blockwise_1d")
    assert (*recipe_specs.CANDIDATES, "delayed", "blockwise_1d") == recipe_specs.RANKED, "variants must be named"
    assert (*recipe_specs.CURRENT_SCALING, "delayed") == recipe_specs.NAMES
    assert recipe_specs.PER_TOKEN == ("rowwise", "blockwise", "mxfp8")
    assert recipe_specs.COARSE_TO_FINE == ("tensorwise", "rowwise", "blockwise")
    assert dict(recipe_specs.RECIPES_OF_KIND) == {
        "row": ("rowwise",),
        "block": ("blockwise", "blockwise_1d"),
        "tensor": ("tensorwise", "delayed"),
    }
    on = {major: recipe_specs.fastest_on(major) for major in (8, 9, 10, 11, 12, 13)}
    assert list(on.values()) == ["rowwise", "blockwise", "mxfp8", "mxfp8", "rowwise", "rowwise"]
    frozen = {kind: (spec.format, spec.block, spec.scale) for kind, spec in FROZEN.items()}
    assert frozen == {
        "row": ("e4m3", (1, -1), "pow2"),
        "block": ("e4m3", (128, 128), "pow2"),
        "tensor": ("e4m3", (-1, -1), "fp32"),
    }


def test_numerics_page_has_a_row_for_each_recipe() -> None:
    page = (ROOT / "docs/numerics.md").read_text(encoding="utf-8")
    table = page.partition("## Recipes\n")[2].split("\n\n")[0]
    assert sorted(re.findall(r"^\| `(\w+)`", table, re.M)) == sorted(SPECS)


@pytest.mark.parametrize("name", SPECS)
def test_specs_match_their_casts(name: str) -> None:
    spec, recipe = SPECS[name], fp8.recipe(name)
    assert recipe.fwd and recipe.dgrad and recipe.wgrad
    assert spec.layouts == len(recipe.weight_casts()) == (2 if name in ("rowwise", "mxfp8") else 1)
    assert spec.delayed == (recipe.delayed is not None) and recipe.format == spec.formats[0]
    assert spec.has_tensor_scale == (recipe.fwd.a.block == (-1, -1))
    assert spec.couples_rows == (recipe.fwd.a.block[0] != 1)


@pytest.mark.parametrize(
    ("words", "twice"),
    [
        ({"recipe": "blockwise", "dgrad": "mxfp8"}, "blockwise with dgrad of mxfp8"),
        ({"recipe": "tensorwise", "fwd": "blockwise"}, "tensorwise with fwd of blockwise"),
        ({"recipe": "tensorwise", "fwd": "rowwise", "dgrad": "rowwise"}, "tensorwise with fwd of rowwise and dgrad of"),
        ({"recipe": "rowwise"}, "rowwise"),
        ({"recipe": "rowwise", "dgrad": "bf16"}, ""),
        ({"recipe": "mxfp8", "fwd": "bf16"}, ""),
        ({"recipe": "mxfp8", "fwd": "blockwise", "dgrad": "blockwise"}, ""),
        ({"recipe": "blockwise", "wgrad": "mxfp8"}, ""),
    ],
)  # fmt: skip
def test_note_on_double_weight_casts_follows_from_the_casts(words: dict[str, str], twice: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    found = [note for note in fp8.plan(model, fp8.Policy(**words)).notes if "twice" in note]
    assert len(found) == bool(twice) and all(note.startswith(twice) for note in found)
    notes = "\n".join(fp8.plan(model, fp8.Policy(**words, weight_codes="recast")).notes)
    assert "bytes of codes" not in notes and ("weights twice at each use" in notes) == bool(twice)


@pytest.mark.parametrize(
    ("words", "frozen", "local"),
    [
        ({"recipe": "blockwise", "wgrad": "tensorwise"}, False, True),
        ({"recipe": "blockwise", "wgrad": "tensorwise"}, True, False),
        ({"recipe": "blockwise", "dgrad": "tensorwise"}, True, True),
        ({"recipe": "tensorwise", "fwd": "rowwise", "dgrad": "rowwise", "wgrad": "bf16"}, False, False),
        ({"recipe": "delayed"}, False, True),
    ],
)
def test_note_on_tensor_amax_follows_from_the_casts(words: dict[str, str], frozen: bool, local: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False)).requires_grad_(not frozen)
    assert local == any("per-tensor amax" in note for note in fp8.plan(model, fp8.Policy(**words)).notes)


def test_recipe_is_added_by_one_line_in_the_table() -> None:
    """Everything is imported anew in a process of its own, with a table that has one line more."""
    receiver, sender = os.pipe()
    if (child := os.fork()) == 0:
        try:
            _plant()
            text = json.dumps(_known())
        except BaseException:
            text = json.dumps(traceback.format_exc())
        with os.fdopen(sender, "w") as out:
            out.write(text)
        os._exit(0)
    os.close(sender)
    with os.fdopen(receiver) as answer:
        known = json.loads(answer.read())
    os.waitpid(child, 0)
    assert isinstance(known, dict), known
    assert all(known.values()), known


def _plant() -> None:
    for module in (
        compiled_layers,
        compiled_blocks,
    ):  # torch keeps operators for a process; they are defined once more below
        module._lib._destroy()
    name, file = recipe_specs.__name__, recipe_specs.__file__
    assert file is not None
    text = Path(file).read_text(encoding="utf-8")
    assert text.count(LAST) == 1
    for module in [module for module in sys.modules if module.partition(".")[0] == "octavo"]:
        del sys.modules[module]
    sys.modules[name] = planted = types.ModuleType(name)
    exec(compile(text.replace(LAST, LINE + LAST), file, "exec"), planted.__dict__)


def _known() -> dict[str, bool]:
    """What knows the planted recipe, by its subject; all names are those of modules with the planted table."""
    import torch

    from octavo import config, fp8
    from octavo.bench import peers
    from octavo.bisect import find_culprits
    from octavo.bisect.candidates import Candidate, Space
    from octavo.fp8.adapting import ladder
    from octavo.fp8.measuring import Machine
    from octavo.fp8.measuring.cases import HIGH
    from octavo.fp8.measuring.timing import Timing
    from octavo.fp8.planning import file
    from octavo.train.estimate.memory import states

    def timer(case: Any, calls: dict[str, Callable[[], Any]], device: Any) -> dict[str, Timing]:
        high, best = 1.0, 0.5  # ties: the planted one is a little faster than all others
        return {n: Timing(high if n.startswith(HIGH) else best - 0.1 * ("tilewise" in n), 0.01, 0.0, 4) for n in calls}

    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    tokens, policy = {"foundation": 64}, fp8.Policy("auto")
    gpu = Machine("Fake H200", "9.0", "999.1", "2.11", "13.0", {"reference": "1"})
    measured = fp8.measure(model, policy, None, tokens, timer=timer, machine=gpu)
    by_time = fp8.plan(model, policy, tokens=tokens, measurements=measured)
    plan = fp8.plan(model, "tilewise")
    trained = fp8.apply(model, plan)
    trained(torch.randn(64, 256)).square().sum().backward()
    one, scales = 256 * 256, 256 * 2 * 4  # bytes of a layout: codes, and a scale in fp32 for each 128 of them
    text = "model: {{path: m}}\nfp8: {}\ndata: {{train: [{{path: d.jsonl}}]}}\n"
    text += "train: {{steps: 80, seq_length: 64, micro_batch: 1, global_batch: 1}}\nrun: {{dir: r}}\n"
    cfg = config.load_config_text(text.format("{recipe: blockwise}"))
    gemms = tuple(Candidate("0", gemm, "foundation", 1.0) for gemm in ("fwd", "dgrad", "wgrad"))
    space = Space(cfg, gemms, (), ("0", "1"), {"0": "blockwise"})
    coarse = {words: works for words, works in find_culprits._coarse_changes(space) if works is not None}
    rule = space.in_recipe(gemms, "tilewise").fp8.rules[0]
    every = "{recipe: tilewise, format: hybrid, lm_head: {recipe: tilewise}, candidates: [tilewise], "
    asked = config.load_config_text(text.format(every + "adapt: {every: 20, recipes: [tilewise]}}")).fp8
    return {
        "note of the plan": "tilewise cast weights twice: 2 bytes of codes per parameter" in plan.notes,
        "memory figure": states.code_bytes(plan, states.reached_by_backward(model)) == fp8.weight_cache_bytes(trained)
        == 3 * (one + scales),  # the first layer has no dgrad
        "measured plan": all(r.recipe is not None and r.recipe.name == "tilewise" for r in by_time.rows)
        and any("tilewise cast weights twice" in note for note in by_time.notes),
        "auto": "tilewise" in policy.candidates,
        "bisect": "tilewise everywhere" in coarse and rule.recipe == "tilewise",
        "ladder": ladder.finer_recipes("blockwise") == ("tilewise",),
        "configuration": {asked.recipe, asked.lm_head.recipe, *asked.candidates, *asked.adapt.recipes}
        == {"tilewise"} and "rowwise, mxfp8 and tilewise" in config.schema_text(),
        "default candidates": cfg.fp8.candidates == policy.candidates,
        "bench": "tilewise" in peers.RECIPES and "tilewise" not in peers.SHARED,
        "lent": fp8.recipe("blockwise", dgrad="tilewise").gemm_precisions()["dgrad"] == "tilewise",
        "help of a plan file": any("tilewise" in line for line in file.HELP),
    }  # fmt: skip
