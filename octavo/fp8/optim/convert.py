"""From one way of storing to another: moments and weights in fp32, out of any `fp8.AdamW` or torch's, and back in.

Work goes a few thousand groups at a time, so that no more than one parameter's moments exist in fp32. A moment is
encoded rounded to nearest here: there is no next step to make up for a chance. What the new format cannot hold is lost,
for good: fp32 -> fp8 -> fp32 is not where it began.
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
_NEAREST = 1 << 15  # one half, in place of what a step adds before it cuts


@torch.no_grad()
def to_torch(optimizer: torch.optim.Optimizer) -> StateDict:
    """A state dict that `torch.optim.AdamW` loads: the moments in fp32, sharded like their parameters.

    Made for an fp32 model; of a BF16 one take the weights from :func:`fp32_weight` first. The moments of all parameters
    are in memory at once.
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
    """The weight that the optimizer steps, in fp32 and a copy: of "bf16+16" both halves, of a `master` that one."""
    _wait_for_states(optimizer)
    here, state = plain(parameter), optimizer.state.get(parameter, {})
    if "master_low" in state:
        return shard_like(parameter, master.join(here, plain(state["master_low"]).to(here.device)))
    return shard_like(parameter, plain(state.get("master", parameter)).to(here.device, torch.float32, copy=True))


@torch.no_grad()
def set_weight(optimizer: torch.optim.Optimizer | None, group: Group | None, parameter: Tensor, value: Tensor) -> None:
    """Begin with this value of a weight, fp32 in the shape of this rank's part: into the parameter and into what the
    optimizer keeps of it; `group`: its parameter group (None: the optimizer does not hold it). Follow it with
    `fp8.invalidate` of the model."""
    state: Any = {} if optimizer is None or group is None else optimizer.state.get(parameter, {})
    if optimizer is not None and group is not None and not state and "states" in group:
        beside = {spec.name for spec in state_specs(group["states"], group["master"], plain(parameter).dtype)}
        if beside & {"master", "master_low"}:
            state = optimizer.state[parameter]
            state.update(cast(Any, optimizer).init_state(parameter, group))
    _write_weight(parameter, state, value)


@torch.no_grad()
def set_low(optimizer: torch.optim.Optimizer, model: nn.Module, lows: Mapping[str, Tensor]) -> None:
    """Begin with these lower halves of the weights of `model`, by parameter name, as `models.load_split` gives them.

    lows: int16 in the whole parameter's shape, of which this rank's rows are taken where it is sharded; or sharded
    alike. A parameter without keeps zeros. Those of frozen parameters, which the optimizer does not hold, are not
    needed: the model computes in BF16.

    Raises ValueError for a name that the model lacks, another shape or dtype, and for a parameter whose master is not
    "bf16+16": nothing would read them.
    """
    parameters = dict(model.named_parameters())
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    for name, low in lows.items():
        if name not in parameters:
            raise ValueError(f"Lower halves of {name} were given, which the model lacks. Load both from one folder.")
        p = parameters[name]
        if p not in group_of:
            continue
        group, mine = group_of[p], span(p)
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
        here = plain(low).reshape(-1) if is_dtensor(low) else low.reshape(-1)[mine.start : mine.stop]
        plain(state["master_low"]).view(-1).copy_(here)


