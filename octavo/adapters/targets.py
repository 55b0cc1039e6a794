"""Resolves the targets of adapters (components, globs and names) to full names, which are passed to PEFT.

A pattern is one of

    a component   foundation, image_encoder, image_projector, audio_encoder: all its linear layers and experts
    a glob        "**.q_proj", "model.language_model.layers.0.**" (:mod:`octavo.fp8.policy.globs`); a module means all
                  modules in it
    a suffix      "q_proj", "self_attn.q_proj": PEFT's target modules

The results are full names, so that an adapter has the same modules wherever it is loaded. Some linear layers cannot
have an adapter: see :data:`UNADAPTABLE`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from octavo import fp8
from octavo.adapters import experts
from octavo.adapters.errors import AdapterError
from octavo.fp8.policy import Row, covers, nearest
from octavo.models import WITHOUT_HEAD

if TYPE_CHECKING:
    from octavo.models import Family

UNADAPTABLE: Mapping[str, str] = {
    "lm_head": "the loss is computed from its weight in chunks, without calling the module, and RL compares "
    "log-probabilities of one head: an adapter there would have no effect",
    "embedding": "a look-up has no product to add to, and its weight is often shared with lm_head",
    "patch_embed": "it runs once for each image, on pixels; adapt the tower's blocks (image_encoder) instead",
    "router": "it decides which expert a token goes to; a change moves tokens, and servers use it without adapters",
    "subclass": "its class has its own forward, to which adding a low-rank product may be wrong",
}
"""Kinds of modules that cannot have an adapter, with the reason. A glob skips them; naming one is an error."""


def resolve_targets(
    model: nn.Module, family: Family | None, targets: Sequence[str], exclude: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the names of the layers to adapt, in model order: modules, and parameters for experts
    ("...experts.down_proj").

    family   maps modules to components; conventional names are used by default
    targets  components, globs or suffixes; each must match a layer that can have an adapter
    exclude  patterns of layers to exclude from the targets

    Raises AdapterError for a pattern that matches nothing (with the nearest names), one that names a layer of
    :data:`UNADAPTABLE` (with the reason), a malformed glob, and when no layer is left.
    """
    rows = fp8.describe_layers(model, None if family is None else family.components)
    usable = [row for row in rows if row.kind in ("linear", "experts")]
    chosen: set[str] = set()
    for pattern in targets:
        chosen.update(_match_pattern(pattern, rows, model, family))
    for pattern in exclude:
        out = {row.name for row in usable if row.component == pattern or _matches_row(pattern, row)}
        if not out:
            raise AdapterError(
                f"exclude: {pattern!r} matches no layer that could have an adapter.{_suggest_names(pattern, usable)}"
            )
        chosen -= out
    if not chosen:
        raise AdapterError(
            f"no layer is left to adapt: exclude ({', '.join(exclude)}) covers all that targets "
            f"({', '.join(targets)}) name. Exclude less."
        )
    return tuple(row.name for row in usable if row.name in chosen)


def _match_pattern(pattern: str, rows: Sequence[Row], model: nn.Module, family: Family | None) -> set[str]:
    # A pattern without a match gets one of three errors: its layers never have adapters, it covers only modules without
    # linear layers, or it matches nothing.
    if pattern in WITHOUT_HEAD:
        matched = {row.name for row in rows if row.component == pattern and row.kind in ("linear", "experts")}
        if not matched:
            has = dict.fromkeys(row.component for row in rows if row.component in WITHOUT_HEAD)
            raise AdapterError(
                f"targets: this {family.name if family else type(model).__name__} has no linear layers in {pattern}; "
                f"it has {', '.join(has) or 'none in any component'}. Remove {pattern}."
            )
        return matched
    hit = [row for row in rows if row.component == pattern or _matches_row(pattern, row)]
    matched = {row.name for row in hit if row.kind in ("linear", "experts") and row.component != pattern}
    if matched:
        return matched
    names = {name: module for name, module in model.named_modules() if name}
    tables = [name for name, m in names.items() if isinstance(m, nn.Embedding) and _covers(pattern, name)]
    for name, kind in [*((row.name, row.kind) for row in hit), *((name, "embedding") for name in tables)]:
        raise AdapterError(
            f"targets: {pattern!r} names {name} ({kind}), which cannot have an adapter: {UNADAPTABLE[kind]}. Remove it."
        )
    covered = [name for name in names if _covers(pattern, name)]
    why = f"names {covered[0]}, which contains no linear layer" if covered else "matches nothing"
    usable = [row for row in rows if row.kind in ("linear", "experts")]
    raise AdapterError(
        f"targets: {pattern!r} {why}. A target is a component ({', '.join(WITHOUT_HEAD)}) or a glob over module names."
        f"{_suggest_names(pattern, usable)}"
    )


def _matches_row(pattern: str, row: Row) -> bool:
    return _covers(pattern, row.name) or (row.kind == "experts" and _covers(pattern, row.module))


def _covers(pattern: str, name: str) -> bool:
    try:
        return covers(pattern, name) or name.endswith("." + pattern)
    except ValueError as error:
        raise AdapterError(f"lora: {error}") from error


def _suggest_names(pattern: str, rows: Sequence[Row]) -> str:
    close = nearest(pattern, [*WITHOUT_HEAD, *(row.name for row in rows)])
    return f" The nearest names: {', '.join(close)}." if close else ""


def split_targets(model: nn.Module, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (modules, parameters of experts) among target names."""
    expert_parameters = experts.expert_parameters(model)
    return [n for n in names if n not in expert_parameters], [n for n in names if n in expert_parameters]


def names_lost_by_peft(model: nn.Module, config: Any) -> tuple[str, ...]:
    """Return modules that PEFT would not adapt although ``config`` (a LoraConfig) names them.

    For some mixture-of-experts families PEFT treats the last part of a target's name as a name in an older checkpoint,
    in which experts were modules: a dense "mlp.gate_proj" of such a model becomes the experts' gate_up_proj.
    """
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # older versions of PEFT do not convert names
        return ()
    if not hasattr(getattr(model, "config", None), "model_type"):
        return ()
    twin = copy.deepcopy(config)
    before = set(twin.target_modules or ())
    try:
        convert_peft_config_for_transformers(twin, model=model, conversions=None)
    except ValueError:  # PEFT has converted some of the names and misses related ones
        twin.target_modules = {n for n in before if n.rpartition(".")[2] not in ("gate_proj", "up_proj", "down_proj")}
    return tuple(sorted(before - set(twin.target_modules or ())))
