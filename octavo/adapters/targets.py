"""Which modules get adapters: components, globs and names, resolved to the very modules before PEFT sees them.

A pattern is one of

    a component   foundation, image_encoder, image_projector, audio_encoder: all its linear layers and experts
    a glob        "**.q_proj", "model.language_model.layers.0.**" (:mod:`octavo.fp8.policy.globs`); a module means all
    in it a suffix      "q_proj", "self_attn.q_proj": what PEFT calls a target module

What comes out are full names, so that an adapter means the same modules wherever it is read. Some linear maps never
get an adapter: see :data:`NEVER`.
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

NEVER: Mapping[str, str] = {
    "lm_head": "the loss is computed from its weight in chunks, without calling the module, and RL compares "
    "log-probabilities of one head: an adapter there would be passed by",
    "embedding": "a look-up has no product to add to, and the weight is often that of lm_head",
    "patch_embed": "it runs once an image, over pixels; adapt the tower's blocks (image_encoder) instead",
    "router": "it decides which expert sees a token; a change there moves tokens, and servers read it as it is",
    "subclass": "its class computes in its own way, beside which a low-rank product need not be right",
}
"""Kinds of modules that get no adapter, with the reason. A glob passes them by; naming one is an error."""


def targets_of(
    model: nn.Module, family: Family | None, targets: Sequence[str], exclude: Sequence[str] = ()
) -> tuple[str, ...]:
    """The names of what gets an adapter, in model order: modules, and parameters for experts ("...experts.down_proj").

    family   says which module belongs to which component; None goes by conventional names
    targets  components, globs or suffixes; each must match something that can have an adapter
    exclude  the same, left out though a target names them

    Raises AdapterError for a pattern that matches nothing (with the nearest names), one that names what never gets an
    adapter (with the reason), a malformed glob, and when nothing is left.
    """
    rows = fp8.describe_layers(model, None if family is None else family.components)
    usable = [row for row in rows if row.kind in ("linear", "experts")]
    chosen: set[str] = set()
    for pattern in targets:
        chosen.update(_matching(pattern, rows, model, family))
    for pattern in exclude:
        out = {row.name for row in usable if row.component == pattern or _hits(pattern, row)}
        if not out:
            raise AdapterError(
                f"exclude: {pattern!r} matches no layer that could have an adapter.{_close(pattern, usable)}"
            )
        chosen -= out
    if not chosen:
        raise AdapterError(
            f"nothing is left to adapt: exclude ({', '.join(exclude)}) covers all that targets "
            f"({', '.join(targets)}) name. Exclude less."
        )
    return tuple(row.name for row in usable if row.name in chosen)


def _matching(pattern: str, rows: Sequence[Row], model: nn.Module, family: Family | None) -> set[str]:
    if pattern in WITHOUT_HEAD:
        found = {row.name for row in rows if row.component == pattern and row.kind in ("linear", "experts")}
        if not found:
            has = dict.fromkeys(row.component for row in rows if row.component in WITHOUT_HEAD)
            raise AdapterError(
                f"targets: this {family.name if family else type(model).__name__} has no linear layers in {pattern}; "
                f"it has {', '.join(has) or 'none in any component'}. Remove {pattern}."
            )
        return found
    hit = [row for row in rows if row.component == pattern or _hits(pattern, row)]
    found = {row.name for row in hit if row.kind in ("linear", "experts") and row.component != pattern}
    if found:
        return found
    names = {name: module for name, module in model.named_modules() if name}
    tables = [name for name, m in names.items() if isinstance(m, nn.Embedding) and _covers(pattern, name)]
    for name, kind in [*((row.name, row.kind) for row in hit), *((name, "embedding") for name in tables)]:
        raise AdapterError(
            f"targets: {pattern!r} names {name} ({kind}), which gets no adapter: {NEVER[kind]}. Remove it."
        )
    there = [name for name in names if _covers(pattern, name)]
    why = f"names {there[0]}, which holds no linear layer" if there else "matches nothing"
    usable = [row for row in rows if row.kind in ("linear", "experts")]
    raise AdapterError(
        f"targets: {pattern!r} {why}. A target is a component ({', '.join(WITHOUT_HEAD)}) or a glob over module names."
        f"{_close(pattern, usable)}"
    )


def _hits(pattern: str, row: Row) -> bool:
    return _covers(pattern, row.name) or (row.kind == "experts" and _covers(pattern, row.module))


def _covers(pattern: str, name: str) -> bool:
    try:
        return covers(pattern, name) or name.endswith("." + pattern)
    except ValueError as error:
        raise AdapterError(f"lora: {error}") from error


def _close(pattern: str, rows: Sequence[Row]) -> str:
    close = nearest(pattern, [*WITHOUT_HEAD, *(row.name for row in rows)])
    return f" The nearest names: {', '.join(close)}." if close else ""


def split(model: nn.Module, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """(modules, parameters of experts) among target names."""
    of_experts = experts.parameters_of(model)
    return [n for n in names if n not in of_experts], [n for n in names if n in of_experts]


def taken_over(model: nn.Module, config: Any) -> tuple[str, ...]:
    """Modules that PEFT would not adapt though ``config`` (a LoraConfig) names them.

    For some mixture-of-experts families PEFT reads targets by their last name as those of older checkpoints, where
    experts were modules: a dense "mlp.gate_proj" of such a model becomes the experts' gate_up_proj.
    """
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # older PEFT does not
        return ()
    if not hasattr(getattr(model, "config", None), "model_type"):
        return ()
    twin = copy.deepcopy(config)
    before = set(twin.target_modules or ())
    try:
        convert_peft_config_for_transformers(twin, model=model, conversions=None)
    except ValueError:  # it took some of the names over, and misses their siblings
        twin.target_modules = {n for n in before if n.rpartition(".")[2] not in ("gate_proj", "up_proj", "down_proj")}
    return tuple(sorted(before - set(twin.target_modules or ())))
