"""A later version of Octavo, in which a recipe's name has other casts."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import pytest

from octavo.base.recipe_specs import SPECS
from octavo.fp8.arithmetic import recipe as recipes


def change_recipe(patch: pytest.MonkeyPatch, name: str = "blockwise", like: str = "blockwise_1d") -> None:
    """Give a name the casts of another recipe, for as long as ``patch`` holds."""
    changed = replace(SPECS[name], blocks=SPECS[like].blocks, scale=SPECS[like].scale)
    patch.setattr(recipes, "SPECS", MappingProxyType({**SPECS, name: changed}))
    # Without its cache, which has the names of this version.
    patch.setattr(recipes, "_gemm_precisions", lambda r: recipes.find_precisions(r, recipes.recipe))
