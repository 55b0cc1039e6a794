"""Convert between formats: decode moments and weights of `fp8.AdamW` or torch's AdamW to fp32, and encode them.

Work is done a few thousand groups at a time, so that only the moments of one parameter exist in fp32. Moments are
rounded to nearest here, not stochastically as in a step. Precision that the new format does not have is lost:
fp32 -> fp8 -> fp32 does not restore the values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from octavo.fp8.arithmetic import master, moments
from octavo.fp8.arithmetic.moments import GROUP, LAYOUT, MaxOverRanks, StateSpec
from octavo.fp8.optim import sharded
from octavo.fp8.optim.layout import Group, local_groups, shard_like, state_specs
from octavo.fp8.weights.shards import Span, is_dtensor, plain, span

if TYPE_CHECKING:
    from torch.optim.optimizer import StateDict

_GROUPS = 1 << 13  # worked on at a time
_NEAREST = 1 << 15  # one half, instead of the random bits of a step


@torch.no_grad()
def to_torch(optimizer: torch.optim.Optimizer) -> StateDict:
    """Return a state dict for `torch.optim.AdamW`, with moments in fp32, sharded like their parameters.

    It is for an fp32 model; for a BF16 model convert the weights with :func:`fp32_weight` first. The moments of all
    parameters are in memory at once.
    """
    _wait_for_states(optimizer)
    order = {p: i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    form = torch.optim.AdamW([torch.zeros(1)]).state_dict()["param_groups"][0]
    groups, state = [], {}
    for group in optimizer.param_groups:
        settings = {key: group.get(key, default) for key, default in form.items()}
        groups.append({**settings, "params": [order[p] for p in group["params"]]})
        for p in group["params"]:
            if optimizer.state.get(p, {}).get("step"):
                m, v = decode(p, group, optimizer.state[p])
                shape = plain(p).shape
                state[order[p]] = {
                    "step": optimizer.state[p]["step"].detach().clone(),
                    "exp_avg": shard_like(p, m.view(shape)),
                    "exp_avg_sq": shard_like(p, v.view(shape)),
                }
    return {"state": state, "param_groups": groups}


@torch.no_grad()
def fp32_weight(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor:
    """Return a copy of the weight in fp32, as the optimizer stores it: from both halves, the `master` or the
    parameter."""
    _wait_for_states(optimizer)
    here, state = plain(parameter), optimizer.state.get(parameter, {})
    if "master_low" in state:
        return shard_like(parameter, master.join(here, plain(state["master_low"]).to(here.device)))
    return shard_like(parameter, plain(state.get("master", parameter)).to(here.device, torch.float32, copy=True))


@torch.no_grad()
def set_weight(optimizer: torch.optim.Optimizer | None, group: Group | None, parameter: Tensor, value: Tensor) -> None:
    """Set a weight to `value`, fp32 with the shape of this rank's part, in the parameter and in the state of the
    optimizer. `group`: its parameter group, or None if the optimizer does not have it. Call `fp8.invalidate` on the
    model afterwards."""
    state: Any = {} if optimizer is None or group is None else optimizer.state.get(parameter, {})
    if optimizer is not None and group is not None and not state and "states" in group:
        state_names = {spec.name for spec in state_specs(group["states"], group["master"], plain(parameter).dtype)}
        if state_names & {"master", "master_low"}:
            state = optimizer.state[parameter]
            state.update(cast(Any, optimizer).init_state(parameter, group))
    _write_weight(parameter, state, value)


@torch.no_grad()
def set_low(optimizer: torch.optim.Optimizer, model: nn.Module, lows: Mapping[str, Tensor]) -> None:
    """Set the lower halves of the weights of `model`, by parameter name, as returned by `models.load_split`.

    lows: int16 tensors with the shape of the whole parameter, or sharded like it. Parameters without an entry keep
    zeros. Entries of frozen parameters are ignored, because the model computes in BF16.

    Raises ValueError for an unknown name, a wrong shape or dtype, and a parameter whose master is not "bf16+16".
    """
    parameters = dict(model.named_parameters())
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    for name, low in lows.items():
        if name not in parameters:
            raise ValueError(
                f"Lower halves of {name} were given, but the model has no {name}. Load both from one folder."
            )
        p = parameters[name]
        if p not in group_of:
            continue  # frozen: the model computes in BF16
        group, local = group_of[p], span(p)
        if group.get("master") != "bf16+16":
            raise ValueError(
                f"Lower halves of {name} were given, but its master is {group.get('master', 'fp32')!r}, which has "
                "none. Use master='bf16+16', or load the model without (models.load)."
            )
        if low.shape != p.shape or low.dtype != torch.int16:
            raise ValueError(
                f"The lower halves of {name} are {low.dtype} {list(low.shape)}; int16 {list(p.shape)} are needed."
            )
        state = optimizer.state[p]
        if not state:
            state.update(cast(Any, optimizer).init_state(p, group))
        here = plain(low).reshape(-1) if is_dtensor(low) else low.reshape(-1)[local.start : local.stop]
        plain(state["master_low"]).view(-1).copy_(here)


@torch.no_grad()
def copy_state(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Copy weights, moments and settings (lr, betas, eps, weight_decay) of `source` to `target`, converting formats.

    Either can be an `fp8.AdamW` or torch's AdamW. They have the parameters of two models, in the same groups and order
    and with the same sharding. Other parameters and buffers are not copied. Collective call if `target` has groups of
    128 on several ranks. Call `fp8.invalidate` on the target's model afterwards.

    Raises ValueError if groups or shapes differ.
    """
    target_shapes, source_shapes = ([[p.shape for p in g["params"]] for g in o.param_groups] for o in (target, source))
    if target_shapes != source_shapes:
        raise ValueError(
            "The two optimizers have different parameters: groups of "
            f"{[len(g) for g in source_shapes]} and of {[len(g) for g in target_shapes]}, or different shapes. Use the "
            "same groups for both."
        )
    for new, old in zip(target.param_groups, source.param_groups, strict=True):
        new.update({key: old[key] for key in ("lr", "betas", "eps", "weight_decay")})
        for p, q in zip(new["params"], old["params"], strict=True):
            weight, old_state = plain(fp32_weight(source, q)), source.state.get(q)
            state = cast(Any, target).init_state(p, new) if "states" in new else {}
            if old_state and old_state["step"]:
                _set_moments(p, new, state, old_state["step"], *decode(q, old, old_state))
            _write_weight(p, state, weight)
            target.state.pop(p, None)
            if old_state or "master" in state or "master_low" in state:
                target.state[p] = state


