"""Cross-entropy and log-probabilities of a language model's head, without its logits.

With hidden states h [M, H] and the head's weight W [V, H], a loss needs only a few numbers per token from the logits
x = h W^T + b [M, V]: lse = log sum_j exp(x_j), the target's logit x_t, sum_j x_j for label smoothing, and the entropy S
of p = softmax(x) for some objectives. They are accumulated over blocks of the vocabulary::

    forward    each block:  x = h W_block^T + b      -> its lse, sum and entropy; the block is dropped
    backward   each block:  x again, then  dx_j = p_j (g_lse - g_S (log p_j + S)) + g_sum + g_t [j = t]
                            dW_block = dx^T h,   dh += dx W_block

Only M x (V / blocks) logits exist at a time, and only h and lse are kept for the backward. The cost is one more GEMM
of the head. The vocabulary is split instead of the tokens because every row of dW is then one GEMM over all tokens,
accumulated in fp32 by the GEMM and rounded once, without a second buffer of the weight's size. Only dh [M, H] is
accumulated over blocks, in fp32.

The three GEMMs of a block run in high precision or, for an FP8 head, with its recipe
(:mod:`octavo.fp8.memory.head_gemms`), in blocks of a multiple of 128 rows.

Logits equal the stock head's: a GEMM in the compute dtype (autocast's, otherwise the hidden states'),
rounded to it and converted to fp32. Losses therefore equal ``F.cross_entropy(head(h).float())`` except for the order of
fp32 sums. The losses are computed from these statistics by plain differentiable PyTorch, and the incoming gradient is
one number per token, so any weighting and reduction of the loss works. NaN and Inf propagate to the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octavo.base import accelerator
from octavo.fp8.dense.gemms import LayerGemms
from octavo.fp8.dense.inputs import compute_dtype, is_functorch_active, without_autocast
from octavo.fp8.invariance import is_active
from octavo.fp8.memory.head_gemms import Head, HeadCall, accumulation_dtype, begin_head, fp8_block_width
from octavo.fp8.weights.shards import is_whole

# Elements of fp32 logits that exist at a time: 128 MiB on devices that need large kernels, 8 MiB on a CPU.
_ELEMENTS, _ELEMENTS_ON_CPU = 2**25, 2**21
_MIN_ROWS = 256  # minimum rows of the weight per block, for any number of tokens
_INVARIANT_ROWS = 4096  # the same inside batch_invariant, where the order of sums must not depend on the number of rows


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *,
    label_smoothing: float = 0.0, z_loss: float = 0.0, ignore_index: int = -100, chunk: int | None = None,
) -> Tensor:  # fmt: skip
    """Return the loss of every token, fp32 [...], for hidden [..., H], weight [V, H], target [...] (int64), bias [V].

    With lse = log sum_j exp(x_j) over the token's logits x [V] and t its target, in nats::

        (1 - label_smoothing) (lse - x_t) + label_smoothing (lse - mean_j x_j) + z_loss lse^2

    The loss is 0 if the target is ``ignore_index``. Label smoothing follows Szegedy et al. 2016 (arXiv:1512.00567),
    as in ``F.cross_entropy``; z-loss keeps log Z near 0, as in PaLM (Chowdhery et al. 2022, arXiv:2204.02311, with
    1e-4).

    If ``target`` is on the CPU, tokens without a target are removed before the first GEMM, also if ``hidden`` is on a
    GPU. Targets on a GPU are not inspected, which would wait for the GPU, so all rows are computed. ``chunk`` is the
    number of tokens whose logits may exist at a time, as chunk x V elements. By default it depends on the device;
    inside
    ``octavo.fp8.batch_invariant`` it is ignored.

    Raises ValueError for shapes that do not match and options out of range, TypeError for unsupported dtypes, and
    IndexError for targets on the CPU outside the vocabulary (on other devices their loss is NaN).
    """
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}; it is a share of the probability: use 0 to 1")
    if not z_loss >= 0.0:
        raise ValueError(f"z_loss is {z_loss}; a negative factor would drive log Z away from 0: use 0 or more")
    return head_losses(hidden, weight, target, bias, None, label_smoothing, z_loss, ignore_index, chunk)


def head_losses(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, site: LayerGemms | None,
    label_smoothing: float, z_loss: float, ignore_index: int = -100, chunk: int | None = None,
) -> Tensor:  # fmt: skip
    """Compute :func:`linear_cross_entropy` with GEMMs at ``site``, or in high precision if it is None."""
    needs = _Needs(total=label_smoothing > 0.0)
    tokens = _select_tokens(hidden, weight, target, bias, ignore_index)
    statistics = _compute_statistics(tokens, weight, bias, needs, chunk, site)
    loss = statistics.lse - statistics.at_target
    if statistics.total is not None:
        uniform = statistics.lse - statistics.total / weight.shape[0]
        loss = (1.0 - label_smoothing) * loss + label_smoothing * uniform
    if z_loss:
        loss = loss + z_loss * statistics.lse.square()
    return tokens.spread(loss)


@overload
def token_log_probs(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *,
    temperature: float = 1.0, entropy: Literal[False] = False, ignore_index: int = -100, chunk: int | None = None,
) -> Tensor: ...  # fmt: skip


@overload
def token_log_probs(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *,
    temperature: float = 1.0, entropy: Literal[True], ignore_index: int = -100, chunk: int | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def token_log_probs(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *,
    temperature: float = 1.0, entropy: bool = False, ignore_index: int = -100, chunk: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Return log softmax(x / temperature) at every token's target, fp32 [...]; 0 if the target is ``ignore_index``.

    With ``entropy=True``, returns a pair: the log-probabilities, and the entropy of softmax(x / temperature) in nats,
    fp32 [...]. Both are differentiable. Other arguments, cost and errors are as in :func:`linear_cross_entropy`.
    """
    return head_log_probs(hidden, weight, target, bias, None, temperature, entropy, ignore_index, chunk)


