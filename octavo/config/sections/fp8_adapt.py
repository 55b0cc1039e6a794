"""The section ``fp8.adapt``: precision that adapts during a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field

from octavo.base.recipe_specs import COARSE_TO_FINE, CURRENT_SCALING
from octavo.config.sections.names import FROM_LIST, Section, canonical_name, one_of

if TYPE_CHECKING:
    _Name = str
else:
    _Name = one_of(*CURRENT_SCALING)
_RecipeName = Annotated[_Name, BeforeValidator(canonical_name)]


class AdaptSection(Section):
    """Each GEMM moves between recipes and high precision by figures that are taken every `every` steps. The default
    thresholds come from the trust table (docs/numerics.md)."""

    every: int = Field(
        default=25,
        ge=1,
        le=10**9,
        description="Steps between checks; a check costs as much as a step with health figures.",
    )
    recipes: Annotated[tuple[_RecipeName, ...] | None, FROM_LIST] = Field(
        default=None,
        description="Recipes to try, in this order, between the plan's recipe and high precision; [] for none. Absent: "
        f"the recipes with smaller blocks, which come after it in {', '.join(COARSE_TO_FINE)}.",
    )
    sqnr_e4m3: float = Field(default=25.0, ge=0, le=60, description="Minimum SQNR of operands in E4M3, in dB.")
    sqnr_e5m2: float = Field(default=20.0, ge=0, le=60, description="Minimum SQNR of operands in E5M2, in dB.")
    underflow: float = Field(
        default=0.01, gt=0, le=1, description="Maximum share of values that become zero in operands of fwd and dgrad."
    )
    underflow_wgrad: float = Field(
        default=0.2, gt=0, le=1, description="Maximum share of values that become zero in operands of wgrad."
    )
    cosine: float = Field(
        default=0.95, gt=0, lt=1, description="Minimum cosine between a weight gradient and the one in high precision."
    )
    back: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="A GEMM moves back if its error would be at most this share of the limit (0.5: 3 dB less noise, "
        "half the underflow, half of 1 - cosine) ...",
    )
    patience: int = Field(default=3, ge=1, le=10**6, description="... in this many checks in a row.")
    budget: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Maximum share of a step's linear FLOPs that moves may put in high precision; the GEMMs with the "
        "largest errors come first.",
    )
    time: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Maximum share of the linear layers' time that moves into high precision may cost, by the times of "
        "a measured plan (recipe: auto on a GPU). Absent: no limit.",
    )


def _section_from_bool(value: Any) -> Any:
    """True as the section with its defaults, false as None."""
    return {True: {}, False: None}[value] if isinstance(value, bool) else value


Adapt = Annotated[
    AdaptSection | None, BeforeValidator(_section_from_bool, json_schema_input_type=AdaptSection | bool | None)
]
