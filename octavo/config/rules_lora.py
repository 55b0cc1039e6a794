"""What frozen FP8 weights and adapters may not be combined with."""

from __future__ import annotations

from collections.abc import Iterator

from octavo.config.document import Path
from octavo.config.findings import Finding, glob_problem
from octavo.config.problems import nearest
from octavo.config.sections import COMPONENTS, FITTING, Component, Fp8Section, Sections

_PARTS: tuple[Path, ...] = tuple(("fp8", name) for name in COMPONENTS)


def rules(config: Sections) -> Iterator[Finding]:
    yield from _loaded(config)
    if config.lora is not None:
        yield from _targets(config)
        yield from _lora(config)


def kinds_of(config: Sections) -> dict[str, str]:
    """Component -> the kind of frozen weights it is loaded as (row, block, tensor); none for high precision."""
    asked = config.model.load_in_fp8
    return {name: word.removesuffix("wise") for name in COMPONENTS if (word := getattr(asked, name)) is not None}


def recipe_of(fp8: Fp8Section, name: str) -> str:
    """The recipe of a component; the projector's is off unless it is set."""
    part: Component | None = getattr(fp8, name)
    return (part and part.recipe) or ("off" if name == "image_projector" else fp8.recipe)


def _loaded(config: Sections) -> Iterator[Finding]:
    """Weights that are loaded as codes: nothing trains them, and one recipe multiplies by them."""
    fp8, kinds = config.fp8, kinds_of(config)
    for name, kind in kinds.items():
        where: Path = ("model", "load_in_fp8", name)
        if config.lora is None and name not in config.model.freeze:
            yield Finding(
                where,
                f"FP8 codes are not trained, and without `lora` the parameters of {name} are",
                f"train adapters beside them (`lora: {{}}`), or freeze the component (model.freeze: [{name}])",
                (("lora",), ("model", "freeze")),
            )
        if fp8.plan is not None:  # it names the recipes; the plan itself is held against the codes
            continue
        recipe, fitting = recipe_of(fp8, name), FITTING[kind]
        own = getattr(fp8, name)
        named: Path = ("fp8", name, "recipe") if own and own.recipe is not None else ("fp8", "recipe")
        if recipe not in (*fitting, "off"):
            other = next((recipes[0] for recipes in FITTING.values() if recipe in recipes), None)
            found = (
                "auto chooses a recipe, and codes are made for one"
                if recipe == "auto"
                else f"{recipe} multiplies by other codes than those of load_in_fp8: {fitting[0]}"
            )
            more = f", or load_in_fp8: {other}" if other else ""
            yield Finding(
                named,
                f"{found} ({name})",
                f"use {' or '.join(fitting)}, off (high precision, from the codes' values){more}",
                (where, ("fp8", name)),
            )
        param = fp8.param if own is None or own.param is None else own.param
        if param and config.lora is None:
            yield Finding(
                ("fp8", name, "param") if own and own.param is not None else ("fp8", "param"),
                f"param keeps trained weights beside their codes, and {name} is codes alone (load_in_fp8)",
                f"use fp8.{name}.param: false",
                (where, ("fp8", name)),
            )
    on = [name for name in COMPONENTS if recipe_of(fp8, name) != "off"]
    if fp8.plan is None and fp8.weight_codes == "recast" and kinds and on and set(on) <= set(kinds):
        yield Finding(
            ("fp8", "weight_codes"),
            "has no effect on weights that are codes (model.load_in_fp8)",
            "remove it",
            (("model", "load_in_fp8"), *_PARTS),
        )
    if kinds and config.lora is None and config.optimizer.master == "bf16+16":
        yield Finding(
            ("optimizer", "master"),
            "bf16+16 splits every weight while it is read, and weights that become codes have no halves",
            "use fp32 or bf16+sr, or leave load_in_fp8 out",
            (("model", "load_in_fp8"), ("lora",)),
        )
    if kinds and not config.model.keep_fp8:
        yield Finding(
            ("model", "keep_fp8"),
            "false dequantizes the weights that load_in_fp8 would quantize",
            "use one of them",
            (("model", "load_in_fp8"),),
        )


def _targets(config: Sections) -> Iterator[Finding]:
    lora = config.lora
    assert lora is not None
    for key, patterns in (("targets", lora.targets), ("exclude", lora.exclude)):
        for index, pattern in enumerate(patterns):
            path: Path = ("lora", key, index)
            if pattern in COMPONENTS:
                continue
            if why := glob_problem(pattern):
                yield Finding(
                    path,
                    f"{pattern!r} is neither a component nor a glob over module names: {why}",
                    f'use {", ".join(COMPONENTS)} or e.g. "**.q_proj"',
                )
            elif close := nearest(pattern, COMPONENTS, 0.8):
                yield Finding(path, f"unknown component {pattern!r}", f"did you mean {close}?")


def _lora(config: Sections) -> Iterator[Finding]:
    lora, fp8, optimizer = config.lora, config.fp8, config.optimizer
    assert lora is not None
    if lora.dtype == "fp32" and optimizer.master != "fp32":
        yield Finding(
            ("optimizer", "master"),
            f"{optimizer.master} updates BF16 parameters, and lora.dtype keeps A and B in fp32",
            "use `lora.dtype: bf16`, or `master: fp32`",
            (("lora", "dtype"),),
        )
    for name in ("", *COMPONENTS):
        part = getattr(fp8, name) if name else fp8
        if part is not None and part.param:
            yield Finding(
                ("fp8", name, "param") if name else ("fp8", "param"),
                "param keeps trained weights beside their codes, and the base of LoRA is not trained",
                "remove it; model.load_in_fp8 keeps the base as codes alone, which FSDP2 gathers as such",
                (("lora",),),
            )
    if lora.dora and lora.dropout:
        yield Finding(
            ("lora", "dropout"),
            "DoRA with dropout would need the base layer's product of the dropped input as well",
            "use `dropout: 0`, or `dora: false`",
            (("lora", "dora"),),
        )
    for name in ("", *COMPONENTS):
        part = getattr(fp8, name) if name else fp8
        if part is None or fp8.plan is not None or (part.recipe if name else fp8.recipe) in (None, "off"):
            continue
        fwd, dgrad = part.fwd or fp8.fwd, part.dgrad or fp8.dgrad
        if fwd == dgrad == "bf16" and (part.wgrad or fp8.wgrad) == "fp8":
            yield Finding(
                ("fp8", name, "fwd") if name else ("fp8", "fwd"),
                "a frozen base has no wgrad, so with fwd and dgrad in bf16 nothing would run in FP8",
                "use `recipe: off`, or leave one of them fp8",
                (("lora",), ("fp8", "dgrad")),
            )
