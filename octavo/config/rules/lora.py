"""Rules on frozen FP8 weights and adapters."""

from __future__ import annotations

from collections.abc import Iterator

from octavo.base.recipe_specs import RECIPES_OF_KIND
from octavo.config.rules.findings import Finding, finding, glob_problem
from octavo.config.sections.all_sections import Sections
from octavo.config.sections.foreign_words import component_of
from octavo.config.sections.fp8 import PARTS
from octavo.config.sections.names import COMPONENTS
from octavo.config.yaml.problems import describe_value


def rules(config: Sections) -> Iterator[Finding]:
    """Yield the findings on `lora` and on `model.load_in_fp8`."""
    yield from _loaded(config)
    if config.lora is not None:
        yield from _targets(config)
        yield from _lora(config)


def _loaded(config: Sections) -> Iterator[Finding]:
    """Rules on weights that are loaded as codes: they are not trained, and only certain recipes multiply by them."""
    fp8, kinds = config.fp8, config.model.load_in_fp8.kinds
    for name, kind in kinds.items():
        where = f"model.load_in_fp8.{name}"
        if config.lora is None and name not in config.model.freeze:
            reason = f"FP8 codes cannot be trained, and without `lora` the parameters of {name} are"
            fix = f"train adapters (`lora: {{}}`), or freeze the component (model.freeze: [{name}])"
            yield finding(where, reason, fix, "lora", "model.freeze")
        if fp8.plan is not None:  # the plan names the recipes; it is compared with the codes when it is loaded
            continue
        recipe, fitting = fp8.recipe_of(name), RECIPES_OF_KIND[kind]
        part = getattr(fp8, name)
        if recipe not in (*fitting, "off"):
            fitting_kind = next((recipes[0] for recipes in RECIPES_OF_KIND.values() if recipe in recipes), None)
            reason = (
                "auto chooses a recipe, and codes fit only some"
                if recipe == "auto"
                else f"{recipe} does not multiply by the codes of load_in_fp8: {fitting[0]}"
            )
            fix = f"use {' or '.join(fitting)}, off (high precision, from the codes' values)"
            fix += f", or load_in_fp8: {fitting_kind}" if fitting_kind else ""
            key = f"fp8.{name}.recipe" if part and part.recipe is not None else "fp8.recipe"
            yield finding(key, f"{reason} ({name})", fix, where, f"fp8.{name}")
        param = fp8.param if part is None or part.param is None else part.param
        if param and config.lora is None:
            key = f"fp8.{name}.param" if part and part.param is not None else "fp8.param"
            reason = f"param keeps trained weights and their codes, and {name} has only codes (load_in_fp8)"
            yield finding(key, reason, f"use fp8.{name}.param: false", where, f"fp8.{name}")
    on = [name for name in COMPONENTS if fp8.recipe_of(name) != "off"]
    if fp8.plan is None and fp8.weight_codes == "recast" and kinds and on and set(on) <= set(kinds):
        reason = "has no effect on weights that are codes (model.load_in_fp8)"
        yield finding("fp8.weight_codes", reason, "remove it", "model.load_in_fp8", *PARTS)
    if kinds and config.lora is None and config.optimizer.master == "bf16+16":
        reason = "bf16+16 splits every weight while it is read, and weights that become codes cannot be split"
        fix = "use fp32 or bf16+sr, or remove load_in_fp8"
        yield finding("optimizer.master", reason, fix, "model.load_in_fp8", "lora")
    twin = config.model.fp8_twin
    if twin is not None and twin.of is None and "foundation" not in kinds:  # a resolved one is a record
        reason = "names codes for the frozen base, and load_in_fp8 does not say of which kind"
        fix = "set model.load_in_fp8 to the kind of the twin (blockwise, rowwise or tensorwise), or remove it"
        yield finding("model.fp8_twin", reason, fix, "model.load_in_fp8")
    if kinds and not config.model.keep_fp8:
        reason = "false dequantizes the weights that load_in_fp8 would quantize"
        yield finding("model.keep_fp8", reason, "use one of them", "model.load_in_fp8")


def _targets(config: Sections) -> Iterator[Finding]:
    lora = config.lora
    assert lora is not None
    for key, patterns in (("targets", lora.targets), ("exclude", lora.exclude)):
        for index, pattern in enumerate(patterns):
            where = f"lora.{key}.{index}"
            if pattern in COMPONENTS:
                continue
            if why := glob_problem(pattern):
                reason = f"{describe_value(pattern)} is neither a component nor a glob over module names: {why}"
                yield finding(where, reason, f'use {", ".join(COMPONENTS)} or e.g. "**.q_proj"')
            elif close := component_of(pattern, COMPONENTS):
                yield finding(where, f"unknown component {describe_value(pattern)}", f"did you mean {close}?")


def _lora(config: Sections) -> Iterator[Finding]:
    lora, fp8, optimizer = config.lora, config.fp8, config.optimizer
    assert lora is not None
    if lora.dtype == "fp32" and optimizer.master != "fp32":
        reason = f"{optimizer.master} updates BF16 parameters, and lora.dtype keeps A and B in fp32"
        yield finding("optimizer.master", reason, "use `lora.dtype: bf16`, or `master: fp32`", "lora.dtype")
    parts = {"fp8": fp8, **{f"fp8.{name}": part for name in COMPONENTS if (part := getattr(fp8, name)) is not None}}
    for key, part in parts.items():
        if part.param:
            reason = "param keeps trained weights and their codes, and the base of LoRA is not trained"
            fix = "remove it; model.load_in_fp8 keeps only codes of the base, which FSDP2 gathers"
            yield finding(f"{key}.param", reason, fix, "lora")
    if lora.dora and lora.dropout:
        reason = "DoRA with dropout would also need the base layer's product of the dropped input"
        yield finding("lora.dropout", reason, "use `dropout: 0`, or `dora: false`", "lora.dora")
    for key, part in parts.items():
        if fp8.plan is not None or part.recipe in (None, "off"):
            continue
        fwd, dgrad = part.fwd or fp8.fwd, part.dgrad or fp8.dgrad
        if fwd == dgrad == "bf16" and (part.wgrad or fp8.wgrad) == "fp8":
            reason = "a frozen base has no wgrad, so with fwd and dgrad in bf16 nothing would run in FP8"
            fix = "use `recipe: off`, or set one of them to fp8"
            yield finding(f"{key}.fwd", reason, fix, "lora", "fp8.dgrad")
