"""Load state dicts into `fp8.AdamW`: its own are used unchanged; for torch's AdamW the moments are encoded.

`torch.optim.Optimizer.load_state_dict` casts floating states to the parameter's dtype, which would turn float8 codes
and fp32 scales into BF16, and does not validate. Here everything is checked before any change, and values are copied,
so the dict is not modified.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from octavo.fp8.optim.convert import encode
from octavo.fp8.optim.layout import Group, local_groups, num_groups, state_specs
from octavo.fp8.weights.shards import is_dtensor, plain, span

_FP32 = ("exp_avg", "exp_avg_sq")  # of torch's AdamW


@torch.no_grad()
def load(
    optimizer: Optimizer,
    state_dict: Mapping[str, Any],
    settle: Callable[[], None],
    fresh: Callable[[Tensor, Group], dict[str, Tensor]],
) -> None:
    """Fill an `fp8.AdamW` from a state dict of one, or of torch's AdamW, whose moments are encoded (a collective where
    a group of 128 is on several ranks; weights stay as they are, lower halves and masters too). ``settle`` and
    ``fresh`` are the optimizer's methods.

    A sharded parameter accepts shards like its own, or whole tensors, from which its rows are read. Hyperparameters
    come from the dict; missing ones do not change. Existing state tensors are overwritten in place.

    Warns with the note of :func:`old_coat_note`. Raises ValueError, before any change, for a dict without states or
    groups, groups of different sizes, states of parameters in no group, different formats, missing or unknown tensors,
    and different shapes or dtypes.
    """
    document = dict(state_dict)
    for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = before(optimizer, document)
        document = document if changed is None else changed
    missing = [key for key in ("state", "param_groups") if key not in document]
    if missing:
        raise ValueError(
            f"The state dict is missing {' and '.join(missing)}; its keys are "
            f"{', '.join(map(str, document)) or 'none'}. Pass the result of optimizer.state_dict(); from a checkpoint, "
            "only its optimizer part."
        )
    settle()
    mine, saved = optimizer.param_groups, document["param_groups"]
    sizes = [[len(g["params"]) for g in groups] for groups in (saved, mine)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"The state dict has groups of {sizes[0]} parameters, this optimizer groups of {sizes[1]}. Make the "
            "optimizer with the groups that were saved."
        )
    unknown = [number for number in document["state"] if all(number not in g["params"] for g in saved)]
    if unknown:
        raise ValueError(
            f"The state dict has a state of parameter {unknown[0]!r} ({len(unknown)} such in all), which is in none of "
            f"its groups of {sizes[0]} parameters. Load a state dict as optimizer.state_dict() gave it, whole."
        )
    # Everything is checked before the first tensor is written: a refused dict leaves the optimizer as it was.
    work = [entry for g, s in zip(mine, saved, strict=True) for entry in _check_group(g, s, document["state"])]
    for group, former in zip(mine, saved, strict=True):
        group.update({key: copy.deepcopy(former[key]) for key in group if key in former and key != "params"})
    for entry in work:
        p, group, values = entry.parameter, entry.group, entry.values
        state = optimizer.state.pop(p, {})
        if not values and not (entry.foreign and ("master" in state or "master_low" in state)):
            continue
        state = optimizer.state[p] = state or fresh(p, group)
        if entry.foreign:
            zero = torch.zeros(plain(p).numel(), device=plain(p).device)
            m, v = (_local_values(p, values[key]).reshape(-1).to(zero) if values else zero for key in _FP32)
            encode(p, group, state, m, v)
        else:
            for spec in state_specs(group["states"], group["master"], plain(p).dtype):
                value = values[spec.name]
                value = _local_values(p, value) if spec.row is None else _local_rows(p, value)
                plain(state[spec.name]).copy_(value.view(plain(state[spec.name]).shape))
        state["step"].fill_(float(values["step"]) if values else 0.0)
    if note := old_coat_note(optimizer):
        warnings.warn(note, stacklevel=3)
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)


def old_coat_note(optimizer: Optimizer) -> str | None:
    """Return a note on "coat" moments of version 0.4.0 or earlier, which stored the power k of a group exactly, while
    it is a multiple of 1/16 now; None if there are none. k is stored with the codes, so they decode exactly, and the
    next step writes them in the new format."""
    for group in optimizer.param_groups:
        for p in group["params"] if group.get("states") == "coat" else []:
            for key in ("exp_avg_figures", "exp_avg_sq_figures"):
                k = optimizer.state.get(p, {}).get(key, torch.zeros(1, 2))[:, 1] * 16
                odd = k[(k != k.floor()) & k.isfinite()]
                if len(odd):
                    return (
                        f"The moments are 'coat' as version 0.4.0 wrote it: {key} has powers as "
                        f"{float(odd[0]) / 16:.4f}, and this version cuts them to multiples of 1/16, as COAT's own "
                        "kernel does. They are read exactly and converted in the next step: training goes on, nearer "
                        "to fp32 moments than 0.4.0 would, not bit for bit as it."
                    )
    return None


class _Entry(NamedTuple):
    """A parameter, its group, and its values in the dict. `foreign`: the values come from torch's AdamW."""

    parameter: Tensor
    group: Group
    values: Mapping[str, Tensor]
    foreign: bool


