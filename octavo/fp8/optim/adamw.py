"""AdamW with 8-bit states, as a `torch.optim.Optimizer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar, cast, overload

import torch
from torch import Tensor

from octavo.base.wording import did_you_mean
from octavo.fp8.arithmetic.adamw import MASTERS, Hyper, Piece
from octavo.fp8.arithmetic.moments import STATES, MaxOverRanks
from octavo.fp8.arithmetic.philox import LIMIT
from octavo.fp8.optim import convert, layout, sharded
from octavo.fp8.optim import state_dict as state_dict_
from octavo.fp8.optim.engine import select_engine
from octavo.fp8.optim.layout import Group
from octavo.fp8.weights.shards import local_of, plain, span

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT, StateDict

_Loss = TypeVar("_Loss")
Watch = Callable[[Tensor, Group, "float | Tensor | None"], None]

_PART = 1 << 22  # elements compared at a time after an external write to a BF16 weight


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter, ICLR 2019) with moments of two bytes per parameter instead of eight.

        optimizer = fp8.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)                     # fp32 weights
        optimizer = fp8.AdamW(model.bfloat16().parameters(), lr=1e-4, master="bf16+16")          # same bits as fp32

    states: the format of the moments, by bytes per parameter: "fp8" 2.06, "coat" 2.19, "bf16" 4, "fp32" 8
        (:mod:`octavo.fp8.arithmetic.moments`).
    master: where the fp32 weight is stored: "fp32" in the parameter (for a BF16 parameter, in a state of 4 bytes);
        "bf16+16" in the BF16 parameter and 2 further bytes, exactly; "bf16+sr" not at all: the BF16 parameter is
        rounded stochastically (:mod:`octavo.fp8.arithmetic.master`).
    seed: seed of the random bits that round second moments and "bf16+sr" weights.

    All arguments except `params` can differ between parameter groups. Parameters without a gradient are skipped, and
    sparse gradients are converted to dense ones. Results do not depend on sharding. The state of a parameter has `step`
    and the tensors of `moments.LAYOUT`, with codes in the shape of the parameter. It is created in the first step;
    after that the dtype and shape of the parameter, and `states` and `master` of its group, cannot change.

    Weights can be written between steps, as by `model.load_state_dict`; the next step starts from the new values. If a
    BF16 parameter has an fp32 `master`, elements that no longer match the rounded master are copied from the parameter.
    Torch must detect such a write: a write through `p.data.copy_` is not detected, and the master is used.

    State dicts of torch's AdamW can be loaded and are encoded. For the reverse, :meth:`to_torch` returns a state dict
    that torch's AdamW can load.

    Raises ValueError for invalid settings.
    """

    watch: Watch | None = None
    """Called after each update with the parameter, its group and the factor; the gradient still exists."""
    _places: Mapping[int, tuple[int, int]] = {}  # by id: see :meth:`_locate`
    _written: Mapping[Tensor, tuple[int, int, int]] = {}  # of parameters with a `master`: see :func:`_version_stamp`

    to_torch = convert.to_torch
    """``optimizer.to_torch()``: a state dict that ``torch.optim.AdamW`` loads, with the moments in fp32."""
    set_low = convert.set_low
    """``optimizer.set_low(model, lows)``: set the lower halves of the weights, for ``master="bf16+16"``."""
    copy_state = staticmethod(convert.copy_state)
    """``AdamW.copy_state(source, target)``: copy weights, moments and settings to an optimizer with different formats;
    either can be torch's AdamW."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        states: str = "fp8",
        master: str = "fp32",
        seed: int = 0,
    ) -> None:
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults = {**numbers, "states": states, "master": master, "seed": seed}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group; missing settings default to the optimizer's."""
        super().add_param_group(param_group)
        try:
            _check_settings(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None, *, factor: float | Tensor | None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], _Loss], *, factor: float | Tensor | None = None) -> _Loss: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], _Loss] | None = None, *, factor: float | Tensor | None = None) -> _Loss | None:
        """Run one step and return the result of `closure`. `factor` (a number or a 0-d tensor, read on the device)
        multiplies all gradients, so that clipping needs no separate pass. Raises ValueError, before any write, if a
        parameter no longer matches its state."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update([p for group in self.param_groups for p in group["params"] if p.grad is not None], factor)
        return loss

    @torch.no_grad()
    def update(self, parameters: Iterable[Tensor], factor: float | Tensor | None = None) -> None:
        """Step only `parameters`, which must have gradients. Unlike :meth:`step`, does not run step hooks."""
        sizes = [len(group["params"]) for group in self.param_groups]
        first = list(accumulate(sizes, initial=0))  # the number of each group's first parameter
        requested: dict[
            int, dict[int, Tensor]
        ] = {}  # by group and index, so that the order of `parameters` is irrelevant
        for p in parameters:
            of, at = self._locate(p)
            requested.setdefault(of, {})[at] = p
            _check_parameter_state(p, self.param_groups[of], self.state.get(p, {}))
        if isinstance(factor, Tensor):
            if factor.numel() != 1:
                raise ValueError(
                    f"factor is a tensor of shape {list(factor.shape)}, but a single number multiplies all gradients: "
                    "use a number or a 0-d tensor."
                )
            factor = factor.reshape(())
        for of in sorted(requested):
            group = self.param_groups[of]
            work: dict[torch.device, list[Piece]] = {}
            shared: list[tuple[Tensor, Piece]] = []  # parameters with groups of 128 on several ranks
            copies = []
            for at, p in sorted(requested[of].items()):
                piece = self.piece(p, group, first[of] + at)
                if sharded.is_cut(p, group["states"]):
                    shared.append((p, piece))
                else:
                    work.setdefault(piece.weight.device, []).append(piece)
                if not plain(p).is_contiguous():
                    copies.append((plain(p), piece.weight))
            for pieces in work.values():
                self.run(pieces, make_hyper(group), factor, None)
            sharded.step(shared, make_hyper(group), factor, self.run)
            for weight, stepped in copies:
                weight.copy_(stepped.view(weight.shape))
            for p in requested[of].values():
                if self.watch is not None:
                    self.watch(p, group, factor)
                if "master" in self.state[p]:
                    self._record_write(p)

    def _locate(self, p: Tensor) -> tuple[int, int]:
        """Return the index of the group of `p`, and the index of `p` in it. Indices are cached, because update in
        backward requests one parameter at a time, and a search for each would take quadratic time."""
        of, at = self._places.get(id(p), (0, -1))
        if at < 0 or of >= len(self.param_groups) or not _is_at(self.param_groups[of], at, p):
            groups = (group["params"] for group in self.param_groups)
            self._places = {id(q): (i, k) for i, params in enumerate(groups) for k, q in enumerate(params)}
            if id(p) not in self._places:
                raise ValueError(f"A parameter of shape {list(p.shape)} is in no group. Add it with add_param_group.")
        return self._places[id(p)]

    def piece(self, p: Tensor, group: Group, index: int) -> Piece:
        """Prepare the next step of parameter `p` of `group`, with index `index`: create its state if it has none, and
        increment its step. The weight of a noncontiguous parameter is a copy."""
        state = self.state[p]
        if not state:
            state.update(self.init_state(p, group))
        elif "master" in state and self._written.get(p) != _version_stamp(p):
            self.settle()
            _update_master(plain(p).contiguous().view(-1), plain(state["master"]).view(-1))
        state["step"] += 1
        grad = cast(Tensor, p.grad)
        if grad.is_sparse:
            grad = grad.to_dense()
        flat = {
            name: x if name in layout.PER_GROUP else plain(x).view(-1) for name, x in state.items() if name != "step"
        }
        return Piece(
            weight=plain(p).contiguous().view(-1),
            grad=plain(grad).contiguous().view(-1),
            state=flat,
            start=span(p).start,
            index=index,
            step=int(state["step"]),
        )

    def run(
        self, pieces: Sequence[Piece], hyper: Hyper, factor: float | Tensor | None, agree: MaxOverRanks | None
    ) -> None:
        """Step pieces of one device, in place. ``factor`` multiplies every gradient. ``agree``: see ``moments.encode``;
        it is given one column for each of :func:`~octavo.fp8.arithmetic.adamw.find_edges`, in that order."""
        select_engine(pieces[0].weight.device)(pieces, hyper, factor, agree)

    def init_state(self, p: Tensor, group: Group) -> dict[str, Tensor]:
        """Return the initial state of a parameter."""
        return layout.init_state(p, group)

    def _record_write(self, p: Tensor) -> None:
        if not self._written:  # a new dict, because the one of the class is shared
            self._written = {}
        cast(dict[Tensor, tuple[int, int, int]], self._written)[p] = _version_stamp(p)

    def settle(self) -> None:
        """Wait until `state` has the results of the last step. Needed only for offloaded states."""

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state dict of this class, or of torch's AdamW, whose moments are encoded; see
        :func:`octavo.fp8.optim.state_dict.load`. Raises ValueError for a mismatch, before any change."""
        state_dict_.load(self, state_dict, self.settle, self.init_state)
        self._written = {}  # masters are compared with their parameters in the next step


