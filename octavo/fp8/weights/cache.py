"""FP8 codes of weights, cast once per optimizer step and never stale.

A tensor's version counter is not enough for such a cache: fused AdamW on the CPU, ``p.data = ...`` and ``.to()`` change
a weight without incrementing it, and FSDP2's gathered parameter keeps version 0 while its values change. Codes are
valid while all of these are the same: the parameter's storage (the object, not only its address), its version, address
and dtype, and the weight version. (The Parameter object itself is no criterion: checkpointing passes an alias of it to
the backward.) The weight version rises

* at every step of every ``torch.optim`` optimizer (a process-wide post-step hook),
* when a state dict is loaded into the module and when ``.to()``, ``.cuda()``, ``.half()`` pass over it,
* when a parameter is assigned to the module. FSDP2 also swaps the sharded and the gathered parameter this way, in any
  module whose class has its own ``__setattr__``: full-size codes do not outlive resharding.

In-place writes through ``.data`` are not detected: they change neither version nor address. A hand-written
``p.data -= lr * p.grad``, an EMA swap by ``p.data.copy_()`` and PEFT's ``merge_adapter`` on an FP8 layer write this
way. Call :func:`invalidate` after them, or write under ``torch.no_grad()`` to the parameter itself.
:func:`octavo.fp8.weights.stale_codes` finds stale codes by casting a sample of each weight again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.kernels.capture import are_weights_constant, is_capturing
from octavo.fp8.kernels.registry import Backend
from octavo.fp8.weights import versions as clock
from octavo.fp8.weights.fp8_tensor import Fp8Weight, Master, master_of
from octavo.fp8.weights.shards import is_whole, local_of
from octavo.fp8.weights.versions import watch_optimizers

# The cache of a tensor that arrives without its layer, as in a compiled graph, by the address of its storage. The weak
# reference prevents reuse of that address, and the geometry distinguishes the weight from a part of it.
_Geometry = tuple[int | torch.SymInt, torch.Size, tuple[int, ...]]
_caches: dict[int, tuple[StorageWeakRef, Callable[[], WeightCache | None], _Geometry]] = {}


def codes_of(weight: Tensor) -> WeightCache | None:
    """Return the cache of the layer whose whole weight this tensor is, or None if there is none."""
    entry = _caches.get(weight.untyped_storage()._cdata)
    return entry[1]() if entry is not None and entry[2] == _geometry(weight) else None


# Modules in high precision that are counted, and which of them a storage belongs to, likewise by address.
_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_owners: dict[int, tuple[StorageWeakRef, weakref.ref[nn.Module]]] = {}


def register_owner(module: nn.Module) -> None:
    """Let :func:`owner_of` find a module in high precision by its parameters."""
    _modules.add(module)


def owner_of(weight: Tensor) -> nn.Module | None:
    """Return the registered module that a tensor in a compiled graph is a parameter of, or None."""
    address = weight.untyped_storage()._cdata
    if (entry := _owners.get(address)) is None or entry[1]() is None:
        # Parameters move, and FSDP2 swaps them: look at the present ones.
        _owners.clear()
        for module in list(_modules):
            for parameter in module._parameters.values():
                if type(parameter) in (Tensor, nn.Parameter) and not parameter.is_meta:  # type: ignore[union-attr]
                    storage = parameter.untyped_storage()  # type: ignore[union-attr]
                    _owners[storage._cdata] = StorageWeakRef(storage), weakref.ref(module)
        entry = _owners.get(address)
    return None if entry is None else entry[1]()


def _geometry(weight: Tensor) -> _Geometry:
    return weight.storage_offset(), weight.shape, weight.stride()


class WeightSlice(NamedTuple):
    """The (N, K) matrix of a parameter that a GEMM uses: the expert ``slot`` (all experts [E, N, K] if None), stored as
    (K, N) if ``transposed``, or the ``rows`` (from, to) of a weight that is used in blocks."""

    slot: int | None = None
    transposed: bool = False
    rows: tuple[int, int] | None = None

    def shape(self, parameter: Tensor) -> tuple[int, int]:
        """Return (N, K) as the parameter stores it."""
        n, k = parameter.shape[-2:]
        return (n, k) if self.rows is None else (self.rows[1] - self.rows[0], k)

    def of(self, parameter: Tensor) -> Tensor:
        if isinstance(parameter, Fp8Weight):
            matrix = parameter.values(self.slot)
        else:
            matrix = parameter.detach() if self.slot is None else parameter.detach()[self.slot]
        matrix = matrix if self.rows is None else matrix[slice(*self.rows)]
        return matrix.mT if self.transposed else matrix


class WeightCache:
    """The codes of one parameter by part and cast. ``casts`` counts the casts, for tests and diagnostics.

    If ``keep`` is False, codes are cast at each use and not kept (``Policy.weight_codes="recast"``). If ``both`` is
    True, codes that forward and dgrad share are kept in two layouts (``Policy.weight_codes="both"``). A weight that
    FSDP2 gathered as FP8 contains its codes (:mod:`octavo.fp8.weights.fp8_tensor`), as does a frozen weight, for which
    this cache keeps only dgrad's layout, from its first use on. For a frozen weight in rows, the blocks of dgrad are
    columns; these codes are cast at each use and not kept.

    Copies and pickles of a module start with an empty cache: codes are derived data. Creating a cache starts the watch
    on optimizers, because a pickle may bring a model into a process that never converted one.
    """

    def __init__(self, keep: bool = True, both: bool = False, layer: str = "") -> None:
        watch_optimizers()
        self.keep, self.both = keep, both
        self.layer = layer  # the name under which the GEMMs of this weight are counted
        self.casts = 0
        self.block: int | None = None  # rows of the weight that are cast at a time, or None for all
        self.captured = False  # True if the last codes were cast into a CUDA graph, without being cached
        self._codes: dict[tuple[WeightSlice, CastSpec], Quantized] = {}
        self._for_dgrad: dict[tuple[WeightSlice, CastSpec], Quantized] = {}
        # A weak reference to the weight's storage, so that its address cannot be reused.
        self._source: StorageWeakRef | None = None
        self._stamp: tuple[object, ...] = ()
        self._sharded: Callable[[], Tensor | None] = NoneType  # a call returns None
        self._address = 0  # of the storage under which this cache is registered

    def __deepcopy__(self, memo: dict[int, object]) -> WeightCache:
        return WeightCache(self.keep, self.both, self.layer)

    def __reduce__(self) -> tuple[type[WeightCache], tuple[bool, bool, str]]:
        return WeightCache, (self.keep, self.both, self.layer)

    def __len__(self) -> int:
        return len(self._codes)

    def drop(self) -> None:
        """Drop all codes and free their memory."""
        self._codes.clear()
        self._for_dgrad.clear()
        self._source, self._stamp = None, ()

    def on_parameter_set(self, value: object) -> None:
        """Called when a parameter is assigned to the module: under FSDP2 the sharded one (resharding) or the gathered
        one."""
        self.drop()
        if not is_whole(value):
            self._sharded = weakref.ref(value)  # type: ignore[assignment]
        elif isinstance(value, Tensor):
            self.register(value)

    def register(self, weight: Tensor) -> None:
        """Register as the cache that :func:`codes_of` returns for this weight."""
        if isinstance(weight, Fp8Weight):
            return  # such layers run outside compiled graphs and pass their cache
        storage = weight.untyped_storage()
        address = storage._cdata
        if address != self._address:
            _unregister(self._address, self)
            self._address = address
        _caches[address] = (
            StorageWeakRef(storage),
            weakref.ref(self, lambda _: _unregister(address)),
            _geometry(weight),
        )

    def get(
        self,
        parameter: Tensor,
        part: WeightSlice,
        spec: CastSpec,
        backend: Backend,
        forward: bool,
        cast: Callable[..., Quantized] | None = None,
        shared: bool = False,
    ) -> Quantized:
        """Return the codes of ``part`` of ``parameter`` under ``spec``, casting them if there are no valid ones.

        ``cast`` replaces the backend's ``quantize``, for example by ``quantize_experts``. If ``shared`` is True, dgrad
        multiplies by the codes of the forward, which are in the forward's layout. With ``both``, the cast also produces
        dgrad's layout; otherwise dgrad's GEMMs transpose the codes, with scales that are transposed once.

        Only a forward replaces the cached codes. If the values differ in the backward (a weight that was offloaded and
        returned, gathered again, or replaced), they are cast and not cached. Codes are
        neither kept nor reused during a CUDA graph capture, unless weights do not change while the graph is in use
        (`capture.assume_constant_weights`): then it reads existing codes.
        """
        self.captured = False
        if isinstance(parameter, Fp8Weight):
            codes = parameter.codes(spec, part.slot)
            if codes is not None:
                return codes if forward or not shared else self._frozen_codes(parameter, part, codes, backend)
        self.captured = _is_capturing(parameter) and not (
            are_weights_constant() and self._has_codes(parameter, part, spec)
        )
        cast = cast or backend.quantize
        if isinstance(parameter, Fp8Weight) and parameter.frozen:  # a cast that differs from its codes is not cached
            self.casts += 1
            return cast(part.of(parameter), spec)
        # A tensor of inference mode has no version counter: an edit could not be detected. A CUDA graph must contain
        # the cast, or replays would multiply by the weight of the capture.
        keep = self.keep and not parameter.is_inference() and not self.captured
        stamp = self._stamp_of(parameter) if keep else ()
        if not keep or not (forward or self._stamp == stamp):
            self.casts += 1
            return cast(part.of(parameter), spec)
        if self._stamp != stamp:
            self._for_dgrad.clear()
            self._codes.clear()
            self._source, self._stamp = StorageWeakRef(parameter.untyped_storage()), stamp
            self.register(parameter)
        codes = self._codes.get((part, spec))
        if codes is None:
            # A later training step may use codes that were cast in inference mode.
            with torch.inference_mode(False), torch.no_grad():
                matrix = part.of(parameter)
                if not (self.both and shared):
                    codes = cast(matrix, spec)
                elif matrix.dim() == 2:
                    codes, self._for_dgrad[part, spec] = backend.quantize_both(matrix, spec, spec)
                else:
                    codes, self._for_dgrad[part, spec] = (cast(matrix, spec, contract=c) for c in (1, 0))
            self._codes[part, spec] = codes
            self.casts += 1
        if forward or not shared:
            return codes
        for_dgrad = self._for_dgrad.get((part, spec))
        if for_dgrad is None:
            with torch.inference_mode(False), torch.no_grad():
                for_dgrad = self._for_dgrad[part, spec] = backend.reorder_scales(codes, 0)
        return for_dgrad

    def _frozen_codes(self, parameter: Fp8Weight, part: WeightSlice, codes: Quantized, backend: Backend) -> Quantized:
        """Return existing codes in the layout of dgrad. Gathered codes are not kept, because FSDP2 frees them."""
        stored = parameter.first_tensor()
        if parameter.frozen is None or self._sharded() is not None or stored.is_inference() or _is_capturing(stored):
            return codes
        stamp = (weakref.ref(parameter.frozen), stored._version, self.both)
        if self._stamp != stamp:
            self.drop()
            self._stamp = stamp
        for_dgrad = self._for_dgrad.get((part, codes.spec))
        if for_dgrad is None:
            with torch.inference_mode(False), torch.no_grad():
                for_dgrad = backend.copy_for_gemm(codes, 0) if self.both else backend.reorder_scales(codes, 0)
            self._for_dgrad[part, codes.spec] = for_dgrad
        return for_dgrad

    def _has_codes(self, parameter: Tensor, part: WeightSlice, spec: CastSpec) -> bool:
        """Return True if there are valid codes."""
        return (part, spec) in self._codes and self.is_valid(parameter)

    def is_valid(self, parameter: Tensor) -> bool:
        """Return True if :meth:`get` would return cached codes for the parameter."""
        if not self._codes or not is_whole(parameter) or parameter.is_inference():
            return False
        return self._stamp == self._stamp_of(parameter)

    def _stamp_of(self, parameter: Tensor) -> tuple[object, ...]:
        """Return a stamp that changes with the values of a weight: storage, version, address and the weight version."""
        if isinstance(parameter, Fp8Weight) and parameter.held is not None:
            return (clock.now, clock.edits, weakref.ref(parameter.held), *parameter.stamp())
        sharded = self._sharded()
        version = None if sharded is None else sharded._version
        storage = parameter.untyped_storage()._cdata
        return (clock.now, storage, parameter._version, parameter.data_ptr(), parameter.dtype, version)


def _is_capturing(weight: Tensor) -> bool:
    return weight.device.type != "cpu" and is_capturing(weight.device)


def _unregister(address: int, codes: WeightCache | None = None) -> None:
    """Unregister the cache of a storage; given a cache, only if it is still that one (tied layers share a storage)."""
    entry = _caches.get(address)
    if entry is not None and entry[1]() is codes:
        del _caches[address]


class CachesWeights(nn.Module):
    """Base of modules with cached weight codes, which are dropped when a parameter is set, moved or loaded.

    Because of this ``__setattr__``, FSDP2 swaps parameters by assignment, so that the module notices.
    """

    def _weight_caches(self) -> Mapping[str, WeightCache]:
        """Return parameter name -> cache."""
        raise NotImplementedError

    def __setattr__(self, name: str, value: Tensor | nn.Module) -> None:
        if name in self.__dict__.get("_parameters", ()):
            codes = self._weight_caches().get(name)
            if codes is not None:
                codes.on_parameter_set(value)
        super().__setattr__(name, value)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        clock.record_edit()
        for codes in self._weight_caches().values():
            codes.drop()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """State dicts are stock: they contain the master of an FP8 weight, which may be written to."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self._weight_caches():
            if prefix + name in destination:
                destination[prefix + name] = master_of(destination[prefix + name])

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        for codes in self._weight_caches().values():
            codes.drop()
        with torch.no_grad():
            applied = {id(p): fn(p) for p in self._parameters.values() if isinstance(p, Fp8Weight)}
        # torch would swap unchanged wrapper tensors for themselves, which fails while a graph holds them: hide them.
        parameters = dict(self._parameters)
        for name, p in parameters.items():
            if id(p) in applied and applied[id(p)] is p:
                self._parameters[name] = None
        try:
            out = super()._apply(lambda t: applied[id(t)] if id(t) in applied else fn(t), recurse)
        except RuntimeError as error:
            if "swap" not in str(error) or not applied:
                raise
            raise RuntimeError(
                f"Cannot change the dtype or device of an FP8 weight of {type(self).__name__} while the graph of a "
                "loss or a weak reference refers to it. Convert the model before the forward, or delete the loss (del "
                "loss)."
            ) from error
        finally:
            self._parameters.update({name: p for name, p in parameters.items() if self._parameters[name] is None})
        self.register_caches()
        return out

    def __setstate__(self, state: dict[str, object]) -> None:  # of copies and pickles
        super().__setstate__(state)
        self.register_caches()

    def register_caches(self) -> None:
        """Register the caches by weight for compiled graphs, which do not know the layer."""
        for name, codes in self._weight_caches().items():
            weight = self._parameters.get(name)
            if weight is not None and is_whole(weight):
                codes.register(weight)