def _check_group(group: Group, saved: Group, state: Mapping[int, Mapping[str, Tensor]]) -> Iterator[_Entry]:
    # torch's AdamW has no formats of states; its moments are encoded as they are loaded.
    foreign = "states" not in saved
    first: list[str | None] = saved.get("param_names") or group.get("param_names") or [None] * len(group["params"])
    names = [
        name or f"parameter {i} of shape {list(p.shape)}"
        for name, i, p in zip(first, saved["params"], group["params"], strict=True)
    ]
    if foreign:
        unsupported = [key for key in ("amsgrad", "maximize") if saved.get(key)]
        if unsupported:
            raise ValueError(
                f"The state dict is of an AdamW with {' and '.join(unsupported)}, beginning with {names[:1]}; "
                "fp8.AdamW has neither. Train on with torch.optim.AdamW, or begin with fresh states."
            )
    else:
        for key in ("states", "master"):
            if saved[key] != group[key]:
                raise ValueError(
                    f"The state dict keeps {key}={saved[key]!r} of {', '.join(names[:2])} and all of its group, this "
                    f"optimizer {key}={group[key]!r}. Make the optimizer with {key}={saved[key]!r}, or load it so "
                    "and convert with fp8.AdamW.copy_state."
                )
    for name, number, p in zip(names, saved["params"], group["params"], strict=True):
        values = state.get(number) or {}
        if values:
            _check_state(name, p, group, values, foreign)
        yield _Entry(p, group, values, foreign)


def _check_state(name: str, p: Tensor, group: Group, values: Mapping[str, Tensor], foreign: bool) -> None:
    kinds = {spec.name: spec for spec in state_specs(group["states"], group["master"], plain(p).dtype)}
    wanted = {"step", *(_FP32 if foreign else kinds)}
    if set(values) != wanted:
        raise ValueError(
            f"The state dict has {', '.join(sorted(values))} of {name}, where {', '.join(sorted(wanted))} are needed. "
            "Load a state dict of this kind of optimizer, whole."
        )
    whole, (first, last) = list(p.shape), local_groups(span(p))
    here = list(plain(p).shape)
    for key in sorted(wanted - {"step"}):
        value, spec = values[key], kinds.get(key) if not foreign else None
        if spec is not None and spec.row is not None:
            shapes = [[last - first, *spec.row], [num_groups(p.numel()), *spec.row]]
        else:
            shapes = [whole] if is_dtensor(value) or not is_dtensor(p) else [here, whole]
        right = value.is_floating_point() if spec is None else value.dtype == spec.dtype
        if not right or list(value.shape) not in shapes:
            raise ValueError(
                f"The state dict's {key} of {name} is {str(value.dtype)[6:]} {list(value.shape)}, where "
                f"{'floating point' if spec is None else str(spec.dtype)[6:]} {shapes[0]} is needed. Load it into the "
                "optimizer of the model, and the number of ranks, that it was made with."
            )


def _local_values(p: Tensor, value: Tensor) -> Tensor:
    """Return this rank's part of an element tensor, which is a shard or whole."""
    if is_dtensor(value) or not is_dtensor(p) or (value.shape == plain(p).shape and value.shape != p.shape):
        return plain(value)
    mine = span(p)
    return value.reshape(-1)[mine.start : mine.stop]


def _local_rows(p: Tensor, value: Tensor) -> Tensor:
    """Return this rank's rows of a group tensor, which is local or whole."""
    first, last = local_groups(span(p))
    return value if len(value) == last - first else value[first:last]