def make_hyper(group: Group) -> Hyper:
    """Return the settings of a parameter group for an engine."""
    beta1, beta2 = group["betas"]
    names = ("lr", "eps", "weight_decay", "states", "master", "seed")
    return Hyper(beta1=beta1, beta2=beta2, **{name: group[name] for name in names})


def _is_at(group: Group, at: int, p: Tensor) -> bool:
    return at < len(group["params"]) and group["params"][at] is p


def _version_stamp(p: Tensor) -> tuple[int, int, int]:
    """Return versions and address of a parameter, which change with each write that torch detects."""
    return p._version, local_of(p)._version, plain(p).data_ptr()


def _update_master(weight: Tensor, master: Tensor) -> None:
    """Copy elements of `weight` (BF16 [n]) to `master` (fp32 [n]) if the master does not round to them; other elements
    keep their bits. Waits for the device only if the master is in host memory."""
    for exact, low in zip(master.split(_PART), weight.to(master.device).split(_PART), strict=True):
        exact.copy_(torch.where(exact.to(low.dtype) != low, low.float(), exact))


def _check_parameter_state(p: Tensor, group: Group, state: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a parameter, its gradient or its group no longer matches its state. Does not read values."""
    _check_formats(group)
    _check_parameter(p, group["master"])
    if p.grad is not None and p.grad.shape != p.shape:
        raise ValueError(
            f"A parameter of shape {list(p.shape)} has a gradient of shape {list(p.grad.shape)}, and one of its own "
            "shape is needed. Call zero_grad() and run the backward again."
        )
    if not state:
        return
    requested = {k.name: k.dtype for k in layout.state_specs(group["states"], group["master"], p.dtype)}
    dtypes = {name: x.dtype for name, x in state.items() if name != "step"}
    shape = next(x.shape for name, x in state.items() if name != "step" and name not in layout.PER_GROUP)
    if dtypes != requested or shape != p.shape:
        raise ValueError(
            f"A parameter of shape {list(p.shape)} is {_dtype_name(p.dtype)} with states={group['states']!r} and "
            f"master={group['master']!r}, for which {_describe_dtypes(requested)} are expected; its state was made for "
            f"shape {list(shape)} and has {_describe_dtypes(dtypes)}. Put back what was changed after its first step, "
            "or make a new optimizer (fp8.AdamW.copy_state converts states from one to another)."
        )


def _describe_dtypes(dtypes: Mapping[str, torch.dtype]) -> str:
    return ", ".join(f"{name} {_dtype_name(dtype)}" for name, dtype in dtypes.items())


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_formats(group: Group) -> None:
    states, kind = group["states"], group["master"]
    if states not in STATES:
        raise ValueError(f"states={states!r} is none of {', '.join(STATES)}.{did_you_mean(states, STATES)}")
    if kind not in MASTERS:
        raise ValueError(f"master={kind!r} is none of {', '.join(MASTERS)}.")


def _check_settings(group: Group) -> None:
    """Raise ValueError for invalid settings of a parameter group."""
    _check_formats(group)
    lr, (beta1, beta2) = group["lr"], group["betas"]
    if not isinstance(lr, Tensor) and not lr >= 0:  # a tensor is not read, because it may be on a device
        raise ValueError(f"lr={lr} is not a learning rate: take 0 or more.")
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr is a tensor of shape {list(lr.shape)}: take a number or a tensor of one element.")
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ValueError(f"betas=({beta1}, {beta2}) must lie in [0, 1), as (0.9, 0.999) do.")
    if not group["eps"] >= 0 or not group["weight_decay"] >= 0:
        raise ValueError(f"eps={group['eps']} and weight_decay={group['weight_decay']} must be 0 or more.")
    if not (isinstance(group["seed"], int) and 0 <= group["seed"] < 1 << 64):
        raise ValueError(f"seed={group['seed']!r} is no integer of 64 bits: take one from 0 to 2^64 - 1.")
    for p in group["params"]:
        _check_parameter(p, group["master"])


def _check_parameter(p: Tensor, kind: str) -> None:
    if p.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"A parameter of shape {list(p.shape)} is {p.dtype}: fp8.AdamW steps fp32 and BF16 weights. Convert the "
            "model with .float() or .bfloat16()."
        )
    if kind != "fp32" and p.dtype != torch.bfloat16:
        raise ValueError(
            f"master={kind!r} keeps weights in BF16, but a parameter of shape {list(p.shape)} is {p.dtype}. Convert "
            "the model with .bfloat16(), or take master='fp32'."
        )
    if p.numel() > LIMIT:
        raise ValueError(f"A parameter of {p.numel()} elements is too large for random bits: split it in two.")
