"""A persistent, warp-specialised FP8 GEMM for Hopper (sm_90), in Gluon: loads, products and stores run side by side.

One program a multiprocessor walks over tiles of 128 x BN. One warp loads (TMA); two warpgroups multiply, 64 rows of the
tile each, and never meet: while one multiplies by scales or stores its result, the other's products keep the tensor
core busy. They agree by two barriers in shared memory for each of STAGES pairs of operands::

    ready[s]     the loader says that it will bring so many bytes; complete when they are there
    empty[s]     complete when both warpgroups have read stage s

The arithmetic is :mod:`contraction`'s, in the same order, with its bounds::

    scales of the whole contraction     acc += a . b  (fp32 every 128, or in the tensor core), * scales at the end
    1x128 by 128x128                    acc += (a . b of one step) * (scale_a * scale_b)
    1x128 by 1x128                      acc += (a . b of one step) * scale_a * scale_b

GROUPS says what a tile belongs to: "" one matrix; "rows" the expert that owns its rows; "experts" one expert's own
result, contracted over that expert's rows (:mod:`grouped`). Gluon has no interpreter: what runs here is held to the
reference on the card (:mod:`gluon_check`). Needs Triton 3.6 or later.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from octavo.fp8.kernels.triton_kernels import contraction
from octavo.fp8.kernels.triton_kernels.contraction import DOWN, HUGE, LARGEST, TINY, UP

BM, BK = gl.constexpr(128), gl.constexpr(128)
HALF = gl.constexpr(64)  # rows of a warpgroup
OWNED = gl.constexpr(128)  # groups.TILE: rows that have one expert
GROUP = gl.constexpr(8)  # row tiles that go down together: see contraction.place
times = gluon.jit(contraction.times.fn)  # the same lines, compiled by Gluon


@gluon.jit
def _tile(t, groups, M, N, K, GROUPS: gl.constexpr, BN: gl.constexpr):
    """(expert, first row, first column, start and end of the contraction) of tile t; expert -1: nobody's, no steps."""
    tiles, starts, sizes = groups
    down = gl.cdiv(M, BM)
    across = gl.cdiv(N, BN)
    expert = t // (down * across)  # 0 but for "experts"
    inside = t % (down * across)
    top = inside // (GROUP * across) * GROUP
    height = gl.minimum(down - top, GROUP)
    row = (top + inside % (GROUP * across) % height) * BM
    col = inside % (GROUP * across) // height * BN
    first = expert * 0
    last = first + K
    if GROUPS == "rows":
        expert = gl.load(tiles + row // OWNED)
        last = gl.where(expert < 0, 0, K)
    if GROUPS == "experts":
        first = gl.load(starts + expert)
        last = first + gl.cdiv(gl.load(sizes + expert), BK) * BK  # rows beyond an expert's own hold zero codes
    return expert, row, col, first, last


@gluon.jit
def _load(a, b, groups, stages, M, N, K, b_rows, total, GROUPS: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr):
    a_bufs, b_bufs, ready, empty = stages
    it = 0
    for t in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, row, col, first, last = _tile(t, groups, M, N, K, GROUPS, BN)
        if GROUPS == "rows":
            col += expert * b_rows
        for k in range(first, last, BK):
            s = it % STAGES
            mbarrier.wait(empty.index(s), (it // STAGES & 1) ^ 1)
            mbarrier.expect(ready.index(s), (BM + BN) * BK)
            tma.async_copy_global_to_shared(a, [row, k], ready.index(s), a_bufs.index(s * 2))
            tma.async_copy_global_to_shared(a, [row + HALF, k], ready.index(s), a_bufs.index(s * 2 + 1))
            tma.async_copy_global_to_shared(b, [col, k], ready.index(s), b_bufs.index(s))
            it += 1


@gluon.jit
def _whole(ptr, index, stride, limit, FREE: gl.constexpr):
    """Scales that hold for the whole contraction: one each of ``index``, or one for all."""
    if FREE == 1:
        return gl.load(ptr + index * stride, mask=index < limit, other=0.0)
    else:
        return gl.load(ptr)


@gluon.jit
def _multiply(
    scales, out, bias, groups, stages, buffer, M, N, K, total,
    WHICH: gl.constexpr, FORM: gl.constexpr, GROUPS: gl.constexpr, BIAS: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 rows of every tile, in fp32 registers, rounded once, stored by TMA."""
    a_bufs, b_bufs, ready, empty = stages
    a_scale, a_e, a_f, a_k, b_scale, b_e, b_f, b_k = scales
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 32])
    ROWS: gl.constexpr = gl.SliceLayout(1, MMA)
    COLS: gl.constexpr = gl.SliceLayout(0, MMA)
    LINE: gl.constexpr = FORM.b.free == 1
    it = 0
    for t in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, row, col, first, last = _tile(t, groups, M, N, K, GROUPS, BN)
        owner = gl.maximum(expert, 0).to(gl.int64)
        row += WHICH * HALF
        r = row + gl.arange(0, HALF, layout=ROWS)
        c = col + gl.arange(0, BN, layout=COLS)
        a_at = a_scale + owner * a_e
        b_at = b_scale + owner * b_e
        acc = gl.zeros((HALF, BN), gl.float32, layout=MMA)
        if FORM.a.side > 0:
            some = first < last
            a_at += r.to(gl.int64) * a_f + first // BK * a_k
            sa = gl.load(a_at, mask=(r < M) & some, other=0.0)
            if LINE:
                b_at = b_at + c.to(gl.int64) * b_f + first // BK * b_k
                sb = gl.load(b_at, mask=(c < N) & some, other=0.0)
            else:
                b_at += col // 128 * b_f + first // BK * b_k
                sb = gl.load(b_at, mask=some, other=0.0)
        for k in range(first, last, BK):
            s = it % STAGES
            if FORM.a.side > 0:  # the next step's scales, beside this step's product
                more = k + BK < last
                a_at += a_k
                b_at += b_k
                next_a = gl.load(a_at, mask=(r < M) & more, other=0.0)
                if LINE:
                    next_b = gl.load(b_at, mask=(c < N) & more, other=0.0)
                else:
                    next_b = gl.load(b_at, mask=more, other=0.0)
            mbarrier.wait(ready.index(s), it // STAGES & 1)
            left = a_bufs.index(s * 2 + WHICH)
            right = b_bufs.index(s).permute((1, 0))
            if FORM.a.side > 0 or FORM.promote:
                fresh = gl.zeros((HALF, BN), gl.float32, layout=MMA)
                part = warpgroup_mma(left, right, fresh, use_acc=False, is_async=True)
                part = warpgroup_mma_wait(0, (part,))
                mbarrier.arrive(empty.index(s), count=1)
                if FORM.a.side == 0:
                    acc += part
                elif LINE:
                    acc += (part * sa[:, None]) * sb[None, :]
                else:
                    both = sa * sb  # at most 2^127, so that a sum of zero stays zero
                    acc += part * gl.where(both > LARGEST, LARGEST, both)[:, None]
            else:
                sum_ = warpgroup_mma(left, right, acc, is_async=True)
                acc = warpgroup_mma_wait(0, (sum_,))
                mbarrier.arrive(empty.index(s), count=1)
            if FORM.a.side > 0:
                sa = next_a
                sb = next_b
            it += 1
        if FORM.a.side == 0:  # a power of two changes sides where a's scale is far out: see contraction
            whole = _whole(a_at, r, a_f, M, FORM.a.free)
            inverse = gl.where(whole >= HUGE, DOWN, gl.where(whole < TINY, UP, 1.0))
            later = gl.where(whole >= HUGE, UP, gl.where(whole < TINY, DOWN, 1.0))
            acc = times(acc, whole * inverse, FORM.a.free, True)
            acc = times(acc, _whole(b_at, c, b_f, N, FORM.b.free), FORM.b.free, False)
            acc = times(acc, later, FORM.a.free, True)
        if BIAS:
            acc += gl.load(bias + owner * N + c, mask=(c < N) & (expert >= 0), other=0.0).to(gl.float32)[None, :]
        tma.store_wait(0)  # the tile before has left the buffer
        mine = buffer.index(WHICH)
        mine.store(acc.to(out.dtype))
        fence_async_shared()
        if GROUPS == "experts":
            if row < M:  # M is a multiple of 64 there: rows are all of this expert, or none is
                tma.async_copy_shared_to_global(out, [expert * M + row, col], mine)
        else:
            tma.async_copy_shared_to_global(out, [row, col], mine)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "K", "total"])
def gluon_gemm_kernel(
    a, b, out, a_scale, b_scale, bias, tiles, starts, sizes,
    M, N, K, b_rows, total,
    a_stride_e, a_stride_f, a_stride_k, b_stride_e, b_stride_f, b_stride_k,
    FORM: gl.constexpr, GROUPS: gl.constexpr, BIAS: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """out [M, N] ([E, M, N] of experts, seen as [E * M, N]) = a contracted with b; descriptors of boxes [64, 128],
    [BN, 128] and [64, BN]. ``total``: tiles in all."""
    a_bufs = gl.allocate_shared_memory(a.dtype, [2 * STAGES, HALF, BK], a.layout)
    b_bufs = gl.allocate_shared_memory(b.dtype, [STAGES, BN, BK], b.layout)
    buffer = gl.allocate_shared_memory(out.dtype, [2, HALF, BN], out.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()  # the copies that count in them see them begun
    scales = (a_scale, a_stride_e, a_stride_f, a_stride_k, b_scale, b_stride_e, b_stride_f, b_stride_k)
    groups = (tiles, starts, sizes)
    stages = (a_bufs, b_bufs, ready, empty)
    gl.warp_specialize(
        [
            (_multiply, (scales, out, bias, groups, stages, buffer, M, N, K, total, 0, FORM, GROUPS, BIAS, BN, STAGES)),
            (_multiply, (scales, out, bias, groups, stages, buffer, M, N, K, total, 1, FORM, GROUPS, BIAS, BN, STAGES)),
            (_load, (a, b, groups, stages, M, N, K, b_rows, total, GROUPS, BN, STAGES)),
        ],
        [4, 1],
        [232, 24],
    )
