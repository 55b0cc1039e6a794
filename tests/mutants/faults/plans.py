"""Faults in what a run is told and tells, and in where weights lie: plans, proofs, files, configuration, reports."""

from faults.fault import area

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
        "super()._load_from_state_dict(*args, **kwargs) clock.record_edit()",
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
        "tensor._version, tensor.data_ptr(),", "tensor.data_ptr(),",
        "an input written to in place between two layers keeps its codes",
        "fp8/dense/test_inputs.py",
    ),
    (
        "shared-input-dtype", "fp8/shared_input.py",
        "tensor.dtype, x.dtype, device,", "tensor.dtype, device,",
        "codes made under another autocast dtype are shared",
        "fp8/dense/test_inputs.py",
    ),
    (
        "shared-input-never-forgotten", "fp8/shared_input.py",
        "for cache in list(_thread_caches):", "for cache in ():",
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
        'check_requests(policy, rows, {row.name for row, _, why_not in layer_decisions if why_not is None}, step)',
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
        "for rule in rules: decision = decision.overlay(", "for rule in reversed(rules): decision = decision.overlay(",
        "of two rules the first wins",
        "fp8/test_plan.py",
    ),
    (
        "projector-by-its-format", "fp8/policy.py",
        "(level is None or level.recipe is None)", "level is None",
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
        '(saved.gpu, saved.capability) != (current.gpu, current.capability)',
        'saved.gpu != current.gpu',
        'a plan of a GPU with another compute capability is taken',
        'fp8/planning/test_file.py', 'train/test_planning.py',
    ),
    (
        "plan-file-shapes", "fp8/plan_file.py",
        "if expected.get(n) != present.get(n)]", "if (n in expected) != (n in present)]",
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
        'if any(due.values()) and _count_calls(ran, "recompute") > forward:', "if False:",
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
        "fitting = [s for s in candidates if s.excess(card) <= 0]",
        "fitting = [s for s in candidates if s.footprint.total <= card.size]",
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
        "gradients-in-a-rollout", "train/estimate/memory/footprint.py",
        'if name != "gradients" and kinds[name]', "if kinds[name]",
        "gradients are counted while completions are written",
        "rl/test_memory.py",
    ),
    (
        "cache-without-its-slots", "train/estimate/memory/rollout.py",
        '"kv_cache": selected.held', '"kv_cache": selected.cache',
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
        "self.kept < MIN_KEPT or self.noise_ratio > MAX_NOISE_RATIO",
        "self.kept < MIN_KEPT and self.noise_ratio > MAX_NOISE_RATIO",
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
    "exports",
    (
        "export-smallest-scale", "checkpoint/export/export.py",
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
        "return merged if bool(same) else None", "return merged",
        "codes are kept where their blocks have several scales",
        "checkpoint/test_export_run.py",
    ),
    (
        "export-nan-codes", "checkpoint/export/export.py",
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
        'export-header-alignment', 'models/folder/headers.py',
        '(-len(text.encode()) % 8)',
        '(-len(text.encode()) % 1)',
        'tensors begin at odd bytes of a file',
        'models/test_headers.py', 'checkpoint/test_export_whole.py', 'checkpoint/test_export.py',
    ),
    (
        "export-ragged-blocks", "checkpoint/export/layout.py",
        "n > BLOCK and (has_experts", "n > 2 * BLOCK and (has_experts",
        "a layer whose last block is ragged is written in blocks",
        "checkpoint/test_export_formats.py",
        "checkpoint/test_export.py",
        "checkpoint/test_export_run.py",
    ),
    (
        "convert-lora-prefix", "checkpoint/convert/convert.py",
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
        'load-zero-scales', 'models/weights/fp8_codes.py',
        'torch.isfinite(values) & (values > 0)',
        'torch.isfinite(values)',
        'a folder with scales of zero or below is loaded',
        'models/test_load_fp8.py', 'models/test_quantization.py',
    ),
)  # fmt: skip

area(
    "configuration",
    (
        "config-batches", "config/rules/general.py",
        "train.global_batch % train.micro_batch:", "train.global_batch < train.micro_batch:",
        "a global batch that is no multiple of the micro-batch is taken",
        "config/test_errors.py",
    ),
    (
        "config-warmup", "config/rules/general.py",
        "train.warmup >= train.steps:", "train.warmup > train.steps:",
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
        "config-recipe-against-codes", "config/rules/lora.py",
        'if recipe not in (*fitting, "off"):', 'if recipe == "auto":',
        "a recipe that multiplies by other codes than those loaded is taken",
        "config/test_lora.py",
    ),
)  # fmt: skip

area(
    "report",
    (
        "verdict-threshold", "report/evidence/claims.py",
        "(interval.high if worse > 0 else -interval.low) <= margin", "interval.estimate <= margin",
        "a claim passes by its estimate, however wide its interval",
        "report/test_claims.py",
    ),
    (
        "verdict-noise", "report/evidence/trust_table.py",
        "return max(bounds) / total", "return min(bounds) / total",
        "the noise of a seed is taken as small as it can be",
        "report/test_trust_table.py",
    ),
    (
        "verdict-no-gemm", "report/evidence/trust_table.py",
        "if missing or not counted:", "if missing:",
        "a run without one FP8 GEMM passes",
        "report/test_trust_table.py",
        "report/test_compare.py",
        "report/test_report_page.py",
        "report/test_run_reader.py",
        "report/test_lora.py",
    ),
    (
        "verdict-exit-code", "report/trial/judge.py",
        "{FAIL: 1, UNDECIDED: 3}", "{FAIL: 1, UNDECIDED: 0}",
        "a comparison that decides nothing exits with 0",
        "report/test_claims.py", "report/test_compare.py",
    ),
    (
        'compare-reuses-other-runs', 'report/trial/reuse.py',
        '_differences(comparable_settings(load_config(saved)), comparable_settings(run.cfg))',
        '[]',
        "runs of another configuration are taken for this one's",
        'report/test_compare.py',
    ),
)  # fmt: skip
