"""AdamW with 8-bit states, as a `torch.optim.Optimizer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar, cast, overload

import torch
from torch import Tensor

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

_PART = 1 << 22  # elements compared at a time where a BF16 weight was written from outside


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter, ICLR 2019) whose moments take two bytes a parameter instead of eight.

        optimizer = fp8.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)                     # fp32 weights
        optimizer = fp8.AdamW(model.bfloat16().parameters(), lr=1e-4, master="bf16+16")          # exactly as fp32 ones

    states: the format of the moments, by bytes per parameter: "fp8" 2.06, "coat" 2.19, "bf16" 4, "fp32" 8
        (:mod:`octavo.fp8.arithmetic.moments`).
    master: where the fp32 weight is: "fp32" in the parameter (or, of a BF16 parameter, in a state of 4 bytes);
        "bf16+16" in the BF16 parameter and 2 bytes more, exactly; "bf16+sr" nowhere: the BF16 parameter is
        rounded stochastically (:mod:`octavo.fp8.arithmetic.master`).
    seed: of the random bits that round second moments and "bf16+sr" weights.

    All but `params` may differ between parameter groups. A parameter without a gradient is skipped, a sparse gradient
    is taken as the dense one it stands for. Results do not depend on how parameters are sharded. Each parameter's state
    has `step` and the tensors of `moments.LAYOUT`, codes in the parameter's shape, made in its first step; from then on
    its dtype and shape and the group's `states` and `master` are settled.

    Weights may be written between two steps, as by `model.load_state_dict`: the next step starts from what it finds.
    If a BF16 parameter has an fp32 `master`, elements that the master no longer rounds to are taken from the
    parameter. Torch must see such a write: one through `p.data.copy_` leaves no trace, and the master wins.

    State dicts of torch's AdamW are loaded and encoded. The way back: a torch AdamW cannot take a state dict of this
    class, :meth:`to_torch` makes one that it can.

    Raises ValueError for settings that cannot be met, with what would be.
    """

    watch: Watch | None = None
    """Called with each parameter after its update, its group and the factor; its gradient is still there."""
    _places: Mapping[int, tuple[int, int]] = {}  # by id: see :meth:`_locate`
    _written: Mapping[Tensor, tuple[int, int, int]] = {}  # of parameters with a `master`: see :func:`_version_stamp`

    to_torch = convert.to_torch
    """``optimizer.to_torch()``: a state dict that ``torch.optim.AdamW`` loads, with the moments in fp32."""
    set_low = convert.set_low
    """``optimizer.set_low(model, lows)``: begin with these lower halves of the weights, for ``master="bf16+16"``."""
    copy_state = staticmethod(convert.copy_state)
    """``AdamW.copy_state(source, target)``: weights, moments and settings of one optimizer into another with other
    formats; either may be torch's AdamW."""

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
        """As torch's; settings that the group leaves out are the optimizer's."""
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
        """One step. `factor` (a number or a 0-d tensor, read on the device) multiplies every gradient: clipping by it
        costs no pass over the gradients. Returns what `closure` returns. Raises ValueError for a parameter that is no
        longer what its state was made for, before anything is written."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update([p for group in self.param_groups for p in group["params"] if p.grad is not None], factor)
        return loss

    @torch.no_grad()
    def update(self, parameters: Iterable[Tensor], factor: float | Tensor | None = None) -> None:
        """Step only `parameters`, each of which has a gradient; as :meth:`step` does for all, without its hooks."""
        sizes = [len(group["params"]) for group in self.param_groups]
        first = list(accumulate(sizes, initial=0))  # the number of each group's first parameter
        wanted: dict[int, dict[int, Tensor]] = {}  # by group and place: one order, whatever the order of `parameters`
        for p in parameters:
            of, at = self._locate(p)
            wanted.setdefault(of, {})[at] = p
            _check_parameter_state(p, self.param_groups[of], self.state.get(p, {}))
        if isinstance(factor, Tensor):
            if factor.numel() != 1:
                raise ValueError(
                    f"factor is a tensor of shape {list(factor.shape)}, and one number multiplies every gradient: take "
                    "a number or a 0-d tensor."
                )
            factor = factor.reshape(())
        for of in sorted(wanted):
            group = self.param_groups[of]
            work: dict[torch.device, list[Piece]] = {}
            shared: list[tuple[Tensor, Piece]] = []  # with groups of 128 that lie on several ranks
            copies = []
            for at, p in sorted(wanted[of].items()):
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
            for p in wanted[of].values():
                if self.watch is not None:
                    self.watch(p, group, factor)
                if "master" in self.state[p]:
                    self._record_write(p)

    def _locate(self, p: Tensor) -> tuple[int, int]:
        """The number of its group and the place of `p` in it. All places are written down once: update in backward
        asks for one parameter at a time, and a walk through all of them for each would be a square of their number."""
        of, at = self._places.get(id(p), (0, -1))
        if at < 0 or of >= len(self.param_groups) or not _is_at(self.param_groups[of], at, p):
            groups = (group["params"] for group in self.param_groups)
            self._places = {id(q): (i, k) for i, params in enumerate(groups) for k, q in enumerate(params)}
            if id(p) not in self._places:
                raise ValueError(f"A parameter of shape {list(p.shape)} is in no group: add_param_group takes it.")
        return self._places[id(p)]

    def piece(self, p: Tensor, group: Group, index: int) -> Piece:
        """The work of the next step on parameter `p` of `group`, number `index` of all: its state is made where it has
        none, and its step is counted. The weight of a parameter that is not contiguous is a copy."""
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
        """The state of a parameter before its first step, where this optimizer keeps states."""
        return layout.init_state(p, group)

    def _record_write(self, p: Tensor) -> None:
        if not self._written:  # a new dict: the one of the class is shared, and a copy begins without
            self._written = {}
        cast(dict[Tensor, tuple[int, int, int]], self._written)[p] = _version_stamp(p)

    def settle(self) -> None:
        """Wait until `state` holds what the last step wrote, where that takes time: here it always does."""

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Values as they were saved, of this class, or the moments of a torch AdamW, encoded; see
        :func:`octavo.fp8.optim.state_dict.load`. Raises ValueError for what does not fit, before anything changes."""
        state_dict_.load(self, state_dict, self.settle, self.init_state)
        self._written = {}  # masters are compared with their parameters in the next step