@torch.no_grad()
def copy_state(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Weights, moments and settings (lr, betas, eps, weight_decay) of `source` into `target`, each in its own formats.

    Either may be an `fp8.AdamW` or torch's AdamW; they hold the parameters of two models, in the same groups and order,
    sharded alike. Parameters that they do not hold, and buffers, are for `load_state_dict` of the model. A collective
    where `target` has groups of 128 on several ranks. Follow it with `fp8.invalidate` of the target's model.

    Raises ValueError where groups or shapes differ.
    """
    ours, theirs = ([[p.shape for p in g["params"]] for g in o.param_groups] for o in (target, source))
    if ours != theirs:
        raise ValueError(
            "The two optimizers hold other parameters: groups of "
            f"{[len(g) for g in theirs]} and of {[len(g) for g in ours]}, or of other shapes. Make the target's groups "
            "as the source's are."
        )
    for new, old in zip(target.param_groups, source.param_groups, strict=True):
        new.update({key: old[key] for key in ("lr", "betas", "eps", "weight_decay")})
        for p, q in zip(new["params"], old["params"], strict=True):
            weight, former = plain(fp32_weight(source, q)), source.state.get(q)
            state = cast(Any, target).init_state(p, new) if "states" in new else {}
            if former and former["step"]:
                _set_moments(p, new, state, former["step"], *decode(q, old, former))
            _write_weight(p, state, weight)
            target.state.pop(p, None)
            if former or "master" in state or "master_low" in state:
                target.state[p] = state


def _wait_for_states(optimizer: torch.optim.Optimizer) -> None:
    if hasattr(optimizer, "settle"):  # an fp8.AdamW, whose states may be on their way
        optimizer.settle()


def decode(parameter: Tensor, group: Group, state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Both moments of this rank's part of a parameter, fp32 [n], copies; of any `fp8.AdamW` or of torch's."""
    kind = LAYOUT[group.get("states", "fp32")]
    if all(spec.row is None for spec in kind):
        m, v = (plain(state[spec.name]).reshape(-1).to(torch.float32, copy=True) for spec in kind)
        return m, v
    mine = span(parameter)
    first, last = local_groups(mine)
    flat = {spec.name: _flatten(state[spec.name], spec) for spec in kind}
    m, v = (torch.empty(mine.stop - mine.start, device=flat[kind[0].name].device) for _ in range(2))
    for a, b in _chunks(first, last):
        parts = {
            k.name: _gather_table(flat[k.name], mine, a, b) if k.row is None else flat[k.name][a - first : b - first]
            for k in kind
        }
        for out, table in zip((m, v), moments.decode(group["states"], parts), strict=True):
            _scatter_table(out, mine, a, table)
    return m, v


def encode(parameter: Tensor, group: Group, state: Mapping[str, Tensor], m: Tensor, v: Tensor) -> None:
    """Both moments of this rank's part of a parameter (fp32 [n]) into its state, rounded to nearest. A collective where
    the parameter has groups that lie on several ranks."""
    kind, states, mine = LAYOUT[group["states"]], group["states"], span(parameter)
    first, last = local_groups(mine)
    cut = sharded.cut_groups(parameter) if sharded.is_cut(parameter, states) else ()
    edges = [g for g in sorted({first, last - 1}) if g in cut and first < last]

    def store(rows: list[tuple[int, int]], agree: MaxOverRanks | None) -> None:
        m_table, v_table = (torch.cat([_gather_table(x, mine, a, b) for a, b in rows]) for x in (m, v))
        chance = torch.full_like(m_table, _NEAREST, dtype=torch.int32)
        new = moments.encode(states, m_table, v_table, chance, agree)
        for spec in kind:
            to, at = _flatten(state[spec.name], spec), 0
            for a, b in rows:
                part = new[spec.name][at : at + b - a]
                at += b - a
                if spec.row is None:
                    _scatter_table(to, mine, a, part)
                else:
                    to[a - first : b - first].copy_(part)

    for a, b in _chunks(first + (first in edges), last - (last - 1 in edges)):
        store([(a, b)], None)
    # Groups that a border cuts come last and together: their ranks exchange extrema, in one order on all ranks.
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


def _gather_table(flat: Tensor, mine: Span, first: int, last: int) -> Tensor:
    """Groups first to last of the whole parameter, [G, 128], from this rank's elements; zero where others' are."""
    a, b = max(first * GROUP, mine.start), min(last * GROUP, mine.stop)
    here = flat[a - mine.start : b - mine.start]
    if here.numel() == (last - first) * GROUP:
        return here.view(-1, GROUP)
    table = flat.new_zeros((last - first) * GROUP)
    table[a - first * GROUP : b - first * GROUP] = here
    return table.view(-1, GROUP)


def _scatter_table(flat: Tensor, mine: Span, first: int, table: Tensor) -> None:
    """The inverse: a table's elements of this rank, which begins with group `first`, into `flat`."""
    a, b = max(first * GROUP, mine.start), min(first * GROUP + table.numel(), mine.stop)
    flat[a - mine.start : b - mine.start].copy_(table.reshape(-1)[a - first * GROUP : b - first * GROUP])


def _set_moments(p: Tensor, group: Group, state: dict[str, Tensor], step: Tensor, m: Tensor, v: Tensor) -> None:
    """fp32 moments after `step` steps into a state; a new one for torch's AdamW, in the dtype of its parameter."""
    if "states" in group:
        encode(p, group, state, m, v)
        state["step"].fill_(float(step))
        return
    shape, dtype = plain(p).shape, plain(p).dtype
    state["step"] = torch.tensor(float(step))
    state["exp_avg"], state["exp_avg_sq"] = (shard_like(p, x.view(shape).to(dtype)) for x in (m, v))


def _write_weight(p: Tensor, state: Mapping[str, Tensor], weight: Tensor) -> None:
    """An fp32 weight into a parameter and what else holds it."""
    here = plain(p)
    if "master_low" in state:
        high, low = master.split(weight)
        here.copy_(high)
        plain(state["master_low"]).copy_(low)
        return
    here.copy_(weight)
    if "master" in state:
        plain(state["master"]).copy_(weight)