def head_log_probs(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, site: LayerGemms | None,
    temperature: float, entropy: bool, ignore_index: int = -100, chunk: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Compute :func:`token_log_probs` with GEMMs at ``site``, or in high precision if it is None."""
    if not temperature > 0.0:
        raise ValueError(f"temperature is {temperature}; logits are divided by it: use a number above 0")
    tokens = _select_tokens(hidden, weight, target, bias, ignore_index)
    needs = _Needs(entropy=entropy, temperature=temperature)
    statistics = _compute_statistics(tokens, weight, bias, needs, chunk, site)
    logs = tokens.spread(statistics.at_target - statistics.lse)
    return logs if statistics.entropy is None else (logs, tokens.spread(statistics.entropy))


@overload
def log_probs(
    logits: Tensor, target: Tensor, *, temperature: float = 1.0, entropy: Literal[False] = False,
    ignore_index: int = -100,
) -> Tensor: ...  # fmt: skip


@overload
def log_probs(
    logits: Tensor, target: Tensor, *, temperature: float = 1.0, entropy: Literal[True], ignore_index: int = -100
) -> tuple[Tensor, Tensor]: ...


def log_probs(
    logits: Tensor, target: Tensor, *, temperature: float = 1.0, entropy: bool = False, ignore_index: int = -100
) -> Tensor | tuple[Tensor, Tensor]:
    """Return log softmax(logits / temperature) at target [...], for existing logits [..., V].

    With ``entropy=True``, also returns the entropy, as :func:`token_log_probs` does; both are differentiable. Inside
    ``octavo.fp8.batch_invariant`` the result equals :func:`token_log_probs` bit for bit, whatever the other
    rows.
    """
    if target.shape != logits.shape[:-1]:
        raise ValueError(f"targets {list(target.shape)} and logits {list(logits.shape)} do not match; pass one per row")
    if not temperature > 0.0:
        raise ValueError(f"temperature is {temperature}; logits are divided by it: use a number above 0")
    rows, flat = logits.reshape(-1, logits.shape[-1]), target.reshape(-1).to(logits.device)
    tokens = _Tokens(rows, flat, None, flat != ignore_index, target.shape)
    statistics = _compute_statistics(tokens, None, None, _Needs(entropy=entropy, temperature=temperature), None)
    logs = tokens.spread(statistics.at_target - statistics.lse)
    return logs if statistics.entropy is None else (logs, tokens.spread(statistics.entropy))


class _Tokens(NamedTuple):
    """The rows that have a target, or all rows if selecting them would wait for a device."""

    hidden: Tensor  # [m, H]
    target: Tensor  # [m]
    keep: Tensor | None  # the indices of these rows, or None for all rows
    known: Tensor | None  # bool [m]: rows that have a target; None if all of them do
    shape: torch.Size  # of the targets before flattening

    def spread(self, values: Tensor) -> Tensor:
        """Return the values [m] of these rows in the shape of the targets, with 0 for the other rows."""
        if self.known is not None:
            values = torch.where(self.known, values, 0.0)
        if self.keep is not None:
            values = values.new_zeros(self.shape.numel()).index_copy(0, self.keep, values)
        return values.view(self.shape)


def _select_tokens(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, ignore: int) -> _Tokens:
    _check(hidden, weight, target, bias)
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    if target.device.type != "cpu" or hasattr(target, "fake_mode"):  # a fake tensor has no values
        known = flat != ignore
        return _Tokens(rows, flat, None, known, target.shape)
    keep = (flat != ignore).nonzero().flatten()
    targets = flat[keep]
    if len(targets):
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= weight.shape[0]:
            raise IndexError(
                f"targets reach from {low} to {high}, but the head has {weight.shape[0]} classes; tokens without a "
                f"target are marked with {ignore}"
            )
    if len(keep) == len(flat):
        return _Tokens(rows, flat.to(rows.device, non_blocking=True), None, None, target.shape)
    keep, targets = (t.to(rows.device, non_blocking=True) for t in (keep, targets))
    return _Tokens(rows.index_select(0, keep), targets, keep, None, target.shape)


def _check(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
    if not is_whole(hidden) or not is_whole(weight):
        raise TypeError(
            "hidden states or weight are a DTensor, of which this rank holds a part; call this where FSDP has gathered "
            "them (octavo.fp8.memory.chunked_head does, inside the model's forward)"
        )
    if is_functorch_active():
        raise RuntimeError(
            "losses without logits are differentiable only by torch.autograd, not under a transform of torch.func "
            "(grad, vmap, jvp, ...); use leading dimensions in place of vmap"
        )
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden states {list(hidden.shape)} and weight {list(weight.shape)} do not match; pass [..., H] and [V, H]"
        )
    if target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"targets {list(target.shape)} and hidden states {list(hidden.shape)} do not match; pass one target per "
            "hidden state"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {list(bias.shape)} does not match weight {list(weight.shape)}: pass [V]")
    if not weight.shape[0]:
        raise ValueError(f"weight {list(weight.shape)} has no classes; pass [V, H] with V of 1 or more")
    if target.dtype != torch.int64:
        raise TypeError(f"targets are {target.dtype}; they are class numbers: use torch.int64")
    if not hidden.is_floating_point():
        raise TypeError(f"hidden states are {hidden.dtype}; use a floating-point dtype")
    dtype = compute_dtype(hidden)
    if dtype == hidden.dtype and weight.dtype != dtype:  # under autocast both are cast
        raise TypeError(
            f"hidden states are {hidden.dtype} and the weight is {weight.dtype}; cast one, or run under autocast"
        )


class _Needs(NamedTuple):
    total: bool = False
    entropy: bool = False
    temperature: float = 1.0


class _TokenStatistics(NamedTuple):
    """Statistics of each token's x / temperature, in fp32 [m]; None if not needed."""

    lse: Tensor
    at_target: Tensor
    total: Tensor | None
    entropy: Tensor | None


def _compute_statistics(
    tokens: _Tokens, weight: Tensor | None, bias: Tensor | None, needs: _Needs, chunk: int | None,
    site: LayerGemms | None = None,
) -> _TokenStatistics:  # fmt: skip
    """Compute the statistics of all tokens; if ``weight`` is None, their hidden states are logits."""
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}; use 1 or more, or None to select it by device")
    rows, size = max(len(tokens.hidden), 1), tokens.hidden.shape[1] if weight is None else weight.shape[0]
    if is_active():
        width = _INVARIANT_ROWS
    elif chunk is None:
        width = max(_MIN_ROWS, (_ELEMENTS_ON_CPU if tokens.hidden.is_cpu else _ELEMENTS) // rows)
    else:
        width = max(1, chunk * size // rows)
    width = width if site is None else fp8_block_width(site, width, size, exactly=is_active())
    low = tokens.hidden.dtype if weight is None else compute_dtype(tokens.hidden)
    call = HeadCall(width, low, site, torch.is_grad_enabled())
    with without_autocast(tokens.hidden):
        return _TokenStatistics(*_Statistics.apply(tokens.hidden, weight, bias, tokens.target, needs, call))


class _Statistics(torch.autograd.Function):
    """Returns (lse, x_t, sum, entropy) [m] of x = (h W^T + b) / temperature, or of x = h / temperature without W.
    Differentiable with respect to h, W and b."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor | None, bias: Tensor | None, target: Tensor, needs: _Needs,
        call: HeadCall,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        width, low = call.width, call.low
        h = hidden.to(low)
        head = begin_head(h, weight, call, ctx.needs_input_grad)
        wide = accumulation_dtype(low)
        # A target outside the vocabulary is found in no block: its loss must show that.
        at_target = torch.full((len(h),), torch.nan, dtype=wide, device=h.device)
        total = torch.zeros_like(at_target) if needs.total else None
        lses, entropies = [], []
        for block in _blocks(head.classes, width):
            x = _logits(head, bias, block, needs.temperature)
            inside, at = _locate_targets(target, block)
            at_target = torch.where(inside, x.gather(1, at).squeeze(1), at_target)
            if total is not None:
                total += x.sum(1)
            top = x.amax(1, keepdim=True)
            top.masked_fill_(top.isinf(), 0.0)  # exp(x - top) is then what x says, as in torch.logsumexp
            x.sub_(top)
            e = x.exp() if needs.entropy else x.exp_()
            sums = e.sum(1)
            lses.append(sums.log() + top.squeeze(1))
            if needs.entropy:
                entropies.append(sums.log() - e.mul_(_clamp_to_finite(x)).sum(1) / sums)
        parts = torch.stack(lses, 1)  # [m, blocks]
        lse = parts.logsumexp(1)
        entropy = _joint_entropy(parts - lse.unsqueeze(1), torch.stack(entropies, 1)) if needs.entropy else None
        ctx.save_for_backward(weight, bias, target, lse, entropy, *head.tensors)
        ctx.dtype, ctx.needs, ctx.call, ctx.restore = hidden.dtype, needs, call, head.restore
        return lse, at_target, total, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        weight, bias, target, lse, entropy, *tensors = ctx.saved_tensors
        needs_h, needs_w, needs_b = ctx.needs_input_grad[:3]
        needs, width, low = ctx.needs, ctx.call.width, ctx.call.low
        head = ctx.restore(weight, tensors)
        size = head.classes if weight is None else weight.shape[1]
        dh = torch.zeros(len(target), size, dtype=lse.dtype, device=lse.device) if needs_h else None
        dw = torch.empty_like(weight, memory_format=torch.contiguous_format) if needs_w else None
        db = torch.empty_like(bias) if needs_b else None
        with without_autocast(lse):
            for block in _blocks(head.classes, width):
                x = _logits(head, bias, block, needs.temperature)
                dx = _logits_gradient(x, block, target, lse, entropy, grads).div_(needs.temperature)
                del x  # dx reuses its memory, or it is freed
                if db is not None:
                    db[block] = dx.sum(0)
                dx = dx.to(low) if accelerator.supports_fp32_product(dx.device) else dx
                head.gradients(dx, block, dh, None if dw is None else dw[block])
        return None if dh is None else dh.to(ctx.dtype), dw, db, None, None, None


def _blocks(size: int, width: int) -> Iterator[slice]:
    for start in range(0, size, width):
        yield slice(start, min(start + width, size))


def _logits(head: Head, bias: Tensor | None, block: slice, temperature: float) -> Tensor:
    """Return the block's logits in fp32, divided by the temperature, as a new tensor."""
    x = head.product(block, None if bias is None else bias[block])
    x = x.to(accumulation_dtype(x.dtype))
    return x if temperature == 1.0 else x.div_(temperature)


def _locate_targets(target: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """Return (bool [m]: rows whose target is in the block, its column in the block [m, 1]; any column for others)."""
    at = target - block.start
    inside = (at >= 0) & (target < block.stop)
    return inside, at.clamp(0, block.stop - block.start - 1).unsqueeze(1)


def _clamp_to_finite(logs: Tensor) -> Tensor:
    """Replace minus infinity by a finite number in place, so that p log p is 0 if p is 0; NaN is kept."""
    return logs.clamp_(min=torch.finfo(logs.dtype).min)


def _joint_entropy(logs: Tensor, entropies: Tensor) -> Tensor:
    """Return the entropy over the vocabulary [m] from each block's log-probability and entropy [m, blocks].

    By the chain rule it is the mean entropy within blocks plus the entropy of the choice of a block. No term is
    negative, so nothing cancels.
    """
    share = logs.exp()
    return torch.where(share == 0.0, 0.0, share * (entropies - _clamp_to_finite(logs))).sum(1)


def _logits_gradient(
    x: Tensor, block: slice, target: Tensor, lse: Tensor, entropy: Tensor | None, grads: tuple[Tensor | None, ...]
) -> Tensor:
    """Return the gradient of the block's x [m, width], in the memory of x."""
    g_lse, g_target, g_total, g_entropy = grads
    assert g_lse is not None and g_target is not None
    logs = x.sub_(lse.unsqueeze(1))
    if entropy is None:
        dx = logs.exp_().mul_(g_lse.unsqueeze(1))
    else:
        assert g_entropy is not None
        dx = logs.exp()
        dx *= _clamp_to_finite(logs).add_(entropy.unsqueeze(1)).mul_(-g_entropy.unsqueeze(1)).add_(g_lse.unsqueeze(1))
    if g_total is not None:
        dx += g_total.unsqueeze(1)
    inside, at = _locate_targets(target, block)
    at_target = dx.gather(1, at).squeeze(1)
    return dx.scatter_(1, at, torch.where(inside, at_target + g_target, at_target).unsqueeze(1))
