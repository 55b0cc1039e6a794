"""The section ``fp8``: settings of the whole model, of components, of the head and of layers by name."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_serializer

from octavo.base.recipe_specs import CANDIDATES, DEFAULT_RECIPE, FORMATS, SPECS, join_words, recipes_with_format
from octavo.config.sections.fp8_adapt import Adapt
from octavo.config.sections.names import (
    COMPONENTS,
    FROM_LIST,
    RECIPES,
    Candidate,
    Format,
    Gemm,
    HeadName,
    Recipe,
    Section,
)
from octavo.config.sections.text_types import FilePath, Text

PARTS = tuple(f"fp8.{name}" for name in COMPONENTS)
_TWICE = join_words(tuple(name for name, spec in SPECS.items() if spec.layouts > 1))
_DEFAULTS = ", ".join(f"{form} for {join_words(recipes_with_format(form))}" for form in FORMATS)


class Component(Section):
    """FP8 settings of one component; absent ones are inherited from the `fp8` section."""

    recipe: Recipe | None = Field(default=None, description="Recipe of this component's linear layers.")
    format: Format | None = Field(default=None, description="e4m3 everywhere, or hybrid (E5M2 for dy).")
    param: bool | None = Field(default=None, description="Whether weights are FP8 between steps.")
    activations: Literal["bf16", "fp8"] | None = Field(
        default=None,
        description="What blocks of this component keep for backward in addition to the inputs of linear layers.",
    )
    fwd: Gemm | None = Field(default=None, description="Precision of the forward GEMM y = x wT.")
    dgrad: Gemm | None = Field(default=None, description="Precision of the GEMM dx = dy w.")
    wgrad: Gemm | None = Field(default=None, description="Precision of the GEMM dw = dyT x.")


class Head(Section):
    """FP8 settings of the language model's head; its weight stays in high precision and may be tied to the
    embedding."""

    recipe: HeadName = Field(default="off", description="Recipe of the head's three GEMMs; nothing is inherited.")
    format: Format | None = Field(default=None, description="e4m3 everywhere, or hybrid (E5M2 for dy).")
    fwd: Gemm | None = Field(default=None, description="Precision of the GEMM of logits, x = h wT.")
    dgrad: Gemm | None = Field(default=None, description="Precision of the GEMM dh = dx w.")
    wgrad: Gemm | None = Field(default=None, description="Precision of the GEMM dw = dxT h.")


class Rule(Section):
    """FP8 settings of the modules whose names match; the last rule that matches wins over component and model."""

    match: Text = Field(
        min_length=1,
        description="Glob over the dotted segments of a module's name, anchored at both ends: * stays within a "
        "segment, ** spans any number of them. Must match something.",
    )
    recipe: Recipe | None = Field(default=None, description="Recipe of the matching linear layers.")
    format: Format | None = Field(default=None, description="e4m3 everywhere, or hybrid (E5M2 for dy).")
    fwd: Gemm | None = Field(default=None, description="Precision of the forward GEMM y = x wT.")
    dgrad: Gemm | None = Field(default=None, description="Precision of the GEMM dx = dy w.")
    wgrad: Gemm | None = Field(default=None, description="Precision of the GEMM dw = dyT x.")
    first: int | None = Field(
        default=None, ge=1, le=10**9, description="The rule applies only to the first N steps, as in a warm-up."
    )
    last: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="The rule applies only to this last share of train.steps: 0.1 with recipe off ends the run in high "
        "precision.",
    )


class Fp8Section(Section):
    """What runs in FP8 and how: model, then component, then rules."""

    recipe: Recipe = Field(
        default=DEFAULT_RECIPE,
        description="How operands are scaled, in every component without a recipe, including the projector: "
        f"off (high precision), {', '.join(RECIPES[1:])}; or auto: measured at the start of the "
        "run, FP8 only where it is faster (without a GPU: by a table, see docs/plan.md). If it is absent and "
        f"components are named (other than off), only those run in FP8, {DEFAULT_RECIPE} unless they name a recipe.",
    )
    format: Format | None = Field(
        default=None,
        description=f"e4m3 everywhere, or hybrid (E5M2 for dy). Absent: the recipe's default ({_DEFAULTS}).",
    )
    param: bool = Field(
        default=False,
        description="Keep the weights of FP8 layers in FP8 between steps, with high-precision master weights; FSDP2 "
        "gathers the FP8 codes and scales, one byte per parameter.",
    )
    activations: Literal["bf16", "fp8"] = Field(
        default="bf16",
        description="What blocks keep for backward in addition to the inputs of their FP8 layers: bf16, unchanged; or "
        "fp8 for inputs of norms, gate and up, and inputs of activations, with products recomputed in backward.",
    )
    weight_codes: Literal["keep", "recast", "both"] = Field(
        default="keep",
        description="FP8 codes of weights: keep them from one optimizer step to the next (1 byte per parameter; "
        f"2 for {_TWICE}), recast them at each use (0 bytes, one more cast per GEMM), or keep both layouts of codes "
        "that forward and dgrad share (2 bytes, and backward does not transpose weights; in one process also for a "
        "frozen FP8 base, from the first backward on).",
    )
    backend: Text = Field(
        default="auto",
        min_length=1,
        description="Kernels to use: auto, or a backend that `octavo doctor` lists. If a named backend cannot run "
        "every "
        "FP8 GEMM, the run is refused.",
    )
    fwd: Gemm = Field(default="fp8", description="Precision of the forward GEMM y = x wT.")
    dgrad: Gemm = Field(default="fp8", description="Precision of the GEMM dx = dy w.")
    wgrad: Gemm = Field(default="fp8", description="Precision of the GEMM dw = dyT x.")
    image_encoder: Component | None = Field(default=None, description="Settings of the vision tower.")
    image_projector: Component | None = Field(default=None, description="Settings of the projector (merger).")
    audio_encoder: Component | None = Field(default=None, description="Settings of the audio encoder.")
    audio_projector: Component | None = Field(default=None, description="Settings of the audio projector.")
    foundation: Component | None = Field(default=None, description="Settings of the language model.")
    lm_head: Head | None = Field(
        default=None,
        description="FP8 for the head's GEMMs (logits and both gradients); off unless its recipe is set here. With "
        "train.logits: chunked it runs chunk by chunk; the codes of its weight take 1 more byte per parameter.",
    )
    rules: Annotated[tuple[Rule, ...], FROM_LIST] = Field(
        default=(), description="Exceptions by module name; the last that matches wins."
    )
    candidates: Annotated[tuple[Candidate, ...], FROM_LIST] = Field(
        default=CANDIDATES,
        min_length=1,
        description="The recipes that auto chooses among.",
    )
    fuse: Literal["off", "on", "auto"] = Field(
        default="off",
        description="Fuse gated MLPs and the norms before FP8 layers with those layers where possible (names and "
        "checkpoints do not change): on or off. auto, the default of version 0.4.0, means off.",
    )
    adapt: Adapt = Field(
        default=None,
        description="Move GEMMs between recipes and high precision during the run, by their figures at checks: true, "
        "false, or a mapping of settings (see docs/adapt.md).",
    )
    plan: FilePath | None = Field(
        default=None,
        min_length=1,
        description="A plan file (octavo plan FILE --save, or the plan.json of a run), relative to the configuration "
        "file; it replaces recipe, components and rules.",
    )

    def recipe_of(self, name: str) -> str:
        """Return the recipe of a component, else the recipe of the whole model."""
        part: Component | None = getattr(self, name)
        return (part and part.recipe) or self.recipe

    @property
    def in_use(self) -> bool:
        """True if any layer between the embedding and the head may run in FP8."""
        has_fp8_rule = any(rule.recipe not in (None, "off") for rule in self.rules)
        return has_fp8_rule or any(self.recipe_of(name) != "off" for name in COMPONENTS)

    @field_serializer("fuse")
    def _write_auto_as_off(self, value: str) -> str:
        """Write auto as off, so that a run of version 0.4.0 resumes: its settings are compared as written."""
        return "off" if value == "auto" else value