def make_hyper(group: Group) -> Hyper:
    """The settings of a parameter group, as an engine takes them."""
    beta1, beta2 = group["betas"]
    names = ("lr", "eps", "weight_decay", "states", "master", "seed")
    return Hyper(beta1=beta1, beta2=beta2, **{name: group[name] for name in names})


def _is_at(group: Group, at: int, p: Tensor) -> bool:
    return at < len(group["params"]) and group["params"][at] is p


def _version_stamp(p: Tensor) -> tuple[int, int, int]:
    """Changes with every write to a parameter or its shard that torch sees: its versions, its address."""
    return p._version, local_of(p)._version, plain(p).data_ptr()


def _update_master(weight: Tensor, master: Tensor) -> None:
    """Copy `weight` (BF16 [n]) into `master` (fp32 [n]) where the master does not round to it; all other elements keep
    their bits. Waits for the device only if the master is in host memory."""
    for exact, low in zip(master.split(_PART), weight.to(master.device).split(_PART), strict=True):
        exact.copy_(torch.where(exact.to(low.dtype) != low, low.float(), exact))


def _check_parameter_state(p: Tensor, group: Group, state: Mapping[str, Tensor]) -> None:
    """Raise ValueError for a parameter that cannot step because something changed since it was given or its state was
    made. It looks at no value."""
    _check_formats(group)
    _check_parameter(p, group["master"])
    if p.grad is not None and p.grad.shape != p.shape:
        raise ValueError(
            f"A parameter of shape {list(p.shape)} has a gradient of shape {list(p.grad.shape)}, and one of its own "
            "shape is needed. Call zero_grad() and run the backward again."
        )
    if not state:
        return
    wanted = {k.name: k.dtype for k in layout.state_specs(group["states"], group["master"], p.dtype)}
    dtypes = {name: x.dtype for name, x in state.items() if name != "step"}
    shape = next(x.shape for name, x in state.items() if name != "step" and name not in layout.PER_GROUP)
    if dtypes != wanted or shape != p.shape:
        raise ValueError(
            f"A parameter of shape {list(p.shape)} is {_dtype_name(p.dtype)} with states={group['states']!r} and "
            f"master={group['master']!r}, for which {_describe_dtypes(wanted)} are expected; its state was made for "
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
        raise ValueError(f"states={states!r} is none of {', '.join(STATES)}.")
    if kind not in MASTERS:
        raise ValueError(f"master={kind!r} is none of {', '.join(MASTERS)}.")


def _check_settings(group: Group) -> None:
    """Raise ValueError for settings of a parameter group that cannot be met."""
    _check_formats(group)
    lr, (beta1, beta2) = group["lr"], group["betas"]
    if not isinstance(lr, Tensor) and not lr >= 0:  # a tensor is not read: it may lie on a device
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