def _wait_for_states(optimizer: torch.optim.Optimizer) -> None:
    if hasattr(optimizer, "settle"):  # an fp8.AdamW, whose states may still be in transfer
        optimizer.settle()


def decode(parameter: Tensor, group: Group, state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return copies of both moments of this rank's part of a parameter, fp32 [n], from `fp8.AdamW` or torch's AdamW."""
    kind = LAYOUT[group.get("states", "fp32")]
    if all(spec.row is None for spec in kind):
        m, v = (plain(state[spec.name]).reshape(-1).to(torch.float32, copy=True) for spec in kind)
        return m, v
    local = span(parameter)
    first, last = local_groups(local)
    flat = {spec.name: _flatten(state[spec.name], spec) for spec in kind}
    m, v = (torch.empty(local.stop - local.start, device=flat[kind[0].name].device) for _ in range(2))
    for a, b in _chunks(first, last):
        parts = {
            k.name: _gather_table(flat[k.name], local, a, b) if k.row is None else flat[k.name][a - first : b - first]
            for k in kind
        }
        for out, table in zip((m, v), moments.decode(group["states"], parts), strict=True):
            _scatter_table(out, local, a, table)
    return m, v


def encode(parameter: Tensor, group: Group, state: Mapping[str, Tensor], m: Tensor, v: Tensor) -> None:
    """Encode both moments of this rank's part of a parameter (fp32 [n]) into its state, rounded to nearest. Collective
    call if the parameter has groups on several ranks."""
    kind, states, local = LAYOUT[group["states"]], group["states"], span(parameter)
    first, last = local_groups(local)
    cut = sharded.cut_groups(parameter) if sharded.is_cut(parameter, states) else ()
    edges = [g for g in sorted({first, last - 1}) if g in cut and first < last]

    def store(rows: list[tuple[int, int]], agree: MaxOverRanks | None) -> None:
        m_table, v_table = (torch.cat([_gather_table(x, local, a, b) for a, b in rows]) for x in (m, v))
        random_bits = torch.full_like(m_table, _NEAREST, dtype=torch.int32)
        new = moments.encode(states, m_table, v_table, random_bits, agree)
        for spec in kind:
            to, at = _flatten(state[spec.name], spec), 0
            for a, b in rows:
                part = new[spec.name][at : at + b - a]
                at += b - a
                if spec.row is None:
                    _scatter_table(to, local, a, part)
                else:
                    to[a - first : b - first].copy_(part)

    for a, b in _chunks(first + (first in edges), last - (last - 1 in edges)):
        store([(a, b)], None)
    # Cut groups come last and together: their ranks exchange extrema in the same order on all ranks.
    if cut:
        agree = sharded.Agreement([(parameter, 0)], [(0, g) for g in edges], m.device)
        if edges:
            store([(g, g + 1) for g in edges], agree)
        agree.finish(states)


def _flatten(value: Tensor, spec: StateSpec) -> Tensor:
    return plain(value).view(-1) if spec.row is None else value


def _chunks(first: int, last: int) -> Iterator[tuple[int, int]]:
    for a in range(first, last, _GROUPS):
        yield a, min(a + _GROUPS, last)


def _gather_table(flat: Tensor, local: Span, first: int, last: int) -> Tensor:
    """Return the groups first to last of the whole parameter, [G, 128], with zeros for elements of other ranks."""
    a, b = max(first * GROUP, local.start), min(last * GROUP, local.stop)
    here = flat[a - local.start : b - local.start]
    if here.numel() == (last - first) * GROUP:
        return here.view(-1, GROUP)
    table = flat.new_zeros((last - first) * GROUP)
    table[a - first * GROUP : b - first * GROUP] = here
    return table.view(-1, GROUP)


def _scatter_table(flat: Tensor, local: Span, first: int, table: Tensor) -> None:
    """Copy this rank's elements of a table that begins with group `first` to `flat`; inverse of _gather_table."""
    a, b = max(first * GROUP, local.start), min(first * GROUP + table.numel(), local.stop)
    flat[a - local.start : b - local.start].copy_(table.reshape(-1)[a - first * GROUP : b - first * GROUP])


def _set_moments(p: Tensor, group: Group, state: dict[str, Tensor], step: Tensor, m: Tensor, v: Tensor) -> None:
    """Write fp32 moments after `step` steps to a state; for torch's AdamW in the dtype of its parameter."""
    if "states" in group:
        encode(p, group, state, m, v)
        state["step"].fill_(float(step))
        return
    shape, dtype = plain(p).shape, plain(p).dtype
    state["step"] = torch.tensor(float(step))
    state["exp_avg"], state["exp_avg_sq"] = (shard_like(p, x.view(shape).to(dtype)) for x in (m, v))


def _write_weight(p: Tensor, state: Mapping[str, Tensor], weight: Tensor) -> None:
    """Write an fp32 weight to a parameter and to its state."""
    here = plain(p)
    if "master_low" in state:
        high, low = master.split(weight)
        here.copy_(high)
        plain(state["master_low"]).copy_(low)
        return
    here.copy_(weight)
    if "master" in state:
        plain(state["master"]).copy_(weight)