def invalidate(model: nn.Module) -> None:
    """Drop the FP8 codes of all weights of a model, which the next forward casts again, and the shared codes of inputs
    (:mod:`octavo.fp8.dense.inputs`) of all models.

    Needed after every write that neither a version counter nor a ``torch.optim`` step shows; otherwise the model
    silently continues to multiply by the old weight: a manual ``p.data -= lr * p.grad``, weights replaced by their
    moving average with ``p.data.copy_()``, PEFT's ``merge_adapter()`` and ``unmerge_adapter()`` on FP8 layers, a custom
    kernel, a NumPy view. The same writes to ``p`` itself under ``torch.no_grad()`` are detected. Also needed between
    two layers of one input if the input is written this way between their calls (``x.data.mul_()``).
    """
    clock.notify()
    clock.record_edit()
    for module in model.modules():
        if isinstance(module, CachesWeights):
            for codes in module._weight_caches().values():
                codes.drop()


def has_values(weight: Tensor) -> bool:
    """Return True if a weight has values, and False if FSDP2 gathered it as codes."""
    return not isinstance(weight, Fp8Weight) or weight.held is not None


def weight_cache_bytes(model: nn.Module) -> int:
    """Return the bytes of cached weight codes and their scales, including shards of FP8 weights, without the codes of
    frozen weights."""
    modules = [m for m in model.modules() if isinstance(m, CachesWeights)]
    caches = {id(c): c for m in modules for c in m._weight_caches().values()}.values()
    codes = [q for c in caches for entries in (c._codes, c._for_dgrad) for q in entries.values()]
    rows = {id(h): h.rows.nbytes for m in modules for h in masters(m) if h.rows is not None}
    parameters: list[object] = [p for m in modules for p in m._parameters.values()]
    weights = (p.frozen for p in parameters if isinstance(p, Fp8Weight) and p.frozen is not None)
    frozen_codes = [q for stored in weights for q in stored.codes]
    frozen = {t.untyped_storage()._cdata for q in frozen_codes for t in (q.data, q.scale)}
    tensors = [t for q in codes for t in (q.data, q.scale)]  # codes for dgrad can be views of the forward's codes
    sizes = {(t.untyped_storage()._cdata, t.storage_offset()): t.numel() * t.element_size() for t in tensors}
    return sum(size for (storage, _), size in sizes.items() if storage not in frozen) + sum(rows.values())


def masters(module: CachesWeights) -> list[Master]:
    """Return the masters of a module's FP8 weights, even while FSDP2 has replaced them by gathered ones."""
    held = []
    for name, codes in module._weight_caches().items():
        for value in (module._parameters.get(name), codes._sharded()):
            local = local_of(value)
            if isinstance(local, Fp8Weight) and local.held is not None:
                held.append(local.held)
    return held
