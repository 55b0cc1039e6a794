"""Single faults that somebody could make, and the tests that ought to notice: what ``run.py`` plants.

A fragment is short and says arithmetic or logic, so that it survives moves, renames and formatting; it stands once in
its file (white space between words does not count). Where code changes so that a fragment is gone, give the fault the
fragment that says the same now and keep its name, by which results are compared. A fault that changes nothing anybody
could see is none: replace it. The tests are those that should fail, narrow enough to tell within seconds.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """``old`` in ``file`` becomes ``new``. ``what`` is wrong then; ``tests`` are arguments of pytest."""

    name: str
    area: str
    file: str
    old: str
    new: str
    what: str
    tests: tuple[str, ...]


FAULTS: list[Fault] = []


def area(name: str, *faults: tuple[str, ...]) -> None:
    """Enter faults (name, file, old, new, what, tests...) under one area."""
    for title, file, old, new, what, *tests in faults:
        FAULTS.append(Fault(title, name, f"octavo/{file}", old, new, what, tuple(f"tests/{t}" for t in tests)))


area(
    "casts",
    (
        "cast-ragged-border", "fp8/cast.py",
        "slice(full, full + 1), 1, rest", "slice(full - 1, full), 1, rest",
        "the ragged last block takes the scale of the block before it",
        "fp8/test_cast.py",
    ),
    (
        "cast-pow2-carry", "fp8/cast.py",
        "0x1FFFFF - (spec.fmt.max_exponent", "0x3FFFFF - (spec.fmt.max_exponent",
        "powers of two round up at 1.5 instead of 1.75",
        "fp8/test_cast.py",
    ),
    (
        "cast-floor-edge", "fp8/cast.py",
        "bits < _FLOOR_BITS", "bits <= _FLOOR_BITS",
        "an amax of exactly 2^-100 counts as tiny",
        "fp8/test_cast.py",
    ),
    (
        "cast-infinity-is-good", "fp8/cast.py",
        "high >= _INF_BITS", "high > _INF_BITS",
        "an infinity without a NaN beside it does not spoil its block",
        "fp8/test_cast.py",
    ),
    (
        "cast-negative-not-clamped", "fp8/cast.py",
        "clamp_(-spec.fmt.max, spec.fmt.max)", "clamp_(max=spec.fmt.max)",
        "under a given scale negative values beyond the range are not clamped",
        "fp8/test_cast.py", "fp8/test_delayed.py",
    ),
    (
        "rowwise-wgrad-axis", "fp8/recipe.py",
        '"rowwise": (_ROW, _ROW, _ROW, _COLUMN, _COLUMN, _COLUMN)',
        '"rowwise": (_ROW, _ROW, _ROW, _COLUMN, _ROW, _COLUMN)',
        "rowwise casts dy for wgrad along the wrong axis",
        "fp8/test_recipe.py", "fp8/test_linear.py",
    ),
    (
        "triton-encode-ties", "fp8/kernels/triton_kernels/bits.py",
        "(1 << (SHIFT - 1)) - 1) + ((low >> SHIFT) & 1)", "(1 << (SHIFT - 1)) - 1) + 1",
        "ties go away from zero instead of to even",
        "fp8/kernels/test_triton_bits.py",
    ),
    (
        "triton-bad-padding", "fp8/kernels/triton_kernels/cast_tiles.py",
        "codes = tl.where(real, codes, 0)", "codes = codes + 0",
        "the padding of a bad block is NaN instead of zero",
        "fp8/kernels/test_triton_cast.py",
    ),
    (
        "triton-ragged-columns", "fp8/kernels/triton_kernels/cast_blocks.py",
        "1 if CAST.cols == -1 else tl.cdiv(K, CAST.cols)", "1 if CAST.cols == -1 else K // CAST.cols",
        "the scale of a ragged last column of blocks is not written",
        "fp8/kernels/test_triton_cast.py",
    ),
    (
        "triton-amax-last-step", "fp8/kernels/triton_kernels/cast_tiles.py",
        "top = tl.maximum(top, bits)", "top = bits",
        "the amax of long rows is that of their last tile",
        "fp8/kernels/test_triton_cast.py",
    ),
    (
        "triton-e8m0-byte-zero", "fp8/kernels/triton_kernels/cast_tiles.py",
        "tl.where(byte == 0, 0x00400000, byte << 23)", "byte << 23",
        "the e8m0 byte of 2^-127 decodes to zero",
        "fp8/kernels/test_triton_cast.py",
        "fp8/kernels/test_interpreter.py",
    ),
    (
        "triton-padding-rows-count", "fp8/kernels/triton_kernels/cast_tiles.py",
        "tl.load(starts_ptr + group) + tl.load(sizes_ptr + group)",
        "tl.load(starts_ptr + group) + tl.cdiv(tl.load(sizes_ptr + group), 128) * 128",
        "padding rows of an expert take part in its amax",
        "fp8/kernels/test_triton_grouped_cast.py",
    ),
    (
        "delayed-history-keeps-the-oldest", "fp8/scaling.py",
        "torch.cat([value.reshape(1), row[:-1]])", "torch.cat([value.reshape(1), row[1:]])",
        "the amax history drops the newest entry and keeps the oldest",
        "fp8/test_delayed.py",
    ),
    (
        "delayed-empty-history", "fp8/scaling.py",
        "torch.where(largest > 0, largest, amax)", "largest",
        "an empty history gives the scale of zero instead of the current one",
        "fp8/test_delayed.py",
    ),
    (
        "delayed-bad-dy-remembered", "fp8/scaling.py",
        "_pushed(rows.dy, amax, amax.isfinite())", "_pushed(rows.dy, amax, amax == amax)",
        "an infinite gradient enters the amax history",
        "fp8/test_delayed.py",
    ),
    (
        "saturation-edge", "fp8/metrics.py",
        "fmt.max + 2.0 ** (fmt.max_exponent - fmt.mantissa_bits - 1)", "fmt.max * 1.0",
        "values that round to the largest code count as saturated",
        "fp8/test_metrics.py",
    ),
)  # fmt: skip

area(
    "GEMMs",
    (
        "gemm-bias-after-rounding", "fp8/kernels/reference.py",
        '"fwd", x_q, 1, w_q, 1, torch.float32) + bias.float()',
        '"fwd", x_q, 1, w_q, 1, out_dtype).float() + bias.float()',
        "the bias is added to the rounded product",
        "fp8/test_linear.py -k bias",
    ),
    (
        'wgrad-takes-fwd-codes-of-x', 'fp8/dense/inputs.py',
        'found = found[0] or made[0], found[1] or made[1]',
        'found = (found[0] or made[0],) * 2',
        'wgrad multiplies by the codes of x that the forward made',
        'fp8/test_linear.py',
    ),
    (
        'dgrad-takes-fwd-codes-of-w', 'fp8/dense/gemms.py',
        '"dgrad", weight, part, gemm.b)',
        '"dgrad", weight, part, (site.recipe.fwd or gemm).b)',
        "dgrad multiplies by the weight's codes of the forward",
        'fp8/test_linear.py',
    ),
    (
        "wgrad-takes-dgrad-codes-of-dy", "fp8/shared_input.py",
        "first.quantize_both(x, row.spec, col.spec)", "(first.quantize(x, row.spec, 1),) * 2",
        "wgrad multiplies by the codes that the other GEMM took",
        "fp8/test_linear.py",
    ),
    (
        "wgrad-transposed", "fp8/kernels/reference.py",
        '_gemm("wgrad", dy_q, 0, x_q, 0, out_dtype)', '_gemm("wgrad", x_q, 0, dy_q, 0, out_dtype)',
        "wgrad gives dw transposed",
        "fp8/kernels/test_reference.py",
    ),
    (
        "reference-range", "fp8/kernels/reference.py",
        "torch.where((a >= 2.0**80) & (b < 2.0**80), 2.0**40, 1.0)",
        "torch.where((a >= 2.0**127) & (b < 2.0**80), 2.0**40, 1.0)",
        "a sum under a very large scale of x overflows where the product does not",
        "fp8/kernels/test_reference.py", "fp8/kernels/test_torch_backend.py",
        "fp8/kernels/test_deepgemm.py",
    ),
    (
        "triton-bias-of-the-first-tile", "fp8/kernels/triton_kernels/contraction.py",
        "tl.load(bias + c, mask=c < cols, other=0)", "tl.load(bias + c - col, mask=c < cols, other=0)",
        "every column tile adds the bias of the first",
        "fp8/kernels/test_triton_gemm.py",
        "fp8/kernels/test_interpreter.py",
    ),
    (
        "triton-scale-step", "fp8/kernels/triton_kernels/contraction.py",
        "_scale(b_scales, k // B.side, B, BLOCK_N)", "_scale(b_scales, k // 128, B, BLOCK_N)",
        "b takes the scale of the 128 around its 32",
        "fp8/kernels/test_triton_gemm.py",
    ),
    (
        "triton-range", "fp8/kernels/triton_kernels/contraction.py",
        "tl.where(product > LARGEST, LARGEST, product)", "tl.where(product > LARGEST, product, product)",
        "a sum of zero under two very large scales is no number",
        "fp8/kernels/test_triton_gemm.py",
    ),
    (
        "triton-coarse-sums", "fp8/kernels/triton_kernels/tiles.py",
        "promote=whole and not (fast or exact)", "promote=False",
        "dgrad and wgrad sum inside the tensor cores of Hopper",
        "fp8/kernels/test_triton_gemm.py -k 'not many_sizes'",
    ),
    (
        "decode-cut-by-rows", "fp8/kernels/triton_kernels/decode.py",
        "_plan((x_q.spec, 1), (w_q.spec, 1), cols, contracted, gpu)",
        "_plan((x_q.spec, 1), (w_q.spec, 1), cols, contracted, gpu._replace(processors=rows))",
        "few rows are summed in other parts than many, so that a row's bits depend on the batch",
        "fp8/kernels/test_decode.py",
    ),
    (
        "decode-parts-backwards", "fp8/kernels/triton_kernels/decode.py",
        "tl.static_range(1, PARTS)", "tl.static_range(PARTS - 1, 0, -1)",
        "parts of a product are added in another order than they say",
        "fp8/kernels/test_decode.py",
    ),
    (
        "decode-while-training", "fp8/dense/linear.py",
        "DENSE if grad else NO_GRADIENT", "NO_GRADIENT",
        "a forward with a gradient takes the kernel of a rollout, and its bits change with it",
        "fp8/kernels/test_decode.py",
    ),
    (
        "gluon-scales-of-the-step-before", "fp8/kernels/triton_kernels/gluon_kernel.py",
        "                b_at += b_k\n", "                b_at += 0 * b_k\n",
        "the first scale of w serves the whole contraction",
        "fp8/kernels/test_gluon.py",
    ),
    (
        "gluon-loads-too-early", "fp8/kernels/triton_kernels/gluon_kernel.py",
        "mbarrier.init(empty.index(i), count=2)", "mbarrier.init(empty.index(i), count=1)",
        "a stage is overwritten when one warpgroup of two has read it",
        "fp8/kernels/test_gluon.py",
    ),
    (
        "torch-bias-untried", "fp8/kernels/torch_backend.py",
        "(fast or bias_why_not(bias.device, out_dtype) is None)", "(fast or out_dtype)",
        "a bias goes into a product of blocks wherever",
        "fp8/kernels/test_torch_backend.py",
    ),
    (
        "torch-swizzle", "fp8/kernels/torch_backend.py",
        "tiles.permute(0, 3, 2, 1, 4)", "tiles.permute(0, 3, 1, 2, 4)",
        "MXFP8 scales reach cuBLAS in another order",
        "fp8/kernels/test_torch_backend.py",
    ),
    (
        "torch-two-e5m2", "fp8/kernels/torch_backend.py",
        'if kind is None or a.format == b.format == "e5m2":', "if kind is None:",
        "a product of two E5M2 matrices is asked of cuBLAS, which has none",
        "fp8/kernels/test_torch_backend.py",
    ),
    (
        "torch-fast-gradients", "fp8/kernels/torch_backend.py",
        'fast = op == "fwd" and product.kind in ("tensor", "row")', 'fast = product.kind in ("tensor", "row")',
        "gradients accumulate fast and coarsely",
        "fp8/kernels/test_torch_backend.py", "fp8/kernels/test_fake_cuda.py",
    ),
    (
        "deepgemm-owners", "fp8/kernels/deepgemm_backend.py",
        "groups.tiles[:, None].expand(-1, TILE).reshape(-1)", "groups.tiles.repeat(TILE)",
        "rows are given to the wrong experts",
        "fp8/kernels/test_deepgemm.py",
    ),
    (
        "layout-contraction-padding", "fp8/kernels/layout.py",
        "round_up(contracted, max(side, ALIGN))", "round_up(contracted, ALIGN)",
        "codes are not padded to whole blocks along the contraction",
        "fp8/kernels/test_layout.py",
    ),
    (
        "requested-backend-falls-back", "fp8/kernels/registry.py",
        'if requested != "auto":',
        'if requested != "auto" and get(requested).supports(op, recipe_or_spec, device, shape) is None:',
        "a backend that was asked for by name and cannot serve is replaced in silence",
        "fp8/test_registry.py",
    ),
)  # fmt: skip

area(
    "experts",
    (
        "groups-border", "fp8/kernels/groups.py",
        "(sizes + TILE - 1) // TILE * TILE", "sizes // TILE * TILE + TILE",
        "an expert with whole tiles gets one more",
        "fp8/kernels/test_groups.py",
    ),
    (
        "groups-owner-at-a-border", "fp8/kernels/groups.py",
        "tile_rows, right=True", "tile_rows, right=False",
        "the first tile of an expert belongs to the one before",
        "fp8/kernels/test_groups.py",
    ),
    (
        "grouped-wgrad-first-tile", "fp8/kernels/triton_kernels/grouped.py",
        "tl.cdiv(tl.load(sizes + expert), OWNED) * OWNED", "tl.minimum(tl.load(sizes + expert), 1) * OWNED",
        "wgrad sums the first 128 rows of an expert",
        "fp8/kernels/test_triton_grouped.py",
    ),
    (
        "grouped-scale-of-the-first-expert", "fp8/kernels/triton_kernels/grouped.py",
        "b_scale += expert.to(tl.int64) * b_stride_e\n    acc = contract(\n        (a, row, rows, a_held)",
        "acc = contract(\n        (a, row, rows, a_held)",
        "every expert's weight takes the scales of the first",
        "fp8/kernels/test_triton_grouped.py",
    ),
    (
        "experts-token-of-a-choice", "fp8/experts.py",
        'pair_of.div(top_k, rounding_mode="floor")', "pair_of % max(hidden.shape[0], 1)",
        "choices take the rows of other tokens",
        "fp8/test_experts.py",
    ),
    (
        "experts-nobody-has-weight", "fp8/experts.py",
        "top_k_weights.reshape(-1, 1).masked_fill(nobody, 0)", "top_k_weights.reshape(-1, 1)",
        "a choice of no expert adds the answer of another row",
        "fp8/test_experts.py", "fp8/test_grouped.py",
    ),
    (
        "experts-gradient-of-nobody", "fp8/experts.py",
        ".masked_fill_((row_of >= dy.shape[0]).unsqueeze(1), 0)", "",
        "a choice of no expert sends the gradient of another row to its token",
        "fp8/test_experts.py", "fp8/test_grouped.py",
    ),
)  # fmt: skip

area(
    "caches",
    (
        "cache-forgets-nothing", "fp8/weights.py",
        "self._codes.clear() self._source, self._stamp =", "self._source, self._stamp =",
        "a changed weight is marked as known and its old codes are used",
        "fp8/test_cache.py",
    ),
    (
        'cache-misses-fused-optimizers', 'fp8/weights/versions.py',
        'now += 1',
        'now += 0',
        'an optimizer that hides its write from the version counter leaves old codes',
        'fp8/test_cache.py',
    ),
    (
        "load-state-dict-not-told", "fp8/weights.py",
        "super()._load_from_state_dict(*args, **kwargs) clock.edited()",
        "super()._load_from_state_dict(*args, **kwargs)",
        "ranks do not learn together that weights were loaded",
        "fp8/test_fsdp_cache.py", "parallel/test_param_gather.py", "fp8/weights/test_fp8_tensor.py",
    ),
    (
        "recast-keeps-codes", "fp8/weights.py",
        "keep = self.keep and not", "keep = not",
        "weight_codes: recast keeps the codes of every weight",
        "fp8/test_cache.py", "fp8/weights/test_fp8_tensor.py", "fp8/test_plan.py", "train/test_savings.py",
    ),
    (
        "shared-input-version", "fp8/shared_input.py",
        "given._version, given.data_ptr(),", "given.data_ptr(),",
        "an input written to in place between two layers keeps its codes",
        "fp8/dense/test_inputs.py",
    ),
    (
        "shared-input-dtype", "fp8/shared_input.py",
        "given.dtype, x.dtype, device,", "given.dtype, device,",
        "codes made under another autocast dtype are shared",
        "fp8/dense/test_inputs.py",
    ),
    (
        "shared-input-never-forgotten", "fp8/shared_input.py",
        "for memo in list(_memos): memo.entry = None", "for memo in (): memo.entry = None",
        "codes of an input outlive an optimizer step",
        "fp8/dense/test_inputs.py",
    ),
    (
        'gathered-codes-version', 'fp8/weights/fp8_codes.py',
        '0 if cut else self.version',
        '0',
        'a shard of an FP8 weight that was written to is gathered with its former codes',
        'fp8/weights/test_fsdp_cache.py', 'fp8/weights/test_fp8_tensor.py', 'fp8/weights/test_fp8_rows.py',
        'parallel/test_param_gather.py',
    ),
    (
        'frozen-codes-recast', 'fp8/weights/fp8_codes.py',
        '(self.frozen and (q.spec.format, q.spec.block) == (spec.format, spec.block))',
        'False',
        'frozen codes with scales of another kind are decoded and cast again',
        'fp8/test_frozen_scales.py', 'fp8/planning/test_frozen.py',
    ),
    (
        "frozen-shard-border", "fp8/frozen_tensor.py",
        "ceil_div(end + self.lead, height)", "ceil_div(end, height)",
        "a part of a shard that begins inside a block lacks its last scales",
        "fp8/weights/test_frozen.py", "fp8/test_frozen_ranks.py",
    ),
    (
        "frozen-scale-kind", "fp8/frozen.py",
        "whole.update(scales.contiguous()", "whole.update(scales[:0].contiguous()",
        "the fingerprint of a frozen base does not see its scales",
        "fp8/weights/test_frozen.py",
    ),
)  # fmt: skip

area(
    "plan checks",
    (
        "rule-that-matches-nothing", "fp8/plan_checks.py",
        "if not any(applies(rule, r) for r in rows):", "if not rows:",
        "a rule that matches no layer is accepted",
        "fp8/test_plan.py",
    ),
    (
        'asked-and-not-met', 'fp8/planning/decide.py',
        'check_met(policy, rows, {row.name for row, _, why_not in asked if why_not is None})',
        'None',
        'a component that asks for FP8 and cannot run in it stays in high precision in silence',
        'fp8/test_plan.py',
    ),
    (
        'plan-of-another-model', 'fp8/planning/apply.py',
        '_check_same_model(model, plan) by_module',
        'by_module',
        'a plan is applied to a model that it was not made for',
        'fp8/test_plan.py', 'fp8/planning/test_frozen.py',
    ),
    (
        "later-rule-loses", "fp8/policy.py",
        "for rule in rules: decision = decision.over(", "for rule in reversed(rules): decision = decision.over(",
        "of two rules the first wins",
        "fp8/test_plan.py",
    ),
    (
        "projector-by-its-format", "fp8/policy.py",
        "(given is None or given.recipe is None)", "given is None",
        "a projector that is given a format alone runs in FP8",
        "fp8/test_plan.py", "config",
    ),
    (
        "star-crosses-dots", "fp8/globs.py",
        '''"[^.]*" if c == "*"''', '''".*" if c == "*"''',
        "one star spans several segments of a name",
        "fp8/test_topology.py", "fp8/test_plan.py",
    ),
    (
        "frozen-share", "fp8/plan.py",
        "gemms = GEMMS[:2] if self.row.frozen else GEMMS", "gemms = GEMMS",
        "the share of a frozen layer counts a wgrad that it has not",
        "fp8/test_plan.py", "fp8/planning/test_frozen.py",
    ),
    (
        'plan-file-capability', 'fp8/planning/file.py',
        '(then.gpu, then.capability) != (here.gpu, here.capability)',
        'then.gpu != here.gpu',
        'a plan of a GPU with another compute capability is taken',
        'fp8/planning/test_file.py', 'train/test_planning.py',
    ),
    (
        "plan-file-shapes", "fp8/plan_file.py",
        "if was.get(n) != now.get(n)]", "if (n in was) != (n in now)]",
        "a plan of a model with other shapes is taken",
        "fp8/planning/test_file.py",
    ),
    (
        'plan-file-first-line-wins', 'fp8/policy/policy.py',
        '{"why": level.why, "backends": level.backends}',
        '{"why": self.why or level.why, "backends": self.backends or level.backends}',
        'the backend of the first matching line is taken',
        'fp8/planning/test_file.py',
    ),
    (
        "measured-tie-is-a-win", "fp8/choose.py",
        "if cost < high * (1 - MARGIN): return", "if cost < high * (1 + MARGIN): return",
        "FP8 is chosen where it only ties",
        "fp8/test_measure.py",
    ),
    (
        "stock-experts-not-compared", "fp8/experts.py",
        "if gap > allowed or not torch.equal(stock.isnan(), ours.isnan()):",
        "if not torch.equal(stock.isnan(), ours.isnan()):",
        "experts whose stock forward differs are converted",
        "fp8/test_experts.py",
    ),
)  # fmt: skip

area(
    "proof",
    (
        "proof-accepts-a-missing-wgrad", "fp8/proof.py",
        'if due["wgrad"] != planned:', 'if due["wgrad"] > planned:',
        "a weight that asked for no gradient passes",
        "fp8/test_proof.py",
    ),
    (
        "proof-accepts-another-backend", "fp8/proof.py",
        "if backend != named:", "if backend != named and backend == HIGH:",
        "a GEMM that ran on another backend than planned passes",
        "fp8/test_proof.py",
    ),
    (
        "proof-does-not-count-recomputation", "fp8/proof.py",
        'if any(due.values()) and _calls(ran, "recompute") > forward:', "if False:",
        "forwards recomputed more often than they ran pass",
        "fp8/test_proof.py",
        "fp8/test_recompute.py",
        "fp8/test_linear.py",
    ),
    (
        "uncounted-span-edge", "fp8/observe.py",
        "number < self.lasts[at]", "number <= self.lasts[at]",
        "the node behind an uncounted block is uncounted too",
        "fp8/test_linear.py", "fp8/test_delayed.py", "fp8/test_proof.py",
        "fp8/test_recompute.py",
    ),
)  # fmt: skip

area(
    "optimizer",
    (
        "adamw-no-first-correction", "fp8/optim/update.py",
        "_fp32(float(lr) / correction)", "_fp32(float(lr))",
        "the first moment has no bias correction",
        "fp8/arithmetic/test_adamw.py", "fp8/optim/test_adamw.py",
    ),
    (
        "adamw-eps-place-cpu", "fp8/optim/cpu.py",
        ".mul_(s.root).add_(s.eps)", ".add_(s.eps).mul_(s.root)",
        "eps is added before the correction on the CPU",
        "fp8/arithmetic/test_adamw.py",
    ),
    (
        "adamw-eps-place", "fp8/optim/update.py",
        "root(v) * s.root + s.eps", "(root(v) + s.eps) * s.root",
        "eps is added before the correction in the reference",
        "fp8/arithmetic/test_adamw.py",
    ),
    (
        "dither-of-every-step", "fp8/optim/moments.py",
        "start * 0xC13FA9A9 + step * 0x9E3779B9 + seed", "start * 0xC13FA9A9 + seed",
        "stochastic rounding takes the same bits at every step",
        "fp8/arithmetic/test_moments.py", "fp8/arithmetic/test_adamw.py", "fp8/kernels/test_adamw.py",
        "fp8/optim/test_adamw.py",
    ),
    (
        "random-bits-of-every-parameter", "fp8/optim/philox.py",
        "rounds(counter, step & _MASK, parameter & _MASK, seed)", "rounds(counter, step & _MASK, 0, seed)",
        "all parameters are rounded by the same bits",
        "fp8/optim/test_philox.py",
    ),
    (
        "master-low-bits", "fp8/optim/cpu.py",
        '"master_low"].copy_(bits)', '"master_low"].zero_()',
        "the lower halves of the weights are dropped at each step",
        "fp8/arithmetic/test_adamw.py",
    ),
    (
        "written-weight-ignored", "fp8/optim/adamw.py",
        'elif "master" in state and self._written.get(p) != _mark(p):', "elif False:",
        "a weight that was loaded between two steps is overwritten by its former master",
        "fp8/optim/test_adamw.py",
    ),
    (
        "clip-enlarges", "fp8/optim/in_backward.py",
        "(clip / (norm + 1e-6)).clamp(max=1.0)", "(clip / (norm + 1e-6))",
        "small gradients are enlarged to the norm of clipping",
        "fp8/optim/test_in_backward.py", "train/test_step.py",
        "train/test_optim.py",
        "train/test_losses.py",
    ),
    (
        "v-range-too-narrow", "fp8/optim/moments.py",
        "((hi - lo + 507) // 508).clamp", "((hi - lo) // 508).clamp",
        "the grid of second moments is finer than its format says where 508 steps do not hold a group",
        "fp8/arithmetic/test_moments.py", "fp8/arithmetic/test_adamw.py",
        "fp8/kernels/test_adamw.py",
        "fp8/optim/test_adamw.py",
    ),
    (
        "shard-border", "fp8/optim/sharded.py",
        "each = -(-rows // ranks)", "each = max(1, rows // ranks)",
        "the groups that two ranks share are looked for at the wrong rows",
        "fp8/optim/test_sharded.py",
    ),
    (
        "decay-of-norms", "train/optim.py",
        'parameter.ndim < 2 or last == "bias"', 'last == "bias"',
        "weights of norms are decayed",
        "train/test_optim.py",
    ),
    (
        "offload-stale-states", "fp8/optim/offload.py",
        "ahead is not None and ahead.stamp == batch.stamp", "ahead is not None",
        "states written since they were fetched ahead are not fetched again",
        "fp8/optim/test_offload.py",
    ),
    (
        "triton-adamw-sign", "fp8/kernels/triton_kernels/adamw_kernels.py",
        "tl.where(r < 0, -code, code)", "tl.where(m < -1.0, -code, code)",
        "small negative first moments lose their sign",
        "fp8/kernels/test_adamw.py",
    ),
    (
        "state-dict-forgets-the-step", "fp8/optim/state_dict.py",
        'fill_(float(values["step"]) if values else 0.0)', "fill_(0.0)",
        "a loaded optimizer begins its bias correction anew",
        "fp8/optim/test_state_dict.py",
    ),
    (
        "state-dict-of-another-master", "fp8/optim/state_dict.py",
        "if saved[key] != group[key]:", 'if saved["states"] != group["states"]:',
        "states of another kind of master are taken",
        "fp8/optim/test_state_dict.py",
    ),
)  # fmt: skip

area(
    "loader",
    (
        "loader-order-after-resume", "data/loader.py",
        "itertools.count(self.start, self.stride)", "itertools.count(0, self.stride)",
        "a resumed run reads the rows from the beginning",
        "data/test_loader.py",
    ),
    (
        "loader-rank-offset", "data/loader.py",
        "first = self.rank * mine", "first = self.rank",
        "ranks read rows of each other",
        "data/test_loader.py",
    ),
    (
        "bad-row-swallowed", "data/loader.py",
        '(self.on_bad == "error" and not isinstance(made, LongSample))', "False",
        "on_bad_sample: error leaves bad rows out",
        "data/test_loader.py",
    ),
    (
        "mixture-same-order-each-epoch", "data/mixture.py",
        "self.seed, 2, source, epoch)", "self.seed, 2, source)",
        "every epoch has the order of the first",
        "data/test_mixture.py",
    ),
    (
        "mixture-weights-without-sizes", "data/mixture.py",
        "[w * n for w, n in zip(weights, self.sizes", "[w for w, _ in zip(weights, self.sizes",
        "a weight is a share of rows instead of a multiple of the data set",
        "data/test_mixture.py",
    ),
    (
        "label-mask-end", "data/expansion.py",
        "int(inside[-1]) + 1)", "int(inside[-1]))",
        "the last token of an answer has no loss",
        "data/test_encode.py",
    ),
    (
        "cut-keeps-half-answers", "data/encode.py",
        "if span[1] <= end)", "if span[0] < end)",
        "an answer that was cut counts as a whole one",
        "data/test_encode.py",
    ),
    (
        "collate-padding-has-a-loss", "data/collate.py",
        "_padded([s.labels for s in samples], longest, IGNORE)",
        "_padded([s.labels for s in samples], longest, pad_id)",
        "padding is learned",
        "data/test_collate.py",
    ),
    (
        "eval-set-ranks", "data/evalset.py",
        "(turn * self.world + self.rank) * self.micro_batch", "turn * self.world * self.micro_batch + self.rank",
        "ranks evaluate some questions twice and some never",
        "data/test_loader.py", "train/test_evaluation.py", "data/test_build.py",
    ),
    (
        "image-outside-its-folder", "data/images.py",
        "if not path.is_relative_to(root):", "if not root.exists():",
        "a row may name a file outside the image folder",
        "data/test_images.py",
    ),
    (
        "image-of-any-format", "data/images.py",
        "Image.open(path, formats=known)", "Image.open(path)",
        "an image that is PostScript starts Ghostscript",
        "data/test_pixels.py",
    ),
    (
        "transparent-is-black", "data/images.py",
        'image.size, "white")', 'image.size, "black")',
        "what is transparent shows black",
        "data/test_pixels.py",
    ),
    (
        "long-rows-are-rendered", "data/bound.py",
        "if room >= 0 and len(turns) <= tokens:", "if True:",
        "a row of 20 MB is rendered before it is dropped",
        "data/test_encode.py",
    ),
)  # fmt: skip

area(
    "rewards",
    (
        "prompt-without-its-opening", "data/encode.py",
        "rendered(turns, self._render, given is None)", "rendered(turns, self._render)",
        "a prompt ends before what opens the answer",
        "data/test_prompts.py",
    ),
    (
        "given-answers-are-learned", "data/template.py",
        "answers[given:]", "answers",
        "answers of the shared prompt of a pair have labels",
        "data/test_pairs.py",
    ),
    (
        "prompt-numbers-of-a-rank", "data/loader.py",
        "[(self.rows + n, self._judge", "[(self.rows + n - first, self._judge",
        "two ranks draw the same random numbers for other prompts",
        "data/test_prompts.py",
    ),
    (
        "rejected-before-chosen", "data/pairs.py",
        "[pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]",
        "[pair.rejected for pair in pairs] + [pair.chosen for pair in pairs]",
        "the worse answer is preferred",
        "data/test_pairs.py",
    ),
    (
        "labelled-rows-crossed-with-themselves", "data/pairs.py",
        "for sample in mine[-1:]] + mine[:-1]", "for sample in mine[:1]] + mine[1:]",
        "the KL term of KTO sees the answers that belong to the prompts",
        "data/test_pairs.py",
    ),
    (
        "images-of-the-answer", "data/prompts.py",
        "find_images(names[:count], images)", "find_images(names, images)",
        "images behind the prompt are given to it",
        "data/test_prompts.py",
    ),
    (
        "rewards-of-a-group-shifted", "data/prompts.py",
        "for sample in samples for _ in range(group)", "for _ in range(group) for sample in samples",
        "completions are judged by the references of other prompts",
        "data/test_prompts.py",
    ),
    (
        "nan-is-a-reward", "rl/rewards/rewards.py",
        "if isinstance(value, str) or not math.isfinite(value)", "if isinstance(value, str)",
        "NaN and infinity are rewards",
        "rl/test_rewards.py",
    ),
    (
        "reward-counts-not-compared", "rl/rewards/worker.py",
        "if len(values) != len(completions):", "if not values:",
        "fewer rewards than completions are taken",
        "rl/test_rewards.py",
    ),
    (
        "rewards-without-weights", "rl/rewards/rewards.py",
        "totals += entry.weight * each", "totals += each",
        "weights of rewards do nothing",
        "rl/test_rewards.py",
    ),
    (
        "reward-time-limit", "rl/rewards/process.py",
        "self._socket.settimeout(max(1e-3, until - time.monotonic()))", "self._socket.settimeout(None)",
        "a reward may hang for ever",
        "rl/test_rewards.py",
    ),
    (
        "worker-outlives-its-trainer", "rl/rewards/worker.py",
        "while os.getppid() == trainer:", "while True:",
        "a reward that hangs goes on after kill -9",
        "rl/test_rewards.py",
    ),
    (
        "rewards-changed-unseen", "rl/rewards/entry.py",
        'else _hash(self.source)', 'else _hash(self.reward)',
        "a run goes on with another reward function",
        "rl/test_rewards.py",
    ),
    (
        "reward-model-reads-the-prompt-alone", "rl/rewards/model.py",
        '[*turns, {"role": "assistant", "content": completion}]', '[*turns]',
        "a reward model does not see what it judges",
        "rl/test_reward_model.py",
    ),
    (
        "reward-model-sees-padding", "rl/rewards/model.py",
        "[row + [pad] * (longest - len(row)) for row in rows]",
        "[[pad] * (longest - len(row)) + row for row in rows]",
        "a reward depends on its neighbours' lengths",
        "rl/test_reward_model.py",
    ),
)  # fmt: skip

area(
    "critic",
    (
        "policy-is-the-critic", "adapters/attach.py",
        "layer._active_adapter = [NAME]", "pass",
        "the second adapter computes where the first should",
        "adapters/test_attach.py",
    ),
    (
        "critic-shares-the-limit", "train/update.py",
        "critic.parameters(model) if apart else ()", "()",
        "a critic that is far off shrinks the policy's step",
        "rl/test_critic.py",
    ),
    (
        "critic-lr-of-the-policy", "train/optim.py",
        "lr * group.get(FACTOR, 1.0)", "lr",
        "rl.critic_lr does nothing",
        "rl/test_critic.py",
    ),
    (
        "whitened-by-part", "rl/critic.py",
        "whiten(advantages, mask, of_batch[0])", "whiten(advantages, mask, moments(advantages, mask))",
        "advantages depend on how completions are cut into micro-batches",
        "rl/test_critic.py",
    ),
    (
        "returns-are-whitened", "rl/critic.py",
        "of_batch[0]), returns", "of_batch[0]), whiten(returns, mask, of_batch[1])",
        "the critic learns whitened returns",
        "rl/test_critic.py",
    ),
)  # fmt: skip

area(
    "training",
    (
        "targets-shift", "train/losses.py",
        "return labels[:, 1:]", "return labels[:, :-1]",
        "a token is learned from itself",
        "train/test_losses.py", "train/test_step.py",
    ),
    (
        "loss-by-sample", "train/losses.py",
        "known / known.sum(dim=1, keepdim=True).clamp(min=1)", "known / known.sum().clamp(min=1)",
        "loss: sample weighs samples by their lengths",
        "train/test_losses.py",
    ),
    (
        "chunked-loss-border", "fp8/logits.py",
        "(at >= 0) & (target < block.stop)", "(at >= 0) & (target <= block.stop)",
        "a class at the border of two chunks is taken from the wrong one",
        "fp8/memory/test_chunked_loss.py",
    ),
    (
        "chunked-loss-last-chunk", "fp8/logits.py",
        "slice(start, min(start + width, size))", "slice(start, min(start + width, size - size % width or size))",
        "the classes of a ragged last chunk are left out",
        "fp8/memory/test_chunked_loss.py",
    ),
    (
        "head-partition-follows-tokens", "fp8/memory/head_gemms.py",
        "site.codes.block or size + _BLOCK", "size + _BLOCK",
        "a head's weight is cast again whenever the number of tokens changes",
        "fp8/memory/test_head_fp8.py",
    ),
    (
        "head-stays-fp8-in-high-precision", "fp8/memory/chunked_head.py",
        "site is not None and not site.selections", "site is None",
        "a head in FP8 gives the losses of a moment of high precision",
        "fp8/memory/test_head_fp8.py",
    ),
    (
        "head-reached-by-any-glob", "fp8/policy/decisions.py",
        "rule.match == row.name and rule.recipe is not None", "rule.recipe is not None",
        "a rule for all layers takes the head along",
        "fp8/memory/test_head_fp8.py",
    ),
    (
        "codes-of-a-written-norm", "fp8/dense/compiled.py",
        "torch.ops.octavo.unwritten(x.detach())", "pass",
        "a compiled layer multiplies the codes of what its input was before a write",
        "fp8/blocks/test_compiled.py",
    ),
    (
        "compiled-norm-keeps-its-codes", "fp8/dense/compiled.py",
        "left is not None and left[0] == x_MK.dtype", "False and left[0] == x_MK.dtype",
        "compiled layers cast what a norm has cast",
        "fp8/blocks/test_compiled.py",
    ),
    (
        "schedule-one-step-late", "train/schedule.py",
        "(step - 1 - warmup) / max(1, steps - warmup)", "(step - warmup) / max(1, steps - warmup)",
        "the learning rate is one step ahead",
        "train/test_schedule.py",
    ),
    (
        "infinite-loss-is-applied", "train/update.py",
        "bool(parts.isfinite().all() & norm.isfinite())", "bool(norm.isfinite())",
        "a step whose loss is not finite is applied",
        "train/test_step.py", "train/test_nonfinite.py",
        "train/test_losses.py",
    ),
    (
        "gain-window-random-numbers", "train/gain.py",
        "checkpoint.rng.restore(generators, world.rank)", "None",
        "measuring the gain changes the random numbers of the run",
        "train/test_gain.py",
    ),
    (
        "gradients-averaged-by-ranks", "parallel/shard.py",
        "set_gradient_divide_factor(1.0)", "set_gradient_divide_factor(float(world.size))",
        "gradients of ranks are averaged although their losses are shares of one sum",
        "parallel/test_shard.py",
    ),
    (
        "skipped-step-leaves-histories", "train/step.py",
        "if not done.applied and histories:", "if False:",
        "a step that is not applied leaves its amaxes behind",
        "train/test_step.py -k skipped",
    ),
)  # fmt: skip

area(
    "resume",
    (
        "resume-forgets-random-numbers", "checkpoint/rng.py",
        'torch.set_rng_state(mine["torch"])', "None",
        "torch's generator does not come back",
        "checkpoint/test_rng.py",
    ),
    (
        "resume-does-not-restore-random-numbers", "train/build.py",
        "checkpoint.rng.restore(restored.extra, world.rank)", "None",
        "a resumed run draws other random numbers",
        "train/test_lora.py -k bit_for_bit",
    ),
    (
        'resume-forgets-optimizer', 'checkpoint/optimizer.py',
        'for (name, key), tensor in found.items():',
        'for (name, key), tensor in ():',
        "the optimizer's states do not come back",
        'checkpoint/test_state.py',
    ),
    (
        "resume-forgets-scaling", "train/build.py",
        "fp8.load_scaling_state(stepper.model, scaling_of(restored.extra))", "None",
        "amax histories do not come back",
        "train/test_resume.py -k 'not kill_9'",
    ),
    (
        "resume-repeats-rows", "train/rundir.py",
        "self.step, self.rows = step, rows", "self.step = step",
        "a resumed run reads rows that it has read",
        "train/test_resume.py -k 'sigterm or named'",
    ),
    (
        "dead-weights-go-on", "train/stopping.py",
        'refuse_weights(run.model, run.world, f"after step {step.number}")', "None",
        "a run whose weights are not finite skips ten steps before it ends, and names a layer's forward",
        "train/test_dead.py -k whatever",
    ),
    (
        "dead-weights-are-saved", "checkpoint/state.py",
        'if bad := fp8.not_finite(_here(state)): raise CheckpointError( f"after',
        'if bad := []: raise CheckpointError( f"after',
        "a checkpoint is written of NaN",
        "train/test_dead.py -k 'whatever or optimizer'",
    ),
    (
        "dead-checkpoints-are-loaded", "checkpoint/state.py",
        "or not_finite(path, document)", "",
        "a checkpoint of 0.4.0 that holds NaN is the newest good one",
        "train/test_dead.py -k poisoned",
    ),
    (
        "skipped-to-the-end-is-finished", "train/loop.py",
        "if not stopped and (in_a_row := run.job.progress.in_a_row):", "if in_a_row := 0:",
        "a run whose last steps were skipped has finished",
        "train/test_dead.py -k last_steps",
    ),
    (
        "keep-trusts-the-newest", "train/saving.py",
        "if step.result.applied and self.newest < step.number:", "if self.newest:",
        "the checkpoint before one that is dead is deleted before a step has shown it",
        "train/test_dead.py -k keep_never",
    ),
    (
        "negative-infinity-is-finite", "fp8/weights/finite.py",
        "low.isfinite() & high.isfinite()", "high.isfinite()",
        "an infinity below zero passes for a number",
        "fp8/weights/test_finite.py",
    ),
    (
        "checksum-not-compared", "checkpoint/files.py",
        "return None if found == wanted else", "return None if found['size'] == wanted['size'] else",
        "a flipped bit in a checkpoint is not noticed",
        "checkpoint/test_state.py",
    ),
    (
        "prune-keeps-the-oldest", "checkpoint/files.py",
        "if step <= newest][-max(keep, 1) :]", "if step <= newest][: max(keep, 1)]",
        "the newest checkpoints are removed",
        "checkpoint/test_state.py",
    ),
    (
        'replacement-cut-short', 'checkpoint/files.py',
        'atomic.restore(aside(directory, step, "old"), place(directory, step))',
        'None',
        'a checkpoint that was being replaced is not given back',
        'checkpoint/test_state.py',
    ),
    (
        'text-written-in-place', 'atomic.py',
        'else f".{file.name}.tmp")',
        'else f"{file.name}")',
        'files of a run are written over instead of replaced',
        'test_atomic.py', 'train/test_run.py',
    ),
    (
        "other-optimizer-states-taken", "checkpoint/optimizer.py",
        'was, asked = former.get(key, "fp32"), group.get(key, "fp32")', 'was = asked = group.get(key, "fp32")',
        "a checkpoint with states of another kind is not refused with its cure",
        "checkpoint/test_small_states.py",
    ),
    (
        "lock-is-shared", "train/lock.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB",
        "two processes train in one run directory",
        "train/test_lock.py",
    ),
    (
        "seed-may-change", "train/rundir.py",
        'found["run"] = {"seed": cfg.run.seed}', 'found["run"] = {}',
        "a run goes on with another seed",
        "train/test_resume.py -k 'not kill_9'",
    ),
    (
        "changed-data-of-equal-size", "train/datafiles.py",
        "now[path] != value]", 'now[path]["size"] != value["size"]]',
        "data of equal size and other contents is taken",
        "train/test_resume.py -k changed_data",
    ),
    (
        "checkpoint-outside", "checkpoint/dcp_safe.py",
        'or file != os.path.basename(file) or', "or",
        "a checkpoint may name files outside its folder",
        "checkpoint/test_dcp_safe.py",
    ),
)  # fmt: skip

area(
    "exports",
    (
        "export-smallest-scale", "checkpoint/export/__init__.py",
        "torch.stack(scales).max()", "torch.stack(scales).min()",
        "weights that engines fuse share the smallest of their scales",
        "checkpoint/test_export.py", "checkpoint/test_export_run.py",
    ),
    (
        "export-expert-order", "checkpoint/export/names.py",
        "half, e = divmod(i, count)", "e, half = divmod(i, halves)",
        "gate and up of experts are written under other names",
        "checkpoint/test_export.py",
    ),
    (
        'export-skip-list', 'checkpoint/export/layout.py',
        '"block", (BLOCK, BLOCK), names)',
        '"block", (BLOCK, BLOCK), ())',
        'the list of layers in high precision is empty',
        'checkpoint/test_export.py',
    ),
    (
        "export-rows-of-scales", "checkpoint/export/values.py",
        "else block // height]", "else (block - rows[0]) // height]",
        "the lower half of a fused weight takes the scales of the upper",
        "checkpoint/test_export_run.py", "checkpoint/test_export.py",
    ),
    (
        "export-keeps-codes-of-other-blocks", "checkpoint/export/values.py",
        "return found if bool(same) else None", "return found",
        "codes are kept where their blocks have several scales",
        "checkpoint/test_export_run.py",
    ),
    (
        "export-nan-codes", "checkpoint/export/__init__.py",
        "& 0x7F) == 0x7F", "& 0x7F) == 0xFF",
        "NaN codes are written",
        "checkpoint/test_export.py", "checkpoint/test_export_run.py",
    ),
    (
        'export-shard-sizes', 'checkpoint/export/files.py',
        'if not self.shards or size > left:',
        'if not self.shards or size > largest:',
        'files grow beyond the largest size asked for',
        'checkpoint/test_export_whole.py', 'checkpoint/test_export.py',
    ),
    (
        'export-header-alignment', 'models/headers.py',
        '(-len(text.encode()) % 8)',
        '(-len(text.encode()) % 1)',
        'tensors begin at odd bytes of a file',
        'models/test_headers.py', 'checkpoint/test_export_whole.py', 'checkpoint/test_export.py',
    ),
    (
        "export-ragged-blocks", "checkpoint/export/layout.py",
        "if n % BLOCK and n > BLOCK:", "if n % BLOCK and n > 2 * BLOCK:",
        "a layer whose last block is ragged is written in blocks",
        "checkpoint/test_export.py",
        "checkpoint/test_export_run.py",
    ),
    (
        "convert-lora-prefix", "checkpoint/convert/__init__.py",
        '"base_model.model.model." if lora_base else "model."', '"model." if lora_base else "model."',
        "the base of a LoRA run is written under the names of a plain one",
        "checkpoint/test_convert.py",
    ),
    (
        'convert-nan-codes', 'checkpoint/convert/values.py',
        'check_codes(tensor, codes)',
        'None',
        'NaN codes become values',
        'checkpoint/test_convert.py', 'checkpoint/test_convert_planted.py',
    ),
    (
        "verify-zero-scales", "checkpoint/verify/values.py",
        '("scale-zero", scale == 0, "zero")', '("scale-zero", scale != scale, "zero")',
        "scales of zero pass",
        "checkpoint/test_verify_parts.py", "checkpoint/test_verify.py",
    ),
    (
        'load-zero-scales', 'models/codes.py',
        'torch.isfinite(values) & (values > 0)',
        'torch.isfinite(values)',
        'a folder with scales of zero or below is loaded',
        'models/test_load_fp8.py', 'models/test_quantization.py',
    ),
)  # fmt: skip

area(
    "memory",
    (
        "offload-loses-dtype", "fp8/offloaded.py",
        "torch.empty(0, dtype=saved.dtype, device=here.device)",
        "torch.empty(0, dtype=torch.float32, device=here.device)",
        "what comes back from host memory is read as fp32",
        "fp8/memory/test_offload.py",
    ),
    (
        "offload-misses-a-write", "fp8/offloaded.py",
        "if slot.alias._version != slot.version:", "if False:",
        "a saved tensor that was written to is sent as it is",
        "fp8/memory/test_offload.py",
    ),
    (
        "recompute-draws-again", "fp8/recompute.py",
        "preserve_rng_state=not _is_norm(self)", "preserve_rng_state=False",
        "a recomputed block with dropout drops other elements",
        "fp8/test_recompute.py",
    ),
    (
        "fit-of-a-full-card", "train/fit.py",
        "fitting = [s for s in every if s.over(card) <= 0]",
        "fitting = [s for s in every if s.footprint.total <= card.size]",
        "fit counts on memory that is not free",
        "train/test_fit.py",
    ),
    (
        "fit-states-cross-once", "train/fit.py",
        "seconds += 2 * states / LINK", "seconds += states / LINK / 8",
        "offloaded states are brought in and not out again",
        "train/test_fit.py",
        "cli/test_plan_memory.py",
    ),
    (
        "gradients-in-a-rollout", "train/memory_plan/footprint.py",
        'if name != "gradients" and kinds[name]', "if kinds[name]",
        "gradients are counted while completions are written",
        "rl/test_memory.py",
    ),
    (
        "cache-without-its-slots", "train/memory_plan/rollout.py",
        '"kv_cache": found.held', '"kv_cache": found.cache',
        "what is kept of each sequence is not predicted",
        "rl/test_memory.py",
    ),
)  # fmt: skip

area(
    "LoRA",
    (
        "lora-scale-of-alpha", "adapters/attach.py",
        "lora_alpha=alpha,", "lora_alpha=lora.rank,",
        "adapters are scaled by 1 instead of alpha / rank",
        "adapters/test_attach.py", "adapters/test_layer.py",
    ),
    (
        "lora-dropout-in-eval", "adapters/layer.py",
        "isinstance(drop, nn.Dropout) and drop.training", "isinstance(drop, nn.Dropout)",
        "adapters drop in evaluation",
        "adapters/test_layer.py",
    ),
    (
        "merge-without-scale", "adapters/merge.py",
        "alpha=float(self.layer.scaling[NAME])", "alpha=1.0",
        "an adapter is folded in without alpha / rank",
        "adapters/test_merge.py",
    ),
    (
        "merge-dora-norm", "adapters/merge.py",
        "(m / out.norm(dim=1)).unsqueeze(1)", "(m / out.norm()).unsqueeze(1)",
        "DoRA is folded in by the norm of the whole matrix",
        "adapters/test_merge.py",
    ),
    (
        "merge-accepts-what-is-lost", "adapters/survival.py",
        "self.kept < KEPT or self.drowned > DROWNED", "self.kept < KEPT and self.drowned > DROWNED",
        "an adapter that FP8 rounds away is written",
        "adapters/test_merge.py", "adapters/test_merging.py",
    ),
    (
        "lora-expert-order", "adapters/experts.py",
        "b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)", "b.reshape(b.shape[0], experts, -1).permute(1, 0, 2)",
        "experts take the B of others",
        "adapters/test_experts.py",
    ),
)  # fmt: skip

area(
    "configuration",
    (
        "config-batches", "config/rules.py",
        "train.global_batch % train.micro_batch:", "train.global_batch < train.micro_batch:",
        "a global batch that is no multiple of the micro-batch is taken",
        "config/test_errors.py",
    ),
    (
        "config-warmup", "config/rules.py",
        "if train.warmup >= train.steps:", "if train.warmup > train.steps:",
        "a warmup as long as the run is taken",
        "config/test_errors.py",
    ),
    (
        "config-errors-swallowed", "config/check.py",
        "if problems or config is None:", "if config is None:",
        "a configuration with mended errors is used",
        "config/test_errors.py",
    ),
    (
        "config-override-ignored", "config/merge.py",
        "node[index] = value replaced = [path]",
        "node.setdefault(index, value) if isinstance(node, dict) else None; replaced = [path]",
        "an override of what a file says is ignored",
        "config/test_load.py",
    ),
    (
        "config-recipe-against-codes", "config/rules_lora.py",
        'if recipe not in (*fitting, "off"):', 'if recipe == "auto":',
        "a recipe that multiplies by other codes than those loaded is taken",
        "config/test_lora.py",
    ),
)  # fmt: skip

area(
    "report",
    (
        "verdict-threshold", "report/claims.py",
        "(found.high if worse > 0 else -found.low) <= margin", "found.estimate <= margin",
        "a claim passes by its estimate, however wide its interval",
        "report/test_claims.py",
    ),
    (
        "verdict-noise", "report/verdict.py",
        "return max(found) / total", "return min(found) / total",
        "the noise of a seed is taken as small as it can be",
        "report/test_verdict.py",
    ),
    (
        "verdict-no-gemm", "report/verdict.py",
        "if missing or not counted:", "if missing:",
        "a run without one FP8 GEMM passes",
        "report/test_verdict.py",
        "report/test_compare.py",
        "report/test_page.py",
        "report/test_rundir.py",
        "report/test_lora.py",
    ),
    (
        "verdict-exit-code", "report/judge.py",
        "{FAIL: 1, UNDECIDED: 3}", "{FAIL: 1, UNDECIDED: 0}",
        "a comparison that decides nothing exits with 0",
        "report/test_claims.py", "report/test_compare.py",
    ),
    (
        'compare-reuses-other-runs', 'report/compare.py',
        '_differences(_comparable(load_config(saved)), _comparable(run.cfg))',
        '[]',
        "runs of another configuration are taken for this one's",
        'report/test_compare.py',
    ),
)  # fmt: skip

area(
    "outside the linears",
    (
        "graphs-not-zeroed", "train/graphs.py",
        "torch._foreach_zero_(fresh)", "pass",
        "a step adds to the gradients of the step before",
        "train/test_graphs.py",
    ),
    (
        "graphs-lose-eager-gradients", "train/graphs.py",
        "mine.copy_(p.grad)", "pass",
        "gradients of micro-batches that ran without a graph are lost",
        "train/test_graphs.py",
    ),
    (
        "graphs-uncounted", "train/graphs.py",
        "observe.replayed(found.tape)", "pass",
        "GEMMs of a replay are counted by nobody",
        "train/test_graphs.py",
    ),
    (
        "gather-reduces-fp32", "parallel/shard.py",
        "reduce_dtype=gather", "reduce_dtype=torch.float32",
        "gradients cross the wire in fp32 though BF16 was asked for",
        "parallel/test_gather.py",
    ),
    (
        "attention-slowest", "train/attention.py",
        "best = min(times", "best = max(times",
        "the slowest kernel of attention is taken",
        "train/test_attention.py",
    ),
    (
        "budget-claims-twice", "bench/budget.py",
        "if node not in self._claimed and", "if",
        "attention's backward takes that of the layers within it",
        "bench/test_budget.py",
    ),
)  # fmt: skip
