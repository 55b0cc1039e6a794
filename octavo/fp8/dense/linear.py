"""The linear layer in FP8: three GEMMs, one autograd function. Read this first.

With x [M, K], w [N, K], dy [M, N] and the casts of a :class:`~octavo.fp8.arithmetic.recipe.Recipe`::

    fwd    y  = x @ w.T (+ bias)     dgrad  dx = dy @ w     wgrad  dw = dy.T @ x,  accumulated in fp32

An FP8 GEMM needs two quantized operands, each consisting of FP8 data (its codes) and scales. x is cast in the forward,
twice if the recipe's blocks are along the contracted dimension (K in fwd, M in wgrad), in one pass; dy is cast the same
way in the backward. w is cast once per optimizer step into the cache of its layer (:mod:`octavo.fp8.weights.cache`);
the backward and all micro-batches use these codes.

A forward saves the FP8 codes and scales of x in wgrad layout, and a reference to the weight. It saves nothing in 16 or
32 bits, unless the recipe keeps wgrad itself in high precision. With a frozen weight x is not saved; an input that
does not require grad needs no dgrad. If the backward can recompute x (:class:`octavo.fp8.dense.inputs.Recomputable`),
no codes are saved: the backward recomputes x and casts it to identical codes.

Compared with saving x itself, one more cast in the forward halves the memory. Unlike delayed scaling
(:mod:`octavo.fp8.dense.delayed`), current scaling reads x twice but never saturates.

Observers, delayed scaling and compilation attach from outside: see :mod:`octavo.fp8.observe.recorder`,
:mod:`octavo.fp8.dense.delayed`, :mod:`octavo.fp8.dense.compiled`. Next: :mod:`octavo.fp8.dense.gemms`, the core that
gated MLPs and experts share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from octavo.fp8.arithmetic.cast import CastSpec, Quantized
from octavo.fp8.arithmetic.recipe import Recipe
from octavo.fp8.arithmetic.recipe import recipe as named_recipe
from octavo.fp8.dense import compiled, gemms, graph_arguments
from octavo.fp8.dense.gemms import DENSE_OPS, INFERENCE_OPS, DenseOps, LayerGemms, ScaledCasts, select_backends
from octavo.fp8.dense.inputs import Input, Recomputable, without_autocast
from octavo.fp8.invariance import is_active
from octavo.fp8.observe import counts, recorder
from octavo.fp8.observe.recorder import LayerRecord
from octavo.fp8.weights.cache import CachesWeights, WeightCache, WeightSlice, register_owner
from octavo.fp8.weights.fp8_tensor import Fp8Weight
from octavo.fp8.weights.shards import is_whole

_PLAIN_TENSORS = (Tensor, nn.Parameter)
_NO_GRADS = (False, False, False, False)
WHOLE_WEIGHT = WeightSlice()
_FUNCTIONAL = "linear"  # the name of calls that have no layer
RECOMPUTE_KEY = "_recompute_input"
"""The key of a :data:`RecomputeFactory` in the ``__dict__`` of a layer whose input can be recomputed."""
RecomputeFactory = Callable[[Tensor, torch.dtype], "Recomputable | None"]


class GemmArgs(NamedTuple):
    """The arguments of a forward that are not inputs of autograd."""

    site: LayerGemms
    weight: Tensor  # the parameter
    part: WeightSlice  # the part of the parameter that is multiplied
    grad_enabled: bool
    training: bool = False  # delayed scaling records the amax
    ops: DenseOps = DENSE_OPS
    share_codes: bool = True  # with other layers that are called with the same input
    recompute_input: RecomputeFactory | None = None  # recomputes x in the backward


@torch._disable_dynamo  # like torch.compiler.disable, but without importing torch._dynamo before the first call
def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, args: GemmArgs) -> Tensor:
    """Return x [..., K] @ weight [N, K].T + bias [N], as [..., N] in the dtype of x (autocast's under autocast).

    ``torch.compile`` does not trace into this function: caches, counters and casts that read values cannot be traced.
    """
    _check(x, weight, args.site.name)
    return _Fp8Linear.apply(x, weight, bias, args)


def fp8_linear_unchecked(x: Tensor, weight: Tensor, bias: Tensor | None, args: GemmArgs) -> Tensor:
    """Run :func:`fp8_linear` without its checks, with the casts and products of ``args.ops``."""
    return _Fp8Linear.apply(x, weight, bias, args)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, args: GemmArgs) -> Tensor:
        site, ops = args.site, args.ops
        needs_x, needs_w, needs_b, _ = ctx.needs_input_grad if args.grad_enabled else _NO_GRADS
        ctx.needs = needs_x, needs_w, needs_b
        ctx.record = record = recorder.begin(site.name, needs_x, needs_w, args.grad_enabled, ops.sizes)
        operand = Input(x, site if args.share_codes else None, cast=ops.cast)
        with operand.autocast_off:
            ctx.scaling, x_q, saved = _cast_x(operand, args, record, needs_w)
            y, w_q = gemms.fwd(site, ops, operand, x_q, args.weight, args.part, bias, operand.dtype, record)
        ctx.site, ctx.part, ctx.ops = site, args.part, ops
        ctx.restore, ctx.drop_codes = saved.restore, operand.drop_codes
        ctx.save_for_backward(*ops.tensors, *_weight_tensors(args, w_q, needs_x), *saved.tensors)
        ctx.w_spec, ctx.dtype = None if w_q is None else w_q.spec, operand.dtype
        ctx.x_shape, ctx.dtypes = x.shape, (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        # Autograd must not see a view: a model may write into the output (+=, inplace=True), as with F.linear.
        return y if x.dim() == 2 else torch.ops.aten._unsafe_view(y, [*x.shape[:-1], y.shape[-1]])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ctx.drop_codes()
        (needs_x, needs_w, needs_b), site, record = ctx.needs, ctx.site, ctx.record
        ops, tensors = ctx.ops.restore(ctx.saved_tensors)
        x_dtype, w_dtype, b_dtype = ctx.dtypes
        dy_MN = dy if dy.dim() == 2 else dy.reshape(dy.shape[:-1].numel(), dy.shape[-1])
        dx = dw = db = None
        with without_autocast(dy):
            cast = partial(ops.cast, dy_MN) if ctx.scaling is None else partial(ctx.scaling.cast_dy, dy_MN)
            dy_row, dy_col = cast(site.dy.row if needs_x else None, site.dy.col if needs_w else None)
            if needs_x:
                weight, w_q = tensors.pop(0), None
                if ctx.w_spec is not None:
                    w_q = Quantized(tensors.pop(0), tensors.pop(0), ctx.w_spec)
                # Rounded to the dtype of the GEMMs first, as the gradient of autocast's copy would be.
                dx = gemms.dgrad(site, ops, dy_MN, dy_row, weight, ctx.part, w_q, ctx.dtype, record)
                dx = (dx if dx.shape == ctx.x_shape else dx.view(ctx.x_shape)).to(x_dtype)
            if needs_w:
                x, x_high = ctx.restore(ops, tensors)
                dw = gemms.wgrad(site, ops, dy_MN, dy_col, x, x_high, w_dtype, record)
            if needs_b:
                db = ops.bias_grad(dy_MN).to(b_dtype)
        return dx, dw, db, None


# --- what a forward saves ---------------------------------------------------------------------------------------------


class SavedInput(NamedTuple):
    """What the forward saves of x for wgrad.

    ``restore(ops, tensors)`` returns (the operand of wgrad, x in high precision or None if it was not saved).
    """

    tensors: tuple[Tensor, ...]
    restore: Callable[[DenseOps, Sequence[Tensor]], tuple[Quantized | Tensor, Tensor | None]] | None


def _cast_x(
    x: Input, args: GemmArgs, record: LayerRecord, needs_w: bool
) -> tuple[ScaledCasts | None, Quantized | None, SavedInput]:
    """Cast x for fwd and wgrad.

    Returns (the delayed scaling of the casts or None with current scaling, the operand of fwd, the tensors saved for
    wgrad). If the backward recomputes x, only the tensors that x is computed from are saved, plus, under delayed
    scaling, x's scale.
    """
    site, recomputable = args.site, x.recomputable if needs_w else None
    if needs_w and recomputable is None and args.recompute_input is not None:
        recomputable = args.recompute_input(x.tensor, x.dtype)
    scaling = None if site.scaling is None else site.scaling.begin(x.tensor, args.part.slot, args.training, record)
    cast = x.codes if scaling is None else partial(scaling.cast_x, x)
    col_request = site.x.col if needs_w and (recomputable is None or scaling is not None) else None
    x_q, x_col = cast(site.x.row, col_request)
    if not needs_w:
        return scaling, x_q, SavedInput((), None)
    if recomputable is not None:
        scale = () if x_col is None else (x_col.scale,)
        recompute = partial(_recompute_x, recomputable.recompute, len(recomputable.tensors), site, x.dtype)
        return scaling, x_q, SavedInput((*recomputable.tensors, *scale), recompute)
    if x_col is None:
        return scaling, x_q, SavedInput((x.high_precision(),), _restore_x)
    x_high = (x.matrix(),) if record.keeps_x else ()
    return scaling, x_q, SavedInput((x_col.data, x_col.scale, *x_high), partial(_restore_codes, x_col.spec))


def _restore_codes(spec: CastSpec, ops: DenseOps, tensors: Sequence[Tensor]) -> tuple[Quantized, Tensor | None]:
    return Quantized(tensors[0], tensors[1], spec), tensors[2] if len(tensors) > 2 else None


def _restore_x(ops: DenseOps, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return tensors[0], tensors[0]


def _recompute_x(
    recompute_x: Callable[..., Tensor],
    count: int,
    site: LayerGemms,
    dtype: torch.dtype,
    ops: DenseOps,
    tensors: Sequence[Tensor],
) -> tuple[Quantized | Tensor, Tensor]:
    """Recompute x in the backward, and cast it for wgrad unless wgrad runs in high precision."""
    x = recompute_x(*tensors[:count]).to(dtype)
    x_MK, col = x.reshape(x.shape[:-1].numel(), x.shape[-1]), site.x.col
    if col is None:
        return x_MK, x_MK
    if len(tensors) > count:
        return col.backend.quantize_with_scale(x_MK, tensors[count], col.spec, contract=0), x_MK
    x_q = ops.cast(x_MK, None, col)[1]
    assert x_q is not None
    return x_q, x_MK


def _weight_tensors(args: GemmArgs, w_q: Quantized | None, needs_x: bool) -> tuple[Tensor, ...]:
    """Return the tensors of the weight to save for dgrad: the parameter, and its codes if no cache holds them."""
    if not needs_x:
        return ()
    return (args.weight,) if w_q is None else (args.weight, w_q.data, w_q.scale)


def _check(x: Tensor, weight: Tensor, name: str) -> None:
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"{name!r} was called inside a torch.func transform (grad, vmap, jvp, ...), but FP8 layers "
            "support only torch.autograd. Use loss.backward() or torch.autograd.grad, or call the model "
            "inside fp8.high_precision(model)."
        )
    if type(weight) not in _PLAIN_TENSORS and not is_whole(weight):
        raise RuntimeError(
            f"The weight of {name!r} is a DTensor when its GEMM runs, but FP8 layers need a plain tensor. Under FSDP2, "
            "call the module that fully_shard wrapped, so that its hooks gather the weight first; tensor parallelism "
            "is not supported."
        )
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise RuntimeError(
            f"{name!r} expects inputs with {weight.shape[1]} features (its weight is {list(weight.shape)}), got an "
            f"input of shape {list(x.shape)}."
        )


class Linear(CachesWeights, nn.Linear):
    """An ``nn.Linear`` whose GEMMs run in FP8.

    :func:`octavo.fp8.apply` converts a stock layer in place. The object, its parameters, hooks and names stay the same,
    so that checkpoints, optimizers and PEFT see no difference.
    """

    _site: LayerGemms
    _fp8_param = False  # True if the weight is stored in FP8 between steps: see `compiled`
    _recompute_input: RecomputeFactory | None = None  # set by an enclosing module that can recompute the input

    @classmethod
    def convert(cls, module: nn.Linear, site: LayerGemms) -> Linear:
        """Convert a stock ``nn.Linear`` into an FP8 one, in place. Raises TypeError for other modules."""
        if type(module) is not nn.Linear:
            raise TypeError(
                f"{site.name!r} is a {type(module).__name__}; only a plain torch.nn.Linear can be converted to "
                "fp8.Linear."
            )
        if "forward" in module.__dict__:
            raise TypeError(
                f"{site.name!r} has a forward set on the instance (by an accelerate hook?), which would bypass FP8. "
                "Convert first and add the hook afterwards, or remove the hook (accelerate's remove_hook_from_module)."
            )
        module.__dict__["_site"] = site  # before __class__, because __setattr__ of the new class reads it
        module.__class__ = cls
        assert isinstance(module, cls)
        module.record_weight_kind()
        module.register_caches()
        return module

    def record_weight_kind(self) -> None:
        """Record whether the weight is FP8 between steps: a compiler cannot trace an access to it."""
        self.__dict__["_fp8_param"] = isinstance(self.weight, Fp8Weight)

    @property
    def recipe(self) -> Recipe:
        return self._site.recipe

    @property
    def backend(self) -> str:
        return self._site.backend.backend.name

    @property
    def name(self) -> str:
        return self._site.name

    def _weight_caches(self) -> Mapping[str, WeightCache]:
        return {"weight": self._site.codes}

    def forward(self, input: Tensor) -> Tensor:
        """Map input [..., K] to [..., N]. The argument is named as in ``nn.Linear``, for keyword callers."""
        if torch.compiler.is_compiling():
            return compiled.forward(self, input)
        grad_enabled = torch.is_grad_enabled()
        ops = DENSE_OPS if grad_enabled else INFERENCE_OPS
        args = GemmArgs(
            self._site,
            self.weight,
            WHOLE_WEIGHT,
            grad_enabled,
            self.training,
            ops,
            recompute_input=self._recompute_input,
        )
        if torch._C._len_torch_function_stack() and is_active():
            with torch._C.DisableTorchFunction():  # __torch_function__ dispatch costs more than most calls
                return fp8_linear(input, self.weight, self.bias, args)
        return fp8_linear(input, self.weight, self.bias, args)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        out = super()._apply(fn, recurse)
        if self._site.scaling is not None:
            self._site.scaling.move_to(self.weight.device)
        return out

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fp8={self.recipe.summary()}, backend={self.backend}"


class CountedForward(nn.Module):
    """The forward of a module in high precision that reports its GEMMs to active counters;
    :mod:`octavo.fp8.blocks.counted` gives it to the modules that a plan leaves as they are."""

    _stock: ClassVar[type[Any]]

    def forward(self, *args: object, **kwargs: object) -> object:
        if torch.compiler.is_compiling():
            return self.trace_call(*args, **kwargs)
        output = self.eager_call(*args, **kwargs)
        if recorder.counters():
            counts.report_module(self, (*args, *kwargs.values()), output)
        return output

    def eager_call(self, *args: object, **kwargs: object) -> object:
        """Run the stock forward, or the same product in a faster way."""
        y = gemms.stock_forward(self._stock, self, *args) if len(args) == 1 and not kwargs else None
        return self._stock.forward(self, *args, **kwargs) if y is None else y

    def trace_call(self, *args: object, **kwargs: object) -> object:
        """Run the forward while a compiler traces it."""
        raise NotImplementedError

    def __setstate__(self, state: dict[str, object]) -> None:  # of copies and pickles
        super().__setstate__(state)
        register_owner(self)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, recipe: str | Recipe = "blockwise", backend: str = "auto"
) -> Tensor:
    """``torch.nn.functional.linear`` in FP8, differentiable.

    Args:
        x: [..., K], fp32, bf16 or fp16.
        weight: [N, K]. It is cast again in each forward and backward; :class:`Linear` caches its codes.
        bias: [N] or None.
        recipe: a recipe or its name. ``delayed`` has no history here and scales by the current amax.
        backend: "auto", or the name of the backend that must run it.

    Returns:
        [..., N] in the dtype of x, rounded once.

    Raises:
        RecipeError: the recipe does not exist.
        BackendError: the backend does not exist or does not support a GEMM of the recipe.
        RuntimeError: the shapes do not match.
    """
    resolved = recipe if isinstance(recipe, Recipe) else named_recipe(recipe)
    if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        bias_shape = "" if bias is None else f" and a bias of shape {list(bias.shape)}"
        raise RuntimeError(
            f"fp8.linear takes a weight [N, K] and a bias [N]; got a weight of shape {list(weight.shape)}{bias_shape}."
        )
    _check(x, weight, _FUNCTIONAL)
    if torch.compiler.is_compiling():
        key = graph_arguments.make_key(graph_arguments.format_casts(resolved), str(x.device), backend, _FUNCTIONAL)
        return compiled.linear(x, weight, bias, key)
    site = LayerGemms(_FUNCTIONAL, resolved, select_backends(resolved, x.device, backend), WeightCache(keep=False))
    return fp8_linear(x, weight, bias, GemmArgs(site, weight, WHOLE_WEIGHT, torch.is_grad_enabled(), share_codes=False))
